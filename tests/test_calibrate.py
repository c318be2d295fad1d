# SPDX-License-Identifier: Apache-2.0
"""``dustin calibrate`` on tiny random models: exactness of what it measures, and a whole run."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import GAMMA, VOCAB, tokens, write_tiny_qwen2
from typer.testing import CliRunner

from dustin_vllm import reference
from dustin_vllm.calibrate import attention, cli, heads, models, policies, report, run, search, text
from dustin_vllm.calibrate.attention import CalibrationError
from dustin_vllm.calibrate.models import Model
from dustin_vllm.calibrate.quality import Evaluator, Journal
from dustin_vllm.calibrate.text import Window, WindowMaker
from dustin_vllm.calibrate.traces import Item, Scores, Trace, probabilities, record
from dustin_vllm.config import (
    ConfigError,
    DustinConfig,
    ModelShape,
    PairShape,
    Profile,
    ScoringLayer,
    Settings,
    load_profile,
)

LENGTH = 600
POSITIONS = (450, 523, 590)
MODEL_FIELDS = set(ModelShape.__dataclass_fields__)


def config(**settings: Any) -> DustinConfig:
    return DustinConfig.model_validate({"recent": 16, **settings})


@pytest.fixture(scope="module")
def pair(target: Path, draft: Path) -> tuple[Model, Model]:
    return (
        models.load_model(target, "cpu", "auto", "target"),
        models.load_model(draft, "cpu", "auto", "draft"),
    )


@pytest.fixture(scope="module")
def traces(pair: tuple[Model, Model], tmp_path_factory: pytest.TempPathFactory) -> list[Trace]:
    folder = tmp_path_factory.mktemp("work")
    windows = [
        Window(kind, tuple(tokens(seed, LENGTH)), POSITIONS)
        for seed, kind in enumerate(("prose", "copy"))
    ]
    return [record(folder, w, *pair, GAMMA, torch.device("cpu")) for w in windows]


@pytest.fixture(scope="module")
def scores(traces: list[Trace]) -> Scores:
    return Scores(traces, [Item(i, n) for i in range(len(traces)) for n in POSITIONS], GAMMA)


def dense_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


# ---- attention ----------------------------------------------------------------------------


def test_chunked_prefill_is_the_dense_model(
    target: Path, pair: tuple[Model, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "CHUNK", 128)
    ids = tokens(3, 300)
    done = models.prefill(pair[0], ids, (5, 127, 128, 299), (0, 130, 255, 256, 299))
    with torch.inference_mode():
        output = dense_model(target)(torch.tensor([ids]), use_cache=True)
    expected = output.logits[0, [0, 130, 255, 256, 299]]
    torch.testing.assert_close(done.logits, expected, atol=2e-4, rtol=1e-3)
    for layer in range(4):
        cached = output.past_key_values.layers[layer]
        torch.testing.assert_close(done.keys[layer], cached.keys[0], atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(done.values[layer], cached.values[0], atol=1e-4, rtol=1e-3)


def test_recorded_queries_give_the_models_attention(
    target: Path, pair: tuple[Model, Model]
) -> None:
    ids = tokens(4, 200)
    done = models.prefill(pair[0], ids, (150, 151, 152))
    with torch.inference_mode():
        weights = dense_model(target)(torch.tensor([ids]), output_attentions=True).attentions
    for layer in range(4):
        found = probabilities(done.queries[layer], done.keys[layer, :, :153], done.scales[layer])
        expected = weights[layer][0, :, 150:153, :153].transpose(0, 1)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("fresh", [False, True])
def test_deep_layers_read_a_selection_of_their_own(fresh: bool) -> None:
    """Given before the step, or by what layers 1 and 2 of it select."""
    generator = torch.Generator().manual_seed(0)
    length, width, context = 100, 5, 95
    queries, keys, values = (torch.randn(length, n, 8, generator=generator) for n in (4, 2, 2))
    cached = tuple(t[:context].transpose(0, 1)[None].repeat(3, 1, 1, 1) for t in (keys, values))
    first, deep, deeper = [0, 1], [3, 4], [2, 4]
    kept = [
        policies.kept_positions(torch.tensor(chosen), context, 16)
        for chosen in (first, deep, deeper)
    ]
    by_layer = {i: lambda *_, i=i: kept[i] for i in (1, 2)} if fresh else None
    second = None if fresh else [kept[1]]
    plan = attention.SparseRows([cached], [kept[0]], second, {1, 2}, by_layer)
    for layer, chosen in ((0, first), (1, deep), (2, deeper if fresh else deep)):
        found = plan.attend(
            layer, *(t[-width:].transpose(0, 1)[None] for t in (queries, keys, values)), 0.3
        )
        expected = reference.sparse_attention(
            queries[-width:], keys, values, 0.3, chosen, context, 16
        )
        torch.testing.assert_close(found[0].transpose(0, 1), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("unit", [1, 16, 32])
def test_sparse_rows_equal_the_reference(unit: int) -> None:
    generator = torch.Generator().manual_seed(unit)
    length, width, heads, kv_heads, dim = 205, 5, 6, 2, 8
    context = length - width
    queries, keys, values = (
        torch.randn(length, n, dim, generator=generator) for n in (heads, kv_heads, kv_heads)
    )
    selection = [0, 2, 5]
    expected = reference.sparse_attention(
        queries[-width:], keys, values, 0.3, selection, context, unit
    )
    kept = policies.kept_positions(torch.tensor(selection), context, unit)
    plan = attention.SparseRows(
        [(keys[:context].transpose(0, 1)[None], values[:context].transpose(0, 1)[None])], [kept]
    )
    found = plan.attend(
        0, *(t[-width:].transpose(0, 1)[None] for t in (queries, keys, values)), 0.3
    )
    torch.testing.assert_close(found[0].transpose(0, 1), expected, atol=1e-5, rtol=1e-4)


def test_the_attention_refuses_what_it_cannot_do(pair: tuple[Model, Model]) -> None:
    with pytest.raises(RuntimeError, match="only inside"):
        pair[0].module(torch.tensor([[1, 2]]))
    state = torch.zeros(1, 2, 3, 4)
    module = type("Attention", (), {"layer_idx": 0})()
    with (
        attention.active(attention.Prefill(3, ())),
        pytest.raises(CalibrationError, match="sliding_window"),
    ):
        attention._attention(module, state, state, state, None, sliding_window=128)


# ---- scores and selections ----------------------------------------------------------------


@pytest.mark.parametrize("aggregate", ["mean", "max"])
def test_scores_equal_the_reference(scores: Scores, aggregate: str) -> None:
    item = 4
    trace, n = scores.traces[1], POSITIONS[1]
    settings = policies.settings_for(
        config(
            aggregate=aggregate,
            target_heads=[{"layer": 1, "heads": [0, 3]}, {"layer": 2}],
            draft_heads=[{"layer": 1, "heads": [2]}],
        ),
        1,
        GAMMA,
        ModelShape("", 4, 4, 2, 32, 128, VOCAB),
        ModelShape("", 2, 4, 2, 32, 128, VOCAB),
    )

    def expected(queries: torch.Tensor, keys: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        # The reference takes key heads by query head: give every query head its own.
        own = keys.transpose(0, 1)[:, [head // 2 for head in chosen]]
        return reference.token_scores(queries[:, chosen], own, 32**-0.5, aggregate)

    row = trace.rows.index(n - 1)
    parts = [
        expected(
            trace.target_queries[layer, row : row + 1], trace.target_keys[layer, :, :n], chosen
        )
        for layer, chosen in ((1, [0, 3]), (2, [0, 1, 2, 3]))
    ]
    together = parts[0] * 2 / 6 + parts[1] * 4 / 6
    if aggregate == "max":
        together = torch.maximum(*parts)
    found = policies.history_scores(scores, item, settings.target_heads, aggregate)
    torch.testing.assert_close(found, together, atol=1e-6, rtol=1e-4)

    rows = slice(trace.rows.index(n), trace.rows.index(n) + GAMMA)
    ahead = expected(trace.draft_queries[1, rows], trace.draft_keys[1, :, : n + GAMMA], [2])
    found = policies.lookahead_scores(scores, item, settings.draft_heads, aggregate)
    torch.testing.assert_close(found, ahead[:n], atol=1e-6, rtol=1e-4)


def test_oracle_is_the_attention_of_the_verification_rows(scores: Scores) -> None:
    trace, n = scores.traces[0], POSITIONS[0]
    rows = slice(trace.rows.index(n), trace.rows.index(n) + GAMMA + 1)
    expected = torch.stack(
        [
            reference.token_scores(
                trace.target_queries[layer, rows],
                trace.target_keys[layer, :, : n + GAMMA + 1].transpose(0, 1),
                32**-0.5,
            )
            for layer in range(4)
        ]
    ).mean(0)
    torch.testing.assert_close(scores.oracle(0), expected, atol=1e-6, rtol=1e-4)


def test_cached_scores_are_bounded_and_made_again(traces: list[Trace], scores: Scores) -> None:
    small = Scores(traces, scores.items, GAMMA, max_bytes=4 * 4 * LENGTH)
    for item in range(len(scores.items)):
        for layer in range(4):
            assert torch.equal(small.history(item, layer), scores.history(item, layer))
    assert small._bytes <= 4 * 4 * LENGTH
    assert torch.equal(small.history(0, 0), scores.history(0, 0))


@pytest.mark.parametrize("merge", ["fill", "weighted"])
def test_selections_are_those_of_the_package(
    scores: Scores, pair: tuple[Model, Model], merge: str
) -> None:
    settings = policies.settings_for(
        config(budget=128, merge=merge), 16, GAMMA, pair[0].shape, pair[1].shape
    )
    selections = policies.select(scores, settings)
    for index, item in enumerate(scores.items):
        lookahead = policies.lookahead_scores(scores, index, settings.draft_heads, "mean")
        history = policies.history_scores(scores, index, settings.target_heads, "mean")
        expected = reference.select_units(
            reference.unit_scores(lookahead, item.context, 16).tolist(),
            reference.unit_scores(history, item.context, 16, GAMMA + 1).tolist(),
            item.context,
            16,
            8,
            4,
            16,
            merge,
            4,
            0.25,
        )
        chosen = selections[index]
        assert chosen is not None
        assert chosen.tolist() == expected


def settings_of(pair: tuple[Model, Model], unit: int = 16, **wanted: Any) -> Settings:
    return policies.settings_for(config(**wanted), unit, GAMMA, pair[0].shape, pair[1].shape)


def best_by(scores: Scores, index: int, tokens_: torch.Tensor, dilation: int = 0) -> list[int]:
    """8 blocks of 16: protected ones and the best by one signal."""
    context = scores.items[index].context
    units = reference.unit_scores(tokens_, context, 16, dilation).tolist()
    return reference.select_units(units, units, context, 16, 8, 4, 16, "fill", 8, 0)


def test_split_selects_by_lookahead_and_for_deep_layers_by_history(
    scores: Scores, pair: tuple[Model, Model]
) -> None:
    settings = settings_of(pair, budget=128, merge="split")
    first, deep = policies.select_groups(scores, settings)
    other_first, other_deep = policies.select_groups(scores, policies.mirrored(settings))
    assert deep is not None
    assert other_deep is not None
    for index in range(len(scores.items)):
        lookahead = policies.lookahead_scores(scores, index, settings.draft_heads, "mean")
        history = policies.history_scores(scores, index, settings.target_heads, "mean")
        by_lookahead = best_by(scores, index, lookahead)
        by_history = best_by(scores, index, history, GAMMA + 1)
        assert by_lookahead != by_history
        for found, expected in (
            *((first, by_lookahead), (deep, by_history)),
            *((other_first, by_history), (other_deep, by_lookahead)),
        ):
            chosen = found[index]
            assert chosen is not None
            assert chosen.tolist() == expected
    # One signal, or none, selects for all layers.
    shared = settings_of(pair, budget=128)
    singles: tuple[policies.Signal, ...] = ("history", "lookahead", "oracle", "protected")
    for signal in singles:
        alone, none = policies.select_groups(scores, settings, signal)
        assert none is None
        assert policies.single(settings, signal).second is None
        assert str(alone) == str(policies.select(scores, shared, signal))
    assert policies.select_groups(scores, shared)[1] is None


def layer_attention(scores: Scores, index: int, layer: int) -> torch.Tensor:
    """[n + gamma + 1]: attention of a step's rows in one target layer, by the reference."""
    trace, n = scores.traces[scores.items[index].trace], scores.items[index].context
    rows = slice(trace.rows.index(n), trace.rows.index(n) + GAMMA + 1)
    keys = trace.target_keys[layer, :, : n + GAMMA + 1].transpose(0, 1)
    return reference.token_scores(trace.target_queries[layer, rows], keys, 32**-0.5)


