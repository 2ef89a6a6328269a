// The sums of oracle/tensorcore/fused.py in CUDA C++: in float32 for instructions whose grid is narrow enough, else in
// float64.
//
// `pack` decodes 8-bit codes by a table of the host, in the order in which an instruction takes its products. `sums`
// computes a tile of ROWS x COLUMNS results, then scales and stores them as oracle.tensorcore.predict.finish and store do.
// A group of GROUP products is summed in four steps, with q = 2^(m - T), D fraction bits of a sum (23 or 52):
//
//   1. m. Each operand is also held as the power 256^e of its exponent, in bf16. The tensor cores sum the products of
//      these powers: at most GROUP + 1 terms, none negative, so the sum lies in [256^m, 33 * 256^m] however smaller
//      terms are rounded, and its exponent says m. Then m = max(m, E(c)).
//   2. S = C + trunc(c / q) q with C = 1.5 * 2^(m + D - T), so that q is the unit in the last place of S.
//   3. S = fma(a, b, S) rounded toward zero, product after product: S is positive and a multiple of q, so each adds
//      floor(a b / q) q. All partial sums stay in the binade of C: they differ from C by less than
//      (GROUP + 1) * 4 * 2^m <= 2^(m + D - 1 - T).
//   4. floor and trunc differ by q where a product is negative and no multiple of q. Four products at once: a byte
//      holds the exponent of the lowest set bit of an operand, counted from the least one; the sum of two such bytes
//      and of 128 - (m - T - least) carries into bit 7 where the product is a multiple of q. The count is added to S.
//
// c = S - C then keeps more than TO bits. In float32 the next group cuts it at a q that is at least as coarse (T <= TO),
// and a promotion cuts it to TO bits first. In float64 (T > TO) every group does.
//
// Not covered (the caller sees to it): NaN and infinite codes, scales inside the instruction, products of more than 31
// binades.
//
// Defined at compilation: GROUP (16 or 32), ALIGN (T above), OUT (TO above), MODE (how scales join a promotion: ADD 0,
// FMA 1, MULTIPLY_ADD 2, A_THEN_B 3, A_THEN_FMA 4, B_THEN_FMA 5, OF_TOTAL 8), LEAST_PRODUCT (least exponent of a
// product), LEAST_BIT (of its lowest bit), WIDE (0: float32, 1: float64), FOLDS (1: a chain is added, to nearest, to a
// sum of chains). A host compiles this file too, and runs it one thread of a block after the other (tests).

#define ROWS (WIDE ? 128 : 64)  // of a block
#define COLUMNS (WIDE ? 32 : 64)
#define THREADS ROWS  // ROWS / 64 x 2 warps, each a tile of 64 x COLUMNS / 2: 8 x HELD results a thread
#define HELD (COLUMNS / 8)
#define BLOCKS (384 / THREADS)  // of a multiprocessor at once, so that steps of different kinds overlap: 168 registers
#define PITCH (COLUMNS + 1)  // of the results in shared memory
#define WORDS (GROUP / 4)
#define STRIDE (GROUP + 8)  // of bf16 rows: 16 bytes more than the group, so that ldmatrix meets no bank twice
#define FOLD 1
#define PROMOTE 2
#define TALL (FOLDS ? 4 : 8)  // of the results of a thread, 8 x 4 are corrected together: more would need more registers
#define BROAD 4

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
#if WIDE
typedef double Sum;
#else
typedef float Sum;
#endif

#ifdef __CUDACC__
template <int BYTES> __device__ __forceinline__ void copy_all(void* to, const void* from, int thread) {
  static_assert(BYTES % 16 == 0, "whole copies");
  const u32 shared = (u32)__cvta_generic_to_shared(to) + 16 * thread;
  const char* source = static_cast<const char*>(from) + 16 * thread;
#pragma unroll
  for (int i = 0; i < BYTES; i += 16 * THREADS)
    if (i + 16 * THREADS <= BYTES || i + 16 * thread < BYTES)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared + i), "l"(source + i));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void arrived() {  // all but the LEFT latest copies, of every thread
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
  __syncthreads();
}
__device__ __forceinline__ void load_matrices(u32 (&r)[4], const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"((u32)__cvta_generic_to_shared(p)));
}
__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// bit 7 of each byte: low is not carried into it, and the signs differ (the signs have no other bit)
__device__ __forceinline__ u32 inexact_negative(u32 low, u32 a_sign, u32 b_sign) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0x06;" : "=r"(d) : "r"(low), "r"(a_sign), "r"(b_sign));
  return d;
}
__device__ __forceinline__ u32 add_bytes(u32 bytes, u32 sum) {
  u32 d;
  asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(bytes), "r"(0x01010101u), "r"(sum));
  return d;
}
__device__ __forceinline__ u16 float16_bits(float x) {
  u16 d;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d) : "f"(x));
  return d;
}
#else
template <int BYTES> void copy_all(void* to, const void* from, int thread);
void commit();
template <int LEFT> void arrived();
void load_matrices(u32 (&r)[4], const void* p);
void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);
u32 inexact_negative(u32 low, u32 a_sign, u32 b_sign);
u32 add_bytes(u32 bytes, u32 sum);
u16 float16_bits(float x);
#endif

