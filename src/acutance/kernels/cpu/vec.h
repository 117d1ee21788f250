// Vectors of the compiler, and the few functions of them the kernels need.
//
// A lane group is LANES = 2 vectors of queries (or, when decoding, of keys). Nothing here calls
// the C++ library: a template of it, compiled for AVX-512, could be the copy every other part of
// the program gets.
#ifndef ACUTANCE_VEC_H
#define ACUTANCE_VEC_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define ACUTANCE_BYTES 64
#include <immintrin.h>
#elif defined(__AVX2__)
#define ACUTANCE_BYTES 32
#include <immintrin.h>
#else
#define ACUTANCE_BYTES 16
#endif

#define ACUTANCE_INLINE inline __attribute__((always_inline))

namespace {

template <class T>
struct VecOf {
  typedef T type __attribute__((vector_size(ACUTANCE_BYTES)));
};
template <class T>
using Vec = typename VecOf<T>::type;

template <class T>
struct Traits;
template <>
struct Traits<float> {
  typedef int32_t Int;
  static constexpr float lowest = -88.1f;  // exp of it is flushed to 0
  static constexpr float tiny = 1.17549435e-38f;
};
template <>
struct Traits<double> {
  typedef int64_t Int;
  static constexpr double lowest = -709.2;
  static constexpr double tiny = 2.2250738585072014e-308;
};
template <class T>
using IVec = Vec<typename Traits<T>::Int>;

constexpr int NV = 2;  // vectors of a lane group
template <class T>
constexpr int VL = ACUTANCE_BYTES / int(sizeof(T));
template <class T>
constexpr int LANES = NV * VL<T>;
// Rows of a register block: so many times NV sums stay in registers beside the operands.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int ROWS = 8;
#else
constexpr int ROWS = 6;
#endif

template <class T>
ACUTANCE_INLINE Vec<T> splat(T x) {
  return x - Vec<T>{};  // exact, and it keeps the sign of zero
}
template <class T>
ACUTANCE_INLINE Vec<T> load(const T* from) {
  Vec<T> x;
  memcpy(&x, from, sizeof x);
  return x;
}
template <class T>
ACUTANCE_INLINE void store(T* to, Vec<T> x) {
  memcpy(to, &x, sizeof x);
}
// The larger; y where either is no number.
template <class V>
ACUTANCE_INLINE V vmax(V x, V y) {
  return x > y ? x : y;
}
template <class V>
ACUTANCE_INLINE V vmin(V x, V y) {
  return x < y ? x : y;
}
ACUTANCE_INLINE int64_t imin(int64_t x, int64_t y) { return x < y ? x : y; }
ACUTANCE_INLINE int64_t imax(int64_t x, int64_t y) { return x > y ? x : y; }
template <class V>
ACUTANCE_INLINE V square(V x) {
  return x * x;
}

// Lanes whose bit is set, as an integer mask vector; the vector is number v of its group.
template <class T>
ACUTANCE_INLINE IVec<T> expand(uint32_t bits, int v) {
  typedef typename Traits<T>::Int Int;
  IVec<T> place;
  for (int i = 0; i < VL<T>; ++i) place[i] = Int(1) << i;
  return ((Int)(bits >> (v * VL<T>)) & place) != 0;
}
template <class T>
ACUTANCE_INLINE Vec<T> choose(IVec<T> mask, Vec<T> yes, Vec<T> no) {
  return mask ? yes : no;
}

// p 2^k for whole k: by the exponent's bits, or one instruction where there is one.
ACUTANCE_INLINE Vec<float> scale_by_power(Vec<float> p, Vec<float> z, Vec<float> k) {
#if defined(__AVX512F__)
  (void)z;
  return (Vec<float>)_mm512_mask_scalef_ps((__m512)p, __mmask16(-1), (__m512)p, (__m512)k);
#else
  (void)k;
  Vec<int32_t> bits;
  memcpy(&bits, &z, sizeof z);
  bits = (bits + 127) << 23;
  Vec<float> power;
  memcpy(&power, &bits, sizeof bits);
  return p * power;
#endif
}

// exp for x <= 0 (down to `lowest`, which everything below is taken for) and up to 88. NaN stays.
// x = k log 2 + r with |r| <= log(2) / 2, then a polynomial in r: for float the minimax one of
// degree 5, off by at most 1.05e-7; in double Taylor's. The product k log 2 is exact where it is
// fused with the subtraction; elsewhere log 2 is taken in two parts, the first of few digits.
ACUTANCE_INLINE Vec<float> vexp(Vec<float> x) {
  typedef Vec<float> V;
  x = x < Traits<float>::lowest ? splat(Traits<float>::lowest) : x;
  const V magic = splat(12582912.0f);
  V z = x * 1.44269504f + magic, k = z - magic;
#if defined(__FMA__) || defined(__AVX512F__) || defined(__aarch64__)
  V r = k * -0.693147181f + x;
#else
  V r = k * -0.693359375f + x;
  r = k * 2.12194440e-4f + r;
#endif
  V p = r * 8.312520222e-03f + 4.189015694e-02f;
  p = p * r + 1.666711465e-01f;
  p = p * r + 4.999923149e-01f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return scale_by_power(p, z, k);
}
ACUTANCE_INLINE Vec<double> vexp(Vec<double> x) {
  typedef Vec<double> V;
  x = x < Traits<double>::lowest ? splat(Traits<double>::lowest) : x;
  const V magic = splat(6755399441055744.0);
  V z = x * 1.4426950408889634 + magic, k = z - magic;
  V r = k * -0.693147180369123816490 + x;
  r = k * -1.90821492927058770002e-10 + r;
  V p = r * 1.6059043836821613e-10 + 2.0876756987868099e-9;
  p = p * r + 2.505210838544172e-8;
  p = p * r + 2.755731922398589e-7;
  p = p * r + 2.7557319223985893e-6;
  p = p * r + 2.48015873015873e-5;
  p = p * r + 1.984126984126984e-4;
  p = p * r + 1.3888888888888889e-3;
  p = p * r + 8.333333333333333e-3;
  p = p * r + 4.1666666666666664e-2;
  p = p * r + 1.6666666666666666e-1;
  p = p * r + 0.5;
  p = p * (r * r) + r + 1.0;
  Vec<int64_t> bits;
  memcpy(&bits, &z, sizeof z);
  bits = (bits + 1023) << 52;
  V power;
  memcpy(&power, &bits, sizeof bits);
  return p * power;
}

// tanh: by exp, and where that would cancel by an odd polynomial, minimax for float on |x| < 0.6
// (off by at most 3e-9), in double by the continued fraction x / (1 + x^2 / (3 + x^2 / ...)).
ACUTANCE_INLINE Vec<float> tanh_small(Vec<float> x) {
  Vec<float> z = x * x, p = z * -5.895158203e-03f + 2.079597178e-02f;
  p = p * z + -5.378383031e-02f;
  p = p * z + 1.333192413e-01f;
  p = p * z + -3.333329800e-01f;
  return p * z * x + x;
}
ACUTANCE_INLINE Vec<double> tanh_small(Vec<double> x) {
  Vec<double> z = x * x, f = splat(21.0);
  for (int k = 19; k > 0; k -= 2) f = double(k) + z / f;
  return x / f;
}
template <class T>
ACUTANCE_INLINE Vec<T> vtanh(Vec<T> x) {
  Vec<T> size = x < 0 ? -x : x;
  Vec<T> e = vexp(size * T(-2));
  Vec<T> large = (T(1) - e) / (T(1) + e);
  return size < T(0.6) ? tanh_small(x) : (x < 0 ? -large : large);
}

// Transpose VL vectors of VL numbers, swapping blocks of 1, 2, 4, ... across the diagonal.
template <class T, int STEP>
ACUTANCE_INLINE void swap_blocks(Vec<T>* rows) {
  IVec<T> upper, lower;
  for (int i = 0; i < VL<T>; ++i) {
    upper[i] = i & STEP ? VL<T> + i - STEP : i;
    lower[i] = i & STEP ? VL<T> + i : i + STEP;
  }
#pragma GCC unroll 16
  for (int i = 0; i < VL<T>; ++i)
    if (!(i & STEP)) {
      Vec<T> a = rows[i], b = rows[i + STEP];
      rows[i] = __builtin_shuffle(a, b, upper);
      rows[i + STEP] = __builtin_shuffle(a, b, lower);
    }
}
template <class T>
ACUTANCE_INLINE void transpose(Vec<T>* rows) {
  swap_blocks<T, 1>(rows);
  if (VL<T> > 2) swap_blocks<T, 2 % VL<T>>(rows);
  if (VL<T> > 4) swap_blocks<T, 4 % VL<T>>(rows);
  if (VL<T> > 8) swap_blocks<T, 8 % VL<T>>(rows);
}

// Natural logarithms are taken a row at a time, outside of any loop over keys: libm serves.

// Half-precision numbers as they lie in memory.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

ACUTANCE_INLINE float bits_to_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
ACUTANCE_INLINE uint32_t float_to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof x);
  return bits;
}
ACUTANCE_INLINE float widen(float x) { return x; }
ACUTANCE_INLINE double widen(double x) { return x; }
ACUTANCE_INLINE float widen(bf16 x) { return bits_to_float(uint32_t(x.bits) << 16); }
ACUTANCE_INLINE float widen(f16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  // place exponent and fraction, and let a multiplication by 2^112 set the exponent's origin; it
  // would be wrong only with denormals flushed, so small numbers are made from their integer
  uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
  if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  float size = rest < 0x400 ? float(rest) * 5.9604644775390625e-8f
                            : bits_to_float((rest << 13) + 0x38000000);
  return bits_to_float(sign | float_to_bits(size));
#endif
}
ACUTANCE_INLINE void narrow(float x, float* to) { *to = x; }
ACUTANCE_INLINE void narrow(double x, double* to) { *to = x; }
ACUTANCE_INLINE void narrow(float x, bf16* to) {  // round to nearest, ties to even
  uint32_t bits = float_to_bits(x);
  to->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
ACUTANCE_INLINE void narrow(float x, f16* to) {
#if defined(__F16C__)
  to->bits = uint16_t(_cvtss_sh(x, 0));
#else
  uint32_t bits = float_to_bits(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) {
    to->bits = uint16_t(sign | 0x7e00);
  } else if (size >= 0x477ff000) {
    to->bits = uint16_t(sign | 0x7c00);
  } else if (size < 0x38800000) {  // below the normal numbers: count steps of 2^-24
    float steps = bits_to_float(size) * 16777216.0f + 8388608.0f;
    to->bits = uint16_t(sign | (float_to_bits(steps) & 0x7fff));
  } else {
    to->bits = uint16_t(sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
  }
#endif
}
template <class T, class In>
ACUTANCE_INLINE void widen_row(const In* from, T* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = T(widen(from[i]));
}
#if defined(__F16C__)
template <>
ACUTANCE_INLINE void widen_row<float, f16>(const f16* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i))));
  for (; i < count; ++i) to[i] = widen(from[i]);
}
#endif