def first_layers(scores: Scores, count: int) -> Scores:
    """The same recordings of a target of fewer layers."""
    parts = ("target_keys", "target_values", "target_queries", "target_scales")
    traces = [replace(t, **{p: getattr(t, p)[:count] for p in parts}) for t in scores.traces]
    return Scores(traces, scores.items, GAMMA)


@pytest.mark.parametrize(("layers", "first_deep"), [(4, 2), (3, 1), (1, 0)])
def test_recovery_of_a_split_is_that_of_each_half_by_its_own_selection(
    scores: Scores, pair: tuple[Model, Model], layers: int, first_deep: int
) -> None:
    settings = settings_of(pair, budget=128, merge="split")
    first, deep = policies.select_groups(scores, settings)
    assert deep is not None
    scores = first_layers(scores, layers)
    found = policies.recovery(scores, first, 16, deep)
    for index in (0, 4):
        expected = 0.0
        for layer in range(layers):
            chosen = (first if layer < first_deep else deep)[index]
            assert chosen is not None
            expected += reference.attention_recovery(
                layer_attention(scores, index, layer),
                chosen.tolist(),
                scores.items[index].context,
                16,
            )
        assert float(found[index]) == pytest.approx(expected / layers, rel=1e-4)
    torch.testing.assert_close(
        policies.recovery(scores, first, 16, first), policies.recovery(scores, first, 16)
    )
    everything: policies.Selections = [None] * len(scores.items)
    half = policies.recovery(scores, everything, 16, deep)
    gained = half - policies.recovery(scores, deep, 16)
    assert bool((gained > 1e-3).all()) == (first_deep > 0)
    assert bool((half < 1).all())


def test_each_half_has_its_own_oracle(scores: Scores, pair: tuple[Model, Model]) -> None:
    settings = settings_of(pair, budget=128)
    first, deep = policies.select_groups(scores, settings, "first half's oracle")
    assert deep is not None
    for index in (0, 4):
        for found, layers in ((first, (0, 1)), (deep, (2, 3))):
            mass = torch.stack([layer_attention(scores, index, i) for i in layers]).sum(0)
            chosen = found[index]
            assert chosen is not None
            assert chosen.tolist() == best_by(scores, index, mass)
    shared = policies.recovery(scores, policies.select(scores, settings, "oracle"), 16)
    assert float(policies.recovery(scores, first, 16, deep).mean()) > float(shared.mean())


