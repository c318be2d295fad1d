// SPDX-License-Identifier: Apache-2.0
// Paged attention of a few queries per sequence behind a C ABI, for sm_90. It computes what
// triton_kernels/attention.py computes and is made for the same reads: some 500 tokens per
// sequence, where a kernel is as fast as it gets its first bytes moving and its last ones out.
//
// A block of threads serves one sequence and key head: M = queries x heads of the group, at most
// 64 query rows. The sequence is cut into groups of 16 tokens; a chunk is as many of them as there
// are warps that compute.
//
// Keys and values of a token and head lie next to each other: one bulk copy brings both, so that
// pages of one token are as fast as longer ones. It is issued by one instruction, but a warp
// issues only one in some 40 ns, and waits where the memory is busy. So some warps do nothing but
// copy, as far ahead as shared memory allows, and the others have their registers. What the kernel
// before cannot write, they copy while it still runs.
//
// Products are by four warps together (wgmma), and transposed, so that the few query rows are the
// dimension padded to 8 and not 64:
//   1. S^T = K Q^T, a warp's group from registers, as wgmma reads K's rows only in layouts that
//      these copies cannot make, and Q from shared memory.
//   2. P = exp2(S - reference), to shared memory, and a barrier. It takes the place of the group's
//      keys, which nobody reads any more. Rounding the weights is half of the result's error, so in
//      each fourth group what it leaves goes there, too: all in all no more error than that of
//      kernels whose largest weight is a 1. The reference of the first chunk is its maximum, which
//      takes another barrier to find; later ones keep it, as it need not be the maximum: only where
//      a weight is large are maxima exchanged again.
//   3. O^T = V^T P^T, with V^T from registers. A warp takes 16 or 32 dimensions of all tokens, so
//      that no sums over warps follow the last byte. Beside it the next chunk's step 1 begins.
//
// Where sequences times key heads do not fill the device, a sequence is split over a cluster of
// 2, 4 or 8 blocks. Groups are dealt out to them like cards: which positions a thread copies does
// not depend on the length, so that table entries are read before the length is known. In the end
// each block gets its share of the dimensions from all others, by stores to its shared memory that
// a barrier there counts.
#include <cuda_runtime.h>

#include <cstdint>

#include "ptx.h"

namespace dustin {
namespace {

constexpr int kGroup = 16;               // tokens
constexpr int kMaxShared = 227 * 1024;   // of a block on sm_90
constexpr int kHalfShared = 113 * 1024;  // of each of two blocks
constexpr int kMaxSplits = 8;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kNothingSeen = -1e30f;  // finite: rows that see nothing give 0 and not NaN
constexpr float kLargeWeight = 256;     // far from the ends of every type's range
constexpr unsigned kWholeWarp = 0xffffffffu;
constexpr int kComputers = 1;  // number of the barrier of the warps that compute
constexpr int kCopiers = 4;    // warps that copy; setmaxnreg is for four together
constexpr int kRestStep = 4;   // what rounding leaves of weights counts in each fourth group

enum Error : int {
  kOk = 0,
  kBadHeadDim = -1,    // neither 64 nor 128
  kTooManyRows = -2,   // more than 64 query rows per key head
  kBadPageSize = -3,   // no power of two
  kBadSplits = -4,     // not 1, 2, 4 or 8
  kBadVariant = -5,
  kBadValues = -6,     // a token's value does not follow its key
};

// Bits of `variant`.
enum VariantBits : int {
  kTuning = 15,  // 1: whole multiprocessors, 2: half ones, 0: what is faster
  // Lengths, query_starts, the table and what the cache holds of older tokens than a sequence's
  // queries are read before the previous kernel of the stream ends. Only where it does not write
  // them, and was itself launched after the end of those that did.
  kEarly = 16,
};

struct Arguments {
  uint16_t* out;
  const uint16_t* queries;
  const char* cache;
  const int32_t *block_table, *seq_lens, *query_starts;
  int64_t query_stride, query_head_stride, out_stride, out_head_stride;
  int64_t page_bytes, token_bytes, head_bytes, table_stride;
  int32_t group, page_shift, split_shift, early;
  uint32_t group_inverse;  // 2^16 / group + 1
  float scale_log2;

  // The query of row m: m / group, exact for m < 64, without a division's latency.
  DUSTIN_DEVICE int query_of(int m) const { return m * group_inverse >> 16; }
};

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int max_of(int a, int b) { return a > b ? a : b; }
constexpr int min_of(int a, int b) { return a < b ? a : b; }

// Who computes what, and where shared memory holds it. A column is a tile of 8 query rows.
// kGroups groups, of a warp each, are a chunk. kBlocks share a multiprocessor.
template <class Element_, int kDim_, int kColumns_, int kGroups_, int kBlocks_>
struct Config {
  using Element = Element_;
  static constexpr int kDim = kDim_, kColumns = kColumns_, kGroups = kGroups_, kBlocks = kBlocks_;
  static constexpr int kRows = kColumns * 8;
  static constexpr int kComputing = kGroups * 32, kThreads = kComputing + kCopiers * 32;
  // O^T: of 16 dimensions, of a warp. Tile t of warp w is the (t kGroups + w)-th one.
  static constexpr int kDimTiles = kDim / 16 / kGroups, kAllTiles = kDim / 16;
  // Groups of the first chunk. With few of them there is soon something to compute, and budgets of
  // whole long chunks leave no more than that besides.
  static constexpr int kFirst = kGroups > 4 ? 3 : kGroups;

