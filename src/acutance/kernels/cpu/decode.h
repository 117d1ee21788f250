// The forward pass for few queries, as in decoding: keys in the lanes, split over keys.
//
// The rows of an item are all queries of all query heads that share a key head, over a stretch of
// its keys: each key and value is loaded once for the whole group. Where there are more stretches
// than one, their sums are merged in order of the keys, in double precision.
#ifndef ACUTANCE_DECODE_H
#define ACUTANCE_DECODE_H

#include <math.h>

#include "mask.h"
#include "decode_merge.h"
#include "decode_tile.h"
#include "work.h"

namespace {

// Multiplications below which a second thread costs more than it saves.
constexpr double SMALL_WORK = 1 << 18;
// Bytes of keys and values above which they are fetched ahead: nearer ones come in time.
constexpr double FAR = 16 << 20;

template <class T, class In>
struct Decode {
  struct Shared {
    const acutance_call& call;
    const acutance_sums& sums;
    int64_t chunks, length;  // stretches of a key head, keys of each
    char* parts;             // their sums; null where there is one
    int* unfinished;         // set where an output is not finite
  };
  typedef Vec<T> V;
  typedef typename Traits<T>::Int Int;
  typedef Stretch<T> S;
  static constexpr int64_t ROOM = TILE<T>, size = sizeof(In);

  const Shared& shared;
  const acutance_call& call;
  const acutance_sums& sums;
  const int64_t E, Ev, rows;  // widths in whole vectors; rows of an item
  const bool noise, data, plain_scores, keys_lie, values_lie;  // *_lie: read where they lie
  const bool far;  // keys and values come from memory, beyond any cache
  Arena arena;
  T *queries, *scores, *squares, *distance, *keys, *values, *rest, *sizes;
  Int* seen;
  char* own;
  T factor[DECODE_ROWS];
  bool ready;

  static int64_t whole(int64_t width) { return (width + VL<T> - 1) / VL<T> * VL<T>; }

  explicit Decode(const Shared& given)
      : shared(given), call(given.call), sums(given.sums), E(whole(call.width)),
        Ev(whole(call.value_width)), rows(call.group * call.queries), noise(sums.noise && Ev),
        data(masked_by_data(call)), plain_scores(call.softcap == 0 && !adds(call)),
        keys_lie(E == call.width), values_lie(Ev == call.value_width),
        far(keys_lie && values_lie && Ev && bytes() > FAR), arena(need()) {
    ready = arena.base != nullptr;
    if (!ready) return;
    queries = arena.take<T>(rows * E);
    scores = arena.take<T>(DECODE_ROWS * ROOM);
    squares = arena.take<T>(noise ? DECODE_ROWS * ROOM : 0);
    distance = arena.take<T>(ROOM);
    seen = arena.take<Int>(ROOM);
    keys = arena.take<T>(keys_lie ? 0 : ROOM * E);
    values = arena.take<T>(values_lie ? 0 : ROOM * Ev);
    rest = arena.take<T>(noise ? ROOM * Ev : 0);
    sizes = arena.take<T>(noise ? ROOM : 0);
    own = arena.take<char>(S::bytes(rows, Ev, noise));
  }

  double bytes() const {  // of all keys and values
    return double(E + Ev) * double(size) * double(call.keys) * double(call.heads * call.batch);
  }
  size_t need() const {
    const size_t each = sizeof(T);
    return Arena::bytes(rows * E, each) + Arena::bytes(DECODE_ROWS * ROOM, each) * (noise ? 2 : 1) +
           Arena::bytes(ROOM, each) * 3 + (keys_lie ? 0 : Arena::bytes(ROOM * E, each)) +
           (values_lie ? 0 : Arena::bytes(ROOM * Ev, each)) +
           (noise ? Arena::bytes(ROOM * Ev, each) : 0) + size_t(S::bytes(rows, Ev, noise)) + 1024;
  }

  void item(int64_t i) {
    const int64_t unit = i / shared.chunks, chunk = i % shared.chunks;
    char* place = shared.parts ? shared.parts + i * S::bytes(rows, Ev, noise) : own;
    S part(place, rows, Ev, noise);
    const Band span = band(call, 0, call.queries - 1);
    const int64_t start = span.start + chunk * shared.length;
    attend(unit / call.heads, unit % call.heads, start, imin(start + shared.length, span.stop),
           part);
    if (!shared.parts && !finish_rows<T, In>(call, sums, unit, own, 1))
      __atomic_store_n(shared.unfinished, 1, __ATOMIC_RELAXED);
  }

