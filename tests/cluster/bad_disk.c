/* A bad disk for one machine: preloaded, it delays or refuses what processes write to files.

   The file named by BAD_DISK says which: bytes per second, seconds per sync (0: not delayed) and,
   if it goes on, a path: files below it have no room any more (ENOSPC). Without that file all is
   well. Sockets and pipes are left alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static int is_below(int fd, const char *place) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  return length > 0 && strlen(place) <= (size_t)length && !strncmp(path, place, strlen(place));
}

/* 0, or -1 with errno set where the write is to fail. */
static int before(int fd, size_t bytes, int syncs) {
  struct stat status;
  double rate = 0, sync = 0;
  char place[4096] = "";
  const char *name = getenv("BAD_DISK");
  FILE *control;
  if (!name || fstat(fd, &status) || !S_ISREG(status.st_mode)) return 0;
  if (!(control = fopen(name, "r"))) return 0;
  if (fscanf(control, "%lf %lf %4095s", &rate, &sync, place) < 2) rate = sync = 0;
  fclose(control);
  if (place[0] && !syncs && is_below(fd, place)) {
    errno = ENOSPC;
    return -1;
  }
  double seconds = (rate > 0 && bytes >= 4096 ? bytes / rate : 0) + (syncs ? sync : 0);
  struct timespec pause = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
  if (seconds > 0) nanosleep(&pause, 0);
  return 0;
}

ssize_t write(int fd, const void *data, size_t bytes) {
  static ssize_t (*real)(int, const void *, size_t);
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, "write");
  return before(fd, bytes, 0) ? -1 : real(fd, data, bytes);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
  static ssize_t (*real)(int, const struct iovec *, int);
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, "writev");
  return before(fd, 0, 0) ? -1 : real(fd, parts, count);
}

ssize_t pwrite64(int fd, const void *data, size_t bytes, off64_t offset) {
  static ssize_t (*real)(int, const void *, size_t, off64_t);
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, "pwrite64");
  return before(fd, bytes, 0) ? -1 : real(fd, data, bytes, offset);
}

int fsync(int fd) {
  static int (*real)(int);
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, "fsync");
  before(fd, 0, 1);
  return real(fd);
}
