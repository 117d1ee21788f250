// How many keys lie how far below a row's maximum: the histogram of acutance.rowstats.gaps.
//
// Bins are quarters of a logit. A row keeps the 64 from its maximum down in a ring, by distance
// from its first maximum modulo 64: where the maximum rises, the slots that the new bins take are
// emptied, and nothing moves. With AVX2 pairs are counted 32 at a time, with AVX-512 64, by bits: a
// byte has one bit set for each key of eight bins, and planes of such bytes are added up as binary
// numbers are, carry by carry.
#ifndef ACUTANCE_GAPS_H
#define ACUTANCE_GAPS_H

#include <math.h>

#include "products.h"

namespace {

constexpr int BINS = 64;
constexpr double STEPS = 4;  // bins of a unit of logit

#if defined(__AVX512BW__)
typedef __m512i Bytes;
ACUTANCE_INLINE Bytes all_bytes(int x) { return _mm512_set1_epi8(char(x)); }
ACUTANCE_INLINE Bytes both_of(Bytes x, Bytes y) { return _mm512_and_si512(x, y); }
ACUTANCE_INLINE Bytes one_of(Bytes x, Bytes y) { return _mm512_xor_si512(x, y); }
ACUTANCE_INLINE Bytes where_equal(Bytes x, Bytes y, Bytes z) {
  return _mm512_maskz_mov_epi8(_mm512_cmpeq_epi8_mask(x, y), z);
}
ACUTANCE_INLINE bool none_set(Bytes x) { return !_mm512_test_epi32_mask(x, x); }
ACUTANCE_INLINE Bytes halves_sum(Bytes x) {  // of bytes at even and odd fours of each 16, as 16 bits
  const Bytes zero = _mm512_setzero_si512();
  const Bytes sum = _mm512_add_epi16(_mm512_unpacklo_epi8(x, zero), _mm512_unpackhi_epi8(x, zero));
  return _mm512_add_epi16(sum, _mm512_bsrli_epi128(sum, 8));
}
ACUTANCE_INLINE Bytes twice_and(Bytes x, Bytes y) {
  return _mm512_add_epi8(_mm512_add_epi8(x, x), y);
}
ACUTANCE_INLINE Bytes bit_of_each(Bytes x, int b) {
  return both_of(_mm512_srl_epi16(x, _mm_cvtsi32_si128(b)), all_bytes(1));
}
// low + x + y: its lower bit stays in low, its upper one is returned.
ACUTANCE_INLINE Bytes carry(Bytes& low, Bytes x, Bytes y) {
  const Bytes up = _mm512_ternarylogic_epi32(low, x, y, 0xe8);  // two of the three, or all
  low = _mm512_ternarylogic_epi32(low, x, y, 0x96);             // one of them, or all
  return up;
}
#elif defined(__AVX2__)
typedef __m256i Bytes;
ACUTANCE_INLINE Bytes all_bytes(int x) { return _mm256_set1_epi8(char(x)); }
ACUTANCE_INLINE Bytes both_of(Bytes x, Bytes y) { return _mm256_and_si256(x, y); }
ACUTANCE_INLINE Bytes one_of(Bytes x, Bytes y) { return _mm256_xor_si256(x, y); }
ACUTANCE_INLINE Bytes where_equal(Bytes x, Bytes y, Bytes z) {
  return _mm256_and_si256(_mm256_cmpeq_epi8(x, y), z);
}
ACUTANCE_INLINE bool none_set(Bytes x) { return _mm256_testz_si256(x, x); }
ACUTANCE_INLINE Bytes halves_sum(Bytes x) {  // of bytes at even and odd fours of each 16, as 16 bits
  const Bytes zero = _mm256_setzero_si256();
  const Bytes sum = _mm256_add_epi16(_mm256_unpacklo_epi8(x, zero), _mm256_unpackhi_epi8(x, zero));
  return _mm256_add_epi16(sum, _mm256_srli_si256(sum, 8));
}
ACUTANCE_INLINE Bytes twice_and(Bytes x, Bytes y) {
  return _mm256_add_epi8(_mm256_add_epi8(x, x), y);
}
ACUTANCE_INLINE Bytes bit_of_each(Bytes x, int b) {
  return both_of(_mm256_srl_epi16(x, _mm_cvtsi32_si128(b)), all_bytes(1));
}
// low + x + y: its lower bit stays in low, its upper one is returned.
ACUTANCE_INLINE Bytes carry(Bytes& low, Bytes x, Bytes y) {
  const Bytes either = _mm256_xor_si256(low, x), both = _mm256_and_si256(low, x);
  const Bytes up = _mm256_or_si256(both, _mm256_and_si256(either, y));
  low = _mm256_xor_si256(either, y);
  return up;
}
#endif

#if defined(__AVX2__)

// Counts of keys of 8 rows, 16 with AVX-512, and 64 bins, bit by bit: byte r + 4 k of each 16 of a
// plane is of row r of four and of every fourth key, bit b of the planes of group g is of bin 8 g + b.
struct Planes {
  static constexpr int ROWS_HERE = int(sizeof(Bytes)) / 4;
  static constexpr int DEPTH = 12;
  static constexpr int MOST = (1 << DEPTH) - 1;  // what a bit of the planes counts to
  static constexpr int CHUNK = 16, ROOM = int(BLOCK) / 4;

