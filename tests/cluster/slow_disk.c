/* A slow disk for one process: preloaded, it delays what is written to files and brought to disk.

   The file named by SLOW_DISK holds bytes per second and seconds per sync; without it nothing is
   delayed. Sockets and pipes are left alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static void delayed(int fd, size_t bytes, int syncs) {
  struct stat status;
  double rate = 0, sync = 0;
  const char *name = getenv("SLOW_DISK");
  FILE *control;
  if (!name || fstat(fd, &status) || !S_ISREG(status.st_mode)) return;
  if (!(control = fopen(name, "r"))) return;
  if (fscanf(control, "%lf %lf", &rate, &sync) != 2) rate = sync = 0;
  fclose(control);
  double seconds = (rate > 0 ? bytes / rate : 0) + (syncs ? sync : 0);
  struct timespec pause = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
  nanosleep(&pause, 0);
}

ssize_t write(int fd, const void *data, size_t bytes) {
  static ssize_t (*real)(int, const void *, size_t);
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, "write");
  if (bytes >= 4096) delayed(fd, bytes, 0);
  return real(fd, data, bytes);
}

int fsync(int fd) {
  static int (*real)(int);
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, "fsync");
  delayed(fd, 0, 1);
  return real(fd);
}
