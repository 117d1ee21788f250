// A tile of keys or values that are packed to 8, 4 or 2 bits with a scale and a zero point.
//
// A group of tokens has `lines` lines of bytes, one byte for each channel: 8 / BITS tokens share a
// line, `lines` tokens apart. A code c stands for zero + scale * c. Codes become numbers in
// registers. Keys share a scale along tokens, so it is multiplied into the query; values along
// channels.
#ifndef ACUTANCE_CODES_H
#define ACUTANCE_CODES_H

#include "decode_tile.h"

namespace {

typedef Vec<float> Floats;
typedef IVec<float> Ints;

// One byte a lane, as integers.
ACUTANCE_INLINE Ints bytes_at(const uint8_t* from) {
#if ACUTANCE_BYTES == 64
  return (Ints)_mm512_maskz_cvtepu8_epi32(__mmask16(-1), _mm_loadu_si128((const __m128i*)from));
#elif ACUTANCE_BYTES == 32
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  typedef uint8_t Bytes __attribute__((vector_size(ACUTANCE_BYTES / 4)));
  Bytes bytes;
  memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, Ints);
#endif
}
// The code of token number `place` of a line.
template <int BITS>
ACUTANCE_INLINE Floats code_at(Ints bytes, int place) {
  if (BITS == 8) return __builtin_convertvector(bytes, Floats);
#if defined(__AVX512F__)
  if (BITS == 4) {  // the permutation reads the lowest four bits of a lane
    const Floats numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (Floats)_mm512_maskz_permutexvar_ps(
        __mmask16(-1), (__m512i)(place ? bytes >> 4 : bytes), (__m512)numbers);
  }
#endif
  return __builtin_convertvector((bytes >> (BITS * place)) & ((1 << BITS) - 1), Floats);
}

// The float16 numbers of a row, widened; `to` has room for whole vectors.
inline void widen_scales(const f16* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + VL<float> <= count; i += VL<float>) store(to + i, wide<float>(from + i));
  if (i < count) store(to + i, widen_vector<float, f16>(from + i, count - i));
}

// scores[r][token] = shift[r] + q[r] . codes[token] for R rows and the tokens of a group. `bytes`
// is from line to line; the width is whole vectors, and the query holds the scale.
template <int BITS, int R>
inline void score_codes(const float* q, const float* shift, const uint8_t* codes, int64_t lines,
                        int64_t bytes, int64_t width, float* scores) {
  constexpr int P = 8 / BITS, N = KEYS<float> / P, BLOCKS = VL<float> / N;
  for (int64_t t = 0; t < lines; t += VL<float>) {
    const int64_t last = lines - t - 1;
    const uint8_t* from = codes + t * bytes;
    Floats part[R][P][BLOCKS];
    for (int b = 0; b < BLOCKS; ++b) {
      Floats sum[R][P][N];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p)
#pragma GCC unroll 4
          for (int i = 0; i < N; ++i) sum[r][p][i] = Floats{};
      if (b * N <= last) {
        const uint8_t* at[N];
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) at[i] = from + imin(b * N + i, last) * bytes;
        for (int64_t e = 0; e < width; e += VL<float>) {
          Floats x[R];
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) x[r] = load(q + r * width + e);
#pragma GCC unroll 4
          for (int i = 0; i < N; ++i) {
            const Ints line = bytes_at(at[i] + e);
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) {
              const Floats y = code_at<BITS>(line, p);
#pragma GCC unroll 4
              for (int r = 0; r < R; ++r) sum[r][p][i] += x[r] * y;
            }
          }
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
          fold_all<float, N, 1>(sum[r][p]);
          part[r][p][b] = sum[r][p][0];
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        fold_all<float, BLOCKS, N>(part[r][p]);
        float* to = scores + r * TILE<float> + p * lines + t;
        const Floats all = part[r][p][0] + shift[r];
        if (last + 1 >= VL<float>)
          store(to, all);
        else
          memcpy(to, &all, sizeof(float) * size_t(last + 1));
      }
  }
}

// Where the packed values of a tile lie: `groups` of them, with their scales and zero points as
// float, `parts` a token; `channels` share one.
struct PackedValues {
  const uint8_t* codes;
  int64_t groups, lines, bytes;
  const float *scale, *zero;
  int64_t parts, channels;
};

// total[r] = total[r] * factor[r] + sum over tokens of weights[r][token] values[token], for R rows
// and C vectors from channel e on.
template <int BITS, int R, int C>
inline void sum_codes(float* total, int64_t across, const float* factor, const PackedValues& v,
                      int64_t e, const float* weights) {
  constexpr int P = 8 / BITS;
  Floats sum[R][C];
  int64_t part[C];
#pragma GCC unroll 4
  for (int c = 0; c < C; ++c) part[c] = imin((e + c * VL<float>) / v.channels, v.parts - 1);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c)
      sum[r][c] = load(total + r * across + e + c * VL<float>) * factor[r];
  const uint8_t* line = v.codes + e;
  for (int64_t g = 0; g < v.groups; ++g) {
    const int64_t first = g * P * v.lines;
    for (int64_t t = 0; t < v.lines; ++t, line += v.bytes) {
      Ints codes[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) codes[c] = bytes_at(line + c * VL<float>);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        const int64_t token = first + p * v.lines + t;
        const float *scale = v.scale + token * v.parts, *zero = v.zero + token * v.parts;
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
          const Floats y = code_at<BITS>(codes[c], p) * scale[part[c]] + zero[part[c]];
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) sum[r][c] += y * weights[r * TILE<float> + token];
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) store(total + r * across + e + c * VL<float>, sum[r][c]);
}
template <int BITS, int R>
inline void sum_all_codes(float* total, int64_t width, const float* factor, const PackedValues& v,
                          const float* weights) {
  constexpr int C = SUM_VECTORS / 4;
  int64_t e = 0;
  for (; e + C * VL<float> <= width; e += C * VL<float>)
    sum_codes<BITS, R, C>(total, width, factor, v, e, weights);
  for (; e < width; e += VL<float>) sum_codes<BITS, R, 1>(total, width, factor, v, e, weights);
}

// Call with the number of bits as a constant.
template <class With>
ACUTANCE_INLINE void by_bits(int64_t bits, const With& with) {
  if (bits == 8)
    with(Number<8>());
  else if (bits == 4)
    with(Number<4>());
  else
    with(Number<2>());
}
}  // namespace
#endif
