// Parts of the backward pass: how it is shared out over keys, what is added when every share is done,
// and its second matrix product: sums over the lanes, with columns in the vectors.
#ifndef ACUTANCE_SHARES_H
#define ACUTANCE_SHARES_H

#include <math.h>

#include "mask.h"
#include "rows.h"
#include "vec.h"
#include "work.h"

namespace {

// A row's largest score among the keys of a chunk, and the earliest key that has it.
template <class T>
struct Best {
  T score = T(-INFINITY);
  int64_t index = NO_KEY;
};

struct Span {
  int64_t start, stop;
};

// Chunks of keys, of about the same work each; the same for every head.
template <class T>
struct Shares {
  static constexpr int64_t QUERIES = 128;  // of a block
  const acutance_call& call;
  const acutance_gradients& grads;
  int64_t chunks, rows;  // rows: batch, query heads and queries together
  int64_t* cuts;         // chunk c holds keys cuts[c] .. cuts[c + 1]
  Best<T>* best;         // (chunks, rows); null where nobody asks
  Arena plan, parts;     // parts: the queries' gradients by chunks after the first
  bool ready;

  Shares(const acutance_call& call, const acutance_gradients& grads, int64_t tile)
      : call(call), grads(grads), chunks(count(call, tile)),
        rows(call.batch * call.heads * call.group * call.queries), best(nullptr),
        plan(Arena::bytes(chunks + 1, sizeof(int64_t)) +
             (grads.largest ? Arena::bytes(chunks * rows, sizeof(Best<T>)) : 0)),
        parts(grads.query ? Arena::bytes((chunks - 1) * rows * call.width, sizeof(T)) : 0) {
    ready = plan.base && parts.base;
    if (!ready) return;
    cuts = plan.take<int64_t>(chunks + 1);
    if (grads.largest) {
      best = plan.take<Best<T>>(chunks * rows);
      for (int64_t i = 0; i < chunks * rows; ++i) best[i] = Best<T>();
    }
    cut(tile);
  }

  // Four items for each thread, so that none waits long for the last one.
  static int64_t count(const acutance_call& call, int64_t tile) {
    const int64_t heads = imax(1, call.batch * call.heads), tiles = (call.keys + tile - 1) / tile;
    if (call.threads <= 1 || heads >= 4 * call.threads) return 1;
    return imax(1, imin(tiles, (4 * call.threads + heads - 1) / heads));
  }

  // Rows that see any of keys start..stop by position, times the keys.
  int64_t work(int64_t start, int64_t stop) const {
    int64_t low = 0, high = call.queries;
    if (call.causal) low = imax(low, start - call.offset);
    if (call.window) {
      low = imax(low, start - call.offset - call.window + 1);
      high = imin(high, stop - 1 - call.offset + call.window);
    }
    return imax(0, high - low) * (stop - start);
  }

  void cut(int64_t tile) {
    int64_t all = 0, done = 0, chunk = 1;
    for (int64_t at = 0; at < call.keys; at += tile) all += work(at, imin(at + tile, call.keys));
    cuts[0] = 0;
    for (int64_t at = 0; at < call.keys && chunk < chunks; at += tile) {
      const int64_t stop = imin(at + tile, call.keys);
      done += work(at, stop);
      for (; chunk < chunks && double(done) * double(chunks) >= double(all) * double(chunk);
           ++chunk)
        cuts[chunk] = stop;
    }
    for (; chunk <= chunks; ++chunk) cuts[chunk] = call.keys;
  }

  // Keys of a chunk that some of `count` rows from `row` on see by position.
  Span span(int64_t chunk, int64_t row, int64_t count) const {
    const Band own = band(call, row, row + count - 1);
    return {imax(own.start, cuts[chunk]), imin(own.stop, cuts[chunk + 1])};
  }

  // Where a chunk writes the gradients of queries from row `base` of all rows on.
  T* query_part(int64_t chunk, int64_t base) const {
    if (!grads.query) return nullptr;
    return (chunk ? (T*)parts.base + (chunk - 1) * rows * call.width : (T*)grads.query) +
           base * call.width;
  }
};

// Adds the chunks' gradients of the queries, in their order.
template <class T>
struct Merge {
  static constexpr int64_t QUERIES = Shares<T>::QUERIES;
  const Shares<T>& shared;
  bool ready = true;

