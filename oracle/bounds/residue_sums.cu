// The residue bound B2 of oracle/bounds/chain.py over a scaled product of 8-bit codes, in CUDA C++.
//
// A block of threads computes 64 x 64 results and streams K. A step adds up to 32 products p to the prefix x with its
// interval [low, high]. With T the alignment bits, mg the largest exponent of a product, mbar = max(mg, exponent of the
// largest possible |x + e|) and q = 2^(mbar - T), the definition needs of the products
//
//   V = sum p,   R+ = sum (p mod q) over the positive ones,   R- = sum (|p| mod q) over the negative ones.
//
//   1. mg is a maximum of sums of two exponents, 16 bits each, two at once.
//   2. F = sum floor(|p| / q) q over all products and F+ over the positive ones, by fma rounded toward zero on sums that
//      start at C = 2^D q, D the fraction bits of their format: in [C, 2C) the unit in the last place is q, so every
//      fma adds floor(p / q) q exactly. They stay there: |p| < 2^(ea + 1) 2^(eb + 1) <= 4 * 2^mg, so what is added is
//      below 32 * 2^(T + 2) q <= 2^D q. float has D = 23, so T <= 16; double (WIDE) has D = 52.
//      A positive product is max(a, 0) max(b, 0) + max(-a, 0) max(-b, 0), of which one term is 0 and adds nothing.
//   3. V and P = sum |p| come from the float64 tensor cores. All products are multiples of one unit, and a sum of their
//      magnitudes fits 53 bits (the caller sees to it), so every order is exact.
//   4. R+ = (P + V) / 2 - (F+ - C),   R- = (P - V) / 2 - (F - F+), all exact; then the recursion of the definition,
//      operation by operation, in float64.
//
// At the end of a chain its x, low and high are promoted as oracle.bounds.product.Promotion.add does it, into five
// quantities in global memory. Between chains and steps nothing leaves the registers.
//
// A step is decoded into one of two buffers while the other one is in use, so that a step costs one barrier.
//
// Not covered (the caller sees to it): operands of more than 8 bits, steps of more than 32 products, scales inside the
// instruction, products in another order than ascending. NaN and infinite codes count as zeros, as in the definition.
//
// Defined at compilation: WIDE (0: float, 1: double sums). A host compiles this file too, and runs it one thread of a
// block after the other (tests).

#define ROWS 64  // of a block
#define COLUMNS 64
#define THREADS 256  // 2 x 4 warps, each a tile of 32 x 16: 4 x 4 results a thread
#define STEP 32      // products of a step, filled with zeros
#define TALL 4
#define BROAD 4
#define STRIDE (STEP + 4)  // of fragments: lanes that load together meet no bank twice
#define ABSENT (-1024)     // exponent of a zero
#define LEAST (-512)       // below every sum of two exponents of numbers, above any with that of a zero

typedef unsigned int u32;
typedef unsigned char u8;
#if WIDE
typedef double Sum;
#define DIGITS 52
#else
typedef float Sum;
#define DIGITS 23
#endif

#ifdef __CUDACC__
// d += a b: 8 x 4 times 4 x 8. A lane holds a[lane / 4][lane % 4], b[lane % 4][lane / 4], d[lane / 4][2 (lane % 4)..].
__device__ __forceinline__ void multiply(double (&d)[2], double a, double b) {
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
      : "+d"(d[0]), "+d"(d[1]) : "d"(a), "d"(b));
}
#else
void multiply(double (&d)[2], double a, double b);
#endif

__device__ __forceinline__ double power(int e) { return __hiloint2double((e + 1023) << 20, 0); }
__device__ __forceinline__ int exponent_of(double x) { return ((__double2hiint(x) >> 20) & 0x7ff) - 1023; }
// 2^floor(log2 x) of a positive x
__device__ __forceinline__ double floor_power(double x) {
  return __hiloint2double(__double2hiint(x) & 0x7ff00000, 0);
}
// As torch.maximum and torch.minimum: NaN where one is
__device__ __forceinline__ double most(double a, double b) { return (a != a || a > b) ? a : b; }
__device__ __forceinline__ double fewest(double a, double b) { return (a != a || a < b) ? a : b; }
__device__ __forceinline__ double magnitude(double x) { return fabs(x); }

