// SPDX-License-Identifier: Apache-2.0
// Paged attention of a few queries per sequence behind a C ABI, for sm_90. It computes what
// triton_kernels/attention.py computes and is made for the same reads: some 500 tokens per
// sequence, where a kernel is as fast as it gets its first bytes moving and its last ones out.
//
// A block of threads serves one sequence and key head: M = queries x heads of the group, at most
// 64 query rows. The sequence is cut into groups of 16 tokens, dealt out to the warps like cards.
// A warp copies its groups' keys, then their values, through a ring of its own in shared memory:
// what it waits for and what it overwrites is its own, and no other warp's pace matters. Products
// are transposed, so that the few query rows are the dimension padded to 8 and not to 16:
//   1. S^T = K Q^T of a warp's groups, kept in registers. No barrier.
//   2. One exchange of maxima between the warps; P goes to shared memory. Values are on their way.
//   3. O^T = V^T P^T: a warp takes 16 or 32 dimensions of all tokens, so that no sums over warps
//      follow the last byte. A barrier per round of groups says that its values are there.
// A sequence that has more groups than registers can hold goes through this in chunks, with the
// online softmax's correction between them; the next chunk's keys are copied behind the values.
//
// Where sequences times key heads do not fill the device, a sequence is split over a cluster of
// 2, 4 or 8 blocks, which read one another's parts through distributed shared memory. Groups are
// dealt out to blocks, too: which positions a thread copies does not depend on the length, so
// that table entries are read before the length is known.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "ptx.h"

namespace dustin {
namespace {

constexpr int kGroup = 16;               // tokens
constexpr int kMaxShared = 227 * 1024;   // of a block on sm_90
constexpr int kHalfShared = 113 * 1024;  // of each of two blocks
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

// Bits of `variant` next to a tuning's number.
enum VariantBits : int {
  kTuning = 15,
  // Programmatic dependent launch: blocks may start while the previous kernel of the stream runs,
  // and wait for its end before they read what it may have written.
  kProgrammatic = 16,
  // ... and read lengths, query_starts and the table before they wait. Only where no kernel that
  // may still be running writes these: none since the last launch that was not programmatic.
  kEarlyTable = 32,
  kPrefetchValues = 64,  // into L2, when their keys are copied; not in tunings 2 and 4
};

struct Arguments {
  uint16_t* out;
  const uint16_t* queries;
  const char* keys;
  const int32_t *block_table, *seq_lens, *query_starts;
  int64_t query_stride, query_head_stride, out_stride, out_head_stride;
  int64_t page_bytes, token_bytes, head_bytes, value_offset, table_stride;
  int32_t group, page_shift, split_shift, early_table, prefetch_values;
  uint32_t group_inverse;  // 2^16 / group + 1
  float scale_log2;

  // The query of row m: m / group, exact for m < 64, without a division's latency.
  DUSTIN_DEVICE int query_of(int m) const { return m * group_inverse >> 16; }
};

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int max_of(int a, int b) { return a > b ? a : b; }
constexpr int min_of(int a, int b) { return a < b ? a : b; }

// Who computes what, and where shared memory holds it. A column is a tile of 8 query rows; a
// round is one group per warp. kBlocks share a multiprocessor.
template <class Element_, int kDim_, int kColumns_, int kWarps_, int kRounds_, int kBlocks_>
struct Config {
  using Element = Element_;
  static constexpr int kDim = kDim_, kColumns = kColumns_, kWarps = kWarps_, kBlocks = kBlocks_;
  static constexpr int kRounds = kRounds_;  // in a chunk, at most
  static constexpr int kThreads = kWarps * 32;

  static constexpr int kDimGroups = min_of(kWarps, kDim / 16);  // O^T: dimensions, then columns
  static constexpr int kDimTiles = kDim / 16 / kDimGroups;
  static constexpr int kOutParts = kWarps / kDimGroups;
  static constexpr int kOutColumns = ceil_div(kColumns, kOutParts);
  // Columns with room in shared memory; those past kColumns are computed and dropped.
  static constexpr int kRoom = max_of(kColumns, kOutParts * kOutColumns);
  static constexpr int kRows = kRoom * 8;