// The row of 64, or the column of 4 HELD, in a slot: what one thread holds is contiguous (accumulators of mma.m16n8).
__device__ __forceinline__ int row_in(int slot) { return (slot & ~63) | ((slot & 7) << 3) | ((slot >> 3) & 7); }
__device__ __forceinline__ int column_in(int slot) {
  const int held = slot % HELD, t = slot / HELD % 4;
  return slot / (4 * HELD) * (4 * HELD) + (held >> 1) * 8 + 2 * t + (held & 1);
}

// One operand of one tile and group, in global memory as in shared memory.
template <int SIZE> struct Part {
  Sum value[GROUP][SIZE];
  struct Words { u32 lowest[WORDS][SIZE], sign[WORDS][SIZE]; } words;
  u16 power[SIZE][STRIDE];
};

// codes [rows, K] in memory with this stride -> parts [tiles of rows][Kp / GROUP]. source [Kp]: the k of each packed
// position, or -1. table [256]: of a code its value float32, its power, its lowest exponent, 128 if it is negative. A
// thread takes 16 positions of a row, which lie in one group, and again some further on.
template <int SIZE, bool IS_B> __device__ __forceinline__ void packed(
    const u8* __restrict__ codes, long long stride, const int* __restrict__ source, const uint2* __restrict__ table,
    int zero, int rows, int groups, Part<SIZE>* __restrict__ parts, uint2* shared) {
  for (int i = threadIdx.x; i < 256; i += THREADS) shared[i] = table[i];
  __syncthreads();
  const int tile = (blockIdx.x * 32) / SIZE, slot = (blockIdx.x * 32) % SIZE + (threadIdx.x & 31);
  const int in_tile = IS_B ? column_in(slot) : row_in(slot), row = tile * SIZE + in_tile;
  const u8* const from = codes + (size_t)row * stride;
  const int warps = THREADS / 32 * gridDim.y;
  for (int run = blockIdx.y * (THREADS / 32) + (threadIdx.x >> 5); run < groups * (GROUP / 16); run += warps) {
    const int* const k = source + 16 * run;
    u32 four[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) four[w] = (u32)zero * 0x01010101u;
    if (row < rows) {
      bool whole = k[0] >= 0;
#pragma unroll
      for (int i = 1; i < 16; ++i) whole &= k[i] == k[0] + i;
      if (whole && ((size_t)(from + k[0]) & 15) == 0) {
        const uint4 sixteen = *reinterpret_cast<const uint4*>(from + k[0]);
        four[0] = sixteen.x, four[1] = sixteen.y, four[2] = sixteen.z, four[3] = sixteen.w;
      } else {
#pragma unroll
        for (int i = 0; i < 16; ++i)
          if (k[i] >= 0) four[i >> 2] = (four[i >> 2] & ~(255u << (8 * (i & 3)))) | (u32)from[k[i]] << (8 * (i & 3));
      }
    }
    Part<SIZE>& part = parts[(size_t)tile * groups + run / (GROUP / 16)];
    const int first = run % (GROUP / 16) * 16;
    u32 power[8];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      u32 low = 0, sign = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint2 entry = shared[(four[w] >> (8 * i)) & 255u];
        part.value[first + 4 * w + i][slot] = __uint_as_float(entry.x);
        power[2 * w + (i >> 1)] = (i & 1) ? power[2 * w + (i >> 1)] | entry.y << 16 : entry.y & 0xffffu;
        low |= ((entry.y >> 16) & 255u) << (8 * i);
        sign |= (entry.y >> 24) << (8 * i);
      }
      part.words.lowest[first / 4 + w][slot] = low;
      part.words.sign[first / 4 + w][slot] = sign;
    }
    uint4* const powers = reinterpret_cast<uint4*>(&part.power[in_tile][first]);
    powers[0] = make_uint4(power[0], power[1], power[2], power[3]);
    powers[1] = make_uint4(power[4], power[5], power[6], power[7]);
    if (first + 16 == GROUP) powers[2] = make_uint4(0, 0, 0, 0);  // so that all of a sector is written
  }
}