  void attend(int64_t batch, int64_t head, int64_t start, int64_t stop, S& part) {
    part.clear(Ev, noise);
    if (start >= stop) return;
    const In* k = (const In*)call.key + batch * call.key_stride[0] + head * call.key_stride[1];
    const In* v = Ev ? (const In*)call.value + batch * call.value_stride[0] +
                           head * call.value_stride[1]
                     : nullptr;
    for (int64_t r = 0; r < rows; ++r) {
      const In* q = (const In*)call.query + batch * call.query_stride[0] +
                    (head * call.group + r / call.queries) * call.query_stride[1] +
                    r % call.queries * call.query_stride[2];
      lay_padded(q, queries + r * E, call.width, E);
      for (int64_t e = 0; e < E; ++e) queries[r * E + e] *= T(call.scale);
    }
    if (noise) average(v, start, stop, part.centre);
    for (int64_t j = start; j < stop; j += ROOM) {
      const int64_t count = imin(ROOM, stop - j);
      const In* kt = k + j * call.key_stride[2];
      const In* vt = Ev ? v + j * call.value_stride[2] : nullptr;
      if (!keys_lie)
        for (int64_t i = 0; i < count; ++i)
          lay_padded(kt + i * call.key_stride[2], keys + i * E, call.width, E);
      if (!values_lie)
        for (int64_t i = 0; i < count; ++i)
          lay_padded(vt + i * call.value_stride[2], values + i * Ev, call.value_width, Ev);
      if (noise) centred(vt, count, part.centre);
      Ahead keys_ahead, values_ahead;
      if (far) {
        const int64_t ks = call.key_stride[2] * size, vs = call.value_stride[2] * size;
        keys_ahead = Ahead(kt, ks, count, E * size, vt, vs);
        values_ahead = Ahead(vt, vs, count, Ev * size, kt + ROOM * call.key_stride[2], ks);
      }
      for (int64_t r = 0; r < rows; r += DECODE_ROWS) {
        const int64_t some = imin(DECODE_ROWS, rows - r);
        const T* q = queries + r * E;
        if (keys_lie)
          score_tile<T, In>(q, kt, call.key_stride[2], some, count, E, scores, keys_ahead);
        else
          score_tile<T, T>(q, keys, E, some, count, E, scores, keys_ahead);
        if (weigh(batch, head, r, some, j, count, part) && Ev)
          add_values(r, some, count, vt, part, values_ahead);
        keys_ahead = values_ahead = Ahead();
      }
    }
  }

  static void lay_padded(const In* from, T* to, int64_t width, int64_t room) {
    for (int64_t e = 0; e < room; e += VL<T>)
      store(to + e, widen_vector<T, In>(from + e, width - e));
  }
  void average(const In* v, int64_t start, int64_t stop, T* centre) const {
    for (int64_t j = start; j < stop; ++j)
      for (int64_t e = 0; e < call.value_width; ++e)
        centre[e] += T(widen(v[j * call.value_stride[2] + e]));
    for (int64_t e = 0; e < call.value_width; ++e) centre[e] /= T(stop - start);
  }
  void centred(const In* v, int64_t count, const T* centre) {
    for (int64_t j = 0; j < count; ++j) {
      T* to = rest + j * Ev;
      lay_padded(v + j * call.value_stride[2], to, call.value_width, Ev);
      V size = {};
      for (int64_t e = 0; e < Ev; e += VL<T>) {
        const V x = load(to + e) - load(centre + e);
        size += x * x;
        store(to + e, x);
      }
      sizes[j] = sum_pairs<T>(size);
    }
  }