  // Queries of kHeld * 32 dimensions stay in registers, as many as fit; the others are read from
  // shared memory again for each group.
  static constexpr int kRegisters = min_of(255, 65536 / (kThreads * kBlocks));
  static constexpr int kSlack = kBlocks == 1 && kThreads <= 256 && kColumns <= 5 ? 60 : 80;
  static constexpr int kFree =
      kRegisters - kSlack - (kRounds + 1) * kColumns * 4 - kDimTiles * kOutColumns * 4;
  static constexpr int kHeld = min_of(max_of(kFree / (kColumns * 4), 0), kDim / 32);

  static constexpr int kRowBytes = kDim * 2;
  // P is [token][query row]. An odd number of 16-byte units makes 8 rows hit all banks once.
  static constexpr int kWeightPitch = (kRoom | 1) * 16;
  static constexpr int kWeights = kRows * kRowBytes;  // after the queries
  static constexpr int kMaxima = kWeights + kRounds * kWarps * kGroup * kWeightPitch;
  static constexpr int kSums = kMaxima + kWarps * kRows * 4;
  static constexpr int kShrink = kSums + kWarps * kRows * 4;
  static constexpr int kRowMax = kShrink + kRows * 4;  // before even and odd chunks
  static constexpr int kRowSum = kRowMax + 2 * kRows * 4;
  static constexpr int kFinalMax = kRowSum + kRows * 4;
  static constexpr int kRing = ceil_div(kFinalMax + kRows * 4, 128) * 128;
  static constexpr int kSlotBytes = kGroup * kRowBytes;  // keys or values of a group
  static constexpr int kSlots =  // per warp
      min_of(((kBlocks > 1 ? kHalfShared : kMaxShared) - kRing) / (kWarps * kSlotBytes),
             min_of(2 * kRounds, 8));  // more take longer to fill with nothing
  static constexpr int kBytes = kRing + kWarps * kSlots * kSlotBytes;
  // Parts of a cluster's output take the ring's place; the pitch spreads stores over all banks.
  static constexpr int kPartPitch = (kDim + 4) * 4;
  static constexpr int kPageRegisters = ceil_div(kRounds, 2);

  static_assert(kRounds <= 8 && kSlots >= 2 && kWarps % 2 == 0 && kWarps % kDimGroups == 0);
  static_assert(kRows <= kThreads);
  static_assert(kRows * kPartPitch <= kBytes - kRing);
};

// Rows of keys, values and queries are stored with their 16-byte units permuted, 8 by 8, so that
// ldmatrix, which reads one unit of 8 rows, hits every bank once.
DUSTIN_DEVICE uint32_t swizzle(int unit, int row) { return (unit ^ (row & 7)) << 4; }
// The place of the unit `step` (even) further than that at `address`, in rows of 128 n bytes: one
// instruction, where the difference would be a register per step.
DUSTIN_DEVICE uint32_t advance(uint32_t address, int step) {
  return (address ^ (step & 7) << 4) + (step & ~7) * 16;
}

// Copies a warp's keys and values in the order of their use, into the next slot of its ring. A
// warp's tokens are numbered over its groups; lane l holds the table entries of tokens l, l + 32,
// ... of a chunk and hands out addresses by shuffles: one latency of the table per chunk.
template <class C>
struct Loader {
  static constexpr int kLanes = C::kDim / 8;  // per token
  static constexpr int kStep = 32 / kLanes;   // tokens per instruction

  const Arguments& a;
  int lane, stride;    // positions from one round to the next
  int seq_len, chunk;  // rounds of a chunk
  int left, count;     // rounds of this warp from the current chunk on, and of the chunk
  int begin, round;    // of the next copy: position, and round within the chunk
  bool values, missing;
  uint32_t target, slot;  // this lane's part of a group in slot 0, and the next copy's slot
  const char* source;     // this lane's part of a key at offset 0
  int32_t page0, page1, page2, page3;  // no array: the compiler would put it in memory

