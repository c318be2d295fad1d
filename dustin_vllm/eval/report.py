# SPDX-License-Identifier: Apache-2.0
"""What an evaluation says: intervals, tables, figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dustin_vllm.bench.common import pyplot
from dustin_vllm.calibrate.report import RESAMPLES, interval
from dustin_vllm.eval.engine import DENSE, Configuration
from dustin_vllm.eval.tasks import FORCED

if TYPE_CHECKING:
    from rich.table import Table

SEED = 0
AVERAGE = "average"  # of the tasks whose right answer is known


def intervals(statistics: torch.Tensor) -> dict[str, float]:
    """95 % interval of a statistic from its values under resampling [RESAMPLES]."""
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = torch.quantile(statistics.double(), ends).tolist()
    return {"low": low, "high": high}


def resamples(count: int, seed: int = SEED) -> torch.Tensor:
    """[RESAMPLES, count] int64: samples drawn with replacement."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(count, (RESAMPLES, count), generator=generator)


def mean_interval(values: Sequence[float]) -> dict[str, float]:
    """Mean over samples with its bootstrap interval."""
    return interval(torch.tensor(values, dtype=torch.float64), SEED)


def summarise(data: dict[str, Any]) -> None:
    """Fill ``table``, ``averages`` and ``drift`` from the configurations measured so far.

    An entry of ``table`` is one configuration, task and context. Free tasks: ``mean`` score with
    its interval and ``loss``, the interval of the paired difference to dense. Forced ones:
    ``perplexity``, ``increase`` of it over dense (a share) and ``kl`` with intervals, ``same``.
    ``averages``: scores of the tasks whose answer is known, each task counting the same, and
    ``loss``, the share of the dense average that is lost. ``drift``: KL and perplexity increase
    by position, and the paired ``rise`` of the KL from the first bin to the last half.
    """
    about = {sample["name"]: sample for sample in data["samples"]}
    dense: dict[int, dict[str, Any]] = {
        entry["engine"]: entry
        for entry in data["configurations"]
        if entry["configuration"]["policy"] == DENSE
    }
    data["table"], data["averages"], data["drift"] = [], [], []
    for entry in data["configurations"]:
        base = dense[entry["engine"]]
        where = entry["configuration"]
        if entry is base and entry["engine"] != min(dense):
            continue  # shown once; each engine's own is what its configurations are compared with
        for task, context, names in _groups(about, entry["scores"]):
            scores = [entry["scores"][name] for name in names]
            lost = [base["scores"][name] - entry["scores"][name] for name in names]
            data["table"].append(
                {
                    **where,
                    "task": task,
                    "context": context,
                    "samples": len(names),
                    **mean_interval(scores),
                    "loss": mean_interval(lost),
                }
            )
        for task, context, names in _groups(about, entry["forced"]):
            data["table"].append(
                {
                    **where,
                    "task": task,
                    "context": context,
                    "samples": len(names),
                    **_forced(entry["forced"], base["forced"], names),
                }
            )
            if task == "drift":
                data["drift"].append({**where, **_drift(entry["forced"], base["forced"], names)})
        if where["policy"] == "oracle":
            continue  # it knows forced texts only
        average = _average(about, entry["scores"], base["scores"])
        if average is not None:
            data["averages"].append({**where, **average})


def _groups(
    about: Mapping[str, dict[str, Any]], names: Iterable[str]
) -> Iterable[tuple[str, int, list[str]]]:
    """(task, context, samples) of what was measured."""
    groups: dict[tuple[str, int], list[str]] = {}
    for name in names:
        groups.setdefault((about[name]["task"], about[name]["context"]), []).append(name)
    return [(task, context, found) for (task, context), found in groups.items()]


def _weighted(bins: Sequence[Mapping[str, float]], name: str) -> float:
    total = sum(entry["count"] for entry in bins)
    return sum(entry["count"] * entry[name] for entry in bins) / total


