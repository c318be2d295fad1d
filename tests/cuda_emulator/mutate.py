"""Breaks the kernel in one place at a time and tells whether test.cpp notices. Run from here."""

import os
import pathlib
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor

HERE = pathlib.Path(__file__).resolve().parent
SOURCE = (HERE / "../../csrc/cuda/attention.cu").read_text()


def swap(old: str, new: str, nth: int = 0) -> str:
    parts = SOURCE.split(old)
    assert len(parts) > nth + 1, old
    return old.join(parts[: nth + 1]) + new + old.join(parts[nth + 1 :])


MUTANTS = {
    "no wait for keys": swap("mbarrier_wait(order.here(slot, warp), c / C::kSlots & 1);", ""),
    "wrong parity": swap("c / C::kSlots & 1);", "0);"),
    "too few bytes expected": swap(
        "in_group * C::kTokenBytes);", "in_group * C::kTokenBytes - 16);"
    ),
    "no barrier after barriers": swap(
        "  __syncthreads();  // these are there", "  // these are there"
    ),
    "no wait for queries": swap("  cp_async_wait<0>();\n", ""),
    "no barrier for queries": swap(
        "  sync_threads<C::kComputing>(kComputers);  // the queries", "  // the queries"
    ),
    "no barrier for maxima": swap(
        "        sync_threads<C::kComputing>(kComputers);  // maxima", "        //"
    ),
    "no barrier for P": swap(
        "if (!sync_threads_or<C::kComputing>(kComputers, largest > kLargeWeight && !exchange)) "
        "break;",
        "break;",
    ),
    "no wait for the slot": swap(
        "if (c >= C::kSlots) mbarrier_wait(order.left(slot), c / C::kSlots - 1 & 1);", ""
    ),
    "wrong parity for the slot": swap("c / C::kSlots - 1 & 1);", "c / C::kSlots & 1);"),
    "slot left early": swap("if (lane == 0) mbarrier_arrive(order.left(slot));", "").replace(
        "    // 3. Values of all groups",
        "    if (c + C::kSlots < chunks && lane == 0) mbarrier_arrive(order.left(slot));\n    //",
    ),
    "no fence for the slot": swap("      proxy_fence();\n", ""),
    "no fence for P": swap("      proxy_fence();  // P", "      // P"),
    "which block, in a descriptor": swap("(address & 0x3ffff) >> 4", "address >> 4"),
    "the next block's tile": swap("tile - ((to *", "tile - (((to + 1) *"),
    "P over another group's keys": swap("my_weights + slot", "my_weights + C::kGroupBytes + slot"),
    "no fence for queries": swap("  proxy_fence();  // queries", "  // queries"),
    "no wait for logits": swap("    wgmma_wait<0>();\n    if (warp", "    if (warp"),
    "no wait for outputs": swap("    wgmma_wait<1>();\n", "    wgmma_wait<2>();\n"),
    "large weights kept": swap("largest > kLargeWeight && !exchange", "false"),
    "no shrinking of sums": swap("sum[i][0] *= shrink.x, sum[i][1] *= shrink.y;", ""),
    "no shrinking of outputs": swap("*= j % 2 ? shrink.y : shrink.x;", "*= 1;"),
    "no mask": swap("s[i][j] = -INFINITY;", "s[i][j] *= 1;"),
    "no zeros past the end": swap("i < kGroup * (C::kDim / 8); i += 32)", "i < 0; i += 32)"),
    "no cluster wait": swap(
        "to the same threads.\n    cluster_wait();\n", "to the same threads.\n"
    ),
    "copiers do not arrive": swap("if (splits > 1) cluster_arrive(), cluster_wait();", ""),
    "early cluster arrival": swap(
        "  take_registers<C::kRegisters>();\n",
        "  take_registers<C::kRegisters>();\n  if (splits > 1) cluster_arrive();\n",
    ).replace("    if (last && splits > 1) cluster_arrive();\n", ""),
    "last slot not 0": swap("(C::kSlots - (chunks - 1) % C::kSlots) % C::kSlots;", "0;"),
    "no wait for parts": swap("    mbarrier_wait(shared + C::kPartBarrier, 0);", "    //"),
    "fewer parts expected": swap(
        "(C::kRows * 8 + own_tiles * C::kPartTile)", "(own_tiles * C::kPartTile)"
    ),
    "no wait for the previous kernel": swap("if (!a.early) wait_for_previous_kernel();", ""),
    "no wait before queries": swap(
        "  take_registers<C::kRegisters>();\n  wait_for_previous_kernel();\n",
        "  take_registers<C::kRegisters>();\n",
    ),
    "no wait before new tokens": swap(
        "if (begin + in_group > old_len) wait_for_previous_kernel();", ""
    ),
    "a new token taken for an old one": swap(
        "old_len = seq_len - queries;", "old_len = seq_len - queries + 1;"
    ),
    "exit before the wait": swap("    wait_for_previous_kernel();\n    return;\n", "    return;\n"),
    "copiers exit before the wait": swap(
        "    wait_for_previous_kernel();  // as everybody does\n", ""
    ),
    "phases of absent groups": swap("if (chunk == 0 && lane == 0) mbarrier", "if (false) mbarrier"),
    "speculation without bounds": swap(
        "index < a.table_stride ? load_speculative", "index < (1 << 20) ? load_speculative"
    ),
    "copies past the end": swap("min(seq_len - begin, kGroup)", "seq_len > begin ? kGroup : 0"),
    "old table entries": swap("if (held == i) pages[i] = next;", "if (false) pages[i] = next;"),
    "even pitch": swap("kTokenPitch = kTokenBytes + 16", "kTokenPitch = kTokenBytes"),
}


def run(item: tuple[str, str]) -> str:
    name, text = item
    mode = "stats1" if name == "even pitch" else "mutants"
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "attention.cu").write_text(text)
        test = pathlib.Path(folder, "test.cpp")
        test.write_text((HERE / "test.cpp").read_text())
        done = subprocess.run(
            f"g++ -std=c++17 -O1 -w -mf16c -I {HERE} "
            f"-I {HERE}/../../csrc/cuda {test} -o {folder}/test && "
            f"timeout 60 {folder}/test {mode}",
            shell=True,
            capture_output=True,
            text=True,
        )
    lines = (done.stdout + done.stderr).splitlines()
    caught = done.returncode not in (0, 2) and "error:" not in done.stderr
    if mode == "stats1":
        caught = " 0 extra" not in next((x for x in lines if "ldmatrix" in x), " 0 extra")
    why = next((line.strip() for line in lines if line.startswith("  ")), "")
    return f"{'caught' if caught else 'MISSED'} {name}: {lines[-1] if lines else ''} | {why[:90]}"


if __name__ == "__main__":
    chosen = [x for x in MUTANTS.items() if os.environ.get("ONLY", "") in x[0]]
    with ThreadPoolExecutor(2) as pool:
        for line in pool.map(run, chosen):
            print(line, flush=True)
