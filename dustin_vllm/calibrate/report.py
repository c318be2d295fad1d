# SPDX-License-Identifier: Apache-2.0
"""What a calibration says: tables with intervals, two figures, the profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dustin_vllm.bench.common import pyplot
from dustin_vllm.calibrate import policies
from dustin_vllm.calibrate.heads import HeadScores
from dustin_vllm.calibrate.models import Model
from dustin_vllm.calibrate.policies import Signal
from dustin_vllm.calibrate.quality import Evaluator
from dustin_vllm.calibrate.search import Found, Trial
from dustin_vllm.calibrate.traces import Scores
from dustin_vllm.config import DustinConfig, Settings, first_deep_layer

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


Resolve = Callable[[DustinConfig, int], Settings]
"""Settings of the pair for a unit, see ``policies.settings_for``."""


def recovery_rows(
    resolve: Resolve, scores: Scores, config: DustinConfig, units: Sequence[int], seed: int
) -> Iterator[list[dict[str, Any]]]:
    """Recovery of the policies over the windows of ``scores``, budget by budget, unit by unit.

    Every entry has ``unit``, ``budget``, ``policy`` and the interval. The hybrid's also has
    ``gain``, the interval of its paired difference to the better of the two single signals, and
    ``gap``, that of the oracle's to it.
    """
    for unit in units:
        for budget in BUDGETS:
            settings = resolve(policies.at_budget(config, budget), unit)
            windows: dict[Signal, torch.Tensor] = {}
            for signal in POLICIES:
                selections, second = policies.select_groups(scores, settings, signal)
                recovered = _recovery(scores, settings, signal, selections, second)
                windows[signal] = policies.by_window(scores, recovered)
            singles: tuple[Signal, ...] = ("history", "lookahead")
            better = max(singles, key=lambda signal: float(windows[signal].mean()))
            entries: list[dict[str, Any]] = []
            for signal in POLICIES:
                entry = {"unit": unit, "budget": budget, "policy": NAMES[signal]}
                entry |= interval(windows[signal], seed)
                if signal == "settings":
                    entry["gain"] = {
                        "over": NAMES[better],
                        **interval(windows["settings"] - windows[better], seed),
                    }
                    entry["gap"] = interval(windows["oracle"] - windows["settings"], seed)
                entries.append(entry)
            yield entries


@dataclass(frozen=True)
class Variant:
    """A row of the quality table.

    ``over``: name of an earlier row that it is compared with, window by window. ``exchanged``:
    the halves of split settings are.
    """

    name: str
    config: DustinConfig
    signal: Signal = "settings"
    over: str | None = None
    exchanged: bool = False


def variants(chosen: DustinConfig, default: DustinConfig, num_layers: int) -> list[Variant]:
    """What is compared, the most telling first: a time limit may cut the end off."""
    base, usual = "hybrid", "default settings"
    rows = [
        Variant(base, chosen),
        Variant(usual, default, over=base),
    ]
    if chosen.wide_layers:
        equal = policies.of_equal_reads(chosen, num_layers)
        rows.append(Variant(f"one budget of {equal.budget} for all layers", equal, over=base))
        chosen = chosen.model_copy(update={"wide_layers": (), "wide_budget": None})
        rows.append(Variant("without wide layers", chosen, over=base))
        base = "without wide layers"  # what follows is about signals, of one selection
    if chosen.fresh_layers:
        chosen = chosen.model_copy(update={"fresh_layers": ()})
        rows.append(Variant("without fresh layers", chosen, over=base))
        base = "without fresh layers"
    rows.append(Variant("oracle", chosen, "oracle", base))
    for name, config, over in (("", chosen, base), (f"{usual}, ", default, usual)):
        split = config.model_copy(update={"merge": "split"})
        if config.merge == "split":
            shared = config.model_copy(update={"merge": "fill"})
            rows.append(Variant(f"{name}one selection for all layers", shared, over=over))
        else:
            rows.append(Variant(f"{name}split", split, over=over))
        rows.append(Variant(f"{name}split, halves exchanged", split, over=over, exchanged=True))
    rows.append(Variant("oracle of each half", chosen, "first half's oracle", "oracle"))
    rows.append(Variant("history only", chosen, "history", base))
    rows.append(Variant("lookahead only", chosen, "lookahead", base))
    for name, config, over in (("", chosen, base), (f"{usual}, ", default, usual)):
        if config.merge != "split":
            rows.append(Variant(f"{name}confirmed draft rows", config, "confirmed rows", over))
            rows.append(Variant(f"{name}agreeing draft rows", config, "agreeing rows", over))
    other = chosen.model_copy(update={"dilate_history": not chosen.dilate_history})
    dilated = "with dilation" if other.dilate_history else "without dilation"
    rows.append(Variant(f"hybrid {dilated}", other, over=base))
    rows.append(Variant(f"history only {dilated}", other, "history", base))
    rows.append(Variant("sinks and recent only", chosen, "protected", base))
    return rows


def quality_rows(
    resolve: Resolve,
    scores: Scores,
    evaluator: Evaluator,
    chosen: tuple[DustinConfig, int],
    default: DustinConfig,
    seed: int,
) -> Iterator[dict[str, Any]]:
    """KL to dense of the chosen settings, of their variants and of the defaults.

    Every entry has ``name``, the interval of the KL over windows, that of the ``recovery``, and
    per kind of text its mean, the share of steps beyond ``FAILED_KL`` and the share of tokens
    that stay the same. Entries compared with another one have ``over``, its name, and the
    interval of their paired ``difference`` to it, in KL.

    Args:
        chosen: settings and the unit that all of them are compared at.
    """
    config, unit = chosen
    num_layers = evaluator.target.shape.layers
    kinds = policies.kinds(scores)
    item_kinds = [scores.traces[item.trace].window.kind for item in scores.items]
    known: dict[str, torch.Tensor] = {}
    for row in variants(config, default, num_layers):
        settings = resolve(row.config, unit)
        if row.exchanged:
            settings = policies.mirrored(settings)
        selections, second = policies.select_groups(scores, settings, row.signal)
        layers = settings.second_layers
        if row.signal == "first half's oracle":
            layers = frozenset(range(first_deep_layer(num_layers), num_layers))
        fresh = policies.within_step(settings, row.signal)
        quality = evaluator.measure(selections, unit, second, layers, fresh)
        windows = known[row.name] = policies.by_window(scores, quality.kl)
        recovered = _recovery(scores, settings, row.signal, selections, second)
        entry: dict[str, Any] = {"name": row.name, **interval(windows, seed)}
        entry["recovery"] = interval(policies.by_window(scores, recovered), seed)
        if row.over is not None:
            entry["over"] = row.over
            entry["difference"] = interval(windows - known[row.over], seed)
        for kind in dict.fromkeys(kinds):
            which = torch.tensor([k == kind for k in item_kinds])
            entry[kind] = {
                "kl": float(quality.kl[which].mean()),
                "failed": float((quality.kl[which] > FAILED_KL).float().mean()),
                "agreement": float(quality.agreement[which].mean()),
            }
        yield entry


def _recovery(
    scores: Scores,
    settings: Settings,
    signal: Signal,
    selections: policies.Selections,
    second: policies.Selections | None,
) -> torch.Tensor:
    """``policies.recovery``; with wide layers that of the other layers' selection."""
    wide = signal == "settings" and bool(settings.config.wide_layers)
    return policies.recovery(scores, selections, settings.unit, None if wide else second)


