// What one compilation of the kernels, for one instruction set, offers the others.
#ifndef ACUTANCE_KERNEL_H
#define ACUTANCE_KERNEL_H

#include "api.h"

typedef void (*acutance_parallel)(void (*body)(void*), void* data, unsigned threads,
                                  unsigned flags);

typedef struct {
  const char* name;
  // Whether decode is faster than forward for the call, one of its rows taking row_cost times as
  // long as one lane's; 0: as long as it took where the kernel was written.
  int (*few_queries)(const acutance_call*, const acutance_sums*, double row_cost);
  int (*forward)(const acutance_call*, const acutance_sums*, acutance_parallel);  // many queries
  int (*decode)(const acutance_call*, const acutance_sums*, acutance_parallel);   // few
  int (*backward)(const acutance_call*, const acutance_gradients*, acutance_parallel);
  int (*structure)(const acutance_call*, const acutance_places*, acutance_parallel);
  void (*exp)(int64_t dtype, const void* from, void* to, int64_t count);
} acutance_kernel;

#endif
