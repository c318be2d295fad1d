# SPDX-License-Identifier: Apache-2.0
# Kernel arguments are pointers and tensors of Triton, which has no types for them.
# mypy: allow-untyped-defs
"""Paged attention of a few queries per sequence, made for what verification reads.

FlashAttention is built to stream long caches. A sparse verification row reads some 500 tokens:
there, a kernel is as fast as it gets its first bytes moving and its last ones out. One program
serves all queries of a sequence and all query heads of a key head, so keys and values are read
once; the block table is the compacted one, in pages of a block or of a single token. Where rows
times key heads do not fill the device, a sequence is split and the last program to finish
combines the parts, in the same launch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MAX_QUERY_ROWS = 128  # queries times query heads of a key head


@dataclass(frozen=True)
class Tuning:
    """How the kernel is launched."""

    tile: int  # tokens per step
    warps: int
    stages: int  # a table entry is loaded one stage before its keys


@triton.jit(do_not_specialize=["num_splits"])
def _attention_kernel(
    out,  # [tokens, Hq, D]
    queries,  # [tokens, Hq, D]
    keys,  # of page 0, token 0, head 0
    values,
    block_table,
    seq_lens,
    query_starts,
    partial,  # [R, Hkv, splits, BLOCK_M, BLOCK_D] fp32
    partial_stats,  # [2, R, Hkv, splits, BLOCK_M] fp32: maximum (log2), sum
    arrived,  # [R, Hkv] int32, 0 between launches
    scale_log2,
    query_stride,
    query_head_stride,
    out_stride,
    out_head_stride,
    page_stride,
    token_stride,
    head_stride,
    table_stride,
    num_splits,
    stats_size,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    split = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    first_query = tl.load(query_starts + row)
    num_queries = tl.load(query_starts + row + 1) - first_query
    seq_len = tl.load(seq_lens + row)
    if num_queries <= 0:
        return

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, TILE)
    query = m // GROUP
    query_head = head * GROUP + m % GROUP
    used = (query < num_queries)[:, None] & (d < HEAD_DIM)[None, :]
    token = (first_query + query).to(tl.int64)
    q = tl.load(
        queries + token[:, None] * query_stride + query_head[:, None] * query_head_stride + d,
        mask=used,
        other=0.0,
    )
    if UPCAST:  # the interpreter multiplies the bit patterns of bf16
        q = q.to(tl.float32)
    last_visible = seq_len - num_queries + query
    keys += head.to(tl.int64) * head_stride
    values += head.to(tl.int64) * head_stride
    table = block_table + row.to(tl.int64) * table_stride

    begin = 0
    end = seq_len
    if SPLIT:
        length = tl.cdiv(tl.cdiv(seq_len, num_splits), TILE) * TILE
        begin = split * length
        end = tl.minimum(begin + length, seq_len)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Finite, so that a row that sees nothing of a split gives 0 and not NaN.
    running_max = tl.full([BLOCK_M], -1e30, tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    for start in range(begin, end, TILE):
        position = start + n
        inside = position < end
        page = tl.load(table + position // PAGE, mask=inside, other=0)
        offsets = page.to(tl.int64) * page_stride + (position % PAGE) * token_stride
        k = tl.load(
            keys + offsets[None, :] + d[:, None],
            mask=inside[None, :] & (d < HEAD_DIM)[:, None],
            other=0.0,
        )
        v = tl.load(
            values + offsets[:, None] + d[None, :],
            mask=inside[:, None] & (d < HEAD_DIM)[None, :],
            other=0.0,
        )
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        logits = tl.dot(q, k, input_precision="ieee") * scale_log2
        visible = inside[None, :] & (position[None, :] <= last_visible[:, None])
        logits = tl.where(visible, logits, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(logits, axis=1))
        p = tl.exp2(logits - new_max[:, None])
        shrink = tl.exp2(running_max - new_max)
        running_sum = running_sum * shrink + tl.sum(p, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        running_max = new_max

    if SPLIT:
        pair = row * tl.num_programs(1) + head
        place = (pair * num_splits + split).to(tl.int64) * BLOCK_M + m
        tl.store(partial + place[:, None] * BLOCK_D + d[None, :], acc, mask=used)
        tl.store(partial_stats + place, running_max)
        tl.store(partial_stats + stats_size + place, running_sum)
        tl.debug_barrier()  # all threads' parts are written before one of them says so
        if tl.atomic_add(arrived + pair, 1, sem="acq_rel") != num_splits - 1:
            return
        tl.store(arrived + pair, 0)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        running_max = tl.full([BLOCK_M], -1e30, tl.float32)
        running_sum = tl.zeros([BLOCK_M], tl.float32)
        for other in range(num_splits):
            place = (pair * num_splits + other).to(tl.int64) * BLOCK_M + m
            part_max = tl.load(partial_stats + place, cache_modifier=".cg")
            part_sum = tl.load(partial_stats + stats_size + place, cache_modifier=".cg")
            part = tl.load(
                partial + place[:, None] * BLOCK_D + d[None, :],
                mask=used,
                other=0.0,
                cache_modifier=".cg",
            )
            new_max = tl.maximum(running_max, part_max)
            shrink = tl.exp2(running_max - new_max)
            grow = tl.exp2(part_max - new_max)
            running_sum = running_sum * shrink + part_sum * grow
            acc = acc * shrink[:, None] + part * grow[:, None]
            running_max = new_max

    # 0 only where a query sees nothing.
    acc = acc / tl.where(running_sum > 0, running_sum, 1.0)[:, None]
    tl.store(
        out + token[:, None] * out_stride + query_head[:, None] * out_head_stride + d,
        acc.to(out.dtype.element_ty),
        mask=used,
    )


@dataclass(frozen=True)
class AttentionWorkspace:
    """Scratch of ``paged_attention``. ``arrived`` must be 0 before the first call; calls on
    one stream leave it so."""

    partial: torch.Tensor  # flat fp32
    stats: torch.Tensor  # [2, n] fp32
    arrived: torch.Tensor  # [R * Hkv] int32
    query_rows: int  # queries times group, at most
    max_parts: int  # rows x key heads x splits, at most

    @property
    def nbytes(self) -> int:
        """Device memory held."""
        return self.partial.nbytes + self.stats.nbytes + self.arrived.nbytes


def attention_workspace(
    max_rows: int,
    num_kv_heads: int,
    query_rows: int,
    head_dim: int,
    max_parts: int,
    device: torch.device | str,
) -> AttentionWorkspace:
    """Scratch for batches of up to ``max_rows`` sequences.

    Args:
        query_rows: largest number of queries per sequence times query heads per key head.
        max_parts: largest number of splits times rows times key heads that will be used; where
            a batch alone exceeds it, sequences are not split.

    Raises:
        ValueError: more than 128 query rows.
    """
    if query_rows > MAX_QUERY_ROWS:
        raise ValueError(f"query_rows: at most {MAX_QUERY_ROWS} are supported, not {query_rows}")
    block_m, block_d = _block_m(query_rows), _block_d(head_dim)
    return AttentionWorkspace(
        torch.empty(max_parts * block_m * block_d, dtype=torch.float32, device=device),
        torch.empty(2, max_parts * block_m, dtype=torch.float32, device=device),
        torch.zeros(max_rows * num_kv_heads, dtype=torch.int32, device=device),
        query_rows,
        max_parts,
    )


def _block_m(query_rows: int) -> int:
    return max(16, triton.next_power_of_2(query_rows))


def _block_d(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


# First what measured best on an H200, of 32 to 128 tokens, 4 or 8 warps, 3 or 5 stages; the
# others are for heads, dtypes or devices with too little shared memory for it.
TUNINGS = (
    Tuning(tile=64, warps=4, stages=5),
    Tuning(tile=32, warps=4, stages=5),
    Tuning(tile=32, warps=4, stages=3),
    Tuning(tile=16, warps=4, stages=3),
)


def shared_memory_bound(tuning: Tuning, query_rows: int, head_dim: int, itemsize: int) -> int:
    """Bytes of shared memory that a program takes at most.

    Held against what Triton 3.6 allocates for sm_80 and sm_90: keys and values wait in half the
    stages, as their addresses come a stage earlier; queries stay; the output passes through.
    """
    block_m, block_d = _block_m(query_rows), _block_d(head_dim)
    buffers = max(1, (tuning.stages - 1) // 2)
    copies = buffers * 2 * tuning.tile * block_d * itemsize
    return copies + block_m * block_d * (itemsize + 4) + 2048


def default_tuning(query_rows: int, head_dim: int, itemsize: int, shared_memory: int) -> Tuning:
    """The first of ``TUNINGS`` that fits into ``shared_memory`` bytes, or else the last."""
    for tuning in TUNINGS[:-1]:
        if shared_memory_bound(tuning, query_rows, head_dim, itemsize) <= shared_memory:
            return tuning
    return TUNINGS[-1]


@functools.cache
def _device_tuning(query_rows: int, head_dim: int, itemsize: int, device: torch.device) -> Tuning:
    if device.type != "cuda":
        return TUNINGS[0]
    # What Triton itself holds a program's allocation against.
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return default_tuning(query_rows, head_dim, itemsize, properties["max_shared_mem"])


def check_inputs(
    out: torch.Tensor,
    queries: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
) -> None:
    """See ``paged_attention``.

    Raises:
        ValueError: a shape, dtype or stride does not fit.
    """
    _, num_heads, head_dim = queries.shape
    _, page_size, num_kv_heads, _ = key_cache.shape
    rows = seq_lens.shape[0]
    if num_heads % num_kv_heads:
        raise ValueError(f"queries: {num_heads} heads are no multiple of {num_kv_heads}")
    if page_size & (page_size - 1):
        raise ValueError(f"key_cache: page size must be a power of two, not {page_size}")
    if value_cache.shape != key_cache.shape or value_cache.stride() != key_cache.stride():
        raise ValueError("value_cache must have the shape and strides of key_cache")
    dtypes = {tensor.dtype for tensor in (out, queries, key_cache, value_cache)}
    if len(dtypes) != 1:
        raise ValueError(f"out, queries and caches must be of one dtype, not {dtypes}")
    if key_cache.shape[3] != head_dim or out.shape != queries.shape:
        raise ValueError(
            f"queries {tuple(queries.shape)} do not fit out {tuple(out.shape)} and keys of "
            f"{key_cache.shape[3]}"
        )
    if {tensor.stride(-1) for tensor in (out, queries, key_cache)} != {1}:
        raise ValueError("out, queries and caches must be contiguous in their last dimension")
    for name, tensor, shape in (
        ("block_table", block_table, (rows, block_table.shape[-1])),
        ("seq_lens", seq_lens, (rows,)),
        ("query_starts", query_starts, (rows + 1,)),
    ):
        if tensor.dtype != torch.int32 or tensor.shape != shape or tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be {shape} int32, not {tensor.shape} {tensor.dtype}")


def paged_attention(
    out: torch.Tensor,
    queries: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    max_queries: int,
    scale: float,
    workspace: AttentionWorkspace,
    num_splits: int = 1,
    tuning: Tuning | None = None,
) -> torch.Tensor:
    """Causal attention of each sequence's last tokens over its pages. One launch.

    Lengths and tables may change between replays of a CUDA graph; shapes, ``max_queries`` and
    ``num_splits`` are part of it. No values are checked: pages must exist.

    Args:
        out: [T, Hq, D], like queries. Tokens outside of query_starts are not written.
        queries: [T, Hq, D], rotated; fp32, fp16 or bf16, any strides with a last one of 1.
        key_cache, value_cache: [pages, page size, Hkv, D] of queries' dtype and the same strides
            as one another, page size a power of two; views of NHD, HND or token pages work.
        block_table: [R, W] int32 pages; entries past a sequence are not read.
        seq_lens: [R] int32 tokens to read, the queries' own included. Query i of a row with q
            queries sees the first seq_len - q + 1 + i of them.
        query_starts: [R + 1] int32; row r's queries are query_starts[r] .. query_starts[r + 1].
        max_queries: no row has more.
        scale: softmax scale, normally D ** -0.5.
        num_splits: programs per sequence and key head; cut to what the workspace holds.
        tuning: None: ``default_tuning`` for this device.

    Returns:
        ``out``.

    Raises:
        ValueError: a shape, dtype or stride does not fit.
    """
    check_inputs(out, queries, key_cache, value_cache, block_table, seq_lens, query_starts)
    _, num_heads, head_dim = queries.shape
    _, page_size, num_kv_heads, _ = key_cache.shape
    rows, group = seq_lens.shape[0], num_heads // num_kv_heads
    if max_queries * group > workspace.query_rows:
        raise ValueError(
            f"max_queries {max_queries} times {group} heads exceed the workspace's "
            f"{workspace.query_rows} query rows"
        )
    pairs = rows * num_kv_heads
    if pairs > len(workspace.arrived):
        raise ValueError(f"{rows} rows exceed the workspace's")
    num_splits = max(1, min(num_splits, workspace.max_parts // max(1, pairs)))
    if tuning is None:
        tuning = _device_tuning(
            max_queries * group, head_dim, queries.element_size(), queries.device
        )
    page_stride, token_stride, head_stride, _ = key_cache.stride()
    _attention_kernel[(num_splits, num_kv_heads, rows)](
        out,
        queries,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        query_starts,
        workspace.partial,
        workspace.stats,
        workspace.arrived,
        scale * 1.4426950408889634,
        queries.stride(0),
        queries.stride(1),
        out.stride(0),
        out.stride(1),
        page_stride,
        token_stride,
        head_stride,
        block_table.stride(0),
        num_splits,
        workspace.stats.shape[1],
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        BLOCK_M=_block_m(max_queries * group),
        BLOCK_D=_block_d(head_dim),
        TILE=tuning.tile,
        SPLIT=num_splits > 1,
        UPCAST=queries.device.type == "cpu",
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )
    return out
