// The two matrix products of a tile, and how queries, keys and values are laid out for them: in the
// sums' own type, and of bfloat16 by the processor's pairwise dot product, twice the speed of float's.
//
// There, pairs of neighbours along the summed dimension share 32 bits: of a query's features across
// the lanes, of keys as they lie, of weights and values of two neighbouring keys.
#ifndef ACUTANCE_PRODUCTS_H
#define ACUTANCE_PRODUCTS_H

#include "rows.h"
#include "work.h"

namespace {

constexpr int64_t BLOCK = 128;  // queries of an item, keys of a tile

// In the sums' own type: float and double where they lie, half precision widened block by block.
template <class T, class In>
struct WideProducts {
  static constexpr int LN = LANES<T>;
  static constexpr bool same = sizeof(In) == sizeof(T);
  static constexpr int64_t step = 1;  // tiles begin at a multiple of this in their block

  const acutance_call& call;
  const int64_t E, Ev;
  T *queries, *keys, *values;
  const T* k = nullptr;
  const In* v = nullptr;
  int64_t key_step = 0, packed = 0;

  WideProducts(const acutance_call& call, Arena& arena)
      : call(call), E(call.width), Ev(call.value_width), queries(arena.take<T>(BLOCK * E)),
        keys(arena.take<T>(same ? 0 : BLOCK * E)), values(arena.take<T>(same ? 0 : BLOCK * Ev)) {}

  static size_t need(const acutance_call& call) {
    return Arena::bytes(BLOCK * call.width, sizeof(T)) * 2 +
           Arena::bytes(BLOCK * call.value_width, sizeof(T));
  }

  // Lane group g is to hold `count` queries.
  void lay(const In* q, int64_t count, int g) {
    lay_across<T, In>(q, call.query_stride[2], count, E, T(call.scale), queries + g * LN * E);
  }

  // Turn to keys start..stop of one head.
  void block(const In* key, const In* value, int64_t start, int64_t stop) {
    key += start * call.key_stride[2];
    v = Ev ? value + start * call.value_stride[2] : nullptr;
    if (same) {
      k = (const T*)key, key_step = call.key_stride[2];
      return;
    }
    packed = stop - start;
    for (int64_t j = 0; j < packed; ++j)
      widen_row<T, In>(key + j * call.key_stride[2], keys + j * E, E);
    k = keys, key_step = E;
    if (Ev) pack_panels<T, In>(v, call.value_stride[2], packed, Ev, values);
  }

  // Scores of lane group g with `count` keys of the block from number `from` on.
  template <bool LOOK>
  void score(int g, int64_t from, int64_t count, T* scores, Extremes<T>* found,
             const NextRows& ahead) {
    tile_scores<T, LOOK>(queries + g * LN * E, k + from * key_step, key_step, E, count, scores,
                         found, ahead);
  }

  // total = total * factor + the sum of these keys' values by their weights.
  void add(T* total, const Vec<T>* factor, const T* weights, int64_t from, int64_t count) {
    if (same)
      weighted_sum<T>(total, factor, (const T*)v + from * call.value_stride[2],
                      call.value_stride[2], 0, weights, count, Ev);
    else
      weighted_sum<T>(total, factor, values, from, packed, weights, count, Ev);
  }
};

}  // namespace

#if defined(__AVX512BF16__)
#define ACUTANCE_DOTS 1
#else
#define ACUTANCE_DOTS 0
#endif

namespace {

#if ACUTANCE_DOTS

// rows x NV sums += pairs broadcast from `a` (strides in bytes) times the lanes' pairs of `b`.
template <int R>
ACUTANCE_INLINE void multiply_pairs(Vec<float> (&sum)[R][NV], const char* a, int64_t across,
                                    int64_t along, const uint32_t* b, int64_t steps) {
  for (int64_t k = 0; k < steps; ++k, a += along, b += LANES<float>) {
    __m512i x[NV];
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) x[v] = _mm512_loadu_si512(b + v * VL<float>);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      int32_t pair;
      memcpy(&pair, a + r * across, 4);
      const __m512i factor = _mm512_set1_epi32(pair);
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v)
        sum[r][v] = (Vec<float>)_mm512_dpbf16_ps((__m512)sum[r][v], (__m512bh)x[v],
                                                 (__m512bh)factor);
    }
  }
}

