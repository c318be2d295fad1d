# SPDX-License-Identifier: Apache-2.0
"""Plain torch reference of every step of Dustin.

Each function handles one sequence, in fp32, written to be read. Every kernel of this
package (C++, Triton, vectorised torch) is tested against these functions, and none of
them calls vLLM. Section numbers refer to the paper "Dustin: Draft-Augmented Sparse
Verification for Efficient Long-Context Generation with Speculative Decoding" (ICML 2026).

Words used throughout the package:

* ``context`` (n): confirmed tokens whose keys are in the cache. The gamma + 1 queries of
  the next verification step sit at positions n .. n + gamma.
* ``unit``: what a selection picks, in tokens: 1 (token granularity, the paper) or the
  KV-cache block size (block granularity).
* ``num_units`` (T): full units of the context, ``context // unit``. Only full units can be
  dropped. Everything after them (the unfilled unit and the new tokens) is the *tail*,
  which every row reads.
* ``budget_units`` (K): units a sparse row reads besides its tail, protected units included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def token_scores(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    aggregate: str = "mean",
) -> torch.Tensor:
    """Attention probability that a few queries put on each cached position (section 4.1).

    Args:
        queries: [Q, H, D], already rotated. Row i is the query at position L - Q + i.
        keys: [L, Hkv, D], already rotated; query head h reads key head h // (H // Hkv).
        scale: softmax scale, normally D ** -0.5.
        aggregate: "mean" or "max" over all Q * H rows.

    Returns:
        [L] fp32. Each row is causal (row i sees keys[: L - Q + 1 + i]) and sums to 1, so
        under "mean" the result sums to 1 too.
    """
    num_queries, num_heads, _ = queries.shape
    length, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    expanded = keys.float().repeat_interleave(group, dim=1)
    logits = torch.einsum("qhd,lhd->qhl", queries.float(), expanded) * scale
    last_visible = torch.arange(num_queries) + length - num_queries
    hidden = torch.arange(length)[None, :] > last_visible[:, None]
    probabilities = logits.masked_fill(hidden[:, None, :], float("-inf")).softmax(-1)
    rows = probabilities.reshape(num_queries * num_heads, length)
    return rows.mean(0) if aggregate == "mean" else rows.amax(0)


def unit_scores(scores: torch.Tensor, context: int, unit: int, dilation: int = 0) -> torch.Tensor:
    """Mass of every full unit of the context, optionally dilated forward.

    A query that advances by d tokens while text is being copied or retrieved from far back
    looks d positions further. Forward dilation therefore scores a unit by the largest mass
    it would hold if the score profile moved forward by 0 .. dilation tokens. At unit = 1
    this is max(s[j - dilation .. j]); for blocks it reaches across block borders.

    Args:
        scores: [L] token scores, L >= context; positions from context on are ignored.
        dilation: tokens; gamma + 1 for history scores, 0 for lookahead scores.

    Returns:
        [context // unit] fp32.
    """
    num_units = context // unit
    best = torch.zeros(num_units)
    for shift in range(dilation + 1):
        moved = torch.cat([torch.zeros(shift), scores[:context].float()])[: num_units * unit]
        best = torch.maximum(best, moved.view(num_units, unit).sum(1))
    return best


def protected_units(context: int, unit: int, sinks: int, recent: int) -> set[int]:
    """Full units that hold one of the first ``sinks`` or last ``recent`` context tokens."""
    num_units = context // unit
    first_recent = max(0, context - recent) // unit
    sink_end = min(num_units, -(-sinks // unit))
    return set(range(sink_end)) | set(range(first_recent, num_units))


def select_units(
    lookahead: Sequence[float],
    history: Sequence[float],
    context: int,
    unit: int,
    budget_units: int,
    sinks: int,
    recent: int,
    merge: str,
    lookahead_units: int,
    lookahead_weight: float,
) -> list[int]:
    """Merge both signals into one selection (section 4.1).

    "fill": the protected units, then the ``lookahead_units`` best by lookahead score, then
    the best of the rest by history score, up to ``budget_units`` in total.
    "weighted": the protected units, then the best by
    ``lookahead_weight * lookahead + (1 - lookahead_weight) * history``.
    Ties go to the lower unit, so that every tensor-parallel rank picks the same set.

    Returns:
        ``min(budget_units, context // unit)`` unit indices, ascending.
    """
    num_units = context // unit
    chosen = protected_units(context, unit, sinks, recent)
    if budget_units >= num_units:
        return list(range(num_units))
    if len(chosen) > budget_units:
        raise ValueError(f"{len(chosen)} protected units exceed the budget of {budget_units}")

    def take(scores: Sequence[float], count: int) -> None:
        ranked = sorted(set(range(num_units)) - chosen, key=lambda u: (-scores[u], u))
        chosen.update(ranked[:count])

    free = budget_units - len(chosen)
    if merge == "fill":
        by_lookahead = min(lookahead_units, free)
        take(lookahead, by_lookahead)
        take(history, free - by_lookahead)
    elif merge == "weighted":
        weight = torch.tensor(lookahead_weight, dtype=torch.float32)
        mixed = weight * torch.tensor(lookahead) + (1 - weight) * torch.tensor(history)
        take(mixed.tolist(), free)
    else:
        raise ValueError(f"merge must be 'fill' or 'weighted', not {merge!r}")
    return sorted(chosen)


def compact_row(
    block_table: Sequence[int],
    selection: Sequence[int],
    context: int,
    seq_len: int,
    unit: int,
    block_size: int,
) -> tuple[list[int], int]:
    """Block table of a sparse row: the selected units, then the tail.

    The stock kernel then does block-sparse attention exactly: keys carry their rotary
    position, softmax does not care for order, and a causal mask aligned to the end of the
    shortened length hides only what the new tokens must not see.

    Args:
        block_table: physical block of every logical block, ``block_size`` tokens each.
        selection: selected units, ascending.
        seq_len: context plus the new tokens of this step.

    Returns:
        Physical units in reading order and the number of tokens they hold. With unit = 1
        the entries are cache slots (block * block_size + offset).
    """
    tail_start = context // unit * unit
    if unit == block_size:
        tail_blocks = range(tail_start // unit, -(-seq_len // unit))
        entries = [block_table[u] for u in [*selection, *tail_blocks]]
    else:
        entries = [
            block_table[p // block_size] * block_size + p % block_size
            for p in [*selection, *range(tail_start, seq_len)]
        ]
    return entries, len(selection) * unit + seq_len - tail_start


def attention_recovery(
    scores: torch.Tensor, selection: Sequence[int], context: int, unit: int
) -> float:
    """Share of full-attention mass that a selection and its tail cover (section 3.1).

    Args:
        scores: [L] mean token scores of the verification queries under full attention.
    """
    covered = torch.zeros(scores.shape[0], dtype=torch.bool)
    for u in selection:
        covered[u * unit : (u + 1) * unit] = True
    covered[context // unit * unit :] = True
    return float(scores[covered].sum() / scores.sum())


def sparse_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    selection: Sequence[int],
    context: int,
    unit: int,
) -> torch.Tensor:
    """What a verification step computes: full causal attention with dropped units masked.

    Args:
        queries: [Q, H, D] at positions L - Q .. L - 1, L = keys.shape[0].
        keys, values: [L, Hkv, D].

    Returns:
        [Q, H, D] fp32.
    """
    num_queries, num_heads, _ = queries.shape
    length, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    visible = torch.zeros(length, dtype=torch.bool)
    for u in selection:
        visible[u * unit : (u + 1) * unit] = True
    visible[context // unit * unit :] = True
    last = torch.arange(num_queries) + length - num_queries
    mask = visible[None, :] & (torch.arange(length)[None, :] <= last[:, None])
    k = keys.float().repeat_interleave(group, 1)
    v = values.float().repeat_interleave(group, 1)
    logits = torch.einsum("qhd,lhd->qhl", queries.float(), k) * scale
    weights = logits.masked_fill(~mask[:, None, :], float("-inf")).softmax(-1)
    return torch.einsum("qhl,lhd->qhd", weights, v)
