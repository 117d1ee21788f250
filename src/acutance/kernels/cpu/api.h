// The plain C interface of the native kernels: raw pointers and strides, no header of PyTorch.
//
// One binary serves every version of Python and torch. Tensors of rows are contiguous and laid out
// (batch, query head, query); strides count elements; the last dimension of query, key, value and
// grad_out has stride 1. A stride of 0 repeats what is broadcast.
#ifndef ACUTANCE_API_H
#define ACUTANCE_API_H

#include <stdint.h>

#if defined(_WIN32)
#define ACUTANCE_EXPORT __declspec(dllexport)
#else
#define ACUTANCE_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

// Raised whenever a structure or a meaning below changes: the caller refuses another number.
#define ACUTANCE_ABI 6

enum { ACUTANCE_F32 = 0, ACUTANCE_F64 = 1, ACUTANCE_BF16 = 2, ACUTANCE_F16 = 3 };

// A matrix of numbers for every row and key that is added to the scores.
typedef struct {
  const void* data;    // null: none
  int64_t stride[4];   // batch, query head, query, key
  double limit;        // a number at or below it hides its key; -infinity hides in any case
  int64_t dtype;
} acutance_additive;

// What a call attends with: the same for the forward and the backward pass.
typedef struct {
  int64_t abi;    // ACUTANCE_ABI
  int64_t dtype;  // of query, key, value, out; sums are float, for float64 double
  int64_t batch, heads, group, queries, keys;  // heads: key heads; group: query heads of each
  int64_t width, value_width;                  // E and Ev; value_width 0: statistics alone
  const void *query, *key, *value;
  int64_t query_stride[3], key_stride[3], value_stride[3];  // batch, head, row
  double scale;
  double softcap;           // 0: none
  int64_t causal;           // 0 or 1: key j is seen where j <= query + offset
  int64_t offset;           // position of query 0 among the keys
  int64_t window;           // keys with |query + offset - j| < window are seen; 0: all
  const uint8_t* allowed;   // boolean mask, not 0 takes part; null: none
  int64_t allowed_stride[4];
  acutance_additive additive[2];
  const uint8_t* key_mask;  // not 0 takes part; null: none
  int64_t key_mask_stride[2];
  const int64_t *query_documents, *key_documents;  // a row sees keys of its own; null: none
  int64_t query_documents_stride[2], key_documents_stride[2];
  const double* slopes;     // (query heads): adds -slope |query + offset - j|; null: none
  const double* sinks;      // (query heads): logits that share the normaliser; null: none
  int64_t threads;
} acutance_call;

// Where the forward pass writes. Fields are those of acutance.kernels.call.Sums; the sums are
// float, for float64 double. Every field of a row is given; what follows O only with noise.
typedef struct {
  void* out;   // (batch, query heads, queries, Ev) in the call's dtype; null without values
  int64_t out_stride[3];
  int64_t* n;
  void *m, *Z, *U, *W, *Q, *mean, *M2, *depth, *first;
  int64_t* first_index;
  void *O, *R1, *R2;  // all three or none: the noise sums, O and R1 (..., Ev) contiguous
  int64_t noise;      // 1: sum them
  int32_t* gaps;      // (..., 64) keys by bins of 1/4 below the maximum; null: not asked for
} acutance_sums;

// Gradient of score j of a row, with t = s_j - m and e = exp(t):
//   e (grad_out . v_j * inverse + constant + linear t + square t^2 + weight e) + slope t + plain
//   + [j = first_index] first + [j the earliest of the largest] largest
// Coefficients are (batch, query heads, queries), of the sums' type; null counts as zero.
typedef struct {
  const void* m;            // the forward pass's maxima
  const void* grad_out;     // in the call's dtype; null: none
  int64_t grad_out_stride[3];
  const void* inverse;      // 1 / normaliser
  const void *constant, *linear, *square, *weight, *slope, *plain, *first, *largest;
  const int64_t* first_index;
  void *query, *key, *value;  // gradients, contiguous, of the sums' type; null: not asked for
} acutance_gradients;

// What is asked of where rows put their weight, and where it is written: numbers of the sums' type,
// contiguous, rows (batch, query head, query). The caller fills scores
// with -infinity, which hidden keys leave as they are.
typedef struct {
  const int64_t* positions;  // where queries stand among the keys; null: of another sequence
  int64_t position_stride[2];  // batch, query
  const int64_t *tokens, *asked;  // of the keys and the queries, none where below 0; null: unknown
  int64_t token_stride[2], asked_stride[2];
  const uint8_t* special;  // not 0 on special keys; null: none
  int64_t special_stride[2];
  int64_t octaves;  // of each side: 0 is distance 0, k is 2^(k-1) to 2^k - 1
  int64_t by_head;  // 1: heads may see different keys, and even is of each of them
  int64_t every;    // rows from one whose scores are written to the next
  void *distance, *on_self, *on_previous;  // with positions
  void *on_same, *on_special;              // with asked, with special
  void *mass, *even;  // with positions: (..., 2, octaves), behind and ahead; of keys weighed alike
  int64_t* peak;      // with positions: where the one largest score stands from its row, or -128
  void* scores;       // of every so many rows, (..., keys); null: not asked for
} acutance_places;

// The keys, or the values, that one head of one sequence holds: whole packed groups of tokens, then
// rows as they are. Codes are bytes (groups, tokens * bits / 8, width), contiguous: the first tokens
// of a group in the lowest bits. A code c stands for zero + scale * c.
typedef struct {
  const void* plain;  // rows after the packed ones, in the call's dtype
  void* fresh;        // the row of `plain` where the call writes the new one; null: it is there
  int64_t stride;     // elements from one row to the next
  int64_t packed;     // packed tokens, a multiple of the group's; 0: none
  int64_t bits;       // 8, 4 or 2
  const uint8_t* codes;
  const uint16_t *scale, *zero;  // float16, contiguous: of keys (groups, width), of values
                                 // (packed, value_width / channels)
} acutance_stored;