  // Turn the scores of some rows into weights and add their sums; false where none sees a key.
  bool weigh(int64_t batch, int64_t head, int64_t r0, int64_t count_rows, int64_t start,
             int64_t count, S& part) {
    const int64_t ends = whole(count);
    bool any = false;
    for (int64_t r = 0; r < count_rows; ++r) {
      T* s = scores + r * ROOM;
      const int64_t at = r0 + r, row = at % call.queries;
      const RowMask<T> mask = {call, batch, head * call.group + at / call.queries, row};
      const Band sees = band(call, row, row);
      Part<T> found;
      if (!plain_scores) mask.bend(start, count, s);
      const bool all =
          ends == count && !data && sees.start <= start && start + count <= sees.stop;
      if (all)
        look_along<T, false>(s, seen, count, &found);
      else if (mask.look(start, count, s, seen))
        look_along<T, true>(s, seen, count, &found);
      factor[r] = 1;
      if (found.n == 0) {
        memset(s, 0, sizeof(T) * size_t(ends));
        continue;
      }
      any = true;
      if (part.first_index[at] == NO_KEY) {
        int64_t j = 0;
        while (!all && !seen[j]) ++j;
        part.first_index[at] = start + j, part.at(S::FIRST, at) = s[j];
      }
      factor[r] = part.begin(at, &found);
      if (all)
        weigh_along<T, false>(s, seen, count, distance, &found);
      else
        weigh_along<T, true>(s, seen, count, distance, &found);
      part.add(at, found);
    }
    return any;
  }

  void add_values(int64_t r0, int64_t some, int64_t count, const In* v, S& part,
                  const Ahead& ahead) {
    T* total = part.output + r0 * Ev;
    if (values_lie)
      sum_values<T, In>(total, Ev, factor, v, call.value_stride[2], scores, some, count, Ev, ahead);
    else
      sum_values<T, T>(total, Ev, factor, values, Ev, scores, some, count, Ev, ahead);
    if (noise) noise_sums(r0, some, count, part);
  }

  void noise_sums(int64_t r0, int64_t count_rows, int64_t count, S& part) {
    for (int64_t r = 0; r < count_rows; ++r) {
      factor[r] *= factor[r];
      const T* e = scores + r * ROOM;
      T* twice = squares + r * ROOM;
      T sum = 0;
      for (int64_t j = 0; j < count; ++j) {
        twice[j] = e[j] * e[j];
        sum += twice[j] * sizes[j];
      }
      double& total = part.at(S::R2, r0 + r);
      total = total * factor[r] + sum;
    }
    sum_values<T, T>(part.moments + r0 * Ev, Ev, factor, rest, Ev, squares, count_rows, count, Ev,
                     Ahead());
  }
};

// Stretches enough to keep every thread at work, each a few tiles at least.
template <class T>
int64_t stretches(const acutance_call& call, int64_t keys) {
  const int64_t heads = call.batch * call.heads, tiles = (keys + TILE<T> - 1) / TILE<T>;
  const int64_t wanted = call.threads > 1 ? (4 * call.threads + heads - 1) / heads : 1;
  return imax(imin(wanted, tiles / 2), 1);
}

template <class T, class In>
int decode(const acutance_call& call, const acutance_sums& sums, acutance_parallel parallel) {
  typedef Decode<T, In> Pass;
  const Band span = band(call, 0, call.queries - 1);
  const int64_t keys = span.stop - span.start, heads = call.batch * call.heads;
  const int64_t rows = call.group * call.queries, width = Pass::whole(call.value_width);
  const double work = double(heads) * double(rows * keys) * double(call.width + call.value_width);
  const int64_t threads = work < SMALL_WORK ? 1 : call.threads;
  int64_t chunks = threads == 1 ? 1 : stretches<T>(call, keys);
  const int64_t tiles = imax((keys + TILE<T> - 1) / TILE<T>, 1);
  const int64_t length = (tiles + chunks - 1) / chunks * TILE<T>;
  chunks = imax((keys + length - 1) / length, 1);
  const bool hides = masked_by_data(call) || call.causal || call.window;
  int unfinished = 0;
  if (chunks == 1) {
    const typename Pass::Shared shared = {call, sums, 1, length, nullptr, &unfinished};
    const int failed = share_out<Pass>(shared, heads, threads, parallel);
    return failed ? failed : hides && unfinished ? 4 : 0;
  }
  const int64_t each = Stretch<T>::bytes(rows, width, sums.noise && width);
  Arena parts(size_t(each * heads * chunks));
  if (!parts.base) return 3;
  const typename Pass::Shared shared = {call, sums, chunks, length, parts.base, &unfinished};
  const int failed = share_out<Pass>(shared, heads * chunks, threads, parallel);
  if (failed) return failed;
  FlushDenormals mode;
  for (int64_t unit = 0; unit < heads; ++unit)
    if (!finish_rows<T, In>(call, sums, unit, parts.base + unit * chunks * each, chunks))
      unfinished = 1;
  return hides && unfinished ? 4 : 0;
}

}  // namespace
#endif
