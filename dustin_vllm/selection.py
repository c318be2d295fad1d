# SPDX-License-Identifier: Apache-2.0
"""Selection and compaction for a batch, in vectorised torch.

The CPU path runs these; GPU kernels in ``dustin_vllm.triton_kernels`` do the same with fixed
shapes. Both equal ``dustin_vllm.reference`` row by row.
"""

from __future__ import annotations

import torch

from dustin_vllm.config import LayerGroup, Settings

_NEVER = float("-inf")


def _top(scores: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Mask of the ``count[r]`` largest scores of every row; ties go to the lower index."""
    order = scores.argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order)
    rank.scatter_(1, order, torch.arange(scores.shape[1], device=scores.device).expand_as(order))
    return (rank < count[:, None]) & (scores > _NEVER)


def merge_and_select(
    lookahead: torch.Tensor,
    history: torch.Tensor,
    contexts: torch.Tensor,
    settings: Settings,
    group: LayerGroup,
) -> torch.Tensor:
    """One selection per row, see ``reference.select_units``.

    Args:
        lookahead, history: [R, U] fp32 unit scores; units from contexts[r] // unit on are ignored.
        contexts: [R] int, confirmed tokens; every row needs contexts[r] // unit > K.
        group: whose selection it is; K = group.budget_units.

    Returns:
        [R, K] int32, ascending.
    """
    config, unit = settings.config, settings.unit
    units = torch.arange(lookahead.shape[1], device=lookahead.device)[None, :]
    num_units = (contexts // unit)[:, None]
    first_recent = ((contexts - config.recent).clamp(min=0) // unit)[:, None]
    exists = units < num_units
    chosen = exists & ((units < -(-config.sinks // unit)) | (units >= first_recent))
    free = group.budget_units - chosen.sum(1)
    if settings.group_merge == "fill":
        first = free.clamp(max=group.lookahead_units)
        candidates = exists & ~chosen
        chosen = chosen | _top(lookahead.masked_fill(~candidates, _NEVER), first)
        candidates = exists & ~chosen
        chosen = chosen | _top(history.masked_fill(~candidates, _NEVER), free - first)
    else:
        weight = torch.tensor(config.lookahead_weight, dtype=torch.float32)
        mixed = weight * lookahead + (1 - weight) * history
        chosen = chosen | _top(mixed.masked_fill(~(exists & ~chosen), _NEVER), free)
    return chosen.nonzero()[:, 1].view(-1, group.budget_units).to(torch.int32)


def compact(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    sparse_rows: list[int],
    selections: torch.Tensor,
    contexts: list[int],
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shorten the block tables of sparse rows to selection + tail; dense rows stay whole.

    Args:
        block_table: [R, MB] int32, not modified.
        seq_lens: [R] int32, not modified.
        sparse_rows: rows to shorten.
        selections: [len(sparse_rows), K] int32 logical blocks, ascending.
        contexts: confirmed tokens of every sparse row.
        block_size: tokens of a block, which is also the unit.

    Returns:
        (compacted block table [R, MB] int32, compacted lengths [R] int32), new tensors.
    """
    compacted_table, compacted_lens = block_table.clone(), seq_lens.clone()
    budget_units = selections.shape[1]
    for index, (row, context) in enumerate(zip(sparse_rows, contexts, strict=True)):
        seq_len = int(seq_lens[row])
        first_tail, end = context // block_size, -(-seq_len // block_size)
        tail = end - first_tail
        compacted_table[row, :budget_units] = block_table[row, selections[index].long()]
        compacted_table[row, budget_units : budget_units + tail] = block_table[row, first_tail:end]
        compacted_lens[row] = (budget_units - first_tail) * block_size + seq_len
    return compacted_table, compacted_lens
