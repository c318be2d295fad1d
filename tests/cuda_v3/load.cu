// How fast can a kernel with the attention's grid read what attention reads, computing nothing?
#include <cuda_runtime.h>
#include <cstdint>

#include "../../csrc/cuda/ptx.h"

struct Args {
  const char* keys;
  const int32_t *table, *lens;
  int64_t page_bytes, token_bytes, head_bytes, table_stride;
  int page_size, row_bytes;  // row: K|V of a token and head
  unsigned* sink;
};

__device__ __forceinline__ uint4 load16(const void* p) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
  return x;
}

// kTogether: K and V of a token one after the other; else all keys first.
template <int kThreads, int kUnroll, bool kTogether, int kRowBytes>
__global__ void __launch_bounds__(kThreads) by_loads(const Args a) {
  const int split = blockIdx.x, splits = gridDim.x, head = blockIdx.y, row = blockIdx.z;
  const int len = a.lens[row];
  const int32_t* table = a.table + row * a.table_stride;
  const char* base = a.keys + head * a.head_bytes;
  const int groups = ((len + 15) / 16 - split + splits - 1) / splits;
  constexpr int kParts = kRowBytes / 16;  // 16-byte units of a token
  constexpr int kHalf = kParts / 2;
  const int total = groups * 16 * kParts;
  unsigned x = 0;
  for (int begin = threadIdx.x; begin < total; begin += kThreads * kUnroll) {
    int64_t offset[kUnroll];
    bool ok[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      int i = begin + j * kThreads;
      int token, part;
      if (kTogether) {
        token = i / kParts, part = i % kParts;
      } else {
        const int half = i >= total / 2;
        i -= half * (total / 2);
        token = i / kHalf, part = i % kHalf + half * kHalf;
      }
      const int group = token / 16 * splits + split;
      const int position = group * 16 + token % 16;
      ok[j] = begin + j * kThreads < total && position < len;
      offset[j] = ok[j] ? table[position / a.page_size] * a.page_bytes +
                              position % a.page_size * a.token_bytes + part * 16 : 0;
    }
    uint4 v[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j)
      if (ok[j]) v[j] = load16(base + offset[j]); else v[j] = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) x ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (x == 0x12345678) a.sink[threadIdx.x] = x;
}

__device__ __forceinline__ uint32_t smem(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nL1:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra L2;\nbra L1;\nL2:\n}" ::"r"(bar), "r"(parity) : "memory");
}

// One warp; kSlots groups of 16 tokens in shared memory; a bulk copy per token (kTogether) or a
// bulk copy of its key now and one of its value in the second half.
template <int kSlots, bool kTogether, int kRowBytes>
__global__ void __launch_bounds__(32) by_bulk(const Args a) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ __align__(8) uint64_t full[kSlots];
  const int split = blockIdx.x, splits = gridDim.x, head = blockIdx.y, row = blockIdx.z;
  const int lane = threadIdx.x;
  const int len = a.lens[row];
  const int32_t* table = a.table + row * a.table_stride;
  const char* base = a.keys + head * a.head_bytes;
  const int groups = ((len + 15) / 16 - split + splits - 1) / splits;
  constexpr int kBytes = kTogether ? kRowBytes : kRowBytes / 2;
  if (lane < kSlots) {
    for (int s = lane; s < kSlots; s += 32)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(smem(&full[s])));
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncwarp();
  const int total = kTogether ? groups : 2 * groups;
  auto issue = [&](int i) {
    const int slot = i % kSlots;
    const int half = !kTogether && i >= groups;
    const int group = (i - half * groups) * splits + split;
    const int count = min(16, len - group * 16);
    if (lane == 0)
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                       smem(&full[slot])), "r"(count * kBytes) : "memory");
    __syncwarp();
    if (lane < count) {
      const int position = group * 16 + lane;
      const char* from = base + table[position / a.page_size] * a.page_bytes +
                         position % a.page_size * a.token_bytes + half * kBytes;
      const uint32_t to = smem(memory) + (slot * 16 + lane) * (kBytes + 16);
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
          "[%3];" ::"r"(to), "l"(from), "r"(kBytes), "r"(smem(&full[slot])) : "memory");
    }
  };
  for (int i = 0; i < min(kSlots, total); ++i) issue(i);
  for (int i = 0; i < total; ++i) {
    wait(smem(&full[i % kSlots]), i / kSlots & 1);
    __syncwarp();
    if (i + kSlots < total) issue(i + kSlots);
  }
}

// As by_bulk, a copy per group of 16 tokens (K|V of one head lie together: HND).
template <int kSlots, int kRowBytes>
__global__ void __launch_bounds__(32) by_group(const Args a) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ __align__(8) uint64_t full[kSlots];
  const int split = blockIdx.x, splits = gridDim.x, head = blockIdx.y, row = blockIdx.z;
  const int lane = threadIdx.x;
  const int len = a.lens[row];
  const int32_t* table = a.table + row * a.table_stride;
  const char* base = a.keys + head * a.head_bytes;
  const int groups = ((len + 15) / 16 - split + splits - 1) / splits;
  for (int s = lane; s < kSlots; s += 32)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(smem(&full[s])));
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncwarp();
  auto issue = [&](int i, int32_t page) {
    const int slot = i % kSlots;
    const int bytes = 16 * kRowBytes;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     smem(&full[slot])), "r"(bytes) : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(smem(memory) + slot * bytes), "l"(base + page * a.page_bytes), "r"(bytes),
        "r"(smem(&full[slot])) : "memory");
  };
  for (int i = lane; i < min(kSlots, groups); i += 32) issue(i, table[i * splits + split]);
  __syncwarp();
  for (int i = 0; i < groups; ++i) {
    wait(smem(&full[i % kSlots]), i / kSlots & 1);
    __syncwarp();
    if (i + kSlots < groups && lane == 0) issue(i + kSlots, table[(i + kSlots) * splits + split]);
    __syncwarp();
  }
}

