# SPDX-License-Identifier: Apache-2.0
"""``dustin bench engine``: decode throughput in vLLM: plain, stock speculation, Dustin.

Each mode runs in a process of its own (``python -m dustin_vllm.bench.engine --worker JOB``) and
steps its engine by hand: prefill and warm-up are not timed, then a window of decoding steps is,
then a short one runs under the profiler to say where the GPU's time goes. Without real models
the weights are random and the acceptance length is fixed by vLLM's synthetic rejection sampler,
so that speed can be measured without a quality claim.
"""

from __future__ import annotations

import argparse
import datetime
import json
import operator
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dustin_vllm import provenance
from dustin_vllm.bench import common
from dustin_vllm.bench.common import BenchError, pyplot
from dustin_vllm.bench.presets import PRESETS, scoring_layers, write_models
from dustin_vllm.results import ResultsError, write_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PLAIN, STOCK, LOSSLESS, LOOP, DUSTIN = "plain", "stock", "lossless", "loop", "dustin"
MODES = (PLAIN, STOCK, LOSSLESS, LOOP, DUSTIN)
TITLES = {
    PLAIN: "plain decoding",
    STOCK: "stock speculation",
    LOSSLESS: "Dustin, dense verification",
    LOOP: "Dustin, draft_graphs off",
    DUSTIN: "Dustin",
}
# What each of our modes changes in the settings.
OURS: dict[str, dict[str, Any]] = {
    LOSSLESS: {"sparse_verification": False},
    LOOP: {"draft_graphs": False},
    DUSTIN: {},
}

DEFAULT_ACCEPTANCE = 4.0
BATCHED_TOKENS = 8192
WARM_UP_STEPS = 20
PROFILE_STEPS = 10
SLACK_STEPS = 16
CPU_BLOCK = 32
OWN_SUFFIX = 32  # last prompt tokens, which differ even with --share-prompt
MIN_SPARSE_SHARE = 0.99


@dataclass(frozen=True)
class EngineOptions:
    """What the user chose. Lengths in tokens."""

    preset: str = "7b"
    model: Path | None = None
    draft: Path | None = None
    text: Path | None = None
    prompts: Path | None = None
    layers: int | None = None
    draft_vocab: int | None = None
    modes: tuple[str, ...] = (PLAIN, STOCK, DUSTIN)
    batches: tuple[int, ...] = (16,)
    contexts: tuple[int, ...] = (32768,)
    cells: tuple[tuple[int, int], ...] = ()  # (batch, context); empty: every batch at every context
    gamma: int = 4
    acceptance: float | None = None
    budgets: tuple[int, ...] = (512,)
    granularity: str = "auto"
    scoring: str = "preset"
    steps: int = 100
    share_prompt: bool = False
    fill_kv: bool = False
    enforce_eager: bool = False
    quantization: str | None = None
    tensor_parallel: int = 1
    draft_tensor_parallel: int | None = None
    dustin: dict[str, Any] = field(default_factory=dict)
    llm: dict[str, Any] = field(default_factory=dict)
    mode_timeout: int = 1200
    seed: int = 0
    verbose: bool = False


@dataclass(frozen=True)
class Cell:
    """One batch at one context, measured by every engine. Lengths in tokens."""

    batch: int
    context: int
    prompts: list[list[int]]
    max_tokens: int


@dataclass(frozen=True)
class Job:
    """One engine's work, as handed to its process. Lengths in tokens."""

    mode: str
    budget: int
    model: str
    draft: str
    dummy: bool
    cells: list[Cell]
    max_model_len: int
    gamma: int
    acceptance: float | None
    dustin: dict[str, Any]
    steps: int
    share_prompt: bool
    fill_kv: bool
    enforce_eager: bool
    quantization: str | None
    tensor_parallel: int
    draft_tensor_parallel: int | None
    llm: dict[str, Any]
    seed: int


# ---- the job, made in the parent ----------------------------------------------------------


def random_prompts(batch: int, length: int, vocab: int, seed: int, share: bool) -> list[list[int]]:
    """Random token ids. With ``share`` all but the last ``OWN_SUFFIX`` are the same."""
    generator = random.Random(seed)
    low, high = vocab // 100, vocab * 9 // 10  # clear of special tokens and padding

    def ids(count: int) -> list[int]:
        return [generator.randrange(low, high) for _ in range(count)]

    if not share:
        return [ids(length) for _ in range(batch)]
    common = ids(length - OWN_SUFFIX)
    return [common + ids(OWN_SUFFIX) for _ in range(batch)]


