// The bounds B2 and B3 of oracle/bounds/chain.py over a scaled product of 8-bit codes, in CUDA C++.
//
// A block of threads computes 64 x 64 results and streams K. A step adds up to 32 products p to the prefix x with its
// interval [low, high]. With T the alignment bits, mg the largest exponent of a product, mbar = max(mg, exponent of the
// largest possible |x + e|) and q = 2^(mbar - T), the definition needs of the products
//
//   V = sum p,   R+ = sum (p mod q) over the positive ones,   R- = sum (|p| mod q) over the negative ones.
//
//   1. mg is a maximum of sums of two exponents, 16 bits each, two at once.
//   2. F = sum floor(|p| / q) q over all products and F+ over the positive ones, by fma rounded toward zero on sums
//      that start at C = 2^D q, D the fraction bits of their format: in [C, 2C) the unit in the last place is q, so
//      every fma adds floor(p / q) q exactly. They stay there: |p| < 2^(ea + 1) 2^(eb + 1) <= 4 * 2^mg, so what is
//      added is below 32 * 2^(T + 2) q <= 2^D q. float has D = 23, so T <= 16; double (WIDE) has D = 52. A positive
//      product is max(a, 0) max(b, 0) + max(-a, 0) max(-b, 0), of which one term is 0 and adds nothing.
//   3. V and P = sum |p| come from the float64 tensor cores. All products are multiples of one unit, and a sum of their
//      magnitudes fits 53 bits (the caller sees to it), so every order is exact.
//   4. R+ = (P + V) / 2 - (F+ - C),   R- = (P - V) / 2 - (F - F+), all exact (one operand is halved for the tensor
//      cores); then the recursion of the definition, operation by operation, in float64. Its numbers are 0 or have
//      exponents far from the ends of float64, and none is -0: their high words compare as the numbers do.
//
// The bound B3 (products in any order) needs these sums of a whole chain, R+ and R- for a q that grows with the error
// that they give: `any_order` streams the chain once for mg, V and P, and again for F and F+ until q stays.
//
// At the end of a chain its x, low and high are promoted as oracle.bounds.product.Promotion.add does it, into
// quantities in global memory. Between chains and steps nothing leaves the registers.
//
// A step is decoded into one of two buffers while the other one is in use, so that a step costs one barrier.
//
// Not covered (the caller sees to it): operands of more than 8 bits, steps of more than 32 products, scales inside the
// instruction, products in another order than ascending. NaN and infinite codes count as zeros, as in the definition.
//
// Defined at compilation: WIDE (0: float, 1: double sums), MEMORY (bytes of shared memory of a launch). A host compiles
// this file too, and runs it one thread of a block after the other (tests).

#define ROWS 64  // of a block
#define COLUMNS 64
#define THREADS 256  // 2 x 4 warps, each a tile of 32 x 16: 4 x 4 results a thread
#define STEP 32      // products of a step, filled with zeros
#define TALL 4
#define BROAD 4
#define STRIDE (STEP + 4)  // of fragments: lanes that load together meet no bank twice
#define ABSENT (-1024)     // exponent of a zero
#define TURNS 64           // after which an error grows on
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

// The same of 16 x 8 times 8 x 8: a[0] and a[2] are of rows above, a[1] and a[3] of those 8 below, the last two of each
// four of k further on.
__device__ __forceinline__ void multiply(
    double (&above)[2], double (&below)[2], const double (&a)[4], const double (&b)[2]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+d"(above[0]), "+d"(above[1]), "+d"(below[0]), "+d"(below[1])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
#else
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    multiply(above, a[2 * k], b[k]);
    multiply(below, a[2 * k + 1], b[k]);
  }
#endif
}

__device__ __forceinline__ double power(int e) { return __hiloint2double((e + 1023) << 20, 0); }
__device__ __forceinline__ int exponent_of(double x) { return ((__double2hiint(x) >> 20) & 0x7ff) - 1023; }
__device__ __forceinline__ int exponent_of(float x) { return (int)((__float_as_uint(x) >> 23) & 0xff) - 127; }
// x < 2^e
__device__ __forceinline__ bool under(double x, int e) { return __double2hiint(x) < (e + 1023) << 20; }
// 2^floor(log2 x) of a positive x
__device__ __forceinline__ double floor_power(double x) {
  return __hiloint2double(__double2hiint(x) & 0x7ff00000, 0);
}
__device__ __forceinline__ double larger(double a, double b) { return a > b ? a : b; }
// As torch.maximum and torch.minimum: NaN where one is
__device__ __forceinline__ double most(double a, double b) { return (a != a || a > b) ? a : b; }
__device__ __forceinline__ double fewest(double a, double b) { return (a != a || a < b) ? a : b; }
__device__ __forceinline__ double magnitude(double x) { return fabs(x); }

