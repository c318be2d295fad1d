// SPDX-License-Identifier: Apache-2.0
// Paged attention of a few queries per sequence behind a C ABI, for sm_90. It computes what
// triton_kernels/attention.py computes and is made for the same reads: some 500 tokens per
// sequence, where a kernel is as fast as it gets its first bytes moving and its last ones out.
//
// A block of threads serves one sequence and key head: M = queries x heads of the group, at most
// 64 query rows. It keeps a ring of tiles in shared memory that cp.async fills; all stages are
// requested before the first product. The products are transposed, so that the few query rows
// are the dimension padded to 8 and not to 16:
//   S^T = K Q^T      a warp takes 16 tokens of a tile; the maximum over warps goes through
//   O^T = V^T P^T    shared memory, and so does P; a warp takes 16 or 32 dimensions of O.
// No warp holds a partial sum of another's outputs: after the last byte comes one tile's work,
// not a reduction over warps.
//
// Where sequences times key heads do not fill the device, a sequence is split over a cluster of
// 2, 4 or 8 blocks, which read one another's parts through distributed shared memory. A split by
// global partials and a counter would write and read them through L2, need a workspace, and leave
// the combination to one block; here every block of the cluster combines a share of the rows.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "ptx.h"

namespace dustin {
namespace {

constexpr int kMaxStages = 8;           // cp_async_wait knows as many
constexpr int kMaxShared = 227 * 1024;  // of a block on sm_90
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kNothingSeen = -1e30f;  // finite: rows that see nothing give 0 and not NaN
constexpr unsigned kWholeWarp = 0xffffffffu;

enum Error : int {
  kOk = 0,
  kBadHeadDim = -1,    // neither 64 nor 128
  kTooManyRows = -2,   // more than 64 query rows per key head
  kBadPageSize = -3,   // no power of two
  kBadSplits = -4,     // not 1, 2, 4 or 8
  kBadVariant = -5,
};

struct Arguments {
  uint16_t* out;
  const uint16_t* queries;
  const char *keys, *values;
  const int32_t *block_table, *seq_lens, *query_starts;
  int64_t query_stride, query_head_stride, out_stride, out_head_stride;
  int64_t page_bytes, token_bytes, head_bytes, table_stride;
  int32_t group, page_shift, split_shift, stages;
  uint32_t group_inverse;  // 2^16 / group + 1
  float scale_log2;

  // The query of row m: m / group, exact for m < 64, without a division's latency.
  DUSTIN_DEVICE int query_of(int m) const { return m * group_inverse >> 16; }
};

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int max_of(int a, int b) { return a > b ? a : b; }
constexpr int min_of(int a, int b) { return a < b ? a : b; }

// Who computes what, and where shared memory holds it. A column is a tile of 8 query rows.
template <class Element_, int kDim_, int kColumns_, int kTile_, int kWarps_>
struct Config {
  using Element = Element_;
  static constexpr int kDim = kDim_, kColumns = kColumns_, kTile = kTile_, kWarps = kWarps_;
  static constexpr int kThreads = kWarps * 32;

  static constexpr int kTokenGroups = kTile / 16;  // S^T: warps along tokens, then columns
  static constexpr int kScoreParts = kWarps / kTokenGroups;
  static constexpr int kScoreColumns = ceil_div(kColumns, kScoreParts);
  static constexpr int kDimGroups = min_of(kWarps, kDim / 16);  // O^T: dimensions, then columns
  static constexpr int kDimTiles = kDim / 16 / kDimGroups;
  static constexpr int kOutParts = kWarps / kDimGroups;
  static constexpr int kOutColumns = ceil_div(kColumns, kOutParts);
  // Columns with room in shared memory; those past kColumns are computed and dropped.
  static constexpr int kRoom = max_of(kScoreParts * kScoreColumns, kOutParts * kOutColumns);
  static constexpr int kRows = kRoom * 8;

