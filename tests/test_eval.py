# SPDX-License-Identifier: Apache-2.0
"""``dustin eval`` and ``dustin trace``: tasks, teacher forcing, reports, the commands."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import GAMMA, generate, runtime_of, tokens, write_layer_dropped, write_tiny_qwen2
from test_engine import rows_to_keys
from test_policies import UNIT, Watcher, select
from typer.testing import CliRunner

from dustin_vllm import provenance
from dustin_vllm.calibrate import models
from dustin_vllm.calibrate.attention import SparseRows, active
from dustin_vllm.calibrate.policies import kept_positions
from dustin_vllm.calibrate.text import Sources
from dustin_vllm.cli import app
from dustin_vllm.eval import engine, forcing, report, run, tasks
from dustin_vllm.eval import trace as tracing
from dustin_vllm.eval.engine import Configuration, Evaluation
from dustin_vllm.eval.tasks import EvalError, Maker, Sample
from dustin_vllm.runtime import Selected

SPARSE = {"budget": 160, "recent": 32, "sinks": 4, "draft_graphs": False}

# ---- scores -------------------------------------------------------------------------------


def test_common_subsequence_equals_brute_force():
    def slow(a: list[int], b: list[int]) -> int:
        if not a or not b:
            return 0
        if a[-1] == b[-1]:
            return 1 + slow(a[:-1], b[:-1])
        return max(slow(a[:-1], b), slow(a, b[:-1]))

    rng = random.Random(0)
    for _ in range(200):
        a, b = ([rng.randrange(3) for _ in range(rng.randrange(8))] for _ in range(2))
        assert tasks.common_subsequence(a, b) == slow(a, b)


def test_scores_of_single_samples():
    def of(task: str, output: str, answer: str, dense: str = "") -> float:
        sample = Sample("x", task, 8, [], 8, answer)
        ids = [list(text.encode()) for text in (output, dense)]
        return tasks.score(sample, *ids, lambda ids: bytes(ids).decode())

    assert of("passkey", " 12345678. And", "12345678") == 1
    assert of("passkey", " the code is 12345678", "12345678") == 1
    assert of("multikey", " 123456789", "12345678") == 0
    assert of("passkey", " none", "12345678") == 0
    assert of("qa", " dry and hot\nAgain", "hot, dry") == pytest.approx(4 / 5)
    assert of("qa", "\n\n hot\ncold", "hot") == 1
    assert of("qa", "wet", "hot, dry") == 0
    assert of("copy", "a b c d", "a b x d") == pytest.approx(3 / 4)
    assert of("copy", "", "a") == 0
    assert of("edit", "return  x", "return x") == 1
    assert of("agreement", "abcdef", "", "abcxef") == 0.5
    assert of("agreement", "abc", "", "abc") == 1
    assert of("summary", "The cat sat.", "", "the Cat, sat down") == pytest.approx(6 / 7)


# ---- samples ------------------------------------------------------------------------------

FUNCTION = """def total_of_{0}(values):
    result = 0
    for value in values:
        if value is not None and value >= {0}:
            result += value * {0}
    # the answer is known to be right for all integers that were tried
    return result