// A float of few bits as the high word of the same double, times a power of two
__device__ __forceinline__ u32 widened(u32 x, int e) {
  const u32 size = x & 0x7fffffffu;
  return size == 0 ? 0u : (x & 0x80000000u) | ((size >> 3) + ((u32)(896 + e) << 20));
}
__device__ __forceinline__ double wide_value(u32 high) { return __hiloint2double((int)high, 0); }

#if WIDE
typedef double Counted;  // what was added to a sum: itself
__device__ __forceinline__ Counted counted(Sum s) { return s - floor_power(s); }
__device__ __forceinline__ double amount(Counted n) { return n; }
__device__ __forceinline__ double unit(int e) { return 1.0; }
__device__ __forceinline__ u32 word_of(u32 x) { return widened(x, 0); }
__device__ __forceinline__ Sum value_of(u32 word) { return wide_value(word); }
__device__ __forceinline__ Sum add_floor(Sum a, Sum b, Sum s) { return __fma_rz(a, b, s); }
__device__ __forceinline__ Sum start_of(int e) { return power(e); }
#else
typedef u32 Counted;  // what was added to a sum, in units of q: its fraction
__device__ __forceinline__ Counted counted(Sum s) { return __float_as_uint(s) & 0x7fffffu; }
__device__ __forceinline__ double amount(Counted n) {
  return __hiloint2double(0x43300000, (int)n) - 0x1p52;  // without a conversion
}
__device__ __forceinline__ double unit(int e) { return power(e); }
__device__ __forceinline__ u32 word_of(u32 x) { return x; }
__device__ __forceinline__ Sum value_of(u32 word) { return __uint_as_float(word); }
__device__ __forceinline__ Sum add_floor(Sum a, Sum b, Sum s) { return __fmaf_rz(a, b, s); }
__device__ __forceinline__ Sum start_of(int e) { return __uint_as_float((u32)(e + 127) << 23); }
#endif

struct Chain {
  double x, low, high;
};
__device__ __forceinline__ double left(const Chain& c) { return c.x + c.low; }
__device__ __forceinline__ double right(const Chain& c) { return c.x + c.high; }
__device__ __forceinline__ int size_of(double x) { return __double2hiint(x) & 0x7fffffff; }

__device__ __forceinline__ int held(const Chain& c) { return max(size_of(left(c)), size_of(right(c))); }

// The exponent of q for products of this largest exponent, and a sum whose largest magnitude has this high word
__device__ __forceinline__ int quantum(int held, int top, int align) {
  const int m = max(top, (held >> 20) - 1023);
  return (m <= LEAST ? 0 : m) - align;
}

// oracle.bounds.chain.residue_step, of V / 2, P / 2 and the sums of 2.
__device__ __forceinline__ void step(Chain& c, int top, double v, double p, Sum all, Sum positive, int align, int out) {
  const double q = unit(exponent_of(all) - DIGITS);
  const double above = __fma_rn(amount(counted(positive)), -q, p + v);
  const double below = __fma_rn(amount(counted(all) - counted(positive)), -q, p - v);
  const double l = left(c), r = right(c);
  const bool live = top > LEAST;
  const bool small = live && under(l, top) && under(-r, top);  // [l, r] holds numbers below 2^top
  const double lost = power(top - align), after = __fma_rn(v, 2.0, c.x);
  double low = c.low - above, high = c.high + below;
  if (small && __double2hiint(r) > 0) low = low - lost;
  if (small && __double2hiint(l) < 0) high = high + lost;
  const double most_high = after + high, most_low = -(after + low);
  const int exact_below = live ? top + 1 + out - align : 1000;
  const double down = __hiloint2double((__double2hiint(most_high) & 0x7ff00000) - (out << 20), 0);
  const double up = __hiloint2double((__double2hiint(most_low) & 0x7ff00000) - (out << 20), 0);
  if (!under(most_high, exact_below)) low = low - down;
  if (!under(most_low, exact_below)) high = high + up;
  c.x = after;
  c.low = low;
  c.high = high;
}

