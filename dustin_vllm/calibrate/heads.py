# SPDX-License-Identifier: Apache-2.0
"""Semantic retrieval heads: heads that look at an answer while it is being said.

The score of a head follows the CompressKV paper (arXiv 2508.02401), which Dustin takes its
scoring heads from: the attention mass on the answer's place in the context, summed over the
steps that emit an answer token. Only trials that the model answers right count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dustin_vllm.calibrate.models import Model, Prefilled, prefill
from dustin_vllm.calibrate.text import Window
from dustin_vllm.calibrate.traces import probabilities


@dataclass(frozen=True)
class HeadScores:
    """``scores``: [layers, H] fp32, mean over the trials that count; ``right``: how many of the
    ``trials`` were answered right; ``used``: how many count."""

    scores: torch.Tensor
    right: int
    used: int
    trials: int

    def best(self, layer: int, count: int) -> tuple[int, ...]:
        """The ``count`` best heads of a layer, ascending; ties go to the lower head."""
        order = self.scores[layer].argsort(descending=True, stable=True)
        return tuple(sorted(order[:count].tolist()))


@dataclass(frozen=True)
class Question:
    """One question put to a model: ``mass``, [layers, H] fp32, is every head's attention on the
    source while the answer was emitted; ``right``: whether the answer was right."""

    mass: torch.Tensor
    right: bool


def ask(model: Model, window: Window) -> Question:
    """One question: greedy decoding along the right answer, and where every head looked.

    Args:
        window: with ``source`` and ``answer``.
    """
    start, end = window.answer
    rows = range(start - 1, end - 1)  # the row before a token emits it
    run = prefill(model, window.tokens[: end - 1], rows, rows)
    said = run.logits.argmax(-1).tolist()
    return Question(_mass(run, window), said == list(window.tokens[start:end]))


def combine(trials: Sequence[Question], fallback: Sequence[bool] = ()) -> HeadScores:
    """Retrieval scores of all heads of a model: the mean mass of the trials that count.

    Args:
        fallback: trials to count if the model answered none right (a weak draft attends to
            what its target retrieves, long before it can say it).
    """
    right = [trial.right for trial in trials]
    counted = right if any(right) else list(fallback)
    chosen = [trial.mass for trial, counts in zip(trials, counted or right, strict=True) if counts]
    scores = torch.stack(chosen).mean(0) if chosen else torch.zeros_like(trials[0].mass)
    return HeadScores(scores, sum(right), len(chosen), len(trials))


def _mass(run: Prefilled, window: Window) -> torch.Tensor:
    """[layers, H]: mass on the source span, summed over the answer's rows."""
    first, last = window.source
    return torch.stack(
        [
            probabilities(queries, keys, scale)[:, :, first:last].sum((0, 2))
            for queries, keys, scale in zip(run.queries, run.keys, run.scales.tolist(), strict=True)
        ]
    ).cpu()
