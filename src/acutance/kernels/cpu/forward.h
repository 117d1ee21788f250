// The forward pass with queries in the lanes of vectors.
//
// A tile of scores is stored transposed, key by key, so that the maximum, every sum and every
// moment of a row is a vertical operation; keys and values are broadcast from where they lie.
// Between tiles a row carries its running sums: moments of t = s - m with m the running maximum,
// the weighted second moment and the plain one about means, merged as Chan, Golub and LeVeque do.
#ifndef ACUTANCE_FORWARD_H
#define ACUTANCE_FORWARD_H

#include <math.h>

#include "gaps.h"
#include "mask.h"
#include "products.h"

namespace {

template <class T, class In, class Products>
struct Forward {
  struct Shared {
    const acutance_call& call;
    const acutance_sums& sums;
    int64_t blocks;
    const T* centres;  // mean value of each key head, for the noise sums
    int* unfinished;   // set where an output is not finite
  };
  typedef Vec<T> V;
  static constexpr int LN = LANES<T>;
  static constexpr int GROUPS = int(BLOCK) / LN;

  const acutance_call& call;
  const acutance_sums& sums;
  const int64_t E, Ev, blocks;
  const bool noise, data, plain_scores;
  Arena arena;
  Products products;
  T *outputs, *first_moments, *scores, *squares, *added, *rest, *sizes;
  const T *centres, *centre = nullptr;
  int* unfinished;
  Rows<T>* rows;
  Gaps<T>* gaps;  // null where they are not asked for
  uint32_t* seen;
  NextRows ahead[2];  // what the next tiles fetch while they score
  int turn = 0;
  bool ready;

  explicit Forward(const Shared& shared)
      : call(shared.call), sums(shared.sums), E(call.width), Ev(call.value_width),
        blocks(shared.blocks), noise(sums.noise), data(masked_by_data(call)),
        plain_scores(call.softcap == 0 && !adds(call)), arena(need(shared)), products(call, arena) {
    ready = arena.base != nullptr;
    if (!ready) return;
    outputs = arena.take<T>(BLOCK * Ev);
    first_moments = arena.take<T>(noise ? BLOCK * Ev : 0);
    scores = arena.take<T>(BLOCK * LN);
    squares = arena.take<T>(noise ? BLOCK * LN : 0);
    rest = arena.take<T>(noise ? BLOCK * Ev : 0);
    added = arena.take<T>(adds(call) ? BLOCK * LN : 0);
    sizes = arena.take<T>(noise ? BLOCK : 0);
    centres = shared.centres, unfinished = shared.unfinished;
    rows = arena.take<Rows<T>>(GROUPS);
    seen = arena.take<uint32_t>(BLOCK);
    gaps = sums.gaps ? arena.take<Gaps<T>>(GROUPS) : nullptr;
  }

  static size_t need(const Shared& shared) {
    const acutance_call& call = shared.call;
    const size_t each = sizeof(T);
    return Products::need(call) + Arena::bytes(BLOCK * call.value_width, each) * 3 +
           Arena::bytes(BLOCK * LN, each) * 3 +
           Arena::bytes(BLOCK, each) + Arena::bytes(GROUPS, sizeof(Rows<T>)) +
           Arena::bytes(BLOCK, 4) + Arena::bytes(shared.sums.gaps ? GROUPS : 0, sizeof(Gaps<T>)) +
           1024;
  }

  struct Place {
    int64_t batch, head, row, count;
  };

  // Items run through the blocks of a head, whose keys then stay in a shared cache; where position
  // hides keys long rows come first, so that the last items of all are short.
  Place place(int64_t i) const {
    const int64_t heads = call.heads * call.group;
    const int64_t head = i / blocks, turn = i % blocks;
    const int64_t row = (call.causal ? blocks - 1 - turn : turn) * BLOCK;
    return {head / heads, head % heads, row, imin(BLOCK, call.queries - row)};
  }

  const In* query_at(const Place& at) const {
    return (const In*)call.query + at.batch * call.query_stride[0] +
           at.head * call.query_stride[1] + at.row * call.query_stride[2];
  }

  void item(int64_t i) {
    // the queries a thread takes up next lie apart and would be waited for
    const int64_t next = i + call.threads;
    if (next < items()) {
      const Place at = place(next);
      const In* q = query_at(at);
      for (int64_t l = 0; l < at.count; ++l)
        for (int64_t e = 0; e < E; e += 64 / int64_t(sizeof(In)))
          __builtin_prefetch(q + l * call.query_stride[2] + e, 0, 2);
    }
    const Place at = place(i);
    attend(at.batch, at.head, at.row, at.count);
  }

  int64_t items() const { return call.batch * call.heads * call.group * blocks; }

