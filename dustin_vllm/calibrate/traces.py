# SPDX-License-Identifier: Apache-2.0
"""Recorded traces: what both models computed on a window, and token scores from it.

A trace holds rotated keys, values and the queries of a few rows, so that scores of any heads
under any aggregation, and verification under any selection, can be had without running the
window again. Rows are teacher-forced: the text itself is what was confirmed and drafted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dustin_vllm.calibrate.models import Model, prefill
from dustin_vllm.calibrate.text import Window
from dustin_vllm.config import first_deep_layer

FORMAT = 2


@dataclass(frozen=True)
class Trace:
    """One window through both models.

    ``target_keys``, ``target_values``: [layers, Hkv, L, D]; ``target_queries``: [layers, rows,
    H, D], row r at position ``rows[r]``; the draft's alike. ``*_scales``: [layers].
    ``draft_next``: [rows] int64, the draft's most likely token behind every row.
    """

    window: Window
    target_keys: torch.Tensor
    target_values: torch.Tensor
    target_queries: torch.Tensor
    target_scales: torch.Tensor
    draft_keys: torch.Tensor
    draft_queries: torch.Tensor
    draft_scales: torch.Tensor
    draft_next: torch.Tensor
    rows: tuple[int, ...]

    def row_indices(self, first: int, last: int) -> slice:
        """Where the queries of positions first .. last stand."""
        start = self.rows.index(first)
        return slice(start, start + last - first + 1)

    def agreeing(self, context: int, gamma: int) -> int:
        """How many of the ``gamma`` draft rows from ``context`` on predict the text, up to the
        first that does not: what verification would accept if the text is what it says."""
        said = self.draft_next[self.row_indices(context, context + gamma - 1)].tolist()
        text = self.window.tokens[context + 1 : context + gamma + 1]
        wrong = (row for row, pair in enumerate(zip(said, text, strict=True)) if pair[0] != pair[1])
        return next(wrong, gamma)


@dataclass(frozen=True)
class Item:
    """A verification step: the sequence of a trace with ``context`` confirmed tokens."""

    trace: int
    context: int


def rows_of(window: Window, gamma: int) -> tuple[int, ...]:
    """Rows whose queries are needed: the last confirmed one and the step's, of every step."""
    rows = {n + i for n in window.positions for i in range(-1, gamma + 1)}
    return tuple(sorted(rows))


def trace_path(folder: Path, window: Window, target: Model, draft: Model, gamma: int) -> Path:
    """File of a trace; its name is a hash of everything that the trace depends on."""
    key = [
        *(FORMAT, target.fingerprint, draft.fingerprint, gamma),
        *(str(target.module.dtype), str(draft.module.dtype), window.tokens, window.positions),
    ]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return folder / f"trace-{digest}.safetensors"


def record(
    folder: Path, window: Window, target: Model, draft: Model, gamma: int, device: torch.device
) -> Trace:
    """The trace of a window, from its file if there is one.

    Args:
        folder: work folder, exists.
        device: where the tensors go.
    """
    from safetensors.torch import load_file, save_file

    path = trace_path(folder, window, target, draft, gamma)
    rows = rows_of(window, gamma)
    if not path.is_file():
        sparse = prefill(target, window.tokens, rows)
        ahead = prefill(draft, window.tokens, rows, rows)
        tensors = {
            "target_keys": sparse.keys,
            "target_values": sparse.values,
            "target_queries": sparse.queries,
            "target_scales": sparse.scales,
            "draft_keys": ahead.keys,
            "draft_queries": ahead.queries,
            "draft_scales": ahead.scales,
            "draft_next": ahead.logits.argmax(-1),
        }
        part = path.with_suffix(".part")
        save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, part)
        part.rename(path)  # complete or absent
    return Trace(window=window, rows=rows, **load_file(path, device=str(device)))


