// One compilation for one instruction set, named by ACUTANCE_ISA.
#include "api.h"

#include "backward.h"
#include "decode.h"
#include "forward.h"
#include "ragged.h"
#include "structure.h"

namespace {

// How many times as long a row with keys in its lanes takes as one lane of a group of queries, by
// dtype: F32, F64, BF16, F16. Measured on an AMD EPYC (Zen 4, one thread, width 64) against 512 keys,
// 8 rows of the one and 64 of the other; the least times of 40 rounds.
#if defined(__AVX512F__)
constexpr double ROW_COST[] = {1.7, 2.2, 1.7, 1.5};
#elif defined(__AVX2__)
constexpr double ROW_COST[] = {2.2, 2.2, 2.2, 1.4};
#elif defined(__x86_64__)
constexpr double ROW_COST[] = {1.3, 1.2, 1.7, 9.7};  // float16 has no instructions there
#else
constexpr double ROW_COST[] = {1.5, 1.5, 1.5, 1.5};  // not measured
#endif
constexpr double ROW_COST_OF_PAIRS = 2.5;

// Whether queries would fill so few lanes that keys had better lie there. Against few keys what
// counts is starting a row there, as long as 64 keys, and a whole lane group here, as long as 400.
// Keys are counted by their gaps here only.
int run_few_queries(const acutance_call* call, const acutance_sums* sums) {
  if (sums->gaps) return 0;
  const int64_t lanes = call->dtype == ACUTANCE_F64 ? LANES<double> : LANES<float>;
  const int64_t paid = (call->queries + lanes - 1) / lanes * lanes;
  const bool pairs =
      ACUTANCE_DOTS && call->dtype == ACUTANCE_BF16 && call->width % 2 == 0 && !sums->noise;
  const double cost = pairs ? ROW_COST_OF_PAIRS : ROW_COST[call->dtype];
  return double(call->queries) * double(call->keys + 64) <=
         double(paid) / cost * double(call->keys) + 400.0;
}

int run_decode(const acutance_call* call, const acutance_sums* sums, acutance_parallel parallel) {
  switch (call->dtype) {
    case ACUTANCE_F32: return decode<float, float>(*call, *sums, parallel);
    case ACUTANCE_F64: return decode<double, double>(*call, *sums, parallel);
    case ACUTANCE_BF16: return decode<float, bf16>(*call, *sums, parallel);
    case ACUTANCE_F16: return decode<float, f16>(*call, *sums, parallel);
  }
  return 2;
}

int run_forward(const acutance_call* call, const acutance_sums* sums, acutance_parallel parallel) {
  switch (call->dtype) {
    case ACUTANCE_F32: return forward<float, float, WideProducts<float, float>>(*call, *sums, parallel);
    case ACUTANCE_F64:
      return forward<double, double, WideProducts<double, double>>(*call, *sums, parallel);
    case ACUTANCE_BF16:
#if ACUTANCE_DOTS
      // weights rounded to bfloat16 are good enough for the output, not for the noise sums
      if (call->width % 2 == 0 && !sums->noise)
        return forward<float, bf16, PairProducts>(*call, *sums, parallel);
#endif
      return forward<float, bf16, WideProducts<float, bf16>>(*call, *sums, parallel);
    case ACUTANCE_F16: return forward<float, f16, WideProducts<float, f16>>(*call, *sums, parallel);
  }
  return 2;
}

int run_backward(const acutance_call* call, const acutance_gradients* gradients,
                 acutance_parallel parallel) {
  switch (call->dtype) {
    case ACUTANCE_F32: return backward<float, float>(*call, *gradients, parallel);
    case ACUTANCE_F64: return backward<double, double>(*call, *gradients, parallel);
    case ACUTANCE_BF16: return backward<float, bf16>(*call, *gradients, parallel);
    case ACUTANCE_F16: return backward<float, f16>(*call, *gradients, parallel);
  }
  return 2;
}

int run_ragged(const acutance_ragged_call* call, const acutance_stored_head* stored,
               acutance_parallel parallel) {
  switch (call->dtype) {
    case ACUTANCE_F32: return ragged<float>(*call, stored, parallel);
    case ACUTANCE_BF16: return ragged<bf16>(*call, stored, parallel);
    case ACUTANCE_F16: return ragged<f16>(*call, stored, parallel);
  }
  return 2;
}

int run_structure(const acutance_call* call, const acutance_places* places,
                  acutance_parallel parallel) {
  switch (call->dtype) {
    case ACUTANCE_F32: return structure<float, float>(*call, *places, parallel);
    case ACUTANCE_F64: return structure<double, double>(*call, *places, parallel);
    case ACUTANCE_BF16: return structure<float, bf16>(*call, *places, parallel);
    case ACUTANCE_F16: return structure<float, f16>(*call, *places, parallel);
  }
  return 2;
}

template <class T>
void exp_all(const T* from, T* to, int64_t count) {
  for (int64_t i = 0; i < count; i += VL<T>) {
    T room[VL<T>] = {};
    const int64_t filled = imin(VL<T>, count - i);
    memcpy(room, from + i, sizeof(T) * size_t(filled));
    store(room, vexp(load(room)));
    memcpy(to + i, room, sizeof(T) * size_t(filled));
  }
}

void run_exp(int64_t dtype, const void* from, void* to, int64_t count) {
  if (dtype == ACUTANCE_F64)
    exp_all((const double*)from, (double*)to, count);
  else
    exp_all((const float*)from, (float*)to, count);
}

}  // namespace

#define ACUTANCE_JOIN2(a, b) a##b
#define ACUTANCE_JOIN(a, b) ACUTANCE_JOIN2(a, b)
#define ACUTANCE_TEXT2(a) #a
#define ACUTANCE_TEXT(a) ACUTANCE_TEXT2(a)

extern "C" const acutance_kernel ACUTANCE_JOIN(acutance_kernel_, ACUTANCE_ISA);
extern "C" const acutance_kernel ACUTANCE_JOIN(acutance_kernel_, ACUTANCE_ISA) = {
    ACUTANCE_TEXT(ACUTANCE_ISA), run_few_queries, run_forward, run_decode, run_backward,
    run_ragged, run_structure, run_exp};