#define PACK(name, SIZE, IS_B)                                                                                     \
  extern "C" __global__ void __launch_bounds__(THREADS) name(                                                     \
      const u8* codes, long long stride, const int* source, const uint2* table, int zero, int rows, int groups,   \
      Part<SIZE>* parts) {                                                                                        \
    extern __shared__ __align__(16) unsigned char memory[];                                                       \
    uint2* const shared = reinterpret_cast<uint2*>(memory);                                                       \
    packed<SIZE, IS_B>(codes, stride, source, table, zero, rows, groups, parts, shared);                          \
  }
PACK(pack_a, ROWS, false)
PACK(pack_b, COLUMNS, true)

struct Shared {
  Part<ROWS> a;
  Part<COLUMNS> b;
  int b_scale_row[COLUMNS];
};

template <int N, typename X> __device__ __forceinline__ void load(X (&to)[N], const X* from) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + i);
    *reinterpret_cast<float4*>(to + i) = four;
  }
}
template <int N> __device__ __forceinline__ void load(double (&to)[N], const double* from) {
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const double2 two = *reinterpret_cast<const double2*>(from + i);
    to[i] = two.x, to[i + 1] = two.y;
  }
}

__device__ __forceinline__ float promoted(float total, float part, float sa, float sb) {
#if MODE == 1
  return __fmaf_rn(__fmul_rn(sa, sb), part, total);
#elif MODE == 2
  return __fadd_rn(total, __fmul_rn(__fmul_rn(sa, sb), part));
#elif MODE == 3
  return __fadd_rn(total, __fmul_rn(__fmul_rn(part, sa), sb));
#elif MODE == 4
  return __fmaf_rn(__fmul_rn(part, sa), sb, total);
#elif MODE == 5
  return __fmaf_rn(__fmul_rn(part, sb), sa, total);
#elif MODE == 8
  return __fadd_rn(__fmul_rn(total, sa), part);
#else
  return __fadd_rn(total, part);
#endif
}

#if WIDE
__device__ __forceinline__ u32 high_word(double x) { return (u32)__double2hiint(x); }
__device__ __forceinline__ double of_high(u32 high) { return __hiloint2double((int)high, 0); }
// c cut to TO bits below its own exponent
__device__ __forceinline__ double cut(double c) {
  const double unit = of_high((high_word(c) & 0xfff00000u) + ((52u - OUT) << 20));
  return __dadd_rn(__dadd_rz(c, unit), -unit);
}
__device__ __forceinline__ float part_of(double c) { return (float)c; }
// 2: S, of the sum of the powers, whose exponent field is 8 (m - LEAST_PRODUCT) + 9 + {0 .. 5}
__device__ __forceinline__ double aligned(double c, float powers) {
  const u32 top = (__float_as_uint(powers) >> 6) + ((u32)(1022 + LEAST_PRODUCT) << 20);
  const u32 power = max(high_word(c) & 0x7fffffffu, top) & 0x7ff00000u;
  const double offset = of_high((power + ((52u - ALIGN) << 20)) | 0x80000u);
  const double up = __dadd_ru(c, offset), down = __dadd_rd(c, offset);
  return (int)high_word(c) < 0 ? up : down;
}
__device__ __forceinline__ double add_floor(double a, double b, double s) { return __fma_rz(a, b, s); }
// the exponent field of S is m + 1075 - T; four bytes of 128 - (m - T - LEAST_BIT)
__device__ __forceinline__ u32 bytes_of(double s) {
  return (u32)(1203 + LEAST_BIT) * 0x01010101u - (high_word(s) >> 20) * 0x01010101u;
}
// c, of S and what is missing in units of q
__device__ __forceinline__ double summed(double s, u32 missing) {
  const double sum = __longlong_as_double(__double_as_longlong(s) + (long long)missing);
  return cut(__fma_rn(of_high(high_word(sum) & 0x7ff00000u), -1.5, sum));
}
#else
__device__ __forceinline__ float part_of(float c) {  // cut to TO bits below its own exponent
  const float unit = __uint_as_float((__float_as_uint(c) & 0xff800000u) + ((23u - OUT) << 23));
  return __fsub_rn(__fadd_rz(c, unit), unit);
}
// 2: S, of the sum of the powers, whose exponent field is 8 (m - LEAST_PRODUCT) + 9 + {0 .. 5}
__device__ __forceinline__ float aligned(float c, float powers) {
  const float top = __uint_as_float((__float_as_uint(powers) >> 3) + ((u32)(126 + LEAST_PRODUCT) << 23));
  const float power = __uint_as_float(__float_as_uint(fmaxf(fabsf(c), top)) & 0x7f800000u);
  const float offset = __fmul_rn(power, 1.5f * (1 << (23 - ALIGN)));
  const float up = __fadd_ru(c, offset), down = __fadd_rd(c, offset);
  return c < 0.f ? up : down;
}
__device__ __forceinline__ float add_floor(float a, float b, float s) { return __fmaf_rz(a, b, s); }
// the exponent field of S is m + 150 - T; four bytes of 128 - (m - T - LEAST_BIT)
__device__ __forceinline__ u32 bytes_of(float s) {
  return (u32)(278 + LEAST_BIT) * 0x01010101u - (__float_as_uint(s) >> 23) * 0x01010101u;
}
// c, of S and what is missing in units of q
__device__ __forceinline__ float summed(float s, u32 missing) {
  const u32 sum = __float_as_uint(s) + missing;
  return __fmaf_rn(__uint_as_float(sum & 0x7f800000u), -1.5f, __uint_as_float(sum));
}
#endif

