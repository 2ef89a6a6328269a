// What a source of CUDA C++ needs to run on a host: the threads of a block take turns, one until it waits for the
// others. Every thread of a block must wait equally often, at __syncthreads and at the products of a warp.

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <tuple>
#include <vector>

#define __global__
#define __device__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

using std::max;
using std::min;

struct Index {
  unsigned x, y;
};
Index threadIdx, blockIdx, gridDim;
alignas(16) unsigned char memory[1 << 18];

struct uint2 {
  unsigned x, y;
};
struct alignas(16) double2 {
  double x, y;
};
inline double2 make_double2(double x, double y) { return {x, y}; }
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <class To, class From> To as(From x) {
  To y;
  static_assert(sizeof x == sizeof y, "one size");
  memcpy(&y, &x, sizeof y);
  return y;
}
inline unsigned __float_as_uint(float x) { return as<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return as<float>(x); }
inline int __double2hiint(double x) { return (int)(as<uint64_t>(x) >> 32); }
inline double __hiloint2double(int high, int low) { return as<double>((uint64_t)(unsigned)high << 32 | (unsigned)low); }

// s + p toward zero, for positive sums of which p is exact
template <class T> T cut(double s, double p) {
  const double d = s + p, v = d - s, rest = (s - (d - v)) + (p - v);
  const T t = (T)d;
  assert(s > 0 && d > 0);
  return t > d || (t == d && rest < 0) ? std::nextafter(t, (T)0) : t;
}
inline float __fmaf_rz(float a, float b, float s) { return cut<float>(s, (double)a * b); }
inline double __fma_rz(double a, double b, double s) { return cut<double>(s, a * b); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
// a + b rounded up (1), down (-1) or toward zero (0)
inline float directed(float a, float b, int way) {
  const double d = (double)a + b, v = d - a, rest = (a - (d - v)) + (b - v);
  const float t = (float)d;
  const int above = d > t || (d == t && rest > 0), below = d < t || (d == t && rest < 0);  // the sum, of t
  if (way == 0) way = d < 0 ? 1 : -1;
  return way > 0 && above ? std::nextafter(t, INFINITY) : way < 0 && below ? std::nextafter(t, -INFINITY) : t;
}
inline double __dadd_rz(double a, double b) {
  const double d = a + b, v = d - a, rest = (a - (d - v)) + (b - v);
  return rest != 0 && (rest < 0) == (d > 0) ? std::nextafter(d, 0.0) : d;
}
inline double __dadd_ru(double a, double b) {
  const double d = a + b, v = d - a, rest = (a - (d - v)) + (b - v);
  return rest > 0 ? std::nextafter(d, INFINITY) : d;
}
inline double __dadd_rd(double a, double b) { return -__dadd_ru(-a, -b); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __longlong_as_double(long long x) { return as<double>(x); }
inline long long __double_as_longlong(double x) { return as<long long>(x); }
inline float __fadd_ru(float a, float b) { return directed(a, b, 1); }
inline float __fadd_rd(float a, float b) { return directed(a, b, -1); }
inline float __fadd_rz(float a, float b) { return directed(a, b, 0); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline unsigned short float16_bits(float x) { return as<unsigned short>((_Float16)x); }
inline unsigned inexact_negative(unsigned low, unsigned a, unsigned b) { return ~low & (a ^ b); }
inline unsigned add_bytes(unsigned bytes, unsigned sum) {
  return sum + (bytes & 255) + (bytes >> 8 & 255) + (bytes >> 16 & 255) + (bytes >> 24);
}
inline unsigned __viaddmax_s16x2(unsigned a, unsigned b, unsigned c) {
  unsigned d = 0;
  for (int h = 0; h < 32; h += 16)
    d |= (unsigned)(uint16_t)max<int>((int16_t)((a >> h) + (b >> h)), (int16_t)(c >> h)) << h;
  return d;
}

// The threads of a block.
struct Fiber {
  ucontext_t start;
  jmp_buf at;
  bool begun = false, done = false;
  std::unique_ptr<char[]> stack{new char[1 << 17]};
};
std::vector<Fiber> fibers;
std::function<void()> body;
jmp_buf scheduler;

void wait_for_all() {
  const unsigned self = threadIdx.x;
  if (!_setjmp(fibers[self].at)) _longjmp(scheduler, 1);
}
void __syncthreads() { wait_for_all(); }
int any_of[2][1024];
unsigned asked[1024];
int __syncthreads_or(int x) {
  const unsigned self = threadIdx.x, now = asked[self]++ & 1;
  any_of[now][self] = x;
  wait_for_all();
  return std::any_of(any_of[now], any_of[now] + fibers.size(), [](int x) { return x != 0; });
}
void begin() {
  body();
  fibers[threadIdx.x].done = true;
  _longjmp(scheduler, 1);
}

void run_block(unsigned threads) {
  ucontext_t here;
  fibers.resize(threads);
  for (auto& fiber : fibers) fiber.begun = fiber.done = false;
  for (volatile unsigned left = threads; left;)
    for (volatile unsigned i = 0; i < threads; ++i) {
      Fiber& fiber = fibers[i];
      if (fiber.done) continue;
      threadIdx = {i, 0};
      if (!_setjmp(scheduler)) {
        if (fiber.begun) _longjmp(fiber.at, 1);
        fiber.begun = true;
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = fiber.stack.get();
        fiber.start.uc_stack.ss_size = 1 << 17;
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, begin, 0);
        swapcontext(&here, &fiber.start);
      }
      if (fibers[i].done) left = left - 1;
    }
}

// Operands that the lanes of a warp give each other: of this product and of the last one.
double given[2][2][1024];
unsigned turn[1024];

void multiply(double (&d)[2], double a, double b) {
  const unsigned self = threadIdx.x, warp = self & ~31u, lane = self & 31, now = turn[self]++ & 1;
  given[now][0][self] = a, given[now][1][self] = b;
  wait_for_all();
  for (unsigned h = 0; h < 2; ++h)
    for (unsigned k = 0; k < 4; ++k)
      d[h] += given[now][0][warp + (lane & ~3u) + k] * given[now][1][warp + (2 * (lane & 3) + h) * 4 + k];
}

// The 8 x 8 matrices of two bytes whose rows eight lanes each point to
const void* pointed[2][1024];
void load_matrices(unsigned (&r)[4], const void* p) {
  const unsigned self = threadIdx.x, warp = self & ~31u, lane = self & 31, now = turn[self]++ & 1;
  pointed[now][self] = p;
  wait_for_all();
  for (unsigned i = 0; i < 4; ++i)
    r[i] = static_cast<const unsigned*>(pointed[now][warp + 8 * i + lane / 4])[lane % 4];
}
// d += a b of bfloat16: 16 x 16 times 16 x 8
unsigned words[2][6][1024];
void multiply(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const unsigned self = threadIdx.x, warp = self & ~31u, lane = self & 31, now = turn[self]++ & 1;
  for (unsigned i = 0; i < 4; ++i) words[now][i][self] = a[i];
  words[now][4][self] = b0, words[now][5][self] = b1;
  wait_for_all();
  const auto value = [&](unsigned word, unsigned of, unsigned k) {
    const unsigned two = words[now][word][warp + 4 * of + k / 2];
    return (double)__uint_as_float(k % 2 ? two & 0xffff0000u : two << 16);
  };
  for (unsigned i = 0; i < 4; ++i) {
    double sum = d[i];
    for (unsigned k = 0; k < 16; ++k)
      sum += value(i / 2 + k / 8 * 2, lane / 4, k % 8) * value(4 + k / 8, 2 * (lane % 4) + i % 2, k % 8);
    d[i] = (float)sum;
  }
}
// Copies that are there at once
template <int BYTES> void copy_all(void* to, const void* from, int thread) {
  for (size_t i = 16 * thread; i < BYTES; i += 16 * fibers.size()) memcpy((char*)to + i, (const char*)from + i, 16);
}
void commit() {}
template <int LEFT> void arrived() { wait_for_all(); }

template <class... A, size_t... I> void call(void (*f)(A...), void** p, std::index_sequence<I...>) {
  f(*static_cast<std::remove_reference_t<A>*>(p[I])...);
}
template <class... A> void run(void (*f)(A...), unsigned columns, unsigned rows, unsigned threads, void** arguments) {
  gridDim = {columns, rows};
  body = [&] { call(f, arguments, std::index_sequence_for<A...>()); };
  for (unsigned y = 0; y < rows; ++y)
    for (unsigned x = 0; x < columns; ++x) {
      blockIdx = {x, y};
      run_block(threads);
    }
}
