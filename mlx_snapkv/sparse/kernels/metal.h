// Header for the kernels on Metal. Loops over register arrays must be unrolled.
#define UNROLL _Pragma("clang loop unroll(full)")