def text_prompts(options: EngineOptions, batch: int, length: int) -> list[list[int]]:
    """Prompts of a real model: windows of --text, or the ones of --prompts, cut to ``length``.

    Raises:
        BenchError: a file is missing, is not of the form, or is too short.
    """
    from transformers import AutoTokenizer

    source = options.text or options.prompts
    assert source is not None
    try:
        content = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read {source}: {error}") from error
    tokenizer = AutoTokenizer.from_pretrained(str(options.model), local_files_only=True)
    if options.text is not None:
        ids = tokenizer(content, add_special_tokens=False)["input_ids"]
        if len(ids) < length:
            raise BenchError(f"{source} has {len(ids)} tokens; --context needs {length}")
        stride = (len(ids) - length) // max(1, batch - 1)
        return [ids[i * stride : i * stride + length] for i in range(batch)]
    try:
        listed = json.loads(content)
    except ValueError as error:
        raise BenchError(f"{source} is not JSON: {error}") from error
    if not isinstance(listed, list) or not listed:
        raise BenchError(f"{source} must be a JSON list of texts, or of lists of token ids")
    encoded = [
        tokenizer(one, add_special_tokens=False)["input_ids"] if isinstance(one, str) else one
        for one in listed
    ]
    return [encoded[i % len(encoded)][-length:] for i in range(batch)]


