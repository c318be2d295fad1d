# SPDX-License-Identifier: Apache-2.0
"""Rival policies: against straightforward references, inside the engine."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import GAMMA, engine_args, generate, runtime_of, tokens
from test_engine import rows_to_keys
from test_runtime_cuda import DEVICE, HEAD_DIM, FakeEngine
from test_runtime_cuda import GAMMA as FAKE_GAMMA

from dustin_vllm import config, policies, reference, runtime
from dustin_vllm.backend_cpu import DustinCPUAttentionBackendImpl
from dustin_vllm.config import ConfigError, DustinConfig
from dustin_vllm.policies import Step, head_logits, oracle, quest, static
from dustin_vllm.runtime_cpu import CpuRuntime

UNIT, SINKS, RECENT = 32, 4, 32
SPARSE = {"budget": 160, "recent": RECENT, "sinks": SINKS}
BUDGET_UNITS = 160 // UNIT
PROMPTS = [tokens(i, n) for i, n in enumerate((300, 520, 417))]
IN_TORCH = tuple(name for name in policies.names() if name not in policies.BUILT_IN)
RUNNABLE = tuple(name for name in policies.names() if name != "oracle")  # it: see test_eval.py


# ---- names and settings -------------------------------------------------------------------


def test_every_file_is_a_policy():
    assert set(IN_TORCH) == {"oracle", "quest", "random", "static", "streaming"}
    some = SimpleNamespace(scoring_layers=list, runner=SimpleNamespace(device="cpu"))
    for name in IN_TORCH:
        settings = SimpleNamespace(config=DustinConfig(policy=name))
        made = policies.make(settings, some)
        assert type(made).__module__ == f"dustin_vllm.policies.{name}"
    for name in policies.BUILT_IN:
        assert policies.make(SimpleNamespace(config=DustinConfig(policy=name)), some) is None


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match="policy='best'.*dustin, lookahead.*streaming"):
        config.read_config({"dustin": {"policy": "best"}})


def test_one_signal_fills_what_is_free():
    shape = config.ModelShape("", 4, 4, 2, 32, 128, 512)
    pair = config.PairShape(shape, shape)

    def group(policy: str, **more: Any) -> config.LayerGroup:
        made = DustinConfig(policy=policy, budget=320, recent=32, merge="weighted", **more)
        settings = config.settings_of(made, UNIT, UNIT, GAMMA, pair)
        assert (settings.config.merge == "weighted") == (policy == "dustin")
        assert settings.draft is not None
        assert settings.draft.lookahead_units * 2 == settings.target.lookahead_units
        return settings.target

    assert group("dustin", draft_budget=160, lookahead=128).lookahead_units == 4
    assert group("lookahead", draft_budget=160).lookahead_units == 10
    assert group("history", draft_budget=160).lookahead_units == 0
    assert group("quest", draft_budget=160).lookahead_units == 10


def test_policies_that_rank_in_torch_need_one_rank(target, draft):
    from vllm.engine.arg_utils import EngineArgs

    made = EngineArgs(**engine_args(target, draft, SPARSE)).create_engine_config()
    made.parallel_config.tensor_parallel_size = 2
    with pytest.raises(ConfigError, match="policy='quest' ranks by the heads of one rank"):
        config.resolve(made, {"policy": "quest"})
    assert config.resolve(made, {"policy": "history"}).target.lookahead_units == 0


# ---- parts --------------------------------------------------------------------------------


def test_head_logits_and_bounds_equal_loops():
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(3, 5, 8, generator=generator)
    keys = torch.randn(12, 4, 8, generator=generator)
    key_heads = torch.tensor([3, 0, 0, 2, 3])  # key head 1 is read by nobody
    found = head_logits(queries, keys, key_heads)
    for head, key_head in enumerate(key_heads.tolist()):
        for place, query in enumerate(queries[:, head]):
            torch.testing.assert_close(found[head, place], keys[:, key_head] @ query)
    low, high = keys.view(3, 4, 4, 8).amin(1), keys.view(3, 4, 4, 8).amax(1)
    bounds = quest.upper_bounds(queries[0], low, high, key_heads)
    for head, key_head in enumerate(key_heads.tolist()):
        for unit in range(3):
            wanted = sum(
                max(float(q * a), float(q * b))
                for q, a, b in zip(
                    queries[0, head], low[unit, key_head], high[unit, key_head], strict=True
                )
            )
            assert float(bounds[head, unit]) == pytest.approx(wanted, rel=1e-4, abs=1e-5)
        truth = keys[:, key_head] @ queries[0, head]
        assert (bounds[head] >= truth.view(3, 4).amax(1) - 1e-5).all()


def test_prompt_mass_equals_the_reference():
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(6, 4, 8, generator=generator)
    keys = torch.randn(40, 2, 8, generator=generator)
    scales = torch.full((4,), 0.3)
    found = static.prompt_mass(queries, keys, torch.tensor([0, 0, 1, 1]), scales)
    wanted = reference.token_scores(queries, keys, 0.3) * 6 * 4
    torch.testing.assert_close(found, wanted)


# ---- in the CPU engine --------------------------------------------------------------------


class Watcher:
    """Keeps every selection that the engine publishes, and what it was made from."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[SimpleNamespace] = []
        self.queries: dict[str, torch.Tensor] = {}  # of every layer's latest pass
        self.prompt: dict[str, dict[str, torch.Tensor]] = {}  # by request and layer
        publish, forward = CpuRuntime.publish, DustinCPUAttentionBackendImpl.forward
        begin = CpuRuntime.begin_scoring
        rejected: list[torch.Tensor | None] = []

        def layer_forward(impl, layer, query, *args, **kwargs):
            self.queries[layer.layer_name] = query.clone()
            return forward(impl, layer, query, *args, **kwargs)

        def begin_scoring(runtime, metadata, num_rejected):
            rejected[:] = [num_rejected]
            ids = runtime.runner.input_batch.req_ids
            for name, row in zip(ids, runtime.rows, strict=True):
                if row.dense is not None and row.dense.value == "prefill":
                    kept = self.prompt.setdefault(name, {})
                    rows = slice(row.first_row, row.first_row + row.seq_len - row.context)
                    for layer, query in self.queries.items():
                        if not layer.startswith("draft"):
                            parts = [kept[layer]] if layer in kept else []
                            kept[layer] = torch.cat([*parts, query[rows]])
            self.target_queries = dict(self.queries)
            return begin(runtime, metadata, num_rejected)

        def published(runtime, rows):
            for i, row in enumerate(rows):
                batch_row = runtime._to_score[i]
                context = int(runtime._contexts[i])
                back = 0 if rejected[0] is None else int(rejected[0][batch_row])
                last = row.first_row + row.seq_len - row.context - 1 - back
                selected = runtime.scores.selections["target"][row.slot.index]
                self.made.append(
                    SimpleNamespace(
                        name=runtime.runner.input_batch.req_ids[batch_row],
                        row=row,
                        context=context,
                        prompt=row.prompt_tokens,
                        units=selected.tolist(),
                        table=runtime._block_table[i].clone(),
                        query={
                            name: query[last]
                            for name, query in self.target_queries.items()
                            if not name.startswith("draft")
                        },
                        scores=self.look(runtime, i, context),
                    )
                )
            return publish(runtime, rows)

        self.look: Any = lambda *_: None
        monkeypatch.setattr(DustinCPUAttentionBackendImpl, "forward", layer_forward)
        monkeypatch.setattr(CpuRuntime, "begin_scoring", begin_scoring)
        monkeypatch.setattr(CpuRuntime, "publish", published)


