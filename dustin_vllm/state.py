# SPDX-License-Identifier: Apache-2.0
"""Per-sequence state and counters.

State is keyed by request and indexed by logical units: batch rows move, physical blocks are
shared by prefix caching and reused after they are freed.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch


class DenseReason(str, Enum):
    """Why a row was computed densely."""

    PREFILL = "prefill"  # prompt tokens, or tokens recomputed after preemption
    SHORT_CONTEXT = "short_context"  # nothing to drop, or below dense_below
    NO_SELECTION = "no_selection"  # no selection was made for exactly this context
    LONG_QUERY = "long_query"  # more new tokens than gamma + 1


@dataclass
class Slot:
    """State of one sequence."""

    request: weakref.ref[Any]
    context: int = -1  # confirmed tokens for which the selection was made; -1: none
    selection: torch.Tensor | None = None  # [K] int32 logical units, ascending


class SequenceScores:
    """Latest selection of every running sequence.

    A slot belongs to one request object, not only to its id: a request that was aborted and
    submitted again under the same id is another sequence.
    """

    def __init__(self) -> None:
        self._slots: dict[str, Slot] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def publish(self, request_id: str, request: Any, context: int, selection: torch.Tensor) -> None:
        """Store the selection for the verification step that follows ``context`` tokens."""
        self._slots[request_id] = Slot(weakref.ref(request), context, selection)

    def fresh(self, request_id: str, request: Any, context: int) -> torch.Tensor | None:
        """Selection made for exactly this request and context, or None."""
        slot = self._slots.get(request_id)
        if slot is None or slot.request() is not request or slot.context != context:
            return None
        return slot.selection

    def drop_missing(self, request_ids: Iterable[str]) -> None:
        """Forget sequences that are not among ``request_ids`` (finished or aborted)."""
        for gone in self._slots.keys() - set(request_ids):
            del self._slots[gone]


@dataclass
class Counters:
    """What the engine did since start-up. Tokens are KV positions of one row, not times layers."""

    verification_rows: int = 0
    sparse_rows: int = 0
    dense_rows: Counter[str] = field(default_factory=Counter)
    kv_tokens_full: int = 0  # what dense verification of all verification rows would have read
    kv_tokens_read: int = 0  # what was read
    selections: int = 0
    recovery_sum: float = 0.0
    recovery_samples: int = 0
    scoring_seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {**vars(self), "dense_rows": dict(self.dense_rows)}
