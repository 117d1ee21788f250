// What one row sees of a tile whose keys lie in lanes, and what is added to its scores.
#ifndef ACUTANCE_DECODE_MASK_H
#define ACUTANCE_DECODE_MASK_H

#include "mask.h"
#include "vec.h"

namespace {

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

}  // namespace
#endif