def _forced(forced: Any, dense: Any, names: Sequence[str]) -> dict[str, Any]:
    nll = torch.tensor([_weighted(forced[name], "nll") for name in names], dtype=torch.float64)
    base = torch.tensor([_weighted(dense[name], "nll") for name in names], dtype=torch.float64)
    more = nll - base  # continuations are equally long
    drawn = resamples(len(names))
    return {
        "perplexity": math.exp(nll.mean()),
        "increase": {
            "mean": math.expm1(more.mean()),
            **intervals(more[drawn].mean(1).expm1()),
        },
        "kl": mean_interval([_weighted(forced[name], "kl") for name in names]),
        "same": mean_interval([_weighted(forced[name], "same") for name in names]),
        "sparse": sum(_weighted(forced[name], "sparse") for name in names) / len(names),
    }


def _drift(forced: Any, dense: Any, names: Sequence[str]) -> dict[str, Any]:
    positions = [entry["first"] for entry in forced[names[0]]]
    curve = []
    for index, first in enumerate(positions):
        more = [forced[name][index]["nll"] - dense[name][index]["nll"] for name in names]
        curve.append(
            {
                "first": first,
                "kl": mean_interval([forced[name][index]["kl"] for name in names]),
                "nll_more": mean_interval(more),
            }
        )
    half = len(positions) // 2
    rise = [_weighted(forced[name][half:], "kl") - forced[name][0]["kl"] for name in names if half]
    return {"curve": curve, "rise": mean_interval(rise) if rise else None}


def _average(
    about: Mapping[str, dict[str, Any]], scores: Mapping[str, float], dense: Mapping[str, float]
) -> dict[str, Any] | None:
    """Mean over tasks and contexts with a known answer; samples are drawn within each."""
    groups = [
        names
        for _, _, names in _groups(about, scores)
        if all(about[name]["known_answer"] for name in names)
    ]
    if not groups:
        return None
    ours: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    for place, names in enumerate(groups):
        drawn = resamples(len(names), SEED + place)
        # The last row is the samples as they are.
        drawn = torch.cat([drawn, torch.arange(len(names))[None]])
        for values, means in ((scores, ours), (dense, theirs)):
            tensor = torch.tensor([values[name] for name in names], dtype=torch.float64)
            means.append(tensor[drawn].mean(1))
    policy, base = torch.stack(ours).mean(0), torch.stack(theirs).mean(0)
    lost = 1 - policy / base.clamp(min=1e-9)
    return {
        "tasks": len(groups),
        "mean": float(policy[-1]),
        **intervals(policy[:-1]),
        "loss": {"mean": float(lost[-1]), **intervals(lost[:-1])},
    }


# ---- tables -------------------------------------------------------------------------------


def _cell(entry: Mapping[str, float], scale: float = 1, form: str = ".3f") -> str:
    low, high = (format(scale * entry[side], form) for side in ("low", "high"))
    return f"{scale * entry['mean']:{form}} [{low}, {high}]"


def _title(where: Mapping[str, Any]) -> str:
    keys = ("policy", "budget", "granularity")
    return Configuration(**{key: where[key] for key in keys}).name


def tables(data: Mapping[str, Any]) -> list[Table]:
    """Scores of free tasks, and forced ones, a row for each configuration."""
    from rich.table import Table

    made = []
    free = [entry for entry in data["table"] if entry["task"] not in FORCED]
    columns = list(dict.fromkeys((entry["task"], entry["context"]) for entry in free))
    if columns:
        table = Table(title="score, 95 % interval, loss against dense")
        table.add_column("")
        for task, context in columns:
            table.add_column(f"{task}\n{context}")
        table.add_column("average\nloss, %")
        for title in dict.fromkeys(map(_title, free)):
            cells = {
                (e["task"], e["context"]): f"{_cell(e, 100, '.1f')}\n{100 * e['loss']['mean']:+.1f}"
                for e in free
                if _title(e) == title
            }
            average = [e for e in data["averages"] if _title(e) == title]
            lost = _cell(average[0]["loss"], 100, ".1f") if average else "-"
            table.add_row(title, *(cells.get(column, "-") for column in columns), lost)
        made.append(table)
    forced = [entry for entry in data["table"] if entry["task"] in FORCED]
    if forced:
        table = Table(title="known continuations, 95 % intervals")
        for name in ("", "task", "context", "perplexity", "increase, %", "KL to dense", "same, %"):
            table.add_column(name)
        for entry in forced:
            table.add_row(
                _title(entry),
                entry["task"],
                str(entry["context"]),
                f"{entry['perplexity']:.3f}",
                _cell(entry["increase"], 100, ".2f"),
                _cell(entry["kl"], 1, ".4f"),
                _cell(entry["same"], 100, ".1f"),
            )
        made.append(table)
    return made


