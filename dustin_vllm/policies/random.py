# SPDX-License-Identifier: Apache-2.0
"""A control: units drawn at random, anew in every step."""

from __future__ import annotations

import hashlib

import torch

from dustin_vllm.policies import Policy, Step


class Random(Policy):
    """Draws by the seed, the sequence's prompt and its length: batches and slots do not matter."""

    def unit_scores(self, step: Step) -> torch.Tensor:
        rows, tokens = step.shape
        scores = torch.zeros(rows, tokens // self.settings.unit)
        for index, (row, context) in enumerate(zip(step.rows, step.contexts, strict=True)):
            about = (self.settings.config.policy_seed, context, row.request.prompt_token_ids)
            digest = hashlib.sha256(repr(about).encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            scores[index] = torch.rand(scores.shape[1], generator=generator)
        return scores.to(step.queries.device)


POLICY = Random
