# SPDX-License-Identifier: Apache-2.0
"""A control: units drawn at random, anew in every step."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from dustin_vllm.policies import Policy, Step
from dustin_vllm.runtime import Row
from dustin_vllm.state import Slot


class Random(Policy):
    """Draws by the seed, the sequence's prompt and its length: batches and slots do not matter."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._seeds: dict[int, tuple[Slot, int]] = {}  # by slot index

    def unit_scores(self, step: Step) -> torch.Tensor:
        rows, tokens = step.shape
        scores = torch.zeros(rows, tokens // self.settings.unit)
        for index, (row, context) in enumerate(zip(step.rows, step.contexts, strict=True)):
            generator = torch.Generator().manual_seed(self._seed(row) + context)
            scores[index] = torch.rand(scores.shape[1], generator=generator)
        return scores.to(step.queries.device)

    def _seed(self, row: Row) -> int:
        slot, seed = self._seeds.get(row.slot.index, (None, 0))
        if slot is not row.slot:
            about = (self.settings.config.policy_seed, row.request.prompt_token_ids)
            digest = hashlib.sha256(repr(about).encode()).digest()
            seed = int.from_bytes(digest[:7], "little")
            self._seeds[row.slot.index] = (row.slot, seed)
        return seed


POLICY = Random
