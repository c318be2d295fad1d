# SPDX-License-Identifier: Apache-2.0
"""The engine on a GPU: the same promises as test_engine.py, with FlashAttention and graphs.

Skipped without a GPU only; the logic is tested on the CPU engine and under the interpreter.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    GAMMA,
    acceptance,
    generate,
    reference_selection,
    runtime_of,
    serve_mixed_requests,
    tokens,
    write_layer_dropped,
    write_tiny_qwen2,
)

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from dustin_vllm import reference
from dustin_vllm.backend_cuda import DustinCudaAttentionImpl
from dustin_vllm.runtime_cuda import CudaRuntime

pytestmark = pytest.mark.engine

# A folder with a real target/draft pair, as qwen2.5-coder-0.5b and qwen2.5-coder-0.5b-draft:
# the same tests then run on real weights and text, where greedy output must agree exactly.
REAL = os.environ.get("DUSTIN_TEST_MODELS")
SCALE = 6 if REAL else 1
SPARSE = {"budget": 128 * SCALE, "recent": 32, "sinks": 4}
LENGTHS = [SCALE * n for n in (300, 5, 520, 133, 256, 417)]
EAGER: dict[str, Any] = {"enforce_eager": True}
# Full graphs for verification without torch.compile, which would take a minute.
GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    if REAL:
        target = Path(REAL) / "qwen2.5-coder-0.5b"
        return target, target.with_name("qwen2.5-coder-0.5b-draft")
    root = tmp_path_factory.mktemp("models")
    target = write_tiny_qwen2(root / "target", layers=4, heads=8, kv_heads=2, head_dim=64)
    return target, write_layer_dropped(root / "draft", target, keep=2)


@pytest.fixture(scope="module")
def prompts(pair):
    """Token ids; real code for the real pair."""
    if not REAL:
        return [tokens(i, n) for i, n in enumerate(LENGTHS)]
    from transformers import AutoTokenizer
    from vllm.v1.core.sched import scheduler

    text = Path(scheduler.__file__).read_text()
    ids = AutoTokenizer.from_pretrained(pair[0]).encode(text)
    return [ids[i * 100 : i * 100 + n] for i, n in enumerate(LENGTHS)]


def assert_agree(outputs: list[list[int]], expected: list[list[int]]) -> None:
    """Real weights: the same tokens. Random ones flip near-ties when rounding differs."""
    if REAL:
        assert outputs == expected
        return
    same = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a)) / len(a)
        for a, b in zip(outputs, expected, strict=True)
    ]
    assert sum(same) / len(same) > 0.4, same


@pytest.fixture
def start(make_llm, pair):
    def start(dustin, draft=pair[1], **kw):
        args = {"dtype": "float16", "block_size": 16, "max_model_len": 4096}
        args["gpu_memory_utilization"] = 0.2  # others may use the GPU, too
        return make_llm(pair[0], draft, dustin, **{**args, **kw})

    return start


def gathered(kv_cache: torch.Tensor, table: torch.Tensor, length: int):
    """Keys and values [L, Hkv, D] of one sequence, fp32, on the CPU."""
    block_size, width = kv_cache.shape[2:]
    blocks = table[: -(-length // block_size)].long()
    both = kv_cache[blocks].transpose(1, 2).flatten(0, 1)[:length].float().cpu()
    return both.split(width // 2, dim=-1)


class Spy:
    """Checks outputs and selections of an eager engine against the reference."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows_checked = self.selections_checked = self.fresh_checked = 0
        self.fresh_layers: set[int] = set()
        self.full: Any = None
        plan = CudaRuntime.plan_verification
        forward = DustinCudaAttentionImpl.forward
        finish = CudaRuntime.finish_scoring
        spy = self

        def plan_verification(runtime, metadata):
            spy.runtime, spy.full = runtime, metadata
            spy.layers = len(runtime.target_layers)
            return plan(runtime, metadata)

        def layer_forward(impl, layer, query, key, value, kv_cache, metadata, output, *a, **kw):
            result = forward(impl, layer, query, key, value, kv_cache, metadata, output, *a, **kw)
            target = spy.full is not None and not layer.layer_name.startswith("draft_model")
            if target and metadata is not None and spy.runtime.rows:
                spy.check_rows(impl, query, kv_cache, metadata, output)
            return result

        def finish_scoring(runtime):
            scoring = runtime._scoring
            finish(runtime)
            if scoring:
                spy.check_selections(runtime)

        monkeypatch.setattr(CudaRuntime, "plan_verification", plan_verification)
        monkeypatch.setattr(DustinCudaAttentionImpl, "forward", layer_forward)
        monkeypatch.setattr(CudaRuntime, "finish_scoring", finish_scoring)

    def check_rows(self, impl, query, kv_cache, metadata, output) -> None:
        starts, unit = self.full.query_start_loc_cpu.tolist(), self.runtime.settings.unit
        seq_lens = self.full.seq_lens.tolist()  # the host's are upper bounds
        output = output.view(-1, impl.num_heads, impl.head_size)
        for i, row in enumerate(self.runtime.rows):
            if row.dense is not None:
                continue
            settings = self.runtime.settings
            group = settings.second if impl.second else settings.target
            used = (impl.second and metadata.dustin_second) or metadata
            span, seq_len = slice(starts[i], starts[i + 1]), seq_lens[i]
            context = seq_len - (span.stop - span.start)
            if group is settings.fresh:
                chosen = self.runtime.buffers.groups[group.name].selected[i].tolist()
            else:
                chosen = self.runtime.scores.selections[group.name][row.slot.index].tolist()
            if impl.selects is not None and context // unit > group.budget_units:
                self.check_fresh(impl, query[span], kv_cache, i, context, chosen)
            # Rejected drafts may leave no more units than the budget.
            dropped = max(0, context // unit - group.budget_units)
            assert int(used.seq_lens[i]) == seq_len - dropped * unit
            keys, values = gathered(kv_cache, self.full.block_table_tensor[i], seq_len)
            chosen = chosen[: context // unit]
            wanted = reference.sparse_attention(
                query[span].cpu(), keys, values, impl.scale, chosen, context, unit
            )
            got = output[span].float().cpu()
            assert (got - wanted).norm() < 1e-2 * wanted.norm()
            self.rows_checked += 1

    def check_fresh(self, impl, query, kv_cache, row, context, chosen) -> None:
        """A row's own queries have selected what the reference selects by them."""
        settings = self.runtime.settings
        asked = query[[max(0, len(query) - GAMMA - 1 + i) for i in range(GAMMA + 1)]]
        table = self.full.block_table_tensor[row]
        keys, _ = gathered(kv_cache, table, context + len(query))
        (layer,) = impl.selects.args
        self.fresh_layers.add(layer)
        ((_, heads),) = settings.target_heads.of_layer(layer).layers
        group = impl.num_heads // impl.num_kv_heads
        scores = reference.token_scores(
            asked[:, list(heads)].cpu(), keys[:, [h // group for h in heads]], impl.scale
        )
        units = reference.unit_scores(scores, context, settings.unit)
        wanted = reference_selection(units, units, context, settings, settings.fresh)
        assert len(set(chosen) ^ set(wanted)) <= 2  # ties
        self.fresh_checked += 1

    def check_selections(self, runtime) -> None:
        s, buffers = runtime.settings, runtime.buffers
        for i, row in enumerate(runtime.rows):
            if not row.needs_selection:
                continue
            context = int(buffers.contexts[i])
            if context // s.unit <= s.largest.budget_units:
                continue
            history, lookahead = buffers.score_rows(runtime._num_reqs)[:, i].cpu()
            table = runtime._block_table[i]
            total = torch.zeros(context + GAMMA)
            queries = buffers.draft_queries.queries.unflatten(0, (GAMMA, -1))[:, i].cpu()
            begin = 0
            for layer, heads in s.draft_heads.layers:
                attention = runtime.draft_layers[layer]
                keys, _ = gathered(attention.kv_cache, table, context + GAMMA)
                group = attention.impl.num_heads // attention.impl.num_kv_heads
                own = queries[:, begin : begin + len(heads)]
                begin += len(heads)
                scores = reference.token_scores(
                    own, keys[:, [h // group for h in heads]], attention.impl.scale
                )
                total += scores * len(heads) / s.draft_heads.num_heads
            assert (lookahead[: context + GAMMA] - total).norm() < 1e-2 * total.norm()
            units = [
                reference.unit_scores(lookahead, context, s.unit),
                reference.unit_scores(history, context, s.unit, s.dilation_tokens),
            ]
            for group in s.merged_groups:
                wanted = reference_selection(*units, context, s, group)
                got = runtime.scores.selections[group.name][row.slot.index].tolist()
                # Block sums in another order may swap equals at the border.
                assert len(set(got) ^ set(wanted)) <= 2
                assert got == sorted(set(got))
            self.selections_checked += 1


WIDE = {"wide_layers": [1, 3], "wide_budget": 192 * SCALE}
FRESH = {"fresh_layers": [1, 3], "target_heads": [{"layer": 2}]}


@pytest.mark.parametrize("more", [{}, WIDE, FRESH], ids=["one_budget", "wide", "fresh"])
@pytest.mark.parametrize("kernel", ["flash", "triton", "cuda"])
@pytest.mark.parametrize("granularity", ["block", "token"])
def test_sparse_rows_equal_the_reference(start, prompts, monkeypatch, granularity, kernel, more):
    spy = Spy(monkeypatch)
    settings = {"granularity": granularity, "verify_kernel": kernel, "sample_recovery_every": 2}
    llm = start({**SPARSE, **settings, **more}, **EAGER)
    generate(llm, prompts)
    stats = runtime_of(llm).stats()
    assert stats["sparse_rows"] > 20
    assert spy.rows_checked == spy.layers * stats["sparse_rows"]
    assert spy.selections_checked > 20
    assert (spy.fresh_checked > 20) == (more is FRESH)
    assert spy.fresh_layers == set(more.get("fresh_layers", ()))
    assert stats["kv_tokens_read"] < stats["kv_tokens_full"]
    assert stats["recovery_samples"] > 0
    assert 0 < stats["recovery_sum"] / stats["recovery_samples"] <= 1.001
    assert acceptance(llm)[1] > 0


@pytest.mark.parametrize("more", [{}, WIDE, FRESH], ids=["one_budget", "wide", "fresh"])
@pytest.mark.parametrize("kernel", ["flash", "cuda"])
@pytest.mark.parametrize("granularity", ["block", "token"])
def test_graphs_and_eager_agree(start, prompts, granularity, kernel, more):
    settings = {**SPARSE, "granularity": granularity, "verify_kernel": kernel, **more}
    eager = start(settings, **EAGER, enable_prefix_caching=False)
    expected = generate(eager, prompts)
    counted = runtime_of(eager).stats()
    graphs = start(settings, **GRAPHS, enable_prefix_caching=False)
    assert_agree(generate(graphs, prompts), expected)
    stats = runtime_of(graphs).stats()
    assert stats["sparse_rows"] > 20
    assert stats["draft_graphs"] > 5
    assert not counted["draft_graphs"]
    if REAL:
        for name in ("sparse_rows", "dense_rows", "kv_tokens_read", "selections"):
            assert stats[name] == counted[name]


@pytest.mark.parametrize("draft_budget", [None, "budget"])
def test_a_draft_graph_does_what_the_loop_does(start, prompts, draft_budget):
    """Same drafts, bit for bit, and same selections, on the same state."""
    llm = start({**SPARSE, "draft_budget": draft_budget}, **GRAPHS)
    runtime = runtime_of(llm)
    drafter, selections = runtime.runner.drafter, runtime.scores.selections
    buffers = runtime.buffers
    compared: list[int] = []

    def propose_twice(**kwargs):
        selected = {name: held.clone() for name, held in selections.items()}
        own = {name: group.selected.clone() for name, group in buffers.groups.items()}
        scoring, published = runtime._scoring, [row.slot.published for row in runtime.rows]
        drafts = runtime.replay_drafting(kwargs)
        if drafts is None:
            return loop(**kwargs)
        drafts = drafts.clone()
        made = {name: held.clone() for name, held in selections.items()}
        for name, held in selected.items():  # what the draft reads
            selections[name].copy_(held)
            buffers.groups[name].selected.copy_(own[name])
        runtime._scoring = scoring
        for row, step in zip(runtime.rows, published, strict=True):
            row.slot.published = step
        runtime.replay_drafting = lambda kwargs: None
        again = loop(**kwargs)
        del runtime.replay_drafting
        whole = len(drafts) in runtime._graphs._sizes
        same = torch.equal(drafts, again)
        slots = [row.slot.index for row in runtime.rows if row.needs_selection]
        same = same and all(
            torch.equal(h[slots], made[name][slots]) for name, h in selections.items()
        )
        compared.append((whole, same))
        return again

    loop = type(drafter).propose.__get__(drafter)
    drafter.propose = propose_twice
    generate(llm, prompts)
    whole = [same for exact, same in compared if exact]
    assert len(whole) > 5
    assert all(whole)
    # Padded rows change how FlashAttention splits its work, and with it the rounding.
    assert sum(same for _, same in compared) > 0.8 * len(compared)


@pytest.mark.parametrize("mode", [EAGER, GRAPHS], ids=["eager", "graphs"])
def test_budget_above_context_equals_stock(start, prompts, mode):
    expected = generate(start(None, **mode), prompts)
    llm = start({"budget": 8192}, **mode)
    assert_agree(generate(llm, prompts), expected)
    assert runtime_of(llm).stats()["sparse_rows"] == 0


@pytest.mark.parametrize("mode", [EAGER, GRAPHS], ids=["eager", "graphs"])
def test_dense_verification_with_a_sparse_draft_is_lossless(start, prompts, mode):
    expected = generate(start(None, **mode), prompts)
    llm = start({**SPARSE, "sparse_verification": False}, **mode)
    assert_agree(generate(llm, prompts), expected)
    stats = runtime_of(llm).stats()
    assert stats["sparse_rows"] == 0
    assert stats["dense_rows"]["requested"] > 20
    assert stats["draft_kv_tokens_read"] < stats["draft_kv_tokens_full"]


def test_output_does_not_depend_on_the_batch(start, prompts):
    llm = start(SPARSE, **GRAPHS, enable_prefix_caching=False)
    together = generate(llm, prompts)
    again = generate(llm, prompts[::-1])[::-1]
    assert_agree(again, together)


def test_mixed_requests(start, prompts):
    """With graphs and work scheduled ahead. DUSTIN_TEST_SECONDS makes a soak of it."""
    llm = start(SPARSE, **GRAPHS)
    seconds = float(os.environ.get("DUSTIN_TEST_SECONDS", "5"))
    count = serve_mixed_requests(llm, prompts, seconds, at_least=100)
    stats = runtime_of(llm).stats()
    print(count, stats)
    assert stats["sparse_rows"] > 100
    assert stats["draft_graphs"] > 10
    assert stats["draft_loops"]["prefill"] > 5


def test_without_a_draft_the_backend_is_the_stock_backend(start, prompts):
    expected = generate(start(None, draft=None, **EAGER), prompts[:2])
    llm = start(SPARSE, draft=None, **EAGER)
    assert_agree(generate(llm, prompts[:2]), expected)