// Lay rows of queries across the lanes, two features at a time: to[e / 2][lane].
inline void lay_pairs(const bf16* from, int64_t stride, int64_t count, int64_t width,
                      uint32_t* to) {
  constexpr int LN = LANES<float>;
  const int64_t pairs = width / 2;
  for (int64_t l0 = 0; l0 < LN; l0 += 16)
    for (int64_t p0 = 0; p0 < pairs; p0 += 16) {
      const int64_t filled = imin(16, pairs - p0);
      Vec<float> rows[16];
      for (int64_t i = 0; i < 16; ++i) {
        uint32_t room[16] = {};
        if (l0 + i < count)
          memcpy(room, from + (l0 + i) * stride + 2 * p0, filled == 16 ? 64 : size_t(4 * filled));
        memcpy(&rows[i], room, 64);
      }
      transpose<float>(rows);
      for (int64_t i = 0; i < filled; ++i) memcpy(to + (p0 + i) * LN + l0, &rows[i], 64);
    }
}

template <int R, bool LOOK>
ACUTANCE_INLINE void score_dots(const uint32_t* q, const bf16* k, int64_t ks, int64_t pairs,
                                float scale, float* scores, Extremes<float>* found) {
  Vec<float> sum[R][NV];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) sum[r][v] = Vec<float>{};
  multiply_pairs<R>(sum, (const char*)k, 2 * ks, 4, q, pairs);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) {
      Vec<float> s = sum[r][v] * scale;
      store(scores + r * LANES<float> + v * VL<float>, s);
      if (LOOK) {
        found->largest[v] = vmax(found->largest[v], s);
        found->total[v] += s;
      }
    }
}

// tile_scores of bfloat16 keys and pairs of queries; the scale is not in the queries.
template <bool LOOK>
inline void tile_dots(const uint32_t* q, const bf16* k, int64_t ks, int64_t width, float scale,
                      int64_t count, float* scores, Extremes<float>* found) {
  int64_t j = 0;
  Extremes<float> local;
  for (; j + ROWS <= count; j += ROWS)
    score_dots<ROWS, LOOK>(q, k + j * ks, ks, width / 2, scale, scores + j * LANES<float>, &local);
  for (; j < count; ++j)
    score_dots<1, LOOK>(q, k + j * ks, ks, width / 2, scale, scores + j * LANES<float>, &local);
  if (LOOK) *found = local;
}

// Weights of two neighbouring keys, rounded to bfloat16, as one number for each lane.
inline void pair_weights(const float* weights, int64_t count, uint32_t* to) {
  typedef Vec<int32_t> I;
  constexpr int LN = LANES<float>;
  for (int64_t j = 0; j < count; j += 2)
    for (int v = 0; v < NV; ++v) {
      I first, second = {};
      memcpy(&first, weights + j * LN + v * VL<float>, 64);
      if (j + 1 < count) memcpy(&second, weights + (j + 1) * LN + v * VL<float>, 64);
      I both = (I)((Vec<uint32_t>)(first + 0x8000) >> 16) | ((second + 0x8000) & int32_t(0xffff0000));
      memcpy(to + j / 2 * LN + v * VL<float>, &both, 64);
    }
}