"""
SOURCES = Sources(
    prose="\n".join(f"Line {i} tells of the {i * 7 % 97}th of many days." for i in range(400)),
    code="".join(FUNCTION.format(i) for i in range(60))
    # Names that stand for two functions are not asked for, nor short ones.
    + 2 * FUNCTION.format(7)
    + FUNCTION.replace("total_of", "sum").format(8)
    + "LAST = 1\n",
    facts=tuple(
        (f"Land {i}", (("climate", f"dry, hot and {i}"), ("area", f"{i} square miles")))
        for i in range(40)
    ),
)


def maker(sources: Sources = SOURCES, max_id: int = 256, seed: int = 0) -> Maker:
    """A byte is a token."""

    def decode(ids: Any) -> str:
        return bytes(ids).decode()

    def chat(message: str) -> str:
        return f"<user>{message}</user><model>"

    return Maker(sources, lambda text: list(text.encode()), decode, chat, max_id, seed)


@pytest.mark.parametrize("task", tasks.TASKS)
def test_prompts_are_as_long_as_asked_for_and_reproducible(task):
    made = maker().samples(task, 2048, 4, 64)
    assert [len(sample.prompt) for sample in made] == [2048] * 4
    assert made == maker().samples(task, 2048, 4, 64)
    assert made != maker(seed=1).samples(task, 2048, 4, 64)
    assert len({sample.name for sample in made}) == 4
    assert all(sample.max_tokens > 0 and sample.task == task for sample in made)
    assert all((task in tasks.FORCED) == bool(sample.text) for sample in made)


@pytest.mark.parametrize("task", ["passkey", "multikey"])
def test_codes_stand_once_at_depths_from_start_to_end(task):
    made = maker().samples(task, 2048, 4, 64)
    for sample, depth in zip(made, (0.125, 0.375, 0.625, 0.875), strict=True):
        text = bytes(sample.prompt).decode()
        assert text.count(sample.answer) == 1
        assert sample.depth == depth
        assert len(re.findall(r"entry code of the [a-z ]+ in \w+ is \d{8}\.", text)) == (
            1 if task == "passkey" else tasks.KEYS
        )
        place = re.search(rf"entry code of the ([a-z ]+ in \w+) is {sample.answer}\.", text)[1]
        assert text.endswith(f"Answer: the entry code of the {place} is")
        assert sample.max_tokens > len(sample.answer)
    if task == "passkey":
        places = [bytes(s.prompt).decode().index(s.answer) / 2048 for s in made]
        assert places == sorted(places)
        assert places[0] < 0.2
        assert places[-1] > 0.75


def test_questions_about_records_have_their_answer_in_the_prompt():
    for sample in maker().samples("qa", 2048, 4, 64):
        text = bytes(sample.prompt).decode()
        name = re.search(r"Again, (Land \d+ \| \w+):$", text)[1]
        assert text.count(f"\n{name}: {sample.answer}") == 1
    with pytest.raises(EvalError, match="no records in the text"):
        maker(Sources("a", "b")).samples("qa", 512, 1, 64)


def test_copied_passages_and_edited_functions_stand_far_back():
    for sample in maker().samples("copy", 2048, 4, 64):
        text = bytes(sample.prompt).decode()
        number, start = re.search(
            r"=== Passage (\d+), once more, word for word ===\n(.+)$", text, re.S
        ).groups()
        passage = re.search(
            rf"=== Passage {number} ===\n(.*)\n=== End of passage {number}", text, re.S
        )[1]
        assert passage == start + sample.answer
        assert sample.depth < 0.75
        assert text.index(passage) < 2048 * 0.8
    for sample in maker().samples("edit", 2048, 4, 64):
        text = bytes(sample.prompt).decode()
        old = re.search(r"# (\w+) again, renamed", text)[1]
        assert old.startswith("total_of_")
        assert old != "total_of_7"
        function = FUNCTION.format(old.removeprefix("total_of_"))
        assert function.rstrip() in text[: 2048 * 4 // 5]
        changed = function.replace(old, f"{old}_v2").rstrip() + "\n"
        assert f"def {old}_v2({sample.answer}" == changed
        assert text.endswith(f"\ndef {old}_v2(")
    with pytest.raises(EvalError, match="no functions in the text"):
        maker(Sources("a", "b")).samples("edit", 512, 1, 64)


def test_continuations_are_the_texts_own():
    whole = (SOURCES.prose + SOURCES.code).encode()
    for task in tasks.FORCED:
        for sample in maker().samples(task, 512, 3, 100):
            assert bytes(sample.prompt + sample.text) in whole
            assert len(sample.text) == sample.max_tokens == 100


def test_a_summary_is_asked_for_in_the_models_own_words():
    sample = maker().samples("summary", 512, 1, 64)[0]
    text = bytes(sample.prompt).decode()
    assert text.startswith("<user>")
    assert text.endswith("Summarise the text above in a few sentences.</user><model>")
    assert sample.ends
    plain = Maker(SOURCES, lambda t: list(t.encode()), lambda ids: "", None, 256, 0)
    assert bytes(plain.samples("summary", 512, 1, 64)[0].prompt).decode().endswith("Summary:")


def test_text_that_does_not_suffice_is_refused():
    with pytest.raises(EvalError, match="but a sample needs 50100; give longer text"):
        maker().samples("continuation", 50_000, 1, 100)
    with pytest.raises(EvalError, match="makes token .*, but the draft knows only 90"):
        maker(max_id=90).samples("continuation", 500, 1, 100)
    with pytest.raises(EvalError, match="context=128: too short for the task"):
        maker().samples("passkey", 128, 1, 100)


# ---- teacher forcing ----------------------------------------------------------------------


def test_divergence_is_the_kl_of_lumped_events(monkeypatch):
    monkeypatch.setattr(forcing, "TOP", 5)
    generator = torch.Generator().manual_seed(0)
    dense, sparse = (
        (2 * torch.randn(3, 40, generator=generator)).log_softmax(-1) for _ in range(2)
    )
    kept = forcing.Dense.empty(8, 40, torch.device("cpu"))
    places = torch.tensor([6, 1, 4])
    kept.record(places, dense)
    found = kept.divergence(places, sparse)
    assert torch.equal(kept.top[places], dense.argmax(-1))
    for row in range(3):
        top = dense[row].argsort(descending=True)[:5]
        p, q = dense[row].exp().double(), sparse[row].exp().double()
        events = [(float(p[i]), float(q[i])) for i in top]
        events.append((1 - sum(a for a, _ in events), 1 - sum(b for _, b in events)))
        wanted = sum(a * math.log(a / b) for a, b in events)
        assert float(found[row]) == pytest.approx(wanted, rel=1e-3)
        full = float((p * (dense[row] - sparse[row]).double()).sum())
        assert wanted < full
    assert kept.divergence(places, dense).max() < 1e-5


class Growing(SparseRows):
    """Also keeps the keys and values that the new tokens leave behind."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor) -> None:
        super().__init__([(keys, values)], [kept])
        self.new: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(self, layer, queries, keys, values, scale):
        self.new[layer] = (keys[0], values[0])
        return super().attend(layer, queries, keys, values, scale)


