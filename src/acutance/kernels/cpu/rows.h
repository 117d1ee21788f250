// The rows of a lane group: what they carry from tile to tile, and what a tile does to them.
#ifndef ACUTANCE_ROWS_H
#define ACUTANCE_ROWS_H

#include <math.h>

#include "mask.h"
#include "vec.h"

namespace {

constexpr int64_t NO_KEY = INT64_MAX;  // first visible key of a row that has none

// A row at its end.
template <class T>
struct Row {
  T n, m, Z, U, W, Q, mean, depth, M2, first, R2;
  int64_t keys;  // n, exactly
  int64_t first_index;
};

// Largest and sum of a tile's visible scores.
template <class T>
struct Extremes {
  Vec<T> largest[NV], total[NV];
  Extremes() {
    for (int v = 0; v < NV; ++v) largest[v] = splat(T(-INFINITY)), total[v] = Vec<T>{};
  }
};

template <class T>
struct Rows {
  typedef Vec<T> V;
  static constexpr int LN = LANES<T>;

  V m[NV];      // largest score
  V shift[NV];  // the same, 0 where no key was seen
  V Z[NV], U[NV], Q[NV];  // sums of e, e t, e^2 with t = s - m, e = exp(t)
  V W[NV];      // sum of e (t - U/Z)^2
  V n[NV], D[NV];  // visible keys, sum of t
  IVec<T> masked[NV];  // visible keys of tiles that hide some: exact where n is rounded
  int64_t whole;       // keys of tiles that hide none
  V total[NV];  // sum of scores
  V M2[NV];     // sum of (t - D/n)^2
  V R2[NV];     // sum of e^2 |v - centre|^2
  V about[NV], middle[NV], visible[NV];  // of the tile at hand: references, visible keys
  T first[LN];
  int64_t first_index[LN];
  uint32_t found;  // rows whose first key is known

  void clear() {
    for (int v = 0; v < NV; ++v) {
      m[v] = splat(T(-INFINITY));
      shift[v] = Z[v] = U[v] = Q[v] = W[v] = n[v] = D[v] = M2[v] = R2[v] = total[v] = V{};
      masked[v] = IVec<T>{};
    }
    whole = 0;
    for (int l = 0; l < LN; ++l) first[l] = 0, first_index[l] = NO_KEY;
    found = 0;
  }

  // Move to the maximum of a tile too; `factor` receives what sums of e shrink by.
  ACUTANCE_INLINE void begin(const Extremes<T>& tile, const V* count, V* factor) {
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) {
      V top = vmax(m[v], tile.largest[v]);
      V base = top == T(-INFINITY) ? V{} : top;
      V drop = m[v] == T(-INFINITY) ? V{} : m[v] - base;  // <= 0
      V shrink = vexp(drop);
      V average = Z[v] > 0 ? U[v] / Z[v] + drop : V{};
      factor[v] = shrink;
      U[v] = (U[v] + drop * Z[v]) * shrink;
      Z[v] *= shrink;
      W[v] *= shrink;
      Q[v] *= square(shrink);
      R2[v] *= square(shrink);
      D[v] += n[v] * drop;
      m[v] = top;
      shift[v] = base;
      // where the maximum rose, the mean of what came before is no reference: moments about it
      // would lose the digits of rows that few keys hold
      about[v] = drop < T(-1) ? V{} : average;
      total[v] += tile.total[v];
      visible[v] = count[v];
      middle[v] = tile.total[v] / vmax(count[v], splat(T(1))) - base;
    }
  }
  ACUTANCE_INLINE void begin(const Extremes<T>& tile, T count, V* factor) {
    V counts[NV];
    for (int v = 0; v < NV; ++v) counts[v] = splat(count);
    begin(tile, counts, factor);
  }