// What follows the sum, as oracle.tensorcore.predict.finish has it. epilogue: 0 no scales, 1 the column's first, 2 the
// row's first, 3 their product. alpha [1] may be null.
struct Finish {
  const float* __restrict__ alpha;
  int biased, epilogue, fused_bias, flushes;
};
__device__ __forceinline__ float flush(float x) { return fabsf(x) < 0x1p-126f ? __fmul_rn(x, 0.f) : x; }
__device__ __forceinline__ float finished(const Finish& f, float x, float sa, float sb, float last) {
  const bool alone = f.alpha == nullptr && f.biased;  // the bias follows the scales
  if (f.epilogue != 0) {
    if (f.flushes) x = flush(x), sa = flush(sa), sb = flush(sb);
    float inner = f.epilogue == 1 ? __fmul_rn(sb, x) : f.epilogue == 2 ? __fmul_rn(x, sa) : x;
    float outer = f.epilogue == 1 ? sa : f.epilogue == 2 ? sb : __fmul_rn(sa, sb);
    if (f.flushes) inner = flush(inner), outer = flush(outer);
    if (!alone) {
      x = __fmul_rn(inner, outer);
    } else if (f.flushes) {
      x = __fmaf_rn(outer, inner, flush(last));
    } else {
      x = f.fused_bias ? __fmaf_rn(outer, inner, last) : __fadd_rn(__fmul_rn(inner, outer), last);
    }
    if (f.flushes) x = flush(x);
  } else if (alone) {
    x = __fadd_rn(x, last);
  }
  if (f.alpha == nullptr) return x;
  const float alpha = *f.alpha;
  if (!f.biased) return __fmul_rn(alpha, x);
  return f.fused_bias ? __fmaf_rn(alpha, x, last) : __fadd_rn(__fmul_rn(alpha, x), last);
}

// x to nearest even, NaN canonical. kind: 0 float32, 1 bfloat16, 2 float16.
__device__ __forceinline__ void store(void* out, size_t at, float x, int kind) {
  const u32 bits = __float_as_uint(x);
  if (kind == 0) {
    static_cast<u32*>(out)[at] = x != x ? 0x7fffffffu : bits;
  } else {
    const u32 half = kind == 1 ? (bits + ((bits >> 16) & 1u) + 0x7fffu) >> 16 : (u32)float16_bits(x);
    static_cast<u16*>(out)[at] = x != x ? (u16)0x7fff : (u16)half;
  }
}