# ---- rows on which draft and text agree ---------------------------------------------------


def test_the_drafts_next_tokens_are_recorded(draft: Path, traces: list[Trace]) -> None:
    trace = traces[0]
    with torch.inference_mode():
        logits = dense_model(draft)(torch.tensor([trace.window.tokens])).logits[0]
    assert trace.draft_next.tolist() == logits[list(trace.rows)].argmax(-1).tolist()


def saying(trace: Trace, right: list[int], context: int) -> Trace:
    """A trace whose draft predicts the text at the rows ``right`` from the context on only."""
    said = trace.draft_next.clone()
    for row in range(GAMMA):
        token = trace.window.tokens[context + row + 1]
        said[trace.rows.index(context + row)] = token if row in right else (token + 1) % VOCAB
    return replace(trace, draft_next=said)


@pytest.mark.parametrize(
    ("right", "agreeing"), [([], 0), ([1, 2, 3], 0), ([0, 1, 3], 2), ([0, 1, 2, 3], 4)]
)
@pytest.mark.parametrize("merge", ["fill", "weighted"])
@pytest.mark.parametrize("aggregate", ["mean", "max"])
def test_lookahead_of_the_rows_that_agree(
    traces: list[Trace],
    pair: tuple[Model, Model],
    right: list[int],
    agreeing: int,
    merge: str,
    aggregate: str,
) -> None:
    n = POSITIONS[1]
    trace = saying(traces[1], right, n)
    made = Scores([trace], [Item(0, n)], GAMMA)
    assert made.agreeing(0) == agreeing
    settings = settings_of(
        pair,
        budget=128,
        merge=merge,
        aggregate=aggregate,
        lookahead_weight=0.9,
        draft_heads=[{"layer": 1}],
    )
    history = policies.history_scores(made, 0, settings.target_heads, aggregate)
    history_units = reference.unit_scores(history, n, 16, GAMMA + 1).tolist()

    def expected(used: int) -> list[int]:
        if used == 0:
            return best_by(made, 0, history, GAMMA + 1)
        rows = slice(trace.rows.index(n), trace.rows.index(n) + used)
        keys = trace.draft_keys[1, :, : n + used].transpose(0, 1)
        ahead = reference.token_scores(trace.draft_queries[1, rows], keys, 32**-0.5, aggregate)
        units = reference.unit_scores(ahead, n, 16).tolist()
        return reference.select_units(units, history_units, n, 16, 8, 4, 16, merge, 4, 0.9)

    assert expected(1) != expected(0)
    assert expected(4) != expected(2)
    used: dict[policies.Signal, int] = {
        "agreeing rows": agreeing,
        "confirmed rows": min(agreeing + 1, GAMMA),
        "settings": GAMMA,
    }
    for signal, count in used.items():
        (chosen,) = policies.select(made, settings, signal)
        assert chosen is not None
        assert chosen.tolist() == expected(count)
    found = report.agreement_data(made)
    assert found["steps"] == 1
    assert [i for i, count in enumerate(found["agreeing_rows"]) if count] == [agreeing]
    assert len(found["agreeing_rows"]) == GAMMA + 1


def test_policies_differ_and_the_oracle_recovers_most(
    scores: Scores, pair: tuple[Model, Model]
) -> None:
    settings = policies.settings_for(config(budget=96), 1, GAMMA, pair[0].shape, pair[1].shape)
    means = {}
    chosen = set()
    for signal in report.POLICIES:
        selections = policies.select(scores, settings, signal)
        assert all(s is not None and len(s) == 96 for s in selections)
        chosen.add(str(selections))
        means[signal] = float(policies.recovery(scores, selections, 1).mean())
    assert len(chosen) == len(report.POLICIES)
    assert means["oracle"] == max(means.values()) < 1
    assert means["protected"] == min(means.values())
    latest = policies.select(scores, settings, "protected")[0]
    assert latest is not None
    assert latest.tolist() == [0, 1, 2, 3, *range(POSITIONS[0] - 92, POSITIONS[0])]


def test_scoring_bytes_count_key_heads_once() -> None:
    big = ModelShape("", 80, 64, 8, 128, 8192, VOCAB)
    small = ModelShape("", 24, 14, 2, 64, 896, VOCAB)
    wanted = config(
        target_heads=[{"layer": 5, "heads": [0, 7, 8]}], draft_heads=[{"layer": 1}, {"layer": 2}]
    )
    settings = policies.settings_for(wanted, 16, GAMMA, big, small)
    assert policies.scoring_bytes(settings, big, small) == 2 * (2 * 128 + 2 * 2 * 64)
    assert policies.full_bytes(big) == 320 * 1024


# ---- quality ------------------------------------------------------------------------------


def evaluator(pair: tuple[Model, Model], scores: Scores, folder: Path) -> Evaluator:
    return Evaluator(pair[0], scores, Journal(folder / "journal.jsonl"))