@torch.inference_mode()
def reference_logits(
    model: models.Model, prompt: list[int], text: list[int], units: dict[int, list[int]]
) -> torch.Tensor:
    """[len(text), V]: what verification steps of gamma + 1 tokens say, by transformers.

    Args:
        units: selected units by context; what is missing is read whole.
    """
    done = models.prefill(model, prompt, (len(prompt) - 1,), (len(prompt) - 1,))
    keys, values, rows = done.keys, done.values, [done.logits]
    for first in range(0, len(text) - 1, GAMMA + 1):
        ids = text[first : first + GAMMA + 1]
        context = len(prompt) + first
        chosen = units.get(context)
        kept = kept_positions(None if chosen is None else torch.tensor(chosen), context, UNIT)
        plan = Growing(keys, values, kept)
        places = torch.arange(context, context + len(ids))[None]
        with active(plan):
            output = model.module(
                input_ids=torch.tensor([ids]), position_ids=places, use_cache=False
            )
        rows.append(output.logits[0])
        layers = range(model.shape.layers)
        keys = torch.cat([keys, torch.stack([plan.new[i][0] for i in layers])], dim=2)
        values = torch.cat([values, torch.stack([plan.new[i][1] for i in layers])], dim=2)
    return torch.cat(rows)[: len(text)].log_softmax(-1)


FORCED = [
    Sample("continuation/300/0", "continuation", 300, tokens(0, 300), 63, text=tokens(50, 63)),
    Sample("drift/417/0", "drift", 417, tokens(1, 417), 40, text=tokens(51, 40)),
]
FREE = Sample("agreement/280/0", "agreement", 280, tokens(2, 280), 32)


@pytest.mark.engine
@pytest.mark.parametrize("policy", ["dustin", "streaming"])
def test_forced_verification_equals_transformers(make_llm, target, draft, monkeypatch, policy):
    """Two known continuations and one free request, verified together, step by step."""
    monkeypatch.setattr(engine, "BIN", 1)
    expected = generate(make_llm(target, draft, SPARSE), [FREE.prompt])
    llm = make_llm(target, draft, SPARSE)
    evaluation = Evaluation(llm, [*FORCED, FREE], with_oracle=False)
    dense = evaluation.run(Configuration("dense", 160))
    assert dense["stats"]["sparse_rows"] == 0
    watcher = Watcher(monkeypatch)
    result = evaluation.run(Configuration(policy, 160))
    made = {(m.prompt, m.context): m.units for m in watcher.made}
    model = models.load_model(target, "cpu", "float32", "target")
    for sample in FORCED:
        whole = [*sample.prompt, *sample.text]
        places = tuple(range(len(sample.prompt) - 1, len(whole) - 1))
        true = models.prefill(model, whole, places, places).logits.log_softmax(-1)
        units = {c: chosen for (prompt, c), chosen in made.items() if prompt == sample.context}
        said = reference_logits(model, sample.prompt, sample.text, units)
        assert [entry["first"] for entry in result["forced"][sample.name]] == list(
            range(1, len(sample.text))
        )
        wanted = torch.tensor(sample.text)[1:, None]
        for found, logs in ((dense, true), (result, said)):
            nll = torch.tensor([entry["nll"] for entry in found["forced"][sample.name]])
            torch.testing.assert_close(nll, -logs[1:].gather(1, wanted)[:, 0], atol=2e-4, rtol=2e-4)
        kl = torch.tensor([entry["kl"] for entry in result["forced"][sample.name]])
        exact = (true.exp() * (true - said)).sum(-1)[1:]
        torch.testing.assert_close(kl, exact, atol=1e-4, rtol=1e-2)
        assert kl.mean() > 0.005  # there is something to see
        same = [entry["same"] for entry in result["forced"][sample.name]]
        assert 0 < sum(same) < len(same)
        assert all(entry["kl"] < 1e-4 for entry in dense["forced"][sample.name])
        assert all(entry["same"] == 1 for entry in dense["forced"][sample.name])
        assert all(entry["sparse"] == 1 for entry in result["forced"][sample.name])
        # gamma + 1 known tokens a step, none of them refused.
        steps = -(-(len(sample.text) - 1) // (GAMMA + 1))
        contexts = sorted(c for prompt, c in made if prompt == sample.context)
        assert contexts[:steps] == [sample.context + i * (GAMMA + 1) for i in range(steps)]
    if policy == "dustin":
        assert result["outputs"] == {FREE.name: expected[0]}
    rows, accepted = result["accepted"]["rows"], result["accepted"]["tokens"]
    # The first token comes from prefill; the last step may confirm more than are asked for.
    assert rows < 31 <= accepted <= 31 + GAMMA


@pytest.mark.engine
def test_a_budget_that_covers_the_context_loses_nothing(make_llm, target, draft):
    llm = make_llm(target, draft, {**SPARSE, "budget": 1024})
    evaluation = Evaluation(llm, [*FORCED, FREE], with_oracle=True)
    dense = evaluation.run(Configuration("dense", 160))
    for policy in ("dustin", "quest", "static", "oracle"):
        result = evaluation.run(Configuration(policy, 1024))
        assert result["stats"]["sparse_rows"] == 0
        if policy == "oracle":
            assert result["outputs"] == {}
        else:
            assert result["outputs"] == dense["outputs"]
        for sample in FORCED:
            for entry, base in zip(
                result["forced"][sample.name], dense["forced"][sample.name], strict=True
            ):
                assert entry["nll"] == pytest.approx(base["nll"], abs=1e-4)
                assert entry["kl"] < 1e-4
                assert entry["same"] == 1


@pytest.mark.engine
def test_static_sees_the_prompt_in_spite_of_the_prefix_cache(make_llm, target, draft):
    found = []
    for caching in (True, False):
        llm = make_llm(target, draft, SPARSE, enable_prefix_caching=caching)
        evaluation = Evaluation(llm, [FORCED[0], FREE], with_oracle=False)
        evaluation.run(Configuration("dense", 160))
        result = evaluation.run(Configuration("static", 160))
        kl = [entry["kl"] for entry in result["forced"][FORCED[0].name]]
        found.append((result["outputs"], kl))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-4)


