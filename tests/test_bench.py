# SPDX-License-Identifier: Apache-2.0
"""The benchmarks: what can be run without a GPU, and one engine run end to end on the CPU."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dustin_vllm.bench import engine, presets

# ---- presets and the command line ---------------------------------------------------------


def test_presets_write_configs_that_transformers_reads(tmp_path: Path) -> None:
    from transformers import AutoConfig

    target, draft, stock = presets.write_models(presets.PRESETS["72b"], tmp_path, layers=20)
    assert stock == draft
    config = AutoConfig.from_pretrained(target)
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (20, 8192, 152064)
    assert config.hidden_size // config.num_attention_heads == 128
    config = AutoConfig.from_pretrained(draft)
    assert (config.num_hidden_layers, config.num_attention_heads) == (24, 14)
    assert config.vocab_size == 152064  # the target's, or stock vLLM refuses the draft
    assert config.tie_word_embeddings
    _, draft, _ = presets.write_models(presets.PRESETS["7b"], tmp_path / "real", draft_vocab=151936)
    assert json.loads((draft / "config.json").read_text())["vocab_size"] == 151936


def test_shapes_and_scoring_heads() -> None:
    assert presets.parse_shape("64/8x128", 80) == presets.ModelShape(80, 64, 8, 128)
    assert presets.parse_scoring("3x4") == (3, 4)
    for wrong in ("64x8x128", "64/7x128", "0/0x0", "a/bxc"):
        with pytest.raises(ValueError, match="shape"):
            presets.parse_shape(wrong, 1)
    for wrong in ("3", "0x4", "ax1"):
        with pytest.raises(ValueError, match="scoring heads"):
            presets.parse_scoring(wrong)
    # Four heads of a 64/8 target read four different key heads.
    assert len({head // 8 for head in presets.spread(4, 64)}) == 4
    layers = presets.scoring_layers((3, 4), presets.QWEN_05B)
    assert [entry["layer"] for entry in layers] == [4, 12, 20]
    assert layers[0]["heads"] == [0, 3, 7, 10]


def test_attention_without_a_gpu_says_what_it_needs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dustin_vllm.bench.cli", "attention", "--batch", "1"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 1
    assert "needs a CUDA device" in done.stderr


# ---- attention, with a stand-in for FlashAttention ----------------------------------------

BREAK = 99  # a value of num_splits that the stand-in gets wrong

# Run by a fresh interpreter: Triton decides at import whether its functions are interpreted.
ATTENTION_ON_CPU = """
import importlib.util
import sys
import types
import torch
from dustin_vllm.bench import attention as bench
from dustin_vllm.bench import kernels
from dustin_vllm.bench.presets import ModelShape

