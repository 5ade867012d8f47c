// Header for the kernels on CUDA. It defines the parts of the Metal language that the kernel bodies use. The bodies use
// `threadgroup` only to declare arrays, and `device` only in pointer types.
#define UNROLL _Pragma("unroll")
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned long long ulong;
typedef unsigned int atomic_uint;

#define threadgroup __shared__
#define thread_position_in_threadgroup threadIdx
#define threadgroup_position_in_grid blockIdx
#define thread_index_in_simdgroup (threadIdx.x & 31u)
#define simdgroup_index_in_threadgroup (threadIdx.x >> 5)
#define threadgroup_barrier(flags) __syncthreads()           // also orders global memory accesses within the block

#define atomic_load_explicit(at, order) (*(const volatile unsigned int*)(at))
#define atomic_store_explicit(at, x, order) (*(volatile unsigned int*)(at) = (x))
#define atomic_fetch_add_explicit(at, x, order) atomicAdd((at), (x))

// A vector that is loaded in one read.
template <class N, int size> struct alignas(size * sizeof(N)) vec {
  N numbers[size];
  __device__ N operator[](uint i) const { return numbers[i]; }
};

template <class To, class From> __device__ inline To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs equal sizes");
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}

// A SIMD group is a warp, and all of its 32 lanes take part.
template <class N> __device__ inline N simd_shuffle(N x, uint from) { return __shfl_sync(0xFFFFFFFFu, x, from); }
template <class N> __device__ inline N simd_shuffle_xor(N x, uint mask) { return __shfl_xor_sync(0xFFFFFFFFu, x, mask); }
template <class N> __device__ inline N simd_sum(N x) {
  for (uint mask = 16; mask > 0; mask >>= 1) x += simd_shuffle_xor(x, mask);
  return x;
}
template <class N> __device__ inline N simd_max(N x) {
  for (uint mask = 16; mask > 0; mask >>= 1) x = max(x, simd_shuffle_xor(x, mask));
  return x;
}
template <class N> __device__ inline N simd_prefix_exclusive_sum(N x) {
  N sum = x;
  for (uint step = 1; step < 32; step <<= 1) {
    const N before = __shfl_up_sync(0xFFFFFFFFu, sum, step);
    if (thread_index_in_simdgroup >= step) sum += before;
  }
  return sum - x;
}

// This must come last, because the expansion of the macro __device__ contains the word `device`.
#define device