  explicit Merge(const Shares<T>& shared) : shared(shared) {}
  static int64_t blocks(const acutance_call& call) {
    return (call.queries + QUERIES - 1) / QUERIES;
  }

  void item(int64_t i) {
    const acutance_call& call = shared.call;
    const int64_t head = i / blocks(call), row = i % blocks(call) * QUERIES;
    const int64_t count = imin(QUERIES, call.queries - row), base = head * call.queries + row;
    T* to = shared.query_part(0, base);
    for (int64_t chunk = 1; chunk < shared.chunks; ++chunk) {
      const Span span = shared.span(chunk, row, count);
      if (span.start >= span.stop) continue;
      const T* from = shared.query_part(chunk, base);
      for (int64_t e = 0; e < count * call.width; ++e) to[e] += from[e];
    }
  }
};

// Adds what only one key of a row gets: the first it sees, and the one of the largest score.
template <class T, class In>
struct Singles {
  const Shares<T>& shared;
  const acutance_call& call;
  const acutance_gradients& grads;
  bool ready = true;

  explicit Singles(const Shares<T>& shared)
      : shared(shared), call(shared.call), grads(shared.grads) {}

  void item(int64_t i) {
    const int64_t batch = i / call.heads, kv = i % call.heads;
    for (int64_t g = 0; g < call.group; ++g)
      for (int64_t row = 0; row < call.queries; ++row) {
        const int64_t head = kv * call.group + g;
        const int64_t at = (batch * call.heads * call.group + head) * call.queries + row;
        if (grads.first)
          single(batch, head, row, at, grads.first_index[at], ((const T*)grads.first)[at]);
        if (grads.largest) single(batch, head, row, at, largest(at), ((const T*)grads.largest)[at]);
      }
  }

  int64_t largest(int64_t at) const {
    Best<T> found = shared.best[at];
    for (int64_t chunk = 1; chunk < shared.chunks; ++chunk) {
      const Best<T>& other = shared.best[chunk * shared.rows + at];
      if (other.score > found.score) found = other;
    }
    return found.index;
  }

  void single(int64_t batch, int64_t head, int64_t row, int64_t at, int64_t key, T grad) {
    if (key < 0 || key >= call.keys || grad == 0) return;
    const int64_t kv = head / call.group, E = call.width;
    const In* q = (const In*)call.query + batch * call.query_stride[0] +
                  head * call.query_stride[1] + row * call.query_stride[2];
    const In* k = (const In*)call.key + batch * call.key_stride[0] + kv * call.key_stride[1] +
                  key * call.key_stride[2];
    if (call.softcap != 0) {
      T score = 0;
      for (int64_t e = 0; e < E; ++e) score += T(widen(q[e])) * T(call.scale) * T(widen(k[e]));
      const T x = T(tanh(double(score) / call.softcap));
      grad *= 1 - x * x;
    }
    grad *= T(call.scale);
    T* dq = grads.query ? (T*)grads.query + at * E : nullptr;
    T* dk = grads.key ? (T*)grads.key + ((batch * call.heads + kv) * call.keys + key) * E : nullptr;
    for (int64_t e = 0; e < E; ++e) {
      if (dq) dq[e] += grad * T(widen(k[e]));
      if (dk) dk[e] += grad * T(widen(q[e]));
    }
  }
};

template <class T, bool WHOLE>
ACUTANCE_INLINE Vec<T> load_some(const T* from, int64_t count) {
  return WHOLE ? load(from) : widen_vector<T, T>(from, count);
}
template <class T, bool WHOLE>
ACUTANCE_INLINE void store_some(T* to, Vec<T> x, int64_t count) {
  if (WHOLE) return store(to, x);
  for (int64_t i = 0; i < imin(VL<T>, count); ++i) to[i] = x[i];
}

// R keys by W vectors of columns, of which `columns` are there.
template <class T, int R, int W, bool WHOLE>
ACUTANCE_INLINE void lane_block(T* to, int64_t width, int64_t columns, const T* weights,
                                const T* rows, int64_t step, int64_t lanes) {
  Vec<T> sum[R][W];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w)
      sum[r][w] = load_some<T, WHOLE>(to + r * width + w * VL<T>, columns - w * VL<T>);
  for (int64_t l = 0; l < lanes; ++l, ++weights, rows += step) {
    Vec<T> x[W];
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) x[w] = load(rows + w * VL<T>);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      T factor = weights[r * LANES<T>];
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) sum[r][w] += x[w] * factor;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w)
      store_some<T, WHOLE>(to + r * width + w * VL<T>, sum[r][w], columns - w * VL<T>);
}

