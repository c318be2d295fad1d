# SPDX-License-Identifier: Apache-2.0
"""``dustin bench attention``: one layer's verification, dense against sparse, on a GPU.

The dense side is what stock vLLM runs: FlashAttention 3 over 16-token pages with an ahead-of-
time schedule, at the better of its two settings of ``num_splits``. The sparse side is the same
kernel, and this package's, over block tables that were scored, selected and compacted. All are
timed as CUDA-graph replays over several layers' caches in turn, so that the L2 cache does not
serve what HBM must serve in a model, and the outputs of those very replays are checked. There a
call may begin while the one before ends, as far as its kernel allows; in a model other kernels lie
between. So the best are timed with one between, too. Peers that verification cannot run on are
timed beside them, where they are installed and can.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dustin_vllm import provenance, reference
from dustin_vllm.bench.common import BenchError, pyplot
from dustin_vllm.bench.kernels import (
    BLOCK,
    DENSE_KERNELS,
    DTYPE,
    KERNELS,
    Call,
    Kernel,
    Unavailable,
)
from dustin_vllm.bench.presets import ModelShape, spread
from dustin_vllm.results import ResultsError, write_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

TOLERANCE = 1e-2  # relative norm; bf16 operands give 2e-3 to 3e-3
MIN_OVERLAP = 0.99  # of a selection with the reference's, up to rounding of near ties
MIN_LAYERS, MAX_LAYERS = 4, 64
CACHE_FACTOR = 5  # bytes touched per replay, in L2 sizes
MEMORY_SHARE = 0.6  # of the free device memory that the caches may take
SMALL_PASSES = 32  # repetitions in a graph of kernels that take microseconds
SLEEP_CYCLES = 8_000_000  # keeps the device busy (about 4 ms) while the host enqueues replays

Step = Callable[[], object]


@dataclass(frozen=True)
class AttentionOptions:
    """What to measure. Lengths in tokens; scoring is (layers, heads of each)."""

    target: ModelShape
    draft: ModelShape
    target_scoring: tuple[int, int] = (1, 4)
    draft_scoring: tuple[int, int] = (3, 4)
    gamma: int = 4
    batches: tuple[int, ...] = (16, 32)
    context: int = 32768
    budgets: tuple[int, ...] = (512, 1024)
    granularities: tuple[str, ...] = ("block", "token")
    layout: str = "NHD"  # of the KV cache, as in VLLM_KV_CACHE_LAYOUT
    sinks: int = 4
    recent: int = 64
    seconds: float = 0.2  # at least, for every timing
    seed: int = 0


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median, and the 10th and 90th percentile."""

    us: float
    low: float
    high: float


# ---- inputs -------------------------------------------------------------------------------


@dataclass
class Batch:
    """Random inputs of one batch size. R rows, every one with its own blocks in random order."""

    options: AttentionOptions
    contexts: torch.Tensor  # [R] int32
    seq_lens: torch.Tensor  # [R] int32, contexts + gamma + 1
    block_table: torch.Tensor  # [R, MB] int32
    caches: list[torch.Tensor]  # target layers, [blocks, BLOCK, Hkv, 2 * D], K next to V (NHD)
    draft_caches: list[list[torch.Tensor]]  # [copy][scoring layer], same layout
    queries: torch.Tensor  # [R, gamma + 1, H, D]
    history_queries: torch.Tensor  # [R, 1, target scoring heads, D]
    lookahead_queries: torch.Tensor  # [R, gamma, draft scoring heads of all layers, D]

    @property
    def rows(self) -> int:
        """Sequences."""
        return len(self.contexts)


