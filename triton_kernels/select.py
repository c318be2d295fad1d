# SPDX-License-Identifier: Apache-2.0
# Kernel arguments are pointers and tensors of Triton, which has no types for them.
# mypy: allow-untyped-defs
"""Merge lookahead and history scores into one selection per sequence.

Scores become integer keys that order like them (the bits of a float >= 0 do), and the k-th
largest key is found bit by bit with counts, which is exact whatever the distribution. Two
launches:

1. One program per (piece of the context, sequence) computes the unit scores. At token
   granularity, where a sequence has too many units for one program, it also drops those that
   are not among the best of their own piece and so cannot be among the best of all.
2. One program per sequence selects among what is left, which is in ascending order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

PRESELECT_TILE = 8192  # units of a piece; fewer units than this need no preselection
BLOCK_TILE_TOKENS = 4096  # tokens of a piece without preselection
MAX_UNIT = 256


@triton.jit
def _window(contexts, row, max_context, sinks, recent, budget, UNIT: tl.constexpr):
    """(units, first unprotected unit, first recent unit, units to choose freely) of a row.

    Meaningful where units > budget; the caller checked that the budget holds what is protected.
    """
    context = tl.minimum(tl.load(contexts + row), max_context)
    num_units = context // UNIT
    sink_end = tl.minimum(num_units, tl.cdiv(sinks, UNIT))
    first_recent = tl.maximum(context - recent, 0) // UNIT
    return num_units, sink_end, first_recent, budget - sink_end - (num_units - first_recent)


@triton.jit
def _unit_scores(scores, units, live, SHIFTS: tl.constexpr, UNIT: tl.constexpr):
    """``reference.unit_scores`` with dilation ``SHIFTS - 1``."""
    best = tl.zeros(units.shape, tl.float32)
    # Unrolled: as a loop over blocks, Triton 3.6 gave wrong maxima on an H200 (the interpreter
    # did not).
    for shift in tl.static_range(SHIFTS):
        if UNIT == 1:
            position = units - shift
            total = tl.load(scores + position, mask=live & (position >= 0), other=0.0)
        else:
            position = units[:, None] * UNIT - shift + tl.arange(0, UNIT)[None, :]
            values = tl.load(scores + position, mask=live[:, None] & (position >= 0), other=0.0)
            total = tl.sum(values, axis=1)
        best = tl.maximum(best, total)
    return best


@triton.jit
def _keys(scores, live):
    """int32 keys in the order of the scores, >= 1; 0 for units that cannot be chosen."""
    bits = tl.minimum(tl.maximum(scores.to(tl.int32, bitcast=True), 0), 0x7F800000)
    return tl.where(live, bits + 1, 0)


@triton.jit
def _top(keys, count):
    """Mask of the ``count`` largest keys, ties to the lower index; key 0 is never taken."""
    threshold = tl.full([], 0, tl.int32)
    reached = tl.full([], -1, tl.int32)
    shift = tl.full([], 29, tl.int32)
    # Two bits a round, as a round costs what its sum over all warps costs: the three counts are
    # summed in one word. Invariant: at least count keys reach the threshold, and fewer than count
    # reach the next one that the bits left out would allow. Exactly count: no need to refine.
    while (shift >= 0) & (reached != count):
        step = tl.full([], 1, tl.int32) << shift
        counts = (keys >= threshold + step).to(tl.int64)
        counts += (keys >= threshold + 2 * step).to(tl.int64) << 20
        counts += (keys >= threshold + 3 * step).to(tl.int64) << 40
        total = tl.sum(counts, axis=0)
        for digit in tl.static_range(3):
            reaching = ((total >> (20 * digit)) & 0xFFFFF).to(tl.int32)
            enough = reaching >= count
            threshold = tl.where(enough, threshold + step, threshold)
            reached = tl.where(enough, reaching, reached)
        shift = tl.where(shift == 1, 0, shift - 2)  # of 31 bits the lowest comes alone
    above = keys > threshold
    equal = keys == threshold
    missing = count - tl.sum(above.to(tl.int32), axis=0)
    first = tl.cumsum(equal.to(tl.int32), axis=0) <= missing
    return (above | (equal & first)) & (keys > 0)


# Not specialised: else every configuration would compile kernels of its own.
@triton.jit(do_not_specialize=["sinks", "recent", "budget", "lookahead_units"])
def _candidates_kernel(
    candidate_units,  # [rows, pieces, capacity], only with PRESELECT
    candidate_counts,  # [rows, pieces], only with PRESELECT
    lookahead_keys,  # [rows, pieces, capacity]; [rows, pieces * TILE] without PRESELECT
    history_keys,
    lookahead,
    history,
    contexts,
    lookahead_stride,
    history_stride,
    max_context,
    sinks,
    recent,
    budget,
    lookahead_units,
    lookahead_weight,
    history_weight,
    capacity,
    SHIFTS: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    PRESELECT: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    piece = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    num_units, sink_end, first_recent, free = _window(
        contexts, row, max_context, sinks, recent, budget, UNIT
    )
    if num_units <= budget:  # everything is selected, the candidates are not read
        return
    units = piece * TILE + tl.arange(0, TILE)
    live = (units >= sink_end) & (units < first_recent)
    lookahead_score = _unit_scores(lookahead + row * lookahead_stride, units, live, 1, UNIT)
    history_score = _unit_scores(history + row * history_stride, units, live, SHIFTS, UNIT)
    if WEIGHTED:
        history_score = lookahead_weight * lookahead_score + history_weight * history_score
    look = _keys(lookahead_score, live)
    hist = _keys(history_score, live)
    entry = (row * tl.num_programs(0) + piece) * capacity
    if PRESELECT:
        kept = _top(hist, free)
        if not WEIGHTED:
            kept = kept | _top(look, tl.minimum(lookahead_units, free))
        place = tl.cumsum(kept.to(tl.int32), axis=0) - 1
        tl.store(candidate_units + entry + place, units, mask=kept)
        tl.store(lookahead_keys + entry + place, look, mask=kept)
        tl.store(history_keys + entry + place, hist, mask=kept)
        count = tl.sum(kept.to(tl.int32), axis=0)
        tl.store(candidate_counts + row * tl.num_programs(0) + piece, count)
    else:
        local = tl.arange(0, TILE)
        tl.store(lookahead_keys + entry + local, look)
        tl.store(history_keys + entry + local, hist)


@triton.jit(do_not_specialize=["sinks", "recent", "budget", "lookahead_units"])
def _select_kernel(
    selection,
    candidate_units,
    candidate_counts,
    lookahead_keys,
    history_keys,
    contexts,
    selection_stride,
    max_context,
    sinks,
    recent,
    budget,
    lookahead_units,
    pieces,
    capacity,
    UNIT: tl.constexpr,
    ENTRIES: tl.constexpr,
    BUDGET_PADDED: tl.constexpr,
    PRESELECT: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    num_units, sink_end, first_recent, free = _window(
        contexts, row, max_context, sinks, recent, budget, UNIT
    )
    place = tl.arange(0, BUDGET_PADDED)
    out = selection + row * selection_stride
    if num_units <= budget:
        last = tl.maximum(num_units - 1, 0)
        tl.store(out + place, tl.minimum(place, last), mask=place < budget)
        return
    entry = tl.arange(0, ENTRIES)
    inside = entry < pieces * capacity
    base = row * pieces * capacity
    if PRESELECT:
        piece = entry // capacity
        count = tl.load(candidate_counts + row * pieces + piece, mask=inside, other=0)
        inside = inside & (entry - piece * capacity < count)
        units = tl.load(candidate_units + base + entry, mask=inside, other=0)
    else:
        units = entry
    chosen = inside & False
    by_lookahead = 0
    if not WEIGHTED:
        by_lookahead = tl.minimum(lookahead_units, free)
        look = tl.load(lookahead_keys + base + entry, mask=inside, other=0)
        chosen = _top(look, by_lookahead)
    hist = tl.load(history_keys + base + entry, mask=inside & (chosen == 0), other=0)
    chosen = chosen | _top(hist, free - by_lookahead)
    rank = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(out + sink_end + rank, units, mask=chosen)
    tl.store(out + place, place, mask=place < sink_end)
    recent_start = sink_end + free
    tl.store(
        out + place,
        first_recent + place - recent_start,
        mask=(place >= recent_start) & (place < budget),
    )


@dataclass(frozen=True)
class SelectionWorkspace:
    """Scratch of ``merge_and_select``; its content means nothing between calls."""

    keys: torch.Tensor  # [2, rows, pieces, capacity] int32: lookahead, history
    units: torch.Tensor  # [rows, pieces, capacity] int32; empty without preselection
    counts: torch.Tensor  # [rows, pieces] int32; empty without preselection
    unit: int
    tile: int  # units of a piece
    max_context: int
    preselect: bool

    @property
    def nbytes(self) -> int:
        """Device memory held."""
        return self.keys.nbytes + self.units.nbytes + self.counts.nbytes


def select_workspace(
    max_rows: int,
    max_context: int,
    unit: int,
    budget_units: int,
    lookahead_units: int,
    device: torch.device | str,
) -> SelectionWorkspace:
    """Scratch for ``merge_and_select``: 8 bytes per unit of context, at token granularity
    12 bytes per ``budget_units + lookahead_units`` and piece of 8192 tokens.

    Raises:
        ValueError: unit is not a power of two up to 256.
    """
    if unit < 1 or unit > MAX_UNIT or unit & (unit - 1):
        raise ValueError(f"unit must be a power of two up to {MAX_UNIT}, not {unit}")
    units = max(1, max_context // unit)
    preselect = unit == 1 and units > PRESELECT_TILE
    tile = PRESELECT_TILE if preselect else max(1, BLOCK_TILE_TOKENS // unit)
    pieces = triton.cdiv(units, tile)
    capacity = min(tile, budget_units + lookahead_units) if preselect else tile

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    return SelectionWorkspace(
        keys=empty(2, max_rows, pieces, capacity),
        units=empty(max_rows, pieces, capacity if preselect else 0),
        counts=empty(max_rows, pieces if preselect else 0),
        unit=unit,
        tile=tile,
        max_context=max_context,
        preselect=preselect,
    )


def merge_and_select(
    selection: torch.Tensor,
    lookahead: torch.Tensor,
    history: torch.Tensor,
    contexts: torch.Tensor,
    workspace: SelectionWorkspace,
    sinks: int,
    recent: int,
    dilation: int,
    merge: str,
    lookahead_units: int,
    lookahead_weight: float,
) -> torch.Tensor:
    """``reference.select_units`` of ``reference.unit_scores``, for every sequence.

    Two launches. Unit scores are fp32 sums in an order that depends on shapes only, so ranks
    with equal scores select alike; given equal unit scores, the selection is the reference's
    to the last tie. Scores are expected to be finite and >= 0; others still give valid
    ascending indices.

    Args:
        selection: [R, K] int32, written whole: ascending units, K = budget_units. A row with
            contexts[r] // unit <= K has nothing to drop: it lists all its units and repeats
            the last (0 when there is none).
        lookahead, history: [R, C] fp32 token scores; positions from contexts[r] on are not used.
            History is dilated forward, lookahead is not.
        contexts: [R] int32 on the device, confirmed tokens, at most C; 0 for padded rows.
        workspace: from ``select_workspace``, made for R or more rows and C or more tokens.
        sinks, recent: protected tokens at the start and end of the context.
        dilation: tokens that history scores are dilated by.
        merge: "fill" or "weighted".
        lookahead_units: units taken by lookahead score under "fill".
        lookahead_weight: weight of the lookahead score under "weighted".

    Returns:
        ``selection``.

    Raises:
        ValueError: a shape or dtype does not fit, or the budget cannot hold what is protected.
    """
    rows, budget = selection.shape
    unit, max_context = workspace.unit, lookahead.shape[-1]
    for name, tensor, dtype, shape in (
        ("selection", selection, torch.int32, (rows, budget)),
        ("lookahead", lookahead, torch.float32, (rows, max_context)),
        ("history", history, torch.float32, (rows, max_context)),
        ("contexts", contexts, torch.int32, (rows,)),
    ):
        if tensor.dtype != dtype or tensor.shape != shape or tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be {shape} {dtype}, not {tensor.shape} {tensor.dtype}")
    if merge not in ("fill", "weighted"):
        raise ValueError(f"merge must be 'fill' or 'weighted', not {merge!r}")
    protected = triton.cdiv(sinks, unit) + triton.cdiv(recent, unit)
    if protected > budget:
        raise ValueError(
            f"sinks {sinks} and recent {recent} can protect {protected} units, more than the "
            f"selection's {budget}"
        )
    capacity = workspace.keys.shape[3]
    wanted = min(workspace.tile, budget + lookahead_units) if workspace.preselect else capacity
    if rows > workspace.keys.shape[1] or max_context > workspace.max_context or wanted > capacity:
        raise ValueError(
            f"workspace for {workspace.keys.shape[1]} rows, {workspace.max_context} tokens and "
            f"{capacity} candidates is too small for {rows}, {max_context} and {wanted}"
        )
    # The reference rounds both weights to fp32.
    weight = torch.tensor(lookahead_weight, dtype=torch.float32, device="cpu")
    pieces = workspace.keys.shape[2]
    entries = triton.next_power_of_2(pieces * capacity)
    options = {"UNIT": unit, "PRESELECT": workspace.preselect, "WEIGHTED": merge == "weighted"}
    _candidates_kernel[(pieces, rows)](
        workspace.units,
        workspace.counts,
        workspace.keys[0],
        workspace.keys[1],
        lookahead,
        history,
        contexts,
        lookahead.stride(0),
        history.stride(0),
        max_context,
        sinks,
        recent,
        budget,
        lookahead_units,
        weight.item(),
        (1 - weight).item(),
        capacity,
        SHIFTS=dilation + 1,
        TILE=workspace.tile,
        num_warps=16 if workspace.preselect else 8,
        enable_fp_fusion=False,  # a fused multiply-add would round the weighted sum once
        **options,
    )
    _select_kernel[(rows,)](
        selection,
        workspace.units,
        workspace.counts,
        workspace.keys[0],
        workspace.keys[1],
        contexts,
        selection.stride(0),
        max_context,
        sinks,
        recent,
        budget,
        lookahead_units,
        pieces,
        capacity,
        ENTRIES=entries,
        BUDGET_PADDED=triton.next_power_of_2(budget),
        num_warps=min(32, max(4, entries // 512)),
        **options,
    )
    return selection
