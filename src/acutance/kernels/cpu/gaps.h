// How many keys lie how far below a row's maximum: the histogram of acutance.rowstats.gaps.
//
// Bins are quarters of a logit. A row keeps the 64 from its maximum down in a ring, by distance
// from its first maximum modulo 64: where the maximum rises, the slots that the new bins take are
// emptied, and nothing moves. With AVX2 keys are counted 32 at a time by bits: a byte has one bit set for each key of
// eight bins, and planes of such bytes are added up as binary numbers are, carry by carry.
#ifndef ACUTANCE_GAPS_H
#define ACUTANCE_GAPS_H

#include <math.h>

#include "products.h"

namespace {

constexpr int BINS = 64;
constexpr double STEPS = 4;  // bins of a unit of logit

#if defined(__AVX2__)

// Counts of keys of 8 rows and 64 bins, bit by bit: byte r + 4 k (+ 16 for the upper rows) of a
// plane is of row r and of every fourth key, bit b of the planes of group g is of bin 8 g + b.
struct Planes {
  static constexpr int DEPTH = 12;
  static constexpr int MOST = (1 << DEPTH) - 1;  // what a bit of the planes counts to
  static constexpr int CHUNK = 16, ROOM = int(BLOCK) / 4;

  __m256i plane[BINS / 8][DEPTH];
  int added;         // vectors of four keys since the planes were empty
  uint32_t touched;  // groups that are not empty

  void clear() { added = 0, touched = 0; }

  // Add keys: `group` says of each byte which group it is in, `bit` has its bit set.
  void add(const __m256i* group, const __m256i* bit, int count, uint32_t present) {
    for (; present; present &= present - 1) {
      const int g = __builtin_ctz(present);
      if (!(touched >> g & 1)) memset(plane[g], 0, sizeof plane[g]), touched |= 1u << g;
      const __m256i wanted = _mm256_set1_epi8(char(g));
      __m256i* to = plane[g];
      __m256i ones = to[0], twos = to[1], fours = to[2], eights = to[3];
      for (int i = 0; i < count; i += CHUNK) {
        __m256i high[2];
        for (int half = 0; half < 2; ++half) {
          __m256i x[8];
#pragma GCC unroll 8
          for (int k = 0; k < 8; ++k) {
            const int at = i + 8 * half + k;
            x[k] = _mm256_and_si256(_mm256_cmpeq_epi8(group[at], wanted), bit[at]);
          }
          const __m256i a = carry(ones, x[0], x[1]), b = carry(ones, x[2], x[3]);
          const __m256i c = carry(twos, a, b);
          const __m256i d = carry(ones, x[4], x[5]), e = carry(ones, x[6], x[7]);
          const __m256i f = carry(twos, d, e);
          high[half] = carry(fours, c, f);
        }
        __m256i rest = carry(eights, high[0], high[1]);
        for (int p = 4; p < DEPTH && !_mm256_testz_si256(rest, rest); ++p) {
          const __m256i both = _mm256_and_si256(to[p], rest);
          to[p] = _mm256_xor_si256(to[p], rest);
          rest = both;
        }
      }
      to[0] = ones, to[1] = twos, to[2] = fours, to[3] = eights;
    }
    added += count;
  }