  Bytes plane[BINS / 8][DEPTH];
  int added;         // vectors of four keys since the planes were empty
  uint32_t touched;  // groups that are not empty

  void clear() { added = 0, touched = 0; }

  // Add keys: `group` says of each byte which group it is in, `bit` has its bit set.
  void add(const Bytes* group, const Bytes* bit, int count, uint32_t present) {
    for (; present; present &= present - 1) {
      const int g = __builtin_ctz(present);
      if (!(touched >> g & 1)) memset(plane[g], 0, sizeof plane[g]), touched |= 1u << g;
      const Bytes wanted = all_bytes(g);
      Bytes* to = plane[g];
      Bytes ones = to[0], twos = to[1], fours = to[2], eights = to[3];
      for (int i = 0; i < count; i += CHUNK) {
        Bytes high[2];
        for (int half = 0; half < 2; ++half) {
          Bytes x[8];
#pragma GCC unroll 8
          for (int k = 0; k < 8; ++k) {
            const int at = i + 8 * half + k;
            x[k] = where_equal(group[at], wanted, bit[at]);
          }
          const Bytes a = carry(ones, x[0], x[1]), b = carry(ones, x[2], x[3]);
          const Bytes c = carry(twos, a, b);
          const Bytes d = carry(ones, x[4], x[5]), e = carry(ones, x[6], x[7]);
          const Bytes f = carry(twos, d, e);
          high[half] = carry(fours, c, f);
        }
        Bytes rest = carry(eights, high[0], high[1]);
        for (int p = 4; p < DEPTH && !none_set(rest); ++p) {
          const Bytes both = both_of(to[p], rest);
          to[p] = one_of(to[p], rest);
          rest = both;
        }
      }
      to[0] = ones, to[1] = twos, to[2] = fours, to[3] = eights;
    }
    added += count;
  }

  // Empty one bin of one of the rows.
  void empty(int row, int bin) {
    const int g = bin / 8;
    if (!(touched >> g & 1)) return;
    const uint8_t keep = uint8_t(~(1u << bin % 8));
    for (int p = 0; p < DEPTH; ++p) {
      uint8_t* bytes = (uint8_t*)&plane[g][p] + row % 4 + row / 4 * 16;
      for (int k = 0; k < 4; ++k) bytes[4 * k] &= keep;
    }
  }

