#include "emu.h"
#include "attention.cu"

struct Case {
  int dim, kv_heads, group, page, splits, variant; bool bf16, hnd; std::vector<int> lens, new_; int table_pad = 0;
  bool rising = false;  // keys grow along the sequence: so do the maxima
};
static std::mt19937 rng(7);
static float normal() { static std::normal_distribution<float> d; return d(rng); }
static uint16_t enc(bool bf, float x) { return bf ? emu::to_bf16(x) : emu::to_f16(x); }
static float dec(bool bf, uint16_t x) { return bf ? emu::from_bf16(x) : emu::from_f16(x); }

static bool run(const Case& c, const char* name) {
  const int R = c.lens.size(), D = c.dim, H = c.kv_heads, G = c.group, Hq = H * G;
  int width = 1, used_pages = 0, maxq = 0;
  for (int l : c.lens) width = std::max(width, (l + c.page - 1) / c.page), used_pages += (l + c.page - 1) / c.page;
  width += c.table_pad;
  std::vector<int32_t> table(R * width), lens(c.lens.begin(), c.lens.end()), starts(R + 1, 0);
  for (int r = 0; r < R; ++r) starts[r + 1] = starts[r] + c.new_[r], maxq = std::max(maxq, c.new_[r]);
  int pages = used_pages + 3;
  std::vector<int> order(pages);
  for (int i = 0; i < pages; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), rng);
  int next = 0;
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < width; ++i)
      table[r * width + i] = i < (c.lens[r] + c.page - 1) / c.page ? order[next++] : (rng() & 1 ? 0x7fffffff - (int)(rng() % 1000) : -(int)(rng() % 2000000000) - 1);
  int64_t run = 2 * D;  // a value follows its key
  int64_t ts = c.hnd ? run : H * run, hs = c.hnd ? c.page * run : run, ps = (int64_t)c.page * H * run;
  const uint16_t nan = c.bf16 ? 0x7fc0 : 0x7e00;
  size_t cache_elems = pages * ps;
  uint16_t* cache = (uint16_t*)aligned_alloc(64, (cache_elems * 2 + 63) / 64 * 64);
  size_t total = cache_elems;
  std::fill(cache, cache + total, nan);
  uint16_t *K = cache, *V = cache + D;
  emu::readable.clear(); emu::small_readable.clear();
  emu::readable.push_back({(uintptr_t)cache, (uintptr_t)(cache + total), std::vector<bool>(total / 8 + 1), std::vector<bool>(total / 8 + 1)});
  for (int r = 0; r < R; ++r) for (int t = 0; t < c.lens[r]; ++t) for (int h = 0; h < H; ++h) {
    int64_t o = table[r * width + t / c.page] * ps + t % c.page * ts + h * hs;
    for (int d = 0; d < D; ++d) K[o + d] = enc(c.bf16, normal() * (c.rising ? 0.2f + 5.0f * t / c.lens[r] : 1)), V[o + d] = enc(c.bf16, normal());
    for (int d = 0; d < D; d += 8) {
      emu::readable[0].ok[(K + o + d - cache) / 8] = emu::readable[0].ok[(V + o + d - cache) / 8] = true;
      emu::readable[0].early[(K + o + d - cache) / 8] = emu::readable[0].early[(V + o + d - cache) / 8] = t < c.lens[r] - c.new_[r];
    }
  }
  int T = starts[R] + 3;
  int64_t qs = (int64_t)(Hq + 2 * H) * D, qh = D, os = (int64_t)Hq * (D + 8) + 16, oh = D + 8;
  uint16_t* Q = (uint16_t*)aligned_alloc(64, (T * qs * 2 + 63) / 64 * 64);
  for (int64_t i = 0; i < T * qs; ++i) Q[i] = nan;
  emu::readable.push_back({(uintptr_t)Q, (uintptr_t)(Q + T * qs), std::vector<bool>(T * qs / 8 + 1), {}});
  for (int t = 0; t < starts[R]; ++t) for (int h = 0; h < Hq; ++h) for (int d = 0; d < D; ++d) {
    Q[t * qs + h * qh + d] = enc(c.bf16, normal() * (h % 3 == 0 ? 4 : 1));
    emu::readable[1].ok[(t * qs + h * qh + d) / 8] = true;
  }
  for (int r = 0; r < R; ++r) {  // only the entries of the sequence may be read, and of rows with queries
    uintptr_t b = (uintptr_t)&table[r * width];
    if (c.new_[r]) emu::small_readable.push_back({b, b + 4 * ((c.lens[r] + c.page - 1) / c.page)});
  }
  emu::early_ok = c.variant & 16;
  emu::table_range = {(uintptr_t)table.data(), (uintptr_t)(table.data() + table.size())};
  emu::small_readable.push_back({(uintptr_t)lens.data(), (uintptr_t)(lens.data() + R)});
  emu::small_readable.push_back({(uintptr_t)starts.data(), (uintptr_t)(starts.data() + R + 1)});
  uint16_t* O = (uint16_t*)aligned_alloc(64, (T * os * 2 + 63) / 64 * 64);
  const float scale = 1.0f / std::sqrt((float)D);
  bool ok = true;
  double worst = 0;
  for (int launch = 0; launch < 2; ++launch) {
    emu::options.policy = launch ? 2 + (rng() & 1) : rng() & 1; emu::options.seed = rng(); emu::options.eager = rng() % 3 == 0;
    std::fill(O, O + T * os, nan);
    int rc = dustin_paged_attention(O, Q, K, V, table.data(), lens.data(), starts.data(), qs, qh, os, oh, ps, ts, hs, width, R, H, G, D, c.page, maxq, c.splits, c.bf16, c.variant, scale, nullptr);
    if (rc) { printf("%s: rc %d\n", name, rc); ok = false; }
    std::vector<bool> written(T * os);
    for (int r = 0; r < R; ++r) {
      double err = 0, norm = 0;
      int q = c.new_[r], L = c.lens[r];
      for (int i = 0; i < q; ++i) for (int h = 0; h < Hq; ++h) {
        int see = L - q + 1 + i;
        std::vector<double> w(std::max(see, 0)), o(D, 0.0);
        double top = -1e300, sum = 0;
        auto at = [&](int t) { return table[r * width + t / c.page] * ps + t % c.page * ts + h / G * hs; };
        const uint16_t* qp = Q + (starts[r] + i) * qs + h * qh;
        for (int t = 0; t < see; ++t) { double x = 0; int64_t a = at(t); for (int d = 0; d < D; ++d) x += (double)dec(c.bf16, qp[d]) * dec(c.bf16, K[a + d]); w[t] = x * scale; top = std::max(top, w[t]); }
        for (int t = 0; t < see; ++t) { w[t] = std::exp(w[t] - top); sum += w[t]; int64_t a = at(t); for (int d = 0; d < D; ++d) o[d] += w[t] * dec(c.bf16, V[a + d]); }
        for (int d = 0; d < D; ++d) {
          double want = see > 0 ? o[d] / sum : 0;
          int64_t p = (starts[r] + i) * os + h * oh + d;
          double got = dec(c.bf16, O[p]);
          written[p] = true;
          if (!(got == got)) { ok = false; got = 1e9; }
          err += (got - want) * (got - want); norm += want * want;
          if (see <= 0 && got != 0) ok = false;
        }
      }
      if (q && norm > 0) { double e = std::sqrt(err / norm); worst = std::max(worst, e); if (!(e < (c.bf16 ? 2.8e-3 : 3.5e-4))) ok = false; }
    }
    for (int64_t i = 0; i < T * os; ++i) if (!written[i] && O[i] != nan) { printf("%s: stray write\n", name); ok = false; break; }
  }
  if (!emu::errors.empty()) { ok = false; for (auto& e : emu::errors) printf("  %s\n", e.c_str()); emu::errors.clear(); }
  static double worst_all[2];
  worst_all[c.bf16] = std::max(worst_all[c.bf16], worst);
  printf("%s %s D%d G%d H%d page %d splits %d variant %d %s%s R%d maxq %d: worst %.2e (all bf16 %.2e f16 %.2e)\n", ok ? "ok  " : "FAIL", name, D, G, H, c.page, c.splits, c.variant, c.bf16 ? "bf16" : "fp16", c.hnd ? " hnd" : "", R, maxq, worst, worst_all[1], worst_all[0]);
  fflush(stdout);
  free(cache); free(Q); free(O);
  return ok;
}