def probabilities(queries: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention probabilities of a few rows, of every head.

    Args:
        queries: [Q, H, D] rotated, at positions L - Q .. L - 1.
        keys: [Hkv, L, D] rotated.

    Returns:
        [Q, H, L] fp32. The mean (or maximum) over rows and heads is
        ``reference.token_scores`` of the same queries.
    """
    num_queries, num_heads, dim = queries.shape
    num_kv_heads, length, _ = keys.shape
    grouped = queries.float().view(num_queries, num_kv_heads, num_heads // num_kv_heads, dim)
    logits = torch.einsum("qkgd,kld->qkgl", grouped, keys.float()) * scale
    last = torch.arange(num_queries, device=keys.device) + length - num_queries
    hidden = torch.arange(length, device=keys.device)[None, :] > last[:, None]
    logits.masked_fill_(hidden[:, None, None, :], float("-inf"))
    return logits.softmax(-1).flatten(1, 2)


class Scores:
    """Token scores of every item by layer and head, made when first asked for.

    Args:
        max_bytes: cached scores beyond this are dropped, oldest first.
    """

    def __init__(
        self,
        traces: Sequence[Trace],
        items: Sequence[Item],
        gamma: int,
        max_bytes: int = 4 << 30,
    ) -> None:
        self.traces, self.items, self.gamma = traces, items, gamma
        self._max_bytes = max_bytes
        self._bytes = 0
        self._cache: dict[tuple[str, int, int, str], torch.Tensor] = {}
        self._oracles: dict[int, torch.Tensor] = {}

    def history(self, item: int, layer: int) -> torch.Tensor:
        """[H, n] fp32: the last confirmed token's attention in one target layer."""
        key = ("history", item, layer, "")
        if key not in self._cache:
            trace, n = self.traces[self.items[item].trace], self.items[item].context
            row = trace.row_indices(n - 1, n - 1)
            queries, keys = trace.target_queries[layer, row], trace.target_keys[layer, :, :n]
            scale = float(trace.target_scales[layer])
            self._keep(key, probabilities(queries, keys, scale)[0])
        return self._cache[key]

    def agreeing(self, item: int) -> int:
        """See ``Trace.agreeing``."""
        chosen = self.items[item]
        return self.traces[chosen.trace].agreeing(chosen.context, self.gamma)

    def lookahead(
        self, item: int, layer: int, aggregate: str, first: int | None = None
    ) -> torch.Tensor:
        """[H, n] fp32: the gamma draft queries' attention in one draft layer, mean or max.

        Args:
            first: only so many of the queries, from 1.
        """
        used = self.gamma if first is None else first
        key = ("lookahead", item, layer, f"{aggregate} of {used}")
        if key not in self._cache:
            trace, n = self.traces[self.items[item].trace], self.items[item].context
            rows = trace.row_indices(n, n + self.gamma - 1)
            keys = trace.draft_keys[layer, :, : n + self.gamma]
            scale = float(trace.draft_scales[layer])
            rows_heads = probabilities(trace.draft_queries[layer, rows], keys, scale)[:used, :, :n]
            reduced = rows_heads.mean(0) if aggregate == "mean" else rows_heads.amax(0)
            self._keep(key, reduced.clone())
        return self._cache[key]

    def oracle(self, item: int) -> torch.Tensor:
        """[n + gamma + 1] fp32: mean attention of the verification rows, all layers and heads."""
        layers = len(self.traces[self.items[item].trace].target_scales)
        return self.oracle_halves(item).sum(0) / layers

    def oracle_halves(self, item: int) -> torch.Tensor:
        """[2, n + gamma + 1] fp32: the same summed over the layers of the first half, and of the
        deeper half (merge "split"); mean over rows and heads."""
        if item not in self._oracles:
            trace, n = self.traces[self.items[item].trace], self.items[item].context
            rows = trace.row_indices(n, n + self.gamma)
            total = torch.zeros(2, n + self.gamma + 1, device=trace.target_keys.device)
            first_deep = first_deep_layer(len(trace.target_scales))
            for layer, scale in enumerate(trace.target_scales.tolist()):
                keys = trace.target_keys[layer, :, : n + self.gamma + 1]
                queries = trace.target_queries[layer, rows]
                total[int(layer >= first_deep)] += probabilities(queries, keys, scale).mean((0, 1))
            self._oracles[item] = total.cpu()
        return self._oracles[item]

    def _keep(self, key: tuple[str, int, int, str], value: torch.Tensor) -> None:
        self._cache[key] = value
        self._bytes += value.nbytes
        for oldest in list(self._cache):
            if self._bytes <= self._max_bytes or oldest == key:
                break
            self._bytes -= self._cache.pop(oldest).nbytes