  // Two blocks of 256 threads per multiprocessor leave 128 registers per thread. The queries stay
  // in registers where they fit, or are read from shared memory again at each tile.
  static constexpr int kMinBlocks = kTile == 64 && kDim * kColumns <= 128 * 5 ? 2 : 1;
  static constexpr int kQueryRegisters = kScoreColumns * kDim / 16 * 2;
  static constexpr bool kHoldQueries = kQueryRegisters <= (kThreads * kMinBlocks > 256 ? 48 : 80);

  static constexpr int kRowBytes = kDim * 2;
  static constexpr int kQueryBytes = kRows * kRowBytes;
  // P is [token][query row]. An odd number of 16-byte units makes 8 rows hit all banks once.
  static constexpr int kWeightPitch = (kRoom | 1) * 16;
  static constexpr int kWeightBytes = kTile * kWeightPitch;
  static constexpr int kWeights = kHoldQueries ? 0 : kQueryBytes;  // held queries make way
  static constexpr int kMaxima = max_of(kQueryBytes, kWeights + kWeightBytes);
  static constexpr int kShrink = kMaxima + kTokenGroups * kRows * 4;
  static constexpr int kLimits = kShrink + kRows * 4;
  static constexpr int kRowMax = kLimits + kRows * 4;
  static constexpr int kCopyBytes = kTokenGroups * kRows * 4;  // of kRowMax, for even and odd tiles
  static constexpr int kRowSum = kRowMax + 2 * kCopyBytes;
  static constexpr int kRing = ceil_div(kRowSum + kRows * 4, 128) * 128;
  static constexpr int kValues = kTile * kRowBytes;  // in a stage, after the keys
  static constexpr int kStageBytes = 2 * kValues;
  // The fp32 output takes the ring's place; the pitch spreads a warp's stores over all banks.
  static constexpr int kPartPitch = (kDim + 4) * 4;

  static_assert(kTile % 32 == 0 && kWarps % kTokenGroups == 0 && kWarps % kDimGroups == 0);
  static_assert(kTile / kWarps % 8 == 0 && 32 % (kTile / kWarps) == 0);
  static_assert(kRows <= kThreads);
  static_assert(kRows * kPartPitch <= 2 * kStageBytes && kRing + 2 * kStageBytes <= kMaxShared);
};

// Rows of keys, values and queries are stored with their 16-byte units permuted, 8 by 8, so that
// ldmatrix, which reads one unit of 8 rows, hits every bank once. `step` is even and known to the
// compiler: what it adds beyond 8 units becomes an immediate, and needs no register.
DUSTIN_DEVICE uint32_t swizzle(int unit, int row) { return (unit ^ (row & 7)) << 4; }
DUSTIN_DEVICE uint32_t swizzle(int step, int unit, int row) {
  return swizzle(unit ^ (step & 7), row) + (step & ~7) * 16;
}

// Copies a warp's tokens of each tile. Which tokens these are is known from the start, so lane l
// reads the table entries of the warp's tokens l, l + 32, l + 64, ... well before they are needed
// and hands them out by shuffles: one latency of the table, whatever the sequence's length.
template <class C>
struct Loader {
  static constexpr int kLanes = C::kDim / 4;            // per token: 16 bytes each of K and V
  static constexpr int kTokens = C::kTile / C::kWarps;  // per tile and warp
  static constexpr int kStep = 32 / kLanes;             // tokens per instruction

  const Arguments& a;
  const int32_t* table;
  const char* source;  // what this lane copies of a token at offset 0
  uint32_t target;     // and where to, in stage 0
  int lane, unit, first, end;
  int32_t page[2];     // of this lane's next two tokens
  int64_t offset;      // of this lane's current one, in bytes

  DUSTIN_DEVICE Loader(const Arguments& a, const int32_t* table, int head, int warp, int lane,
                       int begin, int end, uint32_t ring)
      : a(a), table(table), lane(lane), first(begin + warp * kTokens), end(end), offset(0) {
    page[0] = read_page(lane);
    page[1] = read_page(lane + 32);
    const int in_row = lane % kLanes, in_step = lane / kLanes;
    const bool value = in_row >= kLanes / 2;
    const int source_unit = in_row % (kLanes / 2);
    unit = source_unit ^ in_step;
    source = (value ? a.values : a.keys) + head * a.head_bytes + source_unit * 16;
    target = ring + (value ? C::kValues : 0) + (warp * kTokens + in_step) * C::kRowBytes;
  }

