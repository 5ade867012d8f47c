// Enough of Metal's library for clang to check the types and address spaces of a kernel's source. Nothing runs.
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup static __attribute__((address_space(3)))  // used only for arrays that a body declares

typedef unsigned char uint8_t;
typedef unsigned short ushort;
typedef ushort uint16_t;
typedef unsigned int uint;
typedef uint uint32_t;
typedef int int32_t;
typedef unsigned long ulong;
typedef _Float16 half;
typedef half float16_t;
typedef __bf16 bfloat16_t;
struct uint3 { uint x, y, z; };
template <class N, int size> using vec = N __attribute__((ext_vector_type(size)));

enum atomic_uint : uint {};
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
enum memory_order { memory_order_relaxed };
void threadgroup_barrier(mem_flags);
void atomic_store_explicit(__attribute__((address_space(3))) atomic_uint*, uint, memory_order);
uint atomic_load_explicit(const __attribute__((address_space(3))) atomic_uint*, memory_order);
uint atomic_fetch_add_explicit(__attribute__((address_space(3))) atomic_uint*, uint, memory_order);

template <class To, class From> To as_type(From);
template <class N> N simd_sum(N);
template <class N> N simd_max(N);
template <class N> N simd_prefix_exclusive_sum(N);
template <class N> N simd_shuffle(N, ushort);
template <class N> N simd_shuffle_xor(N, ushort);

// Metal has these for each type. Arguments of two types are ambiguous.
uint max(uint, uint);
int max(int, int);
float max(float, float);
half max(half, half);
uint min(uint, uint);
int min(int, int);
float min(float, float);
half min(half, half);
float exp(float);
half exp(half);
float log(float);
half log(half);
float fabs(float);
half fabs(half);
