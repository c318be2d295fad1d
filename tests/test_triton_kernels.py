# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels against ``dustin_vllm.reference``.

On a GPU the whole grid runs; without one, a small grid runs under Triton's interpreter. What
kernels must not read (blocks outside the table, slots past the sequence, scratch, old output)
is NaN or garbage, and what they must write starts as garbage.
"""

from __future__ import annotations

import importlib
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from dustin_vllm import reference
from dustin_vllm import triton_kernels as kernels
from dustin_vllm.bench.kernels import Call, triton_attention, xformers_attention
from dustin_vllm.bench.presets import ModelShape
from dustin_vllm.triton_kernels import attention

CUDA = torch.cuda.is_available()  # else conftest.py has turned the interpreter on
DEVICE = "cuda" if CUDA else "cpu"
MIX = 0.3  # a lookahead weight that fp32 cannot hold exactly


@pytest.fixture(autouse=True)
def on_device():
    """New tensors, those of the reference included, are made on the device under test.

    Inputs are fresh in every run; the seed stands in the output of a test that fails.
    """
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    random.seed(seed)
    torch.manual_seed(seed)
    with torch.device(DEVICE):
        yield


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def garbage(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out - expected).norm() / expected.norm())


# ---- token scores ---------------------------------------------------------------------------

LAYOUTS = ("nhd", "hnd", "keys_only")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 1e-3}


class Cache:
    """Key caches of a few layers whose only finite values are the keys of ``lens`` tokens."""

    def __init__(
        self,
        lens: Sequence[int],
        dtype: torch.dtype,
        head_dim: int,
        num_kv_heads: int,
        block_size: int = 16,
        layers: int = 1,
        layout: str = "nhd",
        max_blocks: int = 0,
    ) -> None:
        blocks = [-(-length // block_size) for length in lens]
        num_blocks = sum(blocks) + 3
        # Block 0 belongs to nobody. All unused table entries point to it.
        order = torch.randperm(num_blocks - 1)[: sum(blocks)] + 1
        self.lens = lens
        self.seq_lens = int32(list(lens))
        self.table = torch.zeros(len(lens), max(max_blocks, *blocks, 1), dtype=torch.int32)
        self.keys = [
            [torch.randn(length, num_kv_heads, head_dim).to(dtype) for length in lens]
            for _ in range(layers)
        ]
        self.caches = []
        for layer in range(layers):
            width = head_dim if layout == "keys_only" else 2 * head_dim
            if layout == "hnd":
                memory = torch.full((num_blocks, num_kv_heads, block_size, width), torch.nan)
                cache = memory.to(dtype).transpose(1, 2)
            else:
                memory = torch.full((num_blocks, block_size, num_kv_heads, width), torch.nan)
                cache = memory.to(dtype)
            self.caches.append(cache[..., :head_dim])
            begin = 0
            for row, length in enumerate(lens):
                mine = order[begin : begin + blocks[row]]
                begin += blocks[row]
                self.table[row, : blocks[row]] = mine
                position = torch.arange(length)
                block = mine[position // block_size]
                self.caches[layer][block, position % block_size] = self.keys[layer][row]


def poison(workspace: Any) -> None:
    for name in ("probs", "tile_max", "split_stats"):
        getattr(workspace, name).fill_(torch.nan)


def expected_scores(
    queries: torch.Tensor,
    keys: Sequence[torch.Tensor],
    heads: Sequence[Sequence[int]],
    group: int,
    scale: float,
    aggregate: str,
) -> torch.Tensor:
    """One sequence: queries [Q, all heads, D], keys per layer [L, Hkv, D]."""
    parts, weights, first = [], [], 0
    for layer_keys, layer_heads in zip(keys, heads, strict=True):
        for kv_head, run in itertools.groupby(head // group for head in layer_heads):
            count = len(list(run))
            mine = queries[:, first : first + count]
            key = layer_keys[:, kv_head : kv_head + 1]
            parts.append(reference.token_scores(mine, key, scale, aggregate))
            weights.append(count)
            first += count
    stacked = torch.stack(parts)
    if aggregate == "max":
        return stacked.amax(0)
    return torch.tensor(weights, dtype=torch.float32) @ stacked / sum(weights)


def check_token_scores(
    cache: Cache,
    num_queries: int,
    heads: Sequence[Sequence[int]],
    group: int,
    aggregate: str = "mean",
    max_bytes: int = 256 << 20,
    row_weight: float | None = None,
    checked_rows: int = 8,
    tolerance: float | None = None,
) -> None:
    keys = cache.caches[0]
    dtype, head_dim, rows = keys.dtype, keys.shape[3], len(cache.lens)
    num_heads = sum(map(len, heads))
    scale = head_dim**-0.5
    queries = (torch.randn(rows, num_queries, num_heads, head_dim) * 2).to(dtype)
    context = max(cache.lens)
    plan = kernels.scoring_plan(cache.caches, heads, keys.shape[2] * group)
    workspace = kernels.token_scores_workspace(
        plan.size, num_queries, rows, context, DEVICE, max_bytes
    )
    poison(workspace)
    out = torch.full((rows, context), torch.nan)
    result = kernels.token_scores(
        out,
        queries,
        plan,
        cache.table,
        cache.seq_lens,
        workspace,
        scale,
        aggregate,
        row_weight,
    )
    assert result is out
    assert out.isfinite().all()
    factor = 1.0 if row_weight is None else row_weight * num_queries * num_heads
    order = sorted(range(rows), key=lambda row: -cache.lens[row])
    for row in [*order[: checked_rows - 1], order[-1]]:
        length = cache.lens[row]
        assert not out[row, length:].any()
        if length:
            row_keys = [layer[row] for layer in cache.keys]
            expected = expected_scores(queries[row], row_keys, heads, group, scale, aggregate)
            error = relative_error(out[row, :length], expected * factor)
            assert error < (tolerance or TOLERANCE[dtype]), f"row {row} of {length} tokens"


def some_heads(layers: int, num_kv_heads: int, group: int) -> list[list[int]]:
    """Scoring heads per layer: all of them first, then a random subset of each layer's."""
    everything = list(range(num_kv_heads * group))
    subsets = [
        sorted(random.sample(everything, random.randint(1, len(everything))))
        for _ in range(layers - 1)
    ]
    return [everything, *subsets]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128] if CUDA else [64])