def attend(call, num_splits):
    def run(cache):
        keys, values = call.views(cache)
        rows, width, heads, dim = call.queries.shape
        for row in range(rows):
            length = int(call.lens[row])
            pages = call.table[row, : -(-length // call.page)].long()
            k = keys[pages].flatten(0, 1)[:length].float()
            v = values[pages].flatten(0, 1)[:length].float()
            group = heads // k.shape[1]
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            logits = torch.einsum("qhd,lhd->hql", call.queries[row].float(), k) * dim**-0.5
            last = torch.arange(width)[:, None] + length - width
            logits = logits.masked_fill(torch.arange(length)[None] > last, float("-inf"))
            call.out[row] = torch.einsum("hql,lhd->qhd", logits.softmax(-1), v).to(call.out.dtype)
        if num_splits == BREAK:
            call.out[0, 0] = 0
    return run

# Of xformers what the benchmark uses, by what its documentation says of shapes.
class Mask:
    def __init__(self, queries, lens, tables, page, *, device):
        assert len(queries) == len(lens) == len(tables) and tables.shape[1] * page >= max(lens)
        self.queries, self.lens, self.tables, self.page = queries, lens, tables, page

    from_seqlens = classmethod(lambda cls, *args, **kw: cls(*args, **kw))

def get_operator(splits, *, block_n):
    assert block_n == 16
    return types.SimpleNamespace(
        not_supported_reasons=lambda inputs: [kernels.NOT_BUILT],
        apply=lambda inputs, needs_gradient: (forward(**vars(inputs), op=splits), None),
    )

def make_inputs(query, key, value, mask, *, scale):
    return types.SimpleNamespace(query=query, key=key, value=value, mask=mask, scale=scale)

def forward(query, key, value, mask, *, scale, op):
    assert query.ndim == key.ndim == value.ndim == 5 and key.shape[2:] == query.shape[2:]
    assert key.stride(3) == value.stride(3) == 0  # one key head for a group
    out, begin = torch.empty_like(query), 0
    for width, length, pages in zip(mask.queries, mask.lens, mask.tables):
        place = (pages[:, None].long() * mask.page + torch.arange(mask.page)).flatten()[:length]
        q = query[0, begin : begin + width].float()
        logits = torch.einsum("qghd,lghd->ghql", q, key[0, place].float()) * scale
        last = torch.arange(width)[:, None] + length - width
        logits = logits.masked_fill(torch.arange(length)[None] > last, float("-inf"))
        mixed = torch.einsum("ghql,lghd->qghd", logits.softmax(-1), value[0, place].float())
        out[0, begin : begin + width] = mixed * (0 if op == BREAK else 1)
        begin += width
    return out

xformers, ops, fmha = (types.ModuleType(n) for n in ("xformers", "ops", "fmha"))
xformers.ops, ops.fmha, fmha.Inputs = ops, fmha, make_inputs
fmha.attn_bias = types.SimpleNamespace(PagedBlockDiagonalCausalWithOffsetPaddedKeysMask=Mask)
fmha.triton_splitk = types.SimpleNamespace(FwOp=types.SimpleNamespace(get_operator=get_operator))

def install(module):
    sys.modules["xformers"] = module
    sys.modules["xformers.ops"] = module and ops
    sys.modules["xformers.ops.fmha"] = module and fmha

def once(record, calls, seconds, poison=None):
    poison and poison()
    record()
    return bench.Timing(10.0, 9.0, 11.0)

bench.time_graph, bench.SMALL_PASSES = once, 1
peer = kernels.Kernel(kernels.xformers_attention, (1, 4), peer=True)
bench.DENSE_KERNELS = {"flash": kernels.Kernel(attend, (0,)), "xformers": peer}
bench.KERNELS = {
    "flash": kernels.Kernel(attend, (1,)),
    "triton": kernels.Kernel(kernels.triton_attention, (1, 2)),
    "xformers": peer,
}
install(xformers)
options = bench.AttentionOptions(
    ModelShape(4, 8, 2, 32), ModelShape(2, 4, 2, 16), (1, 2), (2, 2), 2, (2,), 210, (128,),
    sinks=4, recent=32,
)
bench.check_options(options)
batch = bench.make_batch(options, 2, 2, 1, torch.device("cpu"))
result = bench.measure(batch, 1e12)
"""

SOUND = """
assert not bench.refusal([result]), bench.refusal([result])
assert set(result["errors"]) == {
    "dense, flash, num_splits 0", "dense one query, flash, num_splits 0",
    "history scores", "lookahead scores",
    *(
        f"sparse, {unit} 128, {kernel}"
        for unit in ("block", "token")
        for kernel in ("flash, num_splits 1", "triton, num_splits 1", "triton, num_splits 2")
    ),
}, result["errors"]
assert [s["kv_tokens"] for s in result["sparse"]] == [
    sum(128 + n % unit + 3 for n in batch.contexts.tolist()) for unit in (16, 1)
]
block, token = result["sparse"]
for timed in (result["dense"]["peers"], result["dense_one_query"]["peers"], block["kernels"]):
    assert set(timed["xformers"].get("by_splits", ())) == {"1", "4"}, timed
    assert 0 < timed["xformers"]["error"] < bench.TOLERANCE
assert 0 < block["kernels"]["triton"]["error"] <= block["error"] < bench.TOLERANCE
assert "16 tokens or more, not 1" in token["kernels"]["xformers"]["unavailable"]
assert {block["kernel"], token["kernel"]} <= {"flash", "triton"}
bench.add_ratios([result])
assert result["sparse"][0]["speedup"] == 1.0
assert abs(result["sparse"][0]["speedup_with_scoring"] - 10 / 12.5) < 1e-9
result["dense"]["apart_us"] = 9.0
result["sparse"][0]["kernels"]["flash"]["apart_us"] = 0.5
result["sparse"][0]["kernels"]["triton"]["apart_us"] = 2.0
bench.add_ratios([result])
assert abs(result["sparse"][0]["speedup_apart"] - 9 / (0.5 + 2.5)) < 1e-9
table = bench.make_table(options, [result])
assert table.row_count == 2
peers = next(column for column in table.columns if column.header == "xformers")
assert list(peers.cells) == ["10.0", "–"]
assert len(bench.detail_lines(result)) == 4
if importlib.util.find_spec("matplotlib"):
    bench.plot(options, [result], PLOT)
"""

# Keys of one head lie together in an HND cache; what is computed is the same.
HND = """
import dataclasses
other = dataclasses.replace(options, layout="HND", granularities=("block",))
other = bench.make_batch(other, 2, 2, 1, torch.device("cpu"))
assert other.caches[0].shape == batch.caches[0].shape
assert other.caches[0].stride(2) > other.caches[0].stride(1)
found = bench.measure(other, 1e12)
assert not bench.refusal([found]), bench.refusal([found])
(block,) = found["sparse"]
assert "HND" in block["kernels"]["xformers"]["unavailable"]
assert 0 < block["kernels"]["triton"]["error"] < bench.TOLERANCE
assert abs(found["sparse"][0]["error"]) < bench.TOLERANCE
"""

REFUSAL = """
call = bench.dense_call(batch, 3)
expected = bench.expected_outputs(batch, batch.caches[-1], 3, 16, None)
wrong = {"batch": 2, "errors": {}, "overlaps": {"sparse": 0.5}}
broken = kernels.Kernel(attend, (1, BREAK))
bench.time_attention(batch, call, broken, expected, "dense", wrong["errors"])
lines = bench.refusal([result, wrong])
assert len(lines) == 2 and f"num_splits {BREAK}" in lines[0] and "50.0%" in lines[1], lines
call.out[1, 2, 3, 4] = torch.nan
assert bench.output_error(batch, call.out, expected) == float("inf")
"""

# What a peer cannot do or gets wrong is said, and refuses nothing; in a kernel of ours it does.
PEERS = """
def fail(call, num_splits):
    raise RuntimeError("no such device")

def of(make, splits=(1,), peer=True):
    errors = {}
    kernel = kernels.Kernel(make, splits, peer)
    call = bench.dense_call(batch, 3)
    timed = bench.time_attention(batch, call, kernel, expected, "dense", errors)
    assert not errors or not peer
    return timed

assert of(fail) == {"unavailable": "RuntimeError: no such device"}
assert "wrong output" in of(kernels.xformers_attention, (1, BREAK))["unavailable"]
assert of(kernels.xformers_attention)["us"] == 10.0
install(None)
assert "ModuleNotFoundError" in of(kernels.xformers_attention)["unavailable"]
try:
    of(fail, peer=False)
except RuntimeError:
    pass
else:
    raise AssertionError("a failure of a kernel in use was swallowed")
"""


def test_apart_is_what_a_call_adds_behind_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from dustin_vllm.bench import attention

    ran: list[int] = []

    def time_graph(record, calls, seconds):
        before = len(ran)
        record()
        assert calls == 6
        return attention.Timing(2.0 + (len(ran) - before) / calls, 0, 0)

    monkeypatch.setattr(attention, "time_graph", time_graph)
    batch = SimpleNamespace(
        caches=[1, 2], contexts=torch.zeros(1), options=SimpleNamespace(seconds=0.1)
    )
    assert attention.time_apart(batch, ran.append, 3) == 1.0
    assert ran == [1, 2] * 3


def test_attention_benchmark_checks_outputs(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    plot = tmp_path / "plot.png"
    given = f"BREAK, PLOT = {BREAK}, {str(plot)!r}"
    done = subprocess.run(
        [sys.executable, "-c", "\n".join((given, ATTENTION_ON_CPU, SOUND, HND, REFUSAL, PEERS))],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert plot.exists() == (importlib.util.find_spec("matplotlib") is not None)


# ---- engine -------------------------------------------------------------------------------

FLASH = "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<...>>>"


def test_union_counts_overlaps_once() -> None:
    assert engine.union_length([]) == 0
    assert engine.union_length([(5, 6), (0, 2), (1, 3), (1.5, 1.7), (3, 4)]) == 5


@pytest.mark.parametrize(
    ("name", "category"),
    [
        (FLASH, "attention"),
        ("void flash::prepare_varlen_num_blocks_kernel<1, true>(int)", "attention"),
        ("void flash::FlashAttnFwdCombine<...>", "attention"),
        ("_attention_kernel", "attention"),
        ("void dustin::(anonymous namespace)::attention<dustin::...>", "attention"),
        ("void vllm::reshape_and_cache_flash_kernel<...>", "kv write"),
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNN", "gemm"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<...>>", "gemm"),
        ("_split_probabilities_kernel", "scoring"),
        ("_select_kernel", "selection"),
        ("index_select_kernel", "other"),
        ("_compact_kernel", "compaction"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("triton_poi_fused_silu_0", "other"),
        ("rejection_greedy_sample_kernel", "sampling"),
    ],
)
def test_kernels_are_classified_by_name(name: str, category: str) -> None:
    assert engine.classify(name) == category


def event(name: str, start: float, length: float, cat: str = "kernel") -> dict[str, object]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length}


def test_breakdown_splits_draft_from_target_at_the_markers() -> None:
    marker = f"at::cuda::(anonymous namespace)::{engine.MARKER}(long)"
    trace = {
        "traceEvents": [
            event("cudaLaunchKernel", 0, 500, "cuda_runtime"),
            event(marker, 100, 1),
            event("nvjet_draft", 110, 20),
            event("_aggregate_kernel", 130, 5),
            event(FLASH, 135, 10),
            event(marker, 200, 1),
            event(FLASH, 0, 50),
            event("nvjet_target", 40, 20),  # overlaps
            event("Memcpy DtoH", 201, 4, "gpu_memcpy"),
        ]
    }
    intervals = engine.trace_intervals(trace)
    result = engine.breakdown(intervals, steps=2)
    assert result["categories_ms"] == pytest.approx(
        {
            "target attention": 0.025,
            "draft gemm": 0.010,
            "target gemm": 0.010,
            "draft attention": 0.005,
            "scoring": 0.0025,
            "target copies": 0.002,
        }
    )
    assert result["busy_ms"] == pytest.approx((60 + 35 + 4) / 2000)
    assert result["draft_busy_ms"] == pytest.approx(35 / 2000)
    assert result["draft_span_ms"] == pytest.approx(99 / 2000)
    assert result["kernels"] == 3
    # A lost marker must not turn the target's kernels into the draft's.
    result = engine.breakdown([i for i in intervals if i.start != 200], steps=2)
    assert result["draft_busy_ms"] is None
    assert "draft gemm" not in result["categories_ms"]


def test_dense_verification_is_refused() -> None:
    assert engine.sparse_refusal({"verification_rows": 100, "sparse_rows": 99}) is None
    why = engine.sparse_refusal(
        {"verification_rows": 100, "sparse_rows": 98, "dense_rows": {"short_context": 2}}
    )
    assert why is not None
    assert "98 of 100" in why
    assert "short_context" in why
    assert engine.sparse_refusal({}) is not None
    below = {"verification_rows": 100, "sparse_rows": 0, "dense_rows": {"short_context": 100}}
    assert engine.sparse_refusal(below) is not None
    assert engine.sparse_refusal(below, gated=True) is None


def test_jobs_run_the_same_models_and_prompts(tmp_path: Path) -> None:
    options = engine.EngineOptions(
        preset="72b", layers=20, batches=(2,), contexts=(1024,), steps=8, dustin={"recent": 32}
    )
    plain, stock, dustin = engine.make_jobs(options, tmp_path, on_cpu=False)
    assert plain.cells == stock.cells == dustin.cells
    (cell,) = plain.cells
    assert cell.prompts[0] != cell.prompts[1]
    assert [len(prompt) for prompt in cell.prompts] == [896, 896]
    assert plain.max_model_len >= 896 + cell.max_tokens
    arguments = [engine.engine_arguments(job, on_cpu=False) for job in (plain, stock, dustin)]
    assert "speculative_config" not in arguments[0]
    assert arguments[1]["speculative_config"] == {
        "method": "draft_model",
        "model": str(tmp_path / "draft"),
        "num_speculative_tokens": 4,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 4.0,
    }
    added = {name: arguments[2].pop(name) for name in ("attention_backend", "additional_config")}
    assert arguments[2] == arguments[1]
    settings = added["additional_config"]["dustin"]
    assert (settings["budget"], settings["recent"]) == (512, 32)
    assert [entry["layer"] for entry in settings["target_heads"]] == [10]
    assert not arguments[0]["enable_prefix_caching"]

    paper = engine.EngineOptions(preset="paper-72b", contexts=(1024,), tensor_parallel=4)
    _, stock, dustin = engine.make_jobs(paper, tmp_path / "paper", on_cpu=False)
    heads = [
        json.loads((Path(job.draft) / "config.json").read_text())["num_attention_heads"]
        for job in (stock, dustin)
    ]
    assert heads == [16, 14]  # stock vLLM wants heads that the ranks divide

    pairs = engine.EngineOptions(cells=((2, 1024), (1, 2048)))
    cells = engine.make_jobs(pairs, tmp_path / "cells", on_cpu=False)[0].cells
    assert [(cell.batch, cell.context) for cell in cells] == [(2, 1024), (1, 2048)]
    assert engine.label(pairs, {"mode": "plain", "budget": None, "batch": 1, "context": 2048}) == (
        "plain, batch 1, context 2048"
    )

    shared = engine.make_jobs(
        engine.EngineOptions(batches=(3,), contexts=(1024,), share_prompt=True),
        tmp_path / "b",
        False,
    )[0]
    (cell,) = shared.cells
    assert len({tuple(prompt[:-32]) for prompt in cell.prompts}) == 1
    assert len({tuple(prompt) for prompt in cell.prompts}) == 3
    assert engine.engine_arguments(shared, False)["enable_prefix_caching"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": Path("somewhere")}, "together"),
        ({"acceptance": 3.0}, "CPU"),
        ({"text": Path("text")}, "--model"),
        ({"contexts": (1024, 130000), "steps": 1000}, "positions"),
        ({"batches": (2000,)}, "at most"),
        ({"model": Path("nowhere"), "draft": Path("nowhere")}, "nowhere"),
    ],
)
def test_impossible_options_are_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(engine.BenchError, match=message):
        engine.make_jobs(engine.EngineOptions(**changes), tmp_path, on_cpu=True)


def test_table_and_plot_leave_out_what_was_not_measured(tmp_path: Path) -> None:
    result = {
        "tokens_per_second": 100.0,
        "ms_per_step": 10.0,
        "acceptance_length": 1.0,
        "batch": 2,
        "context": 20,
        "context_at_start": 10,
        "context_at_end": 20,
        "stats": {},
        "profile": None,
    }
    profile = {"busy_ms": 5.0, "categories_ms": {"draft gemm": 3.0, "target gemm": 2.0}}
    results = {
        "plain": {**result, "mode": "plain"},
        "stock": {**result, "mode": "stock", "profile": profile},
        "plain, batch 1": {**result, "mode": "plain", "batch": 1, "tokens_per_second": 50.0},
    }
    engine.add_ratios(results)
    assert results["stock"]["over_plain"] == 1
    table = engine.make_table("title", results)
    names = list(table.columns[0].cells)
    assert "over stock" in names
    assert "  draft gemm" in names
    assert "sparse rows" not in names
    del results["plain"]
    engine.add_ratios(results)
    assert results["stock"]["over_plain"] is None
    pytest.importorskip("matplotlib")
    engine.plot(results, tmp_path / "plot.png", "title")
    assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.engine
def test_engine_benchmark_end_to_end(tmp_path: Path, target: Path, draft: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "dustin_vllm.bench.cli", "engine"]
    command += ["--model", str(target), "--draft", str(draft), "--json", str(report)]
    command += ["--batch", "2,1", "--context", "512", "--budget", "128,160", "--steps", "8"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    data = json.loads(report.read_text())
    assert list(data["modes"]) == [
        *(f"{mode}, batch {batch}" for mode in ("plain", "stock") for batch in (2, 1)),
        *(f"dustin, budget {k}, batch {batch}" for k in (128, 160) for batch in (2, 1)),
    ]
    plain, _, stock, alone, dustin, _, larger, smallest = data["modes"].values()
    assert (larger["budget"], larger["batch"], plain["budget"]) == (160, 2, None)
    assert larger["stats"]["kv_tokens_read"] > dustin["stats"]["kv_tokens_read"]
    assert smallest["over_stock"] == pytest.approx(
        smallest["tokens_per_second"] / alone["tokens_per_second"]
    )
    assert plain["acceptance_length"] == 1
    assert stock["acceptance_length"] > 1
    for mode in (plain, stock, dustin):
        assert mode["tokens_per_second"] > 0
        assert mode["profile"] is None
        assert 448 < mode["context_at_start"] < mode["context_at_end"] < 1024
    assert plain["tokens"] == 16
    assert plain["over_plain"] == 1
    assert dustin["over_stock"] == pytest.approx(
        dustin["tokens_per_second"] / stock["tokens_per_second"]
    )
    stats = dustin["stats"]
    assert stats["verification_rows"] == stats["sparse_rows"] == 16
    assert stats["kv_tokens_read"] < stats["kv_tokens_full"] / 2
    assert "over plain" in done.stdout
    assert data["synthetic_acceptance"] is None
    assert not data["shared_prompt"]


@pytest.mark.engine
def test_engine_benchmark_refuses_dense_verification(
    tmp_path: Path, target: Path, draft: Path
) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "dustin_vllm.bench.cli", "engine", "--modes", "dustin"]
    command += ["--model", str(target), "--draft", str(draft), "--json", str(report)]
    command += ["--batch", "1", "--context", "512", "--budget", "1024", "--steps", "4"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 1
    assert "short_context" in done.stderr
    data = json.loads(report.read_text())
    assert data["modes"] == {}
    assert "short_context" in data["failures"][0]


@pytest.mark.engine
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_a_benchmark_that_is_ended_ends_its_worker(
    tmp_path: Path, target: Path, draft: Path
) -> None:
    """It would keep the GPU's memory."""

    def workers() -> list[Path]:
        found = []
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                command = (process / "cmdline").read_text()
                if process.name.isdigit() and "--worker" in command and str(tmp_path) in command:
                    found.append(process)
        return found

    def wait(until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not until():
            assert time.monotonic() < deadline
            time.sleep(0.2)

    command = [sys.executable, "-m", "dustin_vllm.bench.cli", "engine", "--modes", "plain"]
    command += ["--model", str(target), "--draft", str(draft), "--batch", "1", "--context", "512"]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path)}
    benchmark = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
    wait(lambda: bool(workers()))
    benchmark.terminate()
    assert benchmark.wait(60) == 128 + signal.SIGTERM
    wait(lambda: not workers())