  // Registers of a thread at the start, of one that copies and of one that computes.
  static constexpr int kStart = min_of(255, 65536 / (kThreads * kBlocks)) / 8 * 8;
  static constexpr int kCopyRegisters = 24;
  static constexpr int kRegisters =
      min_of(240, (kStart * kThreads - kCopyRegisters * kCopiers * 32) / kComputing / 8 * 8);

  // Pitches of an odd number of 16-byte units: ldmatrix, which reads one unit of 8 rows, hits
  // every bank once.
  static constexpr int kTokenBytes = kDim * 4, kTokenPitch = kTokenBytes + 16;
  // Queries are tiles of 8 rows x 8 dimensions: [column][dimensions / 8][8][8].
  static constexpr int kQueryPitch = kDim / 8 * 128;  // of a column
  // P is tiles of 8 tokens x 8 query rows: [rounded, rest][column][tokens / 8][8][8], in place of
  // the group's keys, a column for each token, or after its values, where keys are too short.
  static constexpr bool kInPlace = kDim == 128;
  static constexpr int kTile = 128, kColumnPitch = kInPlace ? kTokenPitch : 2 * kTile;  // bytes
  static constexpr int kRestBytes = kColumns * kColumnPitch;
  static constexpr int kWeights = kInPlace ? 0 : kGroup * kTokenPitch;
  static constexpr int kGroupBytes = kGroup * kTokenPitch + (kInPlace ? 0 : 2 * kRestBytes);
  static constexpr int kSlotBytes = kGroups * kGroupBytes;  // a chunk
  // Maxima and sums are [pair of query rows][group] of two numbers, so that a thread reads those
  // of its rows by 16 bytes; the pitch spreads the reads over all banks.
  static constexpr int kPairPitch = kGroups * 8 + 16, kPairBytes = kRows / 2 * kPairPitch;

  // From here on places in shared memory.
  static constexpr int kQueries = 0, kMaxima = kColumns * kQueryPitch;
  static constexpr int kSums = kMaxima + kPairBytes;
  static constexpr int kShrink = kSums + kPairBytes;  // by how much a row's sums do
  static constexpr int kPartBarrier = kShrink + kRows * 4;
  static constexpr int kBarriers = kPartBarrier + 8;         // [slot][group]: it is there
  static constexpr int kLeft = kBarriers + 6 * kGroups * 8;  // [slot]: it has been read
  static constexpr int kRing = ceil_div(kLeft + 6 * 8, 128) * 128;
  static constexpr int kSlots =
      min_of(((kBlocks > 1 ? kHalfShared : kMaxShared) - kRing) / kSlotBytes, 6);
  static constexpr int kBytes = kRing + kSlots * kSlotBytes;

  // In a cluster, what others send takes the place of the slots after the first one, which is the
  // last chunk's: their references and sums, [split][row], and their parts of this block's tiles of
  // O^T, [split][tile][column][lane] of 16 bytes.
  static constexpr int kPartTile = kColumns * 32 * 16;
  static constexpr int kPartBytes =
      kMaxSplits * kRows * 8 + max_of(kAllTiles, kMaxSplits) * kPartTile;
  static constexpr int kPartStats = kRing + kSlotBytes;
  static constexpr int kPartOut = kPartStats + kMaxSplits * kRows * 8;

  static_assert(kSlots >= 2 && kPartBytes <= (kSlots - 1) * kSlotBytes);
  static_assert(!kInPlace || (2 * kColumns <= kGroup && 2 * kTile <= kDim * 2));
  static_assert(kDimTiles * kGroups * 16 == kDim);
  static_assert(kGroups % kCopiers == 0);
  static_assert(kMaxima % 16 == 0 && kPairBytes % 16 == 0 && kBarriers % 8 == 0);
};

// Where a sequence's groups are: which of this block, in which chunk and slot.
template <class C>
struct Order {
  int split, splits;
  uint32_t shared;

