// Sums of rows over a stretch of keys, and how stretches merge.
#ifndef ACUTANCE_DECODE_MERGE_H
#define ACUTANCE_DECODE_MERGE_H

#include <math.h>

#include "decode_tile.h"
#include "vec.h"

namespace {

// Sums of the rows of an item: one number of each kind for every row. They are added to once a
// tile, so that doubles cost nothing, and a hundred thousand keys lose no more digits than a tile.
template <class T>
struct Stretch {
  enum { M, Z, U, W, Q, N, D, TOTAL, M2, R2, FIRST, KINDS };
  int64_t* first_index;
  double* sums;
  T *output, *moments, *centre;
  int64_t rows;

  Stretch(char* base, int64_t rows, int64_t width, bool noise)
      : first_index((int64_t*)base), rows(rows) {
    sums = (double*)(first_index + rows);
    output = (T*)(sums + KINDS * rows);
    moments = output + rows * width;
    centre = moments + (noise ? rows * width : 0);
  }
  static int64_t bytes(int64_t rows, int64_t width, bool noise) {
    const int64_t numbers = rows * width * (noise ? 2 : 1) + (noise ? width : 0);
    return ((1 + KINDS) * rows * 8 + numbers * int64_t(sizeof(T)) + 63) & ~int64_t(63);
  }
  double& at(int kind, int64_t row) { return sums[kind * rows + row]; }

  void clear(int64_t width, bool noise) {
    memset(sums, 0, sizeof(double) * size_t(KINDS * rows));
    memset(output, 0, sizeof(T) * size_t(rows * width * (noise ? 2 : 1) + (noise ? width : 0)));
    for (int64_t r = 0; r < rows; ++r) at(M, r) = -INFINITY, first_index[r] = NO_KEY;
  }

  // Move a row to the maximum of a tile too; returns what its sums of e shrink by.
  T begin(int64_t r, Part<T>* tile) {
    const T before = T(at(M, r)), top = tile->largest > before ? tile->largest : before;
    tile->base = top == T(-INFINITY) ? T(0) : top;
    if (before == top || before == T(-INFINITY)) {
      at(M, r) = top;
      return 1;
    }
    const T drop = before - tile->base, shrink = vexp(splat(drop))[0];
    at(M, r) = top;
    at(U, r) = (at(U, r) + drop * at(Z, r)) * shrink;
    at(Z, r) *= shrink, at(W, r) *= shrink, at(Q, r) *= shrink * shrink;
    at(D, r) += at(N, r) * drop;
    return shrink;
  }
  // Add what the tile holds, second moments as Chan, Golub and LeVeque do.
  void add(int64_t r, const Part<T>& tile) {
    if (at(N, r) > 0) {
      const double here = tile.Z, n = tile.n, both = at(Z, r) + here, all = at(N, r) + n;
      const double between = ratio(tile.U, here) - ratio(at(U, r), at(Z, r));
      const double step = tile.D / n - at(D, r) / at(N, r);
      at(W, r) += between * between * ratio(at(Z, r), both) * here;
      at(M2, r) += step * step * (at(N, r) / all * n);
    }
    at(N, r) += tile.n, at(TOTAL, r) += tile.total, at(D, r) += tile.D;
    at(Z, r) += tile.Z, at(U, r) += tile.U, at(W, r) += tile.W, at(Q, r) += tile.Q;
    at(M2, r) += tile.M2;
  }
  static double ratio(double sum, double weight) { return weight > 0 ? sum / weight : 0; }
};

// One row's sums over all keys, merged in double precision.
struct Merged {
  double n = 0, m = -INFINITY, Z = 0, U = 0, W = 0, Q = 0, D = 0, total = 0, M2 = 0, first = 0;
  int64_t first_index = NO_KEY;
  bool broken = false;

