// Where rows put their weight: the mass by octave of distance, on tokens, and the mean distance.
//
// Queries lie in the lanes, as in the forward pass, and scores are made the same way. A tile's
// weights are summed key by key; an octave of a row is the difference of two of those sums.
#ifndef ACUTANCE_STRUCTURE_H
#define ACUTANCE_STRUCTURE_H

#include <math.h>

#include "mask.h"
#include "products.h"

namespace {

constexpr int64_t PEAKS = 8;       // how far from its query the largest weight is looked for
constexpr int64_t NO_PEAK = -128;  // it is not that near, or not alone
constexpr int64_t OCTAVES = 64;

ACUTANCE_INLINE int64_t octave_of(int64_t distance) {
  return distance ? 64 - __builtin_clzll((unsigned long long)distance) : 0;
}

template <class T, class In>
struct Structure {
  struct Shared {
    const acutance_call& call;
    const acutance_places& places;
    int64_t blocks;
  };
  typedef Vec<T> V;
  typedef IVec<T> I;
  typedef typename Traits<T>::Int Int;
  typedef WideProducts<T, In> Products;
  static constexpr int LN = LANES<T>;
  static constexpr int GROUPS = int(BLOCK) / LN;
  static constexpr int NEAR = 2 * int(PEAKS) + 1;

  // What the rows of a lane group carry from tile to tile. Sums are of e = exp(s - m).
  struct Carried {
    V m[NV], Z[NV], far[NV], same[NV], special[NV];
    I same_there[NV], position[NV], token[NV];
    V place[NV];  // the position, as a number of the sums' type
    uint32_t seen, special_there;
    int64_t at[LN];
    T near[NEAR][LN];  // scores about the row's own position, NaN where there is no visible key
    T mass[2 * OCTAVES][LN];
    T count[2 * OCTAVES][LN];  // visible keys
  };

  const acutance_call& call;
  const acutance_places& places;
  const int64_t E, blocks, K;
  const bool data, plain_scores, distances;
  Arena arena;
  Products products;
  T *scores, *added, *running, *counted;
  Carried* rows;
  uint32_t* seen;
  bool ready;

  explicit Structure(const Shared& shared)
      : call(shared.call), places(shared.places), E(call.width), blocks(shared.blocks),
        K(places.octaves), data(masked_by_data(call)),
        plain_scores(call.softcap == 0 && !adds(call)), distances(places.positions != nullptr),
        arena(need(shared)), products(call, arena) {
    ready = arena.base != nullptr;
    if (!ready) return;
    scores = arena.take<T>(BLOCK * LN);
    added = arena.take<T>(BLOCK * LN);
    running = arena.take<T>((BLOCK + 1) * LN);
    counted = arena.take<T>((BLOCK + 1) * LN);
    rows = arena.take<Carried>(GROUPS);
    seen = arena.take<uint32_t>(BLOCK);
    for (int l = 0; l < LN; ++l) running[l] = counted[l] = 0;
    running += LN, counted += LN;  // number −1 is the sum of nothing
  }

  static size_t need(const Shared& shared) {
    return Products::need(shared.call) + Arena::bytes((BLOCK + 1) * LN, sizeof(T)) * 4 +
           Arena::bytes(GROUPS, sizeof(Carried)) + Arena::bytes(BLOCK, 4) + 1024;
  }

  void item(int64_t i) {
    const int64_t heads = call.heads * call.group, head = i / blocks % heads;
    const int64_t batch = i / blocks / heads, row = i % blocks * BLOCK;
    read(batch, head, row, imin(BLOCK, call.queries - row));
  }

  void read(int64_t batch, int64_t head, int64_t row, int64_t count) {
    const In* q = (const In*)call.query + batch * call.query_stride[0] +
                  head * call.query_stride[1] + row * call.query_stride[2];
    const In* k = (const In*)call.key + batch * call.key_stride[0] +
                  head / call.group * call.key_stride[1];
    const int groups = int((count + LN - 1) / LN);
    for (int g = 0; g < groups; ++g) {
      const int64_t filled = imin(LN, count - g * LN);
      products.lay(q + g * LN * call.query_stride[2], filled, g);
      begin(rows[g], batch, row + g * LN, filled);
    }
    const Band span = band(call, row, row + count - 1);
    for (int64_t start = span.start; start < span.stop; start += BLOCK) {
      const int64_t stop = imin(start + BLOCK, span.stop);
      products.block(k, nullptr, start, stop);
      for (int g = 0; g < groups; ++g) {
        const int64_t first = row + g * LN, filled = imin(LN, count - g * LN);
        const Band own = band(call, first, first + filled - 1);
        const int64_t from = imax(0, own.start - start), z = imin(stop, own.stop);
        if (start + from < z)
          tile(batch, head, first, filled, own, start + from, z - start - from, from, g);
      }
    }
    for (int g = 0; g < groups; ++g)
      finish(rows[g], batch, head, row + g * LN, imin(LN, count - g * LN));
  }

