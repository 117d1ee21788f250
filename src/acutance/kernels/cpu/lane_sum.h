// The backward pass's second matrix product: sums over the lanes, with columns in the vectors.
#ifndef ACUTANCE_LANE_SUM_H
#define ACUTANCE_LANE_SUM_H

#include "mask.h"
#include "rows.h"
#include "vec.h"

namespace {

template <class T, bool WHOLE>
ACUTANCE_INLINE Vec<T> load_some(const T* from, int64_t count) {
  return WHOLE ? load(from) : widen_vector<T, T>(from, count);
}
template <class T, bool WHOLE>
ACUTANCE_INLINE void store_some(T* to, Vec<T> x, int64_t count) {
  if (WHOLE) return store(to, x);
  for (int64_t i = 0; i < imin(VL<T>, count); ++i) to[i] = x[i];
}

// R keys by W vectors of columns, of which `columns` are there.
template <class T, int R, int W, bool WHOLE>
ACUTANCE_INLINE void lane_block(T* to, int64_t width, int64_t columns, const T* weights,
                                const T* rows, int64_t step, int64_t lanes) {
  Vec<T> sum[R][W];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w)
      sum[r][w] = load_some<T, WHOLE>(to + r * width + w * VL<T>, columns - w * VL<T>);
  for (int64_t l = 0; l < lanes; ++l, ++weights, rows += step) {
    Vec<T> x[W];
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) x[w] = load(rows + w * VL<T>);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      T factor = weights[r * LANES<T>];
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) sum[r][w] += x[w] * factor;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w)
      store_some<T, WHOLE>(to + r * width + w * VL<T>, sum[r][w], columns - w * VL<T>);
}

// All keys, for W vectors of columns from `to` and `rows` on.
template <class T, int R, int W, bool WHOLE>
ACUTANCE_INLINE void lane_columns(T* to, int64_t width, int64_t columns, const T* weights,
                                  const T* rows, int64_t step, int64_t lanes, int64_t count) {
  constexpr int LN = LANES<T>;
  int64_t j = 0;
  for (; j + R <= count; j += R)
    lane_block<T, R, W, WHOLE>(to + j * width, width, columns, weights + j * LN, rows, step, lanes);
  for (; j + 2 <= count; j += 2)
    lane_block<T, 2, W, WHOLE>(to + j * width, width, columns, weights + j * LN, rows, step, lanes);
  for (; j < count; ++j)
    lane_block<T, 1, W, WHOLE>(to + j * width, width, columns, weights + j * LN, rows, step, lanes);
}

// to[j][e] += sum over lanes of weights[j][lane] rows[lane][e], for `count` keys j. Rows lie `step`
// apart, a multiple of VL, and hold zeros beyond their width.
template <class T>
inline void lane_sum(T* to, const T* weights, const T* rows, int64_t step, int64_t lanes,
                     int64_t count, int64_t width) {
  int64_t e = 0;
  if (ROWS == 8)  // registers enough for whole rows of 4 vectors
    for (; e + 4 * VL<T> <= width; e += 4 * VL<T>)
      lane_columns<T, 4, 4, true>(to + e, width, 4 * VL<T>, weights, rows + e, step, lanes, count);
  for (; e + 2 * VL<T> <= width; e += 2 * VL<T>)
    lane_columns<T, ROWS, 2, true>(to + e, width, 2 * VL<T>, weights, rows + e, step, lanes,
                                   count);
  for (; e < width; e += VL<T>)
    lane_columns<T, ROWS, 1, false>(to + e, width, width - e, weights, rows + e, step, lanes,
                                    count);
}

// Rows as they lie, widened and each multiplied by its own factor: to[lane][e].
template <class T, class In>
inline void lay_rows(const In* from, int64_t stride, int64_t count, int64_t width, const T* factor,
                     T* to, int64_t step) {
  for (int64_t l = 0; l < count; ++l)
    for (int64_t e = 0; e < width; e += VL<T>)
      store(to + l * step + e, widen_vector<T, In>(from + l * stride + e, width - e) * factor[l]);
}

// The products where a key or a query is no number: what a row does not see adds nothing to it,
// where a weight of zero would add 0 times that.
template <class T>
inline void visible_weighted_sum(T* total, const T* a, int64_t stride, const uint32_t* seen,
                                 const T* weights, int64_t count, int64_t width) {
  constexpr int LN = LANES<T>;
  for (int64_t j = 0; j < count; ++j)
    for (int64_t e = 0; e < width; ++e)
      for (int l = 0; l < LN; ++l)
        if (seen[j] >> l & 1) total[e * LN + l] += a[j * stride + e] * weights[j * LN + l];
}
template <class T>
inline void visible_lane_sum(T* to, const T* weights, const T* rows, int64_t step,
                             const uint32_t* seen, int64_t count, int64_t width) {
  for (int64_t j = 0; j < count; ++j)
    for (uint32_t rest = seen[j]; rest; rest &= rest - 1) {
      const int l = __builtin_ctz(rest);
      for (int64_t e = 0; e < width; ++e)
        to[j * width + e] += weights[j * LANES<T> + l] * rows[l * step + e];
    }
}

}  // namespace
#endif
