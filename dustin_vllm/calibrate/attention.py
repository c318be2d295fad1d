# SPDX-License-Identifier: Apache-2.0
"""Attention for transformers models that records queries and keys, or reads selections.

transformers looks attention up by name and calls it with rotated queries and keys. What is
done there is decided by the plan that is active around the forward pass; without one, a model
loaded with this attention refuses to run. No plan builds a context x context matrix.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

NAME = "dustin_calibrate"


class CalibrationError(ValueError):
    """A model, text or option that calibration refuses, with the reason and the fix."""


class Plan(Protocol):
    """What attention does during a forward pass."""

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """queries [B, H, Q, D], keys and values [B, Hkv, Q, D], rotated; returns as queries."""


_active: ContextVar[Plan | None] = ContextVar("dustin_calibrate_plan", default=None)


@contextlib.contextmanager
def active(plan: Plan) -> Iterator[None]:
    """Let ``plan`` attend in the forward passes of the block."""
    token = _active.set(plan)
    try:
        yield
    finally:
        _active.reset(token)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    plan = _active.get()
    if plan is None:
        raise RuntimeError(f"attention {NAME!r} runs only inside attention.active(plan)")
    for name in ("sliding_window", "softcap", "s_aux"):
        if more.get(name) is not None:
            raise CalibrationError(
                f"{type(module).__name__} uses {name}, which Dustin does not support; "
                "calibrate a model with plain softmax attention over the whole context"
            )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = plan.attend(module.layer_idx, query, key, value, scale)
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Make ``NAME`` known to transformers. Calling it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)


def causal_mask(num_queries: int, length: int, device: torch.device) -> torch.Tensor:
    """[num_queries, length] bool: query i sees keys[: length - num_queries + 1 + i]."""
    last = torch.arange(num_queries, device=device)[:, None] + length - num_queries
    return torch.arange(length, device=device)[None, :] <= last


class Prefill:
    """Dense causal attention in chunks, keeping all keys and values and the wanted queries.

    Args:
        length: tokens in all.
        rows: positions whose queries are kept, ascending.
    """

    def __init__(self, length: int, rows: Sequence[int]) -> None:
        self.length = length
        self.rows = torch.tensor(list(rows), dtype=torch.long)
        self.start = 0  # position of the chunk's first token; the caller moves it
        self.keys: dict[int, torch.Tensor] = {}  # layer -> [Hkv, length, D]
        self.values: dict[int, torch.Tensor] = {}
        self.queries: dict[int, torch.Tensor] = {}  # layer -> [rows, H, D]
        self.scales: dict[int, float] = {}

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """See ``Plan``; one sequence."""
        _, heads, width, dim = queries.shape
        start, end = self.start, self.start + width
        if layer not in self.keys:
            self.keys[layer] = keys.new_empty(keys.shape[1], self.length, keys.shape[-1])
            self.values[layer] = values.new_empty(values.shape[1], self.length, values.shape[-1])
            self.queries[layer] = queries.new_empty(len(self.rows), heads, dim)
            self.scales[layer] = scale
        self.keys[layer][:, start:end] = keys[0]
        self.values[layer][:, start:end] = values[0]
        wanted = ((self.rows >= start) & (self.rows < end)).nonzero()[:, 0]
        if len(wanted):
            taken = queries[0].transpose(0, 1)[(self.rows[wanted] - start).to(queries.device)]
            self.queries[layer][wanted.to(queries.device)] = taken
        mask = causal_mask(width, end, queries.device) if start else None
        return scaled_dot_product_attention(
            queries,
            self.keys[layer][None, :, :end],
            self.values[layer][None, :, :end],
            attn_mask=mask,
            is_causal=not start,
            scale=scale,
            enable_gqa=True,
        )


SelectInStep = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""What a layer's own queries select for it and all deeper ones. Called with a sequence's index,
its queries [H, Q, D], cached keys [Hkv, L, D], new keys [Hkv, Q, D] and the softmax scale; returns
the cached positions that are read, [K] long."""


class SparseRows:
    """The new tokens of each sequence attend to chosen cached positions and to one another.

    Args:
        caches: per sequence the dense keys and values of its context,
            (layers, [layers, Hkv, L, D] each).
        kept: per sequence the cached positions that are read, [K] long.
        second: the same for ``second_layers``; None: ``kept``.
        fresh: by layer; selects for those of ``second_layers`` that are as deep or deeper.
    """

    def __init__(
        self,
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        kept: Sequence[torch.Tensor],
        second: Sequence[torch.Tensor] | None = None,
        second_layers: Collection[int] = (),
        fresh: Mapping[int, SelectInStep] | None = None,
    ) -> None:
        self.caches = caches
        self.kept = kept
        self.second = kept if second is None else second
        self.second_layers = second_layers
        self.fresh = fresh or {}

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """See ``Plan``. Row i of a sequence also sees its new tokens 0 .. i."""
        out = torch.empty_like(queries)
        num_kv_heads, width = keys.shape[1], keys.shape[2]
        if (select := self.fresh.get(layer)) is not None:
            self.second = [
                select(index, queries[index], cached[layer], keys[index], scale)
                for index, (cached, _) in enumerate(self.caches)
            ]
        chosen = self.second if layer in self.second_layers else self.kept
        for index, ((all_keys, all_values), kept) in enumerate(
            zip(self.caches, chosen, strict=True)
        ):
            mask = causal_mask(width, len(kept) + width, queries.device)
            # The heads that share a key head are rows of it: no key is copied for them.
            rows = queries[index].unflatten(0, (num_kv_heads, -1))
            group = rows.shape[1]
            attended = scaled_dot_product_attention(
                rows.flatten(1, 2)[None],
                _chosen(all_keys[layer], kept, keys[index]),
                _chosen(all_values[layer], kept, values[index]),
                attn_mask=mask.repeat(group, 1),
                scale=scale,
            )
            out[index] = attended[0].unflatten(1, (group, width)).flatten(0, 1)
        return out


def _chosen(cache: torch.Tensor, kept: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """[1, Hkv, K + Q, D]: the kept positions of a cache [Hkv, L, D], then the new tokens."""
    picked = cache.index_select(1, kept.to(cache.device)).to(new)
    return torch.cat([picked, new], dim=1)[None]