  // Add what is counted to the rows' counts, rows BINS apart, and be empty.
  void pour(int32_t* counts) {
    const int depth = added ? imin(DEPTH, 32 - __builtin_clz(unsigned(added))) : 0;
    for (uint32_t left = touched; left; left &= left - 1) {
      const int g = __builtin_ctz(left);
      for (int b = 0; b < 8; ++b) {
        Bytes low = all_bytes(0), high = low;  // of each byte's number, its lower 8 bits and the others
        for (int p = depth - 1; p >= 0; --p) {
          Bytes& sum = p < 8 ? low : high;
          sum = twice_and(sum, bit_of_each(plane[g][p], b));
        }
        low = halves_sum(low), high = halves_sum(high);
        uint16_t lower[sizeof(Bytes) / 2], upper[sizeof(Bytes) / 2];
        memcpy(lower, &low, sizeof lower);
        memcpy(upper, &high, sizeof upper);
        for (int r = 0; r < ROWS_HERE; ++r) {
          const int at = r % 4 + r / 4 * 8;
          counts[r * BINS + g * 8 + b] += lower[at] + 256 * upper[at];
        }
      }
    }
    clear();
  }
};

#endif

// The histograms of a lane group.
template <class T>
struct Gaps {
  static constexpr int LN = LANES<T>;
  static constexpr int MARGIN = 4;  // the first maximum's slot: rows then use the same groups

#if defined(__AVX2__)
  static constexpr bool BITS = sizeof(T) == 4;
  Planes planes[BITS ? LN / Planes::ROWS_HERE : 1];
#else
  static constexpr bool BITS = false;
#endif
  int32_t counts[LN * BINS];  // by slot of the ring
  T top[LN];          // the maximum's bin; NaN where there is none
  int32_t slot[LN];   // where the ring has it
  bool ordinary;      // the maxima are numbers that 16 bits hold

  void clear() {
    memset(counts, 0, sizeof counts);
    ordinary = true;
    for (int l = 0; l < LN; ++l) top[l] = T(NAN), slot[l] = 0;
#if defined(__AVX2__)
    for (Planes& part : planes) part.clear();
#endif
  }

  // Turn to new maxima. In most tiles no bin of them is another, and nothing is to be done.
  void rise(const T* largest) {
    T bin[LN];
    int still = 1;
    for (int l = 0; l < LN; ++l) {
      bin[l] = T(floor(largest[l] * T(STEPS)));
      still &= bin[l] <= top[l];
    }
    if (still) return;
    ordinary = true;
    for (int l = 0; l < LN; ++l) {
      if (bin[l] > top[l]) {
        const double by = double(bin[l]) - double(top[l]);
        const int rises = by < BINS ? int(by) : BINS;
        slot[l] = by - by == 0 ? (slot[l] + int(fmod(by, double(BINS)))) & (BINS - 1) : 0;
        top[l] = bin[l];
        for (int k = 0; k < rises; ++k) empty(l, (slot[l] - k) & (BINS - 1));
      } else if (top[l] != top[l] && bin[l] - bin[l] == 0) {
        top[l] = bin[l], slot[l] = MARGIN;
      }
      ordinary = ordinary &&
                 (largest[l] == T(-INFINITY) || (bin[l] > T(-32000) && bin[l] < T(32000)));
    }
  }

  void empty(int lane, int at) {
    counts[lane * BINS + at] = 0;
#if defined(__AVX2__)
    if (BITS) planes[lane / Planes::ROWS_HERE].empty(lane % Planes::ROWS_HERE, at);
#endif
  }

  // Count a tile's keys, of which there is room for whole fours. `largest` are the rows' maxima, of this tile and those before; `seen` is
  // null where no key of it is hidden.
  void add(const T* scores, const uint32_t* seen, int64_t count, const T* largest) {
    rise(largest);
#if defined(__AVX2__)
    if (BITS && ordinary) return add_bits((const float*)scores, seen, count);
#endif
    int first[LN];
    for (int l = 0; l < LN; ++l) first[l] = top[l] - top[l] == 0 ? slot[l] : -1;
    for (int64_t j = 0; j < count; ++j)
      for (int l = 0; l < LN; ++l) {
        if (first[l] < 0 || (seen && !(seen[j] >> l & 1))) continue;
        const T gap = top[l] - T(floor(scores[j * LN + l] * T(STEPS)));
        if (gap < T(BINS)) ++counts[l * BINS + ((first[l] - int(gap)) & (BINS - 1))];
      }
  }

  // Write a row's histogram, from the maximum down.
  void read(int l, int32_t* to) {
    const bool some = top[l] - top[l] == 0;
    const int first = some ? slot[l] : 0;
    for (int d = 0; d < BINS; ++d) to[d] = counts[l * BINS + ((first - d) & (BINS - 1))];
  }