@pytest.fixture
def watcher(monkeypatch):
    return Watcher(monkeypatch)


def select(scores: list[float], context: int) -> list[int]:
    """What a ranking has to select, by the reference."""
    zeros = [0.0] * len(scores)
    arguments = (context, UNIT, BUDGET_UNITS, SINKS, RECENT, "fill", BUDGET_UNITS, 0.0)
    return reference.select_units(scores, zeros, *arguments)


def check_every_row_is_sparse(llm: Any) -> None:
    stats = runtime_of(llm).stats()
    assert stats["sparse_rows"] > 20
    assert set(stats["dense_rows"]) <= {"prefill"}
    assert stats["kv_tokens_read"] < 0.8 * stats["kv_tokens_full"]


@pytest.mark.engine
def test_streaming_selects_sinks_and_the_latest(make_llm, target, draft, watcher):
    llm = make_llm(target, draft, {**SPARSE, "policy": "streaming"})
    generate(llm, PROMPTS)
    check_every_row_is_sparse(llm)
    for made in watcher.made:
        units = made.context // UNIT
        assert made.units == [0, *range(units - BUDGET_UNITS + 1, units)]
    assert len(watcher.made) > 20


@pytest.mark.engine
def test_random_draws_anew_by_seed_and_not_by_batch(make_llm, target, draft, watcher):
    llm = make_llm(target, draft, {**SPARSE, "policy": "random"}, enable_prefix_caching=False)
    together = generate(llm, PROMPTS)
    check_every_row_is_sparse(llm)
    drawn = {(m.prompt, m.context): m.units for m in watcher.made}
    assert len({tuple(units) for units in drawn.values()}) > len(drawn) // 2
    for made in watcher.made:
        units = made.context // UNIT
        protected = reference.protected_units(made.context, UNIT, SINKS, RECENT)
        assert protected < set(made.units) <= set(range(units))
        assert len(set(made.units)) == BUDGET_UNITS
    middle = [u for m in watcher.made if m.prompt == 520 for u in m.units if 0 < u < 13]
    assert len(set(middle)) > 8  # all places are drawn sooner or later
    watcher.made.clear()
    assert generate(llm, PROMPTS[1:2])[0] == together[1]
    assert {(m.prompt, m.context): m.units for m in watcher.made}.items() <= drawn.items()
    runtime_of(llm).reconfigure({"policy_seed": 1})
    watcher.made.clear()
    generate(llm, PROMPTS[1:2])
    other = {(m.prompt, m.context): m.units for m in watcher.made}
    assert any(drawn[key] != units for key, units in other.items() if key in drawn)


