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

// x, which is the same in all lanes, where the compiler does not see that: branches are then no
// divergence, and addresses can be in uniform registers.
DUSTIN_DEVICE int uniform(int x) {
  int r;
  asm volatile("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(x));
  return r;
}
// True in one lane of a whole warp.
DUSTIN_DEVICE bool elect() {
  uint32_t r;
  asm volatile(
      "{\n\t.reg .pred elected;\n\telect.sync _|elected, 0xffffffff;\n\t"
      "selp.u32 %0, 1, 0, elected;\n\t}"
      : "=r"(r));
  return r;
}
DUSTIN_DEVICE const char* shuffle(const char* x, int lane) {
  const auto bits = reinterpret_cast<uint64_t>(x);
  const uint64_t low = __shfl_sync(0xffffffffu, static_cast<uint32_t>(bits), lane);
  const uint64_t high = __shfl_sync(0xffffffffu, static_cast<uint32_t>(bits >> 32), lane);
  return reinterpret_cast<const char*>(high << 32 | low);
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

// Bulk copies: kBytes (multiples of 16, as all addresses) are written by the copies' hardware,
// which counts them on a barrier in shared memory. A phase of it ends when `count` threads have
// arrived and all bytes that they said to expect have come; phases' parities are 0, 1, 0, ...
DUSTIN_DEVICE void mbarrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Makes what mbarrier_init wrote visible to copies.
DUSTIN_DEVICE void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
DUSTIN_DEVICE void mbarrier_arrive_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
DUSTIN_DEVICE void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DUSTIN_DEVICE void mbarrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n\t.reg .pred done;\n"
      "again:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
      "@!done bra again;\n\t}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
DUSTIN_DEVICE void bulk_copy(uint32_t target, const void* source, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(target),
      "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier)
      : "memory");
}
// What this thread has read and written in shared memory comes before later bulk copies there.
DUSTIN_DEVICE void proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
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

// kThreads threads of a block meet at one of its 16 barriers; 0 is __syncthreads'.
template <int kThreads>
DUSTIN_DEVICE void sync_threads(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}
// ... and get whether x is true for any of them.
template <int kThreads>
DUSTIN_DEVICE bool sync_threads_or(int barrier, bool x) {
  int r;
  asm volatile(
      "{\n\t.reg .pred in, out;\n\tsetp.ne.s32 in, %1, 0;\n\t"
      "bar.red.or.pred out, %2, %3, in;\n\tselp.s32 %0, 1, 0, out;\n\t}"
      : "=r"(r)
      : "r"(static_cast<int>(x)), "r"(barrier), "n"(kThreads)
      : "memory");
  return r;
}

// Registers of a thread; by all of four warps whose first is a multiple of four. Those that take
// wait for those that give.
template <int kRegisters>
DUSTIN_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
DUSTIN_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
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

// wgmma: four warps, the first a multiple of four, multiply together. Between begin and commit,
// c [64, 8 COLUMNS] += a [64, 16] b [16, 8 COLUMNS] any number of times; c is there after the wait
// that leaves fewer commits pending. Of the 16 rows of a and c that a warp holds, a lane has rows lane / 4 and lane / 4 + 8: of a, columns lane % 4 * 2,
// the next one, and those 8 later; of c, lane % 4 * 2 and the next one of each 8. b is a descriptor
// of tiles in shared memory, in 16 bytes of which one index runs; whoever wrote these by ordinary
// instructions has fenced (proxy_fence) before a barrier.
enum Runs : int { kFirstRuns = 0, kSecondRuns = 1 };
DUSTIN_DEVICE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DUSTIN_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
DUSTIN_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
#define DUSTIN_WGMMA(ELEMENT, NAME, COLUMNS, N, C, A0, A1, A2, A3, B, T, F)                       \
  template <int kRuns>                                                                            \
  DUSTIN_DEVICE void wgmma(ELEMENT, float (&c)[COLUMNS][4], const uint32_t (&a)[4], uint64_t b) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" N "k16.f32." NAME "." NAME " {" C "}, {" A0  \
                 ", " A1 ", " A2 ", " A3 "}, " B ", 1, 1, 1, " T ";"                              \
                 : F("+f")                                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kRuns));               \
  }                                                                                               \
  template <int kRuns>                                                                            \
  DUSTIN_DEVICE void wgmma_first(ELEMENT, float (&c)[COLUMNS][4], const uint32_t (&a)[4],         \
                                 uint64_t b) {                                                    \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" N "k16.f32." NAME "." NAME " {" C "}, {" A0  \
                 ", " A1 ", " A2 ", " A3 "}, " B ", 0, 1, 1, " T ";"                              \
                 : F("=f")                                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kRuns));               \
  }
