// Metrics of rows from their sums: what acutance.rowstats computes in many operations, in one.
#include <math.h>

#include "api.h"

namespace {

// The sums of one row, whatever their type.
struct Row {
  double n, m, Z, U, W, Q, M2, first;
};

double entropy(const Row& r) { return log(r.Z) - r.U / r.Z; }

double collision(const Row& r) { return r.Q / (r.Z * r.Z); }

double logit_std(const Row& r) {
  const double variance = r.M2 / r.n;
  return variance > 0 ? sqrt(variance) : variance;
}

// One metric of every row; what a row without a key has is its own.
template <class T, class F>
void each(const void* rows, void* out, int64_t count, double without, F metric) {
  const int64_t* n = (const int64_t*)rows;
  const T* field = (const T*)(n + 2 * count);  // behind n and first_index
  const T *m = field, *Z = m + count, *U = Z + count, *W = U + count, *Q = W + count;
  const T *M2 = Q + 2 * count, *first = M2 + 2 * count;  // mean and depth lie between
  T* to = (T*)out;
  for (int64_t i = 0; i < count; ++i) {
    const Row row = {double(n[i]), m[i], Z[i], U[i], W[i], Q[i], M2[i], first[i]};
    to[i] = T(n[i] ? metric(row) : without);
  }
}

template <class T>
int metric(int64_t which, const void* rows, void* out, int64_t count) {
  const auto fill = [=](double without, auto value) {
    each<T>(rows, out, count, without, value);
    return 0;
  };
  switch (which) {
    case ACUTANCE_ENTROPY:
      return fill(NAN, entropy);
    case ACUTANCE_NORMALIZED_ENTROPY:
      return fill(NAN, [](const Row& r) { return r.n > 1 ? entropy(r) / log(r.n) : double(NAN); });
    case ACUTANCE_INFORMATION:
      return fill(NAN, [](const Row& r) { return log(r.n) - entropy(r); });
    case ACUTANCE_EFFECTIVE_KEYS:
      return fill(NAN, [](const Row& r) { return 1.0 / collision(r); });
    case ACUTANCE_SPARSITY:
      return fill(NAN, [](const Row& r) { return 1.0 / sqrt(r.n * collision(r)); });
    case ACUTANCE_COLLISION:
      return fill(NAN, collision);
    case ACUTANCE_TOP_WEIGHT:  // m - m is 0, or NaN of an infinite score
      return fill(NAN, [](const Row& r) { return (1.0 + (r.m - r.m)) / r.Z; });
    case ACUTANCE_FIRST_WEIGHT:
      return fill(NAN, [](const Row& r) { return exp(r.first - r.m) / r.Z; });
    case ACUTANCE_LSE:
      return fill(-INFINITY, [](const Row& r) { return r.m + log(r.Z); });
    case ACUTANCE_LOGIT_STD:
      return fill(NAN, logit_std);
    case ACUTANCE_VARENTROPY:
      return fill(NAN, [](const Row& r) { return r.W / r.Z; });
  }
  return 2;
}

}  // namespace

extern "C" int acutance_metric(int64_t which, int64_t dtype, int64_t count, const void* rows,
                               void* out) {
  if (dtype == ACUTANCE_F64) return metric<double>(which, rows, out, count);
  return dtype == ACUTANCE_F32 ? metric<float>(which, rows, out, count) : 2;
}
