# SPDX-License-Identifier: Apache-2.0
"""From settings to selections, by the functions that the runtime uses, and what they cover."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from dustin_vllm import reference
from dustin_vllm.calibrate.traces import Scores, probabilities
from dustin_vllm.config import (
    DustinConfig,
    HeadSet,
    LayerGroup,
    ModelShape,
    PairShape,
    Settings,
    settings_of,
)
from dustin_vllm.selection import merge_and_select

Signal = Literal[
    "settings",
    "lookahead",
    "history",
    "oracle",
    "protected",
    "confirmed rows",
    "agreeing rows",
    "first half's oracle",
    "deeper half's oracle",
]
"""What selects: both signals as the settings say, one of them alone, the attention to come
(an upper bound), or nothing (protected units, and the budget filled with the latest others).

"confirmed rows" and "agreeing rows" are both signals, with lookahead from some of the draft's
rows only: those whose inputs are the text, the draft having predicted it at the rows before; and
those at which it also predicts the text. Where none agrees, history has the whole budget. Neither
is known before verification, so both are for measuring only. A half's oracle is the attention to
come of that half of the target's layers."""

ORACLES: dict[Signal, slice] = {
    "oracle": slice(0, 2),
    "first half's oracle": slice(0, 1),
    "deeper half's oracle": slice(1, 2),
}
"""Rows of ``Scores.oracle_halves`` that are summed."""

BYTES_PER_VALUE = 2  # of a KV cache in bf16
Selections = list[torch.Tensor | None]
"""Per item the selected units, ascending, int64; None: all of the context."""


def settings_for(
    config: DustinConfig, unit: int, gamma: int, target: ModelShape, draft: ModelShape
) -> Settings:
    """Settings as vLLM would resolve them for KV blocks of ``unit`` tokens (1: token granularity).

    Raises:
        ConfigError: the budget cannot hold what is protected, or there are no such heads.
    """
    # The package's own rules, so that a profile means there what it means here.
    return settings_of(config, unit, unit, gamma, PairShape(target, draft))