  // Reads the first chunk's entries. The length is not known yet: some are of no token, and will
  // not be used. But nothing is read past the row's stride or beyond the 64 KiB of memory around
  // its first entry, as the row may be the last thing mapped.
  DUSTIN_DEVICE Loader(const Arguments& a, int head, int warp, int lane, int split, int splits,
                       uint32_t ring)
      : a(a), lane(lane), stride(C::kWarps * splits * kGroup),
        begin((warp * splits + split) * kGroup), round(0), values(false), missing(false), slot(0) {
    const int32_t* table = row_table();
    const int mapped = (0x10000 - (reinterpret_cast<uintptr_t>(table) & 0xffff)) / 4;
    const bool bounded = mapped < a.table_stride;
    const int entries = bounded ? mapped : static_cast<int>(a.table_stride);
    const auto read = [&](int j) {
      if (j >= C::kPageRegisters) return 0;
      const int index = position(j) >> a.page_shift;
      if (index < entries) return load_speculative(table + index);
      missing |= bounded;
      return 0;
    };
    page0 = read(0), page1 = read(1), page2 = read(2), page3 = read(3);
    source = a.keys + head * a.head_bytes + lane % kLanes * 16;
    target = ring + warp * C::kSlots * C::kSlotBytes + lane / kLanes * C::kRowBytes;
  }
  DUSTIN_DEVICE const int32_t* row_table() const {
    return a.block_table + blockIdx.z * a.table_stride;
  }
  // Of this lane's token of rounds 2 j and 2 j + 1 of the chunk that begins.
  DUSTIN_DEVICE int position(int j) const {
    return begin + (j * 2 + lane / kGroup) * stride + lane % kGroup;
  }
  DUSTIN_DEVICE void read_pages() {
    const int32_t* table = row_table();
    const auto read = [&](int j) {
      const int p = position(j);
      return j < C::kPageRegisters && p < seq_len ? load_global(table + (p >> a.page_shift)) : 0;
    };
    page0 = read(0), page1 = read(1), page2 = read(2), page3 = read(3);
  }

  DUSTIN_DEVICE void start(int seq_len_, int chunk_, int left_) {
    seq_len = seq_len_, chunk = chunk_, left = left_, count = min(chunk, left);
    if (missing) read_pages();
  }

