# SPDX-License-Identifier: Apache-2.0
"""The whole engine on the CPU, with tiny random models in fp32."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    GAMMA,
    acceptance,
    generate,
    reference_selection,
    run_python,
    runtime_of,
    serve_mixed_requests,
    tokens,
)
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.attention.backends import cpu_attn

from dustin_vllm import cpu_ops, metrics, reference
from dustin_vllm.backend_cpu import DustinCPUAttentionBackendImpl
from dustin_vllm.draft_graphs import DraftGraphs, draft_inputs
from dustin_vllm.runtime_cpu import CpuRuntime
from dustin_vllm.state import LoopReason

pytestmark = pytest.mark.engine

SPARSE = {"budget": 160, "recent": 32}
PROMPTS = [tokens(i, n) for i, n in enumerate((300, 5, 520, 133, 256, 417))]


def rows_to_keys(cache: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
    """[L, Hkv, D] keys of one sequence from a packed cache."""
    keys = cpu_ops.unpack_keys(cache[blocks.long()], "vec")
    return keys.transpose(1, 2).flatten(0, 1)[:length]


class Spy:
    """Looks over the engine's shoulder at every layer of every step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = 0
        self.kv_tokens_read = 0
        self.sparse_rows = 0
        self.selections = 0
        self.outputs_checked = 0
        self.draft_rows = 0
        self.groups_differ = False
        self.fresh_rows: Counter[int] = Counter()  # sparse rows of layers that select themselves
        self.draft_tokens_read = 0
        self._full: Any = None
        self._draft_full: Any = None
        self._runtime: Any = None
        self._layer: Any = None
        self.queries: dict[str, torch.Tensor] = {}  # of every layer's latest pass
        spy = self
        plan = CpuRuntime.plan_verification
        forward = DustinCPUAttentionBackendImpl.forward
        kernel = cpu_attn.ops.cpu_attention_with_kv_cache
        compact_draft = CpuRuntime.compact_draft
        begin = CpuRuntime.begin_scoring
        finish = CpuRuntime.finish_scoring

        def plan_verification(runtime, metadata):
            spy._runtime, spy._full = runtime, metadata
            return plan(runtime, metadata)

        def layer_forward(impl, layer, query, *args, **kwargs):
            spy._layer = layer
            spy.queries[layer.layer_name] = query
            return forward(impl, layer, query, *args, **kwargs)

        def attention(**kw):
            kernel(**kw)
            if spy._runtime is None:
                return  # stock vLLM
            name = spy._layer.layer_name
            if not name.startswith("draft_model"):
                spy.look(kw, first_layer=".layers.0." in name)
            elif spy._runtime.settings.draft is not None:
                spy.look_at_draft(kw, first_layer=".layers.0." in name)

        def compact(runtime, metadata):
            spy._draft_full = metadata
            return compact_draft(runtime, metadata)

        def begin_scoring(runtime, metadata, num_rejected):
            begin(runtime, metadata, num_rejected)
            if runtime._history is not None:
                spy.check_history(runtime, num_rejected)

        def finish_scoring(runtime):
            expected = spy.expected_selections(runtime)
            finish(runtime)
            for slot, by_group in expected:
                assert slot.published == slot.seen
                spy.groups_differ |= len({tuple(units) for units in by_group.values()}) > 1
                for name, units in by_group.items():
                    assert runtime.scores.selections[name][slot.index].tolist() == units
                spy.selections += 1

        select = CpuRuntime.select_in_step

        def select_in_step(runtime, layer, metadata):
            select(runtime, layer, metadata)
            spy.check_fresh(runtime, layer)

        monkeypatch.setattr(CpuRuntime, "select_in_step", select_in_step)
        monkeypatch.setattr(CpuRuntime, "plan_verification", plan_verification)
        monkeypatch.setattr(DustinCPUAttentionBackendImpl, "forward", layer_forward)
        monkeypatch.setattr(cpu_attn.ops, "cpu_attention_with_kv_cache", attention)
        monkeypatch.setattr(CpuRuntime, "compact_draft", compact)
        monkeypatch.setattr(CpuRuntime, "begin_scoring", begin_scoring)
        monkeypatch.setattr(CpuRuntime, "finish_scoring", finish_scoring)

    def look(self, kw: dict[str, Any], first_layer: bool) -> None:
        """Check what the kernel was handed, and what it computed, row by row."""
        table, lens, starts = kw["block_table"], kw["seq_lens"], kw["query_start_loc"]
        layer = int(self._layer.layer_name.split(".layers.")[1].split(".")[0])
        settings = self._runtime.settings
        is_second = layer in settings.second_layers
        group = (settings.second if is_second else settings.target).name
        for i, row in enumerate(self._runtime.rows):
            full_table = self._full.block_table_tensor[i]
            if row.dense is not None:
                assert lens[i] == row.seq_len
                used = -(-row.seq_len // 32)
                assert torch.equal(table[i, :used], full_table[:used])
            else:
                chosen = self._runtime.scores.selections[group][row.slot.index].tolist()
                entries, length = reference.compact_row(
                    full_table.tolist(), chosen, row.context, row.seq_len, 32, 32
                )
                assert lens[i] == length < row.seq_len
                assert table[i, : len(entries)].tolist() == entries
                if first_layer:
                    self.sparse_rows += 1
                self.check_output(kw, i, row, full_table, starts, chosen)
            generated = row.seq_len > row.request.num_prompt_tokens
            if generated and row.context == row.request.num_tokens - 1:
                self.kv_tokens_read += int(lens[i]) / 4  # of four layers, on average
        self.steps += first_layer

    def look_at_draft(self, kw: dict[str, Any], first_layer: bool) -> None:
        """The draft reads its own selection where the sequence has one, else everything."""
        full_lens, runtime = self._draft_full.seq_lens, self._runtime
        for i, row in enumerate(runtime.rows):
            full_table, seq_len = self._draft_full.block_table_tensor[i], int(full_lens[i])
            if not row.drafts_sparsely:
                assert kw["seq_lens"][i] == seq_len
                continue
            group = runtime.settings.draft
            chosen = runtime.scores.selections[group.name][row.slot.index].tolist()
            assert len(chosen) == group.budget_units
            entries, length = reference.compact_row(
                full_table.tolist(), chosen, row.context, seq_len, 32, 32
            )
            assert kw["seq_lens"][i] == length < seq_len
            assert kw["block_table"][i, : len(entries)].tolist() == entries
            if first_layer:
                self.draft_rows += 1
                self.draft_tokens_read += length

    def check_output(self, kw, i, row, full_table, starts, chosen) -> None:
        """The kernel's output equals masked attention over the whole, uncompacted sequence."""
        blocks = full_table[: -(-row.seq_len // 32)]
        keys = rows_to_keys(kw["key_cache"], blocks, row.seq_len)
        values = kw["value_cache"][blocks.long()].transpose(1, 2).flatten(0, 1)[: row.seq_len]
        span = slice(int(starts[i]), int(starts[i + 1]))
        wanted = reference.sparse_attention(
            kw["query"][span], keys, values, kw["scale"], chosen, row.context, 32
        )
        assert (kw["output"][span] - wanted).norm() < 1e-5 * wanted.norm()
        self.outputs_checked += 1

    def fresh_scores(self, runtime: Any, row: int, layer: int) -> torch.Tensor:
        """Token scores of a row by the step's own queries, in a layer that selects."""
        (capture,) = runtime._in_step[layer].captures
        starts, length = self._full.query_start_loc_cpu, runtime.rows[row].seq_len
        end = int(starts[row + 1])
        asked = [max(int(starts[row]), end - GAMMA - 1 + i) for i in range(GAMMA + 1)]
        blocks = self._full.block_table_tensor[row][: -(-length // 32)]
        keys = rows_to_keys(capture.key_cache(), blocks, length)[:, capture.kv_heads.long()]
        queries = self.queries[capture.layer.layer_name][asked][:, capture.heads]
        return reference.token_scores(queries, keys, capture.layer.impl.scale)

    def check_fresh(self, runtime: Any, layer: int) -> None:
        """Sparse rows read from here on what the reference selects by their own queries."""
        settings = runtime.settings
        for index, row in enumerate(runtime.rows):
            if row.dense is not None:
                continue
            scores = self.fresh_scores(runtime, index, layer)
            units = reference.unit_scores(scores, row.context, settings.unit)
            wanted = reference_selection(units, units, row.context, settings, settings.fresh)
            slot = row.slot.index
            assert runtime.scores.selections["fresh"][slot].tolist() == wanted
            self.fresh_rows[layer] += 1
            stale = runtime.scores.selections["target"][slot].tolist()
            self.groups_differ |= stale != wanted

    def check_history(self, runtime: Any, num_rejected: torch.Tensor | None) -> None:
        """History scores come from the query of the last confirmed token, on all scoring layers."""
        starts = self._full.query_start_loc_cpu
        for i, row in enumerate(runtime._to_score):
            rejected = 0 if num_rejected is None else int(num_rejected[row])
            context = runtime.rows[row].seq_len - rejected
            assert context == int(runtime._contexts[i])
            blocks = runtime._block_table[i][: -(-context // 32)]
            total, heads = torch.zeros(context), 0
            for capture in runtime.target.captures:
                last = int(starts[row + 1]) - 1 - rejected
                query = self.queries[capture.layer.layer_name][last : last + 1, capture.heads]
                keys = rows_to_keys(capture.key_cache(), blocks, context)
                keys = keys[:, capture.kv_heads.long()]
                scores = reference.token_scores(query, keys, capture.layer.impl.scale)
                total += scores * len(capture.heads)
                heads += len(capture.heads)
            wanted = total / heads
            assert (runtime._history[i, :context] - wanted).norm() < 1e-5 * wanted.norm()

    def expected_selections(self, runtime: Any) -> list[tuple[Any, dict[str, list[int]]]]:
        """What the reference would publish, from the same captured queries and caches."""
        expected: list[tuple[Any, dict[str, list[int]]]] = []
        if runtime._history is None:
            return expected
        s = runtime.settings
        for i, row in enumerate(runtime._to_score):
            context = int(runtime._contexts[i])
            table = runtime._block_table[i]
            total, heads = torch.zeros(context + GAMMA), 0
            for capture in runtime.draft.captures:
                queries = torch.stack([q[i] for q in capture.taken])
                length = context + len(capture.taken)
                keys = rows_to_keys(capture.key_cache(), table[: -(-length // 32)], length)
                keys = keys[:, capture.kv_heads.long()]
                scores = reference.token_scores(queries, keys, capture.layer.impl.scale)
                total += scores * queries.shape[1]
                heads += queries.shape[1]
            lookahead = reference.unit_scores(total / heads, context, s.unit)
            history = reference.unit_scores(runtime._history[i], context, s.unit, GAMMA + 1)
            units = {
                group.name: reference_selection(lookahead, history, context, s, group)
                for group in s.merged_groups
                if group is not s.draft or group is s.target
            }
            expected.append((runtime.rows[row].slot, units))
        return expected


@pytest.fixture
def spy(monkeypatch):
    return Spy(monkeypatch)


def test_budget_above_context_equals_stock(make_llm, target, draft):
    """Six requests over four slots, chunked prefill and prefix caching on."""
    stock = generate(make_llm(target, draft, None), PROMPTS)
    assert len({tuple(ids) for ids in stock}) == len(PROMPTS)
    llm = make_llm(target, draft, {"budget": 4096})
    assert generate(llm, PROMPTS) == stock
    assert generate(llm, PROMPTS) == stock  # again, from the prefix cache
    stats = runtime_of(llm).stats()
    assert stats["sparse_rows"] == 0
    assert stats["dense_rows"]["short_context"] == stats["verification_rows"] > 0


def test_self_draft_accepts_everything(make_llm, target):
    llm = make_llm(target, target, {"budget": 4096}, enable_prefix_caching=False)
    # 1 + 6 * 5 tokens: the prompt's token, then six full verification steps.
    generate(llm, PROMPTS, max_tokens=1 + 6 * (GAMMA + 1))
    drafted, accepted = acceptance(llm)
    assert accepted == drafted == len(PROMPTS) * 6 * GAMMA


WIDE = {"wide_layers": [1, 3], "wide_budget": 224}


FRESH = {"fresh_layers": [1, 3], "target_heads": [{"layer": 2}]}


@pytest.mark.parametrize(
    "more", [{}, {"merge": "split"}, WIDE, FRESH], ids=["one", "split", "wide", "fresh"]
)
def test_sparse_rows_read_the_selection_only(make_llm, target, draft, spy, more):
    """Tables, lengths, outputs and selections all equal the reference; counters equal the spy."""
    llm = make_llm(target, draft, {**SPARSE, **more, "sample_recovery_every": 1})
    generate(llm, PROMPTS)
    assert spy.groups_differ == bool(more)
    assert spy.fresh_rows == dict.fromkeys(more.get("fresh_layers", ()), spy.sparse_rows)
    settings = runtime_of(llm).settings
    if more is WIDE:
        assert (settings.second.budget_units, settings.second_layers) == (7, {1, 3})
    if "merge" in more:
        units = settings.target.budget_units
        assert (settings.target.lookahead_units, settings.second.lookahead_units) == (units, 0)
    stats = runtime_of(llm).stats()
    assert stats["sparse_rows"] == spy.sparse_rows > 20
    assert stats["kv_tokens_read"] == spy.kv_tokens_read < stats["kv_tokens_full"]
    assert stats["selections"] == spy.selections > 20
    assert spy.outputs_checked == 4 * spy.sparse_rows  # every target layer
    assert stats["sparse_rows"] + stats["dense_rows"]["short_context"] == stats["verification_rows"]
    assert stats["recovery_samples"] == stats["sparse_rows"]
    assert 0 < stats["recovery_sum"] / stats["recovery_samples"] < 1
    _, accepted = acceptance(llm)
    assert accepted > 0


@pytest.mark.parametrize("draft_budget", ["budget", 96])
def test_sparse_drafting_reads_the_drafts_selection_only(
    make_llm, target, draft, spy, draft_budget
):
    llm = make_llm(target, draft, {**SPARSE, "draft_budget": draft_budget})
    outputs = generate(llm, PROMPTS)
    assert [len(ids) for ids in outputs] == [32] * len(PROMPTS)
    stats = runtime_of(llm).stats()
    assert stats["sparse_rows"] == spy.sparse_rows > 20
    assert spy.draft_rows == GAMMA * spy.sparse_rows  # every draft pass
    assert stats["draft_kv_tokens_read"] == spy.draft_tokens_read
    assert 0 < stats["draft_kv_tokens_read"] < stats["draft_kv_tokens_full"]
    assert acceptance(llm)[1] > 0


def test_a_draft_of_a_smaller_vocabulary(make_llm, target, draft, tmp_path):
    """Prompt tokens that the draft does not know must not stop the engine.

    448 is a multiple of 64, so vLLM does not pad the embedding, as with 151936.
    """
    from safetensors.torch import load_file, save_file

    small = tmp_path / "small"
    small.mkdir()
    data = json.loads((draft / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**data, "vocab_size": 448}))
    weights = load_file(draft / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:448].contiguous()
    save_file(weights, small / "model.safetensors", metadata={"format": "pt"})
    prompts = [[*tokens(3, 300), *range(490, 512)], tokens(4, 280)]
    expected = generate(make_llm(target, None, None), prompts)
    llm = make_llm(target, small, {"budget": 4096})
    assert generate(llm, prompts) == expected
    _, accepted = acceptance(llm)
    assert accepted > 0


def test_compiled_equals_eager(make_llm, target, draft, monkeypatch):
    """vLLM's default on the CPU is torch.compile; here with Dynamo only, which is quick."""
    expected = generate(make_llm(target, draft, SPARSE), PROMPTS)
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    llm = make_llm(target, draft, SPARSE, enforce_eager=False)
    assert generate(llm, PROMPTS) == expected
    assert runtime_of(llm).stats()["sparse_rows"] > 20


def test_weighted_merge_and_max_aggregation_run(make_llm, target, draft):
    llm = make_llm(target, draft, {**SPARSE, "merge": "weighted", "aggregate": "max"})
    generate(llm, PROMPTS[:1])
    assert runtime_of(llm).stats()["sparse_rows"] > 0


def test_dense_reasons_are_counted(make_llm, target, draft):
    llm = make_llm(target, draft, {**SPARSE, "dense_below": 310}, enable_prefix_caching=False)
    generate(llm, [tokens(0, 300)], max_tokens=30)
    stats = runtime_of(llm).stats()
    assert stats["dense_rows"]["prefill"] == 2  # 256 + 44 tokens
    assert stats["dense_rows"]["short_context"] > 0  # contexts 300..309
    assert stats["sparse_rows"] > 0
    assert set(stats["dense_rows"]) == {"prefill", "short_context"}
    dense = sum(stats["dense_rows"].values()) - 2
    assert dense + stats["sparse_rows"] == stats["verification_rows"]


def test_a_skipped_proposal_makes_the_next_row_dense(make_llm, target, draft, monkeypatch):
    """vLLM skips drafting near the draft's length limit; old selections must not be used."""
    llm = make_llm(target, draft, SPARSE)
    runner = runtime_of(llm).runner
    fits = runner._input_fits_in_drafter
    calls = []
    monkeypatch.setattr(
        runner, "_input_fits_in_drafter", lambda m: calls.append(0) or (len(calls) != 4 and fits(m))
    )
    generate(llm, [tokens(0, 250)])
    assert runtime_of(llm).stats()["dense_rows"]["no_selection"] == 1


@pytest.mark.parametrize("last_chunk", [1, GAMMA, GAMMA + 1, GAMMA + 2])
def test_a_prompt_chunk_of_verification_length_is_prefill(make_llm, target, draft, last_chunk):
    """A chunk of gamma + 1 prompt tokens looks like a verification and must be dense."""
    prompt = tokens(7, 256 + last_chunk)
    whole = make_llm(target, draft, SPARSE, max_num_batched_tokens=512)
    expected = generate(whole, [prompt])
    chunked = make_llm(target, draft, SPARSE, max_num_batched_tokens=256)
    assert generate(chunked, [prompt]) == expected
    stats = runtime_of(chunked).stats()
    assert stats["dense_rows"] == {"prefill": 2}
    assert stats["sparse_rows"] == stats["verification_rows"] > 0


def test_output_does_not_depend_on_the_batch(make_llm, target, draft):
    """Six requests of different lengths over four slots: rows move, slots are reused."""
    llm = make_llm(target, draft, SPARSE, enable_prefix_caching=False)
    alone = [generate(llm, [prompt])[0] for prompt in PROMPTS]
    params = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
        for n in (32, 9, 20, 32, 14, 27)
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    together = llm.generate(prompts, params, use_tqdm=False)
    for output, expected in zip(together, alone, strict=True):
        ids = list(output.outputs[0].token_ids)
        assert ids == expected[: len(ids)]
    llm.llm_engine.step()
    assert runtime_of(llm).stats()["live_sequences"] <= 4


def test_preemption_and_resume(make_llm, target, draft, spy):
    """A cache too small for the batch. Recomputed tokens are prefill, then rows go on sparse."""
    prompts = [tokens(i, 200 + 7 * i) for i in range(4)]
    small = {"num_gpu_blocks_override": 40, "max_model_len": 1024, "enable_prefix_caching": False}
    stock = generate(make_llm(target, draft, None, **small), prompts, max_tokens=160)
    llm = make_llm(target, draft, {"budget": 4096}, **small)
    assert generate(llm, prompts, max_tokens=160) == stock

    llm = make_llm(target, draft, SPARSE, **small)
    outputs = generate(llm, prompts, max_tokens=160)
    assert [len(ids) for ids in outputs] == [160] * 4
    preemptions = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    assert preemptions["vllm:num_preemptions"] > 0
    stats = runtime_of(llm).stats()
    assert stats["dense_rows"]["prefill"] > 4  # one chunk each, and recomputation
    assert stats["sparse_rows"] == spy.sparse_rows > 0
    assert "no_selection" not in stats["dense_rows"]


def run_until(engine: Any, request_id: str, stop_after: int | None = None) -> list[int]:
    """Step the engine; the tokens of one request when it is done or has enough of them."""
    ids: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.request_id == request_id:
                ids = list(output.outputs[0].token_ids)
        if stop_after is not None and len(ids) >= stop_after:
            break
    return ids


def test_exact_and_sparse_requests_side_by_side(make_llm, target, draft, spy):
    expected = generate(make_llm(target, draft, None), PROMPTS)
    llm = make_llm(target, draft, SPARSE)
    plain = {"temperature": 0, "max_tokens": 32, "ignore_eos": True, "detokenize": False}
    asked = [{"dustin": "dense"}, None, {"dustin": "sparse"}, {"other": 1}]
    params = [SamplingParams(**plain, extra_args=asked[i % 4]) for i in range(len(PROMPTS))]
    prompts = [{"prompt_token_ids": p} for p in PROMPTS]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for i in (0, 4):
        assert list(outputs[i].outputs[0].token_ids) == expected[i]
    stats = runtime_of(llm).stats()
    assert stats["dense_rows"]["requested"] > 5
    assert stats["sparse_rows"] == spy.sparse_rows > 10
    wrong = SamplingParams(**plain, extra_args={"dustin": "exact"})
    with pytest.raises(VLLMValidationError, match="'exact' must be 'sparse' or 'dense'"):
        llm.generate(prompts[0], wrong, use_tqdm=False)
    assert len(generate(llm, PROMPTS[:1])[0]) == 32  # and the engine lives


def test_counters_are_metrics_of_vllm(make_llm, target, draft, monkeypatch):
    monkeypatch.setattr(metrics, "PUBLISH_SECONDS", 0)
    llm = make_llm(target, draft, {**SPARSE, "sample_recovery_every": 1})

    def read() -> dict[str, float]:
        return {
            m.name.removeprefix("vllm:dustin_") + "".join(m.labels.values()): m.value
            for m in llm.get_metrics()
            if m.name.startswith("vllm:dustin_")
        }

    assert not any(read().values())  # a new engine, even after others in this process
    generate(llm, PROMPTS)
    before = runtime_of(llm).stats()
    generate(llm, [[5, 6]], max_tokens=1)  # what the last steps counted shows in the next one
    shown = read()
    for name in ("sparse_rows", "kv_tokens_read", "selections", "recovery_samples"):
        assert shown[name] == before[name] > 0
    for reason, rows in before["dense_rows"].items():
        assert shown[f"dense_rows{reason}"] == rows
    assert shown["dense_rowslong_query"] == 0
    assert shown["selection_tokens"] == 160
    # The acceptance of sparse and of dense rows; together that of vLLM's own counters.
    for name in ("verifications", "verified_tokens"):
        for mode in ("sparse", "dense"):
            assert shown[name + mode] == before[name][mode] > 0
    values = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    drafts = values["vllm:spec_decode_num_drafts"]
    assert sum(before["verifications"].values()) == drafts
    accepted = values["vllm:spec_decode_num_accepted_tokens"]
    assert sum(before["verified_tokens"].values()) == accepted + drafts


def test_state_is_freed_when_all_requests_are_gone(make_llm, target, draft, monkeypatch):
    monkeypatch.setattr(metrics, "PUBLISH_SECONDS", 0)
    llm = make_llm(target, draft, SPARSE)
    generate(llm, PROMPTS)
    generate(llm, [[5, 6]], max_tokens=1)  # frees what is gone, and publishes
    values = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    assert values["vllm:dustin_live_sequences"] == 0
    assert len(runtime_of(llm).scores) == 1


def test_every_nth_verification_is_dense(make_llm, target, draft, spy):
    llm = make_llm(target, draft, {**SPARSE, "refresh_interval": 3})
    generate(llm, PROMPTS[2:3], max_tokens=60)
    stats = runtime_of(llm).stats()
    sparse, dense = stats["sparse_rows"], stats["dense_rows"]["refresh"]
    assert sparse == spy.sparse_rows
    assert dense == (sparse + dense) // 3 > 3


@pytest.mark.parametrize("cache_generated", [False, True])
def test_generated_blocks_are_not_published(make_llm, target, draft, cache_generated):
    """The next turn of a chat finds the prompt in the prefix cache, and computes the rest."""

    def ask(llm, prompt):
        params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, detokenize=False)
        return llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]

    prompt = tokens(7, 320)
    settings = {**SPARSE, "cache_generated": cache_generated}
    llm = make_llm(target, draft, settings)
    first = ask(llm, prompt).outputs[0].token_ids
    chat = [*prompt, *first, *tokens(8, 40)]
    second = ask(llm, chat)
    assert runtime_of(llm).stats()["sparse_rows"] > 10
    if cache_generated:
        assert second.num_cached_tokens > 320 + 32
        return
    assert second.num_cached_tokens == 320
    fresh = ask(make_llm(target, draft, settings), chat)
    assert fresh.num_cached_tokens == 0
    assert second.outputs[0].token_ids == fresh.outputs[0].token_ids


def test_lossless_operation_publishes_everything(make_llm, target, draft):
    llm = make_llm(target, draft, {**SPARSE, "sparse_verification": False})
    first = generate(llm, [tokens(7, 320)], max_tokens=80)[0]
    again = llm.generate(
        {"prompt_token_ids": [*tokens(7, 320), *first]}, SamplingParams(max_tokens=1)
    )
    assert again[0].num_cached_tokens > 320 + 32


def test_mixed_requests(make_llm, target, draft, spy):
    """In a cache too small for all of them; every row of every step is checked."""
    llm = make_llm(
        target,
        draft,
        SPARSE,
        max_num_batched_tokens=96,
        num_gpu_blocks_override=40,
        max_model_len=1024,
    )
    count = serve_mixed_requests(llm, PROMPTS, seconds=0, at_least=90)
    assert count["aborted"] > 3
    stats = runtime_of(llm).stats()
    assert stats["sparse_rows"] == spy.sparse_rows > 100
    for reason in ("prefill", "short_context"):
        assert stats["dense_rows"][reason] > 20


def test_abort_then_the_same_id_again(make_llm, target, draft):
    """The second request of that id is another sequence; no state of the first may reach it."""
    llm = make_llm(target, draft, SPARSE, enable_prefix_caching=False)
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    first, second = tokens(1, 400), tokens(2, 400)
    expected = generate(llm, [second], max_tokens=24)[0]
    engine.add_request("same", {"prompt_token_ids": first}, params)
    run_until(engine, "same", stop_after=10)
    engine.abort_request(["same"])
    engine.add_request("same", {"prompt_token_ids": second}, params)
    assert run_until(engine, "same") == expected


def test_without_a_draft_the_backend_is_the_stock_backend(make_llm, target):
    expected = generate(make_llm(target, None, None), PROMPTS[:2])
    assert generate(make_llm(target, None, SPARSE), PROMPTS[:2]) == expected


# In a process of its own: after n-gram speculation no other engine starts in that process.
NGRAM = """
import json, os
from conftest import engine_args, generate
from vllm import LLM
method = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
llm = LLM(**engine_args(os.environ["TARGET"], None, {}, speculative_config=method))
print("RESULT", json.dumps(generate(llm, PROMPTS)))
"""


def test_with_another_speculative_method_the_backend_is_the_stock_backend(make_llm, target):
    expected = generate(make_llm(target, None, None), PROMPTS[:2])
    code = NGRAM.replace("PROMPTS", str(PROMPTS[:2]))
    out = run_python(code, TARGET=str(target), PYTHONPATH=str(Path(__file__).parent))
    line = next(line for line in out.splitlines() if line.startswith("RESULT"))
    assert json.loads(line.removeprefix("RESULT ")) == expected


def test_sampling_with_a_temperature_runs_sparse(make_llm, target, draft):
    llm = make_llm(target, draft, SPARSE)
    params = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": p} for p in PROMPTS[:3]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [24] * 3
    assert runtime_of(llm).stats()["sparse_rows"] > 0


def test_dense_verification_with_a_sparse_draft_is_lossless(make_llm, target, draft):
    expected = generate(make_llm(target, draft, None), PROMPTS)
    llm = make_llm(target, draft, {**SPARSE, "sparse_verification": False})
    assert generate(llm, PROMPTS) == expected
    stats = runtime_of(llm).stats()
    assert stats["sparse_rows"] == 0
    assert stats["dense_rows"]["requested"] > 20
    assert stats["kv_tokens_read"] == stats["kv_tokens_full"]
    assert stats["draft_kv_tokens_read"] < 0.8 * stats["draft_kv_tokens_full"]
    assert acceptance(llm)[1] > 0


class BodyAgain(DraftGraphs):
    """Records nothing: a replay runs the body again."""

    def _record(self, num_reqs):
        drafts = torch.full((num_reqs, GAMMA), -1)
        return lambda: drafts.copy_(self._draft(num_reqs)), drafts


def test_drafts_from_padded_buffers_equal_those_of_the_loop(make_llm, target, draft, monkeypatch):
    """In fp32, bit for bit: what a CUDA graph captures, run here without one."""
    llm = make_llm(target, draft, {**SPARSE, "draft_budget": 96})
    runtime = runtime_of(llm)
    drafter, selections = runtime.runner.drafter, runtime.scores.selections
    monkeypatch.setattr(CpuRuntime, "score_history", CpuRuntime.begin_scoring, raising=False)
    monkeypatch.setattr(CpuRuntime, "select", CpuRuntime.finish_scoring, raising=False)
    monkeypatch.setattr(CpuRuntime, "caches_bound", lambda runtime: True, raising=False)
    inputs = draft_inputs(4, GAMMA, 2048 // 32, torch.device("cpu"))
    graphs = BodyAgain(runtime, drafter, inputs)
    monkeypatch.setattr(CpuRuntime, "capturing", property(lambda runtime: graphs.capturing))
    graphs.capture(4)
    propose = type(drafter).propose
    compared: list[int] = []
    reasons: set[LoopReason] = set()

    def propose_twice(**kwargs):
        before = {name: held.clone() for name, held in selections.items()}
        drafts = graphs.replay(kwargs)
        made = {name: held.clone() for name, held in selections.items()}
        for name, held in before.items():  # the draft reads them
            selections[name].copy_(held)
        again = propose(drafter, **kwargs)
        if isinstance(drafts, torch.Tensor):
            assert torch.equal(drafts, again)
            for name, held in selections.items():
                assert torch.equal(held, made[name])
            compared.append(len(drafts))
        else:
            reasons.add(drafts)
        return again

    drafter.propose = propose_twice
    generate(llm, PROMPTS)
    assert len(compared) > 10
    assert len(set(compared)) > 1  # with padding and without
    assert reasons == {LoopReason.PREFILL}