@pytest.mark.engine
@pytest.mark.parametrize("chunk", [256, 2048])
def test_static_ranks_once_by_the_last_prompt_queries(make_llm, target, draft, watcher, chunk):
    llm = make_llm(
        target,
        draft,
        {**SPARSE, "policy": "static"},
        enable_prefix_caching=False,
        max_num_batched_tokens=chunk,
    )
    prompts = [*PROMPTS, tokens(9, 256 + 7)]  # a last chunk that is shorter than the window
    generate(llm, prompts, max_tokens=60)
    check_every_row_is_sparse(llm)
    layers = runtime_of(llm).target.captures
    first: dict[str, list[float]] = {}
    for made in watcher.made:
        if made.name not in first:
            assert made.context == made.prompt  # chosen after prefill
            mass = torch.zeros(made.prompt)
            for capture in layers:
                query = watcher.prompt[made.name][capture.layer.layer_name][-static.WINDOW :]
                assert len(watcher.prompt[made.name][capture.layer.layer_name]) == made.prompt
                blocks = made.table[: -(-made.prompt // UNIT)]
                keys = rows_to_keys(capture.key_cache(), blocks, made.prompt)
                mass += reference.token_scores(query, keys, capture.layer.impl.scale)
            wide = torch.cat([torch.zeros(2), mass, torch.zeros(2)])
            pooled = sum(wide[i : i + made.prompt] for i in range(static.POOL)) / static.POOL
            pooled = torch.cat([pooled, torch.zeros(-made.prompt % UNIT)])
            first[made.name] = pooled.view(-1, UNIT).sum(1).tolist()
        ranking = first[made.name]
        units = made.context // UNIT
        ranking = (ranking + [0.0] * units)[:units]
        assert made.units == select(ranking, made.context)
    assert len(first) == len(prompts)
    assert len(watcher.made) > 60
    by_request: dict[str, set[int]] = {}
    for made in watcher.made:  # the prompt's units that are read outside of the recent window
        old = {u for u in made.units if 0 < u < made.prompt // UNIT - 2}
        assert by_request.setdefault(made.name, old) >= old  # the window may push the last out


@pytest.mark.engine
def test_quest_equals_a_brute_force_bound(make_llm, target, draft, watcher):
    llm = make_llm(target, draft, {**SPARSE, "policy": "quest"})
    captures = runtime_of(llm).target.captures

    def brute_force(runtime, index, context):
        """Shares of every unit, summed over heads, from the caches as they are now."""
        units = context // UNIT
        row = runtime.rows[runtime._to_score[index]]
        total = torch.zeros(units)
        for capture in captures:
            blocks = runtime._block_table[index][:units]
            keys = rows_to_keys(capture.key_cache(), blocks, units * UNIT)
            keys = keys.view(units, UNIT, -1, keys.shape[-1])
            last = row.first_row + row.seq_len - row.context - 1
            last -= row.seq_len - context
            query = watcher.target_queries[capture.layer.layer_name][last]
            for head in capture.heads.tolist():
                own = keys[:, :, int(capture.kv_heads[head])]
                products = torch.stack([query[head] * own.amin(1), query[head] * own.amax(1)])
                bounds = products.amax(0).sum(-1) * capture.layer.impl.scale
                total += bounds.softmax(0)
        return total.tolist()

    watcher.look = brute_force
    generate(llm, PROMPTS, max_tokens=60)
    check_every_row_is_sparse(llm)
    differ = 0
    for made in watcher.made:
        assert made.units == select(made.scores, made.context)
        differ += made.units[1] != made.context // UNIT - BUDGET_UNITS + 1
    assert differ > 20  # else streaming would pass, too


@pytest.mark.engine
def test_switching_policies_and_budgets_in_one_engine(make_llm, target, draft):
    """A budget that covers the context equals dense verification for every policy; a smaller one
    equals the engine that was started with these settings."""
    stock = generate(make_llm(target, draft, None), PROMPTS)
    started = {}
    for name in ("lookahead", "streaming"):
        llm = make_llm(target, draft, {**SPARSE, "budget": 96, "policy": name})
        started[name] = generate(llm, PROMPTS)
    assert started["lookahead"] != started["streaming"]
    llm = make_llm(target, draft, {**SPARSE, "budget": 1024}, enable_prefix_caching=False)
    engine = runtime_of(llm)
    outputs = {}
    for name in RUNNABLE:
        engine.reconfigure({"policy": name, "budget": 1024})
        before = engine.stats()["sparse_rows"]
        assert generate(llm, PROMPTS) == stock
        assert engine.stats()["sparse_rows"] == before
        engine.reconfigure({"policy": name, "budget": 96})
        outputs[name] = generate(llm, PROMPTS)
        assert engine.stats()["sparse_rows"] > before + 20
        assert engine.scores.selections["target"].shape[1] == 3
    for name, expected in started.items():
        assert outputs[name] == expected
    assert len({str(found) for found in outputs.values()}) > 4
    engine.reconfigure({})  # as it was started
    assert engine.settings.target.budget_units == 32
    assert engine.policy is None
    assert type(engine.target.captures[0].layer.impl.capture).__name__ == "QueryCapture"
    with pytest.raises(ConfigError, match="dustin.granularity is fixed when the engine starts"):
        engine.reconfigure({"granularity": "block"})
    with pytest.raises(ConfigError, match="cannot hold"):
        engine.reconfigure({"budget": 32})


@pytest.mark.engine
def test_the_oracle_refuses_what_it_does_not_know(make_llm, target, draft):
    llm = make_llm(target, draft, {**SPARSE, "policy": "oracle"})
    oracle.records.clear()
    with pytest.raises(RuntimeError, match="needs a known continuation"):
        generate(llm, PROMPTS[:1])


# ---- the CUDA runtime, without a GPU under Triton's interpreter ---------------------------


class FakePolicyEngine(FakeEngine):
    """``step`` of the base class, with the policy's selections returned in place of checked."""

    def switch(self, monkeypatch, **changes: Any) -> None:
        old = self.settings
        made = old.config.model_copy(update=changes)
        units = made.budget // old.unit
        target = config.LayerGroup("target", units, 0 if made.policy == "history" else units)
        self.settings = dataclasses.replace(old, config=made, target=target)
        monkeypatch.setattr(runtime.config, "resolve", lambda *_: self.settings)
        self.runtime.reconfigure(changes)

    def select(self, contexts: list[int], new: list[int], rejected: list[int]) -> Any:
        """One step; what the policy was shown, and what it published."""
        seen: list[Step] = []
        policy = self.runtime.policy
        original = policy.unit_scores
        policy.unit_scores = lambda step: seen.append(step) or original(step)
        metadata = self.metadata(contexts, new)
        self.runtime.plan_verification(metadata)
        self.target = [torch.randn(sum(new), 4, HEAD_DIM, device=DEVICE) for _ in range(2)]
        for query, layer in zip(self.target, self.layers["target"].values(), strict=True):
            capture = layer.impl.capture
            capture.take(layer.impl, query)
        rows, kept = self.runtime.verification_queries()
        self.runtime.begin_scoring(
            metadata, torch.tensor(rejected, dtype=torch.int32, device=DEVICE)
        )
        for index in range(FAKE_GAMMA):
            first = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
            self.runtime.begin_draft_pass(first if index == 0 else None)
            self.runtime.compact_draft(metadata)
            query = torch.randn(sum(new), 4, HEAD_DIM, device=DEVICE)
            self.runtime.buffers.draft_queries.take(self.layers["draft"][0].impl, query)
        self.runtime.finish_scoring()
        policy.unit_scores = original
        published = [
            self.runtime.scores.selections["target"][row.slot.index].tolist()
            for row in self.runtime.rows
        ]
        return seen, published, rows, kept


@pytest.fixture
def fake(monkeypatch, request):
    engine = FakePolicyEngine(monkeypatch, request.param, None)
    engine.runtime.settings = engine.settings = dataclasses.replace(
        engine.settings, config=engine.settings.config.model_copy(update={"draft_graphs": False})
    )
    engine.runner.input_batch.req_ids = ["a", "b"]
    for name, count in (("a", 201), ("b", 152)):
        engine.runner.requests[name] = SimpleNamespace(
            num_tokens=count,
            output_token_ids=[0],
            sampling_params=None,
            prompt_token_ids=[1] * (count - 1),
        )
    return engine


@pytest.mark.parametrize("fake", [1, 16], indirect=True)
def test_policies_on_the_cuda_runtime(monkeypatch, fake):
    unit = fake.settings.unit
    fake.switch(monkeypatch, policy="streaming", budget=64)
    seen, published, *_ = fake.select([200, 151], [1, 1], [0, 0])
    budget = 64 // unit
    for context, got in zip((201, 152), published, strict=True):
        units, sinks = context // unit, -(-4 // unit)
        assert got == [*range(sinks), *range(units - budget + sinks, units)]
    # The last confirmed query of every scoring head, and keys by block table.
    step = seen[0]
    assert step.contexts == [201, 152]
    for i in range(2):
        wanted = torch.cat([fake.target[0][i, [1]], fake.target[1][i]])
        assert torch.equal(step.queries[i], wanted)
        for start in (0, 16, 37):
            keys = fake.runtime.scoring_keys(step.block_tables[i], start, 150)
            for layer in range(2):
                expected = fake.keys("target", layer, i, 150)[start:]
                assert torch.equal(keys[:, 2 * layer : 2 * layer + 2].cpu(), expected)
    key_heads, scales = fake.runtime.scoring_heads()
    assert key_heads.tolist() == [0, 2, 2, 3, 3]
    assert scales.tolist() == [0.25] * 5
    # Verifications with a rejected draft, under another policy and a larger budget.
    fake.switch(monkeypatch, policy="quest", budget=128)
    for before, after, reason in (
        ([201, 152], [203, 155], "no_selection"),
        ([203, 155], [205, 158], None),  # whose bounds are there but for the latest units
        ([205, 158], [207, 161], None),
    ):
        for name in ("a", "b"):
            context = before["ab".index(name)]
            fake.runner.requests[name].num_tokens = context + 1
            fake.runner.requests[name].output_token_ids = [0] * (
                context + 1 - {"a": 200, "b": 151}[name]
            )
        seen, published, rows, kept = fake.select(before, [3, 3], [1, 0])
        assert [row.dense and row.dense.value for row in fake.runtime.rows] == [reason] * 2
        assert rows == [0, 1]
        assert torch.equal(kept[1, :, 1:], fake.target[1][3:6])
        assert seen[0].contexts == after
        for i, context in enumerate(after):
            last = [1, 5][i]
            units = context // unit
            total = torch.zeros(units)
            for layer, heads in ((0, [1]), (1, [0, 1, 2, 3])):
                keys = fake.keys("target", layer, i, units * unit)
                keys = keys.view(units, unit, 2, HEAD_DIM)
                for head in heads:
                    query, own = fake.target[layer][last, head].cpu(), keys[:, :, head // 2]
                    bound = torch.maximum(query * own.amin(1), query * own.amax(1)).sum(-1)
                    total += (0.25 * bound).softmax(0)
            wanted = reference.select_units(
                total.tolist(), [0.0] * units, context, unit, 128 // unit, 4, 16, "fill", 999, 0.0
            )
            assert published[i] == wanted
    assert fake.runtime.buffers.groups["target"].selected.shape[1] == 128 // unit


@pytest.mark.parametrize("fake", [1, 16], indirect=True)
@pytest.mark.parametrize("policy", ["lookahead", "history"])
def test_one_signal_on_the_cuda_runtime(monkeypatch, fake, policy):
    """``step`` compares with the reference; somebody looks on, as ``dustin trace`` does."""
    fake.switch(monkeypatch, policy=policy, budget=64)
    seen: list[runtime.Selected] = []
    fake.runtime.on_selection = seen.append
    fake.step([200, 151], [1, 1], [0, 0])
    assert seen[0].contexts == [201, 152]
    assert seen[0].rows == fake.runtime.rows
    for i, row in enumerate(fake.runtime.rows):
        kept = fake.runtime.scores.selections["target"][row.slot.index]
        assert torch.equal(seen[0].selections[i], kept)
        scores = getattr(seen[0], policy)[i].cpu()
        best = int(reference.unit_scores(scores[4:120], 116, 1).argmax()) + 4
        if fake.settings.unit == 1:  # far from what is protected
            assert best in kept.tolist()
    # A row that rejected drafts bring back to the budget has nothing to drop, and is not shown.
    context = 61 + fake.settings.unit
    fake.runner.requests["b"].num_tokens = context + 1
    fake.runner.requests["a"].num_tokens = 202
    seen.clear()
    fake.step([201, context], [3, 3], [0, 2])
    assert fake.runtime.rows[1].needs_selection
    assert seen[0].contexts == [204]
    assert seen[0].rows == fake.runtime.rows[:1]


@pytest.mark.parametrize("fake", [16], indirect=True)
def test_draft_graphs_bind_the_settings(monkeypatch, fake):
    monkeypatch.setattr(fake.runner, "device", torch.device("cuda"))
    fake.runtime.settings = dataclasses.replace(fake.settings, config=DustinConfig())
    with pytest.raises(ConfigError, match="start with draft_graphs=false"):
        fake.runtime.reconfigure({"policy": "streaming"})
    captured: list[int] = []
    monkeypatch.setattr(fake.runtime._graphs, "capture", captured.append)
    fake.runtime.capture_drafting(6)
    assert captured == [2]
    fake.runtime.policy = object()  # ranks in torch, with the host
    fake.runtime.capture_drafting(6)
    assert captured == [2]