def count_layers(touched: int, full: int, l2: int, memory: int) -> int:
    """Caches to rotate over.

    Args:
        touched: bytes that one layer's sparse attention reads.
        full: bytes that one layer's cache takes.
        l2: size of the L2 cache, bytes.
        memory: bytes that all caches may take.

    Raises:
        BenchError: not even two caches fit.
    """
    wanted = min(MAX_LAYERS, max(MIN_LAYERS, -(-CACHE_FACTOR * l2 // touched)))
    fitting = memory // full
    if fitting < 2:
        raise BenchError(
            f"the KV cache of one layer takes {full / 2**30:.1f} GiB; two do not fit in "
            f"{memory / 2**30:.1f} GiB: lower --batch or --context"
        )
    return min(wanted, fitting)


def make_batch(
    options: AttentionOptions, rows: int, layers: int, draft_copies: int, device: torch.device
) -> Batch:
    """Random bf16 data. Contexts differ by up to 48 tokens, so that tails and masks differ."""
    target, draft, gamma = options.target, options.draft, options.gamma
    torch.manual_seed(options.seed)
    contexts = options.context - torch.arange(rows, dtype=torch.int32) * 7 % 49
    blocks = -(-(options.context + gamma + 1) // BLOCK)
    order = torch.randperm(rows * blocks, dtype=torch.int32) + 1  # vLLM uses block 0 for nothing
    draft_layers = options.draft_scoring[0]

    def cache(shape: ModelShape) -> torch.Tensor:
        inner = (BLOCK, shape.kv_heads) if options.layout == "NHD" else (shape.kv_heads, BLOCK)
        size = (rows * blocks + 1, *inner, 2 * shape.head_dim)
        made = torch.empty(size, dtype=DTYPE, device=device).normal_()
        return made if options.layout == "NHD" else made.transpose(1, 2)

    def queries(number: int, heads: int, head_dim: int) -> torch.Tensor:
        return torch.empty(rows, number, heads, head_dim, dtype=DTYPE, device=device).normal_()

    return Batch(
        options,
        contexts.to(device),
        (contexts + gamma + 1).to(device),
        order.view(rows, blocks).to(device),
        [cache(target) for _ in range(layers)],
        [[cache(draft) for _ in range(draft_layers)] for _ in range(draft_copies)],
        queries(gamma + 1, target.heads, target.head_dim),
        queries(1, len(target_heads(options)), target.head_dim),
        queries(gamma, draft_layers * len(draft_heads(options)), draft.head_dim),
    )


def target_heads(options: AttentionOptions) -> tuple[int, ...]:
    """Scoring heads of the target's scoring layer(s), as different key heads as there are."""
    return spread(options.target_scoring[1], options.target.heads)


def draft_heads(options: AttentionOptions) -> tuple[int, ...]:
    """Scoring heads of each of the draft's scoring layers."""
    return spread(options.draft_scoring[1], options.draft.heads)


# ---- scoring, selection, compaction -------------------------------------------------------


def dense_call(batch: Batch, num_queries: int) -> Call:
    """Full attention of the first ``num_queries`` queries, which follow the context."""
    queries = batch.queries[:, :num_queries].contiguous()
    lens = batch.contexts + num_queries
    longest = batch.options.context + num_queries
    return Call(
        batch.options.target,
        queries,
        torch.empty_like(queries),
        batch.block_table,
        lens,
        longest,
        BLOCK,
    )


class Scoring:
    """The kernels of a verification step besides attention, on one batch.

    ``copies`` is the number of different caches its steps can work on.
    """

    def __init__(self, batch: Batch) -> None:
        from dustin_vllm import triton_kernels

        self.kernels = triton_kernels
        self.batch = batch
        options = batch.options
        target_layers = options.target_scoring[0]
        device = batch.contexts.device
        self.width = options.context + options.gamma + 1
        self.history = torch.full((batch.rows, self.width), torch.nan, device=device)
        self.lookahead = torch.full((batch.rows, self.width), torch.nan, device=device)
        self.draft_lens = batch.contexts + options.gamma
        self.copies = min(len(batch.draft_caches), len(batch.caches) // target_layers)
        if self.copies < 1:
            raise BenchError(
                f"{target_layers} target scoring layers, but only {len(batch.caches)} layers' "
                "caches fit in memory"
            )
        self.target_plans = [
            self._plan(
                batch.caches[copy * target_layers : (copy + 1) * target_layers],
                [target_heads(options)] * target_layers,
                options.target,
            )
            for copy in range(self.copies)
        ]
        self.draft_plans = [
            self._plan(
                batch.draft_caches[copy],
                [draft_heads(options)] * options.draft_scoring[0],
                options.draft,
            )
            for copy in range(self.copies)
        ]
        self.target_scratch = triton_kernels.token_scores_workspace(
            self.target_plans[0].size, 1, batch.rows, self.width, device
        )
        self.draft_scratch = triton_kernels.token_scores_workspace(
            self.draft_plans[0].size, options.gamma, batch.rows, self.width, device
        )
        # One query set of the target's scoring layers each.
        self.target_queries = batch.history_queries.repeat(1, 1, target_layers, 1)

    def _plan(
        self, caches: Sequence[torch.Tensor], heads: Sequence[Sequence[int]], shape: ModelShape
    ) -> Any:
        keys = [cache[..., : shape.head_dim] for cache in caches]
        return self.kernels.scoring_plan(keys, heads, shape.heads)

    def score_history(self, copy: int) -> None:
        """History scores, from the target's caches."""
        self.kernels.token_scores(
            self.history,
            self.target_queries,
            self.target_plans[copy],
            self.batch.block_table,
            self.batch.contexts,
            self.target_scratch,
            self.batch.options.target.head_dim**-0.5,
        )

    def score_lookahead(self, copy: int) -> None:
        """Lookahead scores, from the draft's caches."""
        self.kernels.token_scores(
            self.lookahead,
            self.batch.lookahead_queries,
            self.draft_plans[copy],
            self.batch.block_table,
            self.draft_lens,
            self.draft_scratch,
            self.batch.options.draft.head_dim**-0.5,
        )

    def bytes_read(self) -> int:
        """Key bytes that a step's scoring must read at least: each key head once."""
        options, tokens = self.batch.options, int(self.batch.contexts.sum())
        total = 0
        for shape, heads, layers in (
            (options.target, target_heads(options), options.target_scoring[0]),
            (options.draft, draft_heads(options), options.draft_scoring[0]),
        ):
            group = shape.heads // shape.kv_heads
            key_heads = len({head // group for head in heads})
            total += tokens * layers * key_heads * shape.head_dim * DTYPE.itemsize
        return total


class Selector:
    """Selection and compaction for one granularity and budget, into persistent buffers."""

    def __init__(self, scoring: Scoring, granularity: str, budget: int) -> None:
        self.scoring = scoring
        batch, options = scoring.batch, scoring.batch.options
        self.unit = BLOCK if granularity == "block" else 1
        self.budget_units = budget // self.unit
        device = batch.contexts.device
        self.selection = torch.zeros(
            batch.rows, self.budget_units, dtype=torch.int32, device=device
        )
        # As wide as the runtime's, which must also hold dense rows.
        width = -(-scoring.width // self.unit)
        self.table = torch.zeros(batch.rows, width, dtype=torch.int32, device=device)
        self.lens = torch.zeros(batch.rows, dtype=torch.int32, device=device)
        self.flags = torch.ones(batch.rows, dtype=torch.int32, device=device)
        self.max_len = (self.budget_units + 1) * self.unit + options.gamma + 1
        self.scratch = scoring.kernels.select_workspace(
            batch.rows,
            scoring.width,
            self.unit,
            self.budget_units,
            self.budget_units // 2,
            device,
        )

    def select(self) -> None:
        """Merge the scores into ``selection``."""
        scoring = self.scoring
        options = scoring.batch.options
        scoring.kernels.merge_and_select(
            self.selection,
            scoring.lookahead,
            scoring.history,
            scoring.batch.contexts,
            self.scratch,
            options.sinks,
            options.recent,
            options.gamma + 1,
            "fill",
            self.budget_units // 2,
            0.0,
        )

    def compact(self) -> None:
        """Turn ``selection`` into the block table that attention reads."""
        batch = self.scoring.batch
        self.scoring.kernels.compact(
            self.table,
            self.lens,
            batch.block_table,
            self.selection,
            batch.contexts,
            batch.seq_lens,
            self.flags,
            self.unit,
            BLOCK,
        )

    def step(self, copy: int) -> None:
        """Everything a verification step adds to attention."""
        self.scoring.score_history(copy)
        self.scoring.score_lookahead(copy)
        self.select()
        self.compact()

    def call(self) -> Call:
        """Attention over what ``compact`` wrote."""
        batch = self.scoring.batch
        return Call(
            batch.options.target,
            batch.queries,
            torch.empty_like(batch.queries),
            self.table,
            self.lens,
            self.max_len,
            self.unit,
        )


# ---- correctness --------------------------------------------------------------------------


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the expected norm; NaN where ``out`` holds one."""
    return float((out - expected).norm() / expected.norm())


def row_cache(batch: Batch, cache: torch.Tensor, row: int, kv_head: int, length: int) -> Any:
    """[length, 2 * D] fp32 on the CPU: one key head's K|V of one sequence, in logical order."""
    blocks = batch.block_table[row, : -(-length // BLOCK)].long()
    return cache[blocks, :, kv_head].flatten(0, 1)[:length].float().cpu()


def sampled(batch: Batch) -> list[tuple[int, int]]:
    """(row, query head) pairs that are checked: first and last row; first, inner, last head."""
    heads = batch.options.target.heads
    return [
        (row, head)
        for row in sorted({0, batch.rows - 1})
        for head in sorted({0, heads // 2 + 1, heads - 1} & set(range(heads)))
    ]


def expected_outputs(
    batch: Batch, cache: torch.Tensor, num_queries: int, unit: int, selection: Any
) -> torch.Tensor:
    """``reference.sparse_attention`` of the sampled rows and heads, [samples, Q, D] fp32.

    Args:
        cache: one target layer's.
        selection: [R, K] units; None: all of them.
    """
    shape, outputs = batch.options.target, []
    for row, head in sampled(batch):
        context = int(batch.contexts[row])
        kv_head = head // (shape.heads // shape.kv_heads)
        both = row_cache(batch, cache, row, kv_head, context + num_queries)[:, None]
        units = range(context // unit) if selection is None else selection[row].tolist()
        queries = batch.queries[row, :num_queries, head][:, None].float().cpu()
        keys, values = both.split(shape.head_dim, dim=-1)
        scale = shape.head_dim**-0.5
        output = reference.sparse_attention(queries, keys, values, scale, units, context, unit)
        outputs.append(output[:, 0])
    return torch.stack(outputs)


def output_error(batch: Batch, out: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error of ``out`` [R, Q, H, D] on the samples; infinite if it is not all finite."""
    if not bool(torch.isfinite(out).all()):
        return float("inf")
    picked = torch.stack([out[row, :, head] for row, head in sampled(batch)])
    return relative_error(picked.float().cpu(), expected)


def scoring_errors(scoring: Scoring) -> dict[str, float]:
    """Relative errors of the token scores of the last row, from the kernels' copy 0."""
    batch, row = scoring.batch, scoring.batch.rows - 1
    options, context = batch.options, int(batch.contexts[row])
    errors = {}
    for name, shape, caches, heads, queries, length, out in (
        (
            "history",
            options.target,
            batch.caches[: options.target_scoring[0]],
            target_heads(options),
            scoring.target_queries,
            context,
            scoring.history,
        ),
        (
            "lookahead",
            options.draft,
            batch.draft_caches[0],
            draft_heads(options),
            batch.lookahead_queries,
            context + options.gamma,
            scoring.lookahead,
        ),
    ):
        group = shape.heads // shape.kv_heads
        expected = torch.zeros(length)
        for layer, cache in enumerate(caches):
            keys = [row_cache(batch, cache, row, head // group, length) for head in heads]
            mine = queries[row, :, layer * len(heads) : (layer + 1) * len(heads)].float().cpu()
            stacked = torch.stack(keys, dim=1)[..., : shape.head_dim]
            expected += reference.token_scores(mine, stacked, shape.head_dim**-0.5) / len(caches)
        errors[name] = relative_error(out[row, :length].cpu(), expected)
    return errors


def selection_overlap(selector: Selector) -> float:
    """Share of the last row's selection that the reference selects from the same scores."""
    scoring = selector.scoring
    batch, row = scoring.batch, scoring.batch.rows - 1
    options, context = batch.options, int(batch.contexts[row])
    wanted = reference.select_units(
        reference.unit_scores(scoring.lookahead[row].cpu(), context, selector.unit).tolist(),
        reference.unit_scores(
            scoring.history[row].cpu(), context, selector.unit, options.gamma + 1
        ).tolist(),
        context,
        selector.unit,
        selector.budget_units,
        options.sinks,
        options.recent,
        "fill",
        selector.budget_units // 2,
        0.0,
    )
    return len(set(wanted) & set(selector.selection[row].tolist())) / len(wanted)


def refusal(results: Sequence[dict[str, Any]]) -> list[str]:
    """What is wrong with the outputs, one line each; ratios are printed only if nothing is."""
    wrong = []
    for result in results:
        for name, error in result["errors"].items():
            if not error <= TOLERANCE:  # also refuses NaN
                wrong.append(f"batch {result['batch']}, {name}: relative error {error:.3g}")
        for name, overlap in result["overlaps"].items():
            if not overlap >= MIN_OVERLAP:
                wrong.append(f"batch {result['batch']}, {name}: selection overlaps {overlap:.1%}")
    return wrong


# ---- timing -------------------------------------------------------------------------------


def time_graph(record: Step, calls: int, seconds: float, poison: Step | None = None) -> Timing:
    """Time of one of the ``calls`` calls that ``record`` launches, from replays of a CUDA graph.

    ``poison`` runs before the replays: what they do not write then stays poisoned.
    """
    record()  # compiles kernels and sets their attributes, which a capture must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        record()
    if poison is not None:
        poison()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(200)]

    def replay(count: int) -> list[float]:
        # Behind a sleep the host gets ahead, so that no launch is waited for.
        torch.cuda._sleep(SLEEP_CYCLES)
        for start, end in events[:count]:
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events[:count]]

    first = statistics.median(replay(3))
    times = replay(int(min(len(events), max(10, 1000 * seconds / max(first, 1e-3)))))
    deciles = statistics.quantiles(times, n=10)
    scale = 1000 / calls
    return Timing(statistics.median(times) * scale, deciles[0] * scale, deciles[-1] * scale)


def copy_bandwidth(seconds: float) -> float:
    """Bytes per second of a large device-to-device pass, bytes read plus bytes written.

    By a kernel: as a copy in a graph it ran at 2.7 TB/s on an H200, slower than dense
    attention reads there.
    """
    source = torch.empty(1 << 29, dtype=DTYPE, device="cuda").normal_()
    target = torch.empty_like(source)
    timing = time_graph(lambda: torch.neg(source, out=target), 1, seconds)
    return 2 * source.nbytes / (timing.us * 1e-6)


def time_attention(
    batch: Batch,
    call: Call,
    kernel: Kernel,
    expected: torch.Tensor,
    name: str,
    errors: dict[str, float],
) -> dict[str, Any]:
    """Time a call with every candidate of ``num_splits`` and check what each wrote.

    Args:
        expected: of the last cache, see ``expected_outputs``.
        name: of the call, in ``errors``.
        errors: gets one entry per candidate, unless the kernel is a peer.

    Returns:
        ``us``, ``splits`` (the best), ``apart_us`` (its, see ``time_apart``; not a peer's),
        ``error`` (the worst), ``by_splits``: {num_splits: Timing}; or ``unavailable``: why there
        are no numbers.
    """
    passes = max(1, SMALL_PASSES // len(batch.caches)) if call.max_len < 8192 else 1
    by_splits, found = {}, {}
    try:
        for num_splits in kernel.splits:
            run = kernel.make(call, num_splits)

            def record(run: Callable[[torch.Tensor], object] = run) -> None:
                for _ in range(passes):
                    for cache in batch.caches:
                        run(cache)

            by_splits[num_splits] = time_graph(
                record,
                passes * len(batch.caches),
                batch.options.seconds,
                poison=lambda: call.out.fill_(torch.nan),
            )
            # What the last cache's call of the last replay left.
            found[f"{name}, num_splits {num_splits}"] = output_error(batch, call.out, expected)
    except Exception as error:
        if not kernel.peer and not isinstance(error, Unavailable):
            raise
        kind = "" if isinstance(error, Unavailable) else f"{type(error).__name__}: "
        return {"unavailable": f"{kind}{error}"[:500]}
    worst = max(found.values())
    best = min(by_splits, key=lambda number: by_splits[number].us)
    if not kernel.peer:
        errors.update(found)
    elif not worst <= TOLERANCE:
        return {"unavailable": f"wrong output, relative error {worst:.3g}"}
    return {
        "us": by_splits[best].us,
        "apart_us": None if kernel.peer else time_apart(batch, kernel.make(call, best), passes),
        "splits": best,
        "error": worst,
        "by_splits": {str(number): asdict(timing) for number, timing in by_splits.items()},
    }


def time_apart(batch: Batch, run: Callable[[torch.Tensor], object], passes: int) -> float:
    """Microseconds that a call adds behind a kernel that lets no other one begin before its end.

    ``passes`` over all caches are one graph.
    """
    between = torch.zeros(1, device=batch.contexts.device)

    def record(runs: bool) -> None:
        for cache in batch.caches * passes:
            between.add_(1)
            if runs:
                run(cache)

    calls = passes * len(batch.caches)
    both, alone = (
        time_graph(partial(record, runs), calls, batch.options.seconds).us for runs in (True, False)
    )
    return both - alone


def time_kernels(
    batch: Batch,
    make_call: Callable[[], Call],
    kernels: Mapping[str, Kernel],
    expected: torch.Tensor,
    name: str,
    errors: dict[str, float],
) -> dict[str, dict[str, Any]]:
    """``time_attention`` of each kernel, on a call of its own."""
    return {
        kernel: time_attention(batch, make_call(), used, expected, f"{name}, {kernel}", errors)
        for kernel, used in kernels.items()
    }


def time_steps(step: Callable[[int], None], copies: int, seconds: float, passes: int = 8) -> Timing:
    """Time of a step that works on one of several copies of the caches.

    Args:
        passes: calls in a graph, at least.
    """
    rounds = max(1, passes // copies)

    def record() -> None:
        for _ in range(rounds):
            for copy in range(copies):
                step(copy)

    return time_graph(record, rounds * copies, seconds)


# ---- the benchmark ------------------------------------------------------------------------


def attention_bytes(shape: ModelShape, tokens: int, queries: int) -> int:
    """Bytes that an attention call must move: K and V of ``tokens``, queries in, outputs out."""
    kv = tokens * shape.kv_heads * 2 * shape.head_dim
    return (kv + 2 * queries * shape.heads * shape.head_dim) * DTYPE.itemsize


def plan_caches(options: AttentionOptions, rows: int) -> tuple[int, int]:
    """(target layers, copies of the draft's scoring layers) to keep on the current device."""
    tokens = rows * (options.context + BLOCK)
    full = attention_bytes(options.target, tokens, 0)
    draft = attention_bytes(options.draft, tokens, 0) * options.draft_scoring[0]
    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    free, _ = torch.cuda.mem_get_info()
    copies = max(1, min(4, -(-CACHE_FACTOR * l2 // draft)))
    touched = attention_bytes(options.target, rows * min(options.budgets), 0)
    layers = count_layers(touched, full, l2, int(MEMORY_SHARE * free) - copies * draft)
    return max(layers, options.target_scoring[0]), copies


def measure(batch: Batch, bandwidth: float) -> dict[str, Any]:
    """All numbers of one batch, against a memory bandwidth in bytes per second."""
    options, rows = batch.options, batch.rows
    target, gamma = options.target, options.gamma
    errors: dict[str, float] = {}
    overlaps: dict[str, float] = {}
    result: dict[str, Any] = {
        "batch": rows,
        "rotated_layers": len(batch.caches),
        "errors": errors,
        "overlaps": overlaps,
    }
    last = batch.caches[-1]
    for name, num_queries in (("dense", gamma + 1), ("dense_one_query", 1)):
        expected = expected_outputs(batch, last, num_queries, BLOCK, None)
        kernels = time_kernels(
            batch,
            partial(dense_call, batch, num_queries),
            DENSE_KERNELS,
            expected,
            name.replace("_", " "),
            errors,
        )
        tokens = int(batch.contexts.sum()) + rows * num_queries
        moved = attention_bytes(target, tokens, rows * num_queries)
        timed = kernels.pop("flash")
        timed["floor_us"] = moved / bandwidth * 1e6
        timed["bytes_per_second"] = moved / (timed["us"] * 1e-6)
        timed["peers"] = kernels
        result[name] = timed

    scoring = Scoring(batch)
    scoring.score_history(0)
    scoring.score_lookahead(0)
    errors.update({f"{name} scores": e for name, e in scoring_errors(scoring).items()})
    parts = {
        name: time_steps(step, scoring.copies, options.seconds)
        for name, step in (
            ("history", scoring.score_history),
            ("lookahead", scoring.score_lookahead),
        )
    }
    result["scoring_floor_us"] = scoring.bytes_read() / bandwidth * 1e6
    result["sparse"] = []
    for granularity in options.granularities:
        for budget in options.budgets:
            selector = Selector(scoring, granularity, budget)
            selector.step(0)
            result["sparse"].append(
                _measure_sparse(selector, granularity, budget, parts, bandwidth, result)
            )
    return result


def usable(kernels: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Those with numbers that verification can run on."""
    return {
        kernel: timed
        for kernel, timed in kernels.items()
        if not KERNELS[kernel].peer and "us" in timed
    }


def _measure_sparse(
    selector: Selector,
    granularity: str,
    budget: int,
    parts: dict[str, Timing],
    bandwidth: float,
    result: dict[str, Any],
) -> dict[str, Any]:
    """Numbers of one granularity and budget; ``result`` holds the dense ones and the errors."""
    batch, options = selector.scoring.batch, selector.scoring.batch.options
    name = f"sparse, {granularity} {budget}"
    result["overlaps"][name] = selection_overlap(selector)
    width = options.gamma + 1
    expected = expected_outputs(batch, batch.caches[-1], width, selector.unit, selector.selection)
    kernels = time_kernels(batch, selector.call, KERNELS, expected, name, result["errors"])
    best = min(usable(kernels), key=lambda kernel: kernels[kernel]["us"])
    seconds = options.seconds
    parts = {
        **parts,
        "selection": time_steps(lambda _: selector.select(), 1, seconds, SMALL_PASSES),
        "compaction": time_steps(lambda _: selector.compact(), 1, seconds, SMALL_PASSES),
        "step": time_steps(selector.step, selector.scoring.copies, seconds),
    }
    tokens = int(selector.lens.sum())
    moved = attention_bytes(options.target, tokens, batch.rows * width)
    return {
        "granularity": granularity,
        "budget": budget,
        "us": kernels[best]["us"],
        "kernel": best,
        "kernels": kernels,
        "kv_tokens": tokens,
        "floor_us": moved / bandwidth * 1e6,
        "error": max(timed["error"] for timed in usable(kernels).values()),
        "scoring": {part: asdict(timing) for part, timing in parts.items()},
        "scoring_us_per_layer": parts["step"].us / options.target.layers,
    }


def add_ratios(results: Sequence[dict[str, Any]]) -> None:
    """Dense over sparse time, without and with the layer's share of scoring.

    ``speedup_apart`` is with it, and a kernel before each call (``time_apart``).
    """
    for result in results:
        dense = result["dense"]["us"]
        for sparse in result["sparse"]:
            per_layer = sparse["scoring_us_per_layer"]
            sparse["speedup"] = dense / sparse["us"]
            sparse["speedup_with_scoring"] = dense / (sparse["us"] + per_layer)
            apart = min(kernel["apart_us"] for kernel in usable(sparse["kernels"]).values())
            sparse["speedup_apart"] = result["dense"]["apart_us"] / (apart + per_layer)


def check_device() -> None:
    """Raise unless FlashAttention 3 of vLLM can run here.

    Raises:
        BenchError: it cannot; the message says what is missing.
    """
    if not torch.cuda.is_available():
        raise BenchError("bench attention needs a CUDA device of compute capability 9.0 (Hopper)")
    try:
        from vllm.vllm_flash_attn import fa_version_unsupported_reason, is_fa_version_supported
    except ImportError as error:
        raise BenchError(f"bench attention needs a CUDA build of vLLM: {error}") from error
    if not is_fa_version_supported(3):
        raise BenchError(f"FlashAttention 3: {fa_version_unsupported_reason(3)}")


def check_options(options: AttentionOptions) -> None:
    """Raise for settings that have nothing to drop or cannot be selected.

    Raises:
        BenchError: naming the setting.
    """
    for name in options.granularities:
        if name not in ("block", "token"):
            raise BenchError(f"granularity {name!r}: choose block or token")
    shortest = options.context - 48
    for budget in options.budgets:
        if budget % BLOCK or budget < options.sinks + options.recent + 2 * BLOCK:
            raise BenchError(f"budget {budget}: a multiple of {BLOCK} that holds sinks and recent")
        if budget >= shortest - BLOCK:
            raise BenchError(f"budget {budget} leaves nothing to drop of {options.context} tokens")
    if options.target_scoring[0] > MAX_LAYERS:
        raise BenchError(f"at most {MAX_LAYERS} scoring layers of the target")


def make_table(options: AttentionOptions, results: Sequence[dict[str, Any]]) -> Table:
    """One row per batch, granularity and budget. Times in µs per layer."""
    from rich.table import Table

    table = Table(
        title=f"Verification attention per layer, {options.target.label}, "
        f"{options.context} tokens, {options.gamma + 1} queries (µs)"
    )
    for title in ("batch", "unit", "budget", "dense", "q = 1", *KERNELS):
        table.add_column(title, justify="right")
    titles = ("floor", "gain", "scoring/step", "per layer", "gain with scoring", "apart", "error")
    for title in titles:
        table.add_column(title, justify="right")

    def us(timed: dict[str, Any]) -> str:
        return f"{timed['us']:.1f}" if "us" in timed else "–"

    for result in results:
        for sparse in result["sparse"]:
            table.add_row(
                str(result["batch"]),
                sparse["granularity"],
                str(sparse["budget"]),
                us(result["dense"]),
                us(result["dense_one_query"]),
                *(us(sparse["kernels"][kernel]) for kernel in KERNELS),
                f"{sparse['floor_us']:.1f}",
                f"{sparse['speedup']:.1f}x",
                f"{sparse['scoring']['step']['us']:.1f}",
                f"{sparse['scoring_us_per_layer']:.2f}",
                f"{sparse['speedup_with_scoring']:.1f}x",
                f"{sparse['speedup_apart']:.1f}x",
                f"{sparse['error']:.1e}",
            )
    return table


def detail_lines(result: dict[str, Any]) -> list[str]:
    """Every candidate of ``num_splits``, and the parts of scoring, of one batch size."""

    def candidates(timed: dict[str, Any]) -> str:
        if "unavailable" in timed:
            return timed["unavailable"]
        return ", ".join(
            f"{number}: {timing['us']:.1f}{'*' if int(number) == timed['splits'] else ''}"
            for number, timing in timed["by_splits"].items()
        )

    def by_kernel(kernels: dict[str, dict[str, Any]]) -> str:
        return "; ".join(f"{kernel} {candidates(timed)}" for kernel, timed in kernels.items())

    dense = result["dense"]
    lines = [
        f"batch {result['batch']} ({result['rotated_layers']} caches in turn), by num_splits, "
        "* best",
        f"  dense {candidates(dense)} (floor {dense['floor_us']:.1f}, "
        f"{dense['bytes_per_second'] / 1e12:.2f} TB/s); "
        f"one query {candidates(result['dense_one_query'])}; {by_kernel(dense['peers'])}",
    ]
    for sparse in result["sparse"]:
        parts = ", ".join(f"{name} {part['us']:.1f}" for name, part in sparse["scoring"].items())
        lines.append(
            f"  {sparse['granularity']} {sparse['budget']}: {by_kernel(sparse['kernels'])}; "
            f"{parts} (scoring floor {result['scoring_floor_us']:.1f})"
        )
    return lines


def plot(options: AttentionOptions, results: Sequence[dict[str, Any]], path: Path) -> None:
    """Speed-up over dense attention, without and with the layer's share of scoring.

    Raises:
        BenchError: matplotlib is not installed.
    """
    plt = pyplot()
    bars = [
        (f"{result['batch']}\n{sparse['granularity']}\n{sparse['budget']}", sparse)
        for result in results
        for sparse in result["sparse"]
    ]
    figure, axes = plt.subplots(figsize=(1.1 * len(bars) + 2, 4))
    positions = range(len(bars))
    for offset, key, label in (
        (-0.2, "speedup", "attention"),
        (0.2, "speedup_with_scoring", "with scoring and selection"),
    ):
        drawn = axes.bar(
            [position + offset for position in positions],
            [sparse[key] for _, sparse in bars],
            0.4,
            label=label,
        )
        axes.bar_label(drawn, fmt="%.1f", fontsize="small")
    axes.set_xticks(positions, [label for label, _ in bars])
    axes.set_ylabel("times dense attention")
    axes.set_title(f"{options.target.label}, {options.context} tokens, γ = {options.gamma}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def run_attention(
    options: AttentionOptions,
    console: Console,
    errors: Console,
    json_file: Path | None,
    plot_file: Path | None,
) -> int:
    """The whole benchmark.

    Returns:
        Exit code: 0, or 1 when it could not run or an output was wrong.
    """
    try:
        check_options(options)
        check_device()
        bandwidth = copy_bandwidth(options.seconds)
        errors.print(
            f"{torch.cuda.get_device_name()}: copies at {bandwidth / 1e12:.2f} TB/s (read + write)"
        )
        results = []
        for rows in options.batches:
            layers, copies = plan_caches(options, rows)
            batch = make_batch(options, rows, layers, copies, torch.device("cuda"))
            results.append(measure(batch, bandwidth))
            del batch
            for line in detail_lines(results[-1]):
                errors.print(line, markup=False, highlight=False)
            torch.cuda.empty_cache()
        wrong = refusal(results)
        if not wrong:
            add_ratios(results)
        if json_file is not None:
            data = {
                "benchmark": "attention",
                "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                "command": provenance.command(),
                "environment": provenance.environment(),
                "options": asdict(options),
                "copy_bytes_per_second": bandwidth,
                "correct": not wrong,
                "results": results,
            }
            write_json(json_file, data)
        if wrong:
            raise BenchError("wrong outputs, so there are no ratios:\n" + "\n".join(wrong))
        console.print(make_table(options, results))
        if plot_file is not None:
            plot(options, results, plot_file)
    except (BenchError, ResultsError) as error:
        errors.print(f"Error: {error}", style="red", markup=False, highlight=False)
        return 1
    return 0