def test_kl_is_zero_when_the_budget_covers_the_context(
    pair: tuple[Model, Model], scores: Scores, tmp_path: Path
) -> None:
    settings = policies.settings_for(config(budget=640), 16, GAMMA, pair[0].shape, pair[1].shape)
    selections = policies.select(scores, settings)
    assert selections == [None] * 6
    measure = evaluator(pair, scores, tmp_path).measure
    quality = measure(selections, 16)
    assert quality.kl.tolist() == [0] * 6
    assert quality.agreement.tolist() == [1] * 6
    # The same positions as an explicit selection, by the sparse route.
    everything: policies.Selections = [torch.arange(i.context // 16) for i in scores.items]
    assert float(measure(everything, 16).kl.max()) == 0


def test_kl_is_that_of_a_masked_model(
    target: Path, pair: tuple[Model, Model], scores: Scores, tmp_path: Path
) -> None:
    settings = policies.settings_for(config(budget=64), 16, GAMMA, pair[0].shape, pair[1].shape)
    selections = policies.select(scores, settings)
    model = dense_model(target)
    heads_ = [m.lm_head.weight for m in (model, pair[0].module)]
    with torch.no_grad():
        for weight in heads_:
            weight.mul_(16)  # flat logits have the same KL both ways
    quality = evaluator(pair, scores, tmp_path).measure(selections, 16)
    for index in (0, 4):
        item = scores.items[index]
        n, ids = item.context, scores.traces[item.trace].window.tokens
        end = n + GAMMA + 1
        # Context rows see everything before them; the step's rows what was selected.
        allowed = torch.ones(end, end, dtype=torch.bool).tril()
        visible = torch.zeros(n, dtype=torch.bool)
        visible[policies.kept_positions(selections[index], n, 16)] = True
        allowed[n:, :n] = visible
        mask = torch.zeros(1, 1, end, end).masked_fill(~allowed, float("-inf"))
        batch = torch.tensor([ids[:end]])
        with torch.inference_mode():
            dense = model(batch).logits[0, n:].log_softmax(-1)
            sparse = model(batch, attention_mask=mask).logits[0, n:].log_softmax(-1)
        expected = (dense.exp() * (dense - sparse)).sum(-1).mean()
        backwards = (sparse.exp() * (sparse - dense)).sum(-1).mean()
        assert abs(backwards / expected - 1) > 0.05
        assert float(quality.kl[index]) == pytest.approx(float(expected), rel=1e-2)
        same = (dense.argmax(-1) == sparse.argmax(-1)).float().mean()
        assert float(quality.agreement[index]) == pytest.approx(float(same))
    with torch.no_grad():
        heads_[1].div_(16)


@pytest.mark.parametrize("sparse_half", [0, 1])
def test_kl_of_a_split_is_that_of_a_model_masked_by_layer(
    target: Path, pair: tuple[Model, Model], scores: Scores, tmp_path: Path, sparse_half: int
) -> None:
    # One half reads hardly anything and the other everything, so that neither can stand in.
    little: policies.Selections = [torch.arange(2) for _ in scores.items]
    much: policies.Selections = [None for _ in scores.items]
    first, deep = (little, much) if sparse_half == 0 else (much, little)
    measured = evaluator(pair, scores, tmp_path)
    # All through one journal: what one half reads must tell entries apart.
    shared = measured.measure(little, 16)
    assert float(measured.measure(much, 16).kl.max()) == 0
    found = measured.measure(first, 16, deep, {2, 3})
    torch.testing.assert_close(measured.measure(little, 16, little, {2, 3}).kl, shared.kl)
    assert measured.measured == len(measured.journal) == 4
    model = dense_model(target)
    for index in (0, 4):
        item = scores.items[index]
        n, ids = item.context, scores.traces[item.trace].window.tokens
        end = n + GAMMA + 1
        masks = []
        for chosen in (first, deep):
            allowed = torch.ones(end, end, dtype=torch.bool).tril()
            visible = torch.zeros(n, dtype=torch.bool)
            visible[policies.kept_positions(chosen[index], n, 16)] = True
            allowed[n:, :n] = visible
            masks.append(torch.zeros(1, 1, end, end).masked_fill(~allowed, float("-inf")))

        def own_mask(module: Any, args: Any, kwargs: Any, masks: Any = masks) -> Any:
            return args, {**kwargs, "attention_mask": masks[module.layer_idx // 2]}

        batch = torch.tensor([ids[:end]])
        with torch.inference_mode():
            dense = model(batch).logits[0, n:].log_softmax(-1)
            hooks = [
                layer.self_attn.register_forward_pre_hook(own_mask, with_kwargs=True)
                for layer in model.model.layers
            ]
            sparse = model(batch).logits[0, n:].log_softmax(-1)
            for hook in hooks:
                hook.remove()
        expected = (dense.exp() * (dense - sparse)).sum(-1).mean()
        assert float(found.kl[index]) == pytest.approx(float(expected), rel=2e-3)
        assert abs(float(shared.kl[index]) / float(expected) - 1) > 0.01


def test_batches_of_rows_do_not_change_the_result(
    pair: tuple[Model, Model], scores: Scores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = policies.settings_for(config(budget=64), 1, GAMMA, pair[0].shape, pair[1].shape)
    selections = policies.select(scores, settings)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = evaluator(pair, scores, tmp_path / "a").measure(selections, 1)
    monkeypatch.setattr("dustin_vllm.calibrate.quality.MAX_ROWS", 4 * (GAMMA + 1))
    split = evaluator(pair, scores, tmp_path / "b").measure(selections, 1)
    torch.testing.assert_close(whole.kl, split.kl, atol=1e-5, rtol=1e-3)


def test_journal_survives_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path).put("a", {"kl": [1.0]})
    with path.open("a") as stream:
        stream.write('{"key": "b", "val')
    again = Journal(path)
    assert again.get("a") == {"kl": [1.0]}
    assert again.get("b") is None
    again.put("c", {"kl": [2.0]})
    assert Journal(path).get("c") == {"kl": [2.0]}
    assert len(Journal(path)) == 2


def test_a_trace_is_read_back_and_named_by_its_inputs(
    pair: tuple[Model, Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = Window("prose", tuple(tokens(9, 100)), (80,))
    first = record(tmp_path, window, *pair, GAMMA, torch.device("cpu"))
    monkeypatch.setattr("dustin_vllm.calibrate.traces.prefill", None)  # would fail
    second = record(tmp_path, window, *pair, GAMMA, torch.device("cpu"))
    assert torch.equal(first.target_queries, second.target_queries)
    assert torch.equal(first.draft_keys, second.draft_keys)
    for other, gamma in (
        (replace(window, positions=(81,)), GAMMA),
        (replace(window, tokens=window.tokens[::-1]), GAMMA),
        (window, GAMMA + 1),
    ):
        with pytest.raises(TypeError):
            record(tmp_path, other, *pair, gamma, torch.device("cpu"))
    assert not list(tmp_path.glob("*.part"))


# ---- retrieval heads ----------------------------------------------------------------------


def plant(model: Model, layer: int, head: int) -> None:
    """Make one head attend to all earlier places of a row's own token, near and far.

    Queries and keys become one projection of the hidden state, in the dimensions that the
    rotary embedding hardly turns.
    """
    block = model.module.model.layers[layer].self_attn
    dim, width = block.head_dim, block.q_proj.in_features
    projection = torch.randn(dim, width, generator=torch.Generator().manual_seed(1)) / width**0.5
    projection.unflatten(0, (2, -1))[:, :6] = 0
    kv_head = head // block.num_key_value_groups
    with torch.no_grad():
        block.k_proj.weight[kv_head * dim : (kv_head + 1) * dim] = projection
        block.q_proj.weight[head * dim : (head + 1) * dim] = 20 * projection


def test_a_planted_retrieval_head_is_found(tmp_path: Path) -> None:
    folder = write_tiny_qwen2(
        tmp_path / "m", layers=2, rope_parameters={"rope_type": "default", "rope_theta": 1e9}
    )
    model = models.load_model(folder, "cpu", "auto", "target")
    plant(model, layer=0, head=3)
    windows = []
    for seed in range(4):
        body = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed)).tolist()[:200]
        windows.append(Window("needle", (*body, *body[40:44]), (), (40, 44), (200, 204)))
    trials = [heads.ask(model, window) for window in windows]
    assert not any(trial.right for trial in trials)  # a random model answers nothing
    nothing = heads.combine(trials)
    assert (nothing.used, float(nothing.scores.sum())) == (0, 0)
    found = heads.combine(trials, fallback=[True, False, True, True])
    assert (found.right, found.used, found.trials) == (0, 3, 4)
    assert divmod(int(found.scores.argmax()), 4) == (0, 3)
    others = found.scores.clone()
    others[0, 3] = 0
    # Three of four rows have their token in the source, and once more at the row itself.
    assert 1.2 < found.scores[0, 3] < 1.8
    assert found.scores[0, 3] > 2 * others.max()
    assert found.best(0, 1) == (3,)
    assert len(found.best(1, 2)) == 2


def test_only_trials_answered_right_count(pair: tuple[Model, Model]) -> None:
    model = pair[0]
    body = tokens(1, 60)
    start = len(body)
    answer = []
    for _ in range(3):  # what the model itself says next
        logits = models.prefill(model, (*body, *answer), (), (start + len(answer) - 1,)).logits
        answer.append(int(logits[0].argmax()))
    wrong = [(token + 1) % VOCAB for token in answer]
    windows = [
        Window("needle", (*body, *said), (), (10, 13), (start, start + 3))
        for said in (answer, wrong)
    ]
    trials = [heads.ask(model, window) for window in windows]
    assert [trial.right for trial in trials] == [True, False]
    found = heads.combine(trials, fallback=[False, True])
    assert (found.right, found.used) == (1, 1)
    assert torch.equal(found.scores, trials[0].mass)
    # By definition, from the rows that emit the answer.
    done = models.prefill(model, windows[0].tokens[:-1], range(start - 1, start + 2))
    mass = probabilities(done.queries[2], done.keys[2], float(done.scales[2]))[:, :, 10:13]
    torch.testing.assert_close(found.scores[2], mass.sum((0, 2)))


# ---- text ---------------------------------------------------------------------------------


def encode(text: str) -> list[int]:
    """A stand-in for a tokenizer: words and marks by a stable hash."""
    import re
    import zlib

    return [zlib.crc32(w.encode()) % (VOCAB - 2) + 2 for w in re.findall(r"\s?\w|[^\w\s]", text)]


def maker(**change: Any) -> WindowMaker:
    options: dict[str, Any] = dict(
        encode=encode, sources=text.default_sources(), context=512, gamma=GAMMA, max_id=VOCAB
    )
    return WindowMaker(**{**options, **change})


def test_windows_are_what_they_say() -> None:
    windows = maker().windows(8, 3, seed=1)
    assert [w.kind for w in windows] == list(text.KINDS) * 2
    assert len({w.tokens for w in windows}) == 8
    for window in windows:
        assert len(window.positions) == 3
        assert max(window.positions) + GAMMA + 1 <= len(window.tokens)
        assert min(window.positions) > 512 // 2
    copied = windows[2].tokens
    tail = copied[-64:]
    starts = [i for i in range(256) if copied[i : i + 64] == tail]
    assert starts
    for needle in (windows[3], windows[7]):
        start, end = needle.source
        assert end <= 512 * 3 // 4 + 64
        assert needle.tokens[start:end] == needle.tokens[slice(*needle.answer)]
        assert needle.answer[0] >= 400
        emitted = {n + i + 1 for n in needle.positions for i in range(GAMMA + 1)}
        assert emitted & set(range(*needle.answer))
    assert windows == maker().windows(8, 3, seed=1)
    assert windows != maker().windows(8, 3, seed=2)


def test_records_become_questions(tmp_path: Path) -> None:
    for index, name in enumerate(("France", "Chad")):
        record_ = {
            "Government": {"Country name": {"conventional short form": {"text": name}}},
            "Economy": {"Exports": {"text": f"{index}00 tonnes of {name[:2]}"}},
            "Long": {"text": "x" * 100},
        }
        (tmp_path / f"{index}.json").write_text(json.dumps(record_))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "notes.txt").write_text("a line of prose\n" * 400)
    sources = text.read_sources([tmp_path])
    assert [name for name, _ in sources.facts] == ["France", "Chad"]
    assert sources.facts[0][1] == (("Economy / Exports", "000 tonnes of Fr"),)
    assert sources.prose.startswith("a line")
    assert "def " in sources.code  # Python's own
    for window in maker(sources=sources).needles(6, seed=0):
        start, end = window.source
        assert window.tokens[start:end] == window.tokens[slice(*window.answer)]


def test_wrong_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="no such file or folder"):
        text.read_sources([tmp_path / "none"])
    (tmp_path / "image.bin").write_bytes(b"\0")
    with pytest.raises(CalibrationError, match="no readable text"):
        text.read_sources([tmp_path])
    with pytest.raises(CalibrationError, match="tokens of prose.*--context"):
        maker(sources=text.Sources("too short", "def f(): ...")).windows(4, 1, 0)
    with pytest.raises(CalibrationError, match="context=100"):
        maker(context=100)
    with pytest.raises(CalibrationError, match="draft knows only 5"):
        maker(max_id=5).windows(4, 1, 0)


# ---- search -------------------------------------------------------------------------------


def made_search(
    pair: tuple[Model, Model], scores: Scores, folder: Path, **change: Any
) -> search.Search:
    flat = [heads.HeadScores(torch.rand(m.shape.layers, 4), 1, 1, 1) for m in pair]
    options: dict[str, Any] = dict(
        gamma=GAMMA,
        budget=96,
        units=(16,),
        target=(pair[0].shape, flat[0]),
        draft=(pair[1].shape, flat[1]),
        advance=lambda what, done, total: None,
    )
    torch.manual_seed(0)
    return search.Search(scores, evaluator(pair, scores, folder), **{**options, **change})


def test_the_search_is_deterministic_and_resumes(
    pair: tuple[Model, Model], scores: Scores, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    flat = [heads.HeadScores(torch.rand(m.shape.layers, 4), 1, 1, 1) for m in pair]
    change = {"target": (pair[0].shape, flat[0]), "draft": (pair[1].shape, flat[1])}
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()

    def go(folder: str, trials: int, seed: int = 3) -> tuple[search.Found, int]:
        made = made_search(pair, scores, tmp_path / folder, units=(16, 1), **change)
        found = made.run(config(budget=96), trials, seed, most_layers=2)
        return found, made.evaluator.measured

    whole, measured = go("whole", 14)
    assert measured > 14
    assert len({str(trial.config) for trial in whole.trials}) > 8
    assert {trial.unit for trial in whole.trials} == {1, 16}
    _, first = go("parts", 7)  # as if interrupted
    resumed, second = go("parts", 14)
    assert resumed == whole
    assert 0 < second < first
    again, none = go("parts", 14)
    assert again == whole
    assert none == 0
    other, _ = go("whole", 14, seed=4)
    assert other.trials != whole.trials
    for trial in whole.trials:
        assert math.isfinite(trial.loss)
        assert trial.scoring > 0


def test_a_search_out_of_time_ends_with_what_it_has(
    pair: tuple[Model, Model], scores: Scores, tmp_path: Path
) -> None:
    asked: list[str] = []

    def stop(what: str) -> bool:
        asked.append(what)
        return not what.startswith("target")

    made = made_search(pair, scores, tmp_path, stop=stop)
    found = made.run(config(budget=96), 9, seed=0, most_layers=4)
    assert len(found.draft_layers) == 1
    assert asked[0] == "target layer 2"
    assert asked[-2:] == ["draft layer 2", "selection parameters"]
    assert len(found.trials) == 2
    assert found.trials[0] == found.default


def test_a_trial_with_split_measures_both_selections(
    pair: tuple[Model, Model], scores: Scores, tmp_path: Path
) -> None:
    made = made_search(pair, scores, tmp_path)
    wanted = config(budget=96, merge="split")
    first, deep = policies.select_groups(scores, made.settings(wanted, 16))
    kl = made.evaluator.measure(first, 16, deep, {2, 3}).kl
    assert made.trial(wanted, 16).window_kl == tuple(policies.by_window(scores, kl).tolist())
    assert made.trial(wanted, 16).loss != made.trial(wanted, 16, "lookahead").loss


def test_greedy_layers_take_what_lowers_kl(
    pair: tuple[Model, Model], scores: Scores, tmp_path: Path
) -> None:
    made = made_search(pair, scores, tmp_path)
    layers = made.greedy_layers("target", config(budget=96), 4)
    losses = {
        layer: made.trial(config(budget=96, target_heads=[{"layer": layer}]), 16, "history").loss
        for layer in range(4)
    }
    assert layers[0] == min(losses, key=lambda layer: losses[layer])
    assert len(set(layers)) == len(layers)


def test_wide_layers_are_those_that_lower_kl_more_than_one_budget_does(
    pair: tuple[Model, Model], scores: Scores, tmp_path: Path
) -> None:
    made = made_search(pair, scores, tmp_path)
    base = config(budget=64, wide_budget=192)
    layers = made.wide_layers(base, 16, 2)
    losses = {
        layer: made.trial(base.model_copy(update={"wide_layers": (layer,)}), 16).loss
        for layer in range(4)
    }
    first = min(losses, key=lambda layer: losses[layer])
    assert len(set(losses.values())) == 4  # each layer is another setting
    equal = policies.of_equal_reads(base.model_copy(update={"wide_layers": (first,)}), 4)
    assert (equal.budget, equal.wide_layers) == (96, ())
    worthwhile = losses[first] < made.trial(equal, 16).loss
    assert layers[:1] == ((first,) if worthwhile else ())
    assert worthwhile
    # Where one budget for all is better, there are none.
    trial = made.trial

    def no_layer_gains(config: DustinConfig, unit: int, *more: Any) -> search.Trial:
        return replace(trial(config, unit, *more), loss=1.0 if config.wide_layers else 0.5)

    made.trial = no_layer_gains  # type: ignore[method-assign]
    assert made.wide_layers(base, 16, 2) == ()


def test_the_search_ends_with_wide_layers_if_asked(
    pair: tuple[Model, Model], scores: Scores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search.Search, "wide_layers", lambda self, base, unit, most: (3, 1)[:most])
    made = made_search(pair, scores, tmp_path)
    found = made.run(config(budget=96), 2, seed=0, most_layers=1, most_wide=2)
    assert found.chosen.config.wide_layers == (1, 3)
    assert found.chosen not in found.trials
    profile = report.profile_data(*pair, found, False, "here")
    assert profile["settings"]["wide_layers"] == [1, 3]
    plain = made.run(config(budget=96), 2, seed=0, most_layers=1)
    assert plain.chosen.config.wide_layers == ()
    assert "wide_layers" not in report.profile_data(*pair, plain, False, "here")["settings"]


def test_wide_layers_read_their_own_selection_in_a_trial(
    pair: tuple[Model, Model], scores: Scores, tmp_path: Path
) -> None:
    made = made_search(pair, scores, tmp_path)
    wanted = config(budget=64, wide_layers=[1, 2], wide_budget=128)
    first, second = policies.select_groups(scores, made.settings(wanted, 16))
    assert second is not None
    for index, item in enumerate(scores.items):
        narrow, wide = first[index], second[index]
        assert narrow is not None
        assert wide is not None
        assert (len(narrow), len(wide)) == (4, 8)
        assert item.context // 16 > 8
    kl = made.evaluator.measure(first, 16, second, {1, 2}).kl
    assert made.trial(wanted, 16).window_kl == tuple(policies.by_window(scores, kl).tolist())
    other = made.evaluator.measure(first, 16, second, {0, 2}).kl
    assert not torch.equal(kl, other)


def test_the_report_holds_wide_layers_against_one_budget() -> None:
    chosen = config(budget=512, lookahead=256, wide_layers=[1, 2], wide_budget=2048)
    rows = {row.name: row for row in report.variants(chosen, config(), 24)}
    equal = rows["one budget of 640 for all layers"]
    assert (equal.over, equal.config.budget, equal.config.lookahead) == ("hybrid", 640, 320)
    assert equal.config.wide_layers == ()
    assert rows["without wide layers"].config.budget == 512
    assert rows["split"].config.wide_layers == ()
    assert rows["history only"].over == "without wide layers"


def test_the_queries_of_a_fresh_layer_select_in_a_trial(
    pair: tuple[Model, Model], scores: Scores, tmp_path: Path
) -> None:
    """The first layer's queries are those of the trace, whatever is selected."""
    made = made_search(pair, scores, tmp_path)
    for unit, heads_ in ((16, None), (1, [1, 2])):
        heads = [{"layer": 0, "heads": heads_}]
        wanted = config(budget=128, fresh_layers=(0,), target_heads=heads)
        expected: policies.Selections = []
        for item in scores.items:
            trace, n = scores.traces[item.trace], item.context
            rows = trace.row_indices(n, n + GAMMA)
            keys = trace.target_keys[0, :, : n + GAMMA + 1].transpose(0, 1)
            queries, chosen = trace.target_queries[0, rows], list(heads_ or range(4))
            mass = reference.token_scores(
                queries[:, chosen],
                keys[:, [head // 2 for head in chosen]],
                float(trace.target_scales[0]),
            )
            units = reference.unit_scores(mass, n, unit).tolist()
            kept = reference.select_units(units, units, n, unit, 128 // unit, 4, 16, "fill", 0, 0.0)
            expected.append(torch.tensor(kept))
        kl = made.evaluator.measure(expected, unit).kl
        assert made.trial(wanted, unit).window_kl == pytest.approx(
            policies.by_window(scores, kl).tolist(), rel=1e-4
        )


def test_a_fresh_layer_must_lower_kl_by_enough(
    pair: tuple[Model, Model], scores: Scores, tmp_path: Path
) -> None:
    made = made_search(pair, scores, tmp_path)
    base = made.trial(config(budget=96), 16)
    losses = {}
    for layer in range(4):
        losses[layer] = made.trial(config(budget=96, fresh_layers=(layer,)), 16).loss
    best = min(losses, key=lambda layer: losses[layer])
    found = made.fresh_layers(replace(base, loss=2 * losses[best]), 1)
    assert (found.config.fresh_layers, found.loss) == ((best,), losses[best])
    assert found.config.target_heads == base.config.target_heads
    same = replace(base, loss=losses[best])
    assert made.fresh_layers(same, 1) is same
    pairs = [tuple(sorted((best, layer))) for layer in range(4) if layer != best]
    seconds = {pair: made.trial(config(budget=96, fresh_layers=pair), 16).loss for pair in pairs}
    winner = min(pairs, key=lambda pair: seconds[pair])
    enough = seconds[winner] <= search.WORTHWHILE * losses[best]
    two = made.fresh_layers(replace(base, loss=2 * losses[best]), 2)
    assert two.config.fresh_layers == (winner if enough else (best,))


def test_the_search_ends_with_a_fresh_layer_if_asked(
    pair: tuple[Model, Model], scores: Scores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        search.Search,
        "fresh_layers",
        lambda self, base, most: replace(
            base, config=base.config.model_copy(update={"fresh_layers": (2,)[:most]})
        ),
    )
    made = made_search(pair, scores, tmp_path)
    found = made.run(config(budget=96), 2, seed=0, most_layers=1, most_fresh=1)
    assert report.profile_data(*pair, found, False, "here")["settings"]["fresh_layers"] == [2]
    plain = made.run(config(budget=96), 2, seed=0, most_layers=1)
    assert "fresh_layers" not in report.profile_data(*pair, plain, False, "here")["settings"]
    rows = {row.name: row for row in report.variants(found.chosen.config, config(), 4)}
    assert rows["hybrid"].config.fresh_layers == (2,)
    assert rows["without fresh layers"].config.fresh_layers == ()
    assert rows["history only"].over == "without fresh layers"
    assert not any(row.config.fresh_layers for row in rows.values() if row.name != "hybrid")


def trial(loss: float, scoring: int, kl: tuple[float, ...]) -> search.Trial:
    return search.Trial(config(), 16, loss, scoring, kl)


def test_the_cheapest_of_equals_is_chosen() -> None:
    best = trial(0.100, 900, (0.1, 0.1, 0.1, 0.1))
    cheap_and_as_good = trial(0.105, 300, (0.08, 0.13, 0.1, 0.11))
    cheap_and_worse = trial(0.130, 100, (0.13, 0.13, 0.13, 0.13))
    # Large scatter must not pass for equality.
    cheap_and_broken = trial(0.275, 100, (0.05, 0.05, 0.1, 0.9))
    trials = [best, cheap_and_as_good, cheap_and_worse, cheap_and_broken]
    assert search.choose(trials) is cheap_and_as_good
    assert search.choose([best, trial(0.106, 300, (0.106,) * 4)]) is best


def test_layers_with_retrieval_heads_are_tried() -> None:
    found = heads.HeadScores(torch.zeros(12, 8), 1, 1, 1)
    found.scores[11, 5] = 3
    recovered = {layer: 1 - layer / 100 for layer in range(12)}
    listed = search._short_list(list(range(12)), recovered, found)
    assert {0, 1, 2, 3, 11} <= set(listed)
    assert len(listed) < 12


def test_loss_weighs_kinds_equally(
    pair: tuple[Model, Model], traces: list[Trace], tmp_path: Path
) -> None:
    three = [traces[0], traces[0], traces[1]]  # prose, prose, copy
    items = Scores(three, [Item(i, POSITIONS[0]) for i in range(3)], GAMMA)
    made = made_search(pair, items, tmp_path)
    assert made.loss(torch.tensor([0.1, 0.3, 1.0])) == pytest.approx(0.6)


# ---- report, profile, command -------------------------------------------------------------


def test_intervals() -> None:
    values = torch.tensor([0.0, 1.0] * 20)
    found = report.interval(values, 0)
    assert found["mean"] == 0.5
    assert 0.3 < found["low"] < 0.45
    assert 0.55 < found["high"] < 0.7
    assert found == report.interval(values, 0)
    one = report.interval(torch.tensor([0.25]), 0)
    assert one["low"] == one["high"] == 0.25


def test_rows_of_the_quality_table_are_what_they_say(
    pair: tuple[Model, Model], scores: Scores, tmp_path: Path
) -> None:
    def resolve(wanted: DustinConfig, unit: int) -> Settings:
        return policies.settings_for(wanted, unit, GAMMA, pair[0].shape, pair[1].shape)

    chosen = config(budget=96, merge="weighted", lookahead_weight=0.9, dilate_history=False)
    default = config(budget=96)
    measured = evaluator(pair, scores, tmp_path)
    made = report.quality_rows(resolve, scores, measured, (chosen, 16), default, 0)
    rows = {row["name"]: row for row in made}
    split = resolve(chosen.model_copy(update={"merge": "split"}), 16)
    default_split = resolve(default.model_copy(update={"merge": "split"}), 16)
    first, deep = policies.select_groups(scores, split)
    halves: list[policies.Signal] = ["first half's oracle", "deeper half's oracle"]
    oracles = [policies.select(scores, split, signal) for signal in halves]
    expected: dict[str, tuple[policies.Selections, policies.Selections | None]] = {
        "hybrid": (policies.select(scores, resolve(chosen, 16)), None),
        "default settings": (policies.select(scores, resolve(default, 16)), None),
        "split": (first, deep),
        "split, halves exchanged": (deep or [], first),
        "default settings, split": policies.select_groups(scores, default_split),
        "oracle of each half": (oracles[0], oracles[1]),
        "agreeing draft rows": (
            policies.select(scores, resolve(chosen, 16), "agreeing rows"),
            None,
        ),
        "default settings, confirmed draft rows": (
            policies.select(scores, resolve(default, 16), "confirmed rows"),
            None,
        ),
    }
    means = {}
    for name, (selections, deeper) in expected.items():
        kl = measured.measure(selections, 16, deeper, {2, 3}).kl
        means[name] = float(kl.mean())
        assert rows[name]["mean"] == pytest.approx(means[name], rel=1e-5), name
        recovered = policies.recovery(scores, selections, 16, deeper).mean()
        assert rows[name]["recovery"]["mean"] == pytest.approx(float(recovered), rel=1e-5)
    assert len(set(means.values())) == len(means)  # no two could be taken for one another


def test_settings_at_another_budget() -> None:
    moved = policies.at_budget(config(budget=512, lookahead=128, recent=256, sinks=64), 128)
    assert (moved.budget, moved.lookahead, moved.recent, moved.sinks) == (128, 32, 64, 32)
    assert policies.at_budget(config(budget=512), 128).lookahead is None
    assert policies.at_budget(config(budget=512, wide_budget=2048), 128).wide_budget == 512


def options(target: Path, draft: Path, folder: Path, **change: Any) -> run.Options:
    made = run.Options(
        target=target,
        draft=draft,
        output=folder / "pair.json",
        work=folder / "work",
        context=320,
        budget=96,
        unit=16,
        windows=4,
        held_out=4,
        steps=2,
        needles=2,
        trials=3,
        layers=2,
    )
    return replace(made, **change)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tokenizer:
        @staticmethod
        def encode(text_: str, **_: Any) -> list[int]:
            return encode(text_)

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda path: Tokenizer)


def test_a_whole_run_writes_a_profile_that_is_accepted(
    target: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    seen: dict[str, tuple[int, int]] = {}

    def advance(what: str, done: int, total: int) -> None:
        seen[what] = (done, total)

    files, data = run.calibrate(options(target, draft, tmp_path), advance)
    assert {"target heads", "draft heads", "selection parameters"} <= set(seen)
    assert {"report: quality", "report: recovery"} <= set(seen)
    assert all(done == total for done, total in seen.values())

    profile = load_profile(str(files.profile))
    assert isinstance(profile, Profile)
    assert profile.calibrated
    assert profile.match == PairShape(
        *(
            ModelShape(**{k: v for k, v in data["models"][side].items() if k in MODEL_FIELDS})
            for side in ("target", "draft")
        )
    )
    assert "KL to dense" in profile.source
    parsed = DustinConfig.model_validate(profile.settings)
    assert parsed.budget == 96
    assert parsed.target_heads is not None
    assert all(isinstance(entry, ScoringLayer) for entry in parsed.target_heads)

    assert json.loads(files.report.read_text())["quality"] == data["quality"]
    for text_ in (files.profile.read_text(), files.report.read_text()):
        assert str(tmp_path) not in text_
    for figure in (files.recovery, files.differences, files.heads):
        assert figure is not None
        assert figure.read_bytes().startswith(b"\x89PNG")

    names = [row["name"] for row in data["quality"]]
    assert {"hybrid", "history only", "lookahead only", "default settings", "oracle"} <= set(names)
    shown = {(row["unit"], row["budget"], row["policy"]) for row in data["recovery"]}
    assert len(shown) == 3 * len(report.BUDGETS) * len(report.POLICIES)
    by_policy = {
        row["policy"]: row["mean"]
        for row in data["recovery"]
        if (row["unit"], row["budget"]) == (1, 128)
    }
    assert by_policy["oracle"] >= max(by_policy.values())
    whole = [r["mean"] for r in data["recovery"] if r["budget"] == 512]  # covers the context
    assert whole == [1.0] * len(whole)

    assert (data["complete"], data["cut_short"]) == (True, [])
    assert data["measurements_reused"] == 0

    rows = {row["name"]: row for row in data["quality"]}
    assert len(rows) == len(data["quality"])
    assert [name for name, row in rows.items() if "difference" not in row] == ["hybrid"]
    for row in rows.values():
        if "difference" in row:
            difference = row["mean"] - rows[row["over"]]["mean"]
            assert row["difference"]["mean"] == pytest.approx(difference, abs=1e-9)
    assert rows["default settings, split"]["over"] == "default settings"
    for entry in data["recovery"]:
        if entry["policy"] == "hybrid":
            key = (entry["unit"], entry["budget"])
            oracle = next(
                e["mean"]
                for e in data["recovery"]
                if (e["unit"], e["budget"], e["policy"]) == (*key, "oracle")
            )
            assert entry["gap"]["mean"] == pytest.approx(oracle - entry["mean"], abs=1e-6)

    # A report on the profile, with nothing searched, says the same about the same windows.
    (tmp_path / "given").mkdir()
    given = options(target, draft, tmp_path / "given", settings=str(files.profile))
    files_given, data_given = run.calibrate(given, advance)
    assert data_given["quality"] == data["quality"]
    assert data_given["recovery"] == data["recovery"]
    assert data_given["options"]["settings"] == "pair.json"
    chosen = ("unit", "scoring_bytes_per_token")
    assert {k: data_given["chosen"][k] for k in chosen} == {k: data["chosen"][k] for k in chosen}
    assert not {"heads", "trials", "layers"} & set(data_given)
    written = {path.name for path in (tmp_path / "given").iterdir()}
    assert written == {"pair.report.json", "pair.recovery.png", "pair.differences.png", "work"}
    assert (files_given.profile, files_given.heads) == (None, None)
    assert len(list((tmp_path / "given" / "work").glob("trace-*.safetensors"))) == 4

    _, again = run.calibrate(options(target, draft, tmp_path), advance)
    assert again["quality"] == data["quality"]
    assert again["chosen"] == data["chosen"]
    assert again["measurements_reused"] > 0
    # No window of the search is in the report.
    assert len(list((tmp_path / "work").glob("trace-*.safetensors"))) == 8


def test_a_time_limit_leaves_a_smaller_report(
    target: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    wanted = options(
        target, draft, tmp_path, windows=8, held_out=8, max_seconds=1e-6, figures=False
    )
    files, data = run.calibrate(wanted, lambda *_: None)
    assert not data["complete"]
    assert {
        *("target heads", "draft heads", "recording for the search", "selection parameters"),
        *("recording for the report", "report: quality", "report: recovery"),
    } <= set(data["cut_short"])
    assert (data["search_windows"], data["held_out_windows"]) == (4, 4)
    assert data["heads"]["target"]["trials"] == data["heads"]["draft"]["trials"] == 1
    assert [row["name"] for row in data["quality"]] == ["hybrid", "default settings"]
    assert data["recovery"] == []
    assert files.profile is not None
    source = load_profile(str(files.profile)).source
    assert "4 windows of 320 tokens for the search and 4 held out" in source
    assert "1 trials, seed 0, cut short by a time limit." in source
    assert json.loads(files.report.read_text()) == json.loads(json.dumps(data))
    assert not list(tmp_path.glob("*.png"))


def test_an_interrupted_report_is_there_as_far_as_it_came(
    target: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    profile = tmp_path / "given.json"
    settings = {"budget": 64, "recent": 16, "merge": "split", "granularity": "token"}
    profile.write_text(
        json.dumps(
            dict(format=1, target="t", draft="d", calibrated=True, source="", settings=settings)
        )
    )

    def advance(what: str, done: int, total: int) -> None:
        if (what, done) == ("report: quality", 4):
            raise KeyboardInterrupt

    wanted = options(target, draft, tmp_path, settings=str(profile), figures=False)
    with pytest.raises(KeyboardInterrupt):
        run.calibrate(wanted, advance)
    data = json.loads((tmp_path / "pair.report.json").read_text())
    assert not data["complete"]
    assert [row["name"] for row in data["quality"]] == [
        *("hybrid", "default settings", "oracle", "one selection for all layers"),
    ]
    assert data["chosen"]["unit"] == 1
    # At the budget that was asked for, not at the profile's.
    assert data["chosen"]["settings"]["budget"] == data["default"]["settings"]["budget"] == 96
    assert run.given_settings(str(profile)).budget == 64
    assert not (tmp_path / "pair.json").exists()


def test_wrong_options_are_refused(target: Path, draft: Path, tmp_path: Path) -> None:
    for change, message in (
        ({"output": tmp_path / "pair.yaml"}, "output=.*must end in .json"),
        ({"output": tmp_path / "none" / "pair.json"}, "no such folder"),
        ({"settings": str(tmp_path / "pair.json")}, "output=.*is the profile that is reported on"),
        ({"settings": "none"}, "neither a shipped profile"),
        ({"max_seconds": 0}, "max_seconds=0: must be more"),
        ({"budget": 300}, "budget=300: covers the context of 320"),
        ({"windows": 2}, "windows=2"),
        ({"dtype": "int8"}, "dtype=int8: choose"),
        ({"wide": 2, "fresh": 1}, "wide=2, fresh=1: .*ask for one"),
        ({"target": tmp_path}, "target=.*no config.json"),
        ({"context": 8192, "budget": 512}, "context=8192: target=.*at most 4096"),
    ):
        wrong = replace(options(target, draft, tmp_path), **change)
        with pytest.raises((CalibrationError, ConfigError), match=message):
            run.calibrate(wrong, lambda *_: None)
    if not torch.cuda.is_available():
        with pytest.raises(CalibrationError, match="device=cuda"):
            run.check(options(target, draft, tmp_path, device="cuda"))


def test_a_pair_that_does_not_fit_is_refused(pair: tuple[Model, Model], tmp_path: Path) -> None:
    large = replace(pair[1], shape=replace(pair[1].shape, vocab_size=VOCAB + 1))
    with pytest.raises(CalibrationError, match="vocabulary of 513 exceeds the target's 512"):
        models.check_pair(pair[0], large, 100, GAMMA)
    folder = write_tiny_qwen2(
        tmp_path / "window",
        layers=4,
        use_sliding_window=True,
        sliding_window=64,
        max_window_layers=2,
    )
    with pytest.raises(CalibrationError, match="sliding_attention"):
        models.load_model(folder, "cpu", "auto", "target")


def test_command_says_what_is_wrong(tmp_path: Path) -> None:
    runner = CliRunner()
    done = runner.invoke(
        cli.app, [str(tmp_path), str(tmp_path), "--output", str(tmp_path / "pair.json")]
    )
    assert done.exit_code == 2
    assert "no config.json there" in done.output
    assert not (tmp_path / "pair.json").exists()


def test_only_what_a_command_needs_must_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = CliRunner()
    start = [str(tmp_path), str(tmp_path), "--output", str(tmp_path / "pair.json")]
    given = ["--settings", "qwen2.5-coder-0.5b-instruct+qwen2.5-coder-0.5b-draft4"]
    monkeypatch.setitem(sys.modules, "optuna", None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for more, code, message in (
        (["--no-figures"], 1, "optuna is not installed"),
        (given, 1, "matplotlib is not installed"),
        ([*given, "--no-figures"], 2, "no config.json there"),
        (["--settings", "none", "--no-figures"], 2, "neither a shipped profile"),
    ):
        done = runner.invoke(cli.app, [*start, *more])
        assert (done.exit_code, message in done.output) == (code, True), done.output


def test_the_command_reports_at_the_budget_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = tmp_path / "given.json"
    profile.write_text(
        json.dumps(
            dict(
                format=1,
                target="t",
                draft="d",
                calibrated=True,
                source="",
                settings={"budget": 300},
            )
        )
    )
    seen: list[run.Options] = []
    row = {"name": "hybrid", "mean": 0.1, "low": 0.05, "high": 0.2, "recovery": {"mean": 0.5}}
    other = {**row, "name": "split", "over": "hybrid", "difference": row}

    def calibrate(options: run.Options, advance: Any) -> tuple[run.Files, dict[str, Any]]:
        seen.append(options)
        return run.Files.of(options), {"quality": [row, other], "cut_short": ["report: recovery"]}

    monkeypatch.setattr(run, "calibrate", calibrate)
    start = ["a", "b", "--output", str(tmp_path / "pair.json")]
    given = ["--settings", str(profile)]
    for more, budget in (([], 512), (given, 300), ([*given, "--budget", "128"], 128)):
        done = CliRunner().invoke(cli.app, [*start, *more], env={"COLUMNS": "200"})
        assert done.exit_code == 0, done.output
        assert seen[-1].budget == budget
        assert ("profile: " in done.output) == (not more)
        assert "cut short by --max-seconds: report: recovery" in done.output
        assert "0.1000 [0.0500, 0.2000]" in done.output
        assert "+0.1000 [+0.0500, +0.2000]" in done.output