def make_cell(options: EngineOptions, batch: int, context: int, configs: Sequence[Any]) -> Cell:
    """Prompts, and how many tokens may follow them.

    Raises:
        BenchError: the batch is too large, or the models have too few positions.
    """
    # A little less than the context, which generated tokens fill up until the window is over.
    length = context - min(256, context // 8)
    chunk = BATCHED_TOKENS - batch * (options.gamma + 1)
    if chunk < 256:
        raise BenchError(f"--batch {batch}: at most {BATCHED_TOKENS // 8} rows")
    prefill_steps = -(-batch * length // chunk) + 2
    if options.fill_kv:
        prefill_steps = 2
    steps = prefill_steps + WARM_UP_STEPS + options.steps + PROFILE_STEPS + SLACK_STEPS
    max_tokens = steps * (options.gamma + 1)
    needed = length + max_tokens + options.gamma + 1
    limit = min(config.get("max_position_embeddings", needed) for config in configs)
    if needed > limit:
        raise BenchError(
            f"{length} prompt tokens and up to {max_tokens} new ones need {needed} "
            f"positions, but the models have {limit}: lower --context or --steps"
        )
    if options.text or options.prompts:
        prompts = text_prompts(options, batch, length)
    else:
        vocab = min(config["vocab_size"] for config in configs)
        prompts = random_prompts(batch, length, vocab, options.seed, options.share_prompt)
    return Cell(batch, context, prompts, max_tokens)


def make_jobs(options: EngineOptions, folder: Path, on_cpu: bool) -> list[Job]:
    """The jobs of all modes, one for every budget where it matters: same models and prompts.

    Args:
        folder: for the presets' model folders.

    Raises:
        BenchError: the options do not fit each other or the models.
    """
    if (options.model is None) != (options.draft is None):
        raise BenchError("give --model and --draft together, or neither")
    if options.acceptance is not None and on_cpu:
        raise BenchError("--acceptance: vLLM has no synthetic acceptance on the CPU; leave it out")
    if options.fill_kv and (options.model is not None or on_cpu):
        raise BenchError("--fill-kv puts random numbers in the KV cache: presets on a GPU only")
    if (options.text or options.prompts) and (options.model is None or options.share_prompt):
        raise BenchError("--text and --prompts need --model and --draft, without --share-prompt")
    from dustin_vllm.demo import DemoError, read_model_config

    dummy = options.model is None
    settings: dict[str, Any] = {
        "granularity": options.granularity,
        "dense_below": 0,
    }
    if options.model is not None and options.draft is not None:
        model, draft, stock_draft = options.model, options.draft, options.draft
    else:
        preset = PRESETS[options.preset]
        model, draft, stock_draft = write_models(
            preset, folder, options.layers, options.draft_vocab, options.tensor_parallel
        )
        if options.scoring == "preset":
            target = preset.target
            if options.layers is not None:
                target = type(target)(**{**asdict(target), "layers": options.layers})
            settings["target_heads"] = scoring_layers(preset.target_scoring, target)
            settings["draft_heads"] = scoring_layers(preset.draft_scoring, preset.draft)
    try:
        configs = [read_model_config(path) for path in (model, draft)]
    except DemoError as error:
        raise BenchError(str(error)) from error

    cells = [
        make_cell(options, batch, context, configs)
        for batch, context in options.cells
        or [(batch, context) for context in options.contexts for batch in options.batches]
    ]
    longest = max(len(cell.prompts[0]) + cell.max_tokens for cell in cells) + options.gamma + 1
    acceptance = options.acceptance
    if acceptance is None and dummy and not on_cpu:
        acceptance = DEFAULT_ACCEPTANCE
    return [
        Job(
            mode=mode,
            budget=budget,
            model=str(model),
            draft=str(stock_draft if mode == STOCK else draft),
            dummy=dummy,
            cells=cells,
            max_model_len=-(-longest // CPU_BLOCK) * CPU_BLOCK,
            gamma=options.gamma,
            acceptance=acceptance,
            dustin={"budget": budget, **settings, **options.dustin, **OURS.get(mode, {})},
            steps=options.steps,
            share_prompt=options.share_prompt,
            fill_kv=options.fill_kv,
            enforce_eager=options.enforce_eager,
            quantization=options.quantization,
            tensor_parallel=options.tensor_parallel,
            draft_tensor_parallel=options.draft_tensor_parallel,
            llm=options.llm,
            seed=options.seed,
        )
        for mode in options.modes
        for budget in (options.budgets if mode in OURS else options.budgets[:1])
    ]


def engine_arguments(job: Job, on_cpu: bool) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``: vLLM's defaults wherever they are what a server would run."""
    arguments: dict[str, Any] = {
        "model": job.model,
        "seed": job.seed,
        "skip_tokenizer_init": True,
        "max_model_len": job.max_model_len,
        "max_num_seqs": max(cell.batch for cell in job.cells),
        "max_num_batched_tokens": BATCHED_TOKENS,
        "enable_prefix_caching": job.share_prompt,
        "enforce_eager": job.enforce_eager or on_cpu,
        "tensor_parallel_size": job.tensor_parallel,
    }
    if job.dummy:
        arguments["load_format"] = "dummy"
    if job.fill_kv:
        # vLLM's own connector for timing decoding without a prefill.
        arguments["kv_transfer_config"] = {
            "kv_connector": "DecodeBenchConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"fill_mean": 0.0, "fill_std": 1.0},
        }
    if job.quantization is not None:
        arguments["quantization"] = job.quantization
    if on_cpu:
        from dustin_vllm.demo import kv_bytes_per_token, read_model_config

        configs = [read_model_config(Path(path)) for path in (job.model, job.draft)]
        per_token = sum(kv_bytes_per_token(config, "float32") for config in configs)
        tokens = max(cell.batch for cell in job.cells) * (job.max_model_len + 8 * CPU_BLOCK)
        arguments["kv_cache_memory_bytes"] = max(1 << 28, per_token * tokens * 5 // 4)
        arguments["block_size"] = CPU_BLOCK
    else:
        arguments["gpu_memory_utilization"] = 0.9
    if job.mode != PLAIN:
        speculative: dict[str, Any] = {
            "method": "draft_model",
            "model": job.draft,
            "num_speculative_tokens": job.gamma,
        }
        if job.mode in OURS and job.draft_tensor_parallel is not None:
            speculative["draft_tensor_parallel_size"] = job.draft_tensor_parallel
        if job.acceptance is not None:
            speculative["rejection_sample_method"] = "synthetic"
            speculative["synthetic_acceptance_length"] = job.acceptance
        arguments["speculative_config"] = speculative
    if job.mode in OURS:
        arguments["attention_backend"] = "DUSTIN"
        arguments["additional_config"] = {"dustin": job.dustin}
    return {**arguments, **job.llm}


def worker_environment(mode: str, base: Mapping[str, str], verbose: bool) -> dict[str, str]:
    """Environment variables of a worker process. The stock modes load no plugin."""
    return {
        **common.worker_environment(base, mode in OURS, verbose),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }


# ---- the profile --------------------------------------------------------------------------

MARKER = "spin_kernel"  # of torch.cuda._sleep, which nothing else here launches

OWN_KERNELS = {
    "_split_probabilities_kernel": "scoring",
    "_aggregate_kernel": "scoring",
    "_candidates_kernel": "selection",
    "_select_kernel": "selection",
    "_compact_kernel": "compaction",
    "_gather_kernel": "scoring",
}
# Parts of lower-case kernel names; the first that fits decides. FlashAttention is built on
# CUTLASS, and the kernel that writes the KV cache has "flash" in its name.
CATEGORIES = (
    ("kv write", ("reshape_and_cache",)),
    (
        "attention",
        ("flash", "prepare_varlen", "fmha", "unified_attention", "_attention_kernel", "dustin::"),
    ),
    ("gemm", ("nvjet", "gemm", "gemv", "cutlass", "cublas", "splitk")),
    ("sampling", ("rejection", "sample", "expand_kernel", "topk", "argmax", "softmax")),
    ("copies", ("memcpy", "memset")),
    ("communication", ("nccl", "all_reduce", "allreduce", "cross_device_reduce", "multimem")),
)


@dataclass(frozen=True)
class Interval:
    """Something the GPU did. Microseconds."""

    name: str
    start: float
    end: float


def classify(name: str) -> str:
    """Category of a kernel by its name."""
    if name in OWN_KERNELS:
        return OWN_KERNELS[name]
    lower = name.lower()
    for category, parts in CATEGORIES:
        if any(part in lower for part in parts):
            return category
    return "other"


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Length covered by (start, end) intervals, overlaps counted once."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total


def trace_intervals(trace: Mapping[str, Any]) -> list[Interval]:
    """Kernels, copies and fills of a Chrome trace of torch.profiler, by start."""
    wanted = ("kernel", "gpu_memcpy", "gpu_memset")
    found = [
        Interval(event["name"], event["ts"], event["ts"] + event.get("dur", 0))
        for event in trace["traceEvents"]
        if event.get("cat") in wanted and event.get("ph") == "X"
    ]
    return sorted(found, key=lambda interval: interval.start)


def breakdown(intervals: Sequence[Interval], steps: int) -> dict[str, Any]:
    """Where the GPU's time of some steps goes, in milliseconds per step.

    Kernels between a marker and the next one belong to the draft: ``propose`` is enclosed in
    two. Times of categories are sums over kernels; ``busy_ms`` counts overlaps once.
    """
    markers = [interval for interval in intervals if MARKER in interval.name]
    spans = [
        (begin.end, end.start) for begin, end in zip(markers[::2], markers[1::2], strict=False)
    ]
    if len(markers) % 2:
        spans = []
    categories: dict[str, float] = {}
    draft: list[tuple[float, float]] = []
    work: list[tuple[float, float]] = []
    span = 0
    for interval in intervals:
        if MARKER in interval.name:
            continue
        while span < len(spans) and spans[span][1] <= interval.start:
            span += 1
        in_draft = span < len(spans) and spans[span][0] <= interval.start
        work.append((interval.start, interval.end))
        if in_draft:
            draft.append((interval.start, interval.end))
        category = classify(interval.name)
        if category not in OWN_KERNELS.values():
            category = f"{'draft' if in_draft else 'target'} {category}"
        length = interval.end - interval.start
        categories[category] = categories.get(category, 0.0) + length
    scale = 1e-3 / steps
    ordered = sorted(categories.items(), key=lambda item: -item[1])
    return {
        "busy_ms": union_length(work) * scale,
        "draft_busy_ms": union_length(draft) * scale if spans else None,
        "draft_span_ms": sum(end - begin for begin, end in spans) * scale if spans else None,
        "kernels": len(work) / steps,
        "categories_ms": {name: time_us * scale for name, time_us in ordered},
    }


# Functions that vLLM's workers run, in the same process or in others (tensor parallelism).
_profilers: list[tuple[Any, Any]] = []  # profiler and drafter, between the two calls


def runner_module(worker: Any) -> str:
    """Where the model runner comes from, which tells V1 from V2."""
    return type(worker.model_runner).__module__


def begin_profile(worker: Any) -> None:
    """Start the profiler; the draft's kernels are enclosed in markers."""
    import torch

    drafter = getattr(worker.model_runner, "drafter", None)
    if drafter is not None:
        original = drafter.propose

        def propose(*args: Any, **kwargs: Any) -> Any:
            torch.cuda._sleep(1)
            result = original(*args, **kwargs)
            torch.cuda._sleep(1)
            return result

        drafter.propose = propose
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    torch.cuda.synchronize()
    profiler.start()
    _profilers.append((profiler, drafter))


def end_profile(worker: Any) -> dict[str, Any]:
    """Breakdown of the ``PROFILE_STEPS`` steps since ``begin_profile``."""
    import torch

    profiler, drafter = _profilers.pop()
    torch.cuda.synchronize()
    profiler.stop()
    if drafter is not None:
        del drafter.propose  # the instance attribute; the method shows again
    with tempfile.TemporaryDirectory(prefix="dustin-bench-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)
    return breakdown(trace_intervals(trace), PROFILE_STEPS)


def _profile(llm: Any, rows: int) -> dict[str, Any]:
    """Breakdown of a few steps under the profiler, on the first GPU."""
    llm.collective_rpc(begin_profile)
    started = time.perf_counter()
    try:
        decode(llm, PROFILE_STEPS, rows)
    finally:
        seconds = time.perf_counter() - started
        result: dict[str, Any] = llm.collective_rpc(end_profile)[0]
    if not result["kernels"]:
        raise BenchError("the profiler saw no kernels")
    return {**result, "profiled_ms_per_step": 1000 * seconds / PROFILE_STEPS}


# ---- the worker ---------------------------------------------------------------------------


@dataclass
class Window:
    """What some decoding steps did."""

    tokens: int = 0
    ends: list[float] = field(default_factory=list)  # host time after every step, seconds


def decode(llm: Any, steps: int, rows: int) -> Window:
    """Run decoding steps in which all rows take part.

    Raises:
        BenchError: a row is missing from a step, so the batch is not what it claims to be.
    """
    window = Window()
    while len(window.ends) < steps:
        outputs = llm.llm_engine.step()
        if not outputs and llm.llm_engine.has_unfinished_requests():
            continue  # async scheduling hands out a step's tokens one step late
        running = [output for output in outputs if not output.finished]
        if len(running) != rows:
            raise BenchError(
                f"{len(running)} of {rows} sequences ran in a step: the KV cache does not hold "
                "them all, or one has ended; lower --batch, --context or --layers"
            )
        window.tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
        window.ends.append(time.perf_counter())
    return window


def _prefill(llm: Any, job: Job, cell: Cell) -> dict[str, int]:
    """Submit all prompts and step until each has its first token; new tokens by request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    parameters = SamplingParams(
        temperature=0.0,
        max_tokens=cell.max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    new_tokens: dict[str, int] = {}
    # With a shared prompt the first request fills the prefix cache for the others.
    waves = [cell.prompts[:1], cell.prompts[1:]] if job.share_prompt else [cell.prompts]
    submitted = 0
    for wave in waves:
        for prompt in wave:
            engine.add_request(str(submitted), {"prompt_token_ids": prompt}, parameters)
            submitted += 1
        while len(new_tokens) < submitted:
            if not engine.has_unfinished_requests():
                raise BenchError("sequences ended during prefill")
            for output in engine.step():
                count = len(output.outputs[0].token_ids)
                if count:
                    new_tokens[output.request_id] = new_tokens.get(output.request_id, 0) + count
    return new_tokens


def _stats(llm: Any, mode: str) -> dict[str, Any]:
    if mode not in OURS:
        return {}
    stats = dict(llm.collective_rpc("dustin_stats")[0])
    stats.pop("live_sequences", None)
    return stats


def run_job(job: Job) -> Iterator[dict[str, Any]]:
    """Run one engine in this process, which must be fresh and set up by ``worker_environment``.

    Yields:
        The result of every cell.
    """
    started = time.perf_counter()
    import torch
    from vllm import LLM
    from vllm.platforms import current_platform

    if job.mode in OURS:
        import dustin_vllm

        dustin_vllm.register()  # idempotent; for a source tree that is not installed
    on_cpu = current_platform.is_cpu()
    llm = LLM(**engine_arguments(job, on_cpu))
    load_seconds = time.perf_counter() - started

    def synchronize() -> None:
        # Workers of their own hand out tokens that are there already.
        if not on_cpu and job.tensor_parallel == 1:
            torch.cuda.synchronize()

    for cell in job.cells:
        yield {"load_seconds": load_seconds, **_run_cell(llm, job, cell, synchronize, on_cpu)}
        llm.llm_engine.abort_request([str(i) for i in range(cell.batch)])
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()


def _run_cell(
    llm: Any, job: Job, cell: Cell, synchronize: Callable[[], None], on_cpu: bool
) -> dict[str, Any]:
    """Prefill, a warm-up, the timed window, the profiled one."""
    from dustin_vllm.demo import difference

    rows = cell.batch
    began = time.perf_counter()
    new_tokens = _prefill(llm, job, cell)
    prefilled = time.perf_counter()
    warm_up = decode(llm, WARM_UP_STEPS, rows)
    before = _stats(llm, job.mode)
    synchronize()
    begin = time.perf_counter()
    window = decode(llm, job.steps, rows)
    synchronize()
    seconds = time.perf_counter() - begin
    counters = difference(_stats(llm, job.mode), before)

    first = sum(map(len, cell.prompts)) + sum(new_tokens.values()) + warm_up.tokens
    middle = len(window.ends) // 2
    step_ends = [begin, *window.ends]
    config = llm.llm_engine.vllm_config
    result: dict[str, Any] = {
        "mode": job.mode,
        "batch": cell.batch,
        "context": cell.context,
        "budget": job.budget if job.mode in OURS else None,
        "tokens_per_second": window.tokens / seconds,
        "ms_per_step": 1000 * seconds / job.steps,
        # Noise: a difference between modes below that of the halves means nothing.
        "halves_ms_per_step": [
            1000 * (step_ends[middle] - begin) / max(1, middle),
            1000 * (window.ends[-1] - step_ends[middle]) / (job.steps - middle),
        ],
        "median_ms_per_step": 1000 * statistics.median(map(operator.sub, step_ends[1:], step_ends)),
        "acceptance_length": window.tokens / (job.steps * rows),
        "steps": job.steps,
        "tokens": window.tokens,
        "context_at_start": first / rows,
        "context_at_end": (first + window.tokens) / rows,
        "prefill_seconds": prefilled - began,
        "stats": counters,
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "runner": llm.collective_rpc(runner_module)[0],
        "kv_cache_blocks": config.cache_config.num_gpu_blocks,
        "environment": provenance.environment(),
        "profile": None,
    }
    if not on_cpu:
        try:
            profile = _profile(llm, rows)
            profile["busy_share"] = profile["busy_ms"] / result["ms_per_step"]
            profile["idle_ms"] = max(0.0, result["ms_per_step"] - profile["busy_ms"])
            result["profile"] = profile
        except Exception as error:  # a profiler that cannot run must not cost the measurement
            result["profile_error"] = f"{type(error).__name__}: {error}"
    return result


def _worker_main(job_file: str, result_file: str) -> None:
    """Entry of a worker process."""
    data = json.loads(Path(job_file).read_text(encoding="utf-8"))
    job = Job(**{**data, "cells": [Cell(**cell) for cell in data["cells"]]})
    outcome: dict[str, Any] = {"cells": []}
    try:
        for result in run_job(job):
            outcome["cells"].append(result)
            Path(result_file).write_text(json.dumps(outcome), encoding="utf-8")
    except BenchError as error:
        outcome["error"] = str(error)
        Path(result_file).write_text(json.dumps(outcome), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an engine's destructors may wait for threads; everything has been said


def run_worker(job: Job, options: EngineOptions) -> tuple[list[dict[str, Any]], str | None]:
    """Run one engine in a fresh process.

    Returns:
        The results of the cells that were measured; and why it is not all of them, or None. The
        message ends with the process's last output when it died or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="dustin-bench-") as temporary:
        job_file, result_file, log = (Path(temporary) / n for n in ("job", "result", "log"))
        job_file.write_text(json.dumps(asdict(job)), encoding="utf-8")
        command = [sys.executable, "-m", "dustin_vllm.bench.engine"]
        command += ["--worker", str(job_file), "--result", str(result_file)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr if options.verbose else output,
                stderr=None if options.verbose else subprocess.STDOUT,
                env=worker_environment(job.mode, os.environ, options.verbose),
                start_new_session=True,  # so that its own workers can be ended with it
            )
            try:
                code: int | str = process.wait(timeout=options.mode_timeout)
            except subprocess.TimeoutExpired:
                code = f"none after {options.mode_timeout} s"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        outcome: dict[str, Any] = {"cells": []}
        if result_file.exists():
            outcome = json.loads(result_file.read_text(encoding="utf-8"))
        if len(outcome["cells"]) == len(job.cells):
            return outcome["cells"], None
        if "error" in outcome:
            return outcome["cells"], f"{TITLES[job.mode]}: {outcome['error']}"
        said = common.last_words(log)
        return outcome["cells"], f"{TITLES[job.mode]} failed (exit code {code}):\n{said}"


# ---- the report ---------------------------------------------------------------------------


def sparse_refusal(stats: Mapping[str, Any], gated: bool = False) -> str | None:
    """Why Dustin's numbers must not be reported, or None.

    Args:
        gated: the user set ``dense_below`` above the context, to see what the gate costs.
    """
    rows, sparse = stats.get("verification_rows", 0), stats.get("sparse_rows", 0)
    reasons = {why: n for why, n in stats.get("dense_rows", {}).items() if n}
    meant = reasons.get("requested", 0) + gated * reasons.get("short_context", 0)
    if rows and sparse + meant >= MIN_SPARSE_SHARE * rows:
        return None
    return f"only {sparse} of {rows} verification rows were sparse; dense rows: {reasons or 'none'}"


def add_ratios(results: Mapping[str, dict[str, Any]]) -> None:
    """Throughput over that of plain decoding and of stock speculation, where they ran the same
    batch at the same context."""
    of = {(r["mode"], r["batch"], r["context"]): r["tokens_per_second"] for r in results.values()}
    for result in results.values():
        for name in (PLAIN, STOCK):
            reference = of.get((name, result["batch"], result["context"]))
            speed = result["tokens_per_second"]
            result[f"over_{name}"] = speed / reference if reference else None


def titles(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Names of results (see ``label``) for people."""
    return [
        name.replace(result["mode"], TITLES[result["mode"]], 1) for name, result in results.items()
    ]


def label(options: EngineOptions, result: Mapping[str, Any]) -> str:
    """A name for one result: the mode, and what else differs between results."""
    parts = [result["mode"]]
    for name, values in (
        ("budget", options.budgets),
        ("batch", options.cells or options.batches),
        ("context", options.cells or options.contexts),
    ):
        if len(values) > 1 and result[name] is not None:
            parts.append(f"{name} {result[name]}")
    return ", ".join(parts)


def _share(stats: Mapping[str, Any], part: str, whole: str) -> float | None:
    return stats[part] / stats[whole] if stats.get(whole) else None


def make_table(title: str, results: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row for each number, a column for each mode."""
    from rich.table import Table

    table = Table(title=title)
    table.add_column("")
    for name in titles(results):
        table.add_column(name, justify="right")

    def row(name: str, cells: Iterable[Any], form: str = "") -> None:
        shown = ["-" if cell is None else format(cell, form) for cell in cells]
        if any(cell != "-" for cell in shown):
            table.add_row(name, *shown)

    every = list(results.values())
    profiles = [result["profile"] or {} for result in every]
    row("tokens/s", (r["tokens_per_second"] for r in every), ".0f")
    row("over plain", (r.get("over_plain") for r in every), ".2f")
    row("over stock", (r.get("over_stock") for r in every), ".2f")
    row("ms per step", (r["ms_per_step"] for r in every), ".2f")
    row("tokens per row and step", (r["acceptance_length"] for r in every), ".2f")
    row("context, mean", ((r["context_at_start"] + r["context_at_end"]) / 2 for r in every), ".0f")
    row("GPU busy, ms per step", (p.get("busy_ms") for p in profiles), ".2f")
    row("GPU busy share", (p.get("busy_share") for p in profiles), ".0%")
    row("GPU idle, ms per step", (p.get("idle_ms") for p in profiles), ".2f")
    row("  in propose, busy ms", (p.get("draft_busy_ms") for p in profiles), ".2f")
    row("  in propose, span ms", (p.get("draft_span_ms") for p in profiles), ".2f")
    row("kernels per step", (p.get("kernels") for p in profiles), ".0f")
    categories: dict[str, float] = {}
    for profile in profiles:
        for name, spent in profile.get("categories_ms", {}).items():
            categories[name] = max(spent, categories.get(name, 0.0))
    for name in sorted(categories, key=lambda name: -categories[name]):
        row(f"  {name}", (p.get("categories_ms", {}).get(name) for p in profiles), ".2f")
    stats = [result["stats"] for result in every]
    row("sparse rows", (s.get("sparse_rows") for s in stats))
    row("verification rows", (s.get("verification_rows") for s in stats))
    row("draft graphs", (s.get("draft_graphs") for s in stats))
    by_draft = ("draft_kv_tokens_read", "draft_kv_tokens_full")
    row("KV tokens read by the draft", (_share(s, *by_draft) for s in stats), ".1%")
    row("KV tokens read", (_share(s, "kv_tokens_read", "kv_tokens_full") for s in stats), ".1%")
    return table


def plot(results: Mapping[str, Mapping[str, Any]], path: Path, title: str) -> None:
    """Throughput by mode, and where a step's GPU time goes.

    Raises:
        BenchError: matplotlib is not installed.
    """
    plt = pyplot()
    many = len(results) > 5
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 6) if many else (11, 4))
    names = [name.replace(", ", "\n") for name in titles(results)]
    bars = left.bar(names, [result["tokens_per_second"] for result in results.values()])
    left.bar_label(bars, fmt="%.0f")
    left.set_ylabel("tokens/s")
    bottom = [0.0] * len(results)
    profiles = [(result["profile"] or {}).get("categories_ms", {}) for result in results.values()]
    for category in dict.fromkeys(name for profile in profiles for name in profile):
        heights = [profile.get(category, 0.0) for profile in profiles]
        if max(heights) >= 0.02 * max(map(sum, (p.values() for p in profiles))):
            right.bar(names, heights, bottom=bottom, label=category)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    right.set_ylabel("GPU ms per step")
    if any(profiles):
        right.legend(fontsize="small")
    for axis in (left, right):
        axis.tick_params("x", rotation=90 * many)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def report(
    options: EngineOptions, jobs: Sequence[Job], results: Mapping[str, Any], failures: Sequence[str]
) -> dict[str, Any]:
    """Content of the ``--json`` file."""
    job = jobs[0]
    return {
        "benchmark": "engine",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": provenance.command(),
        "options": provenance.options(options),
        "dummy_weights": job.dummy,
        "random_prompts": not (options.text or options.prompts),
        # With it, sequences share physical KV blocks and caches serve more than in real use.
        "shared_prompt": job.share_prompt,
        "filled_kv": job.fill_kv,  # no prefill: random numbers in every sequence's own blocks
        "synthetic_acceptance": job.acceptance,
        "prompt_tokens": {
            f"batch {cell.batch}, context {cell.context}": [len(p) for p in cell.prompts]
            for cell in job.cells
        },
        "max_model_len": job.max_model_len,
        # A draft whose heads do not divide runs whole on every rank under Dustin; stock vLLM
        # refuses it and gets a wider one.
        "drafts": {job.mode: provenance.shown(job.draft) for job in jobs if job.mode != PLAIN},
        "dustin": {**job.dustin, "budget": list(options.budgets)},
        "modes": dict(results),
        "failures": list(failures),
    }


def run_engine(
    options: EngineOptions,
    console: Console,
    errors: Console,
    json_file: Path | None,
    plot_file: Path | None,
) -> int:
    """The whole benchmark. The JSON file is written after every mode.

    Returns:
        Exit code: 0, or 1 when a mode failed or did not verify sparsely.
    """
    import torch

    from dustin_vllm.demo_models import cache_folder

    common.end_workers_too()
    results: dict[str, dict[str, Any]] = {}
    failures: list[str] = []

    def fail(message: str) -> None:
        failures.append(message)
        errors.print(f"Error: {message}", style="red", markup=False, highlight=False)

    # The same folder every time: vLLM's compile cache goes by it.
    folder = cache_folder() / "bench" / f"{options.preset}-{options.layers}-{options.draft_vocab}"
    try:
        jobs = make_jobs(options, folder, on_cpu=not torch.cuda.is_available())
    except (BenchError, OSError) as error:
        fail(str(error))
        return 1
    for job in jobs:
        at = f", budget {job.budget}" if len(options.budgets) > 1 and job.mode in OURS else ""
        errors.print(f"{TITLES[job.mode]}{at} ...")
        measured, failure = run_worker(job, options)
        for result in measured:
            gated = job.dustin["dense_below"] > result["context_at_end"]
            why = sparse_refusal(result["stats"], gated) if job.mode in OURS else None
            if why is not None:
                fail(f"{TITLES[job.mode]}: {why}")
                continue
            results[label(options, result)] = result
            errors.print(
                f"  batch {result['batch']}, context {result['context']}: "
                f"{result['tokens_per_second']:.0f} tokens/s (load {result['load_seconds']:.0f} s, "
                f"prefill {result['prefill_seconds']:.0f} s)"
            )
            if "profile_error" in result:
                errors.print(f"  no profile: {result['profile_error']}", markup=False)
        if failure is not None:
            fail(failure)
        add_ratios(results)
        if json_file is not None:
            try:
                write_json(json_file, report(options, jobs, results, failures))
            except ResultsError as error:
                fail(str(error))
    if results:
        what = options.preset if options.model is None else options.model.name
        batches, contexts = (",".join(map(str, v)) for v in (options.batches, options.contexts))
        sizes = f"batch {batches}, {contexts} tokens, "
        if options.cells:
            sizes = ""  # in the columns' names
        title = f"{what}, {sizes}γ = {options.gamma}"
        if options.share_prompt:
            title += ", shared prompt (KV blocks shared: not what real traffic reads)"
        console.print(make_table(title, results))
        if plot_file is not None:
            try:
                plot(results, plot_file, title)
            except BenchError as error:
                fail(str(error))
    return 1 if failures else 0


def _main() -> None:
    parser = argparse.ArgumentParser(description="Worker process of `dustin bench engine`.")
    parser.add_argument("--worker", required=True, metavar="JOB", help="JSON file of the job")
    parser.add_argument("--result", required=True, metavar="FILE", help="where the numbers go")
    arguments = parser.parse_args()
    # By its name, not as __main__, so that vLLM's workers import what they are asked to run.
    from dustin_vllm.bench import engine

    engine._worker_main(arguments.worker, arguments.result)


if __name__ == "__main__":
    _main()