@pytest.mark.parametrize("group", range(1, 9) if CUDA else [1, 7])
@pytest.mark.parametrize("num_queries", range(1, 9) if CUDA else [1, 4])
def test_token_scores(dtype: torch.dtype, head_dim: int, group: int, num_queries: int) -> None:
    lens = [1000, 0, num_queries, 2049, 16, 130] if CUDA else [300, 0, num_queries, 129]
    cache = Cache(lens, dtype, head_dim, 2, layers=2, layout="nhd")
    check_token_scores(cache, num_queries, some_heads(2, 2, group), group)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_size", [1, 16, 32])
def test_token_scores_of_layouts_and_block_sizes(layout: str, block_size: int) -> None:
    cache = Cache([257, 0, 64], torch.float16, 64, 2, block_size, layers=2, layout=layout)
    check_token_scores(cache, 4, [[0, 1, 3], [2]], 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_token_scores_under_max(dtype: torch.dtype) -> None:
    cache = Cache([200, 3, 0], dtype, 64, 2, layers=2)
    check_token_scores(cache, 3, [[0, 1, 2, 3], [1, 2]], 2, aggregate="max")


def test_token_scores_of_an_odd_head_dim() -> None:
    check_token_scores(Cache([150], torch.float16, 80, 1), 2, [[0, 1, 2]], 3)


def test_token_scores_with_a_small_workspace_and_a_rank_weight() -> None:
    """A workspace of one sequence gives the same result as one of all sequences."""
    cache = Cache([130, 0, 40], torch.float16, 64, 2)
    check_token_scores(cache, 2, [[0, 1]], 1, max_bytes=1, row_weight=0.125)


@pytest.mark.parametrize("programs", [1, 12])
def test_token_scores_of_long_splits(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of several key tiles: their maxima grow from tile to tile."""
    module = importlib.import_module("dustin_vllm.triton_kernels.score")
    monkeypatch.setattr(module, "TARGET_PROGRAMS", programs)
    cache = Cache([700, 200, 0], torch.float16, 64, 2)
    check_token_scores(cache, 3, [[0, 1, 2, 3]], 2)
    check_token_scores(cache, 1, [[1, 2]], 2, aggregate="max")


def test_token_scores_of_strided_queries() -> None:
    """Queries captured pass by pass are [Q, R, H, D]; no copy is needed to score them."""
    cache = Cache([100, 70], torch.float32, 64, 2)
    captured = torch.randn(3, 2, 4, 64)
    plan = kernels.scoring_plan(cache.caches, [[0, 1, 2, 3]], 4)
    workspace = kernels.token_scores_workspace(plan.size, 3, 2, 100, DEVICE)
    outs = []
    for queries in (captured.transpose(0, 1), captured.transpose(0, 1).contiguous()):
        out = torch.full((2, 100), torch.nan)
        poison(workspace)
        kernels.token_scores(out, queries, plan, cache.table, cache.seq_lens, workspace, 0.125)
        outs.append(out)
    assert torch.equal(outs[0], outs[1])


def test_token_scores_keep_extreme_logits_finite() -> None:
    """A row may put everything on one position, and splits may differ by thousands."""
    cache = Cache([300], torch.float32, 64, 1)
    cache.caches[0].mul_(100)
    cache.keys[0][0].mul_(100)
    check_token_scores(cache, 2, [[0]], 1, tolerance=1e-3)


@pytest.mark.skipif(not CUDA, reason="too slow for the interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("head_dim", "group", "num_queries"), [(64, 7, 4), (128, 8, 1)])
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 64])
def test_token_scores_of_long_ragged_batches(
    dtype: torch.dtype, head_dim: int, group: int, num_queries: int, rows: int
) -> None:
    lens = [131072, 0, *(random.randint(1, 20_000) for _ in range(62))][:rows]
    cache = Cache(lens, dtype, head_dim, 2)
    check_token_scores(cache, num_queries, [[0, 1, group, group + 1]], group, checked_rows=4)


def test_token_scores_refuse_what_does_not_fit() -> None:
    cache = Cache([32], torch.float16, 64, 1)
    plan = kernels.scoring_plan(cache.caches, [[0, 1]], 2)
    workspace = kernels.token_scores_workspace(plan.size, 2, 1, 32, DEVICE)
    out, queries = torch.empty(1, 32), torch.zeros(1, 2, 2, 64, dtype=torch.float16)

    def call(**changed: Any) -> None:
        arguments = {
            "out": out,
            "queries": queries,
            "plan": plan,
            "block_table": cache.table,
            "seq_lens": cache.seq_lens,
            "workspace": workspace,
            "scale": 1.0,
        }
        kernels.token_scores(**{**arguments, **changed})

    call()
    for changed, message in (
        ({"queries": queries[:, :1]}, "queries"),
        ({"queries": queries.float()}, "float32"),
        ({"out": torch.empty(1, 400)}, "400"),
        ({"out": out.half()}, "out"),
        ({"seq_lens": cache.seq_lens.long()}, "seq_lens"),
        ({"block_table": cache.table.long()}, "block_table"),
        ({"aggregate": "sum"}, "'sum'"),
    ):
        with pytest.raises(ValueError, match=message):
            call(**changed)
    with pytest.raises(ValueError, match="heads"):
        kernels.scoring_plan(cache.caches, [[2]], 2)
    with pytest.raises(ValueError, match="strides"):
        kernels.scoring_plan([cache.caches[0].transpose(1, 3)], [[0]], 16)
    with pytest.raises(ValueError, match="200"):
        kernels.token_scores_workspace(plan.size, 100, 1, 32, DEVICE)


# ---- selection ------------------------------------------------------------------------------


def expected_selection(
    lookahead: torch.Tensor, history: torch.Tensor, context: int, unit: int, options: dict
) -> list[int]:
    with torch.device("cpu"):
        look = reference.unit_scores(lookahead.cpu(), context, unit)
        hist = reference.unit_scores(history.cpu(), context, unit, options["dilation"])
        return reference.select_units(
            look.tolist(),
            hist.tolist(),
            context,
            unit,
            options["budget"],
            options["sinks"],
            options["recent"],
            options["merge"],
            options["lookahead_units"],
            options["lookahead_weight"],
        )


def check_selection(
    contexts: Sequence[int],
    unit: int,
    width: int,
    kind: str = "ties",
    checked_rows: int = 64,
    **changed: Any,
) -> None:
    options: dict[str, Any] = {
        "budget": 16,
        "sinks": 4,
        "recent": 2 * unit,
        "dilation": 3,
        "merge": "fill",
        "lookahead_units": 5,
        "lookahead_weight": MIX,
        **changed,
    }
    shape = (len(contexts), width)
    if kind == "ties":  # sums of small integers are exact, whatever their order
        lookahead, history = (torch.randint(0, 3, shape).float() for _ in range(2))
    elif kind == "zeros":
        lookahead, history = torch.zeros(shape), torch.zeros(shape)
    else:
        lookahead, history = (torch.rand(shape) ** 8 for _ in range(2))
    for row, context in enumerate(contexts):
        lookahead[row, context:] = torch.nan
        history[row, context:] = torch.nan
    budget = options.pop("budget")
    workspace = kernels.select_workspace(
        len(contexts), width, unit, budget, options["lookahead_units"], DEVICE
    )
    for name in ("keys", "units", "counts"):
        tensor = getattr(workspace, name)
        tensor.copy_(garbage(*tensor.shape))
    selection = garbage(len(contexts), budget)
    result = kernels.merge_and_select(
        selection, lookahead, history, int32(list(contexts)), workspace, **options
    )
    assert result is selection
    for row, context in list(enumerate(contexts))[:checked_rows]:
        units = expected_selection(
            lookahead[row], history[row], context, unit, {**options, "budget": budget}
        )
        padded = units + [units[-1] if units else 0] * (budget - len(units))
        assert selection[row].tolist() == padded, f"row {row}, context {context}"


@pytest.mark.parametrize("kind", ["ties", "zeros"])
@pytest.mark.parametrize("merge", ["fill", "weighted"])
@pytest.mark.parametrize("unit", [1, 2, 16, 32])
@pytest.mark.parametrize("dilation", [0, 1, 5])
def test_selection_is_exact(kind: str, merge: str, unit: int, dilation: int) -> None:
    contexts = [40 * unit, 40 * unit + unit // 2 + 1, 17 * unit, 16 * unit, 5 * unit, 1, 0]
    check_selection(contexts, unit, 41 * unit, kind, merge=merge, dilation=dilation)


@pytest.mark.parametrize("lookahead_units", [0, 1, 9, 100])
def test_selection_splits_the_budget(lookahead_units: int) -> None:
    """None by lookahead, some, and more than there is room for."""
    check_selection([300, 77], 1, 300, lookahead_units=lookahead_units)


@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (5, 11), (16, 0), (0, 16)])
@pytest.mark.parametrize("unit", [1, 16])
def test_selection_protects_sinks_and_recent(sinks: int, recent: int, unit: int) -> None:
    check_selection([23 * unit + unit // 2, 20 * unit], unit, 24 * unit, sinks=sinks, recent=recent)


@pytest.mark.parametrize("merge", ["fill", "weighted"])
def test_selection_of_continuous_scores(merge: str) -> None:
    """Unit 1 adds nothing up, so any scores select exactly; fp32 rounding of the mix included."""
    check_selection([500, 499, 250], 1, 512, "continuous", merge=merge)


@pytest.mark.parametrize("kind", ["ties", "continuous", "zeros"])
@pytest.mark.parametrize("merge", ["fill", "weighted"])
def test_selection_with_preselection(
    kind: str, merge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts of several pieces: each piece keeps only what can be among the best of all."""
    module = importlib.import_module("dustin_vllm.triton_kernels.select")
    monkeypatch.setattr(module, "PRESELECT_TILE", 64)
    check_selection([500, 64, 65, 130, 10, 0], 1, 500, kind, merge=merge)
    check_selection([500, 129], 1, 500, kind, merge=merge, budget=100, lookahead_units=90)


@pytest.mark.skipif(not CUDA, reason="too slow for the interpreter")
@pytest.mark.parametrize("kind", ["ties", "continuous"])
@pytest.mark.parametrize("merge", ["fill", "weighted"])
@pytest.mark.parametrize(
    ("unit", "budget", "width"),
    [(1, 512, 32768), (1, 1024, 131072), (16, 32, 32768), (16, 64, 131072), (1, 128, 8000)],
)
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_selection_at_full_size(
    kind: str, merge: str, unit: int, budget: int, width: int, rows: int
) -> None:
    if kind == "continuous" and unit > 1:
        pytest.skip("sums of continuous scores depend on their order")
    contexts = [width, *(random.randint(0, width) for _ in range(rows - 1))]
    check_selection(
        contexts,
        unit,
        width,
        kind,
        checked_rows=3,
        merge=merge,
        budget=budget,
        recent=64,
        dilation=5,
        lookahead_units=budget // 2,
    )


def test_selection_survives_invalid_scores() -> None:
    """NaN, infinite or negative scores must not leave the context: memory safety."""
    scores = torch.randn(1, 200)
    scores[0, ::3] = torch.nan
    scores[0, ::7] = torch.inf
    workspace = kernels.select_workspace(1, 200, 1, 16, 5, DEVICE)
    selection = garbage(1, 16)
    kernels.merge_and_select(
        selection, scores, -scores, int32([190]), workspace, 4, 8, 2, "fill", 5, MIX
    )
    chosen = selection[0].tolist()
    assert chosen == sorted(set(chosen))
    assert chosen[0] == 0
    assert chosen[-1] == 189


def test_selection_refuses_what_does_not_fit() -> None:
    scores, contexts = torch.zeros(1, 64), int32([64])
    workspace = kernels.select_workspace(1, 64, 1, 8, 4, DEVICE)
    selection = garbage(1, 8)
    with pytest.raises(ValueError, match="protect 10 units"):
        kernels.merge_and_select(
            selection, scores, scores, contexts, workspace, 4, 6, 0, "fill", 4, MIX
        )
    with pytest.raises(ValueError, match="'best'"):
        kernels.merge_and_select(
            selection, scores, scores, contexts, workspace, 1, 1, 0, "best", 4, MIX
        )
    wide = torch.zeros(1, 65)
    with pytest.raises(ValueError, match="too small"):
        kernels.merge_and_select(
            selection, wide, wide, contexts, workspace, 1, 1, 0, "fill", 4, MIX
        )
    with pytest.raises(ValueError, match="history"):
        kernels.merge_and_select(
            selection, scores, scores.half(), contexts, workspace, 1, 1, 0, "fill", 4, MIX
        )
    with pytest.raises(ValueError, match="not 3"):
        kernels.select_workspace(1, 64, 3, 8, 4, DEVICE)


# ---- kept queries ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize(("heads", "chosen"), [(14, [0, 3, 13]), (8, list(range(8))), (2, [1])])
def test_gathered_queries(dtype, head_dim, heads, chosen) -> None:
    packed = torch.randn(37, 3 * heads, head_dim).to(dtype)
    queries = packed[:, heads : 2 * heads]  # as a slice of a fused projection
    rows = torch.randint(0, 37, (11,))
    buffer = torch.full((15, len(chosen) + 2, head_dim), float("nan"), dtype=dtype)
    kernels.gather_queries(buffer[2:13, 1:-1], queries, rows, int32(chosen))
    assert torch.equal(buffer[2:13, 1:-1], queries[rows][:, chosen])
    untouched = torch.ones(buffer.shape, dtype=torch.bool)
    untouched[2:13, 1:-1] = False
    assert buffer[untouched].isnan().all()


def test_gathering_refuses_what_does_not_fit() -> None:
    out, queries = torch.zeros(3, 2, 64), torch.zeros(5, 4, 64)
    rows, heads = torch.zeros(3, dtype=torch.int64), int32([0, 1])
    with pytest.raises(ValueError, match=r"queries .* do not fit out"):
        kernels.gather_queries(out, queries.half(), rows, heads)
    with pytest.raises(ValueError, match=r"rows must be \[3\]"):
        kernels.gather_queries(out, queries, rows[:2], heads)
    with pytest.raises(ValueError, match=r"heads must be \[2\] torch.int32"):
        kernels.gather_queries(out, queries, rows, heads.long())
    with pytest.raises(ValueError, match="contiguous"):
        kernels.gather_queries(
            out.transpose(1, 2).contiguous().transpose(1, 2), queries, rows, heads
        )


# ---- compaction -----------------------------------------------------------------------------


@pytest.mark.parametrize("unit", [1, 4, 16])
@pytest.mark.parametrize("rows", [1, 7, 64] if CUDA else [7])
def test_compaction(unit: int, rows: int) -> None:
    block_size, budget = 16, 12
    longest = 131072 if CUDA else 2500
    lengths = [700, 0, longest, 205, 16, 3000 if CUDA else 33]
    seq_lens = [lengths[row % len(lengths)] for row in range(rows)]
    new_tokens = [min(5, length) for length in seq_lens]
    contexts = [length - new for length, new in zip(seq_lens, new_tokens, strict=True)]
    flags = [int(length > 0 and row % 3 != 2) for row, length in enumerate(seq_lens)]
    if rows == 1:
        flags = [1]
    table = torch.randint(0, 1 << 26, (rows, longest // block_size + 1), dtype=torch.int32)
    selections = garbage(rows, budget)
    chosen = []
    for row, context in enumerate(contexts):
        units = context // unit
        picked = sorted(random.sample(range(units), min(budget, units))) if flags[row] else []
        selections[row, : len(picked)] = int32(picked)
        chosen.append(picked)
    table_out = garbage(rows, -(-longest // unit))
    lens_out = garbage(rows)
    kernels.compact(
        table_out,
        lens_out,
        table,
        selections,
        int32(contexts),
        int32(seq_lens),
        int32(flags),
        unit,
        block_size,
    )
    for row in range(min(rows, 7)):
        blocks = table[row].tolist()
        if unit == 4:  # pages of a quarter of a block; the reference knows blocks and tokens
            blocks = [4 * block + part for block in blocks for part in range(4)]
        sparse = bool(flags[row])
        entries, length = reference.compact_row(
            blocks,
            chosen[row],
            contexts[row] if sparse else 0,
            seq_lens[row],
            unit,
            block_size if unit != 4 else 4,
        )
        assert int(lens_out[row]) == length
        assert table_out[row, : len(entries)].tolist() == entries


def test_compaction_stays_inside_a_narrow_table() -> None:
    """A row that does not fit is cut, not written into the next row."""
    table_out, lens_out = torch.full((2, 3), -7, dtype=torch.int32), garbage(2)
    table = torch.arange(20, dtype=torch.int32).view(2, 10)
    arguments = (table, int32([[0], [0]]), int32([0, 0]), int32([160, 0]), int32([0, 0]))
    kernels.compact(table_out, lens_out, *arguments, 16, 16)
    assert table_out.tolist() == [[0, 1, 2], [-7, -7, -7]]


def test_compaction_refuses_what_does_not_fit() -> None:
    table, lens = garbage(2, 4), garbage(2)
    with pytest.raises(ValueError, match="unit 3"):
        kernels.compact(table, lens, table, table, lens, lens, lens, 3, 16)
    with pytest.raises(ValueError, match="flags"):
        kernels.compact(table, lens, table, table, lens, lens, lens.bool(), 16, 16)
    with pytest.raises(ValueError, match="contexts"):
        kernels.compact(table, lens, table, table, lens[:1], lens, lens, 16, 16)


# ---- attention ------------------------------------------------------------------------------


def check_attention(
    lens: Sequence[int],
    new: Sequence[int],
    dtype: torch.dtype,
    head_dim: int,
    num_kv_heads: int,
    group: int,
    page_size: int,
    num_splits: int,
    layout: str = "nhd",
    launch: Callable[..., object] | None = None,
) -> None:
    """Against fp32. Unused pages, the tail of the last page and the scratch are NaN.

    ``launch``: another kernel, called like ``paged_attention`` without a workspace.
    """
    rows, max_queries = len(lens), max(new)
    keys, values = (Cache(lens, dtype, head_dim, num_kv_heads, page_size) for _ in range(2))
    width = 2 * head_dim
    pages = keys.caches[0].shape[0]
    if layout == "nhd":
        packed = torch.full((pages, page_size, num_kv_heads, width), torch.nan).to(dtype)
    else:
        memory = torch.full((pages, num_kv_heads, page_size, width), torch.nan).to(dtype)
        packed = memory.transpose(1, 2)
    key_cache, value_cache = packed.split(head_dim, dim=-1)
    key_cache.copy_(keys.caches[0])
    for row, length in enumerate(lens):
        position = torch.arange(length)
        block = keys.table[row].long()[position // page_size]
        value_cache[block, position % page_size] = values.keys[0][row]
    starts = [sum(new[:i]) for i in range(rows + 1)]
    tokens = starts[-1] + 3  # padding behind the last row
    fused = torch.randn(tokens, 3 * num_kv_heads * group, head_dim).to(dtype)
    queries = fused[:, : num_kv_heads * group]
    out = torch.full((tokens, num_kv_heads * group, head_dim), torch.nan).to(dtype)
    workspace = kernels.attention_workspace(
        rows, num_kv_heads, max_queries * group, head_dim, rows * num_kv_heads * 4, DEVICE
    )
    workspace.partial.fill_(torch.nan)
    workspace.stats.fill_(torch.nan)
    for _ in range(2):  # the second launch finds what the first one left
        out.fill_(torch.nan)
        inputs = (
            *(out, queries, key_cache, value_cache, keys.table, keys.seq_lens),
            *(int32(starts), max_queries, head_dim**-0.5),
        )
        if launch is None:
            kernels.paged_attention(*inputs, workspace, num_splits)
        else:
            launch(*inputs, num_splits)
        assert out[starts[-1] :].isnan().all()
        assert not workspace.arrived.any()
        for row in range(rows):
            if new[row] == 0:
                continue
            span = slice(starts[row], starts[row + 1])
            wanted = reference.sparse_attention(
                queries[span], keys.keys[0][row], values.keys[0][row], head_dim**-0.5, [], 0, 1
            )
            error = relative_error(out[span].float(), wanted)
            assert error < {torch.float32: 1e-5, torch.float16: 2e-3}.get(dtype, 6e-3), row


LENS = (533, 40, 5, 0, 700, 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256] if CUDA else [64])
@pytest.mark.parametrize("group", range(1, 9) if CUDA else [1, 7])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_attention(dtype, head_dim, group, page_size, num_splits) -> None:
    check_attention(LENS, (5, 1, 5, 0, 3, 2), dtype, head_dim, 2, group, page_size, num_splits)


@pytest.mark.parametrize("queries", range(1, 10))
@pytest.mark.parametrize("num_splits", [1, 4])
def test_attention_of_any_number_of_queries(queries, num_splits) -> None:
    lens = [queries, queries + 1, 129]
    check_attention(lens, [queries] * 3, torch.float16, 64, 1, 8, 16, num_splits)


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("page_size", [16, 32])
def test_attention_of_layouts(layout, page_size) -> None:
    check_attention(LENS, (5, 1, 5, 0, 3, 2), torch.float16, 80, 3, 4, page_size, 2, layout)


@pytest.mark.skipif(not CUDA, reason="takes minutes under the interpreter; same kernel")
@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_attention_of_long_ragged_batches(rows, num_splits) -> None:
    lens = [random.randint(5, 40000 // max(1, rows // 4)) for _ in range(rows)]
    new = [random.randint(1, 5) for _ in range(rows)]
    check_attention(lens, new, torch.bfloat16, 128, 8, 8, 16, num_splits)


@pytest.mark.parametrize("tuning", attention.TUNINGS, ids=str)
def test_attention_under_every_tuning(tuning, monkeypatch) -> None:
    keys = []
    monkeypatch.setattr(attention, "_device_tuning", lambda *key: keys.append(key[:3]) or tuning)
    check_attention(LENS, (5, 1, 5, 0, 3, 2), torch.float16, 64, 2, 7, 16, 2)
    assert set(keys) == {(5 * 7, 64, 2)}


@pytest.mark.parametrize(
    ("query_rows", "head_dim", "itemsize", "shared_memory", "tile", "stages"),
    [
        (40, 128, 2, 232448, 64, 5),  # Hopper
        (128, 128, 2, 232448, 64, 5),
        (40, 256, 2, 232448, 64, 5),
        (1, 256, 4, 232448, 32, 5),  # 64 tokens would take 283712 bytes
        (40, 128, 2, 166912, 64, 5),  # compute capability 8.0
        (40, 128, 2, 101376, 32, 5),  # 8.6 and 8.9
        (7, 64, 2, 101376, 64, 5),
        (40, 256, 2, 65536, 16, 3),  # 7.5: nothing is known to fit, the smallest may
    ],
)
def test_tuning_fits_the_device(
    query_rows, head_dim, itemsize, shared_memory, tile, stages
) -> None:
    tuning = attention.default_tuning(query_rows, head_dim, itemsize, shared_memory)
    assert (tuning.tile, tuning.stages) == (tile, stages)


@pytest.mark.skipif(not CUDA, reason="xformers runs on a GPU only")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "queries"),
    [(64, 8, 128, 5), (28, 4, 128, 5), (14, 2, 64, 1), (14, 2, 64, 6)],
)
@pytest.mark.parametrize("num_splits", [1, 4])
def test_attention_agrees_with_xformers(heads, kv_heads, head_dim, queries, num_splits) -> None:
    """A second oracle, which shares no code with the reference."""
    pytest.importorskip("xformers")
    lens = [533, queries, 1040, 64]
    blocks = [-(-length // 16) for length in lens]
    table = torch.zeros(len(lens), max(blocks) + 3, dtype=torch.int32)
    order = torch.randperm(sum(blocks)) + 1
    for row, count in enumerate(blocks):
        table[row, :count] = order[sum(blocks[:row]) :][:count]
    # Finite throughout: xformers multiplies what lies behind a sequence by a weight of 0.
    cache = torch.randn(sum(blocks) + 1, 16, kv_heads, 2 * head_dim, dtype=torch.bfloat16)
    shape = ModelShape(1, heads, kv_heads, head_dim)
    asked = torch.randn(len(lens), queries, heads, head_dim, dtype=torch.bfloat16)
    outs = []
    for make in (triton_attention, xformers_attention):
        out = torch.full_like(asked, torch.nan)
        call = Call(shape, asked, out, table, int32(lens), max(lens), 16)
        make(call, num_splits)(cache)
        outs.append(call.out.float())
    assert relative_error(*outs) < 6e-3


def test_attention_refuses_what_does_not_fit() -> None:
    workspace = kernels.attention_workspace(2, 2, 20, 64, 16, DEVICE)
    queries = torch.zeros(6, 8, 64)
    cache = torch.zeros(4, 16, 2, 64)
    table, lens, starts = int32([[1], [2]]), int32([5, 6]), int32([0, 3, 6])

    def attend(**changes: Any) -> None:
        arguments = {
            "out": torch.zeros(6, 8, 64),
            "queries": queries,
            "key_cache": cache,
            "value_cache": cache,
            "block_table": table,
            "seq_lens": lens,
            "query_starts": starts,
            "max_queries": 3,
            "scale": 0.1,
            "workspace": workspace,
        }
        kernels.paged_attention(**{**arguments, **changes})

    attend()
    for changes, message in (
        ({"max_queries": 6}, "exceed the workspace's 20 query rows"),
        ({"queries": queries[:, :7]}, "no multiple"),
        ({"queries": queries.half()}, "one dtype"),
        ({"value_cache": cache.transpose(1, 2).contiguous().transpose(1, 2)}, "strides"),
        ({"key_cache": torch.zeros(4, 12, 2, 64)}, "power of two"),
        ({"seq_lens": lens.long()}, "seq_lens must be"),
        ({"query_starts": starts[:2]}, "query_starts must be"),
        ({"out": torch.zeros(5, 8, 64)}, "do not fit out"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(**changes)
    with pytest.raises(ValueError, match="at most 128"):
        kernels.attention_workspace(2, 2, 129, 64, 16, DEVICE)


# ---- all of it in a CUDA graph --------------------------------------------------------------


@pytest.mark.skipif(not CUDA, reason="needs CUDA graphs")
@pytest.mark.parametrize("unit", [1, 16])
def test_graph_replay_follows_its_inputs(unit: int) -> None:
    """Captured at the largest shapes, replayed with other lengths, tables and keys."""
    rows, num_queries, longest, gamma = 4, 2, 20_000, 4
    budget = 512 // unit
    cache = Cache([longest] * rows, torch.bfloat16, 64, 2, layers=2)
    plan = kernels.scoring_plan(cache.caches, [[0, 1, 2, 3], [1, 2]], 4)
    queries = torch.randn(rows, num_queries, 6, 64).bfloat16()
    scoring = kernels.token_scores_workspace(plan.size, num_queries, rows, longest, DEVICE)
    selecting = kernels.select_workspace(rows, longest, unit, budget, budget // 2, DEVICE)
    scores = torch.full((rows, longest), torch.nan)
    contexts, seq_lens, flags = int32([longest - gamma] * rows), cache.seq_lens, int32([1] * rows)
    selection = garbage(rows, budget)
    table_out, lens_out = garbage(rows, longest // unit + 1), garbage(rows)

    def step() -> None:
        kernels.token_scores(scores, queries, plan, cache.table, seq_lens, scoring, 0.125)
        kernels.merge_and_select(
            selection, scores, scores, contexts, selecting, 4, 64, 5, "fill", budget // 2, MIX
        )
        kernels.compact(
            table_out, lens_out, cache.table, selection, contexts, seq_lens, flags, unit, 16
        )

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lens in ([longest, 3000, 0, 700], [9, 20_000, 12_345, 64]):
        queries.copy_(torch.randn(queries.shape))
        cache.table.copy_(cache.table[torch.randperm(rows)])
        seq_lens.copy_(int32(lens))
        contexts.copy_((seq_lens - gamma).clamp(min=0))
        flags.copy_((contexts // unit > budget).int())
        results = []
        for run in (graph.replay, step):
            poison(scoring)
            for tensor in (selection, table_out, lens_out):
                tensor.copy_(garbage(*tensor.shape))
            scores.fill_(torch.nan)
            run()
            torch.cuda.synchronize()
            used = [table_out[row, : -(-int(lens_out[row]) // unit)].clone() for row in range(rows)]
            results.append([scores.clone(), selection.clone(), lens_out.clone(), *used])
        for replayed, eager in zip(*results, strict=True):
            assert torch.equal(replayed, eager)
        assert int(lens_out[0]) <= 512 + unit + gamma or not flags[0]
