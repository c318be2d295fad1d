# SPDX-License-Identifier: Apache-2.0
# Kernel arguments are pointers and tensors of Triton, which has no types for them.
# mypy: allow-untyped-defs
"""Token scores: the attention probability that scoring heads put on every cached position.

Flash kernels expose no probabilities, so this is a QK^T pass of its own, in two launches for
all scoring layers of one model:

1. One program per (split of the context, key head, sequence) reads its keys once for all
   queries and all scoring heads of that key head, and stores un-normalised probabilities
   next to the maximum they are relative to.
2. One program per (piece of the context, sequence) brings every row to its own softmax
   denominator and aggregates all rows.

Layers are told apart by a device table of key addresses, not by one launch each: a draft's
three layers then fill the GPU together, and a graph holds two nodes instead of six.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

TILE = 128  # tokens per key tile
FP32_TILE = 32  # fp32 (for tests) is multiplied without tensor cores: larger tiles spill
REDUCE_TOKENS = 1024  # tokens per program of the second pass
REDUCE_ROWS = 8  # softmax rows that the second pass adds at a time
TARGET_PROGRAMS = 2048  # of the first pass: about four waves on 132 multiprocessors
MAX_SPLITS = 256
MAX_QUERY_ROWS = 128  # queries times heads that share one key head


@triton.jit
def _split_tokens(seq_len, num_splits, TILE: tl.constexpr):
    """Tokens per split: whole tiles, and as few splits as cover the sequence."""
    return tl.cdiv(tl.cdiv(seq_len, num_splits), TILE) * TILE


# Not specialised: else every batch size and head count would compile a kernel of its own.
@triton.jit(do_not_specialize=["num_heads", "num_queries", "group", "num_splits"])
def _split_probabilities_kernel(
    probs,  # [rows, num_rows, width] workspace, relative to tile_max
    tile_max,  # [rows, num_rows, width / TILE]
    split_max,  # [rows, num_rows, num_splits]
    split_sum,  # [rows, num_rows, num_splits] relative to split_max
    queries,  # [rows, num_queries, num_heads, HEAD_DIM]
    jobs,  # [num_jobs, 3]: key address, first head, number of heads
    block_table,
    seq_lens,
    scale_log2,
    query_row_stride,
    query_stride,
    query_head_stride,
    key_block_stride,
    key_token_stride,
    table_stride,
    num_heads,
    num_queries,
    group,
    num_splits,
    width,
    max_len,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    PROB_SHIFT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    split = tl.program_id(0)
    job = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    seq_len = tl.minimum(tl.load(seq_lens + row), max_len)
    length = _split_tokens(seq_len, num_splits, TILE)
    begin = split * length
    if begin >= seq_len:
        return
    end = tl.minimum(begin + length, seq_len)

    key_address = tl.load(jobs + job * 3)
    first_head = tl.load(jobs + job * 3 + 1)
    heads = tl.load(jobs + job * 3 + 2)
    # The compiler cannot know the alignment of an address it loads; scoring_plan checked it.
    keys = tl.multiple_of(key_address, 16).to(tl.pointer_type(queries.dtype.element_ty))
    keys = tl.multiple_of(keys, 16)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, TILE)
    query = m // group
    member = m % group
    used = (query < num_queries) & (member < heads)
    query_offsets = query * query_stride + (first_head + member) * query_head_stride
    q = tl.load(
        queries + row * query_row_stride + query_offsets[:, None] + d[None, :],
        mask=used[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )
    if UPCAST:  # the interpreter multiplies the bit patterns of bf16
        q = q.to(tl.float32)
    last_visible = seq_len - num_queries + query

    num_rows = num_heads * num_queries
    out_row = row * num_rows + query * num_heads + first_head + member
    num_tiles = width // TILE
    # Finite, so that a row that sees nothing of a split gives 0 and not NaN.
    running_max = tl.full([BLOCK_M], -1e30, tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    for start in range(begin, end, TILE):
        position = start + n
        inside = position < seq_len
        block = tl.load(
            block_table + row * table_stride + position // BLOCK_SIZE, mask=inside, other=0
        )
        key_offsets = (
            block.to(tl.int64) * key_block_stride + (position % BLOCK_SIZE) * key_token_stride
        )
        k = tl.load(
            keys + key_offsets[:, None] + d[None, :],
            mask=inside[:, None] & (d < HEAD_DIM)[None, :],
            other=0.0,
        )
        if UPCAST:
            k = k.to(tl.float32)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        visible = position[None, :] <= last_visible[:, None]
        logits = tl.where(visible, logits, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(logits, axis=1))
        p = tl.exp2(logits - new_max[:, None])
        running_sum = running_sum * tl.exp2(running_max - new_max) + tl.sum(p, axis=1)
        running_max = new_max
        # fp16 halves the traffic of the second pass. Shifted up, it keeps 11 bits down to
        # 2^-29 of the maximum. Whole tiles (0 past the end), as masks would split the stores.
        tl.store(
            probs + out_row[:, None] * width + position[None, :],
            (p * PROB_SHIFT).to(probs.dtype.element_ty),
            mask=used[:, None],
        )
        tl.store(tile_max + out_row * num_tiles + start // TILE, new_max, mask=used)
    tl.store(split_max + out_row * num_splits + split, running_max, mask=used)
    tl.store(split_sum + out_row * num_splits + split, running_sum, mask=used)


@triton.jit(do_not_specialize=["num_rows"])
def _aggregate_kernel(
    out,
    probs,
    tile_max,
    split_max,
    split_sum,
    seq_lens,
    row_weight,  # includes 1 / PROB_SHIFT
    out_stride,
    num_rows,
    width,
    max_len,
    out_width,
    NUM_SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    MEAN: tl.constexpr,
):
    piece = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    seq_len = tl.minimum(tl.load(seq_lens + row), max_len)
    tile = piece * TILES + tl.arange(0, TILES)
    position = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    score = tl.zeros([TILES, TILE], tl.float32)
    if piece * TILES * TILE < seq_len:
        split = tl.arange(0, NUM_SPLITS)
        length = _split_tokens(seq_len, NUM_SPLITS, TILE)
        has_split = split < tl.cdiv(seq_len, length)
        has_tile = tile * TILE < seq_len
        num_tiles = width // TILE
        for first in range(0, num_rows, ROWS):
            index = first + tl.arange(0, ROWS)
            exists = index < num_rows
            scratch_row = row * num_rows + index
            stats = scratch_row[:, None] * NUM_SPLITS + split[None, :]
            known = exists[:, None] & has_split[None, :]
            maxima = tl.load(split_max + stats, mask=known, other=-1e30)
            sums = tl.load(split_sum + stats, mask=known, other=0.0)
            row_max = tl.max(maxima, axis=1)
            total = tl.sum(sums * tl.exp2(maxima - row_max[:, None]), axis=1)
            # At least 1 in a row that sees any position; the others hold zeros only.
            weight = row_weight / tl.maximum(total, 1.0)
            reference = tl.load(
                tile_max + scratch_row[None, :] * num_tiles + tile[:, None],
                mask=has_tile[:, None] & exists[None, :],
                other=-1e30,
            )
            factor = tl.exp2(reference - row_max[None, :]) * weight[None, :]
            # Rows as the middle dimension: Triton then gives each thread whole columns of
            # rows, and the sum over rows needs no exchange between threads.
            p = tl.load(
                probs + scratch_row[None, :, None] * width + position[:, None, :],
                mask=has_tile[:, None, None] & exists[None, :, None],
                other=0.0,
            ).to(tl.float32)
            p = p * factor[:, :, None]
            if MEAN:
                score += tl.sum(p, axis=1)
            else:
                score = tl.maximum(score, tl.max(p, axis=1))
    tl.store(out + row * out_stride + position, score, mask=position < out_width)


@dataclass(frozen=True)
class ScoringSize:
    """How much there is to score, known before there are caches. Made by ``scoring_size``."""

    num_jobs: int  # runs of heads that share a key head
    num_heads: int  # scoring heads of all layers
    group: int  # most scoring heads that share a key head
    dtype: torch.dtype  # of the keys


@dataclass(frozen=True)
class ScoringPlan:
    """Which key heads are read for which captured query heads. Made by ``scoring_plan``.

    It holds addresses of the key caches: make it again when the caches are allocated again.
    """

    jobs: torch.Tensor  # [J, 3] int64 on the device: key address, first query head, head count
    key_caches: tuple[torch.Tensor, ...]  # keeps the memory behind the addresses alive
    size: ScoringSize


@dataclass(frozen=True)
class ScoringWorkspace:
    """Scratch of ``token_scores``; its content means nothing between calls."""

    probs: torch.Tensor  # [rows, num_queries * num_heads, width]
    tile_max: torch.Tensor  # [rows, num_queries * num_heads, width / tile] fp32
    split_stats: torch.Tensor  # [2, rows * num_queries * num_heads * splits] fp32
    num_queries: int

    @property
    def nbytes(self) -> int:
        """Device memory held."""
        return self.probs.nbytes + self.tile_max.nbytes + self.split_stats.nbytes


def _runs(heads: Sequence[Sequence[int]], group_size: int) -> list[tuple[int, int, int]]:
    """(index of the layer, key head, scoring heads that share it), in the heads' order."""
    return [
        (layer, kv_head, len(list(run)))
        for layer, chosen in enumerate(heads)
        for kv_head, run in itertools.groupby(head // group_size for head in chosen)
    ]


def scoring_size(
    heads: Sequence[Sequence[int]], group_size: int, dtype: torch.dtype
) -> ScoringSize:
    """What a plan for these heads will have.

    Args:
        heads: per scoring layer, the query heads that score; at least one.
        group_size: query heads that share a key head.
        dtype: of the key caches.
    """
    counts = [count for _, _, count in _runs(heads, group_size)]
    return ScoringSize(len(counts), sum(counts), max(counts), dtype)


def scoring_plan(
    key_caches: Sequence[torch.Tensor], heads: Sequence[Sequence[int]], num_query_heads: int
) -> ScoringPlan:
    """Group the scoring heads of all layers by the key head they read.

    Args:
        key_caches: per scoring layer [num_blocks, block_size, Hkv, D], all of one dtype, shape
            and strides. Any strides with a contiguous last dimension, so views of NHD and HND
            caches and of K packed next to V work: ``cache.transpose(1, 2)[..., :D]`` of vLLM's
            [num_blocks, Hkv, block_size, 2 * D]. block_size is a power of two.
        heads: per scoring layer, the query heads that score. Heads of one key head should be
            neighbours: the keys are read once per run of them. Their order is the order of
            captured queries, all heads of the first layer first.
        num_query_heads: query heads of a layer.

    Raises:
        ValueError: caches differ, are not aligned to 16 bytes, or a head does not exist.
    """
    if not key_caches or len(key_caches) != len(heads):
        raise ValueError(f"heads must name heads for {len(key_caches)} layers, not {len(heads)}")
    first = key_caches[0]
    _, block_size, num_kv_heads, head_dim = first.shape
    if block_size & (block_size - 1):
        raise ValueError(f"key_caches: block size must be a power of two, not {block_size}")
    if head_dim > 256:
        raise ValueError(f"key_caches: head_dim must be at most 256, not {head_dim}")
    if num_query_heads % num_kv_heads:
        raise ValueError(f"num_query_heads {num_query_heads} is no multiple of {num_kv_heads}")
    byte_strides = [stride * first.element_size() for stride in first.stride()]
    if first.stride(3) != 1 or any(stride % 16 for stride in byte_strides[:3]):
        raise ValueError(
            f"key_caches: strides {first.stride()} must end in 1 and be multiples of 16 bytes"
        )
    group_size = num_query_heads // num_kv_heads
    for cache, chosen in zip(key_caches, heads, strict=True):
        same = (cache.shape, cache.stride(), cache.dtype) == (
            first.shape,
            first.stride(),
            first.dtype,
        )
        if not same or cache.data_ptr() % 16:
            raise ValueError(
                f"key_caches: all must be like the first and aligned to 16 bytes; shape "
                f"{tuple(cache.shape)}, strides {cache.stride()}, {cache.dtype} is not"
            )
        if any(not 0 <= head < num_query_heads for head in chosen):
            raise ValueError(f"heads {list(chosen)} must lie in 0 .. {num_query_heads - 1}")
    if not any(heads):
        raise ValueError("heads: at least one scoring head is needed")
    jobs: list[tuple[int, int, int]] = []
    num_heads = 0
    for layer, kv_head, count in _runs(heads, group_size):
        address = key_caches[layer].data_ptr() + kv_head * byte_strides[2]
        jobs.append((address, num_heads, count))
        num_heads += count
    return ScoringPlan(
        torch.tensor(jobs, dtype=torch.int64, device=first.device),
        tuple(key_caches),
        scoring_size(heads, group_size, first.dtype),
    )


def _num_splits(rows: int, num_jobs: int, num_tiles: int) -> int:
    wanted = triton.next_power_of_2(triton.cdiv(TARGET_PROGRAMS, rows * num_jobs))
    return min(wanted, MAX_SPLITS, triton.next_power_of_2(num_tiles))


def _num_stages(keys: torch.Tensor, tile: int) -> int:
    # A key's address hangs on the block table, so Triton needs 5 stages for two key tiles in
    # flight, and 3 for one; two tiles of the widest keys would not fit in shared memory.
    tile_bytes = tile * triton.next_power_of_2(keys.shape[3]) * keys.element_size()
    return 5 if tile_bytes <= 32 << 10 else 3


def token_scores_workspace(
    size: ScoringSize,
    num_queries: int,
    max_rows: int,
    max_context: int,
    device: torch.device | str,
    max_bytes: int = 256 << 20,
) -> ScoringWorkspace:
    """Scratch for ``token_scores``; it needs no caches yet.

    A sequence needs about ``num_queries * num_heads * max_context * 2`` bytes (4 for fp32
    caches). When ``max_rows`` sequences need more than ``max_bytes``, the scratch holds fewer
    (at least one), and ``token_scores`` takes several pairs of launches.

    Args:
        num_queries: queries per sequence (Q).
        max_rows: largest batch (R).
        max_context: largest sequence length, in tokens.
        max_bytes: bound of the probabilities, the largest part by far.

    Raises:
        ValueError: more than 128 rows (queries times heads) would share a key head.
    """
    query_rows = num_queries * size.group
    if query_rows > MAX_QUERY_ROWS:
        raise ValueError(
            f"num_queries {num_queries} times {size.group} heads of a key head are {query_rows} "
            f"rows; at most {MAX_QUERY_ROWS} are supported"
        )
    wide = size.dtype == torch.float32
    tile = FP32_TILE if wide else TILE
    num_tiles = triton.cdiv(max_context, tile)
    width = num_tiles * tile
    per_row = num_queries * size.num_heads
    rows = max(1, min(max_rows, max_bytes // (per_row * width * (4 if wide else 2))))
    stats = max(r * _num_splits(r, size.num_jobs, num_tiles) for r in range(1, rows + 1))
    stats *= per_row
    return ScoringWorkspace(
        torch.empty(
            rows,
            per_row,
            width,
            dtype=torch.float32 if wide else torch.float16,
            device=device,
        ),
        torch.empty(rows, per_row, num_tiles, dtype=torch.float32, device=device),
        torch.empty(2, stats, dtype=torch.float32, device=device),
        num_queries,
    )


def token_scores(
    out: torch.Tensor,
    queries: torch.Tensor,
    plan: ScoringPlan,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    workspace: ScoringWorkspace,
    scale: float,
    aggregate: str = "mean",
    row_weight: float | None = None,
) -> torch.Tensor:
    """``reference.token_scores`` of every sequence, all layers' rows weighing the same.

    Two launches per ``workspace.probs.shape[0]`` sequences. Every key head of the plan is read
    once. No values are checked: block numbers must exist, and 0 <= seq_lens <= C.

    Args:
        out: [R, C] fp32, written whole: zeros from seq_lens[r] on, and in rows of length 0.
        queries: [R, Q, num_heads, D], rotated, in the plan's head order and the caches' dtype;
            query i sits at position seq_lens[r] - Q + i. Any strides, last one 1.
        block_table: [R, MB] int32 physical blocks; entries past the sequence are not read.
        seq_lens: [R] int32 on the device; 0 for padded rows.
        scale: softmax scale, normally D ** -0.5.
        aggregate: "mean" or "max" over all queries, heads and layers.
        row_weight: replaces the mean's 1 / (Q * num_heads), for heads spread over ranks whose
            results are summed.

    Returns:
        ``out``.

    Raises:
        ValueError: a shape, dtype or stride does not fit.
    """
    rows, num_queries, num_heads, head_dim = queries.shape
    keys = plan.key_caches[0]
    capacity, per_row, width = workspace.probs.shape
    if num_queries != workspace.num_queries or num_queries * num_heads != per_row:
        raise ValueError(
            f"queries: [R, {num_queries}, {num_heads}, D] do not fit a workspace for "
            f"{workspace.num_queries} queries of {per_row // workspace.num_queries} heads"
        )
    if num_heads != plan.size.num_heads or head_dim != keys.shape[3] or queries.dtype != keys.dtype:
        raise ValueError(
            f"queries: {num_heads} heads of {head_dim} in {queries.dtype} do not fit a plan of "
            f"{plan.size.num_heads} heads of {keys.shape[3]} in {keys.dtype}"
        )
    if queries.stride(3) != 1:
        raise ValueError(f"queries: last stride must be 1, not {queries.stride(3)}")
    if out.dtype != torch.float32 or out.shape[0] != rows or out.stride(1) != 1:
        raise ValueError(f"out must be [{rows}, C] fp32, not {tuple(out.shape)} {out.dtype}")
    if out.shape[1] > width:
        raise ValueError(f"out: {out.shape[1]} positions exceed the workspace's {width}")
    for name, tensor, shape in (
        ("block_table", block_table, (rows, block_table.shape[-1])),
        ("seq_lens", seq_lens, (rows,)),
    ):
        if tensor.dtype != torch.int32 or tensor.shape != shape or tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be {shape} int32, not {tensor.shape} {tensor.dtype}")
    if aggregate not in ("mean", "max"):
        raise ValueError(f"aggregate must be 'mean' or 'max', not {aggregate!r}")

    if row_weight is None or aggregate == "max":
        row_weight = 1.0 if aggregate == "max" else 1.0 / per_row
    shift = 2.0**15 if workspace.probs.dtype == torch.float16 else 1.0
    num_tiles = workspace.tile_max.shape[2]
    tile = width // num_tiles
    max_len = min(out.shape[1], block_table.shape[1] * keys.shape[1])
    for begin in range(0, rows, capacity):
        part = slice(begin, min(begin + capacity, rows))
        part_rows = part.stop - begin
        num_splits = _num_splits(part_rows, len(plan.jobs), num_tiles)
        _split_probabilities_kernel[(num_splits, len(plan.jobs), part_rows)](
            workspace.probs,
            workspace.tile_max,
            workspace.split_stats[0],
            workspace.split_stats[1],
            queries[part],
            plan.jobs,
            block_table[part],
            seq_lens[part],
            scale * math.log2(math.e),
            queries.stride(0),
            queries.stride(1),
            queries.stride(2),
            keys.stride(0),
            keys.stride(1),
            block_table.stride(0),
            num_heads,
            num_queries,
            plan.size.group,
            num_splits,
            width,
            max_len,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=keys.shape[1],
            BLOCK_M=max(16, triton.next_power_of_2(num_queries * plan.size.group)),
            BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
            TILE=tile,
            PROB_SHIFT=shift,
            UPCAST=queries.device.type == "cpu",
            num_warps=4,
            num_stages=_num_stages(keys, tile),
        )
        _aggregate_kernel[(triton.cdiv(out.shape[1], REDUCE_TOKENS), part_rows)](
            out[part],
            workspace.probs,
            workspace.tile_max,
            workspace.split_stats[0],
            workspace.split_stats[1],
            seq_lens[part],
            row_weight / shift,
            out.stride(0),
            per_row,
            width,
            max_len,
            out.shape[1],
            NUM_SPLITS=num_splits,
            TILE=tile,
            TILES=REDUCE_TOKENS // tile,
            ROWS=REDUCE_ROWS,
            MEAN=aggregate == "mean",
            num_warps=4,
        )
    return out
