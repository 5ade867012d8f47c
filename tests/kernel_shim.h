// Runs the body of a Metal kernel on a CPU. The threads of a threadgroup are fibres, which run in a random order.
#pragma once
#include <setjmp.h>
#include <ucontext.h>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

// Words of Metal's language. An array of a threadgroup is one static array, because threadgroups run one by one.
#define device
#define constant const
#define threadgroup static
#define UNROLL
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef uint64_t ulong;
typedef _Float16 half;
struct uint3 { uint x, y, z; };

struct bfloat {  // the upper half of a float
  ushort bits;
  bfloat() = default;
  explicit bfloat(float x) {
    uint b;
    memcpy(&b, &x, 4);
    bits = ushort(std::isnan(x) ? 0x7FC0 : (b + 0x7FFF + ((b >> 16) & 1)) >> 16);
  }
  explicit operator float() const {
    const uint b = uint(bits) << 16;
    float x;
    memcpy(&x, &b, 4);
    return x;
  }
};

template <class To, class From> To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

template <class N, int size> struct alignas(size * sizeof(N)) vec {
  N numbers[size];
  N operator[](uint i) const { return numbers[i]; }
};

enum mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
enum memory_order { memory_order_relaxed };
struct atomic_uint { uint value; };
inline uint atomic_fetch_add_explicit(atomic_uint* a, uint n, memory_order) {
  const uint before = a->value;
  a->value += n;
  return before;
}
inline uint atomic_load_explicit(atomic_uint* a, memory_order) { return a->value; }
inline void atomic_store_explicit(atomic_uint* a, uint n, memory_order) { a->value = n; }

namespace metal {
using std::exp;
using std::fabs;
using std::log;
// As in Metal, both arguments have one type. The result of a NaN and a number is the number.
template <class N> N max(N a, N b) {
  if constexpr (std::is_same_v<N, float>) return std::fmax(a, b);
  else return a > b ? a : b;
}
template <class N> N min(N a, N b) {
  if constexpr (std::is_same_v<N, float>) return std::fmin(a, b);
  else return a < b ? a : b;
}
}  // namespace metal
using namespace metal;

namespace shim {
enum Why { RUN, BARRIER, SIMD, DONE };
struct Fibre {
  std::unique_ptr<char[]> stack;
  ucontext_t start;
  jmp_buf at;  // the place where the fibre waits; a jump is faster than a change of context
  bool started;
  Why why;
  uint number;
  long line;  // the line where the fibre waits
};
inline jmp_buf scheduler;
inline std::vector<Fibre> fibres;
inline Fibre* now;
inline uint3 group;
inline uint64_t lanes[1024];
inline void (*body)();  // the kernel, with its buffers
inline void** buffers;
inline const char* error;
inline uint seed;
inline long skipped_line;  // the line of a barrier to leave out, so that a test can show that the barrier is needed

inline uint random() { return seed = seed * 1664525u + 1013904223u; }

inline std::vector<uint> shuffled(std::vector<uint> numbers) {
  for (uint i = numbers.size(); i > 1; i--) std::swap(numbers[i - 1], numbers[(random() >> 8) % i]);
  return numbers;
}

inline void wait(Why why, long line) {
  now->why = why;
  now->line = line;
  if (_setjmp(now->at) == 0) _longjmp(scheduler, 1);
}

inline void barrier(long line) {
  if (line != skipped_line) wait(BARRIER, line);
}

// A fibre runs one threadgroup after another.
inline void enter() {
  for (;;) {
    body();
    wait(DONE, 0);
  }
}

inline void make_fibres(uint n) {
  constexpr size_t STACK = 1 << 16;
  fibres = std::vector<Fibre>(n);
  for (uint i = 0; i < n; i++) {
    Fibre& f = fibres[i];
    f.stack.reset(new char[STACK]);
    f.started = false;
    f.number = i;
    getcontext(&f.start);
    f.start.uc_stack.ss_sp = f.stack.get();
    f.start.uc_stack.ss_size = STACK;
    f.start.uc_link = nullptr;
    makecontext(&f.start, enter, 0);
  }
}

// Run a fibre until it waits.
__attribute__((noinline)) inline void resume(uint i) {
  now = &fibres[i];
  if (_setjmp(scheduler) != 0) return;
  if (now->started) _longjmp(now->at, 1);
  now->started = true;
  setcontext(&now->start);
}

// Every fibre of [from, to) must wait for one thing at one line. A barrier that diverges is undefined on a GPU.
inline bool may_go(uint from, uint to, Why why) {
  for (uint i = from; i < to; i++) {
    if (fibres[i].why != why || fibres[i].line != fibres[from].line) return false;
  }
  return true;
}

inline void let_go(uint from, uint to) {
  for (uint i = from; i < to; i++) fibres[i].why = RUN;
}

// Return whether threads of a SIMD group can run; they can if all lanes have reached a SIMD function.
inline bool can_run(uint simd) {
  for (uint i = simd; i < simd + 32; i++) {
    if (fibres[i].why == RUN) return true;
  }
  return may_go(simd, simd + 32, SIMD);
}

// Run the threads of a SIMD group until they wait.
inline void run_simd(uint simd) {
  if (may_go(simd, simd + 32, SIMD)) let_go(simd, simd + 32);
  std::vector<uint> ready;
  for (uint i = simd; i < simd + 32; i++) {
    if (fibres[i].why == RUN) ready.push_back(i);
  }
  for (uint i : shuffled(ready)) {  // a result that depends on the order is a race
    resume(i);
  }
}

// Run the kernel for one threadgroup. Return false after an error.
inline bool run_group(uint threads, uint3 at) {
  group = at;
  if (fibres.size() != threads) make_fibres(threads);
  let_go(0, threads);
  for (uint ahead = 0;;) {
    std::vector<uint> simds;
    for (uint s = 0; s < threads; s += 32) {
      if (can_run(s)) simds.push_back(s);
    }
    if (!simds.empty()) {  // mostly the same SIMD group, so that it gets ahead of the others
      if (!can_run(ahead) || random() >> 29 == 0) ahead = simds[(random() >> 8) % simds.size()];
      run_simd(ahead);
      continue;
    }
    if (may_go(0, threads, DONE)) return true;
    if (!may_go(0, threads, BARRIER)) {
      error = "threads of a group wait at different places";
      fibres.clear();
      return false;
    }
    let_go(0, threads);
  }
}

// Run all threadgroups of a grid in a random order. Return an error, or null.
inline const char* launch(void (*kernel)(), void** of_kernel, uint x, uint y, uint threads) {
  body = kernel;
  buffers = of_kernel;
  error = nullptr;
  std::vector<uint> groups(x * y);
  for (uint i = 0; i < x * y; i++) groups[i] = i;
  for (uint i : shuffled(groups)) {
    if (!run_group(threads, {i % x, i / x, 0})) break;
  }
  return error;
}

// A function of the 32 lanes of a SIMD group.
template <class N, class F> N across(N x, long line, F function) {
  memcpy(&lanes[now->number], &x, sizeof x);
  wait(SIMD, line);
  N all[32];
  for (int i = 0; i < 32; i++) memcpy(&all[i], &lanes[now->number / 32 * 32 + i], sizeof x);
  const N result = function(all, now->number % 32);
  wait(SIMD, -line - 1);
  return result;
}

template <class N> N sum_before(const N* all, uint n) {
  N sum = 0;
  for (uint i = 0; i < n; i++) sum += all[i];
  return sum;
}

template <class N> N maximum(const N* all) {
  N result = all[0];
  for (int i = 1; i < 32; i++) result = metal::max(result, all[i]);
  return result;
}
}  // namespace shim

