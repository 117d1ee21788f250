// How the backward pass is shared out over keys, and what is added when every share is done.
#ifndef ACUTANCE_SHARES_H
#define ACUTANCE_SHARES_H

#include <math.h>

#include "mask.h"
#include "rows.h"
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

}  // namespace
#endif
