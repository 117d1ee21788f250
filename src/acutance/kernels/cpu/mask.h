// What a tile hides and adds: one bit for each key and lane, and numbers added to the scores.
#ifndef ACUTANCE_MASK_H
#define ACUTANCE_MASK_H

#include "api.h"
#include "vec.h"

namespace {

// Keys any row of first..last sees by position, and keys every one of them sees.
struct Band {
  int64_t start, stop, all_start, all_stop;
};

ACUTANCE_INLINE Band band(const acutance_call& call, int64_t first, int64_t last) {
  int64_t low = first + call.offset, high = last + call.offset;
  Band found = {0, call.keys, 0, call.keys};
  if (call.window) {
    found.start = low - call.window + 1, found.all_start = high - call.window + 1;
    found.stop = high + call.window, found.all_stop = low + call.window;
  }
  if (call.causal) {
    found.stop = imin(found.stop, high + 1), found.all_stop = imin(found.all_stop, low + 1);
  }
  found.start = imin(imax(found.start, 0), call.keys);
  found.stop = imax(imin(imax(found.stop, 0), call.keys), found.start);
  return found;
}

// Whether anything but position hides keys, and whether anything is added to scores.
inline bool masked_by_data(const acutance_call& call) {
  return call.allowed || call.key_mask || call.query_documents || call.additive[0].data ||
         call.additive[1].data;
}
inline bool adds(const acutance_call& call) {
  return call.additive[0].data || call.additive[1].data || call.slopes;
}

// Bits a and above; bits up to and including b.
ACUTANCE_INLINE uint32_t bits_from(int64_t a) { return a <= 0 ? ~0u : a > 31 ? 0u : ~0u << a; }
ACUTANCE_INLINE uint32_t bits_to(int64_t b) { return b < 0 ? 0u : b > 30 ? ~0u : (2u << b) - 1; }

// Transpose a 32 x 32 matrix of bits in place: bit j of word i becomes bit i of word j.
inline void transpose_bits(uint32_t* words) {
  uint32_t mask = 0x0000ffff;
  for (int step = 16; step; step >>= 1, mask ^= mask << step)
    for (int i = 0; i < 32; i = (i + step + 1) & ~step) {
      uint32_t swap = ((words[i] >> step) ^ words[i + step]) & mask;
      words[i] ^= swap << step;
      words[i + step] ^= swap;
    }
}

// Eight bytes as eight bits, the first lowest: 0 where a byte is 0, whatever else it holds.
ACUTANCE_INLINE uint32_t pack_bytes(const uint8_t* from) {
  const uint64_t low = 0x7f7f7f7f7f7f7f7full;
  uint64_t bytes;
  memcpy(&bytes, from, 8);
  bytes = (((bytes & low) + low) | bytes) & ~low;  // the highest bit of each byte that is not 0
  return uint32_t((bytes >> 7) * 0x0102040810204080ull >> 56);
}

template <class T, class In>
inline void additive_rows(
    const In* from, const acutance_additive& matrix, int64_t rows, int64_t keys, int lanes,
    T* tile, uint32_t* seen) {
  const int64_t across = matrix.stride[2], along = matrix.stride[3];
  const T limit = T(matrix.limit);
  if (!across) {  // the same for every row
    for (int64_t j = 0; j < keys; ++j) {
      T x = T(widen(from[j * along]));
      if (x <= limit) seen[j] = 0, x = 0;
      for (int l = 0; l < lanes; ++l) tile[j * lanes + l] += x;
    }
    return;
  }
  for (int64_t l0 = 0; l0 < rows; l0 += VL<T>)
    for (int64_t j0 = 0; j0 < keys; j0 += VL<T>) {
      const int64_t count = imin(VL<T>, keys - j0), filled = imin(VL<T>, rows - l0);
      Vec<T> block[VL<T>];
      for (int64_t i = 0; i < VL<T>; ++i) {
        const In* at = from + (l0 + i) * across + j0 * along;
        T room[VL<T>] = {};
        if (i >= filled)
          block[i] = Vec<T>{};
        else if (along == 1 && count == VL<T>)
          block[i] = widen_vector<T, In>(at, count);
        else {
          for (int64_t j = 0; j < count; ++j) room[j] = T(widen(at[j * along]));
          block[i] = load(room);
        }
      }
      transpose<T>(block);
      for (int64_t j = 0; j < count; ++j) {
        IVec<T> hidden = block[j] <= limit;
        seen[j0 + j] &= ~(lane_bits<T>(hidden) << l0);
        T* to = tile + (j0 + j) * lanes + l0;
        store(to, load(to) + choose<T>(hidden, Vec<T>{}, block[j]));
      }
    }
}

// One lane group's view of the masks: `rows` queries from `row` on, of batch b, query head h.
template <class T>
struct Masks {
  const acutance_call& call;
  int64_t batch, head, row, rows;
  bool by_data;

  Masks(const acutance_call& call, int64_t batch, int64_t head, int64_t row, int64_t rows)
      : call(call), batch(batch), head(head), row(row), rows(rows), by_data(masked_by_data(call)) {}

