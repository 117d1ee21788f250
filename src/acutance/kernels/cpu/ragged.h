// Decoding from a planned cache: one query a sequence, heads that hold what each of them keeps.
//
// As in decode.h, the rows of an item are the query heads that share a key head, over a stretch of
// its keys. Stretches are equally long for all heads, so that a head with many keys is shared out
// and one with few is a single item. No statistics are summed.
#ifndef ACUTANCE_RAGGED_H
#define ACUTANCE_RAGGED_H

#include <math.h>

#include "codes.h"
#include "work.h"

namespace {

struct Piece {
  int64_t unit, start, stop;  // a head of a sequence, and which of its keys
};

template <class In>
struct Ragged {
  struct Shared {
    const acutance_ragged_call& call;
    const acutance_stored_head* stored;
    const Piece* pieces;
    float* parts;  // of each stretch
  };
  static constexpr int64_t ROOM = TILE<float>, size = sizeof(In);

  const Shared& shared;
  const acutance_ragged_call& call;
  const int64_t E, Ev, rows;  // widths in whole vectors; rows of an item
  Arena arena;
  float *queries, *scaled, *shift, *scores, *factor, *keys, *values, *scale, *zero;
  uint8_t* lines;
  bool ready;

  static int64_t whole(int64_t width) {
    return (width + VL<float> - 1) / VL<float> * VL<float>;
  }
  // Of each row of a stretch: largest score, sum of weights, and weighted values.
  static int64_t part_length(const acutance_ragged_call& call) {
    return call.group * (VL<float> + whole(call.value_width));
  }

  explicit Ragged(const Shared& given)
      : shared(given), call(given.call), E(whole(call.width)), Ev(whole(call.value_width)),
        rows(call.group), arena(need()) {
    ready = arena.base != nullptr;
    if (!ready) return;
    queries = arena.take<float>(rows * E);
    scaled = arena.take<float>(rows * E);
    shift = arena.take<float>(rows);
    factor = arena.take<float>(rows);
    scores = arena.take<float>(rows * ROOM);
    keys = arena.take<float>(ROOM * E);
    values = arena.take<float>(ROOM * Ev);
    scale = arena.take<float>(scales());
    zero = arena.take<float>(scales());
    lines = arena.take<uint8_t>(ROOM * imax(E, Ev));
  }

  int64_t parts_of_value() const { return call.value_width / call.channels; }
  int64_t scales() const { return imax(E, whole(ROOM * parts_of_value())); }
  size_t need() const {
    const size_t each = sizeof(float);
    return 2 * Arena::bytes(rows * E, each) + 2 * Arena::bytes(rows, each) +
           Arena::bytes(rows * ROOM, each) + Arena::bytes(ROOM * E, each) +
           Arena::bytes(ROOM * Ev, each) + 2 * Arena::bytes(scales(), each) +
           Arena::bytes(ROOM * imax(E, Ev), 1);
  }

  void item(int64_t i) {
    const Piece& stretch = shared.pieces[i];
    const acutance_stored_head& head = shared.stored[stretch.unit];
    float* part = shared.parts + i * part_length(call);
    float *largest = part, *total = part + rows, *output = part + rows * VL<float>;
    const int64_t batch = stretch.unit / call.heads, first = stretch.unit % call.heads * rows;
    for (int64_t r = 0; r < rows; ++r) {
      largest[r] = -INFINITY, total[r] = 0;
      const In* q = (const In*)call.query + batch * call.query_stride[0] +
                    (first + r) * call.query_stride[1];
      pad(q, call.width, queries + r * E, E);
      for (int64_t e = 0; e < E; ++e) queries[r * E + e] *= float(call.scale);
    }
    memset(output, 0, sizeof(float) * size_t(rows * Ev));
    const int64_t step = ROOM / call.tokens * call.tokens;
    for (int64_t j = stretch.start; j < stretch.stop;) {
      // a tile is packed, or as it is, from its first key to its last
      int64_t stop = imin(j + step, stretch.stop);
      if (j < head.key.packed) stop = imin(stop, head.key.packed);
      if (j < head.value.packed) stop = imin(stop, head.value.packed);
      score(head, j, stop - j);
      for (int64_t r = 0; r < rows; ++r) factor[r] = weigh(r, stop - j, largest + r, total + r);
      add_values(head, j, stop - j, output);
      j = stop;
    }
  }

