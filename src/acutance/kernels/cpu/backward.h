// The backward pass: one recomputing pass, a chunk of keys at a time, queries in the lanes.
//
// Scores are made again by the very operations of the forward pass. Gradients of keys and values
// add up where they belong, those of a block of queries in scratch; where several chunks share a
// head's keys, each has the queries' gradients to itself, and they are added in order.
#ifndef ACUTANCE_BACKWARD_H
#define ACUTANCE_BACKWARD_H

#include <math.h>

#include "mask.h"
#include "rows.h"
#include "shares.h"
#include "work.h"

namespace {

// What multiplies the terms of a lane group's score gradients.
template <class T>
struct Coefficients {
  Vec<T> shift[NV], constant[NV], linear[NV], square[NV], weight[NV], slope[NV], plain[NV];
};

// Which terms there are: of e up to the first power of t, all of e, all.
enum { LINEAR, WEIGHTED, ALL };

// Turn a tile's scores into weights e and, in `ds` (which holds grad_out . v), their gradients.
template <class T, bool MASKED, bool VALUES, int TERMS>
inline void score_gradients(T* scores, T* ds, const uint32_t* seen, int64_t count,
                            const Coefficients<T>& with) {
  typedef Vec<T> V;
  const Coefficients<T> row = with;  // a copy of which no store can change a number
  for (int64_t j = 0; j < count; ++j)
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) {
      const int64_t at = j * LANES<T> + v * VL<T>;
      V t = load(scores + at) - row.shift[v];
      IVec<T> mask = {};
      if (MASKED) mask = expand<T>(seen[j], v), t = choose<T>(mask, t, V{});
      V e = vexp(t);
      V g = row.linear[v];
      if (TERMS >= WEIGHTED) g += row.square[v] * t;
      g = g * t + row.constant[v];
      if (TERMS >= WEIGHTED) g += row.weight[v] * e;
      if (VALUES) g += load(ds + at);
      g *= e;
      if (TERMS == ALL) g += row.slope[v] * t + row.plain[v];
      if (MASKED) g = choose<T>(mask, g, V{}), e = choose<T>(mask, e, V{});
      store(ds + at, g);
      if (VALUES) store(scores + at, e);
    }
}

template <class T, class In>
struct Backward {
  typedef Vec<T> V;
  static constexpr int LN = LANES<T>;
  static constexpr int64_t QUERIES = Shares<T>::QUERIES;  // of a block
  static constexpr int64_t TILE = 128 / ROWS * ROWS;      // keys of a tile
  static constexpr int GROUPS = int(QUERIES) / LN;
  static constexpr bool same = sizeof(In) == sizeof(T);

  const Shares<T>& shared;
  const acutance_call& call;
  const acutance_gradients& grads;
  const int64_t E, Ev, query_step, out_step;
  const bool values, data, plain_scores;
  const int terms;
  Arena arena;
  T *queries, *query_rows, *outs, *out_rows, *totals, *scores, *ds, *slopes, *added, *keys,
      *value_rows;
  Coefficients<T>* rows;
  T* tops;  // largest scores so far, and their keys
  int64_t* top_keys;
  uint32_t* seen;
  bool finite;  // the block's queries and gradients
  bool ready;

  static int64_t up(int64_t width) { return (width + VL<T> - 1) / VL<T> * VL<T>; }

  explicit Backward(const Shares<T>& shared)
      : shared(shared), call(shared.call), grads(shared.grads), E(call.width),
        Ev(has_values(shared) ? call.value_width : 0), query_step(up(E)), out_step(up(Ev)),
        values(Ev != 0), data(masked_by_data(call)),
        plain_scores(call.softcap == 0 && !adds(call)),
        terms(grads.slope || grads.plain ? ALL : grads.square || grads.weight ? WEIGHTED : LINEAR),
        arena(need(shared)) {
    ready = arena.base != nullptr;
    if (!ready) return;
    queries = arena.take<T>(QUERIES * E);
    query_rows = arena.take<T>(QUERIES * query_step);
    outs = arena.take<T>(QUERIES * Ev);
    out_rows = arena.take<T>(QUERIES * out_step);
    totals = arena.take<T>(QUERIES * E);
    scores = arena.take<T>(TILE * LN);
    ds = values ? arena.take<T>(TILE * LN) : scores;
    slopes = arena.take<T>(call.softcap != 0 ? TILE * LN : 0);
    added = arena.take<T>(adds(call) ? TILE * LN : 0);
    keys = arena.take<T>(same ? 0 : TILE * E);
    value_rows = arena.take<T>(same ? 0 : TILE * Ev);
    rows = arena.take<Coefficients<T>>(GROUPS);
    tops = arena.take<T>(QUERIES);
    top_keys = arena.take<int64_t>(QUERIES);
    seen = arena.take<uint32_t>(TILE);
  }