  // Bits of the rows that see key start + j, for j < keys. `added` (keys x LANES) receives what
  // additive masks add. Returns the bits of all keys or-ed.
  uint32_t tile(int64_t start, int64_t keys, const Band& band, uint32_t* seen, T* added) const {
    const int lanes = LANES<T>;
    const uint32_t all = bits_to(rows - 1);
    const int64_t origin = row + call.offset;
    bool whole = band.all_start <= start && start + keys <= band.all_stop;
    for (int64_t j = 0; j < keys; ++j) {
      uint32_t bits = all;
      if (!whole) {
        int64_t step = start + j - origin;
        if (call.causal) bits &= bits_from(step);
        if (call.window)
          bits &= bits_to(step + call.window - 1) & bits_from(step - call.window + 1);
      }
      seen[j] = bits;
    }
    if (by_data) data(start, keys, seen, added, lanes);
    uint32_t any = 0;
    for (int64_t j = 0; j < keys; ++j) any |= seen[j];
    return any;
  }

 private:
  void data(int64_t start, int64_t keys, uint32_t* seen, T* added, int lanes) const {
    if (call.key_mask) {
      const uint8_t* mask = call.key_mask + batch * call.key_mask_stride[0];
      for (int64_t j = 0; j < keys; ++j)
        if (!mask[(start + j) * call.key_mask_stride[1]]) seen[j] = 0;
    }
    if (call.query_documents) {
      const int64_t* own = call.query_documents + batch * call.query_documents_stride[0];
      const int64_t* theirs = call.key_documents + batch * call.key_documents_stride[0];
      int64_t last = 0;
      uint32_t bits = 0;
      for (int64_t j = 0; j < keys; ++j) {
        int64_t document = theirs[(start + j) * call.key_documents_stride[1]];
        if (j == 0 || document != last) {
          bits = 0, last = document;
          for (int64_t l = 0; l < rows; ++l)
            bits |= uint32_t(own[(row + l) * call.query_documents_stride[1]] == document) << l;
        }
        seen[j] &= bits;
      }
    }
    if (call.allowed) allowed(start, keys, seen);
    bool clear = true;
    for (const acutance_additive& matrix : call.additive) {
      if (!matrix.data) continue;
      if (clear) memset(added, 0, sizeof(T) * size_t(keys * lanes));
      clear = false;
      int64_t place = batch * matrix.stride[0] + head * matrix.stride[1] + row * matrix.stride[2] +
                      start * matrix.stride[3];
      if (matrix.dtype == ACUTANCE_F32)
        additive_rows((const float*)matrix.data + place, matrix, rows, keys, lanes, added, seen);
      else if (matrix.dtype == ACUTANCE_F64)
        additive_rows((const double*)matrix.data + place, matrix, rows, keys, lanes, added, seen);
      else if (matrix.dtype == ACUTANCE_BF16)
        additive_rows((const bf16*)matrix.data + place, matrix, rows, keys, lanes, added, seen);
      else
        additive_rows((const f16*)matrix.data + place, matrix, rows, keys, lanes, added, seen);
    }
  }

  void allowed(int64_t start, int64_t keys, uint32_t* seen) const {
    const int64_t across = call.allowed_stride[2], along = call.allowed_stride[3];
    const uint8_t* from = call.allowed + batch * call.allowed_stride[0] +
                          head * call.allowed_stride[1] + row * across + start * along;
    if (!across) {
      for (int64_t j = 0; j < keys; ++j)
        if (!from[j * along]) seen[j] = 0;
      return;
    }
    for (int64_t j = 0; j < keys; j += 32) {
      uint32_t words[32] = {};
      const int64_t count = imin(32, keys - j);
      for (int64_t l = 0; l < rows; ++l) {
        const uint8_t* at = from + l * across + j * along;
        uint32_t word = 0;
        if (along == 1 && count == 32)
          word = pack_bytes(at) | pack_bytes(at + 8) << 8 | pack_bytes(at + 16) << 16 |
                 pack_bytes(at + 24) << 24;
        else
          for (int64_t i = 0; i < count; ++i) word |= uint32_t(at[i * along] != 0) << i;
        words[l] = word;
      }
      transpose_bits(words);
      for (int64_t i = 0; i < count; ++i) seen[j + i] &= words[i];
    }
  }
};

// Clear `seen` where the bytes are 0.
template <class Int>
inline void keep_bytes(const uint8_t* from, int64_t along, int64_t count, Int* seen) {
  if (along == 1)
    for (int64_t j = 0; j < count; ++j) seen[j] &= -Int(from[j] != 0);
  else
    for (int64_t j = 0; j < count; ++j) seen[j] &= -Int(from[j * along] != 0);
}

template <class T, class In>
ACUTANCE_INLINE void add_numbers(const In* from, int64_t along, T limit, int64_t count, T* scores,
                                 typename Traits<T>::Int* seen) {
  typedef typename Traits<T>::Int Int;
  for (int64_t j = 0; j < count; ++j) {
    const T x = T(widen(from[j * along]));
    const bool hides = x <= limit;
    seen[j] &= -Int(!hides);
    scores[j] += hides ? T(0) : x;
  }
}
template <class T, class In>
inline void add_matrix(const In* from, int64_t along, T limit, int64_t count, T* scores,
                       typename Traits<T>::Int* seen) {
  if (along == 1)
    add_numbers<T, In>(from, 1, limit, count, scores, seen);
  else
    add_numbers<T, In>(from, along, limit, count, scores, seen);
}

// Query `row` of query head `head` in batch `batch`.
template <class T>
struct RowMask {
  typedef typename Traits<T>::Int Int;
  const acutance_call& call;
  int64_t batch, head, row;