@pytest.mark.engine
def test_the_oracle_ranks_by_the_attention_to_come(make_llm, target, draft, monkeypatch):
    llm = make_llm(target, draft, SPARSE)
    sample = FORCED[0]
    evaluation = Evaluation(llm, [sample], with_oracle=True)
    watcher = Watcher(monkeypatch)
    queries: dict[str, dict[int, torch.Tensor]] = {}

    def remember(runtime, index, context):
        row = runtime.rows[0]
        targets = {n: q for n, q in watcher.target_queries.items() if not n.startswith("draft")}
        for name, kept in targets.items():
            for place in range(row.seq_len - row.context):
                queries.setdefault(name, {})[row.context + place] = kept[row.first_row + place]

    def brute_force(runtime, index, context):
        units = context // UNIT
        total = torch.zeros(units)
        for capture in runtime.target.captures:
            blocks = runtime._block_table[index][: -(-context // UNIT)]
            keys = rows_to_keys(capture.key_cache(), blocks, context)
            for head in capture.heads.tolist():
                own = keys[:, int(capture.kv_heads[head])]
                for place in range(context, min(context + GAMMA + 1, 300 + 63)):
                    query = queries[capture.layer.layer_name][place][head]
                    mass = (own @ query * capture.layer.impl.scale).softmax(0)
                    total += mass[: units * UNIT].view(units, UNIT).sum(1)
        return total.tolist()

    watcher.look = remember
    evaluation.run(Configuration("dense", 160))
    watcher.look = brute_force
    watcher.made.clear()
    best = evaluation.run(Configuration("oracle", 160))
    assert best["stats"]["sparse_rows"] == 13
    for made in watcher.made[:-1]:  # after the last step nothing will be verified
        assert made.units == select(made.scores, made.context)
    assert len(watcher.made) == 14
    watcher.look = lambda *_: None
    worst = evaluation.run(Configuration("streaming", 160))
    kl = [sum(e["kl"] for e in found["forced"][sample.name]) for found in (best, worst)]
    assert kl[0] < kl[1]


@pytest.mark.engine
def test_forcing_survives_preemption_and_skipped_proposals(make_llm, target, draft, monkeypatch):
    """Values do not depend on how the engine comes to them."""
    monkeypatch.setattr(engine, "BIN", 1)
    samples = [
        Sample(f"drift/{i}/0", "drift", i, tokens(i, i), 120, text=tokens(60 + i, 120))
        for i in (200, 207, 214, 221)
    ]
    small = {"num_gpu_blocks_override": 40, "max_model_len": 1024, "enable_prefix_caching": False}
    llm = make_llm(target, draft, SPARSE, **small)
    runner = runtime_of(llm).runner
    fits, calls = runner._input_fits_in_drafter, []
    monkeypatch.setattr(
        runner, "_input_fits_in_drafter", lambda m: calls.append(0) or (len(calls) % 7 and fits(m))
    )
    rough = Evaluation(llm, samples, with_oracle=False).run(Configuration("dense", 160))
    metrics = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    assert metrics["vllm:num_preemptions"] > 0
    smooth = Evaluation(make_llm(target, draft, SPARSE), samples, False)
    expected = smooth.run(Configuration("dense", 160))
    for sample in samples:
        found = {e["first"]: e["nll"] for e in rough["forced"][sample.name]}
        assert found == pytest.approx(
            {e["first"]: e["nll"] for e in expected["forced"][sample.name]}, abs=1e-3
        )


def test_forcing_refuses_async_scheduling():
    runner = type("Runner", (), {"use_async_scheduling": True})()
    with pytest.raises(RuntimeError, match="async_scheduling=False"):
        forcing.Forcing(runner, {}, False)


# ---- reports ------------------------------------------------------------------------------


def result(policy: str, scores: dict[str, float], forced: Any, budget: int = 512) -> Any:
    return {
        "configuration": {"policy": policy, "budget": budget, "granularity": "block"},
        "engine": 0,
        "scores": scores,
        "forced": forced,
    }


def curve(nll: list[float], kl: list[float]) -> list[dict[str, float]]:
    return [
        {"first": 1024.0 * i, "count": 1024.0 - (not i), "nll": n, "kl": k, "same": 1, "sparse": 1}
        for i, (n, k) in enumerate(zip(nll, kl, strict=True))
    ]


@pytest.fixture
def data() -> dict[str, Any]:
    samples = [
        {"name": f"{task}/{c}/{i}", "task": task, "context": c, "known_answer": task == "passkey"}
        for task, contexts in (("passkey", (64, 128)), ("agreement", (64,)), ("drift", (64,)))
        for c in contexts
        for i in range(2)
    ]
    full = {s["name"]: 1.0 for s in samples if s["task"] != "drift"}
    lossy = {**full, "passkey/64/0": 0.0, "passkey/128/1": 0.5, "agreement/64/0": 0.25}
    dense = {f"drift/64/{i}": curve([2.0, 2.0], [0, 0]) for i in range(2)}
    forced = {
        "drift/64/0": curve([2.1, 2.3], [0.1, 0.3]),
        "drift/64/1": curve([2.1, 2.1], [0.1, 0.2]),
    }
    made = {
        "samples": samples,
        "configurations": [
            result("dense", full, dense),
            result("dustin", lossy, forced),
            result("dustin", full, dense, 1024),
            result("oracle", {}, forced),
        ],
    }
    report.summarise(made)
    return made


def test_tables_say_what_the_samples_say(data):
    def entry(policy: str, task: str, context: int = 64, budget: int = 512) -> Any:
        wanted = (policy, budget, task, context)
        keys = ("policy", "budget", "task", "context")
        return next(e for e in data["table"] if tuple(e[k] for k in keys) == wanted)

    assert entry("dustin", "passkey")["mean"] == 0.5
    assert entry("dustin", "passkey")["loss"]["mean"] == 0.5
    assert entry("dustin", "passkey")["low"] == 0
    assert entry("dustin", "passkey", 128)["loss"]["mean"] == 0.25
    assert entry("dustin", "agreement")["mean"] == 0.625
    assert entry("dense", "passkey")["loss"] == {"mean": 0, "low": 0, "high": 0}
    averages = {(e["policy"], e["budget"]): e for e in data["averages"]}
    assert averages["dustin", 512]["tasks"] == 2  # agreement has no answer of its own
    assert averages["dustin", 512]["mean"] == pytest.approx((0.5 + 0.75) / 2)
    assert averages["dustin", 512]["loss"]["mean"] == pytest.approx(1 - (0.5 + 0.75) / 2)
    low, high = (averages["dustin", 512]["loss"][side] for side in ("low", "high"))
    assert 0 <= low < 0.375 < high <= 0.75
    assert averages["dustin", 1024]["loss"]["mean"] == 0
    assert ("oracle", 512) not in averages
    drift = entry("dustin", "drift")
    weights = [1023 / 2047, 1024 / 2047]
    nll = [weights[0] * 2.1 + weights[1] * second for second in (2.3, 2.1)]
    assert drift["perplexity"] == pytest.approx(math.exp(sum(nll) / 2))
    assert drift["increase"]["mean"] == pytest.approx(math.expm1(sum(nll) / 2 - 2))
    assert drift["kl"]["mean"] == pytest.approx(weights[0] * 0.1 + weights[1] * 0.25)
    found = next(e for e in data["drift"] if e["policy"] == "dustin" and e["budget"] == 512)
    assert [p["kl"]["mean"] for p in found["curve"]] == pytest.approx([0.1, 0.25])
    assert [p["nll_more"]["mean"] for p in found["curve"]] == pytest.approx([0.1, 0.2])
    assert found["rise"]["mean"] == pytest.approx(0.15)


def test_tables_and_figures_are_drawn(data, tmp_path):
    from rich.console import Console

    console = Console(width=200, record=True)
    for table in report.tables(data):
        console.print(table)
    shown = console.export_text()
    assert "dustin, budget 512, block" in shown
    assert "37.5 [" in shown  # average loss
    assert re.search(r"dustin, budget 1024.*drift.*0\.0000", shown)
    panels = report._panels(data)
    assert [title for title, *_ in panels] == [
        "average score",
        "passkey, 64: score",
        "passkey, 128: score",
        "agreement, 64: score",
        "drift, 64: KL to dense",
    ]
    assert [(e["budget"], v["mean"]) for e, v in panels[1][1]] == [(512, 0.5), (1024, 1.0)]
    assert panels[1][2] == 1.0  # dense
    report.draw(data, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    data["table"] = data["averages"] = data["drift"] = []
    report.draw(data, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_bins_leave_out_what_prefill_said():
    measured = {
        "position": [0, 1, 2, 1023, 1024],
        "sparse": [False, True, True, False, True],
        "nll": [9.0, 1.0, 2.0, 3.0, 4.0],
        "kl": [9.0, 0.0, 0.0, 0.3, 0.4],
        "same": [0, 1, 1, 0, 1],
    }
    first, second = engine.bins(measured)
    assert (first["first"], first["count"], first["nll"]) == (0, 3, 2)
    assert first["kl"] == pytest.approx(0.1)
    assert first["same"] == first["sparse"] == pytest.approx(2 / 3)
    assert (second["first"], second["count"], second["nll"]) == (1024, 1, 4)


def test_numbers_of_rows_that_were_not_sparse_are_refused():
    def why(policy: str, sparse: int, dense: dict[str, int], budget: int = 512) -> str | None:
        stats = {
            "verification_rows": sparse + sum(n for k, n in dense.items() if k != "prefill"),
            "sparse_rows": sparse,
            "dense_rows": dense,
        }
        where = {"policy": policy, "budget": budget, "granularity": "block"}
        sample = Sample("x", "copy", 1024, [0] * 1024, 8)
        return run.refusal({"configuration": where, "stats": stats}, [sample])

    assert why("dustin", 100, {"prefill": 7}) is None
    assert "only 50 of 100" in str(why("dustin", 50, {"no_selection": 50}))
    assert "only 0 of 9" in str(why("quest", 0, {"short_context": 9}))
    assert why("quest", 0, {"short_context": 9}, budget=1024) is None
    assert why("dense", 0, {"requested": 9}) is None
    assert "under dense" in str(why("dense", 1, {"requested": 9}))


# ---- the commands -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    """Tiny models with a tokenizer of single bytes."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("pair")
    target = write_tiny_qwen2(folder / "target", layers=4, seed=3)
    draft = write_layer_dropped(folder / "draft", target, keep=2)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(BPE(vocab={c: i + 2 for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    for path in (target, draft):
        PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(path)
    return target, draft


def command(pair: tuple[Path, Path], *more: str) -> Any:
    line = ["eval", "--model", str(pair[0]), "--draft", str(pair[1]), "--context", "600"]
    line += ["--samples", "2", "--batch", "4", "--output-tokens", "40", "--drift-tokens", "60"]
    line += ["--drift-samples", "1", "--tasks", "passkey,agreement,continuation,drift"]
    line += ["--dustin-json", '{"recent": 32}', "--llm-json", '{"dtype": "float32"}']
    return CliRunner().invoke(app, [*line, *more])


@pytest.mark.engine
def test_an_evaluation_that_ran_out_of_time_is_resumed(pair, tmp_path):
    file, figure = tmp_path / "out.json", tmp_path / "out.png"
    chosen = ["--budget", "160", "--json", str(file)]
    done = command(pair, *chosen, "--policies", "dustin,streaming", "--max-seconds", "1")
    assert done.exit_code == 0, done.output
    data = json.loads(file.read_text())
    assert [entry["configuration"]["policy"] for entry in data["configurations"]] == ["dense"]
    assert [entry["policy"] for entry in data["skipped"]] == ["dustin", "streaming"]
    chosen += ["--resume", "--plot", str(figure)]
    done = command(pair, *chosen, "--policies", "dustin,static,oracle")
    assert done.exit_code == 0, done.output
    assert "2 configurations are done" not in done.output
    assert "1 configurations are done" in done.output
    assert "known continuations" in done.output
    data = json.loads(file.read_text())
    found = [(e["engine"], e["configuration"]["policy"]) for e in data["configurations"]]
    assert found == [(0, "dense"), (1, "dense"), (1, "dustin"), (1, "static"), (1, "oracle")]
    assert data["skipped"] == data["failures"] == []
    assert data["command"] == provenance.command()
    assert data["engines"][1]["environment"]["torch"] == torch.__version__
    assert len(data["samples"]) == 7
    assert {s["prompt_tokens"] for s in data["samples"]} == {600}
    by_policy = {e["configuration"]["policy"]: e for e in data["configurations"][1:]}
    dense, dustin = by_policy["dense"], by_policy["dustin"]
    assert data["configurations"][0]["scores"] == dense["scores"]
    assert dense["scores"]["agreement/600/0"] == dense["scores"]["agreement/600/1"] == 1
    assert dense["stats"]["sparse_rows"] == 0 < dustin["stats"]["sparse_rows"]
    assert 0 < dustin["stats"]["recovery_sum"] / dustin["stats"]["recovery_samples"] < 1
    assert dustin["accepted"]["tokens"] > dustin["accepted"]["rows"] > 0
    assert by_policy["oracle"]["scores"] == {}
    table = {(e["policy"], e["task"]): e for e in data["table"]}
    assert len(table) == len(data["table"]) == 4 * 3 + 2  # dense once, the oracle's two tasks
    assert table["dustin", "drift"]["kl"]["mean"] > 1e-4 > table["dense", "drift"]["kl"]["mean"]
    assert table["oracle", "continuation"]["sparse"] == 1
    assert figure.read_bytes().startswith(b"\x89PNG")
    # With nothing left to do no engine starts, and the tables are shown.
    written = file.read_text()
    again = command(pair, *chosen, "--policies", "dustin,oracle")
    assert again.exit_code == 0
    assert "known continuations" in again.output
    assert "loaded in" not in again.output
    assert file.read_text() == written
    # Of other samples nothing is kept.
    other = command(pair, *chosen, "--policies", "quest", "--seed", "1")
    assert other.exit_code == 2
    assert "is of other samples" in other.output


@pytest.mark.engine
def test_engines_side_by_side_as_ray_tasks(pair, tmp_path):
    file = tmp_path / "out.json"
    chosen = ["--budget", "160,320", "--json", str(file), "--parallel", "2"]
    done = command(pair, *chosen, "--policies", "lookahead", "--tasks", "continuation")
    assert done.exit_code == 0, done.output
    data = json.loads(file.read_text())
    found = {
        (e["engine"], e["configuration"]["policy"], e["configuration"]["budget"])
        for e in data["configurations"]
    }
    assert found == {
        (0, "dense", 160),
        (0, "lookahead", 160),
        (1, "dense", 320),
        (1, "lookahead", 320),
    }
    kl = {e["budget"]: e["kl"]["mean"] for e in data["table"] if e["policy"] == "lookahead"}
    assert kl[320] < kl[160]


def test_an_engine_that_fails_is_a_failure(pair, tmp_path):
    file = tmp_path / "out.json"
    done = command(
        pair, "--json", str(file), "--budget", "160", "--dustin-json", '{"recent": 4000}'
    )
    assert done.exit_code == 1
    assert "cannot hold sinks=4 and recent=4000" in json.loads(file.read_text())["failures"][0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--policies", "best"], "policies=best: choose among dense, dustin"),
        (["--tasks", "passkey,chess"], "tasks=passkey,chess: choose among passkey"),
        (["--granularity", "page"], "granularities=page: choose among block, token"),
        (["--drift-tokens", "5000"], "but the models have 4096: lower --context"),
        (["--text", "nowhere"], "no such file or folder"),
        (["--draft", "nowhere"], "no config.json there"),
    ],
)
def test_options_that_cannot_work_are_refused(pair, tmp_path, more, message):
    done = command(pair, "--json", str(tmp_path / "out.json"), *more)
    assert done.exit_code == 2
    assert message in done.output.replace("\n", " ")
    assert not (tmp_path / "out.json").exists()


def test_an_evaluation_that_is_ended_unwinds(pair, tmp_path, monkeypatch):
    """Only then its engine is ended, too, and leaves the GPU's memory."""
    monkeypatch.setattr(run, "make_samples", lambda _: signal.raise_signal(signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("nobody handles SIGTERM"))
    try:
        with pytest.raises(SystemExit) as ended:
            run.evaluate(run.Options(*pair), None, False, print)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM


# ---- trace --------------------------------------------------------------------------------


def test_spans_say_by_which_signal_a_place_was_chosen():
    from dustin_vllm import config

    shape = config.ModelShape("", 4, 4, 2, 32, 128, 512)
    made = config.DustinConfig(budget=160, recent=32, lookahead=64)
    settings = config.settings_of(made, 32, 32, GAMMA, config.PairShape(shape, shape))
    lookahead, history = torch.zeros(2, 330), torch.zeros(2, 330)
    lookahead[1, 100], lookahead[1, 140], lookahead[1, 200] = 0.5, 0.4, 0.3
    history[1, 140], history[1, 127] = 0.9, 0.8  # 127 reaches into the next block by dilation
    units = torch.tensor([[0, 0, 0, 0, 0], [0, 3, 4, 8, 9]])
    selected = Selected([], [330, 330], lookahead, history, units)
    spans = tracing.spans_of(selected, 1, settings)
    assert spans == [
        tracing.Span(0, 32, "sink"),
        tracing.Span(96, 160, "lookahead"),
        tracing.Span(256, 288, "history"),
        tracing.Span(288, 320, "recent"),
        tracing.Span(320, 330, "tail"),
    ]
    weighted = config.settings_of(
        made.model_copy(update={"merge": "weighted"}), 32, 32, GAMMA, config.PairShape(shape, shape)
    )
    assert {span.signal for span in tracing.spans_of(selected, 1, weighted)} == {
        "sink",
        "mixed",
        "recent",
        "tail",
    }


@pytest.mark.engine
def test_a_trace_shows_what_was_read(make_llm, target, draft, monkeypatch, tmp_path):
    llm = make_llm(target, draft, {**SPARSE, "sample_recovery_every": 1})
    watcher = Watcher(monkeypatch)
    found = tracing.record(llm, tokens(1, 400), 40, "about <this>")
    engine_runtime = runtime_of(llm)
    assert engine_runtime.on_selection is None
    stats = engine_runtime.stats()
    assert len(found.steps) == stats["sparse_rows"] > 8
    units = {made.context: made.units for made in watcher.made}
    for step in found.steps:
        inside = [p for span in step.spans for p in range(span.start, span.end)]
        kept = kept_positions(torch.tensor(units[step.context]), step.context, 32)
        assert inside == kept.tolist()
        assert 1 <= len(step.tokens) <= GAMMA + 1
        assert 0 < step.recovery <= 1
    # Steps follow one another, and confirm all tokens but the first.
    ids = [token for step in found.steps for token in step.tokens]
    assert found.ids[401:] == ids
    for step, after in zip(found.steps, found.steps[1:], strict=False):
        assert after.context == step.context + len(step.tokens)
    recovered = sum(step.recovery for step in found.steps)
    assert recovered == pytest.approx(stats["recovery_sum"])
    numbers = tracing.summary(found)
    assert numbers["acceptance"] == pytest.approx(len(ids) / len(found.steps))
    assert sum(v for name, v in numbers.items() if name.startswith("by ")) == pytest.approx(1)

    page = tracing.page(found, lambda some: "".join(f"<{t}>" for t in some))
    assert "about &lt;this&gt;" in page
    assert "<script" not in page
    assert "http" not in page
    assert page.count('class="s"') == sum(len(step.spans) for step in found.steps)
    assert page.count('fill="#2c7a2c"') == len(ids)
    first = found.steps[0].spans[0]
    assert f"sink, {first.start} to {first.end}: &lt;{found.ids[0]}&gt;" in page
    tracing.draw(found, tmp_path / "trace.png")
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(EvalError, match="no verification was sparse"):
        tracing.record(llm, tokens(1, 100), 8, "")


@pytest.mark.engine
def test_the_command_trace_writes_a_page(pair, tmp_path, monkeypatch):
    from conftest import run_python

    text, file = tmp_path / "text.txt", tmp_path / "page.html"
    text.write_text("a line of text\n" * 100)
    line = ["trace", str(file), "--model", str(pair[0]), "--draft", str(pair[1])]
    line += ["--text", str(text), "--context", "700", "--max-tokens", "24", "--budget", "160"]
    line += ["--dustin-json", '{"recent": 32}']
    said = run_python(
        f"from dustin_vllm.cli import app; app({line!r})",
        PYTHONPATH=str(Path(__file__).parents[1]),
    )
    assert "acceptance" in said
    page = file.read_text()
    assert "budget 160, 700 prompt tokens" in page
    assert "a line of text a line" in page
    bad = CliRunner().invoke(app, ["trace", "page.pdf", *line[2:]])
    assert bad.exit_code == 2
    assert "must end in .html or .png" in bad.output
    bad = CliRunner().invoke(app, [*line[:6], "--text", str(tmp_path / "none")])
    assert bad.exit_code == 2
    assert "cannot read" in bad.output


# ---- lm-eval ------------------------------------------------------------------------------

LM_EVAL = """
import json, os, sys
from lm_eval import simple_evaluate
from lm_eval.models.vllm_causallms import VLLM
from lm_eval.tasks import TaskManager

target, draft, folder = sys.argv[1:]
model = VLLM(
    pretrained=target,
    dtype="float32",
    max_model_len=2048,
    enforce_eager=True,
    kv_cache_memory_bytes=1 << 28,
    block_size=32,
    attention_backend="DUSTIN",
    speculative_config={"method": "draft_model", "model": draft, "num_speculative_tokens": 4},
    additional_config={"dustin": {"budget": 160, "recent": 32, "dense_below": 0}},
)
manager = TaskManager(include_path=folder, include_defaults=False)
found = simple_evaluate(model=model, tasks=["far_fact"], task_manager=manager)
stats = model.model.collective_rpc("dustin_stats")[0]
said = [sample["filtered_resps"][0] for sample in found["samples"]["far_fact"]]
print("RESULT", json.dumps([found["results"]["far_fact"]["exact_match,none"], said, stats]))
"""
TASK = """
task: far_fact
dataset_path: json
dataset_kwargs: {data_files: FILE}
test_split: train
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["never"], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.mark.engine
def test_lm_eval_runs_a_task_with_sparse_verification(pair, tmp_path):
    """As for LongBench and RULER, which need a hub: a task of local text, in its vLLM model."""
    made = maker().samples("passkey", 800, 3, 0)
    rows = [{"text": bytes(s.prompt).decode(), "answer": s.answer} for s in made]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "far_fact.yaml").write_text(TASK.replace("FILE", str(data)))
    # lm-eval asks for the version of a distribution that the CPU build does not have.
    shim = tmp_path / "shim" / "vllm-0.32.0+cpu.dist-info" / "METADATA"
    shim.parent.mkdir(parents=True)
    shim.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    script = tmp_path / "script.py"
    script.write_text(LM_EVAL)
    paths = [str(Path(__file__).parents[1]), str(shim.parents[1]), *sys.path]
    done = subprocess.run(
        [sys.executable, str(script), str(pair[0]), str(pair[1]), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HOME": str(tmp_path / "hf")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    exact, said, stats = json.loads(line.removeprefix("RESULT "))
    assert exact == 0  # the weights are random
    assert len(said) == 3
    assert any(said)
    assert stats["sparse_rows"] == stats["verification_rows"] > 10