// out [rows, columns] of a kind of store, with this stride. tiles [n][2]: scale block and flags of `length` packed
// positions each. totals: 2 HELD float4 of every thread, where there are several promotions.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) sums(
    const Part<ROWS>* __restrict__ a, const Part<COLUMNS>* __restrict__ b, const float* __restrict__ a_scale,
    int a_scale_rows, const float* __restrict__ b_scale, int b_rows, int blocks, const int* __restrict__ tiles,
    int n_tiles, int length, float4* __restrict__ totals, const float* __restrict__ bias,
    const float* __restrict__ alpha, int epilogue, int fused_bias, int flushes, int kind, int rows, int columns,
    long long stride, void* __restrict__ out) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int wm = warp % (ROWS / 64) * 64, wn = warp / (ROWS / 64) * (COLUMNS / 2);
  const int g = lane >> 2, t = lane & 3;
  const int m0 = blockIdx.y * ROWS, n0 = blockIdx.x * COLUMNS;
  const int per_tile = length / GROUP, groups = n_tiles * per_tile;
  const Part<ROWS>* next_a = a + (size_t)blockIdx.y * groups;  // what is copied
  const Part<COLUMNS>* next_b = b + (size_t)blockIdx.x * groups;
  // the field of both operands of the next group, if there is one
#define COPY(field, there)                                                                                        \
  if (there) {                                                                                                    \
    copy_all<sizeof(s.a.field)>(&s.a.field, &next_a->field, thread);                                              \
    copy_all<sizeof(s.b.field)>(&s.b.field, &next_b->field, thread);                                              \
  }                                                                                                               \
  commit()

  Sum acc[8][HELD];
#if FOLDS
  float folded[8][HELD] = {};
#endif
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < HELD; ++j) acc[i][j] = 0;

  if (thread < COLUMNS) s.b_scale_row[thread] = min(n0 + thread, columns - 1) / b_rows;
  COPY(power, groups > 0);
  COPY(value, groups > 0);
  COPY(words, groups > 0);
  arrived<2>();
  int in_tile = 0, tile = 0, promotions = 0;
#pragma unroll 1
  for (int group = 0; group < groups; ++group) {
    u32 right_powers[GROUP / 16][HELD / 4][4];
#pragma unroll
    for (int h = 0; h < GROUP / 16; ++h)
#pragma unroll
      for (int n = 0; n < HELD / 4; ++n)
        load_matrices(right_powers[h][n],
                      &s.b.power[wn + 16 * n + (lane & 7) + 8 * (lane >> 4)][16 * h + 8 * ((lane >> 3) & 1)]);
#pragma unroll
    for (int m = 0; m < 4; ++m) {  // 1 and 2
      float d[HELD / 2][4];
#pragma unroll
      for (int e = 0; e < 2 * HELD; ++e) d[e >> 2][e & 3] = 0x1p-118f;  // 256^0 in the powers' unit
#pragma unroll
      for (int h = 0; h < GROUP / 16; ++h) {
        u32 left_powers[4];
        load_matrices(left_powers, &s.a.power[wm + 16 * m + (lane & 15)][16 * h + 8 * (lane >> 4)]);
#pragma unroll
        for (int n = 0; n < HELD / 2; ++n)
          multiply(d[n], left_powers, right_powers[h][n >> 1][2 * (n & 1)], right_powers[h][n >> 1][2 * (n & 1) + 1]);
      }
#pragma unroll
      for (int e = 0; e < 2 * HELD; ++e) {
        Sum& c = acc[2 * m + ((e >> 1) & 1)][2 * (e >> 2) + (e & 1)];
        c = aligned(c, d[e >> 2][e & 3]);
      }
    }
    arrived<1>();
    ++next_a, ++next_b;
    COPY(power, group + 1 < groups);
#pragma unroll 8
    for (int k = 0; k < GROUP; ++k) {  // 3
      Sum left[8], right[HELD];
      load(left, &s.a.value[k][wm + 8 * g]);
      load(right, &s.b.value[k][wn + HELD * t]);
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < HELD; ++j) acc[i][j] = add_floor(left[i], right[j], acc[i][j]);
    }
    arrived<1>();
    COPY(value, group + 1 < groups);
#pragma unroll
    for (int ih = 0; ih < 8; ih += TALL)