  // Turn a tile's scores into weights e and sum them. With NOISE keep e^2 in `squares` and sum it
  // times `sizes`, one number for each key.
  template <bool MASKED, bool NOISE>
  ACUTANCE_INLINE void weigh(T* scores, const uint32_t* seen, int64_t count, T* squares,
                             const T* sizes) {
    V sum[NV], first_moment[NV], second[NV], collision[NV], plain[NV], spread[NV], energy[NV];
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v)
      sum[v] = first_moment[v] = second[v] = collision[v] = plain[v] = spread[v] = energy[v] = V{};
    V base[NV], reference[NV], centre[NV];
    for (int v = 0; v < NV; ++v) base[v] = shift[v], reference[v] = about[v], centre[v] = middle[v];
    for (int64_t j = 0; j < count; ++j) {
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) {
        V t = load(scores + j * LN + v * VL<T>) - base[v];
        V off = t - centre[v], e;
        if (MASKED) {
          IVec<T> mask = expand<T>(seen[j], v);
          t = choose<T>(mask, t, V{});
          off = choose<T>(mask, off, V{});
          e = choose<T>(mask, vexp(t), V{});
        } else {
          e = vexp(t);
        }
        V apart = t - reference[v], moment = e * apart;
        sum[v] += e;
        first_moment[v] += moment;
        second[v] += moment * apart;
        if (NOISE) {
          V twice = e * e;
          collision[v] += twice;
          energy[v] += twice * sizes[j];
          store(squares + j * LN + v * VL<T>, twice);
        } else {
          collision[v] += e * e;
        }
        plain[v] += t;
        spread[v] += off * off;
        store(scores + j * LN + v * VL<T>, e);
      }
    }
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) {
      const T tiny = Traits<T>::tiny;
      V weight = vmax(sum[v], splat(tiny)), before = vmax(Z[v], splat(tiny));
      V lead = first_moment[v] / weight, moment = first_moment[v] + reference[v] * sum[v];
      V inside = second[v] - lead * first_moment[v];
      inside = inside < 0 ? V{} : inside;
      V apart = lead + reference[v] - U[v] / before;
      V both = Z[v] + sum[v];
      V mixed = (Z[v] / vmax(both, splat(tiny))) * sum[v];
      W[v] += inside + square(apart) * mixed;
      Z[v] = both;
      U[v] += moment;
      Q[v] += collision[v];
      if (NOISE) R2[v] += energy[v];
      V some = vmax(visible[v], splat(T(1))), had = vmax(n[v], splat(T(1)));
      V mean = plain[v] / some, off = mean - centre[v];
      V within = spread[v] - visible[v] * off * off;
      within = within < 0 ? V{} : within;
      V step = mean - D[v] / had;
      V all = n[v] + visible[v];
      M2[v] += within + step * step * (n[v] * visible[v] / vmax(all, splat(T(1))));
      n[v] = all;
      D[v] += plain[v];
    }
  }

  void first_seen(int64_t start, const T* scores) {
    for (int l = 0; l < LN; ++l)
      if (!(found >> l & 1)) first[l] = scores[l], first_index[l] = start;
    found = ~0u;
  }
  void first_seen(int64_t start, int64_t count, const T* scores, const uint32_t* seen) {
    for (int64_t j = 0; j < count && ~found; ++j)
      for (uint32_t fresh = seen[j] & ~found; fresh; fresh &= fresh - 1) {
        const int l = __builtin_ctz(fresh);
        first[l] = scores[j * LN + l], first_index[l] = start + j;
        found |= 1u << l;
      }
  }

  void read(int l, Row<T>* row) const {
    const int v = l / VL<T>, i = l % VL<T>;
    row->n = n[v][i], row->keys = whole + int64_t(masked[v][i]), row->m = m[v][i], row->Z = Z[v][i], row->U = U[v][i], row->W = W[v][i];
    row->Q = Q[v][i], row->M2 = M2[v][i], row->R2 = R2[v][i];
    row->depth = row->n == 0 ? T(0) : -D[v][i] / row->n;
    row->mean = row->n == 0 ? T(0) : total[v][i] / row->n;
    row->first = first[l], row->first_index = first_index[l];
    // a score that is no number may have been passed over by the maximum, never by a sum
    if (D[v][i] != D[v][i] && row->m < T(INFINITY)) row->m = T(NAN);
  }
};