  // The first position of a group of a chunk, beyond every sequence if there is no such group.
  DUSTIN_DEVICE int begin_of(int chunk, int group) const {
    if (chunk == 0 && group >= C::kFirst) return 1 << 30;
    const int index = chunk == 0 ? group : C::kFirst + (chunk - 1) * C::kGroups + group;
    return (index * splits + split) * kGroup;
  }
  DUSTIN_DEVICE uint32_t here(int slot, int group) const {
    return shared + C::kBarriers + (slot * C::kGroups + group) * 8;
  }
  DUSTIN_DEVICE uint32_t left(int slot) const { return shared + C::kLeft + slot * 8; }
};

// A warp that copies some groups of every chunk. Lanes hold the table entries of their tokens, of
// kAhead chunks in each register: one latency of the table for many chunks.
template <class C>
struct Copier {
  static constexpr int kOwn = kGroup * C::kGroups / kCopiers, kAhead = 32 / kOwn, kHeld = 4;
  static_assert(kAhead >= 1 && C::kSlots <= kAhead * kHeld);

  const Arguments& a;
  const Order<C> order;
  int lane, warp;
  int seq_len = 0, old_len = 0;  // tokens, and those among them that no query belongs to
  int32_t pages[kHeld];

  DUSTIN_DEVICE Copier(const Arguments& a, const Order<C>& order, int lane, int warp)
      : a(a), order(order), lane(lane), warp(warp) {}

  // Reads the first entries. The length is not known yet: some are of no token, and will not be
  // used.
  DUSTIN_DEVICE void begin() {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int index = position(i * kAhead + lane / kOwn) >> a.page_shift;
      pages[i] = index < a.table_stride ? load_speculative(row_table() + index) : 0;
    }
  }
  DUSTIN_DEVICE const int32_t* row_table() const {
    return a.block_table + blockIdx.z * a.table_stride;
  }
  // Of this lane's token of a chunk.
  DUSTIN_DEVICE int position(int chunk) const {
    const int token = lane % kOwn;
    return order.begin_of(chunk, warp + token / kGroup * kCopiers) + token % kGroup;
  }
  DUSTIN_DEVICE int32_t read_page(int chunk) const {
    const int p = position(chunk);
    return p < seq_len ? load_global(row_table() + (p >> a.page_shift)) : 0;
  }
  DUSTIN_DEVICE const char* source(int32_t page, int position) const {
    const int in_page = position & ((1 << a.page_shift) - 1);
    return a.cache + blockIdx.y * a.head_bytes + page * a.page_bytes + in_page * a.token_bytes;
  }

  // Requests this warp's tokens of a chunk for a slot that nobody reads.
  DUSTIN_DEVICE void issue(int chunk, int slot) {
    const int held = chunk / kAhead % kHeld;
    int32_t page = pages[0];
#pragma unroll
    for (int i = 1; i < kHeld; ++i) page = held == i ? pages[i] : page;
    // Of the entry that this lane holds, of this chunk or the one beside it.
    const char* from = source(page, position(chunk / kAhead * kAhead + lane / kOwn));
#pragma unroll 1
    for (int group = warp; group < C::kGroups; group += kCopiers) {
      const int begin = order.begin_of(chunk, group);
      const int in_group = min(seq_len - begin, kGroup);
      const uint32_t barrier = order.here(slot, group);
      if (in_group <= 0) {  // phases are chunks, whether there is such a group or not
        if (chunk == 0 && lane == 0) mbarrier_arrive_expect(barrier, 0);
        continue;
      }
      if (begin + in_group > old_len) wait_for_previous_kernel();  // it may write these
      const uint32_t place = order.shared + C::kRing + slot * C::kSlotBytes +
                             group * C::kGroupBytes;
      const int first = chunk % kAhead * kOwn + group / kCopiers * kGroup;  // lane
      if (in_group == kGroup) {
        if (lane == 0) mbarrier_arrive_expect(barrier, kGroup * C::kTokenBytes);
        __syncwarp();
        // One lane issues all, as the compiler can tell: the instructions follow one another.
        // Lanes that issue one each would take turns of some 70 cycles.
#pragma unroll
        for (int i = 0; i < kGroup; i += 4) {
          const char* sources[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) sources[k] = shuffle(from, first + i + k);
          if (elect()) {
#pragma unroll
            for (int k = 0; k < 4; ++k)
              bulk_copy(place + (i + k) * C::kTokenPitch, sources[k], C::kTokenBytes, barrier);
          }
          __syncwarp();
        }
      } else {
        // Values of no token weigh 0, and must be finite for that: zeros, where the group's last
        // rows are not filled. No copy into these rows is or will be under way.
#pragma unroll 1
        for (int i = in_group * (C::kDim / 8) + lane; i < kGroup * (C::kDim / 8); i += 32)
          store_shared(place + i / (C::kDim / 8) * C::kTokenPitch + C::kTokenBytes / 2 +
                           i % (C::kDim / 8) * 16,
                       make_float4(0, 0, 0, 0));
        __syncwarp();
        if (lane == 0) mbarrier_arrive_expect(barrier, in_group * C::kTokenBytes);
        __syncwarp();
        if (lane >= first && lane - first < in_group)
          bulk_copy(place + (lane - first) * C::kTokenPitch, from, C::kTokenBytes, barrier);
        __syncwarp();
      }
    }
    if (chunk % kAhead == kAhead - 1) {  // these entries are used up: read those after the others
      const int32_t next = read_page(chunk + 1 + (kHeld - 1) * kAhead + lane / kOwn);
#pragma unroll
      for (int i = 0; i < kHeld; ++i)
        if (held == i) pages[i] = next;
    }
  }

