# SPDX-License-Identifier: Apache-2.0
"""A ranking made once, after prefill, by the last prompt queries, as SnapKV does
(arXiv 2404.14469): their attention, pooled over neighbouring tokens.

SnapKV keeps a set per layer and head and every generated token beside it. Here one set serves
all layers and the budget is the same for every policy, so of the generated tokens only the
recent window is read. With a prefix cache only the prompt tokens that are computed are seen.
"""

from __future__ import annotations

from typing import Any

import torch

from dustin_vllm.policies import Policy, Step, head_logits
from dustin_vllm.runtime import Row
from dustin_vllm.state import DenseReason, Slot

WINDOW = 32  # last prompt queries that rank
POOL = 5  # tokens over which mass is averaged


class Watch:
    """In a scoring layer's place for captured queries: lets the policy see all of them, too."""

    def __init__(self, inner: Any, policy: Static, place: int, heads: torch.Tensor) -> None:
        self.inner, self.policy, self.place, self.heads = inner, policy, place, heads

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def take(self, *args: Any) -> None:
        """Called with the queries [tokens, heads, D] last, on either platform."""
        self.inner.take(*args)
        self.policy.observe(self.place, args[-1], self.heads)


class Static(Policy):
    """See the module."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # By slot index: the slot, and per scoring layer the last prompt queries [<= WINDOW, h, D].
        self._windows: dict[int, tuple[Slot, dict[int, torch.Tensor]]] = {}
        self._rankings: dict[int, tuple[Slot, torch.Tensor]] = {}
        self._watched = []
        for place, (layer, heads) in enumerate(self.runtime.scoring_layers()):
            chosen = torch.tensor(heads, device=self.runtime.runner.device)
            watch = Watch(layer.impl.capture, self, place, chosen)
            layer.impl.capture = watch
            self._watched.append((layer.impl, watch))

    def close(self) -> None:
        for impl, watch in self._watched:
            impl.capture = watch.inner

    def observe(self, place: int, query: torch.Tensor, heads: torch.Tensor) -> None:
        """Keep the last prompt queries of the rows that are computing their prompt."""
        for row in self.runtime.rows:
            last = min(row.seq_len, row.prompt_tokens) - row.context
            if row.dense is not DenseReason.PREFILL or last <= 0:
                continue
            slot, windows = self._windows.get(row.slot.index, (None, {}))
            if slot is not row.slot or (row.context == 0 and place == 0):
                windows = {}
            new = query[row.first_row + max(0, last - WINDOW) : row.first_row + last][:, heads]
            before = windows.get(place)
            windows[place] = new.clone() if before is None else torch.cat([before, new])[-WINDOW:]
            self._windows[row.slot.index] = (row.slot, windows)

    def unit_scores(self, step: Step) -> torch.Tensor:
        rows, tokens = step.shape
        scores = torch.zeros(rows, tokens // self.settings.unit, device=step.queries.device)
        for index, row in enumerate(step.rows):
            slot, ranking = self._rankings.get(row.slot.index, (None, scores))
            if slot is not row.slot:
                ranking = self._rank(row, step.block_tables[index])
                self._rankings[row.slot.index] = (row.slot, ranking)
            known = ranking[: scores.shape[1]]
            scores[index, : len(known)] = known
        return scores

    def _rank(self, row: Row, block_table: torch.Tensor) -> torch.Tensor:
        """[ceil(prompt / unit)] mass of every unit of the prompt."""
        key_heads, scales = self.runtime.scoring_heads()
        _, windows = self._windows[row.slot.index]
        queries = torch.cat([windows[place] for place in sorted(windows)], dim=1)
        length, unit = row.prompt_tokens, self.settings.unit
        keys = self.runtime.scoring_keys(block_table, 0, length)
        mass = prompt_mass(queries, keys, key_heads, scales)
        mass = torch.nn.functional.avg_pool1d(mass[None, None], POOL, 1, POOL // 2)[0, 0]
        return torch.nn.functional.pad(mass, (0, -length % unit)).view(-1, unit).sum(1)


def prompt_mass(
    queries: torch.Tensor, keys: torch.Tensor, key_heads: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Attention of the last queries of a prompt, summed.

    Args:
        queries: [Q, H, D]; query i at position L - Q + i.
        keys: [L, Hk, D].
        key_heads: [H] int64, the key head of every query head.
        scales: [H] fp32, softmax scales.

    Returns:
        [L] fp32.
    """
    logits = head_logits(queries, keys, key_heads) * scales[:, None, None]
    last = torch.arange(len(queries), device=keys.device) + len(keys) - len(queries)
    hidden = torch.arange(len(keys), device=keys.device)[None, :] > last[:, None]
    return logits.masked_fill_(hidden, float("-inf")).softmax(-1).sum((0, 1))


POLICY = Static
