# SPDX-License-Identifier: Apache-2.0
"""Search for settings: scoring layers greedily, everything else by Optuna.

The objective is KL to dense. Recovery, which needs no forward pass, only shortens the list of
layers that are tried; the layers with the best retrieval heads are on the list whatever their
recovery is, because recovery does not see them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dustin_vllm.calibrate import policies
from dustin_vllm.calibrate.heads import HeadScores
from dustin_vllm.calibrate.policies import Signal
from dustin_vllm.calibrate.quality import Evaluator, Quality
from dustin_vllm.calibrate.traces import Scores
from dustin_vllm.config import (
    ConfigError,
    DustinConfig,
    ModelShape,
    ScoringLayer,
    Settings,
    default_layers,
)

FEW_HEADS = 4  # scoring heads per layer in the paper
BY_RECOVERY, BY_HEADS = 4, 3  # layers on the short list
BY_BUDGET = 5  # on that of wide layers
WORTHWHILE = 0.98  # a further layer must bring KL to this share of what it was
SINKS = (4, 16, 64)
RECENT = (32, 64, 128, 256)

Advance = Callable[[str, int, int], None]
"""Called with (what is being done, steps done, steps in all)."""
Stop = Callable[[str], bool]
"""Called with what is about to go on; True: the time for it is over."""


@dataclass(frozen=True)
class Trial:
    """One setting and what it gave. ``loss``: see ``Search.loss``; ``scoring``: bytes of keys
    read for scoring per context token and step."""

    config: DustinConfig
    unit: int
    loss: float
    scoring: int
    window_kl: tuple[float, ...]


@dataclass(frozen=True)
class Found:
    """What a search ends with: layers in order of use, all trials, the chosen one."""

    target_layers: tuple[int, ...]
    draft_layers: tuple[int, ...]
    trials: tuple[Trial, ...]
    chosen: Trial
    default: Trial


class Search:
    """Search on one set of items.

    Args:
        scores: the calibration items.
        gamma: proposed tokens per step.
        budget: tokens; not searched, because more is always better.
        units: units that the search may choose among, the first is used for the layers.
        target_heads, draft_heads: retrieval scores.
        stop: asked between steps; the search then ends with what it has, which is at least one
            layer of each model and one trial besides the defaults.
    """

    def __init__(
        self,
        scores: Scores,
        evaluator: Evaluator,
        gamma: int,
        budget: int,
        units: Sequence[int],
        target: tuple[ModelShape, HeadScores],
        draft: tuple[ModelShape, HeadScores],
        advance: Advance,
        stop: Stop = lambda what: False,
    ) -> None:
        self.scores, self.evaluator = scores, evaluator
        self.gamma, self.budget, self.units = gamma, budget, tuple(units)
        self.target, self.target_heads = target
        self.draft, self.draft_heads = draft
        self.advance, self.stop = advance, stop

    def settings(self, config: DustinConfig, unit: int) -> Settings:
        """Resolved settings, see ``policies.settings_for``."""
        return policies.settings_for(config, unit, self.gamma, self.target, self.draft)

    def quality(self, settings: Settings, signal: Signal = "settings") -> Quality:
        """Quality on all items."""
        selections, second = policies.select_groups(self.scores, settings, signal)
        fresh, layers = policies.within_step(settings, signal), settings.second_layers
        return self.evaluator.measure(selections, settings.unit, second, layers, fresh)

    def window_kl(self, quality: Quality) -> torch.Tensor:
        """[windows] mean KL."""
        return policies.by_window(self.scores, quality.kl)

    def loss(self, window_kl: torch.Tensor) -> float:
        """Mean KL over the kinds of text, each counting the same."""
        of_kind: dict[str, list[float]] = {}
        for kind, value in zip(policies.kinds(self.scores), window_kl.tolist(), strict=True):
            of_kind.setdefault(kind, []).append(value)
        return sum(sum(v) / len(v) for v in of_kind.values()) / len(of_kind)

    def trial(self, config: DustinConfig, unit: int, signal: Signal = "settings") -> Trial:
        """Measure one setting."""
        settings = self.settings(config, unit)
        window_kl = self.window_kl(self.quality(settings, signal))
        return Trial(
            config=config,
            unit=unit,
            loss=self.loss(window_kl),
            scoring=policies.scoring_bytes(settings, self.target, self.draft),
            window_kl=tuple(window_kl.tolist()),
        )

    # ---- layers -------------------------------------------------------------------------

    def greedy_layers(self, side: str, base: DustinConfig, most: int) -> tuple[int, ...]:
        """Scoring layers in the order in which they help, all heads of each.

        The target's are judged with history alone, the draft's with both signals.

        Args:
            side: "target" or "draft".
            base: the other settings; for the draft with the target's layers in it.
            most: layers to choose at most.
        """
        field = f"{side}_heads"
        shape, heads = (
            (self.target, self.target_heads) if side == "target" else (self.draft, self.draft_heads)
        )
        signal: Signal = "history" if side == "target" else "settings"
        chosen: list[int] = []
        best = float("inf")
        unit = self.units[0]

        def config(layers: list[int]) -> DustinConfig:
            wanted = tuple(ScoringLayer(layer=layer) for layer in sorted(layers))
            return base.model_copy(update={field: wanted})

        for step in range(min(most, shape.layers)):
            what = f"{side} layer {step + 1}"
            if step and self.stop(what):
                break
            rest = [layer for layer in range(shape.layers) if layer not in chosen]
            recovered = {}
            for layer in rest:
                settings = self.settings(config([*chosen, layer]), unit)
                # What the layer itself sees; the draft's is compared without history.
                alone: Signal = "history" if side == "target" else "lookahead"
                selections = policies.select(self.scores, settings, alone)
                recovered[layer] = float(policies.recovery(self.scores, selections, unit).mean())
            listed = _short_list(rest, recovered, heads)
            losses = {}
            for done, layer in enumerate(listed):
                self.advance(what, done, len(listed))
                losses[layer] = self.trial(config([*chosen, layer]), unit, signal).loss
            self.advance(what, len(listed), len(listed))
            winner = min(listed, key=lambda layer: (losses[layer], layer))
            if losses[winner] > best * WORTHWHILE:
                break
            chosen.append(winner)
            best = losses[winner]
        return tuple(chosen)

    # ---- everything else ----------------------------------------------------------------

    def wide_layers(self, base: DustinConfig, unit: int, most: int) -> tuple[int, ...]:
        """Target layers that are worth a budget of their own, the most telling first: with them KL
        is lower than with one budget for all layers and as many tokens read.

        Args:
            base: the other settings.
            most: layers to choose at most.
        """

        def config(layers: Sequence[int]) -> DustinConfig:
            return base.model_copy(update={"wide_layers": tuple(sorted(layers))})

        num_layers = self.target.layers
        chosen: list[int] = []
        listed = list(range(num_layers))
        for step in range(min(most, num_layers - 1)):
            what = f"wide layer {step + 1}"
            if self.stop(what):
                break
            losses = {}
            for done, layer in enumerate(listed):
                self.advance(what, done, len(listed))
                losses[layer] = self.trial(config([*chosen, layer]), unit).loss
            self.advance(what, len(listed), len(listed))
            ranked = sorted(listed, key=lambda layer: (losses[layer], layer))
            rival = policies.of_equal_reads(config([*chosen, ranked[0]]), num_layers)
            if losses[ranked[0]] >= self.trial(rival, unit).loss:
                break
            chosen.append(ranked[0])
            listed = ranked[1 : BY_BUDGET + 1]
        return tuple(chosen)

    def fresh_layers(self, base: Trial, most: int) -> Trial:
        """The trial with the ``fresh_layers`` that lower KL by enough each, at most so many, the
        best first; the one given if none does. What scores before scores on, and all heads of
        these layers with it."""
        best = base
        for step in range(most):
            what = f"fresh layer {step + 1}"
            if self.stop(what):
                break
            chosen = best.config.fresh_layers
            listed = [layer for layer in range(self.target.layers) if layer not in chosen]
            trials = []
            for done, layer in enumerate(listed):
                self.advance(what, done, len(listed))
                if done and self.stop(what):
                    break
                update = {"fresh_layers": tuple(sorted((*chosen, layer)))}
                trials.append(self.trial(best.config.model_copy(update=update), base.unit))
            self.advance(what, len(listed), len(listed))
            winner = min(trials, key=lambda trial: trial.loss)
            if winner.loss > best.loss * WORTHWHILE:
                break
            best = winner
        return best

    def run(
        self,
        base: DustinConfig,
        trials: int,
        seed: int,
        most_layers: int,
        most_wide: int = 0,
        most_fresh: int = 0,
    ) -> Found:
        """The whole search.

        Args:
            base: budget and what is not searched.
            trials: Optuna trials, the default settings included.
            seed: of Optuna's sampler.
            most_layers: scoring layers of the target at most, and of the draft.
            most_wide: wide layers at most.
            most_fresh: fresh layers at most; not beside wide layers.
        """
        target_layers = self.greedy_layers("target", base, most_layers)
        with_target = base.model_copy(update={"target_heads": _layers(target_layers)})
        draft_layers = self.greedy_layers("draft", with_target, most_layers)
        default = self.trial(base, self.units[0])
        measured = [default, *self._optimise(base, target_layers, draft_layers, trials, seed)]
        chosen = choose(measured)
        wide = self.wide_layers(chosen.config, chosen.unit, most_wide)
        if wide:
            update = {"wide_layers": tuple(sorted(wide))}
            chosen = self.trial(chosen.config.model_copy(update=update), chosen.unit)
        elif most_fresh:
            chosen = self.fresh_layers(chosen, most_fresh)
        return Found(
            target_layers=target_layers,
            draft_layers=draft_layers,
            trials=tuple(measured),
            chosen=chosen,
            default=default,
        )

    def _optimise(
        self,
        base: DustinConfig,
        target_layers: tuple[int, ...],
        draft_layers: tuple[int, ...],
        trials: int,
        seed: int,
    ) -> list[Trial]:
        try:
            import optuna
        except ImportError:
            raise ConfigError(
                "dustin calibrate needs optuna: pip install 'dustin-vllm[calibrate]'"
            ) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        measured: list[Trial] = []

        def objective(trial: Any) -> tuple[float, float]:
            config, unit = self._suggest(trial, base, target_layers, draft_layers)
            measured.append(self.trial(config, unit))
            return measured[-1].loss, float(measured[-1].scoring)

        study = optuna.create_study(directions=["minimize", "minimize"])
        study.enqueue_trial(_first_guess(len(target_layers), len(draft_layers)))
        for number in range(trials):
            if number and self.stop("selection parameters"):
                break
            self.advance("selection parameters", number, trials)
            # A seed per trial: what trial n asks depends on the trials before it alone, and an
            # interrupted run, whose measurements are in the journal, goes the same way again.
            study.sampler = optuna.samplers.TPESampler(seed=seed + number, n_startup_trials=10)
            study.optimize(objective, n_trials=1)
        self.advance("selection parameters", trials, trials)
        return measured

    def _suggest(
        self,
        trial: Any,
        base: DustinConfig,
        target_layers: tuple[int, ...],
        draft_layers: tuple[int, ...],
    ) -> tuple[DustinConfig, int]:
        unit = self.units[0]
        if len(self.units) > 1:
            unit = trial.suggest_categorical("unit", self.units)
        found = trial.suggest_categorical("target_layers_from", ["search", "default"]) == "search"
        if found:
            count = trial.suggest_int("target_layers", 1, len(target_layers))
            layers = target_layers[:count]
        else:
            layers = tuple(default_layers(self.target.layers))
        few = trial.suggest_categorical("target_heads", ["all", "few"]) == "few"
        draft_count = trial.suggest_int("draft_layers", 1, len(draft_layers))
        draft_few = trial.suggest_categorical("draft_heads", ["all", "few"]) == "few"
        update: dict[str, Any] = {
            "target_heads": _layers(layers, self.target_heads if few else None),
            "draft_heads": _layers(
                draft_layers[:draft_count], self.draft_heads if draft_few else None
            ),
            # Not "split": it was no better than one selection on two pairs, see docs/results.
            "merge": trial.suggest_categorical("merge", ["fill", "weighted"]),
            "dilate_history": trial.suggest_categorical("dilate_history", [True, False]),
            "aggregate": trial.suggest_categorical("aggregate", ["mean", "max"]),
        }
        if update["merge"] == "fill":
            share = trial.suggest_float("lookahead_share", 0.0, 1.0)
            update["lookahead"] = round(share * self.budget)
        else:
            update["lookahead_weight"] = round(trial.suggest_float("lookahead_weight", 0, 1), 3)
        # Half the budget at least is left to choose.
        for name, choices in (("sinks", SINKS), ("recent", RECENT)):
            fitting = [value for value in choices if value <= self.budget // 4]
            if fitting:
                update[name] = trial.suggest_categorical(name, fitting)
        return base.model_copy(update=update), unit


def _layers(layers: Sequence[int], heads: HeadScores | None = None) -> tuple[ScoringLayer, ...]:
    """Scoring layers, ascending, with all their heads or the best few retrieval heads."""
    return tuple(
        ScoringLayer(layer=layer, heads=None if heads is None else heads.best(layer, FEW_HEADS))
        for layer in sorted(layers)
    )


def _short_list(rest: list[int], recovered: dict[int, float], heads: HeadScores) -> list[int]:
    """The layers worth a forward pass: best by recovery, and best by retrieval score."""
    by_recovery = sorted(rest, key=lambda layer: (-recovered[layer], layer))[:BY_RECOVERY]
    top = heads.scores.topk(min(FEW_HEADS, heads.scores.shape[1]), dim=1).values.sum(1).tolist()
    by_heads = sorted(rest, key=lambda layer: (-top[layer], layer))[:BY_HEADS]
    return sorted({*by_recovery, *by_heads})


def _first_guess(target_layers: int, draft_layers: int) -> dict[str, Any]:
    """The default merge on the layers that were found."""
    return {
        "target_layers_from": "search",
        "target_layers": target_layers,
        "target_heads": "all",
        "draft_layers": draft_layers,
        "draft_heads": "all",
        "merge": "fill",
        "lookahead_share": 0.5,
        "dilate_history": True,
        "aggregate": "mean",
        "sinks": 4,
        "recent": 64,
    }


def choose(trials: Sequence[Trial]) -> Trial:
    """The trial that reads least for scoring among those as good as the best.

    As good: its loss exceeds the best one's by no more than a tenth, nor by more than the
    standard error of their paired difference over windows. The tenth is needed because a
    setting that fails in one window has a large standard error as well.
    """
    best = min(trials, key=lambda trial: (trial.loss, trial.scoring))
    reference_kl = torch.tensor(best.window_kl)

    def as_good(trial: Trial) -> bool:
        difference = torch.tensor(trial.window_kl) - reference_kl
        error = 0.0
        if len(difference) > 1:
            error = float(difference.std() / len(difference) ** 0.5)
        return trial.loss - best.loss <= min(error, best.loss / 10)

    candidates = [trial for trial in trials if as_good(trial)]
    return min(candidates, key=lambda trial: (trial.scoring, trial.loss))