  // All chunks, in order.
  DUSTIN_DEVICE void run(int chunks, int slot) {
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) {
      if (c >= C::kSlots) mbarrier_wait(order.left(slot), c / C::kSlots - 1 & 1);
      issue(c, slot);
      slot = slot + 1 == C::kSlots ? 0 : slot + 1;
    }
    wait_for_previous_kernel();  // as everybody does
  }
};

// Zeros in the rows past the last query row, so that they stay finite.
template <class C>
DUSTIN_DEVICE void load_queries(const Arguments& a, int first_query, int rows, int head,
                                uint32_t target) {
#pragma unroll 1  // a short kernel waits for its instructions, too
  for (int i = threadIdx.x; i < C::kRows * (C::kDim / 8); i += C::kComputing) {
    const int m = i / C::kDim * 8 + i % 8, unit = i / 8 % (C::kDim / 8);
    const bool used = m < rows;
    const int query = used ? a.query_of(m) : 0, member = used ? m - query * a.group : 0;
    const uint16_t* source = a.queries + (first_query + query) * a.query_stride +
                             (head * a.group + member) * a.query_head_stride + unit * 8;
    cp_async16(target + i * 16, source, used);
  }
}

// A descriptor of wgmma's second operand [16, n]: tiles of 8 x 8 elements, 128 bytes. The distances
// are from a tile to the next one of the first and of the second index. Of an address it takes the
// place in the block's own shared memory: bits beyond say which block of the cluster, and would be
// taken for a distance.
DUSTIN_DEVICE uint64_t wgmma_operand(uint32_t address, int first_bytes, int second_bytes) {
  return (address & 0x3ffff) >> 4 | static_cast<uint64_t>(first_bytes >> 4) << 16 |
         static_cast<uint64_t>(second_bytes >> 4) << 32;
}