// A vector of a row's next numbers; beyond `count` of them, zeros. A whole one is by far the most
// common, and must not become a call that copies some number of bytes.
template <class T, class In>
ACUTANCE_INLINE Vec<T> widen_vector(const In* from, int64_t count) {
  if (sizeof(In) == sizeof(T) && count >= VL<T>) return load((const T*)from);
  T room[VL<T>] = {};
  if (count >= VL<T>) {
#pragma GCC unroll 16
    for (int i = 0; i < VL<T>; ++i) room[i] = T(widen(from[i]));
  } else {
    for (int64_t i = 0; i < count; ++i) room[i] = T(widen(from[i]));
  }
  return load(room);
}
template <class T, class Out>
ACUTANCE_INLINE void narrow_vector(Vec<T> x, Out* to, int64_t count) {
  if (sizeof(Out) == sizeof(T) && count >= VL<T>) return store((T*)to, x);
  T room[VL<T>];
  store(room, x);
  if (count >= VL<T>) {
#pragma GCC unroll 16
    for (int i = 0; i < VL<T>; ++i) narrow(room[i], to + i);
  } else {
    for (int64_t i = 0; i < count; ++i) narrow(room[i], to + i);
  }
}

// The lanes of a mask vector as bits.
template <class T>
ACUTANCE_INLINE uint32_t lane_bits(IVec<T> mask) {
#if defined(__AVX512DQ__)
  if (sizeof(T) == 4) return _mm512_movepi32_mask((__m512i)mask);
  return _mm512_movepi64_mask((__m512i)mask);
#elif defined(__AVX2__)
  if (sizeof(T) == 4) return uint32_t(_mm256_movemask_ps((__m256)mask));
  return uint32_t(_mm256_movemask_pd((__m256d)mask));
#else
  uint32_t bits = 0;
  for (int i = 0; i < VL<T>; ++i) bits |= uint32_t(mask[i] & 1) << i;
  return bits;
#endif
}

// rows x NV sums += rows broadcast from `a` times the lane vectors of `b`, over `steps`:
//   sum[r] += a[r * across + k * along] * b[k]
template <class T, int R>
ACUTANCE_INLINE void multiply_add(
    Vec<T> (&sum)[R][NV], const T* a, int64_t across, int64_t along, const T* b, int64_t steps) {
  for (int64_t k = 0; k < steps; ++k, a += along, b += LANES<T>) {
    Vec<T> x[NV];
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) x[v] = load(b + v * VL<T>);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      T factor = a[r * across];
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) sum[r][v] += x[v] * factor;
    }
  }
}

// Whether every number is finite.
template <class T>
inline bool all_finite(const T* from, int64_t stride, int64_t count, int64_t width) {
  Vec<T> sum = {};
  for (int64_t l = 0; l < count; ++l)
    for (int64_t e = 0; e < width; e += VL<T>)
      sum += widen_vector<T, T>(from + l * stride + e, width - e) * T(0);
  for (int i = 0; i < VL<T>; ++i)
    if (sum[i] != 0) return false;
  return true;
}

}  // namespace
#endif
