// Choice of the instruction set at run time, and the threads.
#include <pthread.h>
#include <string.h>

#include "kernel.h"

extern "C" {
#if defined(ACUTANCE_HAVE_AVX512_BF16)
extern const acutance_kernel acutance_kernel_avx512_bf16;
#endif
#if defined(ACUTANCE_HAVE_AVX512)
extern const acutance_kernel acutance_kernel_avx512;
#endif
#if defined(ACUTANCE_HAVE_AVX2)
extern const acutance_kernel acutance_kernel_avx2;
#endif
#if defined(ACUTANCE_HAVE_NEON)
extern const acutance_kernel acutance_kernel_neon;
#endif
#if defined(ACUTANCE_HAVE_BASELINE)
extern const acutance_kernel acutance_kernel_baseline;
#endif
}

namespace {

#if defined(__x86_64__) || defined(__i386__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif

// Kernels this machine can run, best first.
struct Sets {
  const acutance_kernel* kernel[5];
  int count = 0;
  char names[80];

  Sets() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_cpu_init();
#endif
#if defined(ACUTANCE_HAVE_AVX512_BF16)
    if (has_avx512_bf16()) kernel[count++] = &acutance_kernel_avx512_bf16;
#endif
#if defined(ACUTANCE_HAVE_AVX512)
    if (has_avx512()) kernel[count++] = &acutance_kernel_avx512;
#endif
#if defined(ACUTANCE_HAVE_AVX2)
    if (has_avx2()) kernel[count++] = &acutance_kernel_avx2;
#endif
#if defined(ACUTANCE_HAVE_NEON)
    kernel[count++] = &acutance_kernel_neon;
#endif
#if defined(ACUTANCE_HAVE_BASELINE)
    kernel[count++] = &acutance_kernel_baseline;
#endif
    names[0] = 0;
    for (int i = 0; i < count; ++i) {
      if (i) strcat(names, " ");
      strcat(names, kernel[i]->name);
    }
  }
};

const Sets& sets() {
  static const Sets found;
  return found;
}

const acutance_kernel* chosen = nullptr;

const acutance_kernel* current() {
  const acutance_kernel* kernel = __atomic_load_n(&chosen, __ATOMIC_RELAXED);
  return kernel ? kernel : sets().count ? sets().kernel[0] : nullptr;
}

struct Share {
  void (*body)(void*);
  void* data;
};

void* run_share(void* data) {
  Share* share = (Share*)data;
  share->body(share->data);
  return nullptr;
}

// Threads of our own, for where no OpenMP library was given: made for the call and joined.
void own_threads(void (*body)(void*), void* data, unsigned threads, unsigned) {
  enum { MOST = 256 };
  pthread_t made[MOST];
  Share share = {body, data};
  unsigned count = 0;
  for (; count + 1 < threads && count < MOST; ++count)
    if (pthread_create(&made[count], nullptr, run_share, &share)) break;
  body(data);
  for (unsigned i = 0; i < count; ++i) pthread_join(made[i], nullptr);
}

acutance_parallel parallel = own_threads;

}  // namespace

extern "C" {

int64_t acutance_abi(void) { return ACUTANCE_ABI; }

const char* acutance_cpus(void) { return sets().names; }

const char* acutance_cpu(void) { return current() ? current()->name : ""; }

int acutance_use_cpu(const char* name) {
  if (!name) {
    __atomic_store_n(&chosen, (const acutance_kernel*)nullptr, __ATOMIC_RELAXED);
    return 0;
  }
  for (int i = 0; i < sets().count; ++i)
    if (!strcmp(name, sets().kernel[i]->name)) {
      __atomic_store_n(&chosen, sets().kernel[i], __ATOMIC_RELAXED);
      return 0;
    }
  return 2;
}

void acutance_use_threads(acutance_parallel given) { parallel = given ? given : own_threads; }

int acutance_forward(const acutance_call* call, const acutance_sums* sums) {
  if (call->abi != ACUTANCE_ABI) return 1;
  return current() ? current()->forward(call, sums, parallel) : 2;
}

int acutance_backward(const acutance_call* call, const acutance_gradients* gradients) {
  if (call->abi != ACUTANCE_ABI) return 1;
  return current() ? current()->backward(call, gradients, parallel) : 2;
}

void acutance_exp(int64_t dtype, const void* from, void* to, int64_t count) {
  if (current()) current()->exp(dtype, from, to, count);
}

}  // extern "C"