  // Softcap scores and add slopes.
  void bend(int64_t start, int64_t count, T* scores) const {
    typedef Vec<T> V;
    const T cap = T(call.softcap), fall = call.slopes ? T(call.slopes[head]) : T(0);
    const int64_t place = row + call.offset - start;
    V step;
    for (int i = 0; i < VL<T>; ++i) step[i] = T(i);
    for (int64_t j = 0; j < count; j += VL<T>) {
      V s = load(scores + j);
      if (cap != 0) s = vtanh<T>(s / cap) * cap;
      if (call.slopes) {
        const V distance = T(place - j) - step;
        s -= fall * (distance < 0 ? -distance : distance);
      }
      store(scores + j, s);
    }
  }

  // seen[j]: -1 where key start + j is visible, else 0, up to a whole vector. Adds the additive
  // masks to `scores`. False where position hides all.
  bool look(int64_t start, int64_t count, T* scores, Int* seen) const {
    const Band own = band(call, row, row);
    const int64_t first = imax(own.start - start, 0), stop = imin(own.stop - start, count);
    if (first >= stop) return false;
    IVec<T> step;
    for (int i = 0; i < VL<T>; ++i) step[i] = Int(i);
    for (int64_t j = 0; j < count; j += VL<T>) {
      const IVec<T> place = step + Int(j);
      store(seen + j, (place >= Int(first)) & (place < Int(stop)));
    }
    if (call.key_mask)
      keep_bytes(call.key_mask + batch * call.key_mask_stride[0] + start * call.key_mask_stride[1],
                 call.key_mask_stride[1], count, seen);
    if (call.allowed)
      keep_bytes(call.allowed + at(call.allowed_stride, start), call.allowed_stride[3], count,
                 seen);
    if (call.query_documents) {
      const int64_t own_document = call.query_documents[batch * call.query_documents_stride[0] +
                                                        row * call.query_documents_stride[1]];
      const int64_t along = call.key_documents_stride[1];
      const int64_t* theirs =
          call.key_documents + batch * call.key_documents_stride[0] + start * along;
      for (int64_t j = 0; j < count; ++j) seen[j] &= -Int(theirs[j * along] == own_document);
    }
    for (const acutance_additive& matrix : call.additive) {
      if (!matrix.data) continue;
      const int64_t place = at(matrix.stride, start), along = matrix.stride[3];
      const T limit = T(matrix.limit);
      if (matrix.dtype == ACUTANCE_F32)
        add_matrix<T>((const float*)matrix.data + place, along, limit, count, scores, seen);
      else if (matrix.dtype == ACUTANCE_F64)
        add_matrix<T>((const double*)matrix.data + place, along, limit, count, scores, seen);
      else if (matrix.dtype == ACUTANCE_BF16)
        add_matrix<T>((const bf16*)matrix.data + place, along, limit, count, scores, seen);
      else
        add_matrix<T>((const f16*)matrix.data + place, along, limit, count, scores, seen);
    }
    return true;
  }

 private:
  int64_t at(const int64_t* stride, int64_t start) const {
    return batch * stride[0] + head * stride[1] + row * stride[2] + start * stride[3];
  }
};

// Softcap scores, then add masks, biases and slopes. `slope` receives the softcap's derivative.
template <class T>
inline void adjust(const acutance_call& call, int64_t head, int64_t row, int64_t start,
                   int64_t count, T* scores, const T* added, T* slope) {
  typedef Vec<T> V;
  constexpr int LN = LANES<T>;
  const T cap = T(call.softcap), fall = call.slopes ? T(call.slopes[head]) : T(0);
  const bool adds_matrix = call.additive[0].data || call.additive[1].data;
  T places[LN];
  for (int l = 0; l < LN; ++l) places[l] = T(row + call.offset - start + l);
  for (int64_t j = 0; j < count; ++j)
    for (int v = 0; v < NV; ++v) {
      const int64_t at = j * LN + v * VL<T>;
      V s = load(scores + at);
      if (cap != 0) {
        V x = vtanh<T>(s / cap);
        if (slope) store(slope + at, T(1) - x * x);
        s = x * cap;
      }
      if (call.slopes) {
        V distance = load(places + v * VL<T>) - T(j);
        s -= fall * (distance < 0 ? -distance : distance);
      }
      if (adds_matrix) s += load(added + at);
      store(scores + at, s);
    }
}

}  // namespace
#endif