  DUSTIN_DEVICE int position(int slot) const {
    return first + slot / kTokens * C::kTile + slot % kTokens;
  }
  DUSTIN_DEVICE int32_t read_page(int slot) const {
    const int p = position(slot);
    return p < end ? __ldg(table + (p >> a.page_shift)) : 0;
  }

  DUSTIN_DEVICE void fetch(int tile, int stage) {
    const int slot = tile * kTokens;
    if (slot % 32 == 0) {
      const int in_page = position(slot + lane) & ((1 << a.page_shift) - 1);
      offset = page[0] * a.page_bytes + in_page * a.token_bytes;
      page[0] = page[1];
      page[1] = read_page(slot + 64 + lane);
    }
    const uint32_t to = target + stage * C::kStageBytes;
    const int left = end - first - tile * C::kTile - lane / kLanes;
    const int unit = recomputed(this->unit);
#pragma unroll
    for (int j = 0; j < kTokens; j += kStep) {
      const int64_t from = __shfl_sync(kWholeWarp, offset, slot % 32 + j + lane / kLanes);
      cp_async16(to + j * C::kRowBytes + swizzle(unit, j), source + from, j < left);
    }
  }
};

// Zeros in the rows past the last query row, so that they stay finite.
template <class C>
DUSTIN_DEVICE void load_queries(const Arguments& a, int first_query, int rows, int head,
                                uint32_t target) {
#pragma unroll 1  // a short kernel waits for its instructions, too
  for (int i = threadIdx.x; i < C::kRows * C::kDim / 8; i += C::kThreads) {
    const int m = i / (C::kDim / 8), unit = i % (C::kDim / 8);
    const bool used = m < rows;
    const int query = used ? a.query_of(m) : 0, member = used ? m - query * a.group : 0;
    const uint16_t* source = a.queries + (first_query + query) * a.query_stride +
                             (head * a.group + member) * a.query_head_stride + unit * 8;
    cp_async16(target + m * C::kRowBytes + swizzle(unit, m), source, used);
  }
}

// Products of a warp's columns with two steps of 16 dimensions: b operands, from ldmatrix.
template <class C>
DUSTIN_DEVICE void read_query(uint32_t (&q)[4], uint32_t queries, int column, int step, int lane) {
  ldmatrix_x4(q, queries + (column * 8 + lane % 8) * C::kRowBytes +
                     swizzle(step * 2, lane / 8, lane));
}

// Logits of 16 tokens and this warp's columns.
template <class C, int kHeld>
DUSTIN_DEVICE void multiply_keys(float (&s)[C::kScoreColumns][4], uint32_t keys, uint32_t queries,
                                 const uint32_t (&held)[C::kScoreColumns][kHeld][4],
                                 int column, int group, int lane) {
  const int row = group * 16 + lane % 16;
#pragma unroll
  for (int i = 0; i < C::kScoreColumns; ++i) s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0;
#pragma unroll
  for (int step = 0; step < C::kDim / 16; step += 2) {
    uint32_t k[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      ldmatrix_x4(k[half], keys + row * C::kRowBytes +
                               swizzle((step + half) * 2, lane / 16, row));
#pragma unroll
    for (int i = 0; i < C::kScoreColumns; ++i) {
      uint32_t q[4];
      if (C::kHoldQueries) {
        for (int j = 0; j < 4; ++j) q[j] = held[i][step / 2 % kHeld][j];
      } else {
        read_query<C>(q, queries, column + i, step, lane);
      }
      mma(typename C::Element(), s[i], k[0], q[0], q[1]);
      mma(typename C::Element(), s[i], k[1], q[2], q[3]);
    }
  }
}

// acc [dims, columns] += V^T P^T of a tile of which `valid` tokens are used.
template <class C>
DUSTIN_DEVICE void multiply_values(float (&acc)[C::kDimTiles][C::kOutColumns][4], uint32_t values,
                                   uint32_t weights, uint32_t shrink, int dim_tile, int column,
                                   int valid, int lane) {
#pragma unroll
  for (int n = 0; n < C::kOutColumns; ++n) {
    const float2 factor = load_shared2(shrink + ((column + n) * 8 + lane % 4 * 2) * 4);
#pragma unroll
    for (int m = 0; m < C::kDimTiles; ++m) {
      acc[m][n][0] *= factor.x, acc[m][n][1] *= factor.y;
      acc[m][n][2] *= factor.x, acc[m][n][3] *= factor.y;
    }
  }
#pragma unroll
  for (int token = 0; token < C::kTile; token += 32) {
    if (token >= valid) break;
    uint32_t v[C::kDimTiles][2][4];
    const int row = token + lane / 16 * 8 + lane % 8;
#pragma unroll
    for (int m = 0; m < C::kDimTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        ldmatrix_x4_trans(v[m][half],
                          values + (row + half * 16) * C::kRowBytes +
                              swizzle((dim_tile + m) * 2 + lane / 8 % 2, lane));
#pragma unroll
    for (int n = 0; n < C::kOutColumns; ++n) {
      uint32_t p[4];
      ldmatrix_x4_trans(p, weights + (token + lane) * C::kWeightPitch + (column + n) * 16);
#pragma unroll
      for (int m = 0; m < C::kDimTiles; ++m) {
        mma(typename C::Element(), acc[m][n], v[m][0], p[0], p[1]);
        mma(typename C::Element(), acc[m][n], v[m][1], p[2], p[3]);
      }
    }
  }
}

// The parts of all blocks of the cluster, weighted, to the output. Each takes a share.
template <class C>
DUSTIN_DEVICE void combine(const Arguments& a, uint32_t shared, int first_query, int rows,
                           int head, int split, int splits) {
  constexpr int kUnits = C::kDim / 8;
  constexpr int kBatch = 4;  // parts loaded at once, to pay their latency once
#pragma unroll 1
  for (int i = split * C::kThreads + threadIdx.x; i < rows * kUnits; i += splits * C::kThreads) {
    const int m = i / kUnits, unit = i % kUnits;
    float total_max = kNothingSeen, total_sum = 0, total[8] = {};
    for (int begin = 0; begin < splits; begin += kBatch) {
      float part_max[kBatch], part_sum[kBatch];
      float4 part[kBatch][2];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (begin + j >= splits) break;
        const uint32_t base = splits > 1 ? map_cluster(shared, begin + j) : shared;
        part_max[j] = load_cluster(base + C::kShrink + m * 4);
        part_sum[j] = load_cluster(base + C::kRowSum + m * 4);
        const uint32_t place = base + C::kRing + m * C::kPartPitch + unit * 32;
        part[j][0] = load_cluster4(place);
        part[j][1] = load_cluster4(place + 16);
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (begin + j >= splits) break;
        const float new_max = fmaxf(total_max, part_max[j]);
        const float shrink = exp2_fast(total_max - new_max);
        const float grow = exp2_fast(part_max[j] - new_max);
        const float x[8] = {part[j][0].x, part[j][0].y, part[j][0].z, part[j][0].w,
                            part[j][1].x, part[j][1].y, part[j][1].z, part[j][1].w};
        total_sum = total_sum * shrink + part_sum[j] * grow;
#pragma unroll
        for (int k = 0; k < 8; ++k) total[k] = total[k] * shrink + x[k] * grow;
        total_max = new_max;
      }
    }
    const float inverse = total_sum > 0 ? 1.0f / total_sum : 0.0f;  // 0: nothing is visible
    typename C::Element element;
    uint4 packed;
    packed.x = pack(element, total[0] * inverse, total[1] * inverse);
    packed.y = pack(element, total[2] * inverse, total[3] * inverse);
    packed.z = pack(element, total[4] * inverse, total[5] * inverse);
    packed.w = pack(element, total[6] * inverse, total[7] * inverse);
    const int query = a.query_of(m), member = m - query * a.group;
    uint16_t* target = a.out + (first_query + query) * a.out_stride +
                       (head * a.group + member) * a.out_head_stride + unit * 8;
    *reinterpret_cast<uint4*>(target) = packed;
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    attention(const __grid_constant__ Arguments a) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int split = blockIdx.x, splits = gridDim.x, head = blockIdx.y, row = blockIdx.z;
  const int32_t* table = a.block_table + row * a.table_stride;
  // The lengths say which entries to read, and the entries which keys. Fetch the entries of a
  // thousand tokens while the lengths are on their way; never touch another 64 KiB page of
  // memory than the row's first entry, as the row may be the last thing mapped.
  if (warp == 0 && lane * 32 <= 1024 >> a.page_shift && lane * 32 < a.table_stride) {
    const int32_t* line = table + lane * 32;
    if ((reinterpret_cast<uintptr_t>(line) ^ reinterpret_cast<uintptr_t>(table)) >> 16 == 0)
      prefetch_l2(line);
  }
  const int first_query = __ldg(a.query_starts + row);
  const int queries = __ldg(a.query_starts + row + 1) - first_query;
  const int seq_len = __ldg(a.seq_lens + row);
  if (queries <= 0) return;  // as do all blocks of the cluster
  const int rows = min(queries * a.group, C::kColumns * 8);
  // In units of 16, so that the parts are of even lengths.
  const int share = (seq_len + (16 << a.split_shift) - 1) >> (4 + a.split_shift) << 4;
  const int begin = min(split * share, seq_len), end = min(begin + share, seq_len);
  const int tiles = (end - begin + C::kTile - 1) / C::kTile;

  const uint32_t shared = shared_memory(), ring = shared + C::kRing;
  Loader<C> loader(a, table, head, warp, lane, begin, end, ring);
  load_queries<C>(a, first_query, rows, head, shared);
#pragma unroll 1
  for (int t = 0; t < a.stages; ++t) {
    if (t < tiles) loader.fetch(t, t);
    cp_async_commit();
  }

  // Row m of the queries sees positions below limit[m] of this block's part.
  const int all_see = min(end, seq_len - queries + 1);
  if (const int m = threadIdx.x; m < C::kRows) {
    const int limit = m < rows ? min(end, seq_len - queries + 1 + a.query_of(m)) : end;
    store_shared(shared + C::kLimits + m * 4, static_cast<uint32_t>(limit));
  }

  // This warp's part of S^T, with the thread's place in the fragment: columns are query rows.
  const int token_group = warp % C::kTokenGroups;
  const int score_column = warp / C::kTokenGroups * C::kScoreColumns;
  const bool scores = score_column < C::kColumns;
  const int thread_row = score_column * 8 + lane % 4 * 2;  // and the next one; + 8 per column
  const int thread_token = token_group * 16 + lane / 4;    // and that + 8
  const uint32_t maxima = shared + C::kMaxima + thread_row * 4;
  const uint32_t my_maxima = maxima + token_group * C::kRows * 4;
  float s[C::kScoreColumns][4];
  float running_sum[C::kScoreColumns][2] = {};  // over this thread's tokens
  // The running maxima wait in shared memory, as registers are short: one copy per token group
  // before even tiles, another before odd ones.
  const uint32_t running_max = shared + C::kRowMax + (token_group * C::kRows + thread_row) * 4;
  if (scores && lane < 4) {
#pragma unroll
    for (int i = 0; i < C::kScoreColumns; ++i)
      store_shared(running_max + i * 32, make_float2(kNothingSeen, kNothingSeen));
  }
  // And of O^T.
  const int dim_tile = warp % C::kDimGroups * C::kDimTiles;
  const int out_column = warp / C::kDimGroups * C::kOutColumns;
  const bool outputs = out_column < C::kColumns;
  float acc[C::kDimTiles][C::kOutColumns][4] = {};

  constexpr int kHeld = C::kHoldQueries ? C::kDim / 32 : 1;
  uint32_t held[C::kScoreColumns][kHeld][4] = {};

  // Logits of a tile, and their maxima over this warp's tokens for the other warps.
  const auto score = [&](int stage) {
    multiply_keys<C, kHeld>(s, ring + stage * C::kStageBytes, shared, held, score_column,
                            token_group, lane);
  };
  const auto mask_and_share_maxima = [&](int tile) {
    const int start = begin + tile * C::kTile;
#pragma unroll
    for (int i = 0; i < C::kScoreColumns; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) s[i][c] *= a.scale_log2;
    }
    if (start + C::kTile > all_see) {
#pragma unroll
      for (int i = 0; i < C::kScoreColumns; ++i) {
        const float2 bits = load_shared2(shared + C::kLimits + (thread_row + i * 8) * 4);
        const int limit[2] = {__float_as_int(bits.x), __float_as_int(bits.y)};
#pragma unroll
        for (int c = 0; c < 4; ++c)
          if (start + thread_token + c / 2 * 8 >= limit[c % 2]) s[i][c] = -INFINITY;
      }
    }
#pragma unroll
    for (int i = 0; i < C::kScoreColumns; ++i) {
      float top[2] = {fmaxf(s[i][0], s[i][2]), fmaxf(s[i][1], s[i][3])};
#pragma unroll
      for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)
          top[c] = fmaxf(top[c], __shfl_xor_sync(kWholeWarp, top[c], distance));
      if (lane < 4) store_shared(my_maxima + i * 32, make_float2(top[0], top[1]));
    }
  };
  // Logits to P, given all warps' maxima.
  const auto weigh = [&](int tile) {
    const uint32_t max_before = running_max + tile % 2 * C::kCopyBytes;
    const uint32_t max_after = running_max + (tile + 1) % 2 * C::kCopyBytes;
#pragma unroll
    for (int i = 0; i < C::kScoreColumns; ++i) {
      const float2 before = load_shared2(max_before + i * 32);
      float top[2] = {before.x, before.y}, p[4];
#pragma unroll
      for (int group = 0; group < C::kTokenGroups; ++group) {
        const float2 other = load_shared2(maxima + (group * C::kRows + i * 8) * 4);
        top[0] = fmaxf(top[0], other.x), top[1] = fmaxf(top[1], other.y);
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) p[c] = exp2_fast(s[i][c] - top[c % 2]);
      const float shrink[2] = {exp2_fast(before.x - top[0]), exp2_fast(before.y - top[1])};
#pragma unroll
      for (int c = 0; c < 2; ++c)
        running_sum[i][c] = running_sum[i][c] * shrink[c] + p[c] + p[c + 2];
      const uint32_t place = shared + C::kWeights + thread_token * C::kWeightPitch +
                             (thread_row + i * 8) * 2;
      store_shared(place, pack(typename C::Element(), p[0], p[1]));
      store_shared(place + 8 * C::kWeightPitch, pack(typename C::Element(), p[2], p[3]));
      if (lane < 4) {
        store_shared(max_after + i * 32, make_float2(top[0], top[1]));
        if (token_group == 0)
          store_shared(shared + C::kShrink + (thread_row + i * 8) * 4,
                       make_float2(shrink[0], shrink[1]));
      }
    }
  };

  cp_async_wait(a.stages - 1);
  __syncthreads();  // the queries, the limits and the first tile are there
  if (C::kHoldQueries && scores) {
#pragma unroll
    for (int i = 0; i < C::kScoreColumns; ++i)
#pragma unroll
      for (int j = 0; j < kHeld; ++j)
        read_query<C>(held[i][j], shared, score_column + i, j * 2, lane);
  }
  if (scores && tiles > 0) score(0), mask_and_share_maxima(0);

  int stage = 0;  // of tile t
  for (int t = 0; t < tiles; ++t) {
    const int next = stage + 1 < a.stages ? stage + 1 : 0;
    __syncthreads();  // all maxima of tile t are there; tile t - 1 is used up
    if (t > 0) {
      const int last = t - 1 + a.stages;
      if (last < tiles) loader.fetch(last, stage > 0 ? stage - 1 : a.stages - 1);
      cp_async_commit();
    }
    if (scores) weigh(t);
    cp_async_wait(a.stages - 2);
    __syncthreads();  // P of tile t and the keys of tile t + 1 are there
    const bool more = t + 1 < tiles;
    if (outputs)
      multiply_values<C>(acc, ring + stage * C::kStageBytes + C::kValues, shared + C::kWeights,
                         shared + C::kShrink, dim_tile, out_column,
                         end - begin - t * C::kTile, lane);
    if (scores && more) score(next), mask_and_share_maxima(t + 1);
    stage = next;
  }

  // The sums take the place of the maxima, which were last read before the last barrier.
  if (scores) {
#pragma unroll
    for (int i = 0; i < C::kScoreColumns; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)
          running_sum[i][c] += __shfl_xor_sync(kWholeWarp, running_sum[i][c], distance);
      if (lane < 4)
        store_shared(my_maxima + i * 32, make_float2(running_sum[i][0], running_sum[i][1]));
    }
  }
  __syncthreads();  // the ring is used up, the sums are there
  if (const int m = threadIdx.x; m < rows) {
    float sum = 0;
#pragma unroll
    for (int group = 0; group < C::kTokenGroups; ++group)
      sum += load_shared(shared + C::kMaxima + (group * C::kRows + m) * 4);
    store_shared(shared + C::kRowSum + m * 4, sum);
    // The maxima move where all blocks of the cluster look for them.
    store_shared(shared + C::kShrink + m * 4,
                 load_shared(shared + C::kRowMax + tiles % 2 * C::kCopyBytes + m * 4));
  }
  if (outputs) {
#pragma unroll
    for (int m = 0; m < C::kDimTiles; ++m)
#pragma unroll
      for (int n = 0; n < C::kOutColumns; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int query_row = (out_column + n) * 8 + lane % 4 * 2 + c % 2;
          const int dim = (dim_tile + m) * 16 + lane / 4 + c / 2 * 8;
          store_shared(ring + query_row * C::kPartPitch + dim * 4, acc[m][n][c]);
        }
  }
  if (splits > 1)
    cluster_sync();
  else
    __syncthreads();
  combine<C>(a, shared, first_query, rows, head, split, splits);
  if (splits > 1) cluster_sync_reads();  // no block leaves while another reads its memory
}

// Ring sizes are in bytes, as what counts is how much is in flight: 96 KiB let two blocks share
// a multiprocessor, 192 KiB are for one.
struct Variant {
  int tile, warps, ring;
};
constexpr Variant kVariants[] = {
    {},                    // 0: 2 where there is at most one block per multiprocessor, or else 1
    {64, 8, 96 * 1024},    // 1
    {64, 8, 192 * 1024},   // 2
    {128, 8, 192 * 1024},  // 3
    {64, 4, 96 * 1024},    // 4
    {64, 4, 192 * 1024},   // 5
};
constexpr int kNumVariants = sizeof(kVariants) / sizeof(kVariants[0]);

template <class C>
int launch(Arguments a, dim3 grid, int ring, cudaStream_t stream) {
  const int room = kMaxShared - C::kRing;
  a.stages = std::clamp(std::min(ring, room) / C::kStageBytes, 2, kMaxStages);
  const int bytes = C::kRing + a.stages * C::kStageBytes;
  cudaError_t error =
      cudaFuncSetAttribute(attention<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  // All of the L1 cache as shared memory, so that two blocks fit where they could.
  error = cudaFuncSetAttribute(attention<C>, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = grid.x;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = grid.x > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, attention<C>, a);
}

template <class Element, int kDim, int kColumns>
int launch_tuned(const Arguments& a, dim3 grid, int variant, cudaStream_t stream) {
  const Variant v = kVariants[variant];
  if (v.tile == 128)
    return launch<Config<Element, kDim, kColumns, 128, 8>>(a, grid, v.ring, stream);
  if (v.warps == 4)
    return launch<Config<Element, kDim, kColumns, 64, 4>>(a, grid, v.ring, stream);
  return launch<Config<Element, kDim, kColumns, 64, 8>>(a, grid, v.ring, stream);
}

template <class Element, int kDim>
int launch_rows(const Arguments& a, int rows, dim3 grid, int variant, cudaStream_t stream) {
  if (rows <= 8) return launch_tuned<Element, kDim, 1>(a, grid, variant, stream);
  if (rows <= 16) return launch_tuned<Element, kDim, 2>(a, grid, variant, stream);
  if (rows <= 40) return launch_tuned<Element, kDim, 5>(a, grid, variant, stream);
  if (rows <= 48) return launch_tuned<Element, kDim, 6>(a, grid, variant, stream);
  return launch_tuned<Element, kDim, 8>(a, grid, variant, stream);
}

template <class Element>
int launch_dim(const Arguments& a, int dim, int rows, dim3 grid, int variant,
               cudaStream_t stream) {
  if (dim == 64) return launch_rows<Element, 64>(a, rows, grid, variant, stream);
  return launch_rows<Element, 128>(a, rows, grid, variant, stream);
}

}  // namespace
}  // namespace dustin