  void begin(Carried& r, int64_t batch, int64_t row, int64_t filled) {
    for (int v = 0; v < NV; ++v) {
      r.m[v] = splat(T(-INFINITY));
      r.Z[v] = r.far[v] = r.same[v] = r.special[v] = r.place[v] = V{};
      r.same_there[v] = r.position[v] = I{};
      r.token[v] = I{} - 1;
    }
    r.seen = r.special_there = 0;
    memset(r.mass, 0, sizeof(T) * size_t(2 * K * LN));
    memset(r.count, 0, sizeof(T) * size_t(2 * K * LN));
    for (int i = 0; i < NEAR; ++i)
      for (int l = 0; l < LN; ++l) r.near[i][l] = T(NAN);
    for (int l = 0; l < LN; ++l) {
      const int64_t i = row + imin(l, filled - 1);
      r.at[l] = -1;
      if (places.positions)
        r.at[l] = places.positions[batch * places.position_stride[0] + i * places.position_stride[1]];
      r.place[l / VL<T>][l % VL<T>] = T(r.at[l]);
      r.position[l / VL<T>][l % VL<T>] = Int(r.at[l]);
      if (!places.asked) continue;
      const int64_t token = places.asked[batch * places.asked_stride[0] + i * places.asked_stride[1]];
      r.token[l / VL<T>][l % VL<T>] = Int(token < 0 ? -1 : token);
    }
  }

  void tile(int64_t batch, int64_t head, int64_t first, int64_t filled, const Band& own,
            int64_t start, int64_t count, int64_t from, int g) {
    Carried& r = rows[g];
    Extremes<T> found;
    const bool whole = own.all_start <= start && start + count <= own.all_stop && !data;
    if (whole && plain_scores) {
      products.template score<true>(g, from, count, scores, &found, NextRows());
      for (int64_t j = 0; j < count; ++j) seen[j] = bits_to(filled - 1);
      r.seen = bits_to(filled - 1);
    } else {
      Masks<T> masks(call, batch, head, first, filled);
      const uint32_t any = masks.tile(start, count, own, seen, added);
      if (!any) return;
      r.seen |= any;
      products.template score<false>(g, from, count, scores, nullptr, NextRows());
      if (!plain_scores) adjust<T>(call, head, first, start, count, scores, added, nullptr);
      V visible[NV];
      look<T>(scores, seen, count, &found, visible);
    }
    if (places.scores) keep_scores(batch, head, first, filled, start, count);
    if (distances) keep_near(r, filled, start, count);
    shrink(r, found);
    const bool counts = distances && counting(head);
    if (whole)
      weigh<false>(r, start, count);
    else
      weigh<true>(r, start, count);
    if (places.special) add_special(r, batch, start, count);
    if (places.asked) {
      if (whole)
        add_same<false>(r, batch, start, count);
      else
        add_same<true>(r, batch, start, count);
    }
    if (!distances) return;
    if (counts && !whole) count_keys(count);
    for (int64_t l = 0; l < filled; ++l) {
      by_octave(r.mass, r.at[l], start, count, int(l),
                [&](int64_t low, int64_t high) {
                  return running[(high - 1) * LN + l] - running[(low - 1) * LN + l];
                });
      if (!counts) continue;
      by_octave(r.count, r.at[l], start, count, int(l), [&](int64_t low, int64_t high) {
        return whole ? T(high - low) : counted[(high - 1) * LN + l] - counted[(low - 1) * LN + l];
      });
    }
  }