def agreement_data(scores: Scores) -> dict[str, Any]:
    """How many of the draft's rows predict the text, as ``agreeing_rows``: steps by count."""
    counts = torch.bincount(
        torch.tensor([scores.agreeing(i) for i in range(len(scores.items))]),
        minlength=scores.gamma + 1,
    )
    return {"steps": len(scores.items), "agreeing_rows": counts.tolist()}


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
    if config.wide_layers:
        fields.append("wide_layers")
    if config.fresh_layers:
        fields.append("fresh_layers")
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
    units = sorted({entry["unit"] for entry in table})
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


def draw_differences(path: Path, table: Sequence[dict[str, Any]], title: str) -> None:
    """Paired differences in KL with 95 % intervals, on an axis linear up to 0.01 nats."""
    pyplot_ = pyplot()
    rows = [entry for entry in table if "difference" in entry]
    figure, axis = pyplot_.subplots(figsize=(7.5, 0.9 + 0.32 * len(rows)))
    for place, entry in enumerate(rows):
        found = entry["difference"]
        better, worse = found["high"] < 0, found["low"] > 0
        colour = "tab:green" if better else "tab:red" if worse else "tab:gray"
        axis.plot([found["low"], found["high"]], [place, place], color=colour, lw=2)
        axis.plot(found["mean"], place, "o", color=colour, ms=4)
    axis.axvline(0, color="black", lw=0.8)
    axis.set_xscale("symlog", linthresh=0.01)
    labels = [f"{entry['name']} \N{MINUS SIGN} {entry['over']}" for entry in rows]
    axis.set_yticks(range(len(rows)), labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("difference in KL to dense, nats (left: better)")
    axis.grid(axis="x", alpha=0.3)
    figure.suptitle(title, fontsize=10)
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
