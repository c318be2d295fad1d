// SPDX-License-Identifier: Apache-2.0
// CPU scoring kernels behind a C ABI; dustin_vllm/cpu_ops.py holds the contract and checks
// the arguments. Every integer and real of an argument struct is 8 bytes wide, so that its
// ctypes mirror cannot disagree about padding.
#include <atomic>
#include <cmath>
#include <memory>
#include <new>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "kernels.h"

#if defined(DUSTIN_X86)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

using namespace dustin;

namespace {

enum Isa : int { kScalar, kAvx2, kAvx512, kAvx512Bf16, kAmx };
const char* const kIsaNames[] = {"scalar", "avx2", "avx512", "avx512_bf16", "amx"};
std::atomic<int> isa_cap{kAmx};

// A chunk function fills a task's logits, max and sum; a reduce function merges its rows.
using ChunkFn = void (*)(const Task&);
using ReduceFn = void (*)(const Reduction&);

#if defined(__aarch64__)
constexpr int kBaseRows = 4;  // 32 vector registers of 4 floats
#else
constexpr int kBaseRows = 2;  // 16
#endif
void chunk_scalar(const Task& t) { logits_portable<4, kBaseRows, 16>(t), softmax_rows<4>(t); }
void reduce_scalar(const Reduction& r) { reduce<4>(r); }

#if defined(DUSTIN_X86)
DUSTIN_AVX2 void chunk_avx2(const Task& t) {
  logits_portable<8, 4, 16>(t), softmax_rows<8>(t);
}
DUSTIN_AVX2 void reduce_avx2(const Reduction& r) { reduce<8>(r); }
DUSTIN_AVX512 void chunk_avx512(const Task& t) {
  // The tokens of a register tile must lie in one block.
  t.block_size % 32 == 0 ? logits_portable<16, 8, 32>(t) : logits_portable<16, 8, 16>(t);
  softmax_rows<16>(t);
}
DUSTIN_AVX512 void reduce_avx512(const Reduction& r) { reduce<16>(r); }
DUSTIN_DPBF16 void chunk_dpbf16(const Task& t) { logits_dpbf16(t), softmax_rows<16>(t); }
DUSTIN_AMX void chunk_amx(const Task& t) { logits_amx(t), softmax_rows<16>(t); }
const ChunkFn kChunkFns[] = {chunk_scalar, chunk_avx2, chunk_avx512, chunk_dpbf16, chunk_amx};
const ReduceFn kReduceFns[] = {reduce_scalar, reduce_avx2, reduce_avx512, reduce_avx512,
                               reduce_avx512};

// Compares AMX with the portable kernel on small pseudo-random data: two full query tiles
// and a partial one, and a head size with a half tile at the end.
bool amx_agrees() {
  constexpr int64_t rows = 37, dim = 80, tokens = 64;
  uint32_t state = 1;
  auto next_bf16 = [&state] {
    state = state * 1664525u + 1013904223u;
    float x = static_cast<float>(state >> 8) * 0x1p-23f - 1.0f;
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return static_cast<uint16_t>(bits >> 16);
  };
  std::vector<uint16_t> keys(tokens * dim), q(rows * dim), packed(48 * dim);
  std::vector<float> wide_q(rows * dim), tile(dim * 32), amx(rows * kLd), plain(rows * kLd);
  std::vector<const void*> narrow(rows), wide(rows);
  for (uint16_t& x : keys) x = next_bf16();
  for (int64_t i = 0; i < rows * dim; ++i) {
    q[i] = next_bf16();
    uint32_t bits = static_cast<uint32_t>(q[i]) << 16;
    std::memcpy(&wide_q[i], &bits, 4);
  }
  for (int64_t m = 0; m < rows; ++m) narrow[m] = &q[m * dim], wide[m] = &wide_q[m * dim];
  const int32_t table[] = {1, 0};
  Task t = {};
  t.rows = rows, t.num_queries = 1, t.block_size = 32, t.dim = dim, t.scale = 0.5f;
  t.keys = reinterpret_cast<const char*>(keys.data()), t.block_bytes = 32 * dim * 2;
  t.table = table, t.layout = kAmxPacked, t.dtype = kBF16, t.end = tokens;
  t.tile = tile.data(), t.packed_q = packed.data();
  t.q = narrow.data(), t.logits = amx.data();
  logits_amx(t);
  t.q = wide.data(), t.logits = plain.data();
  logits_portable<4, kBaseRows, 16>(t);
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t j = 0; j < tokens; ++j)
      if (!(std::fabs(amx[m * kLd + j] - plain[m * kLd + j]) < 1e-4f)) return false;
  return true;
}