  static void pad(const In* from, int64_t width, float* to, int64_t room) {
    for (int64_t e = 0; e < room; e += VL<float>)
      store(to + e, widen_vector<float, In>(from + e, width - e));
  }
  static const In* row(const acutance_stored& stored, int64_t token) {
    return (const In*)stored.plain + (token - stored.packed) * stored.stride;
  }
  // Fetch memory that is read soon. The processor's own guess stops at the end of a page.
  static void fetch(const void* from, int64_t bytes) {
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch((const char*)from + b, 0, 2);
  }
  void fetch_group(const acutance_stored& stored, int64_t group, int64_t width, int64_t scales) {
    if (group * call.tokens >= stored.packed) return;
    const int64_t bytes = call.tokens * stored.bits / 8 * width;
    fetch(stored.codes + group * bytes, bytes);
    fetch(stored.scale + group * scales, 2 * scales);
    fetch(stored.zero + group * scales, 2 * scales);
  }
  // Lines of bytes as they lie, or in whole vectors.
  const uint8_t* padded(const uint8_t* from, int64_t count, int64_t width, int64_t room) {
    if (width == room) return from;
    memset(lines, 0, size_t(count * room));
    for (int64_t t = 0; t < count; ++t) memcpy(lines + t * room, from + t * width, size_t(width));
    return lines;
  }

  // The scores of a tile of keys for all rows.
  void score(const acutance_stored_head& head, int64_t start, int64_t count) {
    const acutance_stored& key = head.key;
    if (start < key.packed) return score_packed(head, start, count);
    const In* k = row(key, start);
    if (E == call.width)
      return score_tile<float, In>(
          queries, k, key.stride, rows, count, E, scores,
          Ahead(k, key.stride * size, count, E * size, row(head.value, start),
                head.value.stride * size));
    for (int64_t i = 0; i < count; ++i) pad(k + i * key.stride, call.width, keys + i * E, E);
    score_tile<float, float>(queries, keys, E, rows, count, E, scores, Ahead());
  }
  void score_packed(const acutance_stored_head& head, int64_t start, int64_t count) {
    const acutance_stored& key = head.key;
    const int64_t height = call.tokens * key.bits / 8;
    for (int64_t j = 0; j < count; j += call.tokens) {
      const int64_t group = (start + j) / call.tokens;
      fetch_group(key, group + 4, call.width, call.width);
      fetch_group(head.value, group, call.value_width, call.tokens * parts_of_value());
      widen_scales((const f16*)key.scale + group * call.width, call.width, scale);
      widen_scales((const f16*)key.zero + group * call.width, call.width, zero);
      for (int64_t r = 0; r < rows; ++r) {
        Floats sum = {};
        for (int64_t e = 0; e < E; e += VL<float>) {
          const Floats q = load(queries + r * E + e);
          sum += q * load(zero + e);
          store(scaled + r * E + e, q * load(scale + e));
        }
        shift[r] = sum_pairs<float>(sum);
      }
      const uint8_t* codes =
          padded(key.codes + group * height * call.width, height, call.width, E);
      by_bits(key.bits, [&](auto bits) {
        by_rows<SCORE_ROWS>(rows, [&](auto some, int64_t r) {
          score_codes<decltype(bits)::value, decltype(some)::value>(
              scaled + r * E, shift + r, codes, height, E, E, scores + r * ROOM + j);
        });
      });
    }
  }

  // Turn a row's scores into weights; returns the factor of what was summed before.
  float weigh(int64_t r, int64_t count, float* largest, float* total) {
    float* s = scores + r * ROOM;
    const int64_t ends = whole(count);
    for (int64_t j = count; j < ends; ++j) s[j] = -INFINITY;
    Floats most = load(s);
    for (int64_t j = VL<float>; j < ends; j += VL<float>) most = vmax(most, load(s + j));
    float top = *largest;
    for (int i = 0; i < VL<float>; ++i) top = most[i] > top ? most[i] : top;
    Floats sum = {};
    for (int64_t j = 0; j < ends; j += VL<float>) {
      const Floats e = vexp(load(s + j) - top);
      sum += e;
      store(s + j, e);
    }
    const float before = *largest == top ? 1.0f : expf(*largest - top);
    *total = *total * before + sum_pairs<float>(sum);
    *largest = top;
    return before;
  }