// As attention issues its copies: a warp's 16 tokens of a chunk by one lane, in one go. Every warp
// refills its own slots.
template <int kWarps, int kSlots, int kRowBytes>
__global__ void __launch_bounds__(kWarps * 32) by_warps(const Args a) {
  using namespace dustin;
  constexpr int kPitch = kRowBytes + 16;
  const int split = blockIdx.x, splits = gridDim.x, head = blockIdx.y, row = blockIdx.z;
  const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32);
  const int len = uniform(load_global(a.lens + row));
  const int32_t* table = a.table + row * a.table_stride;
  const char* base = a.keys + head * a.head_bytes;
  const uint32_t barriers = shared_memory() + warp * 64;
  const uint32_t ring = shared_memory() + 1024 + warp * 16 * kPitch;
  if (lane < kSlots) mbarrier_init(barriers + lane * 8, 1);
  mbarrier_init_fence();
  __syncwarp();
  const int groups = ((len + 15) / 16 - split + splits - 1) / splits;
  const int mine = (groups - warp + kWarps - 1) / kWarps;
  const auto issue = [&](int i) {
    const int begin = ((i * kWarps + warp) * splits + split) * 16;
    const uint32_t place = ring + i % kSlots * kWarps * 16 * kPitch;
    const uint32_t barrier = barriers + i % kSlots * 8;
    const int position = min(begin + lane % 16, len - 1), own = min(16, len - begin);
    const int shift = __ffs(a.page_size) - 1;
    const char* from = base + load_global(table + (position >> shift)) * a.page_bytes +
                       (position & (a.page_size - 1)) * a.token_bytes;
    if (lane == 0) mbarrier_arrive_expect(barrier, own * kRowBytes);
    __syncwarp();
    if (own == 16) {
#pragma unroll
      for (int i = 0; i < 16; i += 8) {
        const char* sources[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) sources[j] = shuffle(from, i + j);
        if (elect()) {
#pragma unroll
          for (int j = 0; j < 8; ++j)
            bulk_copy(place + (i + j) * kPitch, sources[j], kRowBytes, barrier);
        }
        __syncwarp();
      }
    } else if (lane < own) {
      bulk_copy(place + lane * kPitch, from, kRowBytes, barrier);
    }
    __syncwarp();
  };
#pragma unroll 1
  for (int i = 0; i < min(kSlots, mine); ++i) issue(i);
#pragma unroll 1
  for (int i = 0; i < mine; ++i) {
    mbarrier_wait(barriers + i % kSlots * 8, i / kSlots & 1);
    __syncwarp();
    if (i + kSlots < mine) issue(i + kSlots);
  }
}

template <class F>
static int launch(F kernel, dim3 grid, int threads, int bytes, cudaStream_t stream, Args a) {
  cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e != cudaSuccess) return e;
  kernel<<<grid, threads, bytes, stream>>>(a);
  return cudaGetLastError();
}

template <int kRow>
static int pick(int variant, dim3 grid, cudaStream_t stream, Args a) {
  constexpr int kKv = 16 * (kRow + 16), kHalfs = 16 * (kRow / 2 + 16);
  switch (variant) {
    case 0: return launch(by_loads<256, 16, false, kRow>, grid, 256, 0, stream, a);
    case 1: return launch(by_loads<256, 16, true, kRow>, grid, 256, 0, stream, a);
    case 2: return launch(by_loads<512, 16, false, kRow>, grid, 512, 0, stream, a);
    case 3: return launch(by_loads<512, 16, true, kRow>, grid, 512, 0, stream, a);
    case 4: return launch(by_loads<1024, 8, true, kRow>, grid, 1024, 0, stream, a);
    case 5: return launch(by_bulk<24, true, kRow>, grid, 32, 24 * kKv, stream, a);
    case 6: return launch(by_bulk<48, false, kRow>, grid, 32, 48 * kHalfs, stream, a);
    case 7: return launch(by_bulk<12, true, kRow>, grid, 32, 12 * kKv, stream, a);
    case 8: return launch(by_bulk<6, true, kRow>, grid, 32, 6 * kKv, stream, a);
    case 9: return launch(by_group<26, kRow>, grid, 32, 26 * 16 * kRow, stream, a);
    case 10: return launch(by_group<12, kRow>, grid, 32, 12 * 16 * kRow, stream, a);
    case 11: return launch(by_group<6, kRow>, grid, 32, 6 * 16 * kRow, stream, a);
    case 12: return launch(by_warps<8, 3, kRow>, grid, 256, 3 * 8 * kKv + 1024, stream, a);
    case 13: return launch(by_warps<4, 3, kRow>, grid, 128, 3 * 4 * kKv + 1024, stream, a);
    default: return -1;
  }
}

extern "C" int load_floor(const void* keys, const int32_t* table, const int32_t* lens,
                          int64_t page_bytes, int64_t token_bytes, int64_t head_bytes,
                          int64_t table_stride, int rows, int kv_heads, int row_bytes,
                          int page_size, int splits, int variant, void* sink, void* stream) {
  Args a{static_cast<const char*>(keys), table, lens, page_bytes, token_bytes, head_bytes,
         table_stride, page_size, row_bytes, static_cast<unsigned*>(sink)};
  dim3 grid(splits, kv_heads, rows);
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (row_bytes == 512) return pick<512>(variant, grid, s, a);
  if (row_bytes == 256) return pick<256>(variant, grid, s, a);
  return -2;
}