  void attend(int64_t batch, int64_t head, int64_t row, int64_t count) {
    const int64_t kv = head / call.group;
    const In* q = query_at({batch, head, row, count});
    const In* k = (const In*)call.key + batch * call.key_stride[0] + kv * call.key_stride[1];
    const In* v = Ev ? (const In*)call.value + batch * call.value_stride[0] +
                           kv * call.value_stride[1]
                     : nullptr;
    const int groups = int((count + LN - 1) / LN);
    for (int g = 0; g < groups; ++g) {
      const int64_t filled = imin(LN, count - g * LN);
      products.lay(q + g * LN * call.query_stride[2], filled, g);
      rows[g].clear();
      if (gaps) gaps[g].clear();
    }
    memset(outputs, 0, sizeof(T) * size_t(groups * LN * Ev));
    if (noise) {
      memset(first_moments, 0, sizeof(T) * size_t(groups * LN * Ev));
      centre = centres + (batch * call.heads + kv) * Ev;
    }
    const Band span = band(call, row, row + count - 1);
    for (int64_t start = span.start; start < span.stop; start += BLOCK) {
      const int64_t stop = imin(start + BLOCK, span.stop);
      const int64_t vs = call.value_stride[2];
      products.block(k, v, start, stop);
      look_ahead(k, v, start, stop, span.stop);
      if (noise)
        for (int64_t j = 0; j < stop - start; ++j)
          sizes[j] = centre_row<T, In>(v + (start + j) * vs, centre, Ev, rest + j * Ev);
      for (int g = 0; g < groups; ++g) {
        const int64_t first = row + g * LN, filled = imin(LN, count - g * LN);
        const Band own = band(call, first, first + filled - 1);
        const int64_t z = imin(stop, own.stop);
        const int64_t from = imax(0, own.start - start) / Products::step * Products::step;
        if (start + from < z)
          tile(batch, head, first, filled, own, start + from, z - start - from, from, g);
      }
    }
    for (int g = 0; g < groups; ++g)
      finish(batch, head, row + g * LN, imin(LN, count - g * LN), g);
  }

  // The first tile of a block fetches the block's values, the second the next block's keys.
  void look_ahead(const In* k, const In* v, int64_t start, int64_t stop, int64_t end) {
    const int64_t ks = call.key_stride[2], vs = call.value_stride[2];
    ahead[0] = ahead[1] = NextRows();
    turn = 0;
    if (Ev) ahead[0] = rows_at(v + start * vs, vs, Ev, stop - start);
    if (stop < end) ahead[1] = rows_at(k + stop * ks, ks, E, imin(BLOCK, end - stop));
  }

  static NextRows rows_at(const In* from, int64_t stride, int64_t width, int64_t count) {
    const int64_t each = sizeof(In);
    return {(const char*)from, stride * each, width * each, count};
  }

  NextRows take_ahead() { return turn < 2 ? ahead[turn++] : NextRows(); }

  void tile(int64_t batch, int64_t head, int64_t first, int64_t filled, const Band& own,
            int64_t start, int64_t count, int64_t from, int g) {
    Rows<T>& row = rows[g];
    const bool whole = own.all_start <= start && start + count <= own.all_stop && !data;
    V factor[NV];
    if (whole && plain_scores) {
      Extremes<T> found;
      products.template score<true>(g, from, count, scores, &found, take_ahead());
      row.begin(found, T(count), factor);
      row.whole += count;
      if (!row.found) row.first_seen(start, scores);
      if (gaps) gaps[g].add(scores, nullptr, count, (const T*)row.m);
      weigh<false>(row, count, from);
    } else {
      Masks<T> masks(call, batch, head, first, filled);
      if (!masks.tile(start, count, own, seen, added)) return;
      products.template score<false>(g, from, count, scores, nullptr, take_ahead());
      if (!plain_scores) adjust<T>(call, head, first, start, count, scores, added, nullptr);
      Extremes<T> found;
      V visible[NV];
      look<T>(scores, seen, count, &found, visible);
      row.begin(found, visible, factor);
      for (int v = 0; v < NV; ++v)
        row.masked[v] += __builtin_convertvector(visible[v], IVec<T>);
      row.first_seen(start, count, scores, seen);
      if (gaps) gaps[g].add(scores, seen, count, (const T*)row.m);
      weigh<true>(row, count, from);
    }
    if (!Ev) return;
    products.add(outputs + g * LN * Ev, factor, scores, from, count);
    if (!noise) return;
    for (int v = 0; v < NV; ++v) factor[v] = square(factor[v]);
    weighted_sum<T>(first_moments + g * LN * Ev, factor, rest + from * Ev, Ev, 0, squares, count,
                    Ev);
  }

