# SPDX-License-Identifier: Apache-2.0
# Kernel arguments are pointers and tensors of Triton, which has no types for them.
# mypy: allow-untyped-defs
"""Keep the queries of some tokens and heads, as scoring layers do in every pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _gather_kernel(
    out,
    queries,
    rows,
    heads,
    out_row_stride,
    out_head_stride,
    query_row_stride,
    query_head_stride,
    num_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    head = tl.load(heads + h, mask=h < num_heads, other=0)
    inside = (h < num_heads)[:, None] & (d < HEAD_DIM)[None, :]
    kept = tl.load(
        queries + row * query_row_stride + head[:, None] * query_head_stride + d[None, :],
        mask=inside,
    )
    tl.store(
        out + place * out_row_stride + h[:, None] * out_head_stride + d[None, :],
        kept,
        mask=inside,
    )


def gather_queries(
    out: torch.Tensor, queries: torch.Tensor, rows: torch.Tensor, heads: torch.Tensor
) -> None:
    """``out.copy_(queries[rows][:, heads])`` in one launch. Indices are not checked.

    Args:
        out: [P, S, D], any strides with a last one of 1.
        queries: [T, H, D] of out's dtype, likewise.
        rows: [P] int64 token rows.
        heads: [S] int32 query heads.

    Raises:
        ValueError: a shape, dtype or stride does not fit.
    """
    places, num_heads, head_dim = out.shape
    if queries.shape[2:] != out.shape[2:] or queries.dtype != out.dtype:
        raise ValueError(
            f"queries {tuple(queries.shape)} {queries.dtype} do not fit out {tuple(out.shape)} "
            f"{out.dtype}"
        )
    if queries.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError("out and queries must be contiguous in their last dimension")
    for name, index, size, dtype in (
        ("rows", rows, places, torch.int64),
        ("heads", heads, num_heads, torch.int32),
    ):
        if index.dtype != dtype or index.shape != (size,) or not index.is_contiguous():
            raise ValueError(f"{name} must be [{size}] {dtype}, not {index.shape} {index.dtype}")
    _gather_kernel[(places,)](
        out,
        queries,
        rows,
        heads,
        out.stride(0),
        out.stride(1),
        queries.stride(0),
        queries.stride(1),
        num_heads,
        HEAD_DIM=head_dim,
        BLOCK_H=triton.next_power_of_2(num_heads),
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=4,
    )
