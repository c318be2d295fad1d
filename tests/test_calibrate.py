# SPDX-License-Identifier: Apache-2.0
"""``dustin calibrate`` on tiny random models: exactness of what it measures, and a whole run."""

from __future__ import annotations

import json
import math
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


def test_settings_at_another_budget() -> None:
    moved = report.at_budget(config(budget=512, lookahead=128, recent=256, sinks=64), 128)
    assert (moved.budget, moved.lookahead, moved.recent, moved.sinks) == (128, 32, 64, 32)
    assert report.at_budget(config(budget=512), 128).lookahead is None


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


def test_a_whole_run_writes_a_profile_that_is_accepted(
    target: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tokenizer:
        @staticmethod
        def encode(text_: str, **_: Any) -> list[int]:
            return encode(text_)

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda path: Tokenizer)
    seen: dict[str, tuple[int, int]] = {}

    def advance(what: str, done: int, total: int) -> None:
        seen[what] = (done, total)

    files, data = run.calibrate(options(target, draft, tmp_path), advance)
    assert {"target heads", "draft heads", "selection parameters", "report"} <= set(seen)
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
    for figure in (files.recovery, files.heads):
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

    _, again = run.calibrate(options(target, draft, tmp_path), advance)
    assert again["quality"] == data["quality"]
    assert again["chosen"] == data["chosen"]
    assert again["measurements_reused"] > 0
    # No window of the search is in the report.
    assert len(list((tmp_path / "work").glob("trace-*.safetensors"))) == 8


def test_wrong_options_are_refused(target: Path, draft: Path, tmp_path: Path) -> None:
    for change, message in (
        ({"output": tmp_path / "pair.yaml"}, "output=.*must end in .json"),
        ({"output": tmp_path / "none" / "pair.json"}, "no such folder"),
        ({"budget": 300}, "budget=300: covers the context of 320"),
        ({"windows": 2}, "windows=2"),
        ({"dtype": "int8"}, "dtype=int8: choose"),
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