bool amx_usable() {
#if defined(__linux__)
  unsigned a, b, c, d;
  const unsigned tile_and_bf16 = 1u << 24 | 1u << 22;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & tile_and_bf16) != tile_and_bf16)
    return false;
  // Tile registers are off until a process asks for them (Linux 5.16).
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 && amx_agrees();
#else
  return false;
#endif
}

Isa best_isa() {
  static const Isa best = [] {
    unsigned a, b, c, d;
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return kScalar;
    if (!__builtin_cpu_supports("avx512f")) return kAvx2;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & 1u << 5)) return kAvx512;
    return amx_usable() ? kAmx : kAvx512Bf16;
  }();
  return best;
}
#else
const ChunkFn kChunkFns[] = {chunk_scalar};
const ReduceFn kReduceFns[] = {reduce_scalar};
Isa best_isa() { return kScalar; }
#endif

Isa choose_isa(int64_t layout, int64_t dtype) {
  const Isa isa = std::min(best_isa(), static_cast<Isa>(isa_cap.load()));
  // The bf16 matrix instructions need the packed order.
  return layout == kAmxPacked && dtype == kBF16 ? isa : std::min(isa, kAvx512);
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Group {  // scoring heads that read one KV head
  int64_t kv_head;
  std::vector<int64_t> heads;
  int64_t first_row;
};

struct Chunk {  // kChunk tokens of one sequence
  int64_t row, index;
};

}  // namespace