// Of all groups, at a thread's place of the table of maxima or sums: a row's and the next one's.
template <class C, class Op>
DUSTIN_DEVICE float2 over_groups(uint32_t place, float2 x, Op op) {
#pragma unroll
  for (int g = 0; g < C::kGroups; g += 2) {
    const float4 y = load_shared4(place + g * 8);
    x = make_float2(op(op(x.x, y.x), y.z), op(op(x.y, y.y), y.w));
  }
  return x;
}
// ... over the 16 tokens of a group, to the lanes 0 to 3.
template <class Op>
DUSTIN_DEVICE float over_tokens(float x, Op op) {
#pragma unroll
  for (int distance = 16; distance >= 4; distance /= 2)
    x = op(x, __shfl_xor_sync(kWholeWarp, x, distance));
  return x;
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    attention(const __grid_constant__ Arguments a) {
  const int lane = threadIdx.x % 32;
  const int warp = uniform(threadIdx.x / 32);
  const int split = blockIdx.x, splits = gridDim.x, head = blockIdx.y, row = blockIdx.z;
  const uint32_t shared = shared_memory();
  const auto add = [](float x, float y) { return x + y; };
  const auto larger = [](float x, float y) { return fmaxf(x, y); };
  allow_next_kernel();  // it waits for this one's end where it has to
  if (!a.early) wait_for_previous_kernel();
  const int loaded_first = load_global(a.query_starts + row);
  const int loaded_end = load_global(a.query_starts + row + 1);
  const int loaded_len = load_global(a.seq_lens + row);
  const bool computes = warp < C::kComputing / 32;
  const Order<C> order{split, splits, shared};
  Copier<C> copier(a, order, lane, warp - C::kGroups);
  if (!computes) copier.begin();
  if (threadIdx.x < C::kSlots * C::kGroups)
    mbarrier_init(shared + C::kBarriers + threadIdx.x * 8, 1);
  else if (threadIdx.x < C::kSlots * (C::kGroups + 1))
    mbarrier_init(order.left(threadIdx.x - C::kSlots * C::kGroups), C::kGroups);
  else if (threadIdx.x == C::kSlots * (C::kGroups + 1))
    mbarrier_init(shared + C::kPartBarrier, 1);
  if (threadIdx.x < 64) mbarrier_init_fence();
  __syncthreads();  // these are there; meanwhile, the loads above are under way
  const int first_query = uniform(loaded_first), queries = uniform(loaded_end) - first_query;
  const int seq_len = uniform(loaded_len);
  if (queries <= 0) {  // in all blocks of the cluster
    wait_for_previous_kernel();
    return;
  }

  // Groups of the sequence, and of this block: split, split + splits, ...
  const int groups = ((seq_len + kGroup - 1 >> 4) - split + splits - 1) >> a.split_shift;
  const int chunks = 1 + (max(groups - C::kFirst, 0) + C::kGroups - 1) / C::kGroups;
  const int first_slot = (C::kSlots - (chunks - 1) % C::kSlots) % C::kSlots;  // the last one's is 0
  if (!computes) {
    give_registers<C::kCopyRegisters>();
    copier.seq_len = seq_len;
    copier.old_len = seq_len - queries;
    copier.run(chunks, first_slot);
    if (splits > 1) cluster_arrive(), cluster_wait();
    return;
  }
  take_registers<C::kRegisters>();
  wait_for_previous_kernel();
  // Tiles of O^T that this block finishes: those from first_tile on; in a cluster, its share.
  const int first_tile = (split * C::kAllTiles + splits - 1) >> a.split_shift;
  const int own_tiles = ((split + 1) * C::kAllTiles + splits - 1 >> a.split_shift) - first_tile;
  const int most_tiles = max(C::kAllTiles >> a.split_shift, 1);
  if (splits > 1 && threadIdx.x == 0)
    mbarrier_arrive_expect(shared + C::kPartBarrier,
                           (splits - 1) * (C::kRows * 8 + own_tiles * C::kPartTile));
  const int rows = min(queries * a.group, C::kRows);
  load_queries<C>(a, first_query, rows, head, shared + C::kQueries);
  cp_async_commit();

  // Row m of the queries sees positions below limit(m).
  const int first_limit = seq_len - queries + 1;
  const auto limit = [&](int m) { return min(seq_len, first_limit + a.query_of(m)); };

  // A thread's place in fragments: two query rows of each column, tokens or dimensions x, x + 8.
  const int thread_row = lane % 4 * 2;
  const uint32_t pairs = shared + lane % 4 * C::kPairPitch;
  const uint32_t my_weights =
      shared + C::kRing + warp * C::kGroupBytes + C::kWeights + lane / 4 * 16 + thread_row * 2;
  const uint32_t my_keys = shared + C::kRing + warp * C::kGroupBytes +
                           lane % 16 * C::kTokenPitch + lane / 16 * 16;
  const uint32_t all_values = shared + C::kRing + (lane / 16 * 8 + lane % 8) * C::kTokenPitch +
                              C::kTokenBytes / 2 + warp * 32 + lane / 8 % 2 * 16;
  float acc[C::kDimTiles][C::kColumns][4] = {};
  float reference[C::kColumns][2], sum[C::kColumns][2] = {};
#pragma unroll
  for (int i = 0; i < C::kColumns; ++i) reference[i][0] = reference[i][1] = kNothingSeen;

  cp_async_wait<0>();
  proxy_fence();  // queries are read by the tensor cores' own path
  sync_threads<C::kComputing>(kComputers);  // the queries are there
  typename C::Element element;
  float s[C::kColumns][4];
  // Starts the product of a chunk's keys with the queries. Beside another product it must not
  // depend on a branch, or the compiler would wait for that one first: a chunk without groups, too,
  // is multiplied.
  const auto keys = [&](int c, int slot, int here) {
    uint32_t k[C::kDim / 16][4] = {};
    if (warp < here) {
      mbarrier_wait(order.here(slot, warp), c / C::kSlots & 1);
#pragma unroll
      for (int i = 0; i < C::kDim / 16; ++i)
        ldmatrix_x4(k[i], my_keys + slot * C::kSlotBytes + i * 32);
    }
    wgmma_begin();
    wgmma_first<kFirstRuns>(element, s, k[0],
                            wgmma_operand(shared + C::kQueries, 128, C::kQueryPitch));
#pragma unroll
    for (int i = 1; i < C::kDim / 16; ++i)
      wgmma<kFirstRuns>(element, s, k[i],
                        wgmma_operand(shared + C::kQueries + i * 256, 128, C::kQueryPitch));
    wgmma_commit();
  };
  // Groups of a chunk.
  const auto groups_of = [&](int c) {
    return c == 0 ? min(groups, C::kFirst)
                  : min(groups - C::kFirst - (c - 1) * C::kGroups, C::kGroups);
  };
  int slot = first_slot;
  keys(0, slot, groups_of(0));
#pragma unroll 1
  for (int c = 0; c < chunks; ++c) {
    const int here = groups_of(c);
    const bool last = c + 1 == chunks;

    // 1. Logits of this warp's group.
    wgmma_wait<0>();
    if (warp < here) {
      const int begin = order.begin_of(c, warp);
      if (begin + kGroup > min(seq_len, first_limit)) {
        const int first_row = recomputed(lane) % 4 * 2;  // rare: no registers ahead
#pragma unroll
        for (int i = 0; i < C::kColumns; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            if (begin + lane / 4 + j / 2 * 8 >= limit(first_row + i * 8 + j % 2))
              s[i][j] = -INFINITY;
      }
    } else {
#pragma unroll
      for (int i = 0; i < C::kColumns; ++i) s[i][0] = s[i][1] = s[i][2] = s[i][3] = -INFINITY;
    }

    // 2. Logits to P. Where there is no group, all have left what is written over before the
    // barrier of the chunk before.
    __syncwarp();  // the group's keys have been read
    const uint32_t weights = my_weights + slot * C::kSlotBytes;
    float here_sum[C::kColumns][2];
    bool exchange = c == 0;
#pragma unroll 1
    while (true) {
      if (exchange) {
#pragma unroll
        for (int i = 0; i < C::kColumns; ++i) {
          const float2 top =
              make_float2(over_tokens(fmaxf(s[i][0], s[i][2]), larger) * a.scale_log2,
                          over_tokens(fmaxf(s[i][1], s[i][3]), larger) * a.scale_log2);
          if (lane < 4)
            store_shared(pairs + C::kMaxima + i * 4 * C::kPairPitch + warp * 8, top);
        }
        sync_threads<C::kComputing>(kComputers);  // maxima are there
#pragma unroll
        for (int i = 0; i < C::kColumns; ++i) {
          const float2 top =
              over_groups<C>(pairs + C::kMaxima + i * 4 * C::kPairPitch,
                             make_float2(reference[i][0], reference[i][1]), larger);
          const float2 shrink = make_float2(exp2_fast(reference[i][0] - top.x),
                                            exp2_fast(reference[i][1] - top.y));
          sum[i][0] *= shrink.x, sum[i][1] *= shrink.y;
          reference[i][0] = top.x, reference[i][1] = top.y;
          if (warp == 0 && lane < 4)
            store_shared(shared + C::kShrink + (i * 8 + thread_row) * 4, shrink);
        }
      }
      float largest = 0;
#pragma unroll
      for (int i = 0; i < C::kColumns; ++i) {
        float p[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
          p[j] = exp2_fast(fmaf(s[i][j], a.scale_log2, -reference[i][j % 2]));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float* x = p + half * 2;
          const uint32_t target = weights + i * C::kColumnPitch + half * C::kTile;
          const uint32_t packed = pack(element, x[0], x[1]);
          const float2 rounded = unpack(element, packed);
          store_shared(target, packed);
          if (warp % kRestStep == 0)
            store_shared(target + C::kRestBytes,
                         pack(element, x[0] - rounded.x, x[1] - rounded.y));
          else
            x[0] = rounded.x, x[1] = rounded.y;  // most roundings cancel in the quotient
        }
        here_sum[i][0] = p[0] + p[2], here_sum[i][1] = p[1] + p[3];
        largest = fmaxf(largest, fmaxf(here_sum[i][0], here_sum[i][1]));
      }
      proxy_fence();  // P is read by the tensor cores' own path
      if (last) {
#pragma unroll
        for (int i = 0; i < C::kColumns; ++i) {
          const float2 total = make_float2(over_tokens(sum[i][0] + here_sum[i][0], add),
                                           over_tokens(sum[i][1] + here_sum[i][1], add));
          if (lane < 4)
            store_shared(pairs + C::kSums + i * 4 * C::kPairPitch + warp * 8, total);
        }
      }
      // P, the group's values and, at last, sums are there. After an exchange no weight is large.
      if (!sync_threads_or<C::kComputing>(kComputers, largest > kLargeWeight && !exchange)) break;
      exchange = true;
    }
    // All have left the slots but the last one: others may write there.
    if (last && splits > 1) cluster_arrive();
#pragma unroll
    for (int i = 0; i < C::kColumns; ++i) sum[i][0] += here_sum[i][0], sum[i][1] += here_sum[i][1];
    if (exchange && c > 0) {
#pragma unroll
      for (int n = 0; n < C::kColumns; ++n) {
        const float2 shrink = load_shared2(shared + C::kShrink + (n * 8 + thread_row) * 4);
#pragma unroll
        for (int m = 0; m < C::kDimTiles; ++m)
#pragma unroll
          for (int j = 0; j < 4; ++j) acc[m][n][j] *= j % 2 ? shrink.y : shrink.x;
      }
    }

    // 3. Values of all groups; zeros where there is no group.
    uint32_t v[C::kGroups][C::kDimTiles][4] = {};
    const uint32_t values = all_values + slot * C::kSlotBytes;
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g)
      if (g < here) {
#pragma unroll
        for (int t = 0; t < C::kDimTiles; ++t)
          ldmatrix_x4_trans(v[g][t], values + g * C::kGroupBytes + t * C::kGroups * 32);
      }
    wgmma_begin();
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
      const uint32_t rounded =
          shared + C::kRing + slot * C::kSlotBytes + g * C::kGroupBytes + C::kWeights;
#pragma unroll
      for (int part = 0; part < (g % kRestStep == 0 ? 2 : 1); ++part) {
        const uint64_t operand =
            wgmma_operand(rounded + part * C::kRestBytes, C::kTile, C::kColumnPitch);
#pragma unroll
        for (int t = 0; t < C::kDimTiles; ++t)
          wgmma<kSecondRuns>(element, acc[t], v[g][t], operand);
      }
    }
    wgmma_commit();
    const int next = slot + 1 == C::kSlots ? 0 : slot + 1;
    keys(c + 1, next, last ? 0 : groups_of(c + 1));
    wgmma_wait<1>();
    // Who copies to the slot next may. What has been read by ordinary instructions must be told to
    // the copies' hardware by those who have read.
    if (c + C::kSlots < chunks) {
      proxy_fence();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(order.left(slot));
    }
    slot = next;
  }
  wgmma_wait<0>();

  float total[C::kColumns][2];
#pragma unroll
  for (int n = 0; n < C::kColumns; ++n) {
    const float2 x = over_groups<C>(pairs + C::kSums + n * 4 * C::kPairPitch,
                                    make_float2(0, 0), add);
    total[n][0] = x.x, total[n][1] = x.y;
  }
  if (splits > 1) {
    // Tiles to the blocks that finish them, when these have made room, to the same threads.
    cluster_wait();
#pragma unroll
    for (int t = 0; t < C::kDimTiles; ++t) {
      const int tile = t * C::kGroups + warp, to = (tile << a.split_shift) / C::kAllTiles;
      if (to == split) continue;
      const uint32_t there = map_cluster(shared, to);
      const int place = tile - ((to * C::kAllTiles + splits - 1) >> a.split_shift);
      const uint32_t target = there + C::kPartOut + lane * 16 +
                              (split * most_tiles + place) * C::kPartTile;
#pragma unroll
      for (int n = 0; n < C::kColumns; ++n)
        store_cluster(target + n * 512,
                      make_float4(acc[t][n][0], acc[t][n][1], acc[t][n][2], acc[t][n][3]),
                      there + C::kPartBarrier);
    }
#pragma unroll 1
    for (int to = warp; to < splits; to += C::kGroups) {
      if (to == split || lane >= 4) continue;
      const uint32_t there = map_cluster(shared, to);
#pragma unroll
      for (int n = 0; n < C::kColumns; ++n)
        store_cluster(there + C::kPartStats + (split * C::kRows + n * 8 + thread_row) * 8,
                      make_float4(reference[n][0], total[n][0], reference[n][1], total[n][1]),
                      there + C::kPartBarrier);
    }
    mbarrier_wait(shared + C::kPartBarrier, 0);  // all parts are there
#pragma unroll
    for (int n = 0; n < C::kColumns; ++n) {
      float top[2] = {reference[n][0], reference[n][1]};
      const uint32_t stats = shared + C::kPartStats + (n * 8 + thread_row) * 8;
#pragma unroll 1
      for (int from = 0; from < splits; ++from)
        if (from != split) {
          const float4 x = load_shared4(stats + from * C::kRows * 8);
          top[0] = fmaxf(top[0], x.x), top[1] = fmaxf(top[1], x.z);
        }
      float grow[2] = {exp2_fast(reference[n][0] - top[0]), exp2_fast(reference[n][1] - top[1])};
      total[n][0] *= grow[0], total[n][1] *= grow[1];
#pragma unroll
      for (int t = 0; t < C::kDimTiles; ++t)
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[t][n][j] *= grow[j % 2];
#pragma unroll 1
      for (int from = 0; from < splits; ++from)
        if (from != split) {
          const float4 x = load_shared4(stats + from * C::kRows * 8);
          grow[0] = exp2_fast(x.x - top[0]), grow[1] = exp2_fast(x.z - top[1]);
          total[n][0] += x.y * grow[0], total[n][1] += x.w * grow[1];
#pragma unroll
          for (int t = 0; t < C::kDimTiles; ++t) {
            const int place = t * C::kGroups + warp - first_tile;
            if (place < 0 || place >= own_tiles) continue;
            const float4 part = load_shared4(
                shared + C::kPartOut + lane * 16 + n * 512 +
                (from * most_tiles + place) * C::kPartTile);
            acc[t][n][0] += part.x * grow[0], acc[t][n][1] += part.y * grow[1];
            acc[t][n][2] += part.z * grow[0], acc[t][n][3] += part.w * grow[1];
          }
        }
    }
  }
#pragma unroll
  for (int n = 0; n < C::kColumns; ++n) {
    float inverse[2];  // 0: nothing is visible
#pragma unroll
    for (int j = 0; j < 2; ++j) inverse[j] = total[n][j] > 0 ? reciprocal(total[n][j]) : 0.0f;
    const int m = n * 8 + lane / 4;
    const int query = a.query_of(m), member = m - query * a.group;
    uint16_t* target = a.out + (first_query + query) * a.out_stride +
                       (head * a.group + member) * a.out_head_stride + lane % 4 * 2;
#pragma unroll
    for (int t = 0; t < C::kDimTiles; ++t) {
      const int tile = t * C::kGroups + warp;
      if (tile < first_tile || tile >= first_tile + own_tiles) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* x = acc[t][n] + half * 2;
        const uint32_t packed =
            movmatrix_trans(pack(element, x[0] * inverse[0], x[1] * inverse[1]));
        if (m < rows) store_global(target + tile * 16 + half * 8, packed);
      }
    }
  }
}