  template <class T>
  void reach(Stretch<T>& part, int64_t r) {
    typedef Stretch<T> S;
    const double top = part.at(S::M, r);
    m = top > m ? top : m;
    broken = broken || part.at(S::D, r) != part.at(S::D, r);
  }
  template <class T>
  void write(const acutance_sums& to, int64_t place) const {
    to.n[place] = int64_t(n);
    ((T*)to.m)[place] = broken && m < INFINITY ? T(NAN) : T(m);  // as the sums are
    ((T*)to.Z)[place] = T(Z), ((T*)to.U)[place] = T(U), ((T*)to.W)[place] = T(W);
    ((T*)to.Q)[place] = T(Q), ((T*)to.M2)[place] = T(M2), ((T*)to.first)[place] = T(first);
    ((T*)to.mean)[place] = T(n > 0 ? total / n : 0);
    ((T*)to.depth)[place] = T(n > 0 ? -D / n : 0);
    to.first_index[place] = first_index;
  }
  // Mean of the values by the weights e^2, and their squared distance from it.
  template <class T>
  void spread(const acutance_sums& to, int64_t place, char* parts, int64_t each, int64_t count,
              int64_t rows, int64_t r, int64_t Ev, int64_t width) const {
    typedef Stretch<T> S;
    T* mean = (T*)to.R1 + place * Ev;
    for (int64_t e = 0; e < Ev; ++e) mean[e] = 0;
    double distance = 0, before = 0;
    for (int64_t c = 0; c < count; ++c) {
      S part(parts + c * each, rows, width, true);
      const double Qc = part.at(S::Q, r), shrink = exp(drop(part, r));
      const double weight = Qc * shrink * shrink;
      if (part.at(S::N, r) == 0 || weight == 0) continue;
      const T* moments = part.moments + r * width;
      double size = 0, between = 0;
      for (int64_t e = 0; e < Ev; ++e) {
        const double about = moments[e] / Qc, step = part.centre[e] + about - mean[e];
        size += about * about, between += step * step;
        mean[e] += T(step * (weight / (before + weight)));
      }
      const double own = part.at(S::R2, r) - Qc * size;
      distance += (own < 0 ? 0 : own) * shrink * shrink;
      if (before > 0) distance += between * (weight / (before + weight)) * before;
      before += weight;
    }
    ((T*)to.R2)[place] = T(distance);
  }
  double base() const { return m == -INFINITY ? 0 : m; }
  template <class T>
  double drop(Stretch<T>& part, int64_t r) const {
    const double top = part.at(Stretch<T>::M, r);
    return top == -INFINITY ? 0 : top - base();
  }
  template <class T>
  void add(Stretch<T>& part, int64_t r) {
    typedef Stretch<T> S;
    const double count = part.at(S::N, r);
    if (count == 0) return;
    const double step = drop(part, r), shrink = step == 0 ? 1 : exp(step);
    const double weight = part.at(S::Z, r) * shrink;
    const double moment = part.at(S::U, r) * shrink + step * weight;
    const double distance = part.at(S::D, r) + count * step;
    if (n > 0) {
      const double between = (Z > 0 ? U / Z : 0) - (weight > 0 ? moment / weight : 0);
      const double apart = D / n - distance / count, both = Z + weight;
      W += both > 0 ? between * between * (Z / both) * weight : 0;
      M2 += apart * apart * (n / (n + count)) * count;
    }
    n += count, Z += weight, U += moment, D += distance, total += part.at(S::TOTAL, r);
    W += part.at(S::W, r) * shrink, Q += part.at(S::Q, r) * shrink * shrink;
    M2 += part.at(S::M2, r);
    if (part.first_index[r] < first_index)
      first_index = part.first_index[r], first = part.at(S::FIRST, r);
  }
};

// The rows of a key head, from `count` stretches of its keys; the first one's memory is used up.
// False where an output is not finite.
template <class T, class In>
inline bool finish_rows(const acutance_call& call, const acutance_sums& sums, int64_t unit,
                        char* parts, int64_t count) {
  typedef Stretch<T> S;
  const int64_t rows = call.group * call.queries, Ev = call.value_width;
  const int64_t width = (Ev + VL<T> - 1) / VL<T> * VL<T>;
  const int64_t first_head = unit % call.heads * call.group;
  const bool noise = sums.noise && Ev;
  const int64_t each = S::bytes(rows, width, noise);
  bool finite = true;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t head = first_head + r / call.queries, row = r % call.queries;
    const int64_t place =
        (unit / call.heads * call.heads * call.group + head) * call.queries + row;
    Merged all;
    for (int64_t c = 0; c < count; ++c) {
      S part(parts + c * each, rows, width, noise);
      all.reach(part, r);
    }
    S whole(parts, rows, width, noise);
    T* total = whole.output + r * width;
    for (int64_t c = 0; c < count; ++c) {
      S part(parts + c * each, rows, width, noise);
      all.add(part, r);
      if (count == 1 || !Ev) continue;
      const T shrink = T(exp(all.drop(part, r)));
      const T* more = part.output + r * width;
      for (int64_t e = 0; e < width; e += VL<T>)
        store(total + e, (c ? load(total + e) : Vec<T>{}) + load(more + e) * shrink);
    }
    all.write<T>(sums, place);
    if (!Ev) continue;
    double normaliser = all.Z;
    if (call.sinks && all.m != -INFINITY) normaliser += exp(call.sinks[head] - all.m);
    finite = finite && all_finite<T>(total, 0, 1, Ev);
    const T inverse = normaliser == 0 ? T(0) : T(1 / normaliser);
    In* out = (In*)sums.out + unit / call.heads * sums.out_stride[0] + head * sums.out_stride[1] +
              row * sums.out_stride[2];
    for (int64_t e = 0; e < Ev; e += VL<T>)
      narrow_vector<T, In>(load(total + e) * inverse, out + e, Ev - e);
    if (!noise) continue;
    for (int64_t e = 0; e < Ev; ++e) ((T*)sums.O)[place * Ev + e] = total[e];
    all.spread<T>(sums, place, parts, each, count, rows, r, Ev, width);
  }
  return finite;
}

}  // namespace
#endif