extern "C" {

enum DustinError { kOk, kOutOfMemory, kBadBlock, kBadLength, kBadQueries };

struct DustinTokenScores {
  float* out;
  int64_t out_stride;
  const void* queries;  // [rows, num_queries, heads, dim], contiguous
  const char* keys;
  int64_t block_stride, head_stride;  // elements
  const int32_t* table;
  int64_t table_stride;
  const int32_t* seq_lens;
  const int32_t* kv_heads;
  int64_t rows, num_queries, heads, dim, block_size, num_blocks, max_blocks;
  double scale, weight;
  int64_t layout, dtype;
  int64_t bf16_queries;  // 1: queries are bf16, for the bf16 matrix kernels; 0: fp32
  int64_t use_max, threads;
};

const char* dustin_cpu_isa(int64_t layout, int64_t dtype) {
  return kIsaNames[choose_isa(layout, dtype)];
}

// Caps the instruction set ("auto" lifts the cap). Returns 1 if this CPU lacks it.
int dustin_cpu_force_isa(const char* name) {
  if (!std::strcmp(name, "auto")) return isa_cap = kAmx, 0;
  for (int isa = kScalar; isa <= best_isa(); ++isa)
    if (!std::strcmp(name, kIsaNames[isa])) return isa_cap = isa, 0;
  return 1;
}

int dustin_cpu_token_scores(const DustinTokenScores* arguments) try {
  const DustinTokenScores& p = *arguments;
  for (int64_t r = 0; r < p.rows; ++r) {
    const int64_t length = p.seq_lens[r], blocks = ceil_div(length, p.block_size);
    if (!length) continue;
    if (length < p.num_queries || blocks > p.max_blocks) return kBadLength;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t block = p.table[r * p.table_stride + b];
      if (block < 0 || block >= p.num_blocks) return kBadBlock;
    }
  }
  const Isa isa = p.bf16_queries ? choose_isa(p.layout, p.dtype)
                                 : std::min(choose_isa(p.layout, p.dtype), kAvx512);
  if (p.bf16_queries && isa < kAvx512Bf16) return kBadQueries;
  const int64_t key_bytes = p.dtype == kF32 ? 4 : 2, query_bytes = p.bf16_queries ? 2 : 4;
  const int64_t total_rows = p.heads * p.num_queries;

  std::vector<Group> groups;
  for (int64_t h = 0; h < p.heads; ++h) {
    size_t g = 0;
    while (g < groups.size() && groups[g].kv_head != p.kv_heads[h]) ++g;
    if (g == groups.size()) groups.push_back({p.kv_heads[h], {}, 0});
    groups[g].heads.push_back(h);
  }
  int64_t widest = 0;
  for (size_t g = 0, rows = 0; g < groups.size(); ++g) {
    const int64_t group_rows = groups[g].heads.size() * p.num_queries;
    groups[g].first_row = rows;
    rows += group_rows;
    widest = std::max(widest, group_rows);
  }

  // Sequences go in batches whose logits stay in the caches; a longer one goes alone.
  const int64_t chunk_floats = total_rows * (kLd + 2);
  const int64_t budget = std::min<int64_t>(p.threads << 19, 64 << 20);
  std::vector<std::vector<Chunk>> batches(1);
  for (int64_t r = 0; r < p.rows; ++r) {
    const int64_t count = ceil_div(p.seq_lens[r], kChunk);
    if (!batches.back().empty() &&
        (static_cast<int64_t>(batches.back().size()) + count) * chunk_floats > budget)
      batches.emplace_back();
    for (int64_t c = 0; c < count; ++c) batches.back().push_back({r, c});
  }
  size_t most = 0;
  for (const auto& batch : batches) most = std::max(most, batch.size());
  if (!most) return kOk;

  const int64_t stats = static_cast<int64_t>(most) * total_rows;
  std::vector<float> max(stats), sum(stats);
  const int64_t num_groups = groups.size();
  const int64_t threads = std::min(p.threads, static_cast<int64_t>(most) * num_groups);
  const int64_t tile = p.dtype == kF32 || p.bf16_queries ? 0 : p.dim * 32;
  const int64_t packed = isa == kAmx ? (widest + 15) / 16 * 16 * p.dim : 0;
  std::vector<float> tiles(threads * tile);
  std::vector<uint16_t> packed_q(threads * packed);
  std::vector<const void*> query_rows(threads * widest);
  // Not a vector: zeroing it would cost a pass over memory.
  const std::unique_ptr<float[]> logits(new float[stats * kLd]);

  for (const auto& batch : batches) {
    const int64_t chunks = batch.size();
#pragma omp parallel num_threads(static_cast<int>(threads))
    {
#if defined(_OPENMP)
      const int64_t thread = omp_get_thread_num();
#else
      const int64_t thread = 0;
#endif
      const void** q = query_rows.data() + thread * widest;
#pragma omp for schedule(dynamic)
      for (int64_t task = 0; task < chunks * num_groups; ++task) {
        const int64_t slot = task / num_groups;
        const Chunk chunk = batch[slot];
        const Group& group = groups[task % num_groups];
        const int64_t length = p.seq_lens[chunk.row];
        const int64_t first = slot * total_rows + group.first_row;
        int64_t rows = 0;
        for (int64_t h : group.heads)
          for (int64_t i = 0; i < p.num_queries; ++i)
            q[rows++] = static_cast<const char*>(p.queries) +
                        ((chunk.row * p.num_queries + i) * p.heads + h) * p.dim * query_bytes;
        Task t;
        t.q = q, t.rows = rows, t.num_queries = p.num_queries;
        t.keys = p.keys + group.kv_head * p.head_stride * key_bytes;
        t.block_bytes = p.block_stride * key_bytes;
        t.table = p.table + chunk.row * p.table_stride;
        t.block_size = p.block_size, t.dim = p.dim;
        t.layout = static_cast<Layout>(p.layout), t.dtype = static_cast<DType>(p.dtype);
        t.begin = chunk.index * kChunk, t.end = std::min(length, t.begin + kChunk);
        t.visible = length - p.num_queries + 1 - t.begin;
        t.scale = static_cast<float>(p.scale);
        t.logits = &logits[first * kLd], t.max = &max[first], t.sum = &sum[first];
        t.tile = tiles.data() + thread * tile;
        t.packed_q = packed_q.data() + thread * packed;
        kChunkFns[isa](t);
      }
      // Merge the chunks: max becomes each chunk's factor exp(max - top) / total. Tasks are
      // dealt out a cache line of rows at a time, as only first chunks have work.
#pragma omp for schedule(static, 16)
      for (int64_t task = 0; task < chunks * total_rows; ++task) {
        const int64_t slot = task / total_rows, row = task % total_rows;
        if (batch[slot].index != 0) continue;  // a sequence is merged once, at its first chunk
        const int64_t count = ceil_div(p.seq_lens[batch[slot].row], kChunk);
        float* m = &max[slot * total_rows + row];
        const float* s = &sum[slot * total_rows + row];
        float top = m[0];
        for (int64_t c = 1; c < count; ++c) top = std::max(top, m[c * total_rows]);
        double total = 0;
        for (int64_t c = 0; c < count; ++c) {
          float& factor = m[c * total_rows];
          factor = std::exp(factor - top);
          total += static_cast<double>(factor) * s[c * total_rows];
        }
        for (int64_t c = 0; c < count; ++c)
          m[c * total_rows] = static_cast<float>(m[c * total_rows] / total);
      }
#pragma omp for schedule(static)
      for (int64_t slot = 0; slot < chunks; ++slot) {
        const int64_t row = batch[slot].row, begin = batch[slot].index * kChunk;
        Reduction r;
        r.p = &logits[slot * total_rows * kLd], r.factor = &max[slot * total_rows];
        r.rows = total_rows, r.tokens = std::min(kChunk, p.seq_lens[row] - begin);
        r.use_max = p.use_max, r.weight = static_cast<float>(p.weight);
        r.out = p.out + row * p.out_stride + begin;
        kReduceFns[isa](r);
      }
    }
  }
  return kOk;
} catch (const std::bad_alloc&) {
  return kOutOfMemory;
}

