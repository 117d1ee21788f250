// One compilation for one instruction set, named by ACUTANCE_ISA.
#include "kernel.h"

#include "forward.h"

namespace {

int run_forward(const acutance_call* call, const acutance_sums* sums, acutance_parallel parallel) {
  switch (call->dtype) {
    case ACUTANCE_F32: return forward<float, float>(*call, *sums, parallel);
    case ACUTANCE_F64: return forward<double, double>(*call, *sums, parallel);
    case ACUTANCE_BF16: return forward<float, bf16>(*call, *sums, parallel);
    case ACUTANCE_F16: return forward<float, f16>(*call, *sums, parallel);
  }
  return 2;
}

int run_backward(const acutance_call*, const acutance_gradients*, acutance_parallel) { return 2; }

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
    ACUTANCE_TEXT(ACUTANCE_ISA), run_forward, run_backward, run_exp};