  // low + x + y: its lower bit stays in low, its upper one is returned.
  static ACUTANCE_INLINE __m256i carry(__m256i& low, __m256i x, __m256i y) {
    const __m256i either = _mm256_xor_si256(low, x), both = _mm256_and_si256(low, x);
    const __m256i up = _mm256_or_si256(both, _mm256_and_si256(either, y));
    low = _mm256_xor_si256(either, y);
    return up;
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
    const __m256i one = _mm256_set1_epi8(1), zero = _mm256_setzero_si256();
    for (uint32_t left = touched; left; left &= left - 1) {
      const int g = __builtin_ctz(left);
      for (int b = 0; b < 8; ++b) {
        __m256i low = zero, high = zero;  // of each byte's number, its lower 8 bits and the others
        const __m128i shift = _mm_cvtsi32_si128(b);
        for (int p = depth - 1; p >= 0; --p) {
          const __m256i x = _mm256_and_si256(_mm256_srl_epi16(plane[g][p], shift), one);
          __m256i& sum = p < 8 ? low : high;
          sum = _mm256_add_epi8(_mm256_add_epi8(sum, sum), x);
        }
        __m256i sum = _mm256_add_epi16(_mm256_unpacklo_epi8(low, zero), _mm256_unpackhi_epi8(low, zero));
        const __m256i more =
            _mm256_add_epi16(_mm256_unpacklo_epi8(high, zero), _mm256_unpackhi_epi8(high, zero));
        sum = _mm256_add_epi16(sum, _mm256_slli_epi16(more, 8));
        sum = _mm256_add_epi16(sum, _mm256_srli_si256(sum, 8));
        uint16_t each[16];
        memcpy(each, &sum, sizeof each);
        for (int r = 0; r < 8; ++r) counts[r * BINS + g * 8 + b] += each[r % 4 + r / 4 * 8];
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
  Planes planes[BITS ? LN / 8 : 1];
#else
  static constexpr bool BITS = false;
#endif
  int32_t counts[LN * BINS];  // by slot of the ring
  T top[LN];   // the maximum's bin; NaN where there is none
  T base[LN];  // the bin at slot 0

  void clear() {
    memset(counts, 0, sizeof counts);
    for (int l = 0; l < LN; ++l) top[l] = T(NAN), base[l] = 0;
#if defined(__AVX2__)
    for (Planes& part : planes) part.clear();
#endif
  }

  int slot(int l) const {  // of the maximum
    return int(int64_t(fmod(double(top[l]) - double(base[l]), double(BINS)))) & (BINS - 1);
  }

  // Turn to new maxima; whether all of them are numbers that 16 bits hold.
  bool rise(const T* largest) {
    bool ordinary = true;
    for (int l = 0; l < LN; ++l) {
      const T bin = T(floor(largest[l] * T(STEPS)));
      if (bin > top[l]) {
        const int rises = bin - top[l] < T(BINS) ? int(bin - top[l]) : BINS;
        top[l] = bin;
        for (int k = 0, first = slot(l); k < rises; ++k) empty(l, (first - k) & (BINS - 1));
      } else if (top[l] != top[l] && bin - bin == 0) {
        top[l] = bin, base[l] = bin - T(MARGIN);
      }
      ordinary = ordinary && (largest[l] == T(-INFINITY) || (bin > T(-32000) && bin < T(32000)));
    }
    return ordinary;
  }

  void empty(int lane, int at) {
    counts[lane * BINS + at] = 0;
#if defined(__AVX2__)
    if (BITS) planes[lane / 8].empty(lane % 8, at);
#endif
  }

  // Count a tile's keys, of which there is room for whole fours. `largest` are the rows' maxima, of this tile and those before; `seen` is
  // null where no key of it is hidden.
  void add(const T* scores, const uint32_t* seen, int64_t count, const T* largest) {
    const bool ordinary = rise(largest);
#if defined(__AVX2__)
    if (BITS && ordinary) return add_bits((const float*)scores, seen, count);
#endif
    (void)ordinary;
    int first[LN];
    for (int l = 0; l < LN; ++l) first[l] = top[l] - top[l] == 0 ? slot(l) : -1;
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
    const int first = some ? slot(l) : 0;
    for (int d = 0; d < BINS; ++d) to[d] = counts[l * BINS + ((first - d) & (BINS - 1))];
  }

  void finish() {
#if defined(__AVX2__)
    if (!BITS) return;
    for (int u = 0; u < LN / 8; ++u) planes[u].pour(counts + u * 8 * BINS);
#endif
  }

#if defined(__AVX2__)
 private:
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
    int32_t tops[8], firsts[8];
    for (int l = 0; l < 8; ++l) {
      const T own = top[8 * u + l];
      const bool some = own - own == 0;
      tops[l] = some ? int(own) : 0, firsts[l] = some ? slot(8 * u + l) : 0;
    }
    __m256i wide, slots;
    memcpy(&wide, tops, sizeof wide);
    memcpy(&slots, firsts, sizeof slots);
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

  void add_bits(const float* scores, const uint32_t* seen, int64_t count) {
    __m256i group[Planes::ROOM], bit[Planes::ROOM];
    const int vectors = int((count + 3) / 4);
    const int padded = (vectors + Planes::CHUNK - 1) / Planes::CHUNK * Planes::CHUNK;
    for (int u = 0; u < LN / 8; ++u) {
      uint32_t present;
      if (seen)
        sort<true>(scores, seen, count, u, group, bit, &present);
      else
        sort<false>(scores, seen, count, u, group, bit, &present);
      for (int v = vectors; v < padded; ++v) group[v] = bit[v] = _mm256_setzero_si256();
      if (planes[u].added + padded > Planes::MOST) planes[u].pour(counts + u * 8 * BINS);
      planes[u].add(group, bit, padded, present);
    }
  }
#endif
};

}  // namespace
#endif