// Strides are in elements; all addresses must be multiples of 16 bytes. Returns 0, a negative
// Error or a cudaError. `partial` and `arrived` are unused, see the top of this file.
extern "C" int dustin_paged_attention(
    void* out, const void* queries, const void* keys, const void* values,
    const int32_t* block_table, const int32_t* seq_lens, const int32_t* query_starts,
    float* /*partial*/, int32_t* /*arrived*/, int64_t query_stride, int64_t query_head_stride,
    int64_t out_stride, int64_t out_head_stride, int64_t page_stride, int64_t token_stride,
    int64_t head_stride, int64_t table_stride, int32_t rows, int32_t kv_heads, int32_t group,
    int32_t head_dim, int32_t page_size, int32_t max_queries, int32_t num_splits, int32_t is_bf16,
    int32_t variant, float scale, void* stream) {
  using namespace dustin;
  if (head_dim != 64 && head_dim != 128) return kBadHeadDim;
  if (group < 1 || int64_t{max_queries} * group > 64) return kTooManyRows;
  if (page_size < 1 || (page_size & (page_size - 1))) return kBadPageSize;
  if (num_splits != 1 && num_splits != 2 && num_splits != 4 && num_splits != 8) return kBadSplits;
  if (variant < 0 || variant >= kNumVariants) return kBadVariant;
  if (rows <= 0 || kv_heads <= 0 || max_queries <= 0) return kOk;
  if (variant == 0) {
    int device = 0, multiprocessors = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
      error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    variant = int64_t{rows} * kv_heads * num_splits <= multiprocessors ? 2 : 1;
  }
  Arguments a = {};
  a.out = static_cast<uint16_t*>(out);
  a.queries = static_cast<const uint16_t*>(queries);
  a.keys = static_cast<const char*>(keys);
  a.values = static_cast<const char*>(values);
  a.block_table = block_table;
  a.seq_lens = seq_lens;
  a.query_starts = query_starts;
  a.query_stride = query_stride;
  a.query_head_stride = query_head_stride;
  a.out_stride = out_stride;
  a.out_head_stride = out_head_stride;
  a.page_bytes = page_stride * 2;
  a.token_bytes = token_stride * 2;
  a.head_bytes = head_stride * 2;
  a.table_stride = table_stride;
  a.group = group;
  while (1 << a.page_shift < page_size) ++a.page_shift;
  while (1 << a.split_shift < num_splits) ++a.split_shift;
  a.group_inverse = (1 << 16) / group + 1;
  a.scale_log2 = scale * kLog2e;
  const dim3 grid(num_splits, kv_heads, rows);
  const auto launch = is_bf16 ? launch_dim<BFloat16> : launch_dim<Float16>;
  return launch(a, head_dim, max_queries * group, grid, variant, static_cast<cudaStream_t>(stream));
}