// A float of few bits as the high word of the same double
__device__ __forceinline__ u32 widened(u32 x) {
  const u32 size = x & 0x7fffffffu;
  return size == 0 ? 0u : (x & 0x80000000u) | ((size >> 3) + (896u << 20));
}
__device__ __forceinline__ double wide_value(u32 high) { return __hiloint2double((int)high, 0); }

#if WIDE
__device__ __forceinline__ u32 word_of(u32 x) { return widened(x); }
__device__ __forceinline__ Sum value_of(u32 word) { return wide_value(word); }
__device__ __forceinline__ Sum add_floor(Sum a, Sum b, Sum s) { return __fma_rz(a, b, s); }
__device__ __forceinline__ Sum start_of(int e) { return power(e); }
#else
__device__ __forceinline__ u32 word_of(u32 x) { return x; }
__device__ __forceinline__ Sum value_of(u32 word) { return __uint_as_float(word); }
__device__ __forceinline__ Sum add_floor(Sum a, Sum b, Sum s) { return __fmaf_rz(a, b, s); }
__device__ __forceinline__ Sum start_of(int e) { return __uint_as_float((u32)(e + 127) << 23); }
#endif

struct Chain {
  double x, low, high;
};

// The exponent of q for the step whose largest product exponent is top
__device__ __forceinline__ int quantum(const Chain& c, int top, int align) {
  const double held = most(magnitude(c.x + c.low), magnitude(c.x + c.high));
  int e = exponent_of(held);
  e = e < -126 ? -126 : e;
  e = held == 0.0 ? LEAST : e;
  const int m = top > e ? top : e;
  return (m <= LEAST ? 0 : m) - align;
}

// oracle.bounds.chain.residue_step, of V, P and the sums of 2.
__device__ __forceinline__ void step(Chain& c, int top, double v, double p, Sum all, Sum positive, int align, int out) {
#if WIDE
  const double start = floor_power(positive);
  const double above = (p + v) * 0.5 - (positive - start), below = (p - v) * 0.5 - (all - positive);
#else
  // the fraction of a sum counts its units: as a double without a conversion
  const u32 bits = __float_as_uint(positive);
  const double two52 = 4503599627370496.0;
  const double q = power((int)(bits >> 23) - 127 - DIGITS);
  const double f = __hiloint2double(0x43300000, (int)(bits & 0x7fffffu)) - two52;
  const double g = __hiloint2double(0x43300000, (int)(__float_as_uint(all) - bits)) - two52;
  const double above = (p + v) * 0.5 - f * q, below = (p - v) * 0.5 - g * q;
#endif
  const double left = c.x + c.low, right = c.x + c.high;
  const double nearest = (left <= 0.0 && right >= 0.0) ? 0.0 : fewest(magnitude(left), magnitude(right));
  const bool live = top > LEAST;
  const int m = live ? top : 0;
  const double lost = (nearest < power(m) && (left != 0.0 || right != 0.0)) ? power(m - align) : 0.0;
  const double after = c.x + v;
  const double l1 = c.low - above - (right > 0.0 ? lost : 0.0), h1 = c.high + below + (left < 0.0 ? lost : 0.0);
  const double exact_below = power(m + 1 + out - align), ulp = power(-out);
  const double most_high = after + h1, most_low = -(after + l1);
  const double down = most_high < exact_below ? 0.0 : ulp * floor_power(most_high);
  const double up = most_low < exact_below ? 0.0 : ulp * floor_power(most_low);
  c.x = after;
  c.low = live ? l1 - down : c.low;
  c.high = live ? h1 + up : c.high;
}

// One element of the running bound of a promoted sum: y, lo, hi, phi at these distances, and whether it is open.
struct Promoted {
  double* y;
  size_t distance;
  u8* open;
};

