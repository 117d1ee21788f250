// Choice of the instruction set at run time, and the threads.
#include <pthread.h>
#include <string.h>
#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif

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

// Processors whose products of bfloat16 pairs (vdpbf16ps) take as long as one float32 product, and
// so do twice the work. On Intel they do half of float32's: on the Xeon (Sapphire Rapids class) that
// this kernel was measured on, and on the Emerald Rapids of github.com/libxsmm/tpp-mlir/pull/1025.
// What is not listed multiplies in float32.
const struct {
  const char* vendor;
  int family;
} FULL_RATE_PAIRS[] = {
    {"AuthenticAMD", 25},  // Zen 4 (Zen 3 has none): github.com/iree-org/iree/pull/15089, and here
    {"AuthenticAMD", 26},  // Zen 5: a goal of 95 % of libxsmm's kernel in the pull request above
};

bool has_fast_pairs(const char* vendor, int family) {
  for (const auto& known : FULL_RATE_PAIRS)
    if (!strcmp(vendor, known.vendor) && family == known.family) return true;
  return false;
}

// Zen 4 computes 512 bits in two halves. Where each key and value of at most 64 float32 numbers is
// read for one query alone, AVX2 then takes 0.85 to 0.98 of AVX-512's time (256 to 4096 keys, one
// thread); with more queries to a key, wider keys or 16-bit ones it takes longer.
bool avx2_decodes_lone_queries(const char* vendor, int family) {
  return !strcmp(vendor, "AuthenticAMD") && family == 25;
}
bool lone_query(const acutance_call& call) {
  return call.dtype == ACUTANCE_F32 && call.group * call.queries == 1 && call.width <= 64;
}

// Kernels this machine can run, widest first.
struct Sets {
  const acutance_kernel* kernel[5];
  const acutance_kernel* for_lone_queries = nullptr;  // null: the same as for all others
  int count = 0, usual = 0;
  char names[80];

  Sets() {
    char vendor[13] = {};
    int family = 0;
#if defined(__x86_64__) || defined(__i386__)
    __builtin_cpu_init();
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid(0, &a, &b, &c, &d)) {
      memcpy(vendor, &b, 4);
      memcpy(vendor + 4, &d, 4);
      memcpy(vendor + 8, &c, 4);
    }
    if (__get_cpuid(1, &a, &b, &c, &d)) {
      family = int(a >> 8 & 15);
      if (family == 15) family += int(a >> 20 & 255);
    }
#endif
#if defined(ACUTANCE_HAVE_AVX512_BF16)
    if (has_avx512_bf16()) kernel[count++] = &acutance_kernel_avx512_bf16;
#endif
#if defined(ACUTANCE_HAVE_AVX512)
    if (has_avx512()) kernel[count++] = &acutance_kernel_avx512;
#endif
#if defined(ACUTANCE_HAVE_AVX2)
    if (has_avx2()) {
      if (count && avx2_decodes_lone_queries(vendor, family))
        for_lone_queries = &acutance_kernel_avx2;
      kernel[count++] = &acutance_kernel_avx2;
    }
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
    usual = usual_on(vendor, family);
  }

  // The widest; but not what differs from the next by pairs alone where those are slow.
  int usual_on(const char* vendor, int family) const {
    const bool pairs = count > 1 && !strcmp(kernel[0]->name, "avx512_bf16");
    return pairs && !has_fast_pairs(vendor, family);
  }
};

const Sets& sets() {
  static const Sets found;
  return found;
}

const acutance_kernel* named = nullptr;

const acutance_kernel* current() {
  const acutance_kernel* kernel = __atomic_load_n(&named, __ATOMIC_RELAXED);
  return kernel ? kernel : sets().count ? sets().kernel[sets().usual] : nullptr;
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

int acutance_usual_cpu(const char* vendor, int family) { return sets().usual_on(vendor, family); }

void acutance_use_threads(acutance_parallel given) { parallel = given ? given : own_threads; }

int acutance_forward(const acutance_call* call, const acutance_sums* sums) {
  if (call->abi != ACUTANCE_ABI) return 1;
  const acutance_kernel* kernel = current();
  if (!kernel || uint64_t(call->dtype) > ACUTANCE_F16) return 2;
  if (!kernel->few_queries(call, sums)) return kernel->forward(call, sums, parallel);
  const bool free = !__atomic_load_n(&named, __ATOMIC_RELAXED);
  if (free && sets().for_lone_queries && lone_query(*call)) kernel = sets().for_lone_queries;
  return kernel->decode(call, sums, parallel);
}

int acutance_backward(const acutance_call* call, const acutance_gradients* gradients) {
  if (call->abi != ACUTANCE_ABI) return 1;
  return current() ? current()->backward(call, gradients, parallel) : 2;
}

int acutance_ragged(const acutance_ragged_call* call, const acutance_stored_head* stored) {
  if (call->abi != ACUTANCE_ABI) return 1;
  return current() ? current()->ragged(call, stored, parallel) : 2;
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