  // Move to the maximum of a tile too.
  void shrink(Carried& r, const Extremes<T>& found) {
    V factor[NV];
    bool moved = false;
    for (int v = 0; v < NV; ++v) {
      const V top = vmax(r.m[v], found.largest[v]);
      factor[v] = r.m[v] == T(-INFINITY) ? splat(T(1)) : vexp(r.m[v] - top);
      r.m[v] = top;
      for (int i = 0; i < VL<T>; ++i) moved |= factor[v][i] != T(1);
    }
    if (!moved) return;
    for (int v = 0; v < NV; ++v) {
      r.Z[v] *= factor[v], r.far[v] *= factor[v], r.same[v] *= factor[v], r.special[v] *= factor[v];
      for (int64_t k = 0; k < 2 * K; ++k)
        store(r.mass[k] + v * VL<T>, load(r.mass[k] + v * VL<T>) * factor[v]);
    }
  }

  // Scores to weights; `running` receives their sums up to each key.
  template <bool MASKED>
  void weigh(Carried& r, int64_t start, int64_t count) {
    V sum[NV], far[NV], base[NV], place[NV];
    for (int v = 0; v < NV; ++v) {
      sum[v] = far[v] = V{};
      base[v] = r.m[v] == T(-INFINITY) ? V{} : r.m[v];
      place[v] = r.place[v] - T(start);
    }
    for (int64_t j = 0; j < count; ++j)
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) {
        V e = vexp(load(scores + j * LN + v * VL<T>) - base[v]);
        if (MASKED) e = choose<T>(expand<T>(seen[j], v), e, V{});
        const V away = place[v] - T(j);
        sum[v] += e;
        far[v] += e * vmax(away, -away);
        store(scores + j * LN + v * VL<T>, e);
        store(running + j * LN + v * VL<T>, sum[v]);
      }
    for (int v = 0; v < NV; ++v) r.Z[v] += sum[v], r.far[v] += far[v];
  }

  void count_keys(int64_t count) {
    V sum[NV];
    for (int v = 0; v < NV; ++v) sum[v] = V{};
    for (int64_t j = 0; j < count; ++j)
      for (int v = 0; v < NV; ++v) {
        sum[v] += choose<T>(expand<T>(seen[j], v), splat(T(1)), V{});
        store(counted + j * LN + v * VL<T>, sum[v]);
      }
  }

  void add_special(Carried& r, int64_t batch, int64_t start, int64_t count) {
    const uint8_t* marks = places.special + batch * places.special_stride[0];
    for (int64_t j = 0; j < count; ++j) {
      if (!marks[(start + j) * places.special_stride[1]]) continue;
      r.special_there |= seen[j];
      for (int v = 0; v < NV; ++v) r.special[v] += load(scores + j * LN + v * VL<T>);
    }
  }

