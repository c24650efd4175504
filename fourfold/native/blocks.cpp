/* The memory of large tensors: an allocator for torch to use on a CPU.

   One range of addresses is reserved, and blocks are cut from it: each from the smallest gap it fits
   into, and gaps beside each other become one. So a freed block is taken again by the next tensor of
   its size. glibc, asked for aligned memory, wants a little more than that size, and passes over
   just the gap a tensor of the same size has left: of a step of GPT-2 124M a sixth of all memory was
   such gaps.

   What is small, or finds no gap any more, comes from the allocator torch had. Pages stay with the
   process, for the next step needs them again. They are of the usual size: those of 2 MB make
   products a hundredth faster, and on virtual machines cost eight times as much when first used. */
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>

#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

namespace {

constexpr size_t LARGE = 1 << 18; /* bytes of the smallest tensors that come from here */
constexpr size_t LINE = 64;       /* of the cache */

/* Whole lines, and five more: without them tensors of a power of two would all begin at the same
   place of a page, and compete for the same lines of the cache. */
size_t padded(size_t size) { return (size + LINE - 1) / LINE * LINE + 5 * LINE; }

class Range {
 public:
  Range(char *first, size_t size) : first(first), last(first + size) { add(first, size); }

  std::mutex mutex;

  bool holds(void *block) const { return first <= block && block < last; }

  void *take(size_t size) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = by_size.lower_bound({size, nullptr});
    if (found == by_size.end()) return nullptr;
    auto [length, at] = *found;
    forget(at, length);
    if (length > size) note(at + size, length - size);
    blocks[at] = size;
    return at;
  }

  void give_back(void *block) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = blocks.find(block);
    add(static_cast<char *>(block), found->second);
    blocks.erase(found);
  }

 private:
  char *const first, *const last;
  std::map<char *, size_t> gaps; /* by address */
  std::set<std::pair<size_t, char *>> by_size;
  std::unordered_map<void *, size_t> blocks;

  /* A gap, one with those beside it. */
  void add(char *at, size_t size) {
    auto after = gaps.lower_bound(at);
    if (after != gaps.begin()) {
      auto [before, length] = *std::prev(after);
      if (before + length == at) {
        forget(before, length);
        at = before, size += length;
      }
    }
    if (after != gaps.end() && at + size == after->first) {
      auto [next, length] = *after;
      forget(next, length);
      size += length;
    }
    note(at, size);
  }

  void note(char *at, size_t size) { gaps[at] = size, by_size.insert({size, at}); }
  void forget(char *at, size_t size) { gaps.erase(at), by_size.erase({size, at}); }
};

/* Never destroyed: some tensors end after everything else. */
Range *range;
c10::Allocator *others; /* the one torch had */

/* One way back for both, since torch may ask for it apart from the block (`raw_deleter`). */
void give_back(void *block) {
  if (!range->holds(block)) return others->raw_deallocate(block);
  c10::profiledCPUMemoryReporter().Delete(block);
  range->give_back(block);
}

struct Blocks final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void *block = size >= LARGE ? range->take(padded(size)) : nullptr;
    if (block)
      c10::profiledCPUMemoryReporter().New(block, size);
    else
      block = others->raw_allocate(size);
    return {block, block, &give_back, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void *to, const void *from, size_t count) const override {
    default_copy_data(to, from, count);
  }
};

}  // namespace

/* Reserve `size` bytes of addresses and have torch take large tensors from them from now on.
   Returns 1 where the kernel refuses, and on the second call. */
extern "C" int take_over_large_tensors(size_t size) {
  if (range) return 1;
  void *reserved = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return 1;
  range = new Range(static_cast<char *>(reserved), size);
  others = c10::GetCPUAllocator();
  /* A process forked while another thread allocates would find the lock closed forever. */
  pthread_atfork([] { range->mutex.lock(); }, [] { range->mutex.unlock(); },
                 [] { range->mutex.unlock(); });
  c10::SetCPUAllocator(new Blocks, 255);
  return 0;
}