struct Launch {
  dim3 grid;
  int tuning;
  cudaStream_t stream;
};

template <class C>
int launch(const Arguments& a, const Launch& l) {
  cudaError_t error =
      cudaFuncSetAttribute(attention<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kBytes);
  if (error != cudaSuccess) return error;
  // All of the L1 cache as shared memory, so that two blocks fit where they could.
  error = cudaFuncSetAttribute(attention<C>, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  // Blocks may start while the previous kernel of the stream ends; they wait before they read.
  cudaLaunchAttribute& early = attributes[config.numAttrs++];
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  if (l.grid.x > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = l.grid.x;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  }
  config.gridDim = l.grid;
  config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = C::kBytes;
  config.stream = l.stream;
  config.attrs = attributes;
  return cudaLaunchKernelEx(&config, attention<C>, a);
}

// Eight warps compute in a multiprocessor's shared memory, or four in half of it. Eight are for 128
// dimensions; more than 40 query rows of these need the whole.
template <class Element, int kDim, int kColumns>
int launch_tuned(const Arguments& a, const Launch& l) {
  if constexpr (kDim == 128) {
    if (l.tuning == 1 || kColumns > 5) return launch<Config<Element, kDim, kColumns, 8, 1>>(a, l);
  }
  if constexpr (kDim == 64 || kColumns <= 5)
    return launch<Config<Element, kDim, kColumns, 4, 2>>(a, l);
  return kBadVariant;
}

template <class Element, int kDim>
int launch_rows(const Arguments& a, int rows, const Launch& l) {
  if (rows <= 8) return launch_tuned<Element, kDim, 1>(a, l);
  if (rows <= 16) return launch_tuned<Element, kDim, 2>(a, l);
  if (rows <= 40) return launch_tuned<Element, kDim, 5>(a, l);
  if (rows <= 48) return launch_tuned<Element, kDim, 6>(a, l);
  return launch_tuned<Element, kDim, 8>(a, l);
}

}  // namespace
}  // namespace dustin

