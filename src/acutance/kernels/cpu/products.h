// The two matrix products of a tile, and how queries, keys and values are laid out for them.
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
#endif
