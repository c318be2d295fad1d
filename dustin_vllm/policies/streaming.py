# SPDX-License-Identifier: Apache-2.0
"""StreamingLLM (arXiv 2309.17453): attention sinks and as many recent units as fit.

Keys keep the positions they were computed at; there, positions count within what is kept.
"""

from __future__ import annotations

import torch

from dustin_vllm.policies import Policy, Step


class Streaming(Policy):
    """The later a unit, the better."""

    def unit_scores(self, step: Step) -> torch.Tensor:
        rows, tokens = step.shape
        units = torch.arange(tokens // self.settings.unit, device=step.queries.device)
        return units.float().expand(rows, -1)


POLICY = Streaming