  void finish() {
#if defined(__AVX2__)
    if (!BITS) return;
    for (int u = 0; u < LN / Planes::ROWS_HERE; ++u)
      planes[u].pour(counts + u * Planes::ROWS_HERE * BINS);
#endif
  }

#if defined(__AVX2__)
 private:
#if defined(__AVX512BW__)
  static ACUTANCE_INLINE __m512i bins(const float* from, const uint32_t* seen, int u) {
    __m512 s = _mm512_loadu_ps(from);
    if (seen) s = _mm512_mask_mov_ps(_mm512_set1_ps(-1e30f), __mmask16(*seen >> (16 * u)), s);
    // what no integer holds becomes the least one, far below any maximum
    return _mm512_cvt_roundps_epi32(_mm512_mul_ps(s, _mm512_set1_ps(float(STEPS))),
                                    _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  }

  template <bool MASKED>
  void sort(const float* scores, const uint32_t* seen, int64_t count, int u, Bytes* group, Bytes* bit,
            uint32_t* present) {
    const __m512i lowest = _mm512_set1_epi32(INT32_MIN), last = all_bytes(BINS - 1);
    int32_t tops[16];
    for (int l = 0; l < 16; ++l) {
      const T own = top[16 * u + l];
      tops[l] = own - own == 0 ? int(own) : 0;
    }
    __m512i wide, slots;
    memcpy(&wide, tops, sizeof wide);
    memcpy(&slots, slot + 16 * u, sizeof slots);
    const __m512i high = _mm512_packs_epi32(wide, wide);
    slots = _mm512_packs_epi32(slots, slots);
    const __m512i low = _mm512_packus_epi16(slots, slots);
    const __m512i one_of_eight = _mm512_set1_epi64(int64_t(0x8040201008040201ull));
    const __m512i one_of_groups = _mm512_maskz_mov_epi64(0x55, one_of_eight);
    __m512i found = _mm512_setzero_si512();
    for (int64_t j = 0; j < count; j += 4) {
      __m512i x[4];
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k)
        x[k] = bins(scores + (j + k) * LN + 16 * u, MASKED ? seen + j + k : nullptr, u);
      if (__builtin_expect(j + 4 > count, 0))
        for (int64_t k = count - j; k < 4; ++k) x[k] = lowest;
      const __m512i a = _mm512_subs_epi16(high, _mm512_packs_epi32(x[0], x[1]));
      const __m512i b = _mm512_subs_epi16(high, _mm512_packs_epi32(x[2], x[3]));
      const __m512i gap = _mm512_packus_epi16(a, b);
      const __mmask64 inside = _mm512_cmple_epu8_mask(gap, last);
      const __m512i at = both_of(_mm512_sub_epi8(low, gap), last);
      const __m512i which = both_of(_mm512_srli_epi16(at, 3), all_bytes(7));
      found = _mm512_or_si512(found, _mm512_maskz_shuffle_epi8(inside, one_of_groups, which));
      group[j / 4] = which;
      bit[j / 4] = _mm512_maskz_shuffle_epi8(inside, one_of_eight, at);
    }
    uint64_t parts[8], all = 0;
    memcpy(parts, &found, sizeof parts);
    for (int part = 0; part < 8; ++part) all |= parts[part];
    all |= all >> 32, all |= all >> 16, all |= all >> 8;
    *present = uint32_t(all & 0xff);
  }
#else
  static ACUTANCE_INLINE __m256i bins(const float* from, const uint32_t* seen, int u) {
    __m256 s = _mm256_loadu_ps(from);
    if (seen) {
      const __m256i place = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
      const __m256i bit = _mm256_and_si256(_mm256_set1_epi32(int(*seen >> (8 * u))), place);
      s = _mm256_blendv_ps(_mm256_set1_ps(-1e30f), s,
                           _mm256_castsi256_ps(_mm256_cmpeq_epi32(bit, place)));
    }
    // what no integer holds becomes the least one, far below any maximum
    return _mm256_cvtps_epi32(_mm256_floor_ps(_mm256_mul_ps(s, _mm256_set1_ps(float(STEPS)))));
  }