  static bool has_values(const Shares<T>& shared) {
    return shared.grads.grad_out && shared.grads.inverse && shared.call.value_width;
  }
  static size_t need(const Shares<T>& shared) {
    const size_t each = sizeof(T);
    return Arena::bytes(QUERIES * up(shared.call.width), each) * 4 +
           Arena::bytes(QUERIES * up(shared.call.value_width), each) * 3 +
           Arena::bytes(TILE * LN, each) * 4 + Arena::bytes(GROUPS, sizeof(Coefficients<T>)) +
           Arena::bytes(QUERIES, each) + Arena::bytes(QUERIES, 8) + Arena::bytes(TILE, 4);
  }

  // An item is a chunk of a key head's keys, with all queries that see any of it.
  void item(int64_t i) {
    const int64_t chunk = i % shared.chunks, place = i / shared.chunks;
    const int64_t batch = place / call.heads, kv = place % call.heads;
    const int64_t start = shared.cuts[chunk], stop = shared.cuts[chunk + 1];
    for (int side = 0; side < 2; ++side) {
      T* to = (T*)(side ? grads.value : grads.key);
      const int64_t width = side ? call.value_width : E;
      if (to)
        memset(to + (place * call.keys + start) * width, 0,
               sizeof(T) * size_t((stop - start) * width));
    }
    for (int64_t g = 0; g < call.group; ++g)
      for (int64_t row = 0; row < call.queries; row += QUERIES)
        block(chunk, batch, kv * call.group + g, row, imin(QUERIES, call.queries - row));
  }

  void block(int64_t chunk, int64_t batch, int64_t head, int64_t row, int64_t count) {
    const int64_t kv = head / call.group;
    const int64_t base = (batch * call.heads * call.group + head) * call.queries + row;
    T* to = shared.query_part(chunk, base);
    const Span span = shared.span(chunk, row, count);
    if (span.start >= span.stop) {
      if (chunk == 0 && to) memset(to, 0, sizeof(T) * size_t(count * E));
      return;
    }
    const In* k = (const In*)call.key + batch * call.key_stride[0] + kv * call.key_stride[1];
    const In* v = values ? (const In*)call.value + batch * call.value_stride[0] +
                               kv * call.value_stride[1]
                         : nullptr;
    const int groups = int((count + LN - 1) / LN);
    lay(batch, head, row, count, base);
    for (int64_t start = span.start; start < span.stop; start += TILE) {
      const int64_t stop = imin(start + TILE, span.stop);
      Tile tile = {};
      tile.finite = finite;
      gather(k, v, start, stop, &tile);
      for (int g = 0; g < groups; ++g) {
        const int64_t first = row + g * LN, filled = imin(LN, count - g * LN);
        const Band own = band(call, first, first + filled - 1);
        const int64_t a = imax(start, own.start), z = imin(stop, own.stop);
        if (a < z) add(batch, head, first, filled, own, a, z - a, g, tile);
      }
    }
    T factor[LN];
    for (int l = 0; l < LN; ++l) factor[l] = T(call.scale);
    if (to)
      for (int g = 0; g < groups; ++g)
        lay_along<T, T>(totals + g * LN * E, factor, imin(LN, count - g * LN), E, to + g * LN * E,
                        E);
    if (shared.best)
      for (int64_t l = 0; l < count; ++l)
        if (top_keys[l] != NO_KEY)
          shared.best[chunk * shared.rows + base + l] = {tops[l], top_keys[l]};
  }

