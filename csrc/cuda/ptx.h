// SPDX-License-Identifier: Apache-2.0
// The instructions of sm_90 that CUDA C++ has no operator for, one function each, and every
// access to shared memory, by its 32-bit address. A guard instead of #pragma once: an emulator
// that defines the same functions on a CPU takes this header's place by defining the guard.
#ifndef DUSTIN_CUDA_PTX_H
#define DUSTIN_CUDA_PTX_H

#include <cuda_runtime.h>

#include <cstdint>

namespace dustin {

#define DUSTIN_DEVICE __device__ __forceinline__

struct BFloat16 {};  // element types, kept as bits
struct Float16 {};

DUSTIN_DEVICE uint32_t shared_memory() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return static_cast<uint32_t>(__cvta_generic_to_shared(memory));
}

// x, as a value that the compiler knows nothing of: what depends on it is computed where it is
// needed, and not ahead of a loop, where it would take registers.
DUSTIN_DEVICE int recomputed(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// to = from, where the compiler would rather select between both on every path.
DUSTIN_DEVICE void move(float& to, float from) {
  asm volatile("mov.f32 %0, %1;" : "=f"(to) : "f"(from));
}

// 16 bytes from global to shared memory, zeros if not `valid`: `source` is not read then. The
// predicate is one instruction; the operand for the number of bytes takes five to prepare.
DUSTIN_DEVICE void cp_async16(uint32_t target, const void* source, bool valid) {
  asm volatile(
      "{\n\t.reg .pred ignore;\n\tsetp.eq.s32 ignore, %2, 0;\n\t"
      "cp.async.cg.shared.global [%0], [%1], 16, ignore;\n\t}" ::"r"(target),
      "l"(__cvta_generic_to_global(source)), "r"(static_cast<int>(valid))
      : "memory");
}
DUSTIN_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's newest groups are under way.
template <int kPending>
DUSTIN_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Loads through L2, in program order with wait_for_previous_kernel: no read-only or L1 copy, as
// the kernel before this one may still be writing while this one runs. The second may read what
// a tensor does not hold, but only where memory is mapped.
DUSTIN_DEVICE int32_t load_global(const int32_t* address) {
  int32_t x;
  asm volatile("ld.global.cg.b32 %0, [%1];"
               : "=r"(x) : "l"(__cvta_generic_to_global(address)) : "memory");
  return x;
}
DUSTIN_DEVICE int32_t load_speculative(const int32_t* address) { return load_global(address); }
DUSTIN_DEVICE void store_global(void* address, uint32_t x) {
  asm volatile("st.global.b32 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "r"(x)
               : "memory");
}
DUSTIN_DEVICE void store_global(void* address, uint4 x) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(
                   __cvta_generic_to_global(address)),
               "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

// Programmatic dependent launch; both do nothing where a launch is not programmatic.
DUSTIN_DEVICE void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
DUSTIN_DEVICE void allow_next_kernel() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// An 8 x 8 matrix of 16-bit elements, elements (l / 4, 2 * (l % 4)) and the next one in lane l,
// transposed.
DUSTIN_DEVICE uint32_t movmatrix_trans(uint32_t x) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}

// kBytes from a multiple of 16 bytes on to L2, by one lane.
template <int kBytes>
DUSTIN_DEVICE void prefetch_l2(const void* address) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(
                   __cvta_generic_to_global(address)),
               "n"(kBytes)
               : "memory");
}

// Four 8 x 8 matrices of 16-bit elements; lane l holds the address of row l % 8 of matrix l / 8
// and gets elements (l / 4, 2 * (l % 4)) and the next one of each, rows and columns swapped in
// the second function.
DUSTIN_DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
DUSTIN_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// c [16, 8] += a [16, 16] b [16, 8].
DUSTIN_DEVICE void mma(BFloat16, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DUSTIN_DEVICE void mma(Float16, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two elements in 32 bits, the first in the low half.
DUSTIN_DEVICE uint32_t pack(BFloat16, float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
DUSTIN_DEVICE uint32_t pack(Float16, float low, float high) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

DUSTIN_DEVICE float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

DUSTIN_DEVICE void store_shared(uint32_t address, uint32_t x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
DUSTIN_DEVICE void store_shared(uint32_t address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
DUSTIN_DEVICE void store_shared(uint32_t address, float2 x) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x.x), "f"(x.y) : "memory");
}
DUSTIN_DEVICE float load_shared(uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}
DUSTIN_DEVICE float2 load_shared2(uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
  return x;
}

// The address of another block's shared memory in this cluster, and loads through it. A block's
// own shared address is a cluster address too.
DUSTIN_DEVICE uint32_t map_cluster(uint32_t address, int rank) {
  uint32_t r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}
DUSTIN_DEVICE float load_cluster(uint32_t address) {
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}
DUSTIN_DEVICE float4 load_cluster4(uint32_t address) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

// All threads of the cluster meet. The first makes what was written before visible after; the
// second only tells that reads are done, whose values their readers have used: it does not wait
// for their stores to global memory, as a release would.
DUSTIN_DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}
DUSTIN_DEVICE void cluster_sync_reads() {
  asm volatile("barrier.cluster.arrive.relaxed;\n\tbarrier.cluster.wait;" ::: "memory");
}

}  // namespace dustin

#endif  // DUSTIN_CUDA_PTX_H