typedef struct {
  int64_t count;  // keys; 0: the output is zero
  acutance_stored key, value;
} acutance_stored_head;

// Attention of one query a sequence, whose key heads hold keys of their own number and precision,
// the new one included. All are seen.
typedef struct {
  int64_t abi, dtype;  // F32, BF16 or F16, of query, out and plain rows
  int64_t batch, heads, group;  // heads: key heads; group: query heads of each
  int64_t width, value_width;   // E and Ev
  const void *query, *key, *value;  // (batch, heads of each, E or Ev): the new tokens
  void* out;                        // (batch, query heads, Ev), contiguous
  int64_t query_stride[2], key_stride[2], value_stride[2];
  double scale;
  int64_t tokens;     // of a packed group: a multiple of 8, at most 256
  int64_t channels;   // of a packed value that share a scale: a multiple of 16 that divides Ev, or Ev
  int64_t threads;
} acutance_ragged_call;

// Zero, or a reason: 1 another ABI, 2 not supported, 3 out of memory. Forward also 4: all is
// written, and an output of rows from which keys may be hidden holds a number that is not finite.
ACUTANCE_EXPORT int acutance_forward(const acutance_call* call, const acutance_sums* sums);
ACUTANCE_EXPORT int acutance_backward(const acutance_call* call, const acutance_gradients* grads);

// `stored` has an element for each sequence and key head, in this order.
ACUTANCE_EXPORT int acutance_ragged(const acutance_ragged_call* call,
                                    const acutance_stored_head* stored);

ACUTANCE_EXPORT int acutance_structure(const acutance_call* call, const acutance_places* places);

enum {
  ACUTANCE_ENTROPY, ACUTANCE_NORMALIZED_ENTROPY, ACUTANCE_INFORMATION, ACUTANCE_EFFECTIVE_KEYS,
  ACUTANCE_SPARSITY, ACUTANCE_COLLISION, ACUTANCE_TOP_WEIGHT, ACUTANCE_FIRST_WEIGHT,
  ACUTANCE_SINK_MASS, ACUTANCE_LSE, ACUTANCE_LOGIT_MEAN, ACUTANCE_LOGIT_STD, ACUTANCE_VARENTROPY,
  ACUTANCE_ENTROPY_SLOPE, ACUTANCE_MEAN_FIELD_ENTROPY, ACUTANCE_JENSEN_GAP, ACUTANCE_MAX_GAP,
  ACUTANCE_GAUSSIAN_ENTROPY, ACUTANCE_FIRST_GAP, ACUTANCE_REST_LOGIT_STD,
  ACUTANCE_REST_JENSEN_GAP, ACUTANCE_JACOBIAN_TRACE, ACUTANCE_METRICS
};
// Metrics of count rows without sinks, in one pass; F32 or F64. Bit k of asked asks for metric k,
// and out takes count numbers of each that is asked for, in order. The rows' sums lie one field
// after the other: n, first_index, m, Z, U, W, Q, mean, M2, depth, first. The table is that of
// acutance.rowstats.gaussian, which GAUSSIAN_ENTROPY alone reads.
ACUTANCE_EXPORT int acutance_metrics(int64_t asked, int64_t dtype, int64_t count, const void* rows,
                                     const double* table, void* out);

// Name of the instruction set in use: "avx512_bf16", "avx512", "avx2", "neon" or "baseline".
ACUTANCE_EXPORT const char* acutance_cpu(void);
// Choose one by name (null: acutance_usual_cpu's); 0, or 2 where this machine or build has it not.
ACUTANCE_EXPORT int acutance_use_cpu(const char* name);
// Names of those this machine and build have, widest first, separated by spaces.
ACUTANCE_EXPORT const char* acutance_cpus(void);
// Place in acutance_cpus of the one that a processor with these uses unless another is named, by the
// vendor and the family that its CPUID states: the widest that is known to be fast there.
ACUTANCE_EXPORT int acutance_usual_cpu(const char* vendor, int family);
ACUTANCE_EXPORT int64_t acutance_abi(void);
// GOMP_parallel of the OpenMP library torch runs on, so that its threads are used; null: own ones.
ACUTANCE_EXPORT void acutance_use_threads(
    void (*parallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags));
// exp of count numbers, as the kernel takes it, for measuring its error. float or double.
ACUTANCE_EXPORT void acutance_exp(int64_t dtype, const void* from, void* to, int64_t count);

#ifdef __cplusplus
}
#endif

typedef void (*acutance_parallel)(void (*body)(void*), void* data, unsigned threads,
                                  unsigned flags);

typedef struct {
  const char* name;
  // Whether decode is faster than forward for the call.
  int (*few_queries)(const acutance_call*, const acutance_sums*);
  int (*forward)(const acutance_call*, const acutance_sums*, acutance_parallel);  // many queries
  int (*decode)(const acutance_call*, const acutance_sums*, acutance_parallel);   // few
  int (*backward)(const acutance_call*, const acutance_gradients*, acutance_parallel);
  int (*ragged)(const acutance_ragged_call*, const acutance_stored_head*, acutance_parallel);
  int (*structure)(const acutance_call*, const acutance_places*, acutance_parallel);
  void (*exp)(int64_t dtype, const void* from, void* to, int64_t count);
} acutance_kernel;
#endif