struct DustinUnitScores {
  float* out;  // [rows, columns / unit], contiguous
  const float* scores;
  int64_t scores_stride;
  const int32_t* contexts;
  int64_t rows, columns, unit, dilation, threads;
};

int dustin_cpu_unit_scores(const DustinUnitScores* arguments) {
  const DustinUnitScores& p = *arguments;
  constexpr int64_t kUnits = 4096;  // per task
  const int64_t width = p.columns / p.unit, spans = ceil_div(width, kUnits);
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(p.threads))
  for (int64_t task = 0; task < p.rows * spans; ++task) {
    const int64_t row = task / spans, begin = task % spans * kUnits;
    const int64_t end = std::min(width, begin + kUnits);
    const int64_t full = std::min(end, p.contexts[row] / p.unit);
    const float* s = p.scores + row * p.scores_stride;
    float* out = p.out + row * width;
    std::fill(out + begin, out + end, 0.0f);
    if (p.unit == 1) {
      for (int64_t shift = 0; shift <= p.dilation; ++shift)
        for (int64_t j = std::max(begin, shift); j < full; ++j)
          out[j] = s[j - shift] > out[j] ? s[j - shift] : out[j];
      continue;
    }
    for (int64_t u = begin; u < full; ++u) {
      // Slide the window back one token at a time; doubles keep the difference exact enough.
      double mass = 0, best = 0;
      for (int64_t j = u * p.unit; j < (u + 1) * p.unit; ++j) mass += s[j];
      best = std::max(best, mass);
      const int64_t last = (u + 1) * p.unit - 1;
      for (int64_t shift = 1; shift <= std::min(p.dilation, last); ++shift) {
        const int64_t entering = u * p.unit - shift;
        mass += (entering < 0 ? 0.0 : s[entering]) - static_cast<double>(s[last - shift + 1]);
        best = std::max(best, mass);
      }
      out[u] = static_cast<float>(best);
    }
  }
  return kOk;
}

}  // extern "C"