  // The block's queries and gradients, both as rows and across the lanes.
  void lay(int64_t batch, int64_t head, int64_t row, int64_t count, int64_t base) {
    const In* q = (const In*)call.query + batch * call.query_stride[0] +
                  head * call.query_stride[1] + row * call.query_stride[2];
    T factor[QUERIES];
    for (int64_t l = 0; l < count; ++l) factor[l] = T(call.scale);
    memset(query_rows, 0, sizeof(T) * size_t(QUERIES * query_step));
    lay_rows<T, In>(q, call.query_stride[2], count, E, factor, query_rows, query_step);
    finite = all_finite<T>(query_rows, query_step, count, E);
    if (values) {
      const In* out = (const In*)grads.grad_out + batch * grads.grad_out_stride[0] +
                      head * grads.grad_out_stride[1] + row * grads.grad_out_stride[2];
      memset(out_rows, 0, sizeof(T) * size_t(QUERIES * out_step));
      lay_rows<T, In>(out, grads.grad_out_stride[2], count, Ev, (const T*)grads.inverse + base,
                      out_rows, out_step);
      finite = finite && all_finite<T>(out_rows, out_step, count, Ev);
    }
    for (int64_t l = 0, g = 0; l < count; l += LN, ++g) {
      const int64_t filled = imin(LN, count - l);
      lay_across<T, T>(query_rows + l * query_step, query_step, filled, E, T(1), queries + l * E);
      if (values)
        lay_across<T, T>(out_rows + l * out_step, out_step, filled, Ev, T(1), outs + l * Ev);
      take(grads.m, base + l, filled, rows[g].shift);
      for (int n = 0; n < NV; ++n)
        rows[g].shift[n] = rows[g].shift[n] == T(-INFINITY) ? V{} : rows[g].shift[n];
      take(grads.constant, base + l, filled, rows[g].constant);
      take(grads.linear, base + l, filled, rows[g].linear);
      take(grads.square, base + l, filled, rows[g].square);
      take(grads.weight, base + l, filled, rows[g].weight);
      take(grads.slope, base + l, filled, rows[g].slope);
      take(grads.plain, base + l, filled, rows[g].plain);
    }
    memset(totals, 0, sizeof(T) * size_t(QUERIES * E));
    // no score below this is the largest, however the forward pass was rounded
    for (int64_t l = 0; l < count; ++l) {
      const T m = rows[l / LN].shift[l % LN / VL<T>][l % VL<T>];
      tops[l] = m - T(0.01) * (1 + (m < 0 ? -m : m)), top_keys[l] = NO_KEY;
    }
  }

  static void take(const void* from, int64_t at, int64_t count, V* to) {
    T room[LN] = {};
    if (from) memcpy(room, (const T*)from + at, sizeof(T) * size_t(count));
    for (int v = 0; v < NV; ++v) to[v] = load(room + v * VL<T>);
  }

  // A tile's keys and values as numbers of the sums' type.
  struct Tile {
    const T *k, *v;
    int64_t ks, vs, start;
    bool finite;
  };

  void gather(const In* k, const In* v, int64_t start, int64_t stop, Tile* tile) {
    const int64_t ks = call.key_stride[2], vs = call.value_stride[2], count = stop - start;
    tile->start = start;
    if (same) {
      tile->k = (const T*)k + start * ks, tile->ks = ks;
      tile->v = values ? (const T*)v + start * vs : nullptr, tile->vs = vs;
    } else {
      for (int64_t j = 0; j < count; ++j) {
        widen_row<T, In>(k + (start + j) * ks, keys + j * E, E);
        if (values) widen_row<T, In>(v + (start + j) * vs, value_rows + j * Ev, Ev);
      }
      tile->k = keys, tile->ks = E, tile->v = value_rows, tile->vs = Ev;
    }
    if (data || call.causal || call.window)
      tile->finite = tile->finite && all_finite<T>(tile->k, tile->ks, count, E);
  }

  // Add one lane group's share of a tile.
  void add(int64_t batch, int64_t head, int64_t first, int64_t filled, const Band& own,
           int64_t start, int64_t count, int g, const Tile& tile) {
    const bool whole = own.all_start <= start && start + count <= own.all_stop && !data;
    const T* extra = added;
    uint32_t* bits = seen;
    if (!whole) {
      Masks<T> masks(call, batch, head, first, filled);
      if (!masks.tile(start, count, own, seen, added)) return;
      // leave out keys at either end that no row sees, by whole register blocks
      int64_t a = 0, z = count;
      while (!seen[a]) ++a;
      while (!seen[z - 1]) --z;
      a = a / ROWS * ROWS, z = imin(count, (z + ROWS - 1) / ROWS * ROWS);
      start += a, count = z - a, bits += a, extra += a * LN;
    }
    const int64_t skipped = start - tile.start;
    const T* k = tile.k + skipped * tile.ks;
    const T* q = queries + g * LN * E;
    const bool capped = call.softcap != 0;
    if (shared.best && whole && plain_scores) {
      Extremes<T> found;
      tile_scores<T, true>(q, k, tile.ks, E, count, scores, &found);
      lead(found, nullptr, start, count, filled, g);
    } else {
      tile_scores<T, false>(q, k, tile.ks, E, count, scores, nullptr);
      if (!plain_scores)
        adjust<T>(call, head, first, start, count, scores, extra, capped ? slopes : nullptr);
      if (shared.best) {
        if (whole)
          for (int64_t j = 0; j < count; ++j) seen[j] = ~0u;
        Extremes<T> found;
        V visible[NV];
        look<T>(scores, bits, count, &found, visible);
        lead(found, bits, start, count, filled, g);
      }
    }
    if (values)
      tile_scores<T, false>(outs + g * LN * Ev, tile.v + skipped * tile.vs, tile.vs, Ev, count, ds,
                            nullptr);
    differentiate(whole, bits, count, rows[g]);
    if (capped)
      for (int64_t at = 0; at < count * LN; at += VL<T>)
        store(ds + at, load(ds + at) * load(slopes + at));
    spread(whole || tile.finite ? nullptr : bits, batch, head, start, count, filled, g, tile);
  }