// All keys, for W vectors of columns from `to` and `rows` on.
template <class T, int R, int W, bool WHOLE>
ACUTANCE_INLINE void lane_columns(T* to, int64_t width, int64_t columns, const T* weights,
                                  const T* rows, int64_t step, int64_t lanes, int64_t count) {
  constexpr int LN = LANES<T>;
  int64_t j = 0;
  for (; j + R <= count; j += R)
    lane_block<T, R, W, WHOLE>(to + j * width, width, columns, weights + j * LN, rows, step, lanes);
  for (; j + 2 <= count; j += 2)
    lane_block<T, 2, W, WHOLE>(to + j * width, width, columns, weights + j * LN, rows, step, lanes);
  for (; j < count; ++j)
    lane_block<T, 1, W, WHOLE>(to + j * width, width, columns, weights + j * LN, rows, step, lanes);
}

// to[j][e] += sum over lanes of weights[j][lane] rows[lane][e], for `count` keys j. Rows lie `step`
// apart, a multiple of VL, and hold zeros beyond their width.
template <class T>
inline void lane_sum(T* to, const T* weights, const T* rows, int64_t step, int64_t lanes,
                     int64_t count, int64_t width) {
  int64_t e = 0;
  if (ROWS == 8)  // registers enough for whole rows of 4 vectors
    for (; e + 4 * VL<T> <= width; e += 4 * VL<T>)
      lane_columns<T, 4, 4, true>(to + e, width, 4 * VL<T>, weights, rows + e, step, lanes, count);
  for (; e + 2 * VL<T> <= width; e += 2 * VL<T>)
    lane_columns<T, ROWS, 2, true>(to + e, width, 2 * VL<T>, weights, rows + e, step, lanes,
                                   count);
  for (; e < width; e += VL<T>)
    lane_columns<T, ROWS, 1, false>(to + e, width, width - e, weights, rows + e, step, lanes,
                                    count);
}

// Rows as they lie, widened and each multiplied by its own factor: to[lane][e].
template <class T, class In>
inline void lay_rows(const In* from, int64_t stride, int64_t count, int64_t width, const T* factor,
                     T* to, int64_t step) {
  for (int64_t l = 0; l < count; ++l)
    for (int64_t e = 0; e < width; e += VL<T>)
      store(to + l * step + e, widen_vector<T, In>(from + l * stride + e, width - e) * factor[l]);
}

// The products where a key or a query is no number: what a row does not see adds nothing to it,
// where a weight of zero would add 0 times that.
template <class T>
inline void visible_weighted_sum(T* total, const T* a, int64_t stride, const uint32_t* seen,
                                 const T* weights, int64_t count, int64_t width) {
  constexpr int LN = LANES<T>;
  for (int64_t j = 0; j < count; ++j)
    for (int64_t e = 0; e < width; ++e)
      for (int l = 0; l < LN; ++l)
        if (seen[j] >> l & 1) total[e * LN + l] += a[j * stride + e] * weights[j * LN + l];
}
template <class T>
inline void visible_lane_sum(T* to, const T* weights, const T* rows, int64_t step,
                             const uint32_t* seen, int64_t count, int64_t width) {
  for (int64_t j = 0; j < count; ++j)
    for (uint32_t rest = seen[j]; rest; rest &= rest - 1) {
      const int l = __builtin_ctz(rest);
      for (int64_t e = 0; e < width; ++e)
        to[j * width + e] += weights[j * LANES<T> + l] * rows[l * step + e];
    }
}

}  // namespace
#endif
