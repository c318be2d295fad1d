# SPDX-License-Identifier: Apache-2.0
"""Rival selection policies, for evaluation: what else could rank the units of a context.

A policy runs in the real engine in place of Dustin's merge, chosen by ``dustin.policy``. It
ranks whole units; sinks, recent window, budget, compaction and everything after are Dustin's,
so that a comparison is one of the ranking alone. A policy is a file of this package with its
name, which defines ``POLICY``, a subclass of ``Policy``: a new one needs nothing else.

``dustin``, ``lookahead`` and ``history`` are settings of Dustin's own merge and run in its
kernels. All others are plain torch, read results back to the host, and draft without graphs.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from dustin_vllm.config import Settings
    from dustin_vllm.runtime import DustinRuntime, Row

BUILT_IN = ("dustin", "lookahead", "history")


@cache
def names() -> tuple[str, ...]:
    """Every policy that ``dustin.policy`` takes."""
    return (*BUILT_IN, *sorted(module.name for module in pkgutil.iter_modules(__path__)))


def make(settings: Settings, runtime: DustinRuntime) -> Policy | None:
    """The policy that the settings name; None: Dustin's own merge."""
    name = settings.config.policy
    if name in BUILT_IN:
        return None
    policy: Policy = importlib.import_module(f"{__name__}.{name}").POLICY(settings, runtime)
    return policy


@dataclass
class Step:
    """What a policy may look at when the selections for the next verification are made.

    Attributes:
        rows: R sequences that get a selection.
        contexts: their confirmed tokens.
        queries: [R, H, D] of the last confirmed token, rotated, H the target's scoring heads
            in order of layers.
        block_tables: [R, MB] int32.
    """

    rows: list[Row]
    contexts: list[int]
    queries: torch.Tensor
    block_tables: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(R, tokens of the longest context)."""
        return len(self.rows), max(self.contexts)


class Policy:
    """Ranks the units of every context; one object per engine and configuration."""

    def __init__(self, settings: Settings, runtime: DustinRuntime) -> None:
        self.settings = settings
        self.runtime = runtime

    def unit_scores(self, step: Step) -> torch.Tensor:
        """How much every unit is wanted.

        Returns:
            [R, U] fp32, U at least contexts[r] // unit for every row; the larger the better, ties
            go to the lower unit. Values of protected units and of units beyond the context do
            not matter.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Take back what was hooked into the engine."""


def head_logits(queries: torch.Tensor, keys: torch.Tensor, key_heads: torch.Tensor) -> Any:
    """Dot products of every query head with the keys that it reads.

    Args:
        queries: [Q, H, D].
        keys: [L, Hk, D].
        key_heads: [H] int64, the key head of every query head.

    Returns:
        [H, Q, L] fp32, not scaled.
    """
    import torch

    wanted, order = key_heads.unique(return_inverse=True)
    chosen = keys.float()[:, wanted].permute(1, 2, 0)  # [distinct, D, L]
    return torch.bmm(queries.float().transpose(0, 1), chosen[order])