// Values of two neighbouring keys in panels of ROWS columns (the last one filled up with zeros).
inline void pair_values(const bf16* from, int64_t stride, int64_t count, int64_t width,
                        uint32_t* to) {
  const int64_t pairs = (count + 1) / 2;
  for (int64_t p = 0; p < pairs; ++p) {
    const bf16* first = from + 2 * p * stride;
    const bool two = 2 * p + 1 < count;
    for (int64_t e0 = 0; e0 < width; e0 += ROWS) {
      uint32_t* at = to + e0 * pairs + p * ROWS;
      if (two && e0 + ROWS <= width) {
        __m128i a = _mm_loadu_si128((const __m128i*)(first + e0));
        __m128i b = _mm_loadu_si128((const __m128i*)(first + stride + e0));
        _mm_storeu_si128((__m128i*)at, _mm_unpacklo_epi16(a, b));
        _mm_storeu_si128((__m128i*)(at + 4), _mm_unpackhi_epi16(a, b));
        continue;
      }
      for (int64_t i = 0; i < ROWS; ++i) {
        const int64_t e = e0 + i;
        const uint32_t low = e < width ? first[e].bits : 0;
        const uint32_t high = two && e < width ? first[stride + e].bits : 0;
        at[i] = low | high << 16;
      }
    }
  }
}

template <int R>
ACUTANCE_INLINE void sum_dots(float* total, const Vec<float>* factor, const uint32_t* panel,
                              const uint32_t* weights, int64_t pairs) {
  Vec<float> sum[R][NV];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v)
      sum[r][v] = load(total + r * LANES<float> + v * VL<float>) * factor[v];
  multiply_pairs<R>(sum, (const char*)panel, 4, 4 * ROWS, weights, pairs);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) store(total + r * LANES<float> + v * VL<float>, sum[r][v]);
}

// weighted_sum over `count` pairs of keys from pair `first` on, of panels `pairs` long.
inline void weighted_dots(float* total, const Vec<float>* factor, const uint32_t* panels,
                          int64_t first, int64_t pairs, const uint32_t* weights, int64_t count,
                          int64_t width) {
  int64_t e = 0;
  for (; e + ROWS <= width; e += ROWS)
    sum_dots<ROWS>(total + e * LANES<float>, factor, panels + e * pairs + first * ROWS, weights,
                   count);
  for (int64_t r = 0; e + r < width; ++r)
    sum_dots<1>(total + (e + r) * LANES<float>, factor, panels + e * pairs + first * ROWS + r,
                weights, count);
}

// The products of bfloat16 in pairs; an even width only.
struct PairProducts {
  static constexpr int LN = LANES<float>;
  static constexpr int64_t step = 2;

  const acutance_call& call;
  const int64_t E, Ev;
  uint32_t *queries, *values, *weights;
  const bf16* k = nullptr;
  int64_t pairs = 0;

  PairProducts(const acutance_call& call, Arena& arena)
      : call(call), E(call.width), Ev(call.value_width),
        queries(arena.take<uint32_t>(BLOCK / 2 * E)),
        values(arena.take<uint32_t>(BLOCK / 2 * (Ev + ROWS))),
        weights(arena.take<uint32_t>(BLOCK / 2 * LN)) {}

  static size_t need(const acutance_call& call) {
    return Arena::bytes(BLOCK / 2 * call.width, 4) +
           Arena::bytes(BLOCK / 2 * (call.value_width + ROWS), 4) +
           Arena::bytes(BLOCK / 2 * LN, 4);
  }
  void lay(const bf16* q, int64_t count, int g) {
    lay_pairs(q, call.query_stride[2], count, E, queries + g * LN * (E / 2));
  }
  void block(const bf16* key, const bf16* value, int64_t start, int64_t stop) {
    k = key + start * call.key_stride[2];
    pairs = (stop - start + 1) / 2;
    if (Ev)
      pair_values(value + start * call.value_stride[2], call.value_stride[2], stop - start, Ev,
                  values);
  }
  template <bool LOOK>
  void score(int g, int64_t from, int64_t count, float* scores, Extremes<float>* found,
             const NextRows&) {
    tile_dots<LOOK>(queries + g * LN * (E / 2), k + from * call.key_stride[2], call.key_stride[2],
                    E, float(call.scale), count, scores, found);
  }
  void add(float* total, const Vec<float>* factor, const float* from_weights, int64_t from,
           int64_t count) {
    pair_weights(from_weights, count, weights);
    weighted_dots(total, factor, values, from / 2, pairs, weights, (count + 1) / 2, Ev);
  }
};

#endif

}  // namespace
#endif
