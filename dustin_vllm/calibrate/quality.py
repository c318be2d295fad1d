# SPDX-License-Identifier: Apache-2.0
"""What a selection does to the target: KL to dense attention, measured by running the rows.

Attention recovery does not see which heads matter: it misses selections that lose a copied
or retrieved passage. So the search minimises this.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dustin_vllm.calibrate.attention import SparseRows, active
from dustin_vllm.calibrate.models import Model
from dustin_vllm.calibrate.policies import Selections, kept_positions, select_in_step
from dustin_vllm.calibrate.traces import Scores
from dustin_vllm.config import Settings
from dustin_vllm.results import ResultsError

MAX_ROWS = 256  # rows per forward pass; bounds the logits in memory


@dataclass(frozen=True)
class Quality:
    """Per item, fp32: ``kl``, mean KL(dense || sparse) in nats over the step's gamma + 1 rows,
    and ``agreement``, the share of rows whose most likely token is the dense one."""

    kl: torch.Tensor
    agreement: torch.Tensor


class Journal:
    """Results already measured, one JSON object a line, so that an interrupted run resumes.

    Args:
        path: created if missing; a torn last line is dropped.

    ``reused``: keys that an earlier run had written and that were asked for.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reused: set[str] = set()
        self._known: dict[str, dict[str, list[float]]] = {}
        self._torn = False
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            self._torn = bool(text) and not text.endswith("\n")
            for line in text.splitlines():
                try:
                    entry = json.loads(line)
                    self._known[entry["key"]] = entry["values"]
                except (ValueError, KeyError, TypeError):
                    continue  # torn by an interruption
        self._earlier = frozenset(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: str) -> dict[str, list[float]] | None:
        """What was written under ``key``."""
        if key in self._earlier:
            self.reused.add(key)
        return self._known.get(key)

    def put(self, key: str, values: dict[str, list[float]]) -> None:
        """Remember and write at once."""
        self._known[key] = values
        line = json.dumps({"key": key, "values": values}) + "\n"
        try:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write("\n" + line if self._torn else line)
        except OSError as error:
            raise ResultsError(f"cannot write {self.path}: {error.strerror or error}") from error
        self._torn = False


class Evaluator:
    """Runs verification steps of the target under selections.

    Args:
        scores: the items; their traces hold the dense keys and values.
        journal: results are looked up and kept there.
    """

    def __init__(self, target: Model, scores: Scores, journal: Journal) -> None:
        self.target, self.scores, self.journal = target, scores, journal
        self.measured = 0  # not taken from the journal
        self._dense: list[torch.Tensor] | None = None
        about = [
            *(target.fingerprint, str(target.module.dtype), scores.gamma),
            *((scores.traces[item.trace].window.tokens, item.context) for item in scores.items),
        ]
        self._key = hashlib.sha256(json.dumps(about).encode()).hexdigest()

    def measure(
        self,
        selections: Selections,
        unit: int,
        second: Selections | None = None,
        second_layers: Collection[int] = (),
        fresh: Settings | None = None,
    ) -> Quality:
        """Quality under the selections, one per item.

        Args:
            second: what ``second_layers`` read; None: the same.
            fresh: settings with ``fresh_layers``, whose queries select for ``second_layers``.
        """
        about = [self._key, unit, _listed(selections)]
        if second is not None:
            about += [_listed(second), sorted(second_layers)]
        if fresh is not None:
            config = fresh.config
            select = [fresh.target_heads.of_layer(i).layers for i in sorted(config.fresh_layers)]
            about += ["fresh", select, fresh.gamma, config.aggregate]
            about += [fresh.second.budget_units if fresh.second else 0, config.sinks, config.recent]
        key = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]
        values = self.journal.get(key)
        if values is None:
            values = self._run(selections, unit, second, second_layers, fresh)
            self.journal.put(key, values)
            self.measured += 1
        return Quality(torch.tensor(values["kl"]), torch.tensor(values["agreement"]))

    @torch.inference_mode()
    def _run(
        self,
        selections: Selections,
        unit: int,
        second: Selections | None,
        second_layers: Collection[int],
        fresh: Settings | None,
    ) -> dict[str, list[float]]:
        everything: Selections = [None] * len(selections)
        if self._dense is None:
            # By the same route as sparse rows: an equal selection is equal to the last bit.
            self._dense = [self._log_probs(batch, everything, unit) for batch in self._batches()]
        kl: list[float] = []
        agreement: list[float] = []
        for batch, dense in zip(self._batches(), self._dense, strict=True):
            sparse = self._log_probs(batch, selections, unit, second, second_layers, fresh)
            divergence = (dense.exp() * (dense - sparse)).sum(-1).clamp_(min=0)
            kl += divergence.mean(1).tolist()
            same = dense.argmax(-1) == sparse.argmax(-1)
            agreement += same.float().mean(1).tolist()
        return {"kl": kl, "agreement": agreement}

    def _batches(self) -> Sequence[range]:
        size = max(1, MAX_ROWS // (self.scores.gamma + 1))
        count = len(self.scores.items)
        return [range(i, min(i + size, count)) for i in range(0, count, size)]

    def _log_probs(
        self,
        batch: range,
        selections: Selections,
        unit: int,
        second: Selections | None = None,
        second_layers: Collection[int] = (),
        fresh: Settings | None = None,
    ) -> torch.Tensor:
        """[items of the batch, gamma + 1, V] fp32 log probabilities."""
        device, width = self.target.device, self.scores.gamma + 1
        caches, ids, positions = [], [], []
        for index in batch:
            item = self.scores.items[index]
            trace = self.scores.traces[item.trace]
            caches.append((trace.target_keys, trace.target_values))
            ids.append(list(trace.window.tokens[item.context : item.context + width]))
            positions.append(list(range(item.context, item.context + width)))

        def kept(chosen: Selections) -> list[torch.Tensor]:
            contexts = [self.scores.items[index].context for index in batch]
            return [
                kept_positions(chosen[index], context, unit)
                for index, context in zip(batch, contexts, strict=True)
            ]

        def in_step(layer: int, index: int, *inputs: Any) -> torch.Tensor:
            assert fresh is not None
            return select_in_step(fresh, layer, self.scores.items[batch[index]].context, *inputs)

        plan = SparseRows(
            caches,
            kept(selections),
            None if second is None else kept(second),
            second_layers,
            None if fresh is None else {i: partial(in_step, i) for i in fresh.config.fresh_layers},
        )
        with active(plan):
            logits = self.target.module(
                input_ids=torch.tensor(ids, device=device),
                position_ids=torch.tensor(positions, device=device),
                use_cache=False,
            ).logits
        return logits.float().log_softmax(-1)


def _listed(selections: Selections) -> list[list[int] | None]:
    return [None if chosen is None else chosen.tolist() for chosen in selections]
