// Choice of the instruction set at run time, and the threads.
#include <pthread.h>
#include <string.h>

#include "api.h"

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

enum { DTYPES = 4 };
const acutance_kernel* named = nullptr;  // for everything
const acutance_kernel* chosen[ACUTANCE_PASSES][DTYPES] = {};
double row_cost[DTYPES] = {};

bool is_dtype(int64_t dtype) { return dtype >= 0 && dtype < DTYPES; }

const acutance_kernel* current() {
  const acutance_kernel* kernel = __atomic_load_n(&named, __ATOMIC_RELAXED);
  return kernel ? kernel : sets().count ? sets().kernel[0] : nullptr;
}

// The kernel of a pass; null where there is none at all, or no such dtype.
const acutance_kernel* kernel_of(int pass, int64_t dtype) {
  if (!is_dtype(dtype)) return nullptr;
  if (__atomic_load_n(&named, __ATOMIC_RELAXED)) return current();
  const acutance_kernel* kernel = __atomic_load_n(&chosen[pass][dtype], __ATOMIC_RELAXED);
  return kernel ? kernel : current();
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
    __atomic_store_n(&named, (const acutance_kernel*)nullptr, __ATOMIC_RELAXED);
    return 0;
  }
  for (int i = 0; i < sets().count; ++i)
    if (!strcmp(name, sets().kernel[i]->name)) {
      __atomic_store_n(&named, sets().kernel[i], __ATOMIC_RELAXED);
      return 0;
    }
  return 2;
}

void acutance_use_threads(acutance_parallel given) { parallel = given ? given : own_threads; }

int acutance_forward(const acutance_call* call, const acutance_sums* sums) {
  if (call->abi != ACUTANCE_ABI) return 1;
  const acutance_kernel* kernel = kernel_of(ACUTANCE_FORWARD, call->dtype);
  if (!kernel) return 2;
  // what a row costs was measured for what was chosen, not for what is named
  double cost = 0;
  if (!__atomic_load_n(&named, __ATOMIC_RELAXED))
    __atomic_load(&row_cost[call->dtype], &cost, __ATOMIC_RELAXED);
  if (!kernel->few_queries(call, sums, cost)) return kernel->forward(call, sums, parallel);
  return kernel_of(ACUTANCE_DECODE, call->dtype)->decode(call, sums, parallel);
}

int acutance_backward(const acutance_call* call, const acutance_gradients* gradients) {
  if (call->abi != ACUTANCE_ABI) return 1;
  const acutance_kernel* kernel = kernel_of(ACUTANCE_BACKWARD, call->dtype);
  return kernel ? kernel->backward(call, gradients, parallel) : 2;
}

int acutance_ragged(const acutance_ragged_call* call, const acutance_stored_head* stored) {
  if (call->abi != ACUTANCE_ABI) return 1;
  const acutance_kernel* kernel = kernel_of(ACUTANCE_DECODE, call->dtype);
  return kernel ? kernel->ragged(call, stored, parallel) : 2;
}

int acutance_choose(int64_t pass, int64_t dtype, int64_t place) {
  if (pass < 0 || pass >= ACUTANCE_PASSES || !is_dtype(dtype)) return 2;
  if (place < -1 || place >= sets().count) return 2;
  const acutance_kernel* kernel = place < 0 ? nullptr : sets().kernel[place];
  __atomic_store_n(&chosen[pass][dtype], kernel, __ATOMIC_RELAXED);
  return 0;
}

int acutance_row_cost(int64_t dtype, double cost) {
  if (!is_dtype(dtype) || !(cost >= 0)) return 2;
  __atomic_store(&row_cost[dtype], &cost, __ATOMIC_RELAXED);
  return 0;
}

int acutance_run(int64_t place, int64_t pass, const acutance_call* call, const void* result) {
  if (call->abi != ACUTANCE_ABI) return 1;
  if (place < 0 || place >= sets().count) return 2;
  const acutance_kernel* kernel = sets().kernel[place];
  switch (pass) {
    case ACUTANCE_FORWARD: return kernel->forward(call, (const acutance_sums*)result, parallel);
    case ACUTANCE_DECODE: return kernel->decode(call, (const acutance_sums*)result, parallel);
    case ACUTANCE_BACKWARD:
      return kernel->backward(call, (const acutance_gradients*)result, parallel);
  }
  return 2;
}

int acutance_structure(const acutance_call* call, const acutance_places* places) {
  if (call->abi != ACUTANCE_ABI) return 1;
  return current() ? current()->structure(call, places, parallel) : 2;
}

void acutance_exp(int64_t dtype, const void* from, void* to, int64_t count) {
  if (current()) current()->exp(dtype, from, to, count);
}

}  // extern "C"

// Which compiler made this library.
#if defined(__clang__)
#define NAME "Clang " __clang_version__
#elif defined(__GNUC__)
#define NAME "GCC " __VERSION__
#else
#define NAME "an unknown compiler"
#endif

extern "C" ACUTANCE_EXPORT const char* acutance_compiler() { return NAME; }