  template <bool MASKED>
  void weigh(Rows<T>& row, int64_t count, int64_t from) {
    if (noise)
      row.template weigh<MASKED, true>(scores, seen, count, squares, sizes + from);
    else
      row.template weigh<MASKED, false>(scores, seen, count, nullptr, nullptr);
  }

  void finish(int64_t batch, int64_t head, int64_t first, int64_t filled, int g) {
    const int64_t heads = call.heads * call.group;
    const int64_t base = (batch * heads + head) * call.queries + first;
    Row<T> row;
    if (gaps) gaps[g].finish();
    T inverse[LN] = {};
    for (int l = 0; l < filled; ++l) {
      rows[g].read(l, &row);
      write(base + l, row);
      if (gaps) gaps[g].read(l, sums.gaps + (base + l) * BINS);
      T normaliser = row.Z;
      if (call.sinks && row.m != T(-INFINITY))
        normaliser += T(exp(call.sinks[head] - double(row.m)));
      inverse[l] = normaliser == 0 ? T(0) : T(1) / normaliser;
    }
    if (!Ev) return;
    const T* total = outputs + g * LN * Ev;
    if ((data || call.causal || call.window) && !all_finite<T>(total, LN, Ev, LN))
      __atomic_store_n(unfinished, 1, __ATOMIC_RELAXED);
    In* out = (In*)sums.out + batch * sums.out_stride[0] + head * sums.out_stride[1] +
              first * sums.out_stride[2];
    lay_along<T, In>(total, inverse, filled, Ev, out, sums.out_stride[2]);
    if (!noise) return;
    T ones[LN], shares[LN] = {};
    for (int l = 0; l < LN; ++l) ones[l] = 1;
    for (int l = 0; l < filled; ++l) {
      rows[g].read(l, &row);
      shares[l] = row.Q == 0 ? T(0) : T(1) / row.Q;
    }
    T* R1 = (T*)sums.R1 + base * Ev;
    lay_along<T, T>(total, ones, filled, Ev, (T*)sums.O + base * Ev, Ev);
    lay_along<T, T>(first_moments + g * LN * Ev, shares, filled, Ev, R1, Ev);
    for (int l = 0; l < filled; ++l, R1 += Ev) {
      rows[g].read(l, &row);
      // R1 holds the mean about the centre: the spread about the mean, then the mean itself
      const T spread = row.R2 - row.Q * restore_row<T>(R1, centre, Ev, row.Q != 0);
      ((T*)sums.R2)[base + l] = spread < 0 ? T(0) : spread;
    }
  }

  void write(int64_t at, const Row<T>& row) {
    sums.n[at] = row.keys;
    ((T*)sums.m)[at] = row.m;
    ((T*)sums.Z)[at] = row.Z;
    ((T*)sums.U)[at] = row.U;
    ((T*)sums.W)[at] = row.W;
    ((T*)sums.Q)[at] = row.Q;
    ((T*)sums.mean)[at] = row.mean;
    ((T*)sums.M2)[at] = row.M2;
    ((T*)sums.depth)[at] = row.depth;
    ((T*)sums.first)[at] = row.first;
    sums.first_index[at] = row.first_index;
  }
};

// Mean value of each key head: moments of values about it lose no digits to a common offset.
template <class T, class In>
void average_values(const acutance_call& call, T* means) {
  const int64_t Ev = call.value_width;
  for (int64_t b = 0; b < call.batch; ++b)
    for (int64_t h = 0; h < call.heads; ++h, means += Ev) {
      const In* v =
          (const In*)call.value + b * call.value_stride[0] + h * call.value_stride[1];
      for (int64_t e = 0; e < Ev; ++e) means[e] = 0;
      for (int64_t j = 0; j < call.keys; ++j, v += call.value_stride[2])
        for (int64_t e = 0; e < Ev; ++e) means[e] += T(widen(v[e]));
      for (int64_t e = 0; e < Ev; ++e) means[e] /= T(call.keys);
    }
}

template <class T, class In, class Products>
int forward(const acutance_call& call, const acutance_sums& sums, acutance_parallel parallel) {
  typedef Forward<T, In, Products> Pass;
  const int64_t blocks = (call.queries + BLOCK - 1) / BLOCK;
  Arena means(sums.noise ? sizeof(T) * size_t(call.batch * call.heads * call.value_width) : 0);
  if (!means.base) return 3;
  int unfinished = 0;
  typename Pass::Shared shared = {call, sums, blocks, (const T*)means.base, &unfinished};
  if (sums.noise) average_values<T, In>(call, (T*)means.base);
  const int64_t items = call.batch * call.heads * call.group * blocks;
  const int failed = share_out<Pass>(shared, items, call.threads, parallel);
  return failed ? failed : unfinished ? 4 : 0;
}

}  // namespace
#endif
