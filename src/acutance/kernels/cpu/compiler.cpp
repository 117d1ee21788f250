// Which compiler made this library.
#include "api.h"

#if defined(__clang__)
#define NAME "Clang " __clang_version__
#elif defined(__GNUC__)
#define NAME "GCC " __VERSION__
#else
#define NAME "an unknown compiler"
#endif

extern "C" ACUTANCE_EXPORT const char* acutance_compiler() { return NAME; }
