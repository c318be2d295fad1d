// CPU emulation of what csrc/cuda/attention.cu uses. Fibers for threads, one cluster at a time.
#pragma once
#define DUSTIN_CUDA_PTX_H
#include <sys/mman.h>
#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(...)
#define __grid_constant__
#define DUSTIN_DEVICE inline
using std::min; using std::max;
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint4 { uint32_t x, y, z, w; };
inline float2 make_float2(float a, float b) { return {a, b}; }
inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }
struct dim3 { unsigned x, y, z; dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {} };

namespace emu {
struct Options { int policy = 0; uint64_t seed = 1; bool eager = false; } options;
struct Stats {
  uint64_t ldmatrix = 0, ldmatrix_extra = 0, cp = 0, cp_extra = 0, mma = 0, st = 0, st_extra = 0, ld = 0, ld_extra = 0, global16 = 0;
} stats;
std::vector<std::string> errors; uint64_t uninit_reads = 0;
inline void fail(const char* fmt, ...) {
  char b[300]; va_list v; va_start(v, fmt); vsnprintf(b, sizeof b, fmt, v); va_end(v);
  if (errors.size() < 20) errors.push_back(b);
}
// Global memory that may be read: [begin, end) with a bitmap of readable 16-byte units.
// early: those that may be read before the previous kernel's end, where anything may.
struct Region { uintptr_t begin, end; std::vector<bool> ok, early; };
std::vector<Region> readable;
struct Range { uintptr_t begin, end; };
bool early_ok = false; Range table_range;
std::vector<Range> small_readable;  // tables, lengths, checked by __ldg

struct Warp; struct Block; struct Cluster;
struct Named { int waiting = 0; bool any = false, all_any = false; };  // barrier of some threads
enum State { kReady, kSpinning, kCollective, kBarrier, kSomeBarrier, kClusterBarrier, kDone };
struct Copy { uint32_t target; const void* source; bool valid; };
// A bulk copy under way, and a barrier that counts it. Copies land when somebody waits for their
// barrier, or at once where options.eager says so; until then, their target is poisoned.
struct Bulk { uint32_t target; const void* source; int bytes; uint32_t barrier; float4 data; };  // or the data itself
struct MBarrier { int count = 0, pending = 0, phase = 0; int64_t tx = 0; };
struct Fiber {
  bool waited = false;
  void* sp = nullptr; State state = kReady; Warp* warp = nullptr; int lane = 0, id = 0;
  std::vector<Copy> open; std::deque<std::vector<Copy>> groups;
  int fence = -1, cluster_phase = 0, barrier = 0; bool arrived = false, unfenced = false;  // has read tiles since its last proxy fence
  std::map<uint32_t, int> phases;  // of barriers that this thread has seen the end of
};
struct Shadow { int we = -1, wt = -1, wwe = 0, re = -1, rt = -1, rwe = 0, rw = -1, pending = 0, last = -1; uint32_t barrier = 0, warps = 0; int phase = 0; bool init = false, async = false; };  // epochs, threads
struct Product { float* c[32]; uint32_t a[32][4]; uint64_t b; int columns; bool bf16; int runs; bool add; int group; };  // of wgmma, done when waited for
struct Warp { Block* block; Fiber lanes[32]; int arrived = 0, epoch = 0; const char* op = nullptr; void* args[32]; bool multiplies = false; int committed = 0; std::vector<Product> products; };
struct Block {
  Cluster* cluster; int rank; unsigned bx, by, bz; int threads, waiting = 0, done = 0, epoch = 0; bool any = false, all_any = false; Named named[16]; size_t bytes;
  unsigned char* memory; std::vector<Shadow> shadow; std::vector<Warp> warps;
  std::map<uint32_t, MBarrier> barriers; std::vector<Bulk> bulk;
};
struct Cluster { std::vector<Block> blocks; int arrived = 0, total = 0, phase = 0; };
Fiber* current = nullptr; void* scheduler_sp = nullptr;
std::function<void()> body;
dim3 block_dim;

extern "C" void emu_switch(void** from, void* to);
asm(R"(
.text
.globl emu_switch
emu_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
inline void to_scheduler() { Fiber* f = current; emu_switch(&f->sp, scheduler_sp); }
inline void entry() {
  body();
  current->state = kDone;
  if (!current->waited) fail("exit without waiting for the previous kernel");
  if (!current->open.empty()) fail("exit with uncommitted copies");
  for (auto& g : current->groups) if (!g.empty()) { fail("exit with copies under way"); break; }
  if (current->arrived) fail("exit between arrival and wait at the cluster's barrier");
  to_scheduler(); abort();
}
inline Block& block() { return *current->warp->block; }

inline void release_barrier(Block& b) {
  ++b.epoch;
  b.waiting = 0;
  b.all_any = b.any; b.any = false;
  for (auto& w : b.warps) for (auto& f : w.lanes) if (f.state == kBarrier) f.state = kReady;
}
inline void barrier() {
  Block& b = block();
  if (b.done) fail("barrier after exits");
  current->state = kBarrier;
  if (++b.waiting == b.threads) release_barrier(b);
  to_scheduler();
}
inline bool barrier_of(int id, int threads, bool any) {
  Block& b = block();
  Named& n = b.named[id];
  if (id < 1 || id > 15) fail("no barrier %d", id);
  current->state = kSomeBarrier; current->barrier = id;
  n.any |= any;
  if (++n.waiting == threads) {
    ++b.epoch;
    n.waiting = 0;
    n.all_any = n.any; n.any = false;
    for (auto& w : b.warps) for (auto& f : w.lanes) if (f.state == kSomeBarrier && f.barrier == id) f.state = kReady;
  }
  to_scheduler();
  return n.all_any;
}
// `ordering`: it makes writes visible, so that accesses before and after it are no races.
inline void cluster_arrive(bool ordering) {
  Cluster& c = *block().cluster;
  if (current->arrived) fail("second arrival at the cluster's barrier");
  current->arrived = true; current->cluster_phase = c.phase;
  if (++c.arrived == c.total) {
    c.arrived = 0; ++c.phase;
    for (auto& b : c.blocks) { b.epoch += ordering; for (auto& w : b.warps) for (auto& f : w.lanes) if (f.state == kClusterBarrier) f.state = kReady; }
  }
}
inline void cluster_wait() {
  Cluster& c = *block().cluster;
  if (!current->arrived) fail("wait at the cluster's barrier without arrival");
  if (c.phase == current->cluster_phase) { current->state = kClusterBarrier; to_scheduler(); }
  current->arrived = false;
}
template <class Op> void collective(const char* name, void* arg, Op op) {
  Warp& w = *current->warp;
  if (w.arrived == 0) w.op = name; else if (w.op != name && strcmp(w.op, name)) fail("divergent warp: %s and %s", w.op, name);
  w.args[current->lane] = arg;
  if (++w.arrived == 32) {
    w.arrived = 0;
    op(w.args);
    for (auto& f : w.lanes) f.state = kReady;
    // the last lane returns first only after the others have: keep lane order
    to_scheduler();
  } else {
    current->state = kCollective;
    to_scheduler();
  }
}

inline int warp_epoch(Cluster& c, int thread) { return c.blocks[thread / 4096].warps[thread % 4096 / 32].epoch; }
// Shared memory: 32-bit address = rank << 24 | offset.
inline unsigned char* touch(uint32_t address, int bytes, bool write, int thread, const char* what, bool remote = false) {
  Cluster& c = *block().cluster;
  unsigned rank = address >> 24, at = address & 0xffffff;
  static unsigned char dummy[64];
  if (rank >= c.blocks.size() || at + bytes > c.blocks[rank].bytes) { fail("%s: out of shared memory: %x", what, address); return dummy; }
  if (!remote && (int)rank != block().rank) fail("%s: remote address", what);
  if (at % bytes) fail("%s: misaligned %x for %d", what, at, bytes);
  Block& b = c.blocks[rank];
  if (remote && b.done == b.threads) fail("%s: the other block has left", what);
  for (unsigned i = at / 4; i < (at + bytes + 3) / 4; ++i) {
    Shadow& s = b.shadow[i];
    if (s.pending) fail("%s: touches a copy under way at %x", what, at);
    if (b.epoch > s.last) s.last = b.epoch;  // by an ordinary instruction
    s.warps |= 1u << thread % 4096 / 32;
    const int warp = thread / 32, mine = warp_epoch(c, thread);
    bool w_race = s.we == b.epoch && s.wt != thread && !(s.wt / 32 == warp && s.wwe < mine);
    if (w_race && s.async) {
      auto& phases = c.blocks[thread / 4096].warps[warp % 128].lanes[thread % 32].phases;
      auto it = phases.find(s.barrier);
      w_race = it == phases.end() || it->second <= s.phase;
    }
    if (write) {
      if (w_race) fail("%s: write-write race at %x", what, at);
      if (s.re == b.epoch && s.rt != thread && !(s.rw == warp && s.rwe < mine)) fail("%s: write after read race at %x", what, at);
      s.we = b.epoch; s.wt = thread; s.wwe = mine; s.init = true; s.async = false;
    } else {
      if (w_race) fail("%s: read after write race at %x (writer %d reader %d)", what, at, s.wt, thread);
      if (s.re == b.epoch) { if (s.rt != thread) s.rt = -2; if (s.rw != warp) s.rw = -2; s.rwe = mine; }
      else { s.re = b.epoch; s.rt = thread; s.rw = warp; s.rwe = mine; }
      if (!s.init) ++uninit_reads;
    }
  }
  return b.memory + at;
}
inline int thread_id(const Fiber& f) { return f.warp->block->rank * 4096 + f.id; }
inline int thread_id() { return thread_id(*current); }

inline void land(const Copy& c) {
  uint32_t at = c.target & 0xffffff;
  Block& b = block();
  for (unsigned i = at / 4; i < at / 4 + 4; ++i) b.shadow[i].pending--;
  unsigned char* p = touch(c.target, 16, true, thread_id(), "cp.async landing");
  if (c.valid) memcpy(p, c.source, 16); else memset(p, 0, 16);
}
inline void check_readable(const void* p, int bytes);
inline MBarrier* mbarrier(uint32_t at) {
  auto& all = block().barriers;
  auto it = all.find(at);
  if (it == all.end()) { fail("barrier %x is not initialised", at); static MBarrier none; none = {1, 1}; return &none; }
  return &it->second;
}
inline void complete(MBarrier& m) { if (m.pending == 0 && m.tx == 0) m.pending = m.count, ++m.phase; }
inline void land(Block& b, const Bulk& c, int thread) {
  for (int i = 0; i < c.bytes; i += 4) {
    Shadow& s = b.shadow[((c.target & 0xffffff) + i) / 4];
    s.pending--;
    s.we = b.epoch; s.wt = thread; s.wwe = 1 << 30; s.init = true; s.async = true; s.re = -1; s.warps = 0;
    s.barrier = c.barrier; s.phase = b.barriers[c.barrier].phase;
  }
  memcpy(b.memory + (c.target & 0xffffff), c.source ? c.source : &c.data, c.bytes);
  MBarrier& m = b.barriers[c.barrier];
  m.tx -= c.bytes;
  complete(m);
}
inline void check_cache(const void* p, int bytes) {
  uintptr_t a = (uintptr_t)p;
  if (a % bytes) fail("misaligned global read");
  for (auto& r : readable) if (a >= r.begin && a + bytes <= r.end) {
    if (!r.ok[(a - r.begin) / 16]) fail("read of an unused place of the cache or the queries");
    return;
  }
  if (!readable.empty()) fail("global read outside of tensors");
}
inline bool is_early(const void* p) {
  uintptr_t a = (uintptr_t)p;
  for (auto& r : readable) if (a >= r.begin && a < r.end) return !r.early.empty() && r.early[(a - r.begin) / 16];
  return readable.empty();
}
inline void check_readable(const void* p, int bytes) {
  if (!current->waited && !(early_ok && is_early(p))) fail("read before the previous kernel's end");
  check_cache(p, bytes);
}
// By the guarantee that cluster barriers give: all threads of the cluster have arrived once.
inline bool started(const Block& b) { return b.cluster->phase > 0; }
inline void count_conflicts(const uint32_t* address, int n, int bytes, uint64_t& ops, uint64_t& extra) {
  // phases of 128 bytes: 32 lanes of 4, 16 of 8, 8 of 16
  int per = 128 / bytes;
  for (int b = 0; b < n; b += per) {
    std::map<int, std::vector<uint32_t>> words;
    int worst = 1;
    for (int i = b; i < std::min(n, b + per); ++i)
      for (int k = 0; k < bytes; k += 4) {
        uint32_t word = (address[i] + k) / 4;
        auto& v = words[word % 32];
        if (std::find(v.begin(), v.end(), word) == v.end()) v.push_back(word);
        worst = std::max<int>(worst, v.size());
      }
    ++ops; extra += worst - 1;
  }
}
inline float from_bf16(uint16_t x) { uint32_t u = (uint32_t)x << 16; float f; memcpy(&f, &u, 4); return f; }
inline float from_f16(uint16_t x) { _Float16 h; memcpy(&h, &x, 2); return (float)h; }
inline uint16_t to_bf16(float f) { uint32_t u; memcpy(&u, &f, 4); if (f != f) return 0x7fff; u += 0x7fff + (u >> 16 & 1); return u >> 16; }
inline uint16_t to_f16(float f) { _Float16 h = (_Float16)f; uint16_t u; memcpy(&u, &h, 2); return u; }

template <class Body> void launch_cluster(unsigned splits, unsigned by, unsigned bz, size_t bytes, Body fn, char* stacks, size_t stack) {
  Cluster c;
  c.blocks.resize(splits);
  int threads = block_dim.x;
  c.total = splits * threads;
  body = fn;
  size_t n = 0;
  for (unsigned r = 0; r < splits; ++r) {
    Block& b = c.blocks[r];
    b.cluster = &c; b.rank = r; b.bx = r; b.by = by; b.bz = bz; b.threads = threads; b.bytes = bytes;
    b.memory = (unsigned char*)aligned_alloc(1024, (bytes + 1023) / 1024 * 1024);
    for (size_t i = 0; i < bytes; ++i) b.memory[i] = 0xff;  // NaN
    b.shadow.resize(bytes / 4 + 4);
    b.warps.resize(threads / 32);
    for (int t = 0; t < threads; ++t) {
      Fiber& f = b.warps[t / 32].lanes[t % 32];
      b.warps[t / 32].block = &b;
      f.warp = &b.warps[t / 32]; f.lane = t % 32; f.id = t;
      char* top = stacks + (++n) * stack;
      void** sp = (void**)((uintptr_t)top & ~(uintptr_t)15);
      *--sp = nullptr;               // alignment: at entry rsp % 16 == 8
      *--sp = (void*)entry;
      for (int i = 0; i < 6; ++i) *--sp = nullptr;
      f.sp = sp;
    }
  }
  std::mt19937_64 rng(options.seed);
  std::vector<Warp*> warps;
  for (auto& b : c.blocks) for (auto& w : b.warps) warps.push_back(&w);
  size_t alive = warps.size() * 32;
  size_t turn = 0;
  bool spinning = false;
  while (alive) {
    size_t first = options.policy == 0 ? 0 : options.policy == 1 ? warps.size() - 1 : options.policy == 2 ? rng() % warps.size() : turn++ % warps.size();
    bool ran = false;
    for (size_t k = 0; k < warps.size() && !ran; ++k) {
      Warp* w = warps[options.policy == 1 ? (first + warps.size() - k) % warps.size() : (first + k) % warps.size()];
      for (int l = 0; l < 32; ++l) {
        Fiber& f = w->lanes[l];
        if (f.state != kReady) continue;
        ran = true;
        current = &f;
        emu_switch(&scheduler_sp, f.sp);
        if (f.state == kDone) { --alive; ++w->block->done; }
      }
    }
    for (Warp* w : warps) for (auto& f : w->lanes)  // nobody else can go on: those who wait look again
      if (!ran && f.state == kSpinning) f.state = kReady, spinning = true;
    if (spinning) { spinning = false; continue; }
    if (!ran) { fail("deadlock"); break; }
  }
  for (auto& b : c.blocks) {
    if (!b.bulk.empty()) fail("exit with bulk copies under way");
    for (auto& [at, m] : b.barriers) if (m.pending != m.count || m.tx) fail("exit in the middle of a barrier's phase");
    free(b.memory);
  }
}
}  // namespace emu

struct EmuDim { unsigned x, y, z; };
inline EmuDim emu_thread() { return {(unsigned)emu::current->id, 0, 0}; }
inline EmuDim emu_block() { auto& b = emu::block(); return {b.bx, b.by, b.bz}; }
#define threadIdx emu_thread()
#define blockIdx emu_block()
inline dim3 gridDim;
inline void __syncthreads() { emu::barrier(); }
inline int __syncthreads_or(int x) { auto& b = emu::block(); b.any |= x != 0; emu::barrier(); return b.all_any; }
template <class T> T __ldg(const T* p) {
  uintptr_t a = (uintptr_t)p;
  for (auto& r : emu::small_readable) if (a >= r.begin && a + sizeof(T) <= r.end) return *p;
  if (emu::small_readable.empty()) return *p;  // no test has said what may be read
  emu::fail("__ldg outside of what may be read");
  return T();
}
inline int __float_as_int(float f) { int i; memcpy(&i, &f, 4); return i; }
template <class T> T __shfl_sync(unsigned, T x, int source) {
  struct A { T x; int source; T r; } a{x, source, T()};
  emu::collective("shfl", &a, [](void** v) { for (int l = 0; l < 32; ++l) { A* a = (A*)v[l]; a->r = ((A*)v[a->source & 31])->x; if (a->source < 0 || a->source > 31) emu::fail("shfl source"); } });
  return a.r;
}
template <class T> T __shfl_xor_sync(unsigned, T x, int mask) {
  struct A { T x; int mask; T r; } a{x, mask, T()};
  emu::collective("shfl_xor", &a, [](void** v) { for (int l = 0; l < 32; ++l) { A* a = (A*)v[l]; a->r = ((A*)v[l ^ a->mask])->x; } });
  return a.r;
}

inline void __syncwarp() { emu::collective("syncwarp", nullptr, [](void**) { ++emu::current->warp->epoch; }); }
namespace dustin {
struct BFloat16 {};
struct Float16 {};
inline int uniform(int x) {
  struct A { int x; } a{x};
  emu::collective("uniform", &a, [](void** v) { for (int l = 1; l < 32; ++l) if (((A*)v[l])->x != ((A*)v[0])->x) emu::fail("not uniform"); });
  return x;
}
inline bool elect() { emu::collective("elect", nullptr, [](void**) {}); return emu::current->lane == 0; }
inline const char* shuffle(const char* x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
inline float reciprocal(float x) { return 1 / x; }
inline int recomputed(int x) { return x; }
inline uint32_t shared_memory() { return (uint32_t)emu::block().rank << 24; }
inline void cp_async16(uint32_t target, const void* source, bool valid) {
  struct A { uint32_t t; } a{target};
  emu::collective("cp.async", &a, [](void** v) { uint32_t t[32]; for (int l = 0; l < 32; ++l) t[l] = ((A*)v[l])->t; emu::count_conflicts(t, 32, 16, emu::stats.cp, emu::stats.cp_extra); });
  if (valid) emu::check_readable(source, 16), ++emu::stats.global16; else if ((uintptr_t)source % 16) emu::fail("misaligned source");
  emu::touch(target, 16, true, emu::thread_id(), "cp.async issue");
  for (unsigned i = (target & 0xffffff) / 4, e = i + 4; i < e; ++i) emu::block().shadow[i].pending++;
  emu::current->open.push_back({target, source, valid});
}
inline void cp_async_commit() { emu::current->groups.push_back(std::move(emu::current->open)); emu::current->open.clear(); }
template <int kPending> void cp_async_wait() {
  static_assert(kPending >= 0);
  auto& g = emu::current->groups;
  while ((int)g.size() > kPending) { for (auto& c : g.front()) emu::land(c); g.pop_front(); }
}
inline int32_t load_global(const int32_t* p) {
  if (!emu::early_ok && !emu::current->waited) emu::fail("table or lengths read before the previous kernel's end");
  return __ldg(p);
}
inline int32_t load_speculative(const int32_t* p) {
  if (!emu::early_ok && !emu::current->waited) emu::fail("table read before the previous kernel's end");
  uintptr_t a = (uintptr_t)p;
  if (emu::small_readable.empty()) return *p;
  if (a < emu::table_range.begin || a + 4 > emu::table_range.end) { emu::fail("speculative load outside of the table"); return 0; }
  return *p;
}
inline void store_global(void* p, uint32_t x) { if (!emu::current->waited) emu::fail("early write"); if ((uintptr_t)p % 4) emu::fail("misaligned store"); memcpy(p, &x, 4); }
inline void wait_for_previous_kernel() { emu::current->waited = true; }
inline void allow_next_kernel() {}
inline uint32_t movmatrix_trans(uint32_t x) {
  struct A { uint32_t x, r; } a{x, 0};
  emu::collective("movmatrix", &a, [](void** v) {
    uint16_t m[8][8];
    for (int l = 0; l < 32; ++l) for (int h = 0; h < 2; ++h) m[l / 4][l % 4 * 2 + h] = ((A*)v[l])->x >> 16 * h;
    for (int l = 0; l < 32; ++l) ((A*)v[l])->r = m[l % 4 * 2][l / 4] | (uint32_t)m[l % 4 * 2 + 1][l / 4] << 16;
  });
  return a.r;
}
inline void mbarrier_init(uint32_t at, int count) {
  emu::touch(at, 8, true, emu::thread_id(), "mbarrier.init");
  if (emu::block().barriers.count(at)) emu::fail("barrier initialised twice");
  emu::block().barriers[at] = {count, count};
}
inline void mbarrier_init_fence() {}
template <int kThreads> void sync_threads(int id) { emu::barrier_of(id, kThreads, false); }
template <int kThreads> bool sync_threads_or(int id, bool x) { return emu::barrier_of(id, kThreads, x); }
template <int kRegisters> void give_registers() { emu::collective("setmaxnreg", nullptr, [](void**) {}); }
template <int kRegisters> void take_registers() { give_registers<kRegisters>(); }
inline void proxy_fence() { emu::current->fence = emu::block().epoch; emu::current->unfenced = false; }
// Barriers' memory is read: a barrier initialised by another thread needs synchronisation.
inline void mbarrier_arrive_expect(uint32_t at, int bytes) {
  emu::touch(at, 8, false, emu::thread_id(), "mbarrier.arrive");
  auto& m = *emu::mbarrier(at);
  m.tx += bytes;
  if (m.pending-- == 0) emu::fail("too many arrivals at a barrier");
  emu::complete(m);
}
// What its threads have done before is ordered before what follows a wait for it: as a barrier of the
// block, which it is not, so that some races after it go unnoticed.
inline void mbarrier_arrive(uint32_t at) {
  emu::touch(at, 8, false, emu::thread_id(), "mbarrier.arrive");
  for (auto& f : emu::current->warp->lanes) if (f.unfenced) { emu::fail("gives memory back without a proxy fence"); break; }
  auto& m = *emu::mbarrier(at);
  if (m.pending-- == 0) emu::fail("too many arrivals at a barrier");
  if (m.pending == 0) ++emu::block().epoch;
  emu::complete(m);
}
inline void mbarrier_wait(uint32_t at, int parity) {
  emu::touch(at, 8, false, emu::thread_id(), "mbarrier.wait");
  auto& m = *emu::mbarrier(at);
  auto& b = emu::block();
  for (int i = 0; (m.phase & 1) == parity; ++i) {
    for (size_t k = 0; k < b.bulk.size();)
      if (b.bulk[k].barrier == at) { emu::land(b, b.bulk[k], emu::thread_id()); b.bulk.erase(b.bulk.begin() + k); } else ++k;
    if ((m.phase & 1) != parity) break;
    if (i == 1000) { emu::fail("wait for a barrier without end"); return; }
    emu::current->state = emu::kSpinning;
    emu::to_scheduler();
  }
  emu::current->phases[at] = m.phase;
}
inline void bulk_copy(uint32_t target, const void* source, int bytes, uint32_t barrier) {
  auto& b = emu::block();
  if ((target | (uintptr_t)source | bytes) % 16) emu::fail("misaligned bulk copy");
  emu::mbarrier(barrier);
  for (int i = 0; i < bytes; i += 16) emu::check_readable((const char*)source + i, 16), ++emu::stats.global16;
  for (int i = 0; i < bytes; i += 16) {
    int before[4]; uint32_t warps[4];  // the last ordinary access must have been followed by fences of those who had any
    for (int k = 0; k < 4; ++k) { auto& s = b.shadow[(target & 0xffffff) / 4 + i / 4 + k]; before[k] = s.last; warps[k] = s.warps; }
    emu::touch(target + i, 16, true, emu::thread_id(), "bulk copy's issue");
    for (int k = 0; k < 4; ++k) {
      auto& s = b.shadow[(target & 0xffffff) / 4 + i / 4 + k];
      s.last = before[k]; s.pending++;
      if (s.last >= 0) for (auto& w : b.warps) if (warps[k] >> (&w - &b.warps[0]) & 1) for (auto& f : w.lanes)
        if (f.state != emu::kDone && f.fence < s.last) { emu::fail("bulk copy over memory without a proxy fence"); goto next; }
    }
  }
next:
  memset(b.memory + (target & 0xffffff), 0xff, bytes);
  emu::Bulk c{target, source, bytes, barrier};
  if (emu::options.eager) emu::land(b, c, emu::thread_id()); else b.bulk.push_back(c);
}
template <bool kTrans> void emu_ldmatrix(uint32_t (&r)[4], uint32_t address) {
  struct A { uint32_t address; uint32_t* r; emu::Fiber* f; } a{address, r, emu::current};
  emu::collective(kTrans ? "ldmatrix.trans" : "ldmatrix", &a, [](void** v) {
    uint16_t m[4][8][8]; uint32_t t[32];
    for (int l = 0; l < 32; ++l) { A* a = (A*)v[l]; a->f->unfenced = true; t[l] = a->address; memcpy(m[l / 8][l % 8], emu::touch(a->address, 16, false, emu::thread_id(*a->f), "ldmatrix"), 16); }
    emu::count_conflicts(t, 32, 16, emu::stats.ldmatrix, emu::stats.ldmatrix_extra);
    for (int l = 0; l < 32; ++l) for (int j = 0; j < 4; ++j) {
      int i = l / 4, k = 2 * (l % 4);
      uint16_t lo = kTrans ? m[j][k][i] : m[j][i][k], hi = kTrans ? m[j][k + 1][i] : m[j][i][k + 1];
      ((A*)v[l])->r[j] = lo | (uint32_t)hi << 16;
    }
  });
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) { emu_ldmatrix<false>(r, address); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) { emu_ldmatrix<true>(r, address); }
inline uint32_t pack(BFloat16, float lo, float hi) { return emu::to_bf16(lo) | (uint32_t)emu::to_bf16(hi) << 16; }
inline uint32_t pack(Float16, float lo, float hi) { return emu::to_f16(lo) | (uint32_t)emu::to_f16(hi) << 16; }
inline float exp2_fast(float x) { return exp2f(x); }
inline float2 unpack(BFloat16, uint32_t x) { return {emu::from_bf16(x & 0xffff), emu::from_bf16(x >> 16)}; }
inline float2 unpack(Float16, uint32_t x) { return {emu::from_f16(x & 0xffff), emu::from_f16(x >> 16)}; }
inline void wgmma_begin() { emu::collective("wgmma.fence", nullptr, [](void**) { emu::current->warp->multiplies = true; }); }
enum Runs : int { kFirstRuns = 0, kSecondRuns = 1 };
template <class E, int kColumns> void emu_wgmma(int runs, bool add, float (&c)[kColumns][4], const uint32_t (&a)[4], uint64_t b) {
  struct A { float* c; const uint32_t* a; uint64_t b; int runs; bool add; } arg{&c[0][0], a, b, runs, add};
  emu::collective("wgmma", &arg, [](void** v) {
    emu::Product p{};
    if (!emu::current->warp->multiplies) emu::fail("wgmma before its fence");
    for (int l = 0; l < 32; ++l) {
      A* x = (A*)v[l];
      p.c[l] = x->c; memcpy(p.a[l], x->a, 16);
      if (x->b != ((A*)v[0])->b) emu::fail("wgmma operands differ");
    }
    p.b = ((A*)v[0])->b; p.columns = kColumns; p.bf16 = std::is_same<E, BFloat16>::value; p.runs = ((A*)v[0])->runs; p.add = ((A*)v[0])->add; p.group = emu::current->warp->committed;
    emu::current->warp->products.push_back(p);
  });
}
template <int kRuns, class E, int kColumns> void wgmma(E, float (&c)[kColumns][4], const uint32_t (&a)[4], uint64_t b) { emu_wgmma<E>(kRuns, true, c, a, b); }
template <int kRuns, class E, int kColumns> void wgmma_first(E, float (&c)[kColumns][4], const uint32_t (&a)[4], uint64_t b) { emu_wgmma<E>(kRuns, false, c, a, b); }
inline void wgmma_commit() {
  emu::collective("wgmma.commit", nullptr, [](void**) { auto& w = *emu::current->warp; ++w.committed; w.multiplies = false; });
}
template <int kPending> void wgmma_wait() {
  emu::collective("wgmma.wait", nullptr, [](void**) {
    auto& w = *emu::current->warp;
    auto& cluster = *w.block->cluster;
    const int reader = emu::thread_id(w.lanes[0]);
    size_t done = 0;
    for (auto& p : w.products) {
      if (p.group >= w.committed - kPending) break;
      ++done;
      const auto field = [&](int bit) { return (uint32_t)(p.b >> bit & 0x3fff) << 4; };
      const uint32_t address = (uint32_t)w.block->rank << 24 | field(0), first = field(16), second = field(32);
      if (p.b >> 46 || p.b >> 14 & 3 || p.b >> 30 & 3) emu::fail("wgmma descriptor");
      auto conv = [&](uint32_t x) { return p.bf16 ? emu::from_bf16(x) : emu::from_f16(x); };
      std::vector<float> b(16 * p.columns * 8);
      for (int k = 0; k < 16; ++k) for (int n = 0; n < p.columns * 8; ++n) {
        const uint32_t at = address + k / 8 * first + n / 8 * second + (p.runs ? k % 8 * 16 + n % 8 * 2 : n % 8 * 16 + k % 8 * 2);
        auto& s = w.block->shadow[(at & 0xffffff) / 4];
        if (s.we >= 0 && !s.async && cluster.blocks[s.wt / 4096].warps[s.wt % 4096 / 32].lanes[s.wt % 32].fence < s.we) emu::fail("wgmma reads without a proxy fence");
        uint16_t x; memcpy(&x, emu::touch(at, 2, false, reader, "wgmma"), 2);
        b[k * p.columns * 8 + n] = conv(x);
      }
      float a[16][16];
      for (int l = 0; l < 32; ++l) for (int i = 0; i < 8; ++i)
        a[(i < 2 || (i >= 4 && i < 6)) ? l / 4 : l / 4 + 8][l % 4 * 2 + (i & 1) + (i >= 4 ? 8 : 0)] = conv(p.a[l][i / 2] >> (i & 1) * 16 & 0xffff);
      for (int l = 0; l < 32; ++l) for (int n = 0; n < p.columns; ++n) for (int i = 0; i < 4; ++i) {
        const int row = l / 4 + (i >= 2 ? 8 : 0), col = n * 8 + l % 4 * 2 + (i & 1);
        float sum = p.add ? p.c[l][n * 4 + i] : 0;
        for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k * p.columns * 8 + col];
        p.c[l][n * 4 + i] = sum;
      }
      emu::stats.mma += 2 * p.columns;
    }
    w.products.erase(w.products.begin(), w.products.begin() + done);
  });
}
// 32-bit stores are counted as if whole warps issue them: gathered per lane in program order.
inline void store_shared(uint32_t at, uint32_t x) { memcpy(emu::touch(at, 4, true, emu::thread_id(), "st"), &x, 4); }
inline void store_shared(uint32_t at, float2 x) { memcpy(emu::touch(at, 8, true, emu::thread_id(), "st2"), &x, 8); }
inline void store_shared(uint32_t at, float4 x) { memcpy(emu::touch(at, 16, true, emu::thread_id(), "st4"), &x, 16); }
inline float4 load_shared4(uint32_t at) { float4 x; memcpy(&x, emu::touch(at, 16, false, emu::thread_id(), "ld4"), 16); return x; }
inline float2 load_shared2(uint32_t at) { float2 x; memcpy(&x, emu::touch(at, 8, false, emu::thread_id(), "ld2"), 8); return x; }
inline uint32_t map_cluster(uint32_t at, int rank) { if ((int)(at >> 24) != emu::block().rank) emu::fail("mapa of a remote address"); return (at & 0xffffff) | (uint32_t)rank << 24; }
inline void store_cluster(uint32_t at, float4 x, uint32_t barrier) {
  for (auto& b : emu::block().cluster->blocks) if (b.rank == (int)(at >> 24)) {
    if (!emu::started(b)) emu::fail("store to a block that may not have started");
    if ((at ^ barrier) >> 24 || !b.barriers.count(barrier)) emu::fail("not a barrier of the target's block");
    emu::touch(at, 16, true, emu::thread_id(), "st.async", true);
    for (int k = 0; k < 4; ++k) b.shadow[(at & 0xffffff) / 4 + k].pending++;
    emu::Bulk c{at, nullptr, 16, barrier, x};
    if (emu::options.eager) emu::land(b, c, emu::thread_id()); else b.bulk.push_back(c);
  }
}
inline void cluster_arrive() { emu::cluster_arrive(false); }
inline void cluster_wait() { emu::cluster_wait(); }
}  // namespace dustin

// ---- runtime
typedef int cudaError_t; typedef void* cudaStream_t;
enum { cudaSuccess = 0, cudaFuncAttributeMaxDynamicSharedMemorySize, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared = 100, cudaLaunchAttributeClusterDimension = 4, cudaLaunchAttributeProgrammaticStreamSerialization = 6, cudaDevAttrMultiProcessorCount };
struct cudaLaunchAttribute { int id; struct { struct { unsigned x, y, z; } clusterDim; int programmaticStreamSerializationAllowed; } val; };
struct cudaLaunchConfig_t { dim3 gridDim, blockDim; size_t dynamicSmemBytes; cudaStream_t stream; cudaLaunchAttribute* attrs; unsigned numAttrs; };
inline int cudaGetDevice(int* d) { *d = 0; return 0; }
inline int emu_sms = 132;
inline int cudaDeviceGetAttribute(int* v, int, int) { *v = emu_sms; return 0; }
template <class F> int cudaFuncSetAttribute(F, int what, int value) { if (what == cudaFuncAttributeMaxDynamicSharedMemorySize && value > 232448) { emu::fail("too much shared memory"); return 1; } return 0; }
template <class A> int cudaLaunchKernelEx(const cudaLaunchConfig_t* c, void (*kernel)(const A), A a) {
  unsigned cluster = 1;
  for (unsigned i = 0; i < c->numAttrs; ++i) if (c->attrs[i].id == cudaLaunchAttributeClusterDimension) cluster = c->attrs[i].val.clusterDim.x;
  if (c->gridDim.x % cluster || cluster > 8) emu::fail("cluster size");
  if (cluster != c->gridDim.x) emu::fail("blockIdx.x must be the cluster rank");
  ::gridDim = c->gridDim; emu::block_dim = c->blockDim;
  const size_t stack = 32768;
  size_t bytes = stack * cluster * c->blockDim.x;
  static std::map<size_t, char*> pool;
  char*& stacks = pool[bytes];
  if (!stacks) stacks = (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  for (unsigned z = 0; z < c->gridDim.z; ++z) for (unsigned y = 0; y < c->gridDim.y; ++y)
    emu::launch_cluster(cluster, y, z, c->dynamicSmemBytes, [&] { kernel(a); }, stacks, stack);
  if (emu::errors.empty()) return cudaSuccess;
  fprintf(stderr, "  %s\n", emu::errors.front().c_str());
  return 999;
}
