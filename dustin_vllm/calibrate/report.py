# SPDX-License-Identifier: Apache-2.0
"""What a calibration says: tables with intervals, two figures, the profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dustin_vllm.bench.common import pyplot
from dustin_vllm.calibrate import policies
from dustin_vllm.calibrate.heads import HeadScores
from dustin_vllm.calibrate.models import Model
from dustin_vllm.calibrate.policies import Signal
from dustin_vllm.calibrate.quality import Evaluator
from dustin_vllm.calibrate.search import Found, Search, Trial
from dustin_vllm.calibrate.traces import Scores
from dustin_vllm.config import DustinConfig

RESAMPLES = 2000
BUDGETS = (128, 256, 512, 1024, 2048)
POLICIES: tuple[Signal, ...] = ("oracle", "settings", "history", "lookahead", "protected")
NAMES = {
    "oracle": "oracle",
    "settings": "hybrid",
    "history": "history only",
    "lookahead": "lookahead only",
    "protected": "sinks and recent only",
}
FAILED_KL = 0.1  # nats; a step beyond it is counted as one that lost something


def interval(values: torch.Tensor, seed: int) -> dict[str, float]:
    """Mean over windows with a 95 % bootstrap interval (percentiles of resampled windows).

    Args:
        values: [windows].
    """
    generator = torch.Generator().manual_seed(seed)
    count = len(values)
    drawn = torch.randint(count, (RESAMPLES, count), generator=generator)
    means = values.double()[drawn].mean(1)
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return {"mean": float(values.double().mean()), "low": low, "high": high}


def recovery_table(
    search: Search, scores: Scores, config: DustinConfig, units: Sequence[int], seed: int
) -> list[dict[str, Any]]:
    """Recovery of the policies by unit and budget, over the windows of ``scores``.

    Every entry has ``unit``, ``budget``, ``policy`` and the interval; the hybrid's also
    ``gain``, the interval of its paired difference to the better of the two single signals.
    Budgets that cannot hold what is protected are left out.
    """
    entries: list[dict[str, Any]] = []
    for unit in units:
        for budget in BUDGETS:
            settings = search.settings(at_budget(config, budget), unit)
            windows: dict[Signal, torch.Tensor] = {}
            for signal in POLICIES:
                selections = policies.select(scores, settings, signal)
                recovered = policies.recovery(scores, selections, unit)
                windows[signal] = policies.by_window(scores, recovered)
            singles: tuple[Signal, ...] = ("history", "lookahead")
            better = max(singles, key=lambda signal: float(windows[signal].mean()))
            for signal in POLICIES:
                entry = {"unit": unit, "budget": budget, "policy": NAMES[signal]}
                entry |= interval(windows[signal], seed)
                if signal == "settings":
                    entry["gain"] = {
                        "over": NAMES[better],
                        **interval(windows["settings"] - windows[better], seed),
                    }
                entries.append(entry)
    return entries


def at_budget(config: DustinConfig, budget: int) -> DustinConfig:
    """The settings at another budget: the same share of lookahead, recent window within half."""
    update: dict[str, Any] = {"budget": budget, "recent": min(config.recent, budget // 2)}
    update["sinks"] = min(config.sinks, budget // 4)
    if config.lookahead is not None:
        update["lookahead"] = round(config.lookahead * budget / config.budget)
    return config.model_copy(update=update)


def quality_table(
    search: Search, scores: Scores, evaluator: Evaluator, found: Found, seed: int
) -> list[dict[str, Any]]:
    """KL to dense of the chosen settings, of their variants and of the defaults.

    Every entry has ``name``, the interval of the KL over windows, and per kind of text its
    mean, the share of steps beyond ``FAILED_KL`` and the share of tokens that stay the same.
    Entries with a baseline also have the interval of their paired ``difference`` to it.
    """
    chosen, unit = found.chosen.config, found.chosen.unit
    other = chosen.model_copy(update={"dilate_history": not chosen.dilate_history})
    dilated = "with dilation" if other.dilate_history else "without dilation"
    default = found.default.config
    rows: list[tuple[str, DustinConfig, Signal]] = [
        ("hybrid", chosen, "settings"),
        (f"hybrid {dilated}", other, "settings"),
        ("history only", chosen, "history"),
        (f"history only {dilated}", other, "history"),
        ("lookahead only", chosen, "lookahead"),
        ("default settings", default, "settings"),
        ("oracle", chosen, "oracle"),
        ("sinks and recent only", chosen, "protected"),
    ]
    kinds = policies.kinds(scores)
    item_kinds = [scores.traces[item.trace].window.kind for item in scores.items]
    entries: list[dict[str, Any]] = []
    base: torch.Tensor | None = None
    for name, config, signal in rows:
        settings = search.settings(config, unit)
        selections = policies.select(scores, settings, signal)
        quality = evaluator.measure(selections, unit)
        windows = policies.by_window(scores, quality.kl)
        recovered = policies.by_window(scores, policies.recovery(scores, selections, unit))
        entry: dict[str, Any] = {"name": name, **interval(windows, seed)}
        entry["recovery"] = interval(recovered, seed)
        if base is None:
            base = windows
        else:
            entry["difference"] = interval(windows - base, seed)
        for kind in dict.fromkeys(kinds):
            which = torch.tensor([k == kind for k in item_kinds])
            entry[kind] = {
                "kl": float(quality.kl[which].mean()),
                "failed": float((quality.kl[which] > FAILED_KL).float().mean()),
                "agreement": float(quality.agreement[which].mean()),
            }
        entries.append(entry)
    return entries


def profile_data(target: Model, draft: Model, found: Found, units_open: bool, source: str) -> Any:
    """The profile (see ``dustin_vllm.config.Profile``) of the chosen settings.

    Args:
        units_open: the search chose between blocks and tokens, so the profile says which.
    """
    config = found.chosen.config
    fields = [
        *("budget", "merge", "sinks", "recent", "aggregate", "dilate_history"),
        *("target_heads", "draft_heads"),
        "lookahead" if config.merge == "fill" else "lookahead_weight",
    ]
    dump = config.model_dump(mode="json")
    settings = {name: dump[name] for name in fields}
    if units_open:
        settings["granularity"] = "token" if found.chosen.unit == 1 else "block"
    return {
        "format": 1,
        "target": target.name,
        "draft": draft.name,
        "calibrated": True,
        "source": source,
        "match": {"target": asdict(target.shape), "draft": asdict(draft.shape)},
        "settings": settings,
    }


def trial_data(trial: Trial) -> dict[str, Any]:
    """A trial for the report."""
    return {
        "settings": trial.config.model_dump(mode="json", exclude_defaults=True),
        "unit": trial.unit,
        "loss": trial.loss,
        "scoring_bytes_per_token": trial.scoring,
    }


def heads_data(scores: HeadScores) -> dict[str, Any]:
    """Head scores for the report; ``scores`` is [layers][heads]."""
    return {
        "trials": scores.trials,
        "answered_right": scores.right,
        "counted": scores.used,
        "scores": [[round(value, 5) for value in row] for row in scores.scores.tolist()],
    }


def draw_recovery(path: Path, table: Sequence[dict[str, Any]], title: str) -> None:
    """Recovery against budget, one panel a unit, with 95 % intervals."""
    pyplot_ = pyplot()
    units = list(dict.fromkeys(entry["unit"] for entry in table))
    figure, axes = pyplot_.subplots(
        1, len(units), figsize=(4.2 * len(units), 3.8), sharey=True, squeeze=False
    )
    for axis, unit in zip(axes[0], units, strict=True):
        for signal in POLICIES:
            name = NAMES[signal]
            rows = [e for e in table if e["unit"] == unit and e["policy"] == name]
            budgets = [e["budget"] for e in rows]
            axis.plot(budgets, [100 * e["mean"] for e in rows], marker="o", ms=3, label=name)
            low, high = ([100 * e[side] for e in rows] for side in ("low", "high"))
            axis.fill_between(budgets, low, high, alpha=0.12)
        axis.set_xscale("log", base=2)
        axis.set_xticks(budgets, [str(budget) for budget in budgets])
        axis.set_xlabel("budget, tokens")
        axis.set_title("single tokens" if unit == 1 else f"blocks of {unit}")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("attention recovery, %")
    axes[0][0].legend(fontsize=8, loc="lower right")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot_.close(figure)


def draw_heads(path: Path, by_model: dict[str, HeadScores]) -> None:
    """Heat maps of retrieval scores, one panel a model."""
    pyplot_ = pyplot()
    figure, axes = pyplot_.subplots(1, len(by_model), figsize=(5 * len(by_model), 5), squeeze=False)
    for axis, (name, scores) in zip(axes[0], by_model.items(), strict=True):
        image = axis.imshow(scores.scores.numpy(), aspect="auto", origin="lower", cmap="viridis")
        figure.colorbar(image, ax=axis, label="attention on the answer, summed over its tokens")
        axis.set_title(f"{name} ({scores.used} of {scores.trials} trials)", fontsize=10)
        axis.set_xlabel("head")
        axis.set_ylabel("layer")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.yaxis.get_major_locator().set_params(integer=True)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot_.close(figure)