// The running bound of a promoted sum: these quantities, each of all results; the last three where chains are added in
// any order.
enum { Y, LOW, HIGH, PHI, PLUS, MINUS, REACH, QUANTITIES };
struct Promoted {
  double q[QUANTITIES];
};

// Adds a chain; returns whether the result is open.
__device__ __forceinline__ bool promote(Promoted& sum, const Chain& c, double sa, double sb, bool unordered) {
  const double unit = 0x1p-24, eta = 0x1p-149;
  const double limit = (2.0 - 0x1p-23) * 0x1p127 * (1 - 0x1p-20);
  const double sigma = sa * sb, size = magnitude(c.x) + larger(-c.low, c.high);
  const double left = sigma * c.low, right = sigma * c.high, least = fewest(left, right), greatest = most(left, right);
  sum.q[Y] += sigma * c.x;
  sum.q[LOW] += least;
  sum.q[HIGH] += greatest;
  double total = most(magnitude(sum.q[Y] + sum.q[LOW]), magnitude(sum.q[Y] + sum.q[HIGH])) + sum.q[PHI];
  if (unordered) {
    sum.q[PLUS] += most(sigma * c.x + greatest, 0.0);
    sum.q[MINUS] += most(-sigma * c.x - least, 0.0);
    total = 0.0;  // added at the end
  }
  const double rounding = 3 * unit * magnitude(sigma) * size + unit * total +
                          eta * (1 + size + magnitude(sa) + magnitude(sb));
  if (size > 0) sum.q[PHI] += rounding;
  double largest = most(most(magnitude(sa), magnitude(sb)), magnitude(sigma)) * size;
  if (unordered) largest = sum.q[REACH] += most(largest, size);
  return !(most(most(largest, magnitude(sigma)), total + rounding) < limit);
}

// Where a step lies: its first k and number of products, its scale block, the end of its chain.
struct Place {
  int k, count, block, stop;
  __device__ __forceinline__ bool last() const { return k + count >= stop; }
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
  p.stop = min(end, first + (k - first) / chain * chain + chain);
  p.count = min(o.group, p.stop - k);
  return p;
}

template <int SIZE> struct Side {
  u32 plus[STEP][SIZE], minus[STEP][SIZE], size[STEP][SIZE];  // max(x, 0), max(-x, 0), |x| as words of Sum
  u32 exponent[STEP / 2][SIZE];                               // of two products
  u32 wide[SIZE][STRIDE];                                     // high words of float64; of half in b
};
struct Buffer {
  Side<ROWS> a;
  Side<COLUMNS> b;
};
struct Tables {
  u32 value[2][256];  // floats; zeros for NaN and infinity
};
static_assert(2 * sizeof(Buffer) + sizeof(Tables) == MEMORY, "what is launched with");

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

