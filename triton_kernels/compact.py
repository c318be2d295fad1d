# SPDX-License-Identifier: Apache-2.0
# Kernel arguments are pointers and tensors of Triton, which has no types for them.
# mypy: allow-untyped-defs
"""Compacted block tables: what a verification step reads, as a table for the stock kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 1024  # table entries per program


@triton.jit
def _compact_kernel(
    table_out,
    lens_out,
    block_table,
    selection,
    contexts,
    seq_lens,
    flags,
    out_stride,
    table_stride,
    selection_stride,
    width,
    max_blocks,
    budget,
    block_pages,
    UNIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    piece = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    seq_len = tl.load(seq_lens + row)
    # A dense row is a sparse row with nothing selected and everything in its tail.
    first_tail = 0
    num_selected = 0
    if tl.load(flags + row) != 0:
        first_tail = tl.load(contexts + row) // UNIT
        num_selected = tl.minimum(budget, first_tail)
    dropped = first_tail - num_selected
    if piece == 0:
        tl.store(lens_out + row, tl.maximum(seq_len - dropped * UNIT, 0))
    needed = tl.minimum(tl.cdiv(seq_len, UNIT) - dropped, width)
    if piece * TILE >= needed:
        return
    entry = piece * TILE + tl.arange(0, TILE)
    inside = entry < needed
    chosen = entry < num_selected
    unit = tl.load(selection + row * selection_stride + entry, mask=inside & chosen, other=0)
    unit = tl.where(chosen, unit, entry + dropped)
    # Units of a block are neighbours, so a unit's physical number follows from its block's.
    units_per_block: tl.constexpr = BLOCK_SIZE // UNIT
    logical = unit // units_per_block
    exists = inside & (logical >= 0) & (logical < max_blocks)
    block = tl.load(block_table + row * table_stride + logical, mask=exists, other=0)
    physical = block * block_pages + unit % units_per_block
    tl.store(table_out + row * out_stride + entry, physical, mask=inside)


def compact(
    table_out: torch.Tensor,
    lens_out: torch.Tensor,
    block_table: torch.Tensor,
    selection: torch.Tensor,
    contexts: torch.Tensor,
    seq_lens: torch.Tensor,
    flags: torch.Tensor,
    unit: int,
    block_size: int,
    block_pages: int | None = None,
) -> None:
    """``reference.compact_row`` of every sparse row; every other row is its whole sequence.

    One launch. ``table_out`` addresses the cache in pages of ``unit`` tokens: with unit =
    block_size these are blocks, with unit = 1 cache slots (block * block_size + offset).

    Args:
        table_out: [R, W] int32. Row r is written up to its cdiv(lens_out[r], unit) entries. What
            stands behind is left over from earlier steps and must not be read. W must cover
            the longest row: cdiv(largest seq_len, unit).
        lens_out: [R] int32, tokens that row r reads; 0 where seq_lens[r] is 0.
        block_table: [R, MB] int32, physical block of every logical block.
        selection: [R, K] int32 ascending units, see ``merge_and_select``. Read for sparse rows
            only, and then the first min(K, contexts[r] // unit) of them.
        contexts: [R] int32 confirmed tokens, the ones the selection was made for.
        seq_lens: [R] int32 context plus new tokens; 0 for padded rows.
        flags: [R] int32, 1 = sparse row, 0 = dense row; 0 for padded rows.
        unit: tokens; divides block_size.
        block_pages: pages from one block to the next, by default block_size // unit. A cache
            that stores a block's heads one after the other (HND) has that many times more.

    Raises:
        ValueError: a shape or dtype does not fit, or unit does not divide block_size.
    """
    rows, width = table_out.shape
    for name, tensor, shape in (
        ("table_out", table_out, (rows, width)),
        ("lens_out", lens_out, (rows,)),
        ("block_table", block_table, (rows, block_table.shape[-1])),
        ("selection", selection, (rows, selection.shape[-1])),
        ("contexts", contexts, (rows,)),
        ("seq_lens", seq_lens, (rows,)),
        ("flags", flags, (rows,)),
    ):
        if tensor.dtype != torch.int32 or tensor.shape != shape or tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be {shape} int32, not {tensor.shape} {tensor.dtype}")
    if unit < 1 or block_size % unit:
        raise ValueError(f"unit {unit} must divide the block size {block_size}")
    _compact_kernel[(triton.cdiv(width, TILE), rows)](
        table_out,
        lens_out,
        block_table,
        selection,
        contexts,
        seq_lens,
        flags,
        table_out.stride(0),
        block_table.stride(0),
        selection.stride(0),
        width,
        block_table.shape[1],
        selection.shape[1],
        block_size // unit if block_pages is None else block_pages,
        UNIT=unit,
        BLOCK_SIZE=block_size,
        TILE=TILE,
        num_warps=4,
    )
