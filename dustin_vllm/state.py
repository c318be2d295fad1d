# SPDX-License-Identifier: Apache-2.0
"""Per-sequence state and counters.

State is keyed by request and indexed by logical units: batch rows move, physical blocks are
shared by prefix caching and reused after they are freed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from dustin_vllm.config import LayerGroup


class DenseReason(str, Enum):
    """Why a row was computed densely."""

    PREFILL = "prefill"  # prompt tokens, or tokens recomputed after preemption
    SHORT_CONTEXT = "short_context"  # nothing to drop, or below dense_below
    NO_SELECTION = "no_selection"  # no selection was made in the sequence's previous step
    LONG_QUERY = "long_query"  # more new tokens than gamma + 1
    REQUESTED = "requested"  # by the request, or sparse_verification is off
    REFRESH = "refresh"  # refresh_interval


class Mode(str, Enum):
    """How a row was verified."""

    SPARSE = "sparse"
    DENSE = "dense"


class LoopReason(str, Enum):
    """Why vLLM's loop drafted, and not a graph of all draft passes."""

    NOT_CAPTURED = "not_captured"  # no graphs on this platform, or none for a batch so large
    PREFILL = "prefill"  # prompt tokens in the batch
    RAGGED = "ragged"  # rows with fewer than gamma + 1 tokens
    SAMPLED = "sampled"  # drafts are sampled, not the most likely tokens


@dataclass
class Slot:
    """Place of one sequence in ``SequenceScores.selections``."""

    index: int
    seen: int = -1  # last step that had the sequence in its batch
    published: int = -1  # last step that made a selection for it
    sparse_steps: int = 0  # sparse verifications since the last dense one

    @property
    def fresh(self) -> bool:
        """Whether the sequence's latest step made a selection.

        Confirmed tokens change in no other way than by a step, so a fresh selection is one
        made for exactly the context at hand; nothing has to be read back from the device. A
        request that reuses the id of an aborted one, or is computed again after preemption,
        starts with a step that makes none.
        """
        return self.published == self.seen >= 0


class SequenceScores:
    """Latest selection of every sequence, on the device.

    Args:
        num_slots: sequences that can hold state at once, preempted ones included. When more
            are alive, the one unseen for longest loses its slot (and is dense for one step).
        groups: layer groups; each has a selection of its own.
    """

    def __init__(self, num_slots: int, groups: Sequence[LayerGroup], device: torch.device) -> None:
        # By group name, [slots + 1, K]: padded batch rows read and write the last row.
        self.selections = {
            group.name: torch.zeros(
                num_slots + 1, group.budget_units, dtype=torch.int32, device=device
            )
            for group in groups
        }
        self.padding_index = num_slots  # slot index of batch rows that are no sequence
        self._free = list(range(num_slots))
        self._slots: dict[str, Slot] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def slot(self, request_id: str) -> Slot:
        """The slot of a request; a new one, without a selection, if it has none."""
        if request_id not in self._slots:
            if not self._free:
                self._release(min(self._slots, key=lambda known: self._slots[known].seen))
            self._slots[request_id] = Slot(self._free.pop())
        return self._slots[request_id]

    def _release(self, request_id: str) -> None:
        self._free.append(self._slots.pop(request_id).index)

    def keep_only(self, request_ids: Iterable[str]) -> None:
        """Free the slots of requests that are not among ``request_ids`` (finished, aborted)."""
        for gone in self._slots.keys() - set(request_ids):
            self._release(gone)


@dataclass
class Counters:
    """What the engine did since start-up. Tokens are KV positions of one row, not times layers."""

    verification_rows: int = 0
    sparse_rows: int = 0
    dense_rows: Counter[str] = field(default_factory=Counter)
    kv_tokens_full: int = 0  # what dense verification of all verification rows would have read
    kv_tokens_read: int = 0  # what was read
    draft_kv_tokens_full: int = 0  # what dense drafting of sparse rows would have read, all passes
    draft_kv_tokens_read: int = 0  # what was read; both 0 without draft_budget
    draft_graphs: int = 0  # steps whose drafts came from one graph
    draft_loops: Counter[str] = field(default_factory=Counter)  # steps drafted pass by pass
    selections: int = 0
    # Rows that verified at least one draft, and the tokens they confirmed, the bonus token
    # included; by Mode. On a GPU of every 8th step only, so take their ratio alone.
    verifications: Counter[str] = field(default_factory=Counter)
    verified_tokens: Counter[str] = field(default_factory=Counter)
    recovery_sum: float = 0.0
    recovery_samples: int = 0
    scoring_seconds: float = 0.0  # CPU only
    replicas_compared: int = 0  # steps; with debug logging, outside of graphs
    replica_mismatches: int = 0  # drafts in which a rank's whole draft differs from the first's

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {k: dict(v) if isinstance(v, Counter) else v for k, v in vars(self).items()}