#pragma unroll
      for (int jh = 0; jh < HELD; jh += BROAD) {  // 4
        u32 at[TALL][BROAD], count[TALL][BROAD];
#pragma unroll
        for (int i = 0; i < TALL; ++i)
#pragma unroll
          for (int j = 0; j < BROAD; ++j) {
            at[i][j] = bytes_of(acc[ih + i][jh + j]);
            count[i][j] = 0;
          }
#pragma unroll 1
        for (int w = 0; w < WORDS; ++w) {
          u32 al[TALL], as[TALL], bl[BROAD], bs[BROAD];
          load(al, &s.a.words.lowest[w][wm + 8 * g + ih]);
          load(as, &s.a.words.sign[w][wm + 8 * g + ih]);
          load(bl, &s.b.words.lowest[w][wn + HELD * t + jh]);
          load(bs, &s.b.words.sign[w][wn + HELD * t + jh]);
#pragma unroll
          for (int i = 0; i < TALL; ++i)
#pragma unroll
            for (int j = 0; j < BROAD; ++j)
              count[i][j] = add_bytes(inexact_negative(al[i] + bl[j] + at[i][j], as[i], bs[j]), count[i][j]);
        }
#pragma unroll
        for (int i = 0; i < TALL; ++i)
#pragma unroll
          for (int j = 0; j < BROAD; ++j)
            acc[ih + i][jh + j] = summed(acc[ih + i][jh + j], count[i][j] >> 7);
      }
    if (++in_tile == per_tile) {
      in_tile = 0;
      const int block = tiles[2 * tile], flags = tiles[2 * tile + 1];
      ++tile;
#if FOLDS
      if (flags & FOLD) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
          for (int j = 0; j < HELD; ++j) {
            folded[i][j] = __fadd_rn(folded[i][j], part_of(acc[i][j]));
            acc[i][j] = flags & PROMOTE ? folded[i][j] : 0;
            if (flags & PROMOTE) folded[i][j] = 0.f;
          }
      }
#endif
      if (flags & PROMOTE) {
        const bool last = tile == n_tiles;
        float sb[HELD];
#pragma unroll
        for (int j = 0; j < HELD; ++j)
          sb[j] = MODE == 0 ? 0.f : b_scale[(size_t)s.b_scale_row[wn + column_in(HELD * t + j)] * blocks + block];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float sa = MODE == 0 ? 0.f : a_scale[(size_t)min(m0 + wm + g + 8 * i, a_scale_rows - 1) * blocks + block];
#pragma unroll
          for (int h = 0; 4 * h < HELD; ++h) {
            float4& kept = totals[(((size_t)blockIdx.y * gridDim.x + blockIdx.x) * (2 * HELD) + HELD / 4 * i + h) * THREADS + thread];
            float four[4] = {0.f, 0.f, 0.f, 0.f};
            if (promotions > 0) load(four, &kept.x);
#pragma unroll
            for (int j = 0; j < 4; ++j)
              four[j] = promoted(four[j], part_of(acc[i][4 * h + j]), sa, sb[4 * h + j]);
#pragma unroll
            for (int j = 0; j < 4; ++j) acc[i][4 * h + j] = last ? four[j] : 0;
            if (!last) kept = make_float4(four[0], four[1], four[2], four[3]);
          }
        }
        ++promotions;
      }
    }
    arrived<1>();
    COPY(words, group + 1 < groups);
  }

  // the tile by rows, so that a warp stores what lies together; no thread reads the operands any more
  float* const made = reinterpret_cast<float*>(memory);
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < HELD; ++j)
      made[(wm + g + 8 * i) * PITCH + wn + column_in(HELD * t + j)] = (float)acc[i][j];
  __syncthreads();
  const Finish finish = {alpha, bias != nullptr, epilogue, fused_bias, flushes};
  for (int in_row = lane; in_row < COLUMNS && n0 + in_row < columns; in_row += 32) {
    const int column = n0 + in_row;
    const float sb = epilogue == 0 ? 0.f : b_scale[(size_t)(column / b_rows) * blocks];
    const float last = bias != nullptr ? bias[column] : 0.f;
#pragma unroll 4
    for (int in_column = warp; in_column < min(ROWS, rows - m0); in_column += THREADS / 32) {
      const int row = m0 + in_column;
      const float sa = epilogue == 0 ? 0.f : a_scale[(size_t)min(row, a_scale_rows - 1) * blocks];
      store(out, (size_t)row * stride + column, finished(finish, made[in_column * PITCH + in_row], sa, sb, last), kind);
    }
  }
}