// Eight codes of one row, from this k of a step on
__device__ __forceinline__ void fetch(u32 (&eight)[2], const Codes& x, int row, const Place& p, int from) {
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
    Side<SIZE>& side, const u32 (&eight)[2], const u32* value, int row, int slot, int from, int least, int half) {
  u32 high[8], exponent[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 x = value[(eight[i >> 2] >> (8 * (i & 3))) & 255u], size = x & 0x7fffffffu;
    const u32 word = word_of(size);
    side.size[from + i][slot] = word;
    side.plus[from + i][slot] = x == size ? word : 0u;
    side.minus[from + i][slot] = x == size ? 0u : word;
    high[i] = widened(x, half);
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

// What a thread has of its block: where it stands, and the steps that the block decodes in turn.
struct Block {
  Buffer* buffers;
  const Tables* values;
  Codes left, right;
  Order order;
  int m0, n0, wm, wn, thread, g, t, use;

  // a thread has eight codes of a row of each operand
  __device__ __forceinline__ void fetched(u32 (&of_a)[2], u32 (&of_b)[2], const Place& p) const {
    fetch(of_a, left, m0 + thread % ROWS, p, thread / ROWS * 8);
    fetch(of_b, right, n0 + thread % COLUMNS, p, thread / COLUMNS * 8);
  }
  __device__ __forceinline__ void decoded(const u32 (&of_a)[2], const u32 (&of_b)[2]) {
    use ^= 1;  // the step before the last one was in it
    const int i = thread % ROWS, j = thread % COLUMNS;
    decode(buffers[use].a, of_a, values->value[0], i, row_slot(i), thread / ROWS * 8, left.least, 0);
    decode(buffers[use].b, of_b, values->value[1], j, column_slot(j), thread / COLUMNS * 8, right.least, -1);
    __syncthreads();
  }
  // f(place) for every step from k to end, with its operands in buffers[use]
  template <class F> __device__ __forceinline__ void stream(int k, int end, F f) {
    u32 of_a[2], of_b[2];
    Place now = place_of(order, k);
    fetched(of_a, of_b, now);
    decoded(of_a, of_b);
#pragma unroll 1
    while (true) {
      const int next = now.k + now.count;
      Place then = now;
      if (next < end) {
        then = place_of(order, next);
        fetched(of_a, of_b, then);
      }
      f(now);
      if (next >= end) return;
      decoded(of_a, of_b);
      now = then;
    }
  }

  // 1: tops, the largest exponents of products of even and of odd k
  __device__ __forceinline__ void raise(u32 (&tops)[TALL][BROAD], int count) const {
    const Buffer& s = buffers[use];
#pragma unroll 4
    for (int k = 0; k < count / 2; ++k) {
      u32 a[TALL], b[BROAD];
      load(a, &s.a.exponent[k][wm + 4 * g]);
      load(b, &s.b.exponent[k][wn + 4 * t]);
#pragma unroll
      for (int i = 0; i < TALL; ++i)
#pragma unroll
        for (int j = 0; j < BROAD; ++j) tops[i][j] = __viaddmax_s16x2(a[i], b[j], tops[i][j]);
    }
  }
  // 2
  __device__ __forceinline__ void add_floors(Sum (&all)[TALL][BROAD], Sum (&positive)[TALL][BROAD], int count) const {
    const Buffer& s = buffers[use];
#pragma unroll 4
    for (int k = 0; k < count; ++k) {
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
  }
  // 3: V / 2 and P / 2 of two columns of four rows
  __device__ __forceinline__ void add_products(double (&v)[TALL][2], double (&p)[TALL][2], int n, int count) const {
    const Buffer& s = buffers[use];
#pragma unroll 1
    for (int k = 0; k < count; k += 8) {
      u32 right[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) right[e] = s.b.wide[wn + 8 * n + g][k + 4 * e + t];
#pragma unroll
      for (int i = 0; i < TALL; i += 2) {
        double a[4], b[2];
        u32 left[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) left[e] = s.a.wide[wm + 8 * (i + (e & 1)) + g][k + 4 * (e >> 1) + t];
#pragma unroll
        for (int e = 0; e < 4; ++e) a[e] = wide_value(left[e]);
#pragma unroll
        for (int e = 0; e < 2; ++e) b[e] = wide_value(right[e]);
        multiply(v[i], v[i + 1], a, b);
#pragma unroll
        for (int e = 0; e < 4; ++e) a[e] = wide_value(left[e] & 0x7fffffffu);
#pragma unroll
        for (int e = 0; e < 2; ++e) b[e] = wide_value(right[e] & 0x7fffffffu);
        multiply(p[i], p[i + 1], a, b);
      }
    }
  }
};

// The quantities of all results in global memory, and the scales.
struct Results {
  double* made;
  u8* open;
  const double *a_scale, *b_scale;
  int a_scale_stride, blocks, b_rows, unordered;

  // Adds chain_of(i, j) to every result of the thread; open has these flags too.
  template <class F> __device__ __forceinline__ void promoted(
      const Block& s, int scale_block, F chain_of, int flags) const {
    const size_t wide = (size_t)gridDim.x * COLUMNS, area = wide * gridDim.y * ROWS;
#pragma unroll
    for (int i = 0; i < TALL; ++i) {
      const int row = s.m0 + s.wm + 8 * i + s.g, column = s.n0 + s.wn + 2 * s.t;  // and the next one, and 8 further on
      const double sa = a_scale[(size_t)min(row, s.left.rows - 1) * a_scale_stride + scale_block];
      double* const at = made + row * wide + column;
      const int quantities = unordered ? QUANTITIES : PLUS;
      Promoted sums[BROAD];
#pragma unroll
      for (int q = 0; q < QUANTITIES; ++q)
#pragma unroll
        for (int n = 0; n < BROAD; n += 2)
          if (q < quantities) {
            const double2 two = *reinterpret_cast<const double2*>(at + q * area + 4 * n);
            sums[n].q[q] = two.x, sums[n + 1].q[q] = two.y;
          }
      bool opens[BROAD];
#pragma unroll
      for (int j = 0; j < BROAD; ++j) {
        const int group = min(column + 4 * (j & 2) + (j & 1), s.right.rows - 1) / b_rows;
        opens[j] = promote(sums[j], chain_of(i, j), sa, b_scale[(size_t)group * blocks + scale_block], unordered != 0);
      }
#pragma unroll
      for (int q = 0; q < QUANTITIES; ++q)
#pragma unroll
        for (int n = 0; n < BROAD; n += 2)
          if (q < quantities)
            *reinterpret_cast<double2*>(at + q * area + 4 * n) = make_double2(sums[n].q[q], sums[n + 1].q[q]);
#pragma unroll
      for (int j = 0; j < BROAD; ++j)
        if (opens[j] || flags) open[row * wide + column + 4 * (j & 2) + (j & 1)] |= (opens[j] ? 1 : 0) | flags;
    }
  }
};

__device__ __forceinline__ void start(Chain (&chain)[TALL][BROAD]) {
#pragma unroll
  for (int i = 0; i < TALL; ++i)
#pragma unroll
    for (int j = 0; j < BROAD; ++j) chain[i][j].x = chain[i][j].low = chain[i][j].high = 0.0;
}
__device__ __forceinline__ void lowest(u32 (&tops)[TALL][BROAD]) {
#pragma unroll
  for (int i = 0; i < TALL; ++i)
#pragma unroll
    for (int j = 0; j < BROAD; ++j) tops[i][j] = ((u32)LEAST & 0xffffu) | ((u32)LEAST << 16);
}
__device__ __forceinline__ int top_of(u32 tops) { return max((int)(short)(tops & 0xffffu), (int)tops >> 16); }
__device__ __forceinline__ int padded(int count) { return (count + 7) & ~7; }

// codes [rows, K] with strides; tables of their values; a_scale [rows or 1][blocks] with this stride, b_scale
// [columns / b_rows][blocks]; made [quantities][padded rows][padded columns] and open alike, zeros before.
#define PARAMETERS                                                                                                 \
  const u8 *__restrict__ a, long long a_stride, const u8 *__restrict__ b, long long b_stride,                      \
      const u32 *__restrict__ tables, const double *__restrict__ a_scale, int a_scale_stride,                      \
      const double *__restrict__ b_scale, int blocks, int b_rows, int rows, int columns, int length, int block,    \
      int promotion, int group, int align, int out, int a_least, int b_least, int unordered, double *made, u8 *open

// The thread's block of the arguments, and its tables in shared memory
#define BEGIN(STEPS)                                                                                               \
  extern __shared__ __align__(16) unsigned char memory[];                                                         \
  Tables& values = *reinterpret_cast<Tables*>(memory + 2 * sizeof(Buffer));                                       \
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;                                         \
  Block s = {reinterpret_cast<Buffer*>(memory), &values,                                                          \
             {a, a_stride, rows, a_least, (((size_t)a | (size_t)a_stride) & 7) == 0},                             \
             {b, b_stride, columns, b_least, (((size_t)b | (size_t)b_stride) & 7) == 0},                          \
             {length, block, promotion, STEPS},                                                                   \
             (int)blockIdx.y * ROWS, (int)blockIdx.x * COLUMNS, (warp & 1) * 32, (warp >> 1) * 16,                \
             thread, lane >> 2, lane & 3, 0};                                                                     \
  const Results results = {made, open, a_scale, b_scale, a_scale_stride, blocks, b_rows, unordered};              \
  values.value[0][thread] = tables[thread];                                                                       \
  values.value[1][thread] = tables[256 + thread];                                                                 \
  __syncthreads()

extern "C" __global__ void __launch_bounds__(THREADS, 1) residue(PARAMETERS) {
  BEGIN(group);
  Chain chain[TALL][BROAD];
  start(chain);
  s.stream(0, length, [&](const Place& now) {
    const int count = padded(now.count);
    u32 tops[TALL][BROAD];
    lowest(tops);
    s.raise(tops, count);
    Sum all[TALL][BROAD], positive[TALL][BROAD];
#pragma unroll
    for (int i = 0; i < TALL; ++i)
#pragma unroll
      for (int j = 0; j < BROAD; ++j)
        all[i][j] = positive[i][j] = start_of(quantum(held(chain[i][j]), top_of(tops[i][j]), align) + DIGITS);
    s.add_floors(all, positive, count);
#pragma unroll
    for (int n = 0; n < BROAD / 2; ++n) {
      double v[TALL][2] = {}, p[TALL][2] = {};
      s.add_products(v, p, n, count);
#pragma unroll
      for (int i = 0; i < TALL; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int j = 2 * n + h;
          step(chain[i][j], top_of(tops[i][j]), v[i][h], p[i][h], all[i][j], positive[i][j], align, out);
        }
    }
    if (now.last()) {
      results.promoted(s, now.block, [&](int i, int j) { return chain[i][j]; }, 0);
      start(chain);
    }
  });
}

// oracle.bounds.chain.any_order, promoted. Bit 1 of open: an error that has not come to rest.
extern "C" __global__ void __launch_bounds__(THREADS, 1) any_order(PARAMETERS) {
  BEGIN(STEP);
  const double relative = promotion > 0 ? power(-out) : power(-out) + 0x1p-24;
  for (int begin = 0, stop; begin < length; begin = stop) {
    const Place first = place_of(s.order, begin);
    stop = first.stop;
    u32 tops[TALL][BROAD];
    lowest(tops);
    double v[2][TALL][2] = {}, p[2][TALL][2] = {};
    s.stream(begin, stop, [&](const Place& now) {
      const int count = padded(now.count);
      s.raise(tops, count);
#pragma unroll
      for (int n = 0; n < 2; ++n) s.add_products(v[n], p[n], n, count);
    });
    const double steps = (double)((stop - begin + group - 1) / group);
    double error[TALL][BROAD] = {};
    const auto largest = [&](int i, int j) {  // of the sums of products of one sign
      const double x = p[j >> 1][i][j & 1], y = v[j >> 1][i][j & 1];
      return larger(x + y, x - y);
    };
    const auto total = [&](int i, int j) { return largest(i, j) + error[i][j]; };
    bool rests = false;
#pragma unroll 1
    for (int turn = 0; !rests && turn < TURNS; ++turn) {
      Counted all[TALL][BROAD] = {}, positive[TALL][BROAD] = {};
      s.stream(begin, stop, [&](const Place& now) {
        Sum sums[2][TALL][BROAD];
#pragma unroll
        for (int i = 0; i < TALL; ++i)
#pragma unroll
          for (int j = 0; j < BROAD; ++j)
            sums[0][i][j] = sums[1][i][j] =
                start_of(quantum(__double2hiint(total(i, j)), top_of(tops[i][j]), align) + DIGITS);
        s.add_floors(sums[0], sums[1], padded(now.count));
#pragma unroll
        for (int i = 0; i < TALL; ++i)
#pragma unroll
          for (int j = 0; j < BROAD; ++j) {
            all[i][j] += counted(sums[0][i][j]);
            positive[i][j] += counted(sums[1][i][j]);
          }
      });
      const auto bounds = [&](int i, int j) {
        const double x = p[j >> 1][i][j & 1], y = v[j >> 1][i][j & 1];
        const int top = top_of(tops[i][j]);
        const bool live = top > LEAST;
        const double q = unit(quantum(__double2hiint(total(i, j)), top, align));
        const double above = __fma_rn(amount(positive[i][j]), -q, x + y);
        const double below = __fma_rn(amount(all[i][j] - positive[i][j]), -q, x - y);
        const double held = larger(floor_power(total(i, j)), 0x1p-126);
        const double drift = (steps - 1) * power((live ? top : 0) - align) + steps * relative * held;
        return Chain{2.0 * y, live ? -(above + drift) : 0.0, live ? below + drift : 0.0};
      };
      bool grows = false;
#pragma unroll
      for (int i = 0; i < TALL; ++i)
#pragma unroll
        for (int j = 0; j < BROAD; ++j) {
          const Chain c = bounds(i, j);
          grows |= !(floor_power(largest(i, j) + larger(-c.low, c.high)) <= floor_power(total(i, j)));
        }
      rests = !__syncthreads_or(grows);
      if (rests || turn + 1 == TURNS) results.promoted(s, first.block, bounds, rests ? 0 : 2);
#pragma unroll
      for (int i = 0; i < TALL; ++i)
#pragma unroll
        for (int j = 0; j < BROAD; ++j) {
          const Chain c = bounds(i, j);
          const double grown = larger(error[i][j], larger(-c.low, c.high));
          error[i][j] = grown > 0x1p100 ? 0x1p100 : grown;  // far above any sum: one that gets there grows on
        }
    }
  }
}

// The running bound of single elements, a thread for each: `at` [count] are their places in [rows, columns], made
// [PLUS][count]. A product of two 8-bit codes is exact in float, and so is each of its sums in double.
extern "C" __global__ void __launch_bounds__(THREADS) residue_at(
    const u8* __restrict__ a, long long a_stride, const u8* __restrict__ b, long long b_stride,
    const u32* __restrict__ tables, const double* __restrict__ a_scale, int a_scale_stride,
    const double* __restrict__ b_scale, int blocks, int b_rows, int rows, int columns, int length, int block,
    int promotion, int group, int align, int out, int a_least, int b_least, const long long* __restrict__ at,
    int count, double* made, u8* open) {
  extern __shared__ __align__(16) unsigned char memory[];
  Tables& values = *reinterpret_cast<Tables*>(memory);
  values.value[0][threadIdx.x] = tables[threadIdx.x];
  values.value[1][threadIdx.x] = tables[256 + threadIdx.x];
  __syncthreads();
  const int element = blockIdx.x * THREADS + threadIdx.x;
  if (element >= count) return;
  const int row = (int)(at[element] / columns), column = (int)(at[element] % columns);
  const Codes left = {a, a_stride, rows, a_least, (((size_t)a | (size_t)a_stride) & 7) == 0};
  const Codes right = {b, b_stride, columns, b_least, (((size_t)b | (size_t)b_stride) & 7) == 0};
  const Order order = {length, block, promotion, group};
  const auto exponent = [](u32 size, int least) { return size == 0 ? ABSENT : max((int)(size >> 23) - 127, least); };
  Promoted sum = {};
  Chain chain = {};
  bool opens = false;
#pragma unroll 1
  for (int k = 0; k < length;) {
    const Place now = place_of(order, k);
    float p[STEP];
    int top = LEAST;
#pragma unroll
    for (int from = 0; from < STEP; from += 8) {
      u32 x[2], y[2];
      fetch(x, left, row, now, from);
      fetch(y, right, column, now, from);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int shift = 8 * (i & 3);
        const u32 u = values.value[0][(x[i >> 2] >> shift) & 255u], v = values.value[1][(y[i >> 2] >> shift) & 255u];
        p[from + i] = __uint_as_float(u) * __uint_as_float(v);
        top = max(top, exponent(u & 0x7fffffffu, a_least) + exponent(v & 0x7fffffffu, b_least));
      }
    }
    const Sum start = start_of(quantum(held(chain), top, align) + DIGITS);
    Sum all = start, positive = start;
    double v = 0, size = 0;
#pragma unroll
    for (int i = 0; i < STEP; ++i) {
      const float one = __uint_as_float(__float_as_uint(p[i]) & 0x7fffffffu);
      all = add_floor((Sum)one, (Sum)1, all);
      positive = add_floor(p[i] > 0 ? (Sum)one : (Sum)0, (Sum)1, positive);
      v += (double)p[i];
      size += (double)one;
    }
    step(chain, top, 0.5 * v, 0.5 * size, all, positive, align, out);
    if (now.last()) {
      const double sa = a_scale[(size_t)row * a_scale_stride + now.block];
      const double sb = b_scale[(size_t)(column / b_rows) * blocks + now.block];
      opens |= promote(sum, chain, sa, sb, false);
      chain = Chain{};
    }
    k += now.count;
  }
  for (int q = 0; q < PLUS; ++q) made[(size_t)q * count + element] = sum.q[q];
  open[element] = opens;
}
