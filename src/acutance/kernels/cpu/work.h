// How a call is shared out: items by one atomic counter, scratch memory, the processor's mode.
#ifndef ACUTANCE_WORK_H
#define ACUTANCE_WORK_H

#include <stdlib.h>

#include "api.h"
#include "vec.h"

namespace {

// Memory of one thread, cut into pieces that begin on a cache line.
struct Arena {
  char* base = nullptr;
  size_t used = 0, size = 0;

  explicit Arena(size_t bytes) : size(bytes + 4096) {
    void* made = nullptr;
#if defined(_WIN32)
    made = _aligned_malloc(size, 64);
#else
    if (posix_memalign(&made, 64, size)) made = nullptr;
#endif
    base = (char*)made;
  }
  ~Arena() {
#if defined(_WIN32)
    _aligned_free(base);
#else
    free(base);
#endif
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  template <class X>
  X* take(int64_t count) {
    X* piece = (X*)(base + used);
    used += (size_t(count) * sizeof(X) + 63) & ~size_t(63);
    return piece;
  }
  static size_t bytes(int64_t count, size_t each) { return (size_t(count) * each + 63) & ~size_t(63); }
};

// Denormals count as zero while this lives: a weight of 1e-40 must not cost a hundred cycles.
struct FlushDenormals {
#if defined(__SSE2__)
  unsigned before = __builtin_ia32_stmxcsr();
  FlushDenormals() { __builtin_ia32_ldmxcsr(before | 0x8040); }
  ~FlushDenormals() { __builtin_ia32_ldmxcsr(before); }
#elif defined(__aarch64__)
  uint64_t before;
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before));
    asm volatile("msr fpcr, %0" : : "r"(before | (1ull << 24)));
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" : : "r"(before)); }
#else
  FlushDenormals() {}
  ~FlushDenormals() {}
#endif
};

// Call `item(thread's own state, i)` once for each i < items, on as many threads.
// State is made from `shared` by each thread: State(shared), with `bool ready`.
template <class State, class Shared>
int share_out(const Shared& shared, int64_t items, int64_t threads, acutance_parallel parallel) {
  struct Job {
    const Shared* shared;
    int64_t items, next, failed;
    static void body(void* data) {
      Job* job = (Job*)data;
      int64_t i = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
      if (i >= job->items) return;
      FlushDenormals mode;
      State state(*job->shared);
      if (!state.ready) {
        __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
        return;
      }
      for (; i < job->items; i = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) state.item(i);
    }
  } job = {&shared, items, 0, 0};
  if (threads > items) threads = items;
  if (threads <= 1)
    Job::body(&job);
  else
    parallel(Job::body, &job, unsigned(threads), 0);
  return job.failed ? 3 : 0;
}

}  // namespace
#endif
