// Metrics of rows from their sums: what acutance.rowstats computes in many operations each, in one
// pass over the rows for all that are asked.
#include <math.h>

#include <limits>

#include "api.h"

namespace {

constexpr int64_t kKeyIntervals = 48, kSpreadIntervals = 224;  // of acutance.rowstats.gaussian
constexpr double kLogMostKeys = 27.631021115928547;            // log 1e12, where its table ends

// The interval of a uniform cubic B-spline over [0, 1] that holds t, and what is alive there.
struct Basis {
  int64_t interval;
  double weight[4];

  Basis(double t, int64_t intervals) {
    const double position = t * double(intervals);
    interval = int64_t(position);
    interval = interval < 0 ? 0 : interval < intervals ? interval : intervals - 1;
    const double s = position - double(interval), r = 1 - s;
    weight[0] = r * r * r / 6;
    weight[1] = (4 - 3 * s * s * (1 + r)) / 6;
    weight[2] = (4 - 3 * r * r * (1 + s)) / 6;
    weight[3] = s * s * s / 6;
  }
};

// What depends on the number of keys alone, most often that of the row before.
struct Keys {
  int64_t n = -1, in_table = -1;
  double log_n = 0, collapse = 0;
  Basis basis{0, kKeyIntervals};

  void set(int64_t keys, bool gaussian) {
    if (keys != n) log_n = log(double(n = keys));
    if (!gaussian || keys == in_table) return;
    in_table = keys;
    const double x = log1p(log_n / 2) / log1p(kLogMostKeys / 2);
    collapse = sqrt(2 + 2 * log_n);
    basis = Basis(x < 1 ? x : 1, kKeyIntervals);
  }