#ifdef COUNTS_BYTES
// GCC's option -fsanitize=thread calls these functions before each access to memory. Threads run one by one, and the
// sanitizer's own library is not linked.
#define UNCOUNTED __attribute__((no_sanitize("thread")))
namespace shim {
constexpr int MAX_BUFFERS = 16;
inline int n_buffers;
inline char* starts[MAX_BUFFERS];
inline uint64_t sizes[MAX_BUFFERS], moved[MAX_BUFFERS];  // moved: bytes read from and written to a buffer

UNCOUNTED inline void count(void* at, uint64_t n) {
  for (int i = 0; i < n_buffers; i++) {
    if (at >= starts[i] && at < starts[i] + sizes[i]) moved[i] += n;
  }
}
}  // namespace shim

extern "C" {
void count_bytes_of(int n, char** starts, uint64_t* sizes) {
  shim::n_buffers = n;
  for (int i = 0; i < n; i++) shim::starts[i] = starts[i], shim::sizes[i] = sizes[i], shim::moved[i] = 0;
}
const uint64_t* moved_bytes() { return shim::moved; }
#define COUNTED(size) \
  UNCOUNTED void __tsan_read##size(void* at) { shim::count(at, size); } \
  UNCOUNTED void __tsan_write##size(void* at) { shim::count(at, size); } \
  UNCOUNTED void __tsan_unaligned_read##size(void* at) { shim::count(at, size); } \
  UNCOUNTED void __tsan_unaligned_write##size(void* at) { shim::count(at, size); }
COUNTED(1) COUNTED(2) COUNTED(4) COUNTED(8) COUNTED(16)
UNCOUNTED void __tsan_read_range(void* at, uint64_t n) { shim::count(at, n); }
UNCOUNTED void __tsan_write_range(void* at, uint64_t n) { shim::count(at, n); }
UNCOUNTED void __tsan_init() {}
UNCOUNTED void __tsan_func_entry(void*) {}
UNCOUNTED void __tsan_func_exit() {}
UNCOUNTED void __tsan_vptr_update(void**, void*) {}
}
#endif

#define threadgroup_barrier(flags) shim::barrier(__LINE__)
#define simd_sum(x) shim::across(x, __LINE__, [](auto* all, uint) { return shim::sum_before(all, 32); })
#define simd_max(x) shim::across(x, __LINE__, [](auto* all, uint) { return shim::maximum(all); })
#define simd_prefix_exclusive_sum(x) shim::across(x, __LINE__, [](auto* all, uint n) { return shim::sum_before(all, n); })
#define simd_shuffle(x, from) shim::across(x, __LINE__, [&](auto* all, uint) { return all[from]; })
#define simd_shuffle_xor(x, mask) shim::across(x, __LINE__, [&](auto* all, uint n) { return all[n ^ (mask)]; })
#define thread_index_in_simdgroup (shim::now->number % 32)
#define simdgroup_index_in_threadgroup (shim::now->number / 32)
#define thread_position_in_threadgroup (uint3{shim::now->number, 0, 0})
#define threadgroup_position_in_grid (shim::group)