// Lay rows across the lanes: to[e][lane] = from[lane][e] * scale, other lanes 0.
template <class T, class In>
inline void lay_across(const In* from, int64_t stride, int64_t count, int64_t width, T scale,
                       T* to) {
  constexpr int LN = LANES<T>;
  for (int64_t l0 = 0; l0 < LN; l0 += VL<T>)
    for (int64_t e0 = 0; e0 < width; e0 += VL<T>) {
      const int64_t filled = imin(VL<T>, width - e0);
      Vec<T> rows[VL<T>];
      for (int64_t i = 0; i < VL<T>; ++i) {
        rows[i] = Vec<T>{};
        if (l0 + i < count)
          rows[i] = widen_vector<T, In>(from + (l0 + i) * stride + e0, filled) * scale;
      }
      transpose<T>(rows);
      for (int64_t i = 0; i < filled; ++i) store(to + (e0 + i) * LN + l0, rows[i]);
    }
}

// The way back: to[lane][e] = from[e][lane] * factor[lane], narrowed.
template <class T, class Out>
inline void lay_along(const T* from, const T* factor, int64_t count, int64_t width, Out* to,
                      int64_t stride) {
  constexpr int LN = LANES<T>;
  for (int64_t l0 = 0; l0 < count; l0 += VL<T>) {
    const Vec<T> factors = load(factor + l0);
    for (int64_t e0 = 0; e0 < width; e0 += VL<T>) {
      const int64_t filled = imin(VL<T>, width - e0);
      Vec<T> rows[VL<T>];
      for (int64_t i = 0; i < VL<T>; ++i)
        rows[i] = i < filled ? load(from + (e0 + i) * LN + l0) * factors : Vec<T>{};
      transpose<T>(rows);
      for (int64_t i = 0; i < imin(VL<T>, count - l0); ++i)
        narrow_vector<T, Out>(rows[i], to + (l0 + i) * stride + e0, filled);
    }
  }
}

template <class T>
ACUTANCE_INLINE T sum_lanes(Vec<T> x) {
  T sum = 0;
  for (int i = 0; i < VL<T>; ++i) sum += x[i];
  return sum;
}

// to = from - centre; returns the square of its length.
template <class T, class In>
inline T centre_row(const In* from, const T* centre, int64_t width, T* to) {
  Vec<T> sum = {};
  for (int64_t e = 0; e < width; e += VL<T>) {
    const int64_t count = width - e;
    Vec<T> x = widen_vector<T, In>(from + e, count) - widen_vector<T, T>(centre + e, count);
    narrow_vector<T, T>(x, to + e, count);
    sum += x * x;
  }
  return sum_lanes<T>(sum);
}

// row += centre (or zero, where there is nothing); returns the square of its length before.
template <class T>
inline T restore_row(T* row, const T* centre, int64_t width, bool some) {
  Vec<T> sum = {};
  for (int64_t e = 0; e < width; e += VL<T>) {
    const int64_t count = width - e;
    Vec<T> x = widen_vector<T, T>(row + e, count);
    sum += x * x;
    narrow_vector<T, T>(some ? x + widen_vector<T, T>(centre + e, count) : Vec<T>{}, row + e, count);
  }
  return sum_lanes<T>(sum);
}

template <class T, int R, bool LOOK>
ACUTANCE_INLINE void score_rows(const T* q, const T* k, int64_t ks, int64_t width, T* scores,
                                Extremes<T>* found) {
  Vec<T> sum[R][NV];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) sum[r][v] = Vec<T>{};
  multiply_add<T, R>(sum, k, ks, 1, q, width);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) {
      store(scores + r * LANES<T> + v * VL<T>, sum[r][v]);
      if (LOOK) {
        found->largest[v] = vmax(found->largest[v], sum[r][v]);
        found->total[v] += sum[r][v];
      }
    }
}

// Rows of memory that are wanted next, fetched while others are worked on: a head's keys and values
// may lie in a cache so far that a wait for each of them would show.
struct NextRows {
  const char* at = nullptr;  // null: nothing
  int64_t step = 0, bytes = 0, rows = 0;

  ACUTANCE_INLINE void fetch(int64_t first, int64_t count) const {
    if (!at) return;
    for (int64_t r = first, stop = imin(first + count, rows); r < stop; ++r)
      for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(at + r * step + b, 0, 2);
  }
};