  DUSTIN_DEVICE void fetch() {
    if (round < count) {
      int32_t page = page0;
      if (C::kPageRegisters > 1 && round >= 2) page = page1;
      if (C::kPageRegisters > 2 && round >= 4) page = page2;
      if (C::kPageRegisters > 3 && round >= 6) page = page3;
      const int in_page = (begin + lane % kGroup) & ((1 << a.page_shift) - 1);
      const int64_t offset =
          page * a.page_bytes + in_page * a.token_bytes + (values ? a.value_offset : 0);
      const int inside = seq_len - begin - lane / kLanes;
      const uint32_t to = target + slot * C::kSlotBytes;
      const int from_lane = (round & 1) * kGroup + lane / kLanes;
      const int unit = recomputed(lane) % kLanes ^ recomputed(lane) / kLanes;
#pragma unroll
      for (int j = 0; j < kGroup; j += kStep) {
        const int64_t from = __shfl_sync(kWholeWarp, offset, from_lane + j);
        cp_async16(to + j * C::kRowBytes + swizzle(unit, j), source + from, j < inside);
      }
      if (C::kRegisters > 128 && a.prefetch_values && !values && lane / kGroup == (round & 1) &&
          begin + lane % kGroup < seq_len)
        prefetch_l2<C::kRowBytes>(source - lane % kLanes * 16 + offset + a.value_offset);
      slot = slot + 1 < C::kSlots ? slot + 1 : 0;
      begin += stride;
      if (++round == count) {
        round = 0;
        if (values) {
          left -= count, count = min(chunk, left);
          if (count > 0) read_pages();  // needed by the next call, a round from now
        } else {
          begin -= count * stride;
        }
        values = !values;
      }
    }
    cp_async_commit();
  }
};

// Zeros in the rows past the last query row, so that they stay finite.
template <class C>
DUSTIN_DEVICE void load_queries(const Arguments& a, int first_query, int rows, int head,
                                uint32_t target) {
#pragma unroll 1  // a short kernel waits for its instructions, too
  for (int i = threadIdx.x; i < C::kColumns * C::kDim; i += C::kThreads) {
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
  ldmatrix_x4(q, advance(queries + lane % 8 * C::kRowBytes + swizzle(lane / 8, lane), step * 2) +
                     column * 8 * C::kRowBytes);
}

// Logits of a group's 16 tokens.
template <class C>
DUSTIN_DEVICE void multiply_keys(float (&s)[C::kColumns][4], uint32_t keys, uint32_t queries,
                                 const uint32_t (&held)[C::kColumns][C::kHeld + 1][4], int lane) {
#pragma unroll
  for (int i = 0; i < C::kColumns; ++i) s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0;
#pragma unroll
  for (int step = 0; step < C::kDim / 16; step += 2) {
    uint32_t k[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      ldmatrix_x4(k[half], advance(keys + lane % 16 * C::kRowBytes + swizzle(lane / 16, lane),
                                   (step + half) * 2));
#pragma unroll
    for (int i = 0; i < C::kColumns; ++i) {
      uint32_t q[4];
      if (step / 2 < C::kHeld) {
        for (int j = 0; j < 4; ++j) q[j] = held[i][step / 2][j];
      } else {
        read_query<C>(q, queries, i, step, lane);
      }
      mma(typename C::Element(), s[i], k[0], q[0], q[1]);
      mma(typename C::Element(), s[i], k[1], q[2], q[3]);
    }
  }
}

// acc [dims, columns] += V^T P^T of 32 tokens, whose halves' values are at two places.
template <class C>
DUSTIN_DEVICE void multiply_values(float (&acc)[C::kDimTiles][C::kOutColumns][4],
                                   uint32_t values0, uint32_t values1, uint32_t weights,
                                   int dim_tile, int column, int lane) {
  uint32_t v[C::kDimTiles][2][4];
  const int row = lane / 16 * 8 + lane % 8;
#pragma unroll
  for (int m = 0; m < C::kDimTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      ldmatrix_x4_trans(v[m][half], (half ? values1 : values0) + row * C::kRowBytes +
                                        swizzle((dim_tile + m) * 2 + lane / 8 % 2, lane));
#pragma unroll
  for (int n = 0; n < C::kOutColumns; ++n) {
    uint32_t p[4];
    ldmatrix_x4_trans(p, weights + lane * C::kWeightPitch + (column + n) * 16);
#pragma unroll
    for (int m = 0; m < C::kDimTiles; ++m) {
      mma(typename C::Element(), acc[m][n], v[m][0], p[0], p[1]);
      mma(typename C::Element(), acc[m][n], v[m][1], p[2], p[3]);
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
        const uint32_t base = map_cluster(shared, begin + j);
        part_max[j] = load_cluster(base + C::kFinalMax + m * 4);
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
    store_global(target, packed);
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    attention(const __grid_constant__ Arguments a) {
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x / 32), 0);  // uniform
  const int split = blockIdx.x, splits = gridDim.x, head = blockIdx.y, row = blockIdx.z;
  const uint32_t shared = shared_memory(), ring = shared + C::kRing;
  if (!a.early_table) wait_for_previous_kernel();
  const int first_query = load_global(a.query_starts + row);
  const int end_query = load_global(a.query_starts + row + 1);
  const int seq_len = load_global(a.seq_lens + row);
  Loader<C> loader(a, head, warp, lane, split, splits, ring);
  if (const int m = threadIdx.x; m < C::kRows)  // what a block without groups leaves
    store_shared(shared + C::kRowMax + m * 4, kNothingSeen),
        store_shared(shared + C::kFinalMax + m * 4, kNothingSeen),
        store_shared(shared + C::kRowSum + m * 4, 0.0f);
  if (a.early_table) wait_for_previous_kernel();
  const int queries = end_query - first_query;
  if (queries <= 0) return;  // as do all blocks of the cluster

  const int rows = min(queries * a.group, C::kColumns * 8);
  // Groups of the sequence, and of this block: split, split + splits, ...
  const int groups = ((seq_len + kGroup - 1 >> 4) - split + splits - 1) >> a.split_shift;
  const int rounds = (groups + C::kWarps - 1) / C::kWarps;
  const int chunks = (rounds + C::kRounds - 1) / C::kRounds;
  const int chunk = chunks > 1 ? (rounds + chunks - 1) / chunks : rounds;  // rounds of each
  loader.start(seq_len, chunk, max(groups - warp + C::kWarps - 1, 0) / C::kWarps);

#pragma unroll 1
  for (int i = 0; i < C::kSlots; ++i) {
    loader.fetch();
    if (i == 0) {  // keys first: the queries will not come later than these
      load_queries<C>(a, first_query, rows, head, shared);
      cp_async_commit();
    }
  }

  // Row m of the queries sees positions below limit(m).
  const int first_limit = seq_len - queries + 1;
  const auto limit = [&](int m) { return min(seq_len, first_limit + a.query_of(m)); };

  // A thread's place in fragments: columns are query rows, two and the same in the next column.
  const int thread_row = lane % 4 * 2, thread_token = lane / 4;
  const uint32_t my_maxima = shared + C::kMaxima + (warp * C::kRows + thread_row) * 4;
  const uint32_t my_sums = shared + C::kSums + (warp * C::kRows + thread_row) * 4;
  if (lane < 4) {
#pragma unroll
    for (int i = 0; i < C::kColumns; ++i) store_shared(my_sums + i * 32, make_float2(0, 0));
  }
  const int dim_tile = warp % C::kDimGroups * C::kDimTiles;
  const int out_column = warp / C::kDimGroups * C::kOutColumns;
  float acc[C::kDimTiles][C::kOutColumns][4] = {};

  cp_async_wait<C::kSlots - 1>();
  __syncthreads();  // the queries are there

  int first_slot = 0;  // of the chunk's keys, in every warp's ring
#pragma unroll 1
  for (int c = 0; c < chunks; ++c) {
    const int left = groups - c * chunk * C::kWarps;
    const int here = min(left, chunk * C::kWarps);  // groups of this chunk
    const int count = (here - warp + C::kWarps - 1) / C::kWarps;
    const bool last = c + 1 == chunks;

    uint32_t held[C::kColumns][C::kHeld + 1][4];
#pragma unroll
    for (int i = 0; i < C::kColumns; ++i)
#pragma unroll
      for (int j = 0; j < C::kHeld; ++j) read_query<C>(held[i][j], shared, i, j * 2, lane);

    // 1. Logits of this warp's groups.
    float s[C::kRounds][C::kColumns][4];
#pragma unroll
    for (int k = 0; k < C::kRounds; ++k)
#pragma unroll
      for (int i = 0; i < C::kColumns; ++i)
        s[k][i][0] = s[k][i][1] = s[k][i][2] = s[k][i][3] = -INFINITY;
    uint32_t keys = ring + (warp * C::kSlots + first_slot) * C::kSlotBytes;
    const uint32_t ring_end = ring + (warp + 1) * C::kSlots * C::kSlotBytes;
    int begin = ((c * chunk * C::kWarps + warp) * splits + split) * kGroup;
#pragma unroll 1  // a short kernel waits for its instructions, too
    for (int round = 0; round < count; ++round) {
      float spare[C::kColumns][4];
      float(&x)[C::kColumns][4] = C::kRounds == 1 ? s[0] : spare;
      cp_async_wait<C::kSlots - 1>();
      __syncwarp();  // what other lanes copied is there, too
      multiply_keys<C>(x, keys, shared, held, lane);
      __syncwarp();  // all lanes have read
      loader.fetch();
      keys += C::kSlotBytes;
      if (keys == ring_end) keys -= C::kSlots * C::kSlotBytes;
#pragma unroll
      for (int i = 0; i < C::kColumns; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) x[i][j] *= a.scale_log2;
      if (begin + kGroup > min(seq_len, first_limit)) {
        const int thread_row = recomputed(lane) % 4 * 2;  // rare: no registers ahead of it
#pragma unroll
        for (int i = 0; i < C::kColumns; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            if (begin + thread_token + j / 2 * 8 >= limit(thread_row + i * 8 + j % 2))
              x[i][j] = -INFINITY;
      }
      if constexpr (C::kRounds > 1) {
#pragma unroll
        for (int k = 0; k < C::kRounds; ++k) {
          if (k != round) continue;
#pragma unroll
          for (int i = 0; i < C::kColumns; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) move(s[k][i][j], x[i][j]);
        }
      }
      begin += C::kWarps * splits * kGroup;
    }
    if (last) allow_next_kernel();  // all copies have been requested, but for long rings' ends

    // 2. Logits to P.
#pragma unroll
    for (int i = 0; i < C::kColumns; ++i) {
      float top[2] = {kNothingSeen, kNothingSeen};
#pragma unroll
      for (int k = 0; k < C::kRounds; ++k)
#pragma unroll
        for (int j = 0; j < 4; ++j) top[j % 2] = fmaxf(top[j % 2], s[k][i][j]);
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)
          top[j] = fmaxf(top[j], __shfl_xor_sync(kWholeWarp, top[j], distance));
      if (lane < 4) store_shared(my_maxima + i * 32, make_float2(top[0], top[1]));
    }
    __syncthreads();  // all maxima are there
    const uint32_t row_max = shared + C::kRowMax + thread_row * 4;
    uint32_t place = shared + C::kWeights +
                     (warp * kGroup + thread_token) * C::kWeightPitch + thread_row * 2;
    typename C::Element element;
#pragma unroll
    for (int i = 0; i < C::kColumns; ++i) {
      const float2 before = load_shared2(row_max + c % 2 * C::kRows * 4 + i * 32);
      float top[2] = {before.x, before.y}, sum[2] = {};
#pragma unroll
      for (int w = 0; w < C::kWarps; ++w) {
        const float2 other =
            load_shared2(shared + C::kMaxima + (w * C::kRows + thread_row + i * 8) * 4);
        top[0] = fmaxf(top[0], other.x), top[1] = fmaxf(top[1], other.y);
      }
#pragma unroll
      for (int k = 0; k < C::kRounds; ++k) {
        if (k >= count) break;
        float p[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) p[j] = exp2_fast(s[k][i][j] - top[j % 2]);
        sum[0] += p[0] + p[2], sum[1] += p[1] + p[3];
        const uint32_t at = place + k * C::kWarps * kGroup * C::kWeightPitch + i * 16;
        store_shared(at, pack(element, p[0], p[1]));
        store_shared(at + 8 * C::kWeightPitch, pack(element, p[2], p[3]));
      }
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)
          sum[j] += __shfl_xor_sync(kWholeWarp, sum[j], distance);
      if (lane < 4) {
        if (c > 0) {
          const float2 shrink =
              make_float2(exp2_fast(before.x - top[0]), exp2_fast(before.y - top[1]));
          const float2 old = load_shared2(my_sums + i * 32);
          sum[0] += old.x * shrink.x, sum[1] += old.y * shrink.y;
          if (warp == 0) store_shared(shared + C::kShrink + (thread_row + i * 8) * 4, shrink);
        }
        store_shared(my_sums + i * 32, make_float2(sum[0], sum[1]));
        if (warp == 0)
          store_shared(row_max + (c + 1) % 2 * C::kRows * 4 + i * 32, make_float2(top[0], top[1]));
      }
    }
    place += count * C::kWarps * kGroup * C::kWeightPitch;
    // Tokens are multiplied by 32s: an odd last group is followed by one that weighs nothing.
    if (here % 2 && warp == here % C::kWarps) {
#pragma unroll
      for (int i = 0; i < C::kColumns; ++i) {
        store_shared(place + i * 16, 0u);
        store_shared(place + i * 16 + 8 * C::kWeightPitch, 0u);
      }
    }

    // 3. Values. In warps with one more group of keys, values are one slot further.
    const int more = here % C::kWarps;
    int slot = (first_slot + here / C::kWarps) % C::kSlots;
    uint32_t weights = shared + C::kWeights;
    const int stop = last ? here : here + 1;  // once more for the next chunk's copies
#pragma unroll 1
    for (int begin = 0; begin < stop; begin += C::kWarps) {
      if (begin == 0) {
        cp_async_wait<C::kSlots - 1>();
        __syncthreads();  // P and the first round of values are there
        if (c > 0) {
#pragma unroll
          for (int n = 0; n < C::kOutColumns; ++n) {
            const float2 shrink =
                load_shared2(shared + C::kShrink + (thread_row + (out_column + n) * 8) * 4);
#pragma unroll
            for (int m = 0; m < C::kDimTiles; ++m)
#pragma unroll
              for (int j = 0; j < 4; ++j) acc[m][n][j] *= j % 2 ? shrink.y : shrink.x;
          }
        }
        if (const int m = threadIdx.x; last && m < rows) {
          float total = 0;
#pragma unroll
          for (int w = 0; w < C::kWarps; ++w)
            total += load_shared(shared + C::kSums + (w * C::kRows + m) * 4);
          store_shared(shared + C::kRowSum + m * 4, total);
          store_shared(shared + C::kFinalMax + m * 4,
                       load_shared(shared + C::kRowMax + ((c + 1) % 2 * C::kRows + m) * 4));
        }
      } else {
        cp_async_wait<C::kSlots - 2>();
        __syncthreads();  // this round's values are there, the last one's are used up
        loader.fetch();
      }
      const int next = slot + 1 < C::kSlots ? slot + 1 : 0;
#pragma unroll
      for (int u = 0; u < C::kWarps; u += 2) {
        if (begin + u >= here || out_column >= C::kColumns) break;
        const auto place = [&](int u) {
          return ring + (u * C::kSlots + (u < more ? next : slot)) * C::kSlotBytes;
        };
        const uint32_t values = place(u);
        multiply_values<C>(acc, values, begin + u + 1 < here ? place(u + 1) : values,
                           weights + u * kGroup * C::kWeightPitch, dim_tile, out_column, lane);
      }
      weights += C::kWarps * kGroup * C::kWeightPitch;
      slot = next;
    }
    if (last && here <= C::kWarps) __syncthreads();  // sums over warps are there
    first_slot = (first_slot + 2 * chunk) % C::kSlots;
  }

  typename C::Element element;
  if (splits == 1) {
#pragma unroll
    for (int n = 0; n < C::kOutColumns; ++n) {
      const float2 sum =
          load_shared2(shared + C::kRowSum + ((out_column + n) * 8 + thread_row) * 4);
      const float inverse[2] = {sum.x > 0 ? 1.0f / sum.x : 0.0f,  // 0: nothing is visible
                                sum.y > 0 ? 1.0f / sum.y : 0.0f};
      const int m = (out_column + n) * 8 + lane / 4;
      const int query = a.query_of(m), member = m - query * a.group;
      uint16_t* target = a.out + (first_query + query) * a.out_stride +
                         (head * a.group + member) * a.out_head_stride + lane % 4 * 2;
#pragma unroll
      for (int t = 0; t < C::kDimTiles; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* x = acc[t][n] + half * 2;
          const uint32_t packed =
              movmatrix_trans(pack(element, x[0] * inverse[0], x[1] * inverse[1]));
          if (m < rows) store_global(target + (dim_tile + t) * 16 + half * 8, packed);
        }
    }
    return;
  }
  __syncthreads();  // the ring is used up
#pragma unroll
  for (int m = 0; m < C::kDimTiles; ++m)
#pragma unroll
    for (int n = 0; n < C::kOutColumns; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int query_row = (out_column + n) * 8 + thread_row + j % 2;
        const int dim = (dim_tile + m) * 16 + lane / 4 + j / 2 * 8;
        store_shared(ring + query_row * C::kPartPitch + dim * 4, acc[m][n][j]);
      }
  cluster_sync();
  combine<C>(a, shared, first_query, rows, head, split, splits);
  cluster_sync_reads();  // no block leaves while another reads its memory
}

template <class C>
int launch(const Arguments& a, dim3 grid, bool programmatic, cudaStream_t stream) {
  cudaError_t error =
      cudaFuncSetAttribute(attention<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kBytes);
  if (error != cudaSuccess) return error;
  // All of the L1 cache as shared memory, so that two blocks fit where they could.
  error = cudaFuncSetAttribute(attention<C>, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  if (grid.x > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = grid.x;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  }
  if (programmatic) {
    cudaLaunchAttribute& early = attributes[config.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  config.gridDim = grid;
  config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = C::kBytes;
  config.stream = stream;
  config.attrs = attributes;
  return cudaLaunchKernelEx(&config, attention<C>, a);
}

// Tunings: 0 is 1 where there is at most one block per multiprocessor, or else 3.
constexpr int kNumTunings = 4;

template <class Element, int kDim, int kColumns>
int launch_tuned(const Arguments& a, dim3 grid, int tuning, bool programmatic,
                 cudaStream_t stream) {
  // Rounds are bounded by the registers that logits take, 4 per round and column.
  constexpr bool kFew = kColumns <= 2;
  if (tuning == 1) {
    constexpr int kRounds = kFew ? 8 : kColumns <= 6 ? 5 : 3;
    return launch<Config<Element, kDim, kColumns, 8, kRounds, 1>>(a, grid, programmatic, stream);
  }
  if constexpr (kColumns <= 6) {  // the others lack shared memory
    if (tuning == 4) {
      constexpr int kRounds = kFew ? 4 : kDim == 64 ? 2 : 1;
      constexpr int kWhole = kColumns == 5 ? 6 : kColumns;
      return launch<Config<Element, kDim, kWhole, 16, kRounds, 1>>(a, grid, programmatic, stream);
    }
  }
  if constexpr (kColumns <= 6) {  // the others lack registers
    if (tuning == 2) {
      constexpr int kRounds = kFew ? 4 : 2;
      constexpr int kWhole = kDim == 64 && kColumns == 5 ? 6 : kColumns;  // two parts of O^T
      return launch<Config<Element, kDim, kWhole, 8, kRounds, 2>>(a, grid, programmatic, stream);
    }
  }
  constexpr int kRounds = kFew ? 8 : kColumns == 5 ? 5 : kColumns == 6 ? 4 : kDim == 128 ? 2 : 3;
  return launch<Config<Element, kDim, kColumns, 4, kRounds, 2>>(a, grid, programmatic, stream);
}

template <class Element, int kDim>
int launch_rows(const Arguments& a, int rows, dim3 grid, int tuning,
                bool programmatic, cudaStream_t stream) {
  if (rows <= 8) return launch_tuned<Element, kDim, 1>(a, grid, tuning, programmatic, stream);
  if (rows <= 16) return launch_tuned<Element, kDim, 2>(a, grid, tuning, programmatic, stream);
  if (rows <= 40) return launch_tuned<Element, kDim, 5>(a, grid, tuning, programmatic, stream);
  if (rows <= 48) return launch_tuned<Element, kDim, 6>(a, grid, tuning, programmatic, stream);
  return launch_tuned<Element, kDim, 8>(a, grid, tuning, programmatic, stream);
}

template <class Element>
int launch_dim(const Arguments& a, int dim, int rows, dim3 grid, int tuning,
               bool programmatic, cudaStream_t stream) {
  if (dim == 64) return launch_rows<Element, 64>(a, rows, grid, tuning, programmatic, stream);
  return launch_rows<Element, 128>(a, rows, grid, tuning, programmatic, stream);
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
  int tuning = variant & kTuning;
  if (variant < 0 ||
      variant > (kTuning | kProgrammatic | kEarlyTable | kPrefetchValues) ||
      tuning > kNumTunings ||
      (variant & kEarlyTable && !(variant & kProgrammatic)))
    return kBadVariant;
  if (rows <= 0 || kv_heads <= 0 || max_queries <= 0) return kOk;
  if (tuning == 0) {
    int device = 0, multiprocessors = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
      error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    tuning = int64_t{rows} * kv_heads * num_splits <= multiprocessors ? 1 : 3;
  }
  Arguments a = {};
  a.out = static_cast<uint16_t*>(out);
  a.queries = static_cast<const uint16_t*>(queries);
  a.keys = static_cast<const char*>(keys);
  a.value_offset = static_cast<const char*>(values) - a.keys;
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
  a.early_table = (variant & kEarlyTable) != 0;
  a.prefetch_values = (variant & kPrefetchValues) != 0;
  a.group_inverse = (1 << 16) / group + 1;
  a.scale_log2 = scale * kLog2e;
  const dim3 grid(num_splits, kv_heads, rows);
  const auto launch = is_bf16 ? launch_dim<BFloat16> : launch_dim<Float16>;
  return launch(a, head_dim, max_queries * group, grid, tuning, (variant & kProgrammatic) != 0,
                static_cast<cudaStream_t>(stream));
}