  // acutance.rowstats.gaussian.expected_entropy
  double expected_entropy(double spread, const double* table) const {
    if (!(spread >= 0)) return NAN;
    const double left = collapse / (collapse + spread);
    const Basis across(1 - left, kSpreadIntervals);
    const double* corner = table + basis.interval * (kSpreadIntervals + 3) + across.interval;
    double height = 0;
    for (int i = 0; i < 4; ++i) {
      const double* line = corner + i * (kSpreadIntervals + 3);
      double sum = 0;
      for (int j = 0; j < 4; ++j) sum += across.weight[j] * line[j];
      height += basis.weight[i] * sum;
    }
    return log_n * left * (1 + (1 - left) * height);
  }
};

constexpr int64_t bit(int64_t metric) { return int64_t(1) << metric; }

// Metrics that the logarithm of the normaliser or of the number of keys is part of, and so on.
constexpr int64_t kOfEntropy =
    bit(ACUTANCE_ENTROPY) | bit(ACUTANCE_NORMALIZED_ENTROPY) | bit(ACUTANCE_INFORMATION);
constexpr int64_t kOfLogarithm = kOfEntropy | bit(ACUTANCE_LSE) | bit(ACUTANCE_JENSEN_GAP);
constexpr int64_t kOfDepth = kOfEntropy | bit(ACUTANCE_MAX_GAP);
constexpr int64_t kOfKeys = bit(ACUTANCE_NORMALIZED_ENTROPY) | bit(ACUTANCE_INFORMATION) |
                            bit(ACUTANCE_MEAN_FIELD_ENTROPY) | bit(ACUTANCE_JENSEN_GAP);
constexpr int64_t kOfCollision = bit(ACUTANCE_EFFECTIVE_KEYS) | bit(ACUTANCE_SPARSITY) |
                                 bit(ACUTANCE_COLLISION) | bit(ACUTANCE_JACOBIAN_TRACE);
constexpr int64_t kOfSpread = bit(ACUTANCE_LOGIT_STD) | bit(ACUTANCE_GAUSSIAN_ENTROPY);

constexpr int64_t kOfRest = bit(ACUTANCE_FIRST_GAP) | bit(ACUTANCE_REST_JENSEN_GAP);

constexpr int64_t kBlock = 256;  // rows at a time, whose parts stay in the first cache

template <class T>
int metrics(int64_t asked, const void* rows, int64_t count, const double* table, void* out) {
  const int64_t* n = (const int64_t*)rows;
  const T* m = (const T*)(n + 2 * count);  // behind n and first_index
  const T *Z = m + count, *U = Z + count, *W = U + count, *Q = W + count, *mean = Q + count;
  const T *M2 = mean + count, *depth = M2 + count, *first = depth + count;
  double log_n[kBlock], log_Z[kBlock], below[kBlock], collision[kBlock], spread[kBlock];
  double log_rest[kBlock];
  const bool gaussian = asked & bit(ACUTANCE_GAUSSIAN_ENTROPY);
  Keys keys;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = begin + kBlock < count ? begin + kBlock : count;
    const auto part = [=](int64_t users, double* values, auto value) {
      if (!(asked & users)) return;
      for (int64_t i = begin; i < end; ++i) values[i - begin] = value(i);
    };
    T* to = (T*)out + begin;
    const auto each = [&](int64_t metric, double without, auto value) {
      if (!(asked & bit(metric))) return;
      for (int64_t i = begin; i < end; ++i) {
        to[i - begin] = T(n[i] ? double(value(i, i - begin)) : without);
      }
      to += count;
    };
    part(kOfKeys, log_n, [&](int64_t i) {
      if (n[i]) keys.set(n[i], false);
      return keys.log_n;
    });
    part(kOfLogarithm, log_Z, [=](int64_t i) { return log(double(Z[i])); });
    part(kOfDepth, below, [=](int64_t i) { return double(U[i]) / Z[i]; });
    part(kOfCollision, collision, [=](int64_t i) { return Q[i] / (double(Z[i]) * Z[i]); });
    part(kOfSpread, spread, [=](int64_t i) {
      const double variance = double(M2[i]) / double(n[i]);
      return variance > 0 ? sqrt(variance) : variance;
    });
    // the other keys' part of Z: what rounding leaves of it
    part(kOfRest, log_rest, [=](int64_t i) {
      const double rest = double(Z[i]) - exp(double(first[i]) - m[i]);
      const double least = std::numeric_limits<T>::epsilon();
      return log(rest < least ? least : rest);
    });
    const auto entropy = [&](int64_t, int64_t k) { return log_Z[k] - below[k]; };
    // 0, and NaN of an infinite score
    const auto nothing = [=](int64_t i) { return double(m[i]) - double(m[i]); };

    each(ACUTANCE_ENTROPY, NAN, entropy);
    each(ACUTANCE_NORMALIZED_ENTROPY, NAN, [&](int64_t i, int64_t k) {
      return n[i] > 1 ? entropy(i, k) / log_n[k] : double(NAN);
    });
    each(ACUTANCE_INFORMATION, NAN,
         [&](int64_t i, int64_t k) { return log_n[k] - entropy(i, k); });
    each(ACUTANCE_EFFECTIVE_KEYS, NAN, [&](int64_t, int64_t k) { return 1 / collision[k]; });
    each(ACUTANCE_SPARSITY, NAN,
         [&](int64_t i, int64_t k) { return 1 / sqrt(double(n[i]) * collision[k]); });
    each(ACUTANCE_COLLISION, NAN, [&](int64_t, int64_t k) { return collision[k]; });
    each(ACUTANCE_TOP_WEIGHT, NAN, [&](int64_t i, int64_t) { return (1 + nothing(i)) / Z[i]; });
    each(ACUTANCE_FIRST_WEIGHT, NAN,
         [&](int64_t i, int64_t) { return exp(double(first[i]) - m[i]) / Z[i]; });
    each(ACUTANCE_SINK_MASS, NAN, [](int64_t, int64_t) { return 0.0; });
    each(ACUTANCE_LSE, -INFINITY, [&](int64_t i, int64_t k) { return m[i] + log_Z[k]; });
    each(ACUTANCE_LOGIT_MEAN, NAN, [&](int64_t i, int64_t) { return mean[i]; });
    each(ACUTANCE_LOGIT_STD, NAN, [&](int64_t, int64_t k) { return spread[k]; });
    each(ACUTANCE_VARENTROPY, NAN, [&](int64_t i, int64_t) { return double(W[i]) / Z[i]; });
    each(ACUTANCE_ENTROPY_SLOPE, NAN, [&](int64_t i, int64_t) { return -(double(W[i]) / Z[i]); });
    each(ACUTANCE_MEAN_FIELD_ENTROPY, NAN, [&](int64_t i, int64_t k) {
      return log_n[k] - ((double(m[i]) == -INFINITY ? 0 : nothing(i)) + depth[i]);
    });
    each(ACUTANCE_JENSEN_GAP, NAN, [&](int64_t i, int64_t k) {
      return log_Z[k] - log_n[k] + (nothing(i) + depth[i]);
    });
    each(ACUTANCE_MAX_GAP, NAN, [&](int64_t i, int64_t k) { return nothing(i) - below[k]; });
    each(ACUTANCE_GAUSSIAN_ENTROPY, NAN, [&](int64_t i, int64_t k) {
      keys.set(n[i], gaussian);
      return keys.expected_entropy(spread[k], table);
    });
    each(ACUTANCE_FIRST_GAP, NAN, [&](int64_t i, int64_t k) {
      return n[i] > 1 ? double(first[i]) - m[i] - log_rest[k] : double(NAN);
    });
    each(ACUTANCE_REST_LOGIT_STD, NAN, [&](int64_t i, int64_t) {
      const double step = double(first[i]) - m[i] + depth[i], others = double(n[i]) - 1;
      const double squares = M2[i] - step * step * n[i] / others;
      // one other key has no spread, and less than this is rounding
      const bool spread = n[i] > 2 && squares > 8 * std::numeric_limits<T>::epsilon() * M2[i];
      return n[i] > 1 ? (spread ? sqrt(squares / others) : 0 * squares) : double(NAN);
    });
    each(ACUTANCE_REST_JENSEN_GAP, NAN, [&](int64_t i, int64_t k) {
      const double others = double(n[i]) - 1;
      const double gap =
          log_rest[k] - log(others) + (depth[i] + (double(first[i]) - m[i] + depth[i]) / others);
      return n[i] > 1 ? (gap < 0 ? 0.0 : gap) : double(NAN);
    });
    each(ACUTANCE_JACOBIAN_TRACE, NAN, [&](int64_t, int64_t k) { return 1 - collision[k]; });
  }
  return 0;
}

}  // namespace

extern "C" int acutance_metrics(int64_t asked, int64_t dtype, int64_t count, const void* rows,
                                const double* table, void* out) {
  if (asked < 0 || asked >= bit(ACUTANCE_METRICS)) return 2;
  if (dtype == ACUTANCE_F64) return metrics<double>(asked, rows, count, table, out);
  return dtype == ACUTANCE_F32 ? metrics<float>(asked, rows, count, table, out) : 2;
}