// scores[j][lane] = sum over e of k[j][e] q[e][lane], and with LOOK their extremes.
template <class T, bool LOOK>
inline void tile_scores(const T* q, const T* k, int64_t ks, int64_t width, int64_t count,
                        T* scores, Extremes<T>* found, const NextRows& ahead = NextRows()) {
  int64_t j = 0;
  Extremes<T> local;
  for (; j + ROWS <= count; j += ROWS) {
    ahead.fetch(j, ROWS);
    score_rows<T, ROWS, LOOK>(q, k + j * ks, ks, width, scores + j * LANES<T>, &local);
  }
  ahead.fetch(j, count - j);
  for (; j + 4 <= count; j += 4)
    score_rows<T, 4, LOOK>(q, k + j * ks, ks, width, scores + j * LANES<T>, &local);
  for (; j < count; ++j)
    score_rows<T, 1, LOOK>(q, k + j * ks, ks, width, scores + j * LANES<T>, &local);
  if (LOOK) *found = local;
}

template <class T, int R>
ACUTANCE_INLINE void sum_rows(T* total, const Vec<T>* factor, const T* a, int64_t stride,
                              const T* weights, int64_t count) {
  Vec<T> sum[R][NV];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) sum[r][v] = load(total + r * LANES<T> + v * VL<T>) * factor[v];
  multiply_add<T, R>(sum, a, 1, stride, weights, count);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) store(total + r * LANES<T> + v * VL<T>, sum[r][v]);
}

// Rows a[j][e] as panels of ROWS columns, each panel row after row: so a column block of many rows
// is one stretch of memory, where rows lie a power of two apart and would evict each other.
template <class T, class In>
inline void pack_panels(const In* from, int64_t stride, int64_t count, int64_t width, T* to) {
  for (int64_t j = 0; j < count; ++j, from += stride) {
    int64_t e = 0;
    for (; e + ROWS <= width; e += ROWS)
      widen_row<T, In>(from + e, to + e * count + j * ROWS, ROWS);
    for (; e + 4 <= width; e += 4) widen_row<T, In>(from + e, to + e * count + j * 4, 4);
    for (; e < width; ++e) to[e * count + j] = T(widen(from[e]));
  }
}

// total[e][lane] = total * factor + sum over j of a[j][e] weights[j][lane], over `count` rows.
// Packed in panels of `packed` rows, `a` points at the first panel's first row of these; else
// `packed` is 0 and rows lie `stride` apart.
template <class T>
inline void weighted_sum(T* total, const Vec<T>* factor, const T* a, int64_t stride,
                         int64_t packed, const T* weights, int64_t count, int64_t width) {
  constexpr int LN = LANES<T>;
  int64_t e = 0;
  const int64_t first = packed ? stride : 0;  // packed: the first row's number within its panel
  for (; e + ROWS <= width; e += ROWS)
    sum_rows<T, ROWS>(total + e * LN, factor, packed ? a + e * packed + first * ROWS : a + e,
                      packed ? ROWS : stride, weights, count);
  for (; e + 4 <= width; e += 4)
    sum_rows<T, 4>(total + e * LN, factor, packed ? a + e * packed + first * 4 : a + e,
                   packed ? 4 : stride, weights, count);
  for (; e < width; ++e)
    sum_rows<T, 1>(total + e * LN, factor, packed ? a + e * packed + first : a + e,
                   packed ? 1 : stride, weights, count);
}

// Extremes of a masked tile, and how many keys each row sees in it.
template <class T>
inline void look(const T* scores, const uint32_t* seen, int64_t count, Extremes<T>* found,
                 Vec<T>* visible) {
  typedef Vec<T> V;
  for (int v = 0; v < NV; ++v) visible[v] = V{};
  Extremes<T> local;
  for (int64_t j = 0; j < count; ++j)
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) {
      IVec<T> mask = expand<T>(seen[j], v);
      V s = load(scores + j * LANES<T> + v * VL<T>);
      local.largest[v] = vmax(local.largest[v], choose<T>(mask, s, splat(T(-INFINITY))));
      local.total[v] += choose<T>(mask, s, V{});
      visible[v] += choose<T>(mask, splat(T(1)), V{});
    }
  *found = local;
}

}  // namespace
#endif