int main(int argc, char** argv) {
  std::string mode = argc > 1 ? argv[1] : "quick";
  int failed = 0, n = 0;
  auto go = [&](Case c, const char* name) { failed += !run(c, name); ++n; };
  const std::vector<int> lens = {0, 1, 5, 40, 64, 65, 533, 700, 3, 2100}, fresh = {2, 1, 5, 0, 6, 5, 5, 1, 5, 4};
  if (mode == "quick") {
    go({128, 1, 8, 16, 1, 1, true, false, {533}, {5}}, "one");
    go({128, 1, 8, 16, 2, 2, true, false, {533}, {5}}, "two");
    go({64, 2, 7, 1, 4, 0, false, false, {40, 700}, {1, 6}}, "draft");
  } else if (mode == "mutants") {
    for (int v : {1, 2, 17}) {
      go({128, 1, 8, 16, 1, v, true, false, {300, 0, 40, 700}, {5, 0, 3, 5}, 0, true}, "one");
      go({64, 1, 7, 1, 2, v, false, false, {40, 400, 64}, {1, 6, 6}, 2, true}, "two");
      go({64, 1, 7, 1, 4, v, true, false, {2000, 3}, {5, 2}, 0, true}, "four");
      for (int again = 0; again < 3; ++again) {  // other orders
        go({128, 1, 8, 16, 2, v, true, false, {200, 1100}, {5, 5}}, "parts");
        go({64, 1, 7, 16, 2, v, true, false, {200, 1000}, {6, 6}}, "parts");
      }
    }
  } else if (mode == "stats1") {
    emu::stats = {};
    for (int v = 1; v <= 2; ++v) for (int dim : {64, 128}) for (int q : {1, 2, 5, 6}) go({dim, 1, 8, 16, 1, v, true, false, {100}, {q}}, "stats");
    printf("   ldmatrix %lu phases, %lu extra\n", emu::stats.ldmatrix, emu::stats.ldmatrix_extra);
  } else if (mode == "huge") {
    go({64, 1, 7, 16, 8, 0, true, false, {130000, 5}, {6, 1}}, "huge");
    go({128, 1, 8, 32, 4, 0, false, false, {30000, 0}, {5, 5}}, "huge");
    for (int v = 1; v <= 2; ++v) {
      go({128, 8, 8, 1, 1, v, true, false, {533, 533, 533}, {5, 5, 5}}, "72b");
      go({128, 8, 8, 1, 4, v, true, false, {533, 520, 533}, {5, 5, 5}}, "72b");
      go({64, 2, 7, 16, 4, v, true, false, {533, 533, 533}, {6, 6, 6}}, "draft");
    }
  } else {
    int part = atoi(argv[2]), parts = atoi(argv[3]), index = 0;
    for (int bf = 0; bf < 2; ++bf) for (int dim : {64, 128}) for (int group : {1, 4, 7, 8}) for (int page : {1, 16, 32})
      for (int splits : {1, 2, 4, 8}) for (int variant = 0; variant <= 2; ++variant) {
        ++index;
        if (splits == 8 && variant > 1) continue;
        if (mode == "some" && (index * 7919) % 6) continue;
        if (index % parts != part) continue;
        std::vector<int> l = lens;
        for (int& x : l) if (index % 2 && x > 5) x = 6 + rng() % 1500;
        go({dim, index % 5 == 0 ? 2 : 1, group, page, splits, variant + (index % 3 ? 0 : 16), bf == 1, index % 3 == 0, l, fresh, index % 7, index / 2 % 3 == 0}, "sweep");
      }
    if (part == 0) for (int q = 1; q <= 8; ++q) for (int g : {1, 3, 6, 8}) {
      go({128, 1, g, 16, q % 2 + 1, q % 3, true, false, {q, q + 1, 129, 64 + q}, {q, q, q, q}}, "queries");
      go({64, 1, g, 16, 1 << q % 4, (q + 2) % 3, false, false, {q, q + 1, 129, 64 + q}, {q, q, q, q}}, "queries");
    }
    if (part == 0) {
      go({128, 1, 8, 16, 8, 0, true, false, {20000}, {5}}, "long");
      go({64, 1, 7, 1, 1, 0, true, false, {9000, 1025, 2048}, {6, 1, 3}}, "long");
      for (int v = 0; v <= 2; ++v) go({128, 2, 8, 2, 2, v, true, true, {3000, 511, 513}, {8, 7, 8}, 0, true}, "long");
    }
  }
  printf("%d cases, %d failed\n", n, failed);
  return failed != 0;
}