// Strides are in elements; all addresses must be multiples of 16 bytes. `table_stride` entries of
// each row of the table may be read, whatever the length. Returns 0, a negative Error or a
// cudaError.
extern "C" int dustin_paged_attention(
    void* out, const void* queries, const void* keys, const void* values,
    const int32_t* block_table, const int32_t* seq_lens, const int32_t* query_starts,
    int64_t query_stride, int64_t query_head_stride, int64_t out_stride, int64_t out_head_stride,
    int64_t page_stride, int64_t token_stride, int64_t head_stride, int64_t table_stride,
    int32_t rows, int32_t kv_heads, int32_t group, int32_t head_dim, int32_t page_size,
    int32_t max_queries, int32_t num_splits, int32_t is_bf16, int32_t variant, float scale,
    void* stream) {
  using namespace dustin;
  if (head_dim != 64 && head_dim != 128) return kBadHeadDim;
  if (group < 1 || int64_t{max_queries} * group > 64) return kTooManyRows;
  if (page_size < 1 || (page_size & (page_size - 1))) return kBadPageSize;
  if (num_splits != 1 && num_splits != 2 && num_splits != 4 && num_splits != 8) return kBadSplits;
  if (static_cast<const char*>(values) - static_cast<const char*>(keys) != head_dim * 2)
    return kBadValues;
  int tuning = variant & kTuning;
  if (variant < 0 || variant > (kTuning | kEarly) || tuning > 2) return kBadVariant;
  if (rows <= 0 || kv_heads <= 0 || max_queries <= 0) return kOk;
  // As measured on an H200. Clusters of four blocks that fill a multiprocessor each do not fit side
  // by side.
  if (tuning == 0) {
    int device = 0, multiprocessors = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
      error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    const bool fits = int64_t{rows} * kv_heads * num_splits <= multiprocessors;
    tuning = fits && num_splits <= 2 ? 1 : 2;
  }
  Arguments a = {};
  a.out = static_cast<uint16_t*>(out);
  a.queries = static_cast<const uint16_t*>(queries);
  a.cache = static_cast<const char*>(keys);
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
  a.early = (variant & kEarly) != 0;
  a.group_inverse = (1 << 16) / group + 1;
  a.scale_log2 = scale * kLog2e;
  const Launch l{dim3(num_splits, kv_heads, rows), tuning, static_cast<cudaStream_t>(stream)};
  const int query_rows = max_queries * group;
  if (head_dim == 64)
    return is_bf16 ? launch_rows<BFloat16, 64>(a, query_rows, l)
                   : launch_rows<Float16, 64>(a, query_rows, l);
  return is_bf16 ? launch_rows<BFloat16, 128>(a, query_rows, l)
                 : launch_rows<Float16, 128>(a, query_rows, l);
}