  template <bool MASKED>
  void sort(const float* scores, const uint32_t* seen, int64_t count, int u, __m256i* group,
            __m256i* bit, uint32_t* present) {
    const __m256i lowest = _mm256_set1_epi32(INT32_MIN), last = _mm256_set1_epi8(BINS - 1);
    int32_t tops[8];
    for (int l = 0; l < 8; ++l) {
      const T own = top[8 * u + l];
      tops[l] = own - own == 0 ? int(own) : 0;
    }
    __m256i wide, slots;
    memcpy(&wide, tops, sizeof wide);
    memcpy(&slots, slot + 8 * u, sizeof slots);
    const __m256i high = _mm256_packs_epi32(wide, wide);
    slots = _mm256_packs_epi32(slots, slots);
    const __m256i low = _mm256_packus_epi16(slots, slots);
    const __m256i one_of_eight = _mm256_setr_epi8(
        1, 2, 4, 8, 16, 32, 64, -128, 1, 2, 4, 8, 16, 32, 64, -128,
        1, 2, 4, 8, 16, 32, 64, -128, 1, 2, 4, 8, 16, 32, 64, -128);
    const __m256i one_of_groups = _mm256_setr_epi8(
        1, 2, 4, 8, 16, 32, 64, -128, 0, 0, 0, 0, 0, 0, 0, 0,
        1, 2, 4, 8, 16, 32, 64, -128, 0, 0, 0, 0, 0, 0, 0, 0);
    __m256i found = _mm256_setzero_si256();
    for (int64_t j = 0; j < count; j += 4) {
      __m256i x[4];
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k)
        x[k] = bins(scores + (j + k) * LN + 8 * u, MASKED ? seen + j + k : nullptr, u);
      if (__builtin_expect(j + 4 > count, 0))
        for (int64_t k = count - j; k < 4; ++k) x[k] = lowest;
      const __m256i a = _mm256_subs_epi16(high, _mm256_packs_epi32(x[0], x[1]));
      const __m256i b = _mm256_subs_epi16(high, _mm256_packs_epi32(x[2], x[3]));
      const __m256i gap = _mm256_packus_epi16(a, b);
      const __m256i inside = _mm256_cmpeq_epi8(_mm256_min_epu8(gap, last), gap);
      const __m256i at = _mm256_and_si256(_mm256_sub_epi8(low, gap), last);
      const __m256i which = _mm256_and_si256(_mm256_srli_epi16(at, 3), _mm256_set1_epi8(7));
      const __m256i own = _mm256_and_si256(_mm256_shuffle_epi8(one_of_groups, which), inside);
      found = _mm256_or_si256(found, own);
      group[j / 4] = which;
      bit[j / 4] = _mm256_and_si256(_mm256_shuffle_epi8(one_of_eight, at), inside);
    }
    uint64_t parts[4];
    memcpy(parts, &found, sizeof parts);
    uint64_t all = parts[0] | parts[1] | parts[2] | parts[3];
    all |= all >> 32, all |= all >> 16, all |= all >> 8;
    *present = uint32_t(all & 0xff);
  }
#endif

  void add_bits(const float* scores, const uint32_t* seen, int64_t count) {
    Bytes group[Planes::ROOM], bit[Planes::ROOM];
    const int vectors = int((count + 3) / 4);
    const int padded = (vectors + Planes::CHUNK - 1) / Planes::CHUNK * Planes::CHUNK;
    for (int u = 0; u < LN / Planes::ROWS_HERE; ++u) {
      uint32_t present;
      if (seen)
        sort<true>(scores, seen, count, u, group, bit, &present);
      else
        sort<false>(scores, seen, count, u, group, bit, &present);
      for (int v = vectors; v < padded; ++v) group[v] = bit[v] = all_bytes(0);
      if (planes[u].added + padded > Planes::MOST) planes[u].pour(counts + u * Planes::ROWS_HERE * BINS);
      planes[u].add(group, bit, padded, present);
    }
  }
#endif
};

}  // namespace
#endif
