// The header of the kernels on Metal. Loops over arrays in registers must be unrolled.
#define UNROLL _Pragma("clang loop unroll(full)")