__device__ __forceinline__ void promote(const Promoted& at, size_t i, const Chain& c, double sa, double sb) {
  const double unit = 0x1p-24, eta = 0x1p-149;
  const double reach_limit = (2.0 - 0x1p-23) * 0x1p127 * (1 - 0x1p-20);
  const double sigma = sa * sb, size = magnitude(c.x) + most(-c.low, c.high);
  const double left = sigma * c.low, right = sigma * c.high;
  const double y = at.y[i] + sigma * c.x, phi = at.y[i + 3 * at.distance];
  const double lo = at.y[i + at.distance] + fewest(left, right), hi = at.y[i + 2 * at.distance] + most(left, right);
  const double total = most(magnitude(y + lo), magnitude(y + hi)) + phi;
  const double rounding = 3 * unit * magnitude(sigma) * size + unit * total +
                          eta * (1 + size + magnitude(sa) + magnitude(sb));
  at.y[i] = y;
  at.y[i + at.distance] = lo;
  at.y[i + 2 * at.distance] = hi;
  if (size > 0) at.y[i + 3 * at.distance] = phi + rounding;
  const double largest = most(most(magnitude(sa), magnitude(sb)), magnitude(sigma)) * size;
  if (!(most(most(largest, magnitude(sigma)), total + rounding) < reach_limit)) at.open[i] = 1;
}

// Where a step lies: its first k and number of products, its scale block, whether its chain ends.
struct Place {
  int k, count, block;
  bool last;
};
struct Order {
  int length, block, promotion, group;  // K, and products of a scale block, of a chain (0: of a block), of a step
};
// The step that begins at k; chains never cross a scale block.
__device__ __forceinline__ Place place_of(const Order& o, int k) {
  Place p;
  p.k = k;
  p.block = k / o.block;
  const int first = p.block * o.block, end = min(o.length, first + o.block);
  const int chain = o.promotion > 0 ? o.promotion : o.block;
  const int stop = min(end, first + (k - first) / chain * chain + chain);
  p.count = min(o.group, stop - k);
  p.last = k + p.count >= stop;
  return p;
}

template <int SIZE> struct Side {
  u32 plus[STEP][SIZE], minus[STEP][SIZE], size[STEP][SIZE];  // max(x, 0), max(-x, 0), |x| as words of Sum
  u32 exponent[STEP / 2][SIZE];                               // of two products
  u32 wide[SIZE][STRIDE];                                     // high words of float64
};
struct Buffer {
  Side<ROWS> a;
  Side<COLUMNS> b;
};
struct Tables {
  u32 value[2][256];  // floats; zeros for NaN and infinity
};

// Where a row of 32, or a column of 16, lies: what one thread holds is contiguous.
__device__ __forceinline__ int row_slot(int r) { return (r & ~31) | ((r & 7) << 2) | ((r >> 3) & 3); }
__device__ __forceinline__ int column_slot(int c) {
  return (c & ~15) | (((c >> 1) & 3) << 2) | (((c >> 3) & 1) << 1) | (c & 1);
}

struct Codes {
  const u8* at;      // [rows, K]
  long long stride;  // of a row
  int rows, least;   // and the exponent of the least normal number
  bool whole;        // rows begin at multiples of 8 bytes
};