def scoring_bytes(settings: Settings, target: ModelShape, draft: ModelShape) -> int:
    """Bytes of keys that scoring reads per context token and step, in bf16.

    Heads that share a key head read it once; the gamma draft queries read it together.
    """
    total = 0
    for heads, shape in ((settings.target_heads, target), (settings.draft_heads, draft)):
        group = shape.heads // shape.kv_heads
        for _, chosen in heads.layers:
            total += len({head // group for head in chosen}) * shape.head_dim * BYTES_PER_VALUE
    return total


def full_bytes(shape: ModelShape) -> int:
    """Bytes of keys and values that dense verification reads per context token, in bf16."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * BYTES_PER_VALUE


def _combine(rows: list[torch.Tensor], aggregate: str) -> torch.Tensor:
    """[heads, n] per layer to [n], as ``reference.token_scores`` does for all rows at once."""
    stacked = torch.cat(rows)
    return (stacked.mean(0) if aggregate == "mean" else stacked.amax(0)).cpu()


def history_scores(scores: Scores, item: int, heads: HeadSet, aggregate: str) -> torch.Tensor:
    """[n] fp32: history scores of the scoring heads."""
    rows = [scores.history(item, layer)[list(chosen)] for layer, chosen in heads.layers]
    return _combine(rows, aggregate)


def lookahead_scores(
    scores: Scores, item: int, heads: HeadSet, aggregate: str, first: int | None = None
) -> torch.Tensor:
    """[n] fp32: lookahead scores of the scoring heads, from the ``first`` draft rows or all."""
    rows = [
        scores.lookahead(item, layer, aggregate, first)[list(chosen)]
        for layer, chosen in heads.layers
    ]
    return _combine(rows, aggregate)


def single(settings: Settings, signal: Signal) -> Settings:
    """The settings with one signal filling the whole budget (unchanged where both select)."""
    if signal in ("settings", "confirmed rows", "agreeing rows"):
        return settings
    only_history = signal == "history"
    return replace(
        settings,
        config=settings.config.model_copy(update={"merge": "fill"}),
        target=replace(
            settings.target, lookahead_units=0 if only_history else settings.target.budget_units
        ),
        second=None,
        second_layers=frozenset(),
    )


def _unit_scores(
    scores: Scores, item: int, settings: Settings, signal: Signal
) -> tuple[torch.Tensor, torch.Tensor]:
    """(lookahead, history) of all full units of an item; zeros for what is not used."""
    context, unit = scores.items[item].context, settings.unit
    aggregate = settings.config.aggregate
    nothing = torch.zeros(context // unit)
    if signal == "protected":
        return torch.arange(float(context // unit)), nothing
    if signal in ORACLES:
        tokens = scores.oracle_halves(item)[ORACLES[signal]].sum(0)
        return reference.unit_scores(tokens, context, unit), nothing
    lookahead = history = nothing
    rows = _draft_rows(scores, item, signal)
    if signal != "history" and rows != 0:
        tokens = lookahead_scores(scores, item, settings.draft_heads, aggregate, rows)
        lookahead = reference.unit_scores(tokens, context, unit)
    if signal != "lookahead":
        tokens = history_scores(scores, item, settings.target_heads, aggregate)
        history = reference.unit_scores(tokens, context, unit, settings.dilation_tokens)
    return lookahead, history


def _draft_rows(scores: Scores, item: int, signal: Signal) -> int | None:
    """How many of the draft's rows give lookahead scores; None: all."""
    if signal == "confirmed rows":
        return min(scores.agreeing(item) + 1, scores.gamma)
    return scores.agreeing(item) if signal == "agreeing rows" else None


def select(
    scores: Scores,
    settings: Settings,
    signal: Signal = "settings",
    group: LayerGroup | None = None,
) -> Selections:
    """The selection of every item under the settings, as the runtime makes it.

    Args:
        group: whose selection, ``settings.target`` or ``settings.second``; None: the former.
    """
    settings = single(settings, signal)
    group = group or settings.target
    selections: Selections = [None] * len(scores.items)
    rows = [
        index
        for index, item in enumerate(scores.items)
        if item.context // settings.unit > group.budget_units
    ]
    if not rows:
        return selections
    contexts = torch.tensor([scores.items[row].context for row in rows])
    width = int(contexts.max()) // settings.unit
    both = torch.zeros(2, len(rows), width)
    for place, row in enumerate(rows):
        for side, units in enumerate(_unit_scores(scores, row, settings, signal)):
            both[side, place, : len(units)] = units
    chosen = merge_and_select(both[0], both[1], contexts, settings, group)
    for place, row in enumerate(rows):
        selections[row] = chosen[place].long()
    if signal == "agreeing rows":
        alone = select(scores, settings, "history")
        for row in rows:
            if scores.agreeing(row) == 0:
                selections[row] = alone[row]
    return selections


def select_groups(
    scores: Scores, settings: Settings, signal: Signal = "settings"
) -> tuple[Selections, Selections | None]:
    """The selections of the target's layers, and of ``settings.second_layers`` (None: one set for
    all, or one that is made within the step): the deeper half with merge "split", or wide layers.

    A half's oracle as signal means both halves, each with its own.
    """
    if signal in ("first half's oracle", "deeper half's oracle"):
        first = select(scores, settings, "first half's oracle")
        return first, select(scores, settings, "deeper half's oracle")
    first = select(scores, settings, signal)
    if signal != "settings" or settings.second is None or settings.fresh is not None:
        return first, None
    return first, select(scores, settings, signal, settings.second)


def within_step(settings: Settings, signal: Signal) -> Settings | None:
    """The settings if a selection is made within the step under them, see ``select_in_step``."""
    return settings if settings.fresh is not None and signal == "settings" else None


def select_in_step(
    settings: Settings,
    layer: int,
    context: int,
    queries: torch.Tensor,
    cached: torch.Tensor,
    new: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Cached positions that the queries of a step select in one of ``fresh_layers``, as the
    runtime does.

    Args:
        queries: [H, Q, D]; cached, new: keys [Hkv, context or more, D] and [Hkv, Q, D].

    Returns:
        [K] int64, ascending.
    """
    group, unit = settings.fresh, settings.unit
    assert group is not None
    if context // unit <= group.budget_units:
        return torch.arange(context)
    ((_, heads),) = settings.target_heads.of_layer(layer).layers
    keys = torch.cat([cached[:, :context].to(new), new], dim=1)
    rows = probabilities(queries.transpose(0, 1), keys, scale)[:, list(heads)].flatten(0, 1)
    tokens = rows.mean(0) if settings.config.aggregate == "mean" else rows.amax(0)
    units = reference.unit_scores(tokens.cpu(), context, unit)[None]
    chosen = merge_and_select(units, units, torch.tensor([context]), settings, group)
    return kept_positions(chosen[0].long(), context, unit)


def mirrored(settings: Settings) -> Settings:
    """Split settings with the halves exchanged: history for the first, lookahead for the deeper."""
    assert settings.second is not None
    return replace(settings, target=settings.second, second=settings.target)


def at_budget(config: DustinConfig, budget: int) -> DustinConfig:
    """The settings at another budget: the same share of lookahead, recent window within half."""
    update: dict[str, Any] = {"budget": budget, "recent": min(config.recent, budget // 2)}
    update["sinks"] = min(config.sinks, budget // 4)
    if config.wide_budget is not None:
        update["wide_budget"] = round(config.wide_budget * budget / config.budget)
    if config.lookahead is not None:
        update["lookahead"] = round(config.lookahead * budget / config.budget)
    return config.model_copy(update=update)


def of_equal_reads(config: DustinConfig, num_layers: int) -> DustinConfig:
    """Settings without wide layers, whose budget all layers together read as many tokens with."""
    wide = config.wide_budget or 4 * config.budget
    more = (wide - config.budget) * len(config.wide_layers)
    narrow = config.model_copy(update={"wide_layers": (), "wide_budget": None})
    return at_budget(narrow, config.budget + round(more / num_layers))


def kept_positions(selection: torch.Tensor | None, context: int, unit: int) -> torch.Tensor:
    """Cached positions that a row reads: the selected units and the unfilled one, int64."""
    if selection is None:
        return torch.arange(context)
    inside = (selection[:, None] * unit + torch.arange(unit)).flatten()
    return torch.cat([inside, torch.arange(context // unit * unit, context)])


def recovery(
    scores: Scores, selections: Selections, unit: int, deep: Selections | None = None
) -> torch.Tensor:
    """[items] fp32: share of the target's attention, over the window of a step's rows and all
    layers and heads, that the selections cover (section 3.1 of the paper).

    Args:
        deep: selections of the deeper half of the layers (merge "split"). Each half is then
            covered by its own selection; a layer weighs the same in both.
    """
    if deep is not None:
        return _recovery_by_half(scores, (selections, deep), unit)
    return torch.tensor(
        [
            1.0
            if chosen is None
            else reference.attention_recovery(
                scores.oracle(index), chosen.tolist(), scores.items[index].context, unit
            )
            for index, chosen in enumerate(selections)
        ]
    )


def _recovery_by_half(
    scores: Scores, halves: tuple[Selections, Selections], unit: int
) -> torch.Tensor:
    recovered = torch.zeros(len(scores.items))
    for index, item in enumerate(scores.items):
        both = scores.oracle_halves(index)
        for mass, selections in zip(both, halves, strict=True):
            share, chosen = float(mass.sum() / both.sum()), selections[index]
            if chosen is not None and share:  # a model of one layer has no first half
                share *= reference.attention_recovery(mass, chosen.tolist(), item.context, unit)
            recovered[index] += share
    return recovered


def by_window(scores: Scores, values: torch.Tensor) -> torch.Tensor:
    """[windows] mean of a value per item over each window, windows in order of appearance."""
    order = list(dict.fromkeys(item.trace for item in scores.items))
    owner = torch.tensor([order.index(item.trace) for item in scores.items])
    total = torch.zeros(len(order)).index_add_(0, owner, values.float())
    return total / torch.bincount(owner, minlength=len(order))


def kinds(scores: Scores) -> Sequence[str]:
    """Kind of every window of ``by_window``."""
    order = list(dict.fromkeys(item.trace for item in scores.items))
    return [scores.traces[trace].window.kind for trace in order]