  void differentiate(bool whole, const uint32_t* bits, int64_t count, const Coefficients<T>& row) {
    if (whole)
      values ? by_terms<false, true>(bits, count, row) : by_terms<false, false>(bits, count, row);
    else
      values ? by_terms<true, true>(bits, count, row) : by_terms<true, false>(bits, count, row);
  }
  template <bool MASKED, bool VALUES>
  void by_terms(const uint32_t* bits, int64_t count, const Coefficients<T>& row) {
    switch (terms) {
      case LINEAR: return score_gradients<T, MASKED, VALUES, LINEAR>(scores, ds, bits, count, row);
      case WEIGHTED:
        return score_gradients<T, MASKED, VALUES, WEIGHTED>(scores, ds, bits, count, row);
      default: return score_gradients<T, MASKED, VALUES, ALL>(scores, ds, bits, count, row);
    }
  }

  // From the gradients of the scores to those of queries, keys and values.
  void spread(const uint32_t* bits, int64_t batch, int64_t head, int64_t start, int64_t count,
              int64_t filled, int g, const Tile& tile) {
    const int64_t key = (batch * call.heads + head / call.group) * call.keys + start;
    const int64_t skipped = start - tile.start;
    T* total = totals + g * LN * E;
    const T* q = query_rows + g * LN * query_step;
    const T* out = out_rows + g * LN * out_step;
    T* dk = grads.key ? (T*)grads.key + key * E : nullptr;
    T* dv = values && grads.value ? (T*)grads.value + key * Ev : nullptr;
    if (bits) {
      if (grads.query)
        visible_weighted_sum<T>(total, tile.k + skipped * tile.ks, tile.ks, bits, ds, count, E);
      if (dk) visible_lane_sum<T>(dk, ds, q, query_step, bits, count, E);
      if (dv) visible_lane_sum<T>(dv, scores, out, out_step, bits, count, Ev);
      return;
    }
    V one[NV];
    for (int v = 0; v < NV; ++v) one[v] = splat(T(1));
    if (grads.query)
      weighted_sum<T>(total, one, tile.k + skipped * tile.ks, tile.ks, 0, ds, count, E);
    if (dk) lane_sum<T>(dk, ds, q, query_step, filled, count, E);
    if (dv) lane_sum<T>(dv, scores, out, out_step, filled, count, Ev);
  }

  // Note where a tile's score exceeds the largest so far; the earliest of equals stays.
  void lead(const Extremes<T>& found, const uint32_t* bits, int64_t start, int64_t count,
            int64_t filled, int g) {
    T* top = tops + g * LN;
    for (int v = 0; v < NV; ++v) {
      const IVec<T> more = found.largest[v] > load(top + v * VL<T>);
      for (int i = 0; i < VL<T>; ++i) {
        const int l = v * VL<T> + i;
        if (!more[i] || l >= filled) continue;
        int64_t j = 0;
        while (j + 1 < count &&
               (scores[j * LN + l] != found.largest[v][i] || (bits && !(bits[j] >> l & 1))))
          ++j;
        top[l] = found.largest[v][i], top_keys[g * LN + l] = start + j;
      }
    }
  }
};

template <class T, class In>
int backward(const acutance_call& call, const acutance_gradients& grads,
             acutance_parallel parallel) {
  Shares<T> shared(call, grads, Backward<T, In>::TILE);
  if (!shared.ready) return 3;
  const int64_t heads = call.batch * call.heads;
  int failed = share_out<Backward<T, In>>(shared, heads * shared.chunks, call.threads, parallel);
  if (!failed && shared.chunks > 1 && grads.query)
    failed = share_out<Merge<T>>(shared, heads * call.group * Merge<T>::blocks(call), call.threads,
                                 parallel);
  if (!failed && (grads.first || grads.largest))
    failed = share_out<Singles<T, In>>(shared, heads, call.threads, parallel);
  return failed;
}

}  // namespace
#endif
