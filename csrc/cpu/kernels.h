// SPDX-License-Identifier: Apache-2.0
// Per-chunk kernels of the CPU scorer: logits of one KV head's query rows against up to
// kChunk tokens, then a softmax local to the chunk. score.cpp merges the chunks.
//
// The portable kernels use GCC/Clang vector extensions: the same source is compiled for
// the baseline, AVX2 and AVX-512 by inlining it into functions with a target attribute.
// Only the two bf16 matrix kernels at the end need intrinsics.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define DUSTIN_X86 1
#include <immintrin.h>
#define DUSTIN_AVX2 __attribute__((target("avx2,fma")))
#define DUSTIN_AVX512 __attribute__((target("avx512f,prefer-vector-width=512")))
#define DUSTIN_DPBF16 __attribute__((target("avx512f,avx512bf16,prefer-vector-width=512")))
#define DUSTIN_AMX __attribute__((target("avx512f,amx-tile,amx-bf16,prefer-vector-width=512")))
#endif
#define DUSTIN_INLINE static inline __attribute__((always_inline))

namespace dustin {

constexpr int64_t kGroup = 16;         // tokens per packed amx group
constexpr int64_t kChunk = 256;        // tokens per task
constexpr int64_t kLd = kChunk + 16;   // row stride of a task's logits; off the 4 KiB alias

enum Layout : int64_t { kVec, kAmxPacked };  // "vec" and "vec16" share one order
enum DType : int64_t { kF32, kBF16, kF16 };

// Vectors of L lanes. L is the register width of the instruction set a kernel is compiled
// for: compilers keep wider vectors in memory.
template <int L>
struct Vec {
  typedef float f __attribute__((vector_size(4 * L)));
  typedef int32_t i __attribute__((vector_size(4 * L)));
  typedef uint32_t u __attribute__((vector_size(4 * L)));
  typedef uint16_t h __attribute__((vector_size(2 * L)));
};
template <int L> using vf = typename Vec<L>::f;
template <int L> using vi = typename Vec<L>::i;
template <int L> using vu = typename Vec<L>::u;

// All query rows that read one KV head, against tokens [begin, end) of one sequence.
struct Task {
  const void* const* q;    // [rows] pointers to D contiguous elements, fp32 (bf16 if dp/AMX)
  int64_t rows;            // heads * num_queries, the query index varying fastest
  int64_t num_queries;
  const char* keys;        // block 0 of this KV head
  int64_t block_bytes;     // distance between blocks
  const int32_t* table;    // the sequence's blocks
  int64_t block_size, dim;
  Layout layout;
  DType dtype;
  int64_t begin, end;      // end - begin <= kChunk
  int64_t visible;         // tokens of the chunk that query 0 sees; query i sees i more
  float scale;
  float* logits;           // [rows, kLd] out: exp(logit - max), 0 where hidden
  float* max;              // [rows] out: largest visible logit of the chunk
  float* sum;              // [rows] out: sum of the row of `logits`
  float* tile;             // [dim, 32] thread-private scratch: unpacked keys
  uint16_t* packed_q;      // [rows up to 16 * n, dim] thread-private scratch: AMX operand
};

template <class V, class T>
DUSTIN_INLINE V load(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V, class T>
DUSTIN_INLINE void store(T* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

DUSTIN_INLINE const char* key_pointer(const Task& t, int64_t token) {
  return t.keys + t.table[token / t.block_size] * t.block_bytes;
}

// fp16 to fp32 without F16C: rebias the exponent by a multiplication, which also handles
// subnormals, then restore infinities and the sign.
template <int L>
DUSTIN_INLINE vf<L> widen_f16(vu<L> h) {
  vf<L> magnitude = (vf<L>)((h & 0x7fffu) << 13) * 0x1p112f;
  vu<L> infinite = (vu<L>)(magnitude >= 65536.0f) & 0x7f800000u;
  return (vf<L>)((vu<L>)magnitude | infinite | (h & 0x8000u) << 16);
}

// Keys of tokens [token, token + W) as fp32 [dim][W]; fp32 keys are read in place.
template <int L, int W>
DUSTIN_INLINE const float* unpack(const Task& t, int64_t token, int64_t* stride) {
  const char* base = key_pointer(t, token);
  const int64_t offset = token % t.block_size;
  if (t.dtype == kF32) {
    *stride = t.block_size;
    return reinterpret_cast<const float*>(base) + offset;
  }
  const uint16_t* in = reinterpret_cast<const uint16_t*>(base);
  *stride = W;
  for (int64_t w = 0; w < W; w += L) {
    float* tile = t.tile + w;
    if (t.layout == kAmxPacked) {  // each 32-bit lane holds dims d (low half) and d + 1
      const uint16_t* lanes = in + (offset + w) / kGroup * kGroup * t.dim + w % kGroup * 2;
      for (int64_t d = 0; d < t.dim; d += 2) {
        vu<L> pair = load<vu<L>>(lanes + d * kGroup);
        store(tile + d * W, pair << 16);
        store(tile + (d + 1) * W, pair & 0xffff0000u);
      }
      continue;
    }
    for (int64_t d = 0; d < t.dim; ++d) {
      auto narrow = load<typename Vec<L>::h>(in + d * t.block_size + offset + w);
      vu<L> half = __builtin_convertvector(narrow, vu<L>);
      store(tile + d * W, t.dtype == kBF16 ? (vf<L>)(half << 16) : widen_f16<L>(half));
    }
  }
  return t.tile;
}

// M query rows x W tokens, the accumulators held in registers.
template <int L, int M, int W>
DUSTIN_INLINE void dot_rows(const Task& t, int64_t row, const float* keys, int64_t stride,
                            float* out) {
  constexpr int N = W / L;
  vf<L> acc[M][N] = {};
  const float* q[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) q[m] = static_cast<const float*>(t.q[row + m]);
  for (int64_t d = 0; d < t.dim; ++d) {
    vf<L> key[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) key[n] = load<vf<L>>(keys + d * stride + n * L);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[m][n] += q[m][d] * key[n];
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) store(out + (row + m) * kLd + n * L, acc[m][n] * t.scale);
}

// Register tiles of M rows (a power of two) x W tokens (16 or 32) in vectors of L lanes.
template <int L, int M, int W>
DUSTIN_INLINE void logits_portable(const Task& t) {
  for (int64_t token = t.begin; token < t.end; token += W) {
    int64_t stride, row = 0;
    const float* keys = unpack<L, W>(t, token, &stride);
    float* out = t.logits + (token - t.begin);
    for (; row + M <= t.rows; row += M) dot_rows<L, M, W>(t, row, keys, stride, out);
    if (M > 4 && t.rows - row >= 4) dot_rows<L, 4, W>(t, row, keys, stride, out), row += 4;
    if (M > 2 && t.rows - row >= 2) dot_rows<L, 2, W>(t, row, keys, stride, out), row += 2;
    if (row < t.rows) dot_rows<L, 1, W>(t, row, keys, stride, out);
  }
}

// exp for x <= 0 to about 2 ulp; results below 2^-126 are clamped there.
template <int L>
DUSTIN_INLINE vf<L> exp_negative(vf<L> x) {
  const vf<L> magic = vf<L>{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  x = x < -87.3f ? vf<L>{} - 87.3f : x;
  vf<L> shifted = x * 1.44269504f + magic;
  vf<L> n = shifted - magic;
  vf<L> f = x - n * 0.693359375f - n * -2.12194440e-4f;
  vf<L> p = vf<L>{} + 1.9875691500e-4f;
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * f * f + f + 1.0f;
  return (vf<L>)((vi<L>)p + ((vi<L>)shifted << 23));  // the low bits of `shifted` are n
}

template <int L>
DUSTIN_INLINE void softmax_rows(const Task& t) {
  const int64_t width = (t.end - t.begin + kGroup - 1) / kGroup * kGroup;
  for (int64_t row = 0; row < t.rows; ++row) {
    float* s = t.logits + row * kLd;
    const int64_t n = std::clamp<int64_t>(t.visible + row % t.num_queries, 0, t.end - t.begin);
    const int64_t padded = (n + kGroup - 1) / kGroup * kGroup;
    for (int64_t j = n; j < padded; ++j) s[j] = -FLT_MAX;
    vf<L> top = vf<L>{} - FLT_MAX, sum = {};
    for (int64_t j = 0; j < padded; j += L) {
      vf<L> x = load<vf<L>>(s + j);
      top = x > top ? x : top;
    }
    float max = -FLT_MAX, total = 0;
    for (int64_t lane = 0; lane < L; ++lane) max = std::max(max, top[lane]);
    for (int64_t j = 0; j < padded; j += L) {
      vf<L> p = exp_negative<L>(load<vf<L>>(s + j) - max);
      store(s + j, p);
      sum += p;
    }
    for (int64_t lane = 0; lane < L; ++lane) total += sum[lane];
    for (int64_t j = n; j < width; ++j) s[j] = 0;  // hidden: may hold anything, even NaN
    t.max[row] = max;
    t.sum[row] = total;
  }
}

// One chunk of all query rows of a sequence, to be added to `out`.
struct Reduction {
  const float* p;       // [rows, kLd]
  const float* factor;  // [rows]
  int64_t rows, tokens;
  bool use_max;
  float weight;         // of the sum over rows; unused under max
  float* out;           // [tokens]
};

template <int L, bool kMax>
DUSTIN_INLINE void reduce_rows(const Reduction& r) {
  alignas(64) float acc[kChunk] = {};
  const float* p = r.p;
  for (int64_t row = 0; row < r.rows; ++row, p += kLd)
    for (int64_t j = 0; j < r.tokens; j += L) {
      vf<L> x = load<vf<L>>(p + j) * r.factor[row], a = load<vf<L>>(acc + j);
      store(acc + j, kMax ? (x > a ? x : a) : a + x);
    }
  for (int64_t j = 0; j < r.tokens; ++j)
    r.out[j] = kMax ? std::max(r.out[j], acc[j]) : r.out[j] + r.weight * acc[j];
}
template <int L>
DUSTIN_INLINE void reduce(const Reduction& r) {
  r.use_max ? reduce_rows<L, true>(r) : reduce_rows<L, false>(r);
}

#if defined(DUSTIN_X86)

// One packed group [dim/2][16 tokens][2] is a sequence of dpbf16 operands: lane i of
// vector d holds dims 2d and 2d + 1 of token i.
template <int M>
DUSTIN_DPBF16 static inline __attribute__((always_inline)) void dot_rows_dpbf16(
    const Task& t, int64_t row, const char* group, float* out) {
  __m512 acc[M];
  const int32_t* q[M];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    acc[m] = _mm512_setzero_ps();
    q[m] = static_cast<const int32_t*>(t.q[row + m]);
  }
  for (int64_t d = 0; d < t.dim / 2; ++d) {
    __m512bh key = (__m512bh)_mm512_loadu_si512(group + d * 64);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
      acc[m] = _mm512_dpbf16_ps(acc[m], (__m512bh)_mm512_set1_epi32(q[m][d]), key);
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
    _mm512_storeu_ps(out + (row + m) * kLd, _mm512_mul_ps(acc[m], _mm512_set1_ps(t.scale)));
}

DUSTIN_DPBF16 static inline void logits_dpbf16(const Task& t) {
  for (int64_t token = t.begin; token < t.end; token += kGroup) {
    const char* group = key_pointer(t, token) + token % t.block_size * t.dim * 2;
    float* out = t.logits + (token - t.begin);
    int64_t row = 0;
    for (; row + 14 <= t.rows; row += 14) dot_rows_dpbf16<14>(t, row, group, out);
    if (t.rows - row >= 8) dot_rows_dpbf16<8>(t, row, group, out), row += 8;
    if (t.rows - row >= 4) dot_rows_dpbf16<4>(t, row, group, out), row += 4;
    if (t.rows - row >= 2) dot_rows_dpbf16<2>(t, row, group, out), row += 2;
    if (row < t.rows) dot_rows_dpbf16<1>(t, row, group, out);
  }
}

// Tiles 0-3: logits of 16 rows x 16 tokens. 4: 32 dims of 16 tokens (B). 5: 32 dims of 16
// rows (A). 6, 7: the same with the last 16 dims, when dim is an odd multiple of 16; a
// full tile would read past the block there.
struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 32, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 8};
};

// The query tiles that share one key tile; a[i] is null past the last query tile.
#define DUSTIN_TILE_STEP(A, B, offset)                                                        \
  _tile_loadd(B, group + (offset) * 32, 64);                                                  \
  _tile_loadd(A, a[0] + (offset), t.dim * 2); _tile_dpbf16ps(0, A, B);                        \
  if (a[1]) { _tile_loadd(A, a[1] + (offset), t.dim * 2); _tile_dpbf16ps(1, A, B); }          \
  if (a[2]) { _tile_loadd(A, a[2] + (offset), t.dim * 2); _tile_dpbf16ps(2, A, B); }          \
  if (a[3]) { _tile_loadd(A, a[3] + (offset), t.dim * 2); _tile_dpbf16ps(3, A, B); }

DUSTIN_AMX static inline void logits_amx(const Task& t) {
  const int64_t query_tiles = (t.rows + 15) / 16;
  std::memset(t.packed_q, 0, query_tiles * 16 * t.dim * 2);
  for (int64_t m = 0; m < t.rows; ++m) std::memcpy(t.packed_q + m * t.dim, t.q[m], t.dim * 2);
  const TileConfig config;
  alignas(64) float c[4][16][16];
  // Some compilers' tile loads do not tell the optimiser that they read memory.
  asm volatile("" : : "r"(&config), "r"(t.packed_q) : "memory");
  _tile_loadconfig(&config);
  for (int64_t token = t.begin; token < t.end; token += kGroup) {
    const char* group = key_pointer(t, token) + token % t.block_size * t.dim * 2;
    for (int64_t first = 0; first < query_tiles; first += 4) {
      const uint16_t* a[4];
      for (int64_t i = 0; i < 4; ++i)
        a[i] = first + i < query_tiles ? t.packed_q + (first + i) * 16 * t.dim : nullptr;
      _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
      int64_t d = 0;
      for (; d + 32 <= t.dim; d += 32) { DUSTIN_TILE_STEP(5, 4, d) }
      if (d < t.dim) { DUSTIN_TILE_STEP(6, 7, d) }
      _tile_stored(0, c[0], 64);
      if (a[1]) { _tile_stored(1, c[1], 64); }
      if (a[2]) { _tile_stored(2, c[2], 64); }
      if (a[3]) { _tile_stored(3, c[3], 64); }
      asm volatile("" : : "r"(c) : "memory");
      for (int64_t m = first * 16; m < std::min(t.rows, first * 16 + 64); ++m)
        store(t.logits + m * kLd + (token - t.begin),
              load<vf<16>>(c[m / 16 - first][m % 16]) * t.scale);
    }
  }
  _tile_release();
}
#undef DUSTIN_TILE_STEP

#endif  // DUSTIN_X86

}  // namespace dustin