  // The weight of other positions with the row's own token.
  template <bool MASKED>
  void add_same(Carried& r, int64_t batch, int64_t start, int64_t count) {
    const int64_t step = places.token_stride[1];
    const int64_t* tokens = places.tokens + batch * places.token_stride[0] + start * step;
    V same[NV];
    I there[NV];
    for (int v = 0; v < NV; ++v) same[v] = r.same[v], there[v] = r.same_there[v];
    for (int64_t j = 0; j < count; ++j) {
      const int64_t token = tokens[j * step];
      if (token < 0) continue;
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) {
        I hit = r.token[v] == (I{} + Int(token));
        if (distances) hit &= r.position[v] != (I{} + Int(start + j));
        if (MASKED) hit &= expand<T>(seen[j], v);
        same[v] += choose<T>(hit, load(scores + j * LN + v * VL<T>), V{});
        there[v] |= hit;
      }
    }
    for (int v = 0; v < NV; ++v) r.same[v] = same[v], r.same_there[v] = there[v];
  }

  // Add what `between` says of columns low..high of the tile to each octave of a row there.
  template <class Between>
  ACUTANCE_INLINE void by_octave(T (*sums)[LN], int64_t at, int64_t start, int64_t count, int lane,
                                 Between between) const {
    at -= start;
    if (at >= 0 && at < count) sums[0][lane] += between(at, at + 1);
    if (at > 0) {
      const int64_t stop = imin(at, count);  // columns 0..stop lie behind
      int64_t high = stop;
      for (int64_t k = octave_of(at - stop + 1); high > 0; ++k) {
        const int64_t low = imax(0, at + 1 - (int64_t(1) << k));
        sums[k][lane] += between(low, high);
        high = low;
      }
    }
    if (at < count - 1) {
      int64_t low = imax(0, at + 1);
      for (int64_t k = octave_of(low - at); low < count; ++k) {
        const int64_t high = imin(count, at + (int64_t(1) << k));
        sums[K + k][lane] += between(low, high);
        low = high;
      }
    }
  }

  void keep_near(Carried& r, int64_t filled, int64_t start, int64_t count) {
    for (int64_t l = 0; l < filled; ++l) {
      const int64_t at = r.at[l] - start;
      for (int64_t j = imax(0, at - PEAKS), z = imin(count, at + PEAKS + 1); j < z; ++j)
        if (seen[j] >> l & 1) r.near[j - at + PEAKS][l] = scores[j * LN + l];
    }
  }

  void keep_scores(int64_t batch, int64_t head, int64_t first, int64_t filled, int64_t start,
                   int64_t count) {
    const int64_t every = places.every, kept = (call.queries + every - 1) / every;
    const int64_t base = (batch * call.heads * call.group + head) * kept;
    for (int64_t l = (every - first % every) % every; l < filled; l += every) {
      T* to = (T*)places.scores + (base + (first + l) / every) * call.keys + start;
      for (int64_t j = 0; j < count; ++j)
        if (seen[j] >> l & 1) to[j] = scores[j * LN + l];
    }
  }

  // Whether visible keys are counted for a head: one stands for all where all see the same.
  bool counting(int64_t head) const { return places.by_head || head == 0; }

  void finish(const Carried& r, int64_t batch, int64_t head, int64_t first, int64_t filled) {
    const int64_t heads = call.heads * call.group;
    for (int64_t l = 0; l < filled; ++l) {
      const int64_t v = l / VL<T>, i = l % VL<T>;
      const int64_t to = (batch * heads + head) * call.queries + first + l;
      const bool any = r.seen >> l & 1;
      const T m = r.m[v][i] == T(-INFINITY) ? T(0) : r.m[v][i];
      T normaliser = r.Z[v][i];
      if (call.sinks) normaliser += T(exp(call.sinks[head] - double(m)));
      const T inverse = any ? T(1) / normaliser : T(NAN);
      if (places.special)
        ((T*)places.on_special)[to] =
            r.special_there >> l & 1 ? r.special[v][i] * inverse : T(NAN);
      if (places.asked)
        ((T*)places.on_same)[to] = r.same_there[v][i] ? r.same[v][i] * inverse : T(NAN);
      if (!distances) continue;
      ((T*)places.distance)[to] = r.far[v][i] * inverse;
      ((T*)places.on_self)[to] = T(exp(double(r.near[PEAKS][l] - m))) * inverse;
      ((T*)places.on_previous)[to] = T(exp(double(r.near[PEAKS - 1][l] - m))) * inverse;
      places.peak[to] = peak(r, l, r.m[v][i]);
      T* mass = (T*)places.mass + to * 2 * K;
      for (int64_t k = 0; k < 2 * K; ++k) {
        const T share = any ? r.mass[k][l] * inverse : T(0);
        mass[k] = share < 0 ? T(0) : share;
      }
      if (!counting(head)) continue;
      const int64_t row = places.by_head ? to : batch * call.queries + first + l;
      T total = 0, *even = (T*)places.even + row * 2 * K;
      for (int64_t k = 0; k < 2 * K; ++k) total += r.count[k][l];
      for (int64_t k = 0; k < 2 * K; ++k) even[k] = r.count[k][l] / (total < 1 ? T(1) : total);
    }
  }

  static int64_t peak(const Carried& r, int64_t lane, T top) {
    int64_t found = NO_PEAK;
    for (int64_t i = 0; i < NEAR; ++i)
      if (r.near[i][lane] == top && top > T(-INFINITY)) {
        if (found != NO_PEAK) return NO_PEAK;
        found = i - PEAKS;
      }
    return found;
  }
};

template <class T, class In>
int structure(const acutance_call& call, const acutance_places& places,
              acutance_parallel parallel) {
  typedef Structure<T, In> Pass;
  if (places.octaves > OCTAVES || call.value_width) return 2;
  const int64_t blocks = (call.queries + BLOCK - 1) / BLOCK;
  typename Pass::Shared shared = {call, places, blocks};
  return share_out<Pass>(shared, call.batch * call.heads * call.group * blocks, call.threads,
                         parallel);
}

}  // namespace
#endif