#define DUSTIN_C(MODE, i) MODE(c[i][0]), MODE(c[i][1]), MODE(c[i][2]), MODE(c[i][3])
#define DUSTIN_C1(MODE) DUSTIN_C(MODE, 0)
#define DUSTIN_C2(MODE) DUSTIN_C1(MODE), DUSTIN_C(MODE, 1)
#define DUSTIN_C5(MODE) DUSTIN_C2(MODE), DUSTIN_C(MODE, 2), DUSTIN_C(MODE, 3), DUSTIN_C(MODE, 4)
#define DUSTIN_C6(MODE) DUSTIN_C5(MODE), DUSTIN_C(MODE, 5)
#define DUSTIN_C8(MODE) DUSTIN_C6(MODE), DUSTIN_C(MODE, 6), DUSTIN_C(MODE, 7)
#define DUSTIN_R4 "%0, %1, %2, %3"
#define DUSTIN_R8 DUSTIN_R4 ", %4, %5, %6, %7"
#define DUSTIN_R20 DUSTIN_R8 ", %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19"
#define DUSTIN_R24 DUSTIN_R20 ", %20, %21, %22, %23"
#define DUSTIN_R32 DUSTIN_R24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define DUSTIN_WGMMAS(ELEMENT, NAME)                                                              \
  DUSTIN_WGMMA(ELEMENT, NAME, 1, "8", DUSTIN_R4, "%4", "%5", "%6", "%7", "%8", "%9", DUSTIN_C1)   \
  DUSTIN_WGMMA(ELEMENT, NAME, 2, "16", DUSTIN_R8, "%8", "%9", "%10", "%11", "%12", "%13",         \
               DUSTIN_C2)                                                                         \
  DUSTIN_WGMMA(ELEMENT, NAME, 5, "40", DUSTIN_R20, "%20", "%21", "%22", "%23", "%24", "%25",      \
               DUSTIN_C5)                                                                         \
  DUSTIN_WGMMA(ELEMENT, NAME, 6, "48", DUSTIN_R24, "%24", "%25", "%26", "%27", "%28", "%29",      \
               DUSTIN_C6)                                                                         \
  DUSTIN_WGMMA(ELEMENT, NAME, 8, "64", DUSTIN_R32, "%32", "%33", "%34", "%35", "%36", "%37",      \
               DUSTIN_C8)
DUSTIN_WGMMAS(BFloat16, "bf16")
DUSTIN_WGMMAS(Float16, "f16")

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

DUSTIN_DEVICE float2 unpack(BFloat16, uint32_t x) {
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}
DUSTIN_DEVICE float2 unpack(Float16, uint32_t x) {
  float2 r;
  asm("{\n\t.reg .f16 low, high;\n\tmov.b32 {low, high}, %2;\n\t"
      "cvt.f32.f16 %0, low;\n\tcvt.f32.f16 %1, high;\n\t}"
      : "=f"(r.x), "=f"(r.y)
      : "r"(x));
  return r;
}

DUSTIN_DEVICE float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
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
DUSTIN_DEVICE void store_shared(uint32_t address, float2 x) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x.x), "f"(x.y) : "memory");
}
DUSTIN_DEVICE void store_shared(uint32_t address, float4 x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x.x), "f"(x.y),
               "f"(x.z), "f"(x.w)
               : "memory");
}
DUSTIN_DEVICE float2 load_shared2(uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
  return x;
}

DUSTIN_DEVICE float4 load_shared4(uint32_t address) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

// The address of another block's shared memory in this cluster, and stores through it, which
// count on a barrier there, as bulk copies do. A block's own shared address is a cluster address.
DUSTIN_DEVICE uint32_t map_cluster(uint32_t address, int rank) {
  uint32_t r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}
DUSTIN_DEVICE void store_cluster(uint32_t address, float4 x, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
      : "memory");
}

// All threads of the cluster meet: those that wait go on when all have arrived. Orders nothing
// but the reads before it, whose values have been used, and other blocks' stores after it.
DUSTIN_DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
DUSTIN_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

}  // namespace dustin

#endif  // DUSTIN_CUDA_PTX_H