  void add_values(const acutance_stored_head& head, int64_t start, int64_t count, float* output) {
    const acutance_stored& value = head.value;
    if (start < value.packed) return add_packed(value, start, count, output);
    const In* v = row(value, start);
    if (Ev == call.value_width)
      return sum_values<float, In>(
          output, Ev, factor, v, value.stride, scores, rows, count, Ev,
          Ahead(v, value.stride * size, count, Ev * size, row(head.key, start + count),
                head.key.stride * size));
    for (int64_t i = 0; i < count; ++i)
      pad(v + i * value.stride, call.value_width, values + i * Ev, Ev);
    sum_values<float, float>(output, Ev, factor, values, Ev, scores, rows, count, Ev, Ahead());
  }
  void add_packed(const acutance_stored& value, int64_t start, int64_t count, float* output) {
    const int64_t parts = parts_of_value(), height = call.tokens * value.bits / 8;
    const int64_t groups = count / call.tokens, group = start / call.tokens;
    widen_scales((const f16*)value.scale + start * parts, count * parts, scale);
    widen_scales((const f16*)value.zero + start * parts, count * parts, zero);
    const uint8_t* codes = padded(value.codes + group * height * call.value_width, groups * height,
                                  call.value_width, Ev);
    const PackedValues v = {codes, groups, height, Ev, scale, zero, parts, call.channels};
    by_bits(value.bits, [&](auto bits) {
      by_rows<4>(rows, [&](auto some, int64_t r) {
        sum_all_codes<decltype(bits)::value, decltype(some)::value>(
            output + r * Ev, Ev, factor + r, v, scores + r * ROOM);
      });
    });
  }
};

// Write new keys and values to where their heads hold them.
template <class In>
void write_fresh(const acutance_ragged_call& call, const acutance_stored_head* stored) {
  for (int64_t unit = 0; unit < call.batch * call.heads; ++unit) {
    const int64_t batch = unit / call.heads, head = unit % call.heads;
    const In* key = (const In*)call.key + batch * call.key_stride[0] + head * call.key_stride[1];
    const In* value =
        (const In*)call.value + batch * call.value_stride[0] + head * call.value_stride[1];
    if (void* to = stored[unit].key.fresh) memcpy(to, key, sizeof(In) * size_t(call.width));
    if (void* to = stored[unit].value.fresh)
      memcpy(to, value, sizeof(In) * size_t(call.value_width));
  }
}

// The output of a head of a sequence from its pieces.
template <class In>
void finish_head(const acutance_ragged_call& call, int64_t unit, const float* parts,
                 int64_t count) {
  typedef Ragged<In> Pass;
  const int64_t rows = call.group, Ev = Pass::whole(call.value_width);
  const int64_t each = Pass::part_length(call);
  for (int64_t r = 0; r < rows; ++r) {
    In* out = (In*)call.out + (unit * rows + r) * call.value_width;
    float top = -INFINITY, total = 0;
    for (int64_t i = 0; i < count; ++i)
      top = parts[i * each + r] > top ? parts[i * each + r] : top;
    for (int64_t e = 0; e < Ev; e += VL<float>) {
      Floats sum = {};
      total = 0;
      for (int64_t i = 0; i < count; ++i) {
        const float* part = parts + i * each;
        const float shrink = part[r] == top ? 1.0f : expf(part[r] - top);
        sum += load(part + rows * VL<float> + r * Ev + e) * shrink;
        total += part[rows + r] * shrink;
      }
      narrow_vector<float, In>(count ? sum / total : Floats{}, out + e, call.value_width - e);
    }
  }
}

template <class In>
int ragged(const acutance_ragged_call& call, const acutance_stored_head* stored,
           acutance_parallel parallel) {
  typedef Ragged<In> Pass;
  const int64_t units = call.batch * call.heads;
  int64_t keys = 0;
  for (int64_t unit = 0; unit < units; ++unit) keys += stored[unit].count;
  const double work = double(keys) * double(call.group) * double(call.width + call.value_width);
  const int64_t threads = work < SMALL_WORK ? 1 : call.threads;
  // pieces are whole groups, of four tiles at least where there is a choice
  const int64_t wanted = threads == 1 ? keys : (keys + 4 * threads - 1) / (4 * threads);
  const int64_t length = (imax(wanted, 4 * TILE<float>) + call.tokens - 1) / call.tokens * call.tokens;
  int64_t count = 0;
  for (int64_t unit = 0; unit < units; ++unit) count += (stored[unit].count + length - 1) / length;
  const int64_t each = Pass::part_length(call);
  Arena arena(Arena::bytes(count, sizeof(Piece)) + Arena::bytes(each * count, sizeof(float)));
  if (!arena.base) return 3;
  Piece* pieces = arena.take<Piece>(count);
  float* parts = arena.take<float>(each * count);
  int64_t place = 0;
  for (int64_t unit = 0; unit < units; ++unit)
    for (int64_t j = 0; j < stored[unit].count; j += length)
      pieces[place++] = {unit, j, imin(j + length, stored[unit].count)};
  const typename Pass::Shared shared = {call, stored, pieces, parts};
  write_fresh<In>(call, stored);
  if (count) {
    const int failed = share_out<Pass>(shared, count, threads, parallel);
    if (failed) return failed;
  }
  FlushDenormals mode;
  place = 0;
  for (int64_t unit = 0; unit < units; ++unit) {
    const int64_t mine = (stored[unit].count + length - 1) / length;
    finish_head<In>(call, unit, parts + place * each, mine);
    place += mine;
  }
  return 0;
}

}  // namespace
#endif