# ---- figures ------------------------------------------------------------------------------


def draw(data: Mapping[str, Any], path: Path) -> None:
    """Quality against budget, one panel a measure, and the drift curve, where they were measured.

    Raises:
        BenchError: matplotlib is not installed.
    """
    plt = pyplot()
    panels = _panels(data)
    curves = [entry for entry in data["drift"] if entry["policy"] != DENSE]
    count = len(panels) + bool(curves)
    if not count:
        return
    columns = min(3, count)
    rows = -(-count // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4.6 * columns, 3.6 * rows), squeeze=False, layout="constrained"
    )
    flat = axes.flatten().tolist()
    # One colour a policy in all panels, and a little aside, so that intervals stay apart.
    kinds = [(e["policy"], e["granularity"]) for _, entries, _ in panels for e, _ in entries]
    names = list(dict.fromkeys(kinds))
    shown: dict[str, Any] = {}
    for axis, (title, entries, base) in zip(flat, panels, strict=False):
        budgets = sorted({entry["budget"] for entry, _ in entries})
        for place, name in enumerate(names):
            points = [
                (e["budget"] * 1.03 ** (place - len(names) / 2), value)
                for e, value in entries
                if (e["policy"], e["granularity"]) == name
            ]
            if not points:
                continue
            points.sort(key=lambda point: point[0])
            lengths = [
                [max(0.0, v["mean"] - v["low"]) for _, v in points],
                [max(0.0, v["high"] - v["mean"]) for _, v in points],
            ]
            label = name[0] if name[1] == "block" else f"{name[0]}, {name[1]}"
            shown[label] = axis.errorbar(
                [x for x, _ in points],
                [v["mean"] for _, v in points],
                lengths,
                color=f"C{place}",
                marker="o",
                ms=3,
                lw=1,
                capsize=2,
            )
        if base is not None:
            shown[DENSE] = axis.axhline(base, color="black", lw=0.8, ls="--")
        axis.set_xscale("log", base=2)
        axis.set_xticks(budgets, [str(budget) for budget in budgets])
        axis.set_xlim(budgets[0] / 1.4, budgets[-1] * 1.4)
        axis.minorticks_off()
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("budget, tokens")
        axis.grid(alpha=0.3)
    if curves:
        axis = flat[len(panels)]
        for entry in curves:
            firsts = [point["first"] for point in entry["curve"]]
            values = [point["kl"] for point in entry["curve"]]
            axis.plot(firsts, [v["mean"] for v in values], marker="o", ms=3, label=_title(entry))
            axis.fill_between(
                firsts, [v["low"] for v in values], [v["high"] for v in values], alpha=0.1
            )
        axis.set_title("drift: KL to dense, nats", fontsize=10)
        axis.set_xlabel("tokens verified before")
        axis.legend(fontsize=6)
        axis.grid(alpha=0.3)
    if shown:
        figure.legend(
            list(shown.values()), list(shown), loc="outside lower center", ncols=5, fontsize=8
        )
    for axis in flat[count:]:
        axis.set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _panels(data: Mapping[str, Any]) -> list[tuple[str, list[tuple[Any, Any]], float | None]]:
    """(title, [(entry, interval)], dense value) of every measure that depends on the budget."""
    made = []
    keys = dict.fromkeys((entry["task"], entry["context"]) for entry in data["table"])
    averages = [(e, e) for e in data["averages"]]
    groups = [("average score", averages)] if averages else []
    for task, context in keys:
        entries = [e for e in data["table"] if (e["task"], e["context"]) == (task, context)]
        if task in FORCED:
            groups.append((f"{task}, {context}: KL to dense", [(e, e["kl"]) for e in entries]))
        else:
            groups.append((f"{task}, {context}: score", [(e, e) for e in entries]))
    for title, entries in groups:
        base = [value["mean"] for entry, value in entries if entry["policy"] == DENSE]
        others = [pair for pair in entries if pair[0]["policy"] != DENSE]
        if others:
            made.append((title, others, base[0] if base else None))
    return made
