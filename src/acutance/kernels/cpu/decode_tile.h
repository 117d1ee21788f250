// A tile with keys in the lanes: scores of a few queries, their sums, and weighted values.
//
// A row's scores lie side by side, so that masks are read as they lie, every sum over keys is a
// vertical operation but for one step at the tile's end, and one load of a key or a value serves
// all rows. The tile's moments are taken about its own means, in a second look at its scores.
#ifndef ACUTANCE_DECODE_TILE_H
#define ACUTANCE_DECODE_TILE_H

#include <math.h>

#include "rows.h"
#include "vec.h"

namespace {

constexpr int DECODE_ROWS = 16;  // rows whose scores are held at a time; a multiple of any VL
template <class T>
constexpr int TILE = 1024 / int(sizeof(T));  // keys of a tile
template <class T>
constexpr int KEYS = VL<T> < 4 ? VL<T> : 4;  // keys of a register block

// Rows that share the load of a key, and of a value; vectors of a value that are summed together.
#if ACUTANCE_BYTES == 64 || defined(__aarch64__)
constexpr int SCORE_ROWS = 4;
constexpr int SUM_VECTORS = 16;
#else
constexpr int SCORE_ROWS = 2;
constexpr int SUM_VECTORS = 8;
#endif

// A vector of numbers as they lie in memory, widened.
template <class T>
ACUTANCE_INLINE Vec<T> wide(const T* from) {
  return load(from);
}
template <class T>
ACUTANCE_INLINE Vec<T> wide(const bf16* from) {
  typedef uint16_t Half __attribute__((vector_size(ACUTANCE_BYTES / 2)));
  typedef uint32_t Whole __attribute__((vector_size(ACUTANCE_BYTES)));
  Half bits;
  memcpy(&bits, from, sizeof bits);
  Whole whole = __builtin_convertvector(bits, Whole) << 16;
  Vec<T> x;
  memcpy(&x, &whole, sizeof x);
  return x;
}
template <class T>
ACUTANCE_INLINE Vec<T> wide(const f16* from) {
#if ACUTANCE_BYTES == 64
  return (Vec<T>)_mm512_maskz_cvtph_ps(__mmask16(-1), _mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
  return (Vec<T>)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  return widen_vector<T, f16>(from, VL<T>);
#endif
}

// Rows that are wanted soon: those of the matrix at hand, then the first of the one read after it.
// The processor's own guess stops at the end of a page, so it is helped to the next one.
struct Ahead {
  const char* rows = nullptr;  // null: nothing is fetched
  int64_t stride = 0, count = 0, bytes = 0;
  const char* then = nullptr;
  int64_t then_stride = 0, distance = 0;

  Ahead() = default;
  Ahead(const void* rows, int64_t stride, int64_t count, int64_t bytes, const void* then,
        int64_t then_stride)
      : rows((const char*)rows), stride(stride), count(count), bytes(bytes),
        then((const char*)then), then_stride(then_stride), distance(imax(4096 / bytes, 1)) {}

  ACUTANCE_INLINE void fetch(int64_t row) const {
    row += distance;
    const char* from = row < count ? rows + row * stride : then + (row - count) * then_stride;
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(from + b, 0, 2);
  }
};

// Half of a beside half of b, each number the sum of two that lay STEP apart.
template <class T, int STEP>
ACUTANCE_INLINE Vec<T> fold(Vec<T> a, Vec<T> b) {
  IVec<T> stay, cross;
  for (int i = 0; i < VL<T>; ++i) {
    stay[i] = i & STEP ? VL<T> + i : i;
    cross[i] = i & STEP ? VL<T> + i - STEP : i + STEP;
  }
  return __builtin_shuffle(a, b, stay) + __builtin_shuffle(a, b, cross);
}
// COUNT vectors into one; begun with VL of them and STEP 1, lane i is the sum of vector i.
template <class T, int COUNT, int STEP>
ACUTANCE_INLINE void fold_all(Vec<T>* rows) {
  if constexpr (COUNT > 1) {
#pragma GCC unroll 8
    for (int i = 0; i < COUNT / 2; ++i) rows[i] = fold<T, STEP>(rows[2 * i], rows[2 * i + 1]);
    fold_all<T, COUNT / 2, 2 * STEP>(rows);
  }
}
// Sum of a vector's numbers, in pairs.
template <class T>
ACUTANCE_INLINE T sum_pairs(Vec<T> x) {
#pragma GCC unroll 4
  for (int step = VL<T> / 2; step; step /= 2) {
    IVec<T> cross;
    for (int i = 0; i < VL<T>; ++i) cross[i] = i ^ step;
    x += __builtin_shuffle(x, cross);
  }
  return x[0];
}

// scores[r][lane] = q[r] . k[lane] for R rows and the keys of one vector; beyond `last` the last
// key stands in. Widths are whole vectors.
template <class T, class In, int R>
ACUTANCE_INLINE void score_vector(const T* q, const In* k, int64_t ks, int64_t last, int64_t width,
                                  T* scores) {
  constexpr int N = KEYS<T>, BLOCKS = VL<T> / N;
  Vec<T> part[R][BLOCKS];
#pragma GCC unroll 4
  for (int b = 0; b < BLOCKS; ++b) {
    const In* at[N];
    Vec<T> sum[R][N];
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      at[i] = k + imin(b * N + i, last) * ks;
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[r][i] = Vec<T>{};
    }
    for (int64_t e = 0; e < width; e += VL<T>) {
      Vec<T> x[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) x[r] = load(q + r * width + e);
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) {
        const Vec<T> y = wide<T>(at[i] + e);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sum[r][i] += x[r] * y;
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      fold_all<T, N, 1>(sum[r]);
      part[r][b] = sum[r][0];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    fold_all<T, BLOCKS, N>(part[r]);
    store(scores + r * TILE<T>, part[r][0]);
  }
}

template <int N>
struct Number {
  static constexpr int value = N;
};
// Call with(a number of rows as a constant, the first of them) for all rows, MOST = 4 or 2 a time.
template <int MOST, class With>
ACUTANCE_INLINE void by_rows(int64_t rows, const With& with) {
  int64_t r = 0;
  if constexpr (MOST > 2) {
    for (; r + 4 <= rows; r += 4) with(Number<4>(), r);
    if (rows - r == 3) return with(Number<3>(), r);
  }
  for (; r + 2 <= rows; r += 2) with(Number<2>(), r);
  if (r < rows) with(Number<1>(), r);
}

// scores[r][j] for all rows and keys of a tile, whole vectors of keys at a time.
template <class T, class In>
inline void score_tile(const T* q, const In* k, int64_t ks, int64_t rows, int64_t count,
                       int64_t width, T* scores, const Ahead& ahead) {
  for (int64_t j = 0; j < count; j += VL<T>) {
    if (ahead.rows)
      for (int i = 0; i < VL<T>; ++i) ahead.fetch(j + i);
    const In* at = k + j * ks;
    const int64_t last = count - j - 1;
    by_rows<SCORE_ROWS>(rows, [&](auto some, int64_t r) {
      score_vector<T, In, decltype(some)::value>(q + r * width, at, ks, last, width,
                                                 scores + r * TILE<T> + j);
    });
  }
}

// What a tile holds of a row that sees n > 0 of its keys; t = s - base, e = exp(t).
template <class T>
struct Part {
  T n = 0, largest = T(-INFINITY), total = 0;
  T Z = 0, U = 0, W = 0, Q = 0, D = 0, M2 = 0, base = 0;
};

// Visible keys of a row, their largest score and sum. `seen` holds -1 for a visible key, else 0.
template <class T, bool MASKED>
inline void look_along(const T* scores, const typename Traits<T>::Int* seen, int64_t count,
                       Part<T>* part) {
  typedef Vec<T> V;
  V largest = splat(T(-INFINITY)), total = V{};
  IVec<T> n = {};
  for (int64_t j = 0; j < count; j += VL<T>) {
    V s = load(scores + j);
    if (MASKED) {
      const IVec<T> mask = load(seen + j);
      largest = vmax(largest, choose<T>(mask, s, splat(T(-INFINITY))));
      total += choose<T>(mask, s, V{});
      n -= mask;
    } else {
      largest = vmax(largest, s);
      total += s;
    }
  }
  T top = largest[0];
  int64_t visible = MASKED ? 0 : count;
  for (int i = 0; i < VL<T>; ++i) {
    top = largest[i] > top ? largest[i] : top;
    if (MASKED) visible += n[i];
  }
  part->n = T(visible), part->largest = top, part->total = sum_pairs<T>(total);
}

// Turn a row's scores into weights e and sum them; `distance` is room for as many numbers.
template <class T, bool MASKED>
inline void weigh_along(T* scores, const typename Traits<T>::Int* seen, int64_t count,
                        T* distance, Part<T>* part) {
  typedef Vec<T> V;
  V Z = {}, U = {}, Q = {}, D = {}, M2 = {}, W = {};
  const T base = part->base, centre = part->total / part->n - base;
  for (int64_t j = 0; j < count; j += VL<T>) {
    V t = load(scores + j) - base, off = t - centre, e;
    if (MASKED) {
      const IVec<T> mask = load(seen + j);
      t = choose<T>(mask, t, V{});
      off = choose<T>(mask, off, V{});
      e = choose<T>(mask, vexp(t), V{});
    } else {
      e = vexp(t);
    }
    Z += e, U += e * t, Q += e * e, D += t, M2 += off * off;
    store(scores + j, e);
    store(distance + j, t);
  }
  part->Z = sum_pairs<T>(Z), part->U = sum_pairs<T>(U), part->Q = sum_pairs<T>(Q);
  part->D = sum_pairs<T>(D);
  const T average = part->Z > 0 ? part->U / part->Z : part->Z;
  for (int64_t j = 0; j < count; j += VL<T>)
    W += load(scores + j) * square(load(distance + j) - average);
  part->W = sum_pairs<T>(W);
  const T apart = part->D / part->n - centre, within = sum_pairs<T>(M2) - part->n * apart * apart;
  part->M2 = within < 0 ? T(0) : within;
}

// total[r] = total[r] * factor[r] + sum over j of weights[r][j] v[j], for R rows, C vectors wide.
template <class T, class In, int R, int C>
ACUTANCE_INLINE void sum_block(T* total, int64_t across, const T* factor, const In* v, int64_t vs,
                               const T* weights, int64_t count, const Ahead& ahead) {
  Vec<T> sum[R][C];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) sum[r][c] = load(total + r * across + c * VL<T>) * factor[r];
  for (int64_t j = 0; j < count; ++j, v += vs) {
    if (ahead.rows) ahead.fetch(j);
    Vec<T> x[C];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) x[c] = wide<T>(v + c * VL<T>);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const T weight = weights[r * TILE<T> + j];
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) sum[r][c] += x[c] * weight;
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) store(total + r * across + c * VL<T>, sum[r][c]);
}
template <class T, class In, int R>
inline void sum_strip(T* total, int64_t across, const T* factor, const In* v, int64_t vs,
                      const T* weights, int64_t count, int64_t width, Ahead ahead) {
  constexpr int ROOM = R == 3 ? 4 : R, C = SUM_VECTORS / ROOM < 8 ? SUM_VECTORS / ROOM : 8;
  constexpr int HALF = C > 2 ? C / 2 : C;
  int64_t e = 0;
  for (; e + C * VL<T> <= width; e += C * VL<T>, ahead = Ahead())
    sum_block<T, In, R, C>(total + e, across, factor, v + e, vs, weights, count, ahead);
  for (; e + HALF * VL<T> <= width; e += HALF * VL<T>, ahead = Ahead())
    sum_block<T, In, R, HALF>(total + e, across, factor, v + e, vs, weights, count, ahead);
  for (; e < width; e += VL<T>, ahead = Ahead())
    sum_block<T, In, R, 1>(total + e, across, factor, v + e, vs, weights, count, ahead);
}
template <class T, class In>
inline void sum_values(T* total, int64_t across, const T* factor, const In* v, int64_t vs,
                       const T* weights, int64_t rows, int64_t count, int64_t width, Ahead ahead) {
  by_rows<4>(rows, [&](auto some, int64_t r) {
    sum_strip<T, In, decltype(some)::value>(total + r * across, across, factor + r, v, vs,
                                            weights + r * TILE<T>, count, width, ahead);
    ahead = Ahead();
  });
}

}  // namespace
#endif