// Eight codes of one row: from the k of this step on that is 8 times the thread's number of 64
__device__ __forceinline__ void fetch(u32 (&eight)[2], const Codes& x, int first_row, const Place& p, int thread) {
  const int row = first_row + (thread & 63), from = (thread >> 6) * 8;
  eight[0] = eight[1] = 0;
  if (row >= x.rows || from >= p.count) return;
  const u8* at = x.at + row * x.stride + p.k + from;
  if (x.whole && (p.k & 7) == 0 && p.count - from >= 8) {
    const uint2 both = *reinterpret_cast<const uint2*>(at);
    eight[0] = both.x, eight[1] = both.y;
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (from + i < p.count) eight[i >> 2] |= (u32)at[i] << (8 * (i & 3));
}

template <int SIZE> __device__ __forceinline__ void decode(
    Side<SIZE>& side, const u32 (&eight)[2], const u32* value, int slot, int least, int thread) {
  const int row = thread & 63, from = (thread >> 6) * 8;
  u32 high[8], exponent[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 x = value[(eight[i >> 2] >> (8 * (i & 3))) & 255u], size = x & 0x7fffffffu;
    const u32 word = word_of(size);
    side.size[from + i][slot] = word;
    side.plus[from + i][slot] = x == size ? word : 0u;
    side.minus[from + i][slot] = x == size ? 0u : word;
    high[i] = widened(x);
    const int e = (int)(size >> 23) - 127;
    exponent[i] = (u32)(size == 0 ? ABSENT : e < least ? least : e);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    side.exponent[from / 2 + i][slot] = (exponent[2 * i] & 0xffffu) | (exponent[2 * i + 1] << 16);
  *reinterpret_cast<uint4*>(&side.wide[row][from]) = make_uint4(high[0], high[1], high[2], high[3]);
  *reinterpret_cast<uint4*>(&side.wide[row][from + 4]) = make_uint4(high[4], high[5], high[6], high[7]);
}

__device__ __forceinline__ void load(u32 (&to)[4], const u32* from) {
  const uint4 four = *reinterpret_cast<const uint4*>(from);
  to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

// One step of the 16 results of a thread.
__device__ __forceinline__ void add_step(
    Chain (&chain)[TALL][BROAD], const Buffer& s, int count, int wm, int wn, int lane, int align, int out) {
  const int g = lane >> 2, t = lane & 3;
  u32 tops[TALL][BROAD];
#pragma unroll
  for (int i = 0; i < TALL; ++i)
#pragma unroll
    for (int j = 0; j < BROAD; ++j) tops[i][j] = ((u32)LEAST & 0xffffu) | ((u32)LEAST << 16);
#pragma unroll 4
  for (int k = 0; 2 * k < count; ++k) {  // 1
    u32 a[TALL], b[BROAD];
    load(a, &s.a.exponent[k][wm + 4 * g]);
    load(b, &s.b.exponent[k][wn + 4 * t]);
#pragma unroll
    for (int i = 0; i < TALL; ++i)
#pragma unroll
      for (int j = 0; j < BROAD; ++j) tops[i][j] = __viaddmax_s16x2(a[i], b[j], tops[i][j]);
  }
  Sum all[TALL][BROAD], positive[TALL][BROAD];
  int top[TALL][BROAD];
#pragma unroll
  for (int i = 0; i < TALL; ++i)
#pragma unroll
    for (int j = 0; j < BROAD; ++j) {
      const int one = (int)(short)(tops[i][j] & 0xffffu), other = (int)tops[i][j] >> 16;
      top[i][j] = one > other ? one : other;
      all[i][j] = positive[i][j] = start_of(quantum(chain[i][j], top[i][j], align) + DIGITS);
    }
#pragma unroll 4
  for (int k = 0; k < count; ++k) {  // 2
    u32 a[3][TALL], b[3][BROAD];
    load(a[0], &s.a.plus[k][wm + 4 * g]);
    load(a[1], &s.a.minus[k][wm + 4 * g]);
    load(a[2], &s.a.size[k][wm + 4 * g]);
    load(b[0], &s.b.plus[k][wn + 4 * t]);
    load(b[1], &s.b.minus[k][wn + 4 * t]);
    load(b[2], &s.b.size[k][wn + 4 * t]);
#pragma unroll
    for (int i = 0; i < TALL; ++i)
#pragma unroll
      for (int j = 0; j < BROAD; ++j) {
        Sum f = positive[i][j];
        f = add_floor(value_of(a[0][i]), value_of(b[0][j]), f);
        positive[i][j] = add_floor(value_of(a[1][i]), value_of(b[1][j]), f);
        all[i][j] = add_floor(value_of(a[2][i]), value_of(b[2][j]), all[i][j]);
      }
  }
#pragma unroll
  for (int n = 0; n < BROAD / 2; ++n) {  // 3 and 4
    double v[TALL][2], p[TALL][2];
#pragma unroll
    for (int i = 0; i < TALL; ++i) v[i][0] = v[i][1] = p[i][0] = p[i][1] = 0.0;
#pragma unroll 2
    for (int k = 0; k < count; k += 4) {
      const u32 right = s.b.wide[wn + 8 * n + g][k + t];
#pragma unroll
      for (int i = 0; i < TALL; ++i) {
        const u32 left = s.a.wide[wm + 8 * i + g][k + t];
        multiply(v[i], wide_value(left), wide_value(right));
        multiply(p[i], wide_value(left & 0x7fffffffu), wide_value(right & 0x7fffffffu));
      }
    }
#pragma unroll
    for (int i = 0; i < TALL; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int j = 2 * n + h;
        step(chain[i][j], top[i][j], v[i][h], p[i][h], all[i][j], positive[i][j], align, out);
      }
  }
}

// made [4][padded rows][padded columns] (y, lo, hi, phi) and open alike, zeros before. a_scale [rows or 1][blocks] with
// this stride, b_scale [columns / b_rows][blocks].
extern "C" __global__ void __launch_bounds__(THREADS, 1) residue(
    const u8* __restrict__ a, long long a_stride, const u8* __restrict__ b, long long b_stride,
    const u32* __restrict__ tables, const double* __restrict__ a_scale, int a_scale_stride,
    const double* __restrict__ b_scale, int blocks, int b_rows, int rows, int columns, int length, int block,
    int promotion, int group, int align, int out, int a_least, int b_least, double* __restrict__ made,
    u8* __restrict__ open) {
  extern __shared__ __align__(16) unsigned char memory[];
  Buffer* buffers = reinterpret_cast<Buffer*>(memory);
  Tables& values = *reinterpret_cast<Tables*>(memory + 2 * sizeof(Buffer));
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int wm = (warp & 1) * 32, wn = (warp >> 1) * 16;
  const int m0 = blockIdx.y * ROWS, n0 = blockIdx.x * COLUMNS;
  const Order order = {length, block, promotion, group};
  const Codes left = {a, a_stride, rows, a_least, (((size_t)a | (size_t)a_stride) & 7) == 0};
  const Codes right = {b, b_stride, columns, b_least, (((size_t)b | (size_t)b_stride) & 7) == 0};
  const int a_slot = row_slot(thread & 63), b_slot = column_slot(thread & 63);
  values.value[0][thread] = tables[thread];
  values.value[1][thread] = tables[256 + thread];
  __syncthreads();

  Chain chain[TALL][BROAD];
#pragma unroll
  for (int i = 0; i < TALL; ++i)
#pragma unroll
    for (int j = 0; j < BROAD; ++j) chain[i][j].x = chain[i][j].low = chain[i][j].high = 0.0;

  u32 of_a[2], of_b[2];
  Place now = place_of(order, 0);
  fetch(of_a, left, m0, now, thread);
  fetch(of_b, right, n0, now, thread);
  decode(buffers[0].a, of_a, values.value[0], a_slot, a_least, thread);
  decode(buffers[0].b, of_b, values.value[1], b_slot, b_least, thread);
  __syncthreads();
  int use = 0;
#pragma unroll 1
  while (true) {
    const int next = now.k + now.count;
    Place then = now;
    if (next < length) {
      then = place_of(order, next);
      fetch(of_a, left, m0, then, thread);
      fetch(of_b, right, n0, then, thread);
    }
    add_step(chain, buffers[use], (now.count + 3) & ~3, wm, wn, lane, align, out);
    if (now.last) {
      const size_t wide = (size_t)gridDim.x * COLUMNS;
      const Promoted at = {made, wide * gridDim.y * ROWS, open};
#pragma unroll
      for (int i = 0; i < TALL; ++i) {
        const int row = m0 + wm + 8 * i + (lane >> 2);
        const double sa = a_scale[(size_t)min(row, rows - 1) * a_scale_stride + now.block];
#pragma unroll
        for (int j = 0; j < BROAD; ++j) {
          const int column = n0 + wn + 8 * (j >> 1) + 2 * (lane & 3) + (j & 1);
          const double sb = b_scale[(size_t)(min(column, columns - 1) / b_rows) * blocks + now.block];
          promote(at, row * wide + column, chain[i][j], sa, sb);
          chain[i][j].x = chain[i][j].low = chain[i][j].high = 0.0;
        }
      }
    }
    if (next >= length) return;
    use ^= 1;
    decode(buffers[use].a, of_a, values.value[0], a_slot, a_least, thread);
    decode(buffers[use].b, of_b, values.value[1], b_slot, b_least, thread);
    __syncthreads();
    now = then;
  }
}
