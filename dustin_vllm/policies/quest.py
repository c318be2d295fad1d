# SPDX-License-Identifier: Apache-2.0
"""Quest (arXiv 2406.10774): an upper bound of q·k per unit, from the keys' minima and maxima.

Quest keeps, per unit and key head, the elementwise minimum and maximum of the keys, and ranks
units by sum_d max(q_d min_d, q_d max_d) for the query at hand, in every layer and head for
itself. Here all layers read one selection, and the query is that of the last confirmed token on
the scoring heads, as for the history scores. Bounds of different heads cannot be added as they
are, so each head's become shares by a softmax over the units, and the shares are summed.
What is compared is thus the bound with the exact attention mass, not Quest as a system.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dustin_vllm.policies import Policy, Step
from dustin_vllm.runtime import Row
from dustin_vllm.state import Slot


@dataclass
class Bounds:
    """Of the full units of one sequence: [U, Hk, D], U counted in ``units``."""

    slot: Slot
    low: torch.Tensor
    high: torch.Tensor

    @property
    def units(self) -> int:
        return len(self.low)


def upper_bounds(
    query: torch.Tensor, low: torch.Tensor, high: torch.Tensor, key_heads: torch.Tensor
) -> torch.Tensor:
    """sum_d max(q_d low_d, q_d high_d).

    Args:
        query: [H, D].
        low, high: [U, Hk, D].
        key_heads: [H] int64, the key head of every query head.

    Returns:
        [H, U] fp32.
    """
    query = query.float()[:, None]
    highs, lows = (side.float().permute(1, 2, 0)[key_heads] for side in (high, low))
    return (torch.bmm(query.clamp(min=0), highs) + torch.bmm(query.clamp(max=0), lows))[:, 0]


class Quest(Policy):
    """See the module."""

    def unit_scores(self, step: Step) -> torch.Tensor:
        rows, tokens = step.shape
        scores = torch.zeros(rows, tokens // self.settings.unit, device=step.queries.device)
        key_heads, scales = self.runtime.scoring_heads()
        for index, (row, context) in enumerate(zip(step.rows, step.contexts, strict=True)):
            bounds = self._bounds(row, step.block_tables[index], context)
            found = upper_bounds(step.queries[index], bounds.low, bounds.high, key_heads)
            shares = (found * scales[:, None]).softmax(-1).sum(0)
            scores[index, : len(shares)] = shares
        return scores

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._known: dict[int, Bounds] = {}  # by slot index

    def _bounds(self, row: Row, block_table: torch.Tensor, context: int) -> Bounds:
        """Minima and maxima of the context's full units; only those of new units are made.

        Keys of confirmed tokens do not change, except when a preempted sequence is computed
        again, which differs by what sparse verification approximates.
        """
        unit = self.settings.unit
        units = context // unit
        known = self._known.get(row.slot.index)
        if known is None or known.slot is not row.slot or known.units > units:
            known = None
        first = 0 if known is None else known.units
        if known is None or first < units:
            keys = self.runtime.scoring_keys(block_table, first * unit, units * unit)
            keys = keys.unflatten(0, (units - first, unit))
            low, high = keys.amin(1), keys.amax(1)
            if known is not None:
                low, high = torch.cat([known.low, low]), torch.cat([known.high, high])
            known = self._known[row.slot.index] = Bounds(row.slot, low, high)
        return known


POLICY = Quest
