# SPDX-License-Identifier: Apache-2.0
"""The CUDA runtime against the reference; without a GPU under Triton's interpreter."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from dustin_vllm import cuda_ops, reference, runtime, runtime_cuda
from dustin_vllm.config import DustinConfig, HeadSet, LayerGroup, Settings
from dustin_vllm.runtime_cuda import CudaRuntime, QueryBuffer, block_pages, token_pages
from dustin_vllm.state import DenseReason
from dustin_vllm.triton_kernels import compact

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # CPU: under Triton's interpreter
BLOCKS, HEADS, BLOCK_SIZE, WIDTH = 6, 3, 16, 8


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_token_pages_address_every_token_of_every_block(layout):
    if layout == "NHD":
        cache = torch.randn(BLOCKS, BLOCK_SIZE, HEADS, WIDTH, device=DEVICE).transpose(1, 2)
    else:
        cache = torch.randn(BLOCKS, HEADS, BLOCK_SIZE, WIDTH, device=DEVICE)
    pages, step = token_pages(cache), block_pages(cache)
    assert pages.shape[1:] == (HEADS, 1, WIDTH)
    assert pages.data_ptr() == cache.data_ptr()
    for block in range(BLOCKS):
        for token in range(BLOCK_SIZE):
            page = pages[block * step + token, :, 0]
            assert torch.equal(page, cache[block, :, token])

    # And the compaction kernel writes these page numbers.
    table = torch.tensor([[4, 1, 5]], dtype=torch.int32, device=DEVICE)
    selection = torch.tensor([[0, 2, 17]], dtype=torch.int32, device=DEVICE)
    out = torch.full((1, 48), -7, dtype=torch.int32, device=DEVICE)
    lens = torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def one(value: int) -> torch.Tensor:
        return torch.tensor([value], dtype=torch.int32, device=DEVICE)

    compact(out, lens, table, selection, one(33), one(35), one(1), 1, BLOCK_SIZE, step)
    wanted = [4 * step, 4 * step + 2, 1 * step + 1, 5 * step + 1, 5 * step + 2]
    assert lens.tolist() == [5]
    assert out[0, :5].tolist() == wanted


def test_query_buffer_keeps_the_rows_and_heads_that_are_asked_for():
    heads = HeadSet(((1, (0, 3)), (4, (0, 1, 2, 3))))
    buffer = QueryBuffer(heads, 6, 8, torch.float32, DEVICE)
    layers = {i: SimpleNamespace(impl=SimpleNamespace(num_heads=4)) for i in range(5)}
    buffer.attach(layers)
    buffer.rows[:3] = torch.tensor([5, 2, 0], device=DEVICE)
    query = torch.randn(7, 4, 8, device=DEVICE)
    buffer.take(layers[1].impl, query)
    assert not buffer.queries.any()  # nothing is asked for
    buffer.count, buffer.first_place = 3, 2
    buffer.take(layers[1].impl, query)
    buffer.take(layers[4].impl, 2 * query)
    assert torch.equal(buffer.queries[2:5, :2], query[[5, 2, 0]][:, [0, 3]])
    assert torch.equal(buffer.queries[2:5, 2:], 2 * query[[5, 2, 0]])
    assert not buffer.queries[[0, 1, 5]].any()


GAMMA, HEAD_DIM, BLOCK = 2, 16, 16


@dataclass
class Metadata:
    """The part of CommonAttentionMetadata that the runtime reads."""

    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor
    block_table_tensor: torch.Tensor

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)


def int32(values, device=DEVICE) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


ONE_RANK = SimpleNamespace(world_size=1, rank_in_group=0)


class FakeEngine:
    """Runs CudaRuntime's steps with random queries, keys and acceptance."""

    def __init__(
        self,
        monkeypatch,
        unit: int,
        draft_units: int | None,
        kernel: str = "flash",
        second: str | None = None,
    ) -> None:
        budget = 96 // unit
        split = second == "deep"
        target = LayerGroup("target", budget, budget if split else budget // 2)
        groups = {
            "deep": LayerGroup("deep", budget, 0),
            "wide": LayerGroup("wide", 128 // unit, 64 // unit),
            "fresh": LayerGroup("fresh", budget, 0),
        }
        fresh = {"fresh": (1,), "two fresh": (0, 1)}.get(second or "", ())
        second = "fresh" if fresh else second
        draft = None
        if draft_units is not None:
            draft = LayerGroup("draft", draft_units, draft_units // 3)
        self.settings = Settings(
            config=DustinConfig(
                budget=96,
                sinks=4,
                recent=16,
                dense_below=0,
                verify_kernel=kernel,
                fresh_layers=fresh,
            ),
            gamma=GAMMA,
            unit=unit,
            block_size=BLOCK,
            dilation_tokens=GAMMA + 1,
            target=target,
            draft=draft,
            second=groups[second] if second else None,
            second_layers=frozenset(fresh or ({1} if second else ())),
            target_layers=2,
            target_heads=HeadSet(((0, (1,)), (1, (0, 1, 2, 3)))),
            draft_heads=HeadSet(((0, (0, 3)),)),
        )
        monkeypatch.setattr(runtime_cuda.config, "resolve", lambda _: self.settings)
        monkeypatch.setattr(runtime_cuda.config, "flash_attention_version", lambda: 3)
        for module in (runtime, runtime_cuda):
            monkeypatch.setattr(module, "get_tp_group", lambda: ONE_RANK)
        self.layers = {model: {i: self.layer() for i in range(2)} for model in ("target", "draft")}
        model, draft_model = (
            SimpleNamespace(
                get_head_size=lambda: HEAD_DIM,
                get_num_attention_heads=lambda parallel: 4,
                get_num_kv_heads=lambda parallel: 2,
                dtype=torch.float32,
                max_model_len=512,
            )
            for _ in range(2)
        )
        scheduler = SimpleNamespace(max_num_seqs=3)
        parallel = SimpleNamespace(tensor_parallel_size=1)
        self.runner = SimpleNamespace(
            device=torch.device(DEVICE),
            scheduler_config=scheduler,
            requests={},
            input_batch=SimpleNamespace(req_ids=[]),
            drafter=SimpleNamespace(max_model_len=512),
            vllm_config=SimpleNamespace(
                speculative_config=SimpleNamespace(
                    draft_model_config=draft_model, draft_parallel_config=parallel
                ),
                model_config=model,
                scheduler_config=scheduler,
                parallel_config=parallel,
            ),
        )
        self.runtime = CudaRuntime(
            self.runner, self.settings, None, self.layers["target"], self.layers["draft"]
        )
        self.table = torch.randperm(96, device=DEVICE).view(3, 32).int()

    def layer(self):
        cache = torch.randn(96, BLOCK, 2, 2 * HEAD_DIM, device=DEVICE).transpose(1, 2)
        impl = SimpleNamespace(num_heads=4, num_kv_heads=2, head_size=HEAD_DIM, scale=0.25)
        return SimpleNamespace(impl=impl, kv_cache=cache)

    def metadata(self, contexts: list[int], new: list[int]) -> Metadata:
        starts = [sum(new[:i]) for i in range(len(new) + 1)]
        lens = [c + n for c, n in zip(contexts, new, strict=True)]
        return Metadata(
            len(new),
            starts[-1],
            max(new),
            max(lens),
            int32(starts),
            int32(starts, "cpu"),
            int32(lens),
            int32(lens, "cpu"),
            self.table[: len(new)],
        )

    def keys(self, model: str, layer: int, row: int, length: int) -> torch.Tensor:
        cache = self.layers[model][layer].kv_cache[self.table[row].long()]
        return cache.transpose(1, 2).flatten(0, 1)[:length, :, :HEAD_DIM].cpu()

    def scores(self, model: str, queries: list, heads: HeadSet, row: int, length: int):
        """Reference token scores; queries per layer [Q, 4 heads, D]."""
        total = torch.zeros(length, device="cpu")
        for rows, (layer, chosen) in zip(queries, heads.layers, strict=True):
            keys = self.keys(model, layer, row, length)[:, [h // 2 for h in chosen]]
            own = reference.token_scores(rows[:, list(chosen)].cpu(), keys, 0.25)
            total += own * len(chosen) / heads.num_heads
        return total

    def step(self, contexts: list[int], new: list[int], rejected: list[int]) -> list:
        """One step; checks the selections it publishes, and returns both compacted metadata."""
        runtime, settings = self.runtime, self.settings
        metadata = self.metadata(contexts, new)
        planned = runtime.plan_verification(metadata)
        tokens = metadata.num_actual_tokens
        heads = {"target": settings.target_heads, "draft": settings.draft_heads}
        target = [torch.randn(tokens, 4, HEAD_DIM, device=DEVICE) for _ in heads["target"].layers]
        for query, (layer, _) in zip(target, heads["target"].layers, strict=True):
            runtime.buffers.target_queries.take(self.layers["target"][layer].impl, query)
        starts = metadata.query_start_loc_cpu.tolist()
        for layer in settings.config.fresh_layers:
            runtime.select_in_step(layer, planned)
            for i, row in enumerate(runtime.rows):
                if row.dense is None:
                    length = contexts[i] + new[i]
                    self.check_fresh(i, self.own_scores(target, starts, i, length, layer))
        runtime.begin_scoring(metadata, int32(rejected))
        passes, drafted = [], []
        for index in range(GAMMA):
            rows = int32([4, 0, 2][: len(new)]) if index == 0 else None
            runtime.begin_draft_pass(rows)
            drafted.append(runtime.compact_draft(metadata))
            query = torch.randn(6, 4, HEAD_DIM, device=DEVICE)
            runtime.buffers.draft_queries.take(self.layers["draft"][0].impl, query)
            passes.append(query[rows.long()] if rows is not None else query[: len(new)])
        needs = [row.needs_selection for row in runtime.rows]
        runtime.finish_scoring()
        for i, row in enumerate(runtime.rows):
            context = contexts[i] + new[i] - rejected[i]
            if not needs[i] or context // settings.unit <= settings.largest.budget_units:
                continue
            last = starts[i + 1] - 1 - rejected[i]
            history = self.scores(
                "target", [q[last : last + 1] for q in target], heads["target"], i, context
            )
            lookahead = self.scores(
                "draft", [torch.stack([p[i] for p in passes])], heads["draft"], i, context + GAMMA
            )
            history_units = reference.unit_scores(history, context, settings.unit, GAMMA + 1)
            lookahead_units = reference.unit_scores(lookahead, context, settings.unit)
            for group in settings.merged_groups:
                wanted = reference.select_units(
                    lookahead_units.tolist(),
                    history_units.tolist(),
                    context,
                    settings.unit,
                    group.budget_units,
                    4,
                    16,
                    "fill",
                    group.lookahead_units,
                    0.0,
                )
                got = runtime.scores.selections[group.name][row.slot.index].tolist()
                assert got == wanted
        return [planned, drafted]

    def own_scores(self, target: list, starts: list[int], row: int, length: int, layer: int):
        """Reference token scores by the last queries of the step itself, as many as verify."""
        begin, end = starts[row : row + 2]
        asked = [max(begin, end - GAMMA - 1 + i) for i in range(GAMMA + 1)]
        heads = self.settings.target_heads.of_layer(layer)
        kept = [
            queries[asked]
            for queries, entry in zip(target, self.settings.target_heads.layers, strict=True)
            if entry in heads.layers
        ]
        return self.scores("target", kept, heads, row, length)

    def check_fresh(self, row: int, scores: torch.Tensor) -> None:
        """What a sparse row's own queries select, for ``check_compacted``."""
        runtime, settings = self.runtime, self.settings
        context = runtime.rows[row].context
        units = reference.unit_scores(scores, context, settings.unit).tolist()
        wanted = reference.select_units(
            *(units, units, context, settings.unit, settings.fresh.budget_units),
            *(4, 16, "fill", 0, 0.0),
        )
        assert runtime.buffers.groups["fresh"].selected[row].tolist() == wanted
        self.before["fresh"][runtime.rows[row].slot.index] = int32(wanted)

    def check_compacted(self, metadata, full_lens, contexts, group, sparse) -> None:
        runtime, unit = self.runtime, self.settings.unit
        for i, row in enumerate(runtime.rows):
            chosen = self.before[group.name][row.slot.index].tolist()
            if not sparse[i]:
                chosen = []
            entries, length = reference.compact_row(
                self.table[i].tolist(),
                chosen,
                contexts[i] if sparse[i] else 0,
                full_lens[i],
                unit,
                BLOCK,
            )
            assert int(metadata.seq_lens[i]) == length
            assert metadata.block_table_tensor[i, : len(entries)].tolist() == entries


@pytest.mark.parametrize(
    ("draft_units", "second"),
    [
        (None, None),
        (48, None),
        (None, "deep"),
        (None, "wide"),
        (None, "fresh"),
        (None, "two fresh"),
    ],
)
@pytest.mark.parametrize("unit", [1, 16])
def test_steps_of_the_cuda_runtime_equal_the_reference(monkeypatch, unit, draft_units, second):
    units = None if draft_units is None else draft_units // unit
    engine = FakeEngine(monkeypatch, unit, units, second=second)
    runtime, settings = engine.runtime, engine.settings
    names = ["a", "b", "c"]
    engine.runner.input_batch.req_ids = names
    # a and c are decoding; b is still in its prompt.
    contexts, new = [200, 130, 151], [1, 3, 1]
    for name, tokens, output in (("a", 201, 1), ("b", 400, 0), ("c", 152, 2)):
        engine.runner.requests[name] = SimpleNamespace(
            num_tokens=tokens, output_token_ids=[0] * output, sampling_params=None
        )
    engine.step(contexts, new, [0, 0, 0])
    assert [row.dense for row in runtime.rows] == [
        DenseReason.NO_SELECTION,
        DenseReason.PREFILL,
        DenseReason.NO_SELECTION,
    ]
    # The next step verifies a and c sparsely; one and no drafts are rejected.
    engine.runner.requests["a"].num_tokens = 202
    engine.runner.requests["c"].num_tokens = 153
    contexts, new = [201, 133, 152], [3, 2, 3]
    engine.before = {k: v.clone() for k, v in runtime.scores.selections.items()}
    planned, drafted = engine.step(contexts, new, [1, 0, 0])
    assert [row.dense for row in runtime.rows] == [None, DenseReason.PREFILL, None]
    full = [c + n for c, n in zip(contexts, new, strict=True)]
    sparse = [True, False, True]
    stats = runtime.stats()
    assert stats["sparse_rows"] == 2
    if settings.draft is None:
        engine.check_compacted(planned, full, contexts, settings.target, sparse)
        if second:
            of_second = planned.dustin_second
            assert not torch.equal(of_second.block_table_tensor, planned.block_table_tensor)
            engine.check_compacted(of_second, full, contexts, settings.second, sparse)
            # Two layers: what a row reads is the mean of both.
            read = [(planned.seq_lens[i] + of_second.seq_lens[i]) / 2 for i in (0, 2)]
            dense = [201, 152]  # of the first step
            assert stats["kv_tokens_read"] == sum(dense) + sum(map(int, read))
        assert all(m.block_table_tensor is engine.table or m is not planned for m in drafted)
    else:
        assert stats["draft_kv_tokens_read"] < stats["draft_kv_tokens_full"]
        engine.check_compacted(planned, full, contexts, settings.target, sparse)
        engine.check_compacted(drafted[-1], full, contexts, settings.draft, sparse)


def test_what_graphs_hold_of_the_fresh_layer_is_not_switched(monkeypatch):
    engine = FakeEngine(monkeypatch, 16, None, second="fresh")
    runtime, settings = engine.runtime, engine.settings
    engine.runner.vllm_config.model_config.enforce_eager = False
    runtime._check_fresh(settings)
    rival = settings.config.model_copy(update={"policy": "streaming"})
    smaller = dataclasses.replace(settings.second, budget_units=5)
    for other in ({"config": rival}, {"second": smaller}):
        changed = dataclasses.replace(settings, **other)
        with pytest.raises(runtime_cuda.config.ConfigError, match="use enforce_eager, or an"):
            runtime._check_fresh(changed)
        engine.runner.vllm_config.model_config.enforce_eager = True
        runtime._check_fresh(changed)
        engine.runner.vllm_config.model_config.enforce_eager = False
    before = runtime.buffers.groups["fresh"]
    runtime._resize()
    assert runtime.buffers.groups["fresh"] is before  # graphs hold its memory
    assert runtime.buffers.groups["target"] is not before


@pytest.mark.parametrize("unit", [1, 16])
def test_our_kernel_attends_to_the_selection_and_the_tail(monkeypatch, unit):
    engine = FakeEngine(monkeypatch, unit, None, "triton")
    monkeypatch.setattr(runtime_cuda, "_splits", lambda pairs, device: 2)
    runtime = engine.runtime
    engine.runner.input_batch.req_ids = ["a", "b"]
    for name, tokens in (("a", 201), ("b", 132)):
        engine.runner.requests[name] = SimpleNamespace(
            num_tokens=tokens, output_token_ids=[0], sampling_params=None
        )
    engine.step([200, 131], [1, 1], [0, 0])
    for name in ("a", "b"):
        engine.runner.requests[name].num_tokens += 1
    contexts, new = [201, 132], [3, 2]
    metadata = engine.metadata(contexts, new)
    planned = runtime.plan_verification(metadata)
    assert runtime.uses_own_kernel(planned)
    assert not runtime.uses_own_kernel(metadata)
    long = planned.replace(max_query_len=GAMMA + 3)
    long.dustin_compacted = True
    assert not runtime.uses_own_kernel(long)
    layer = engine.layers["target"][1]
    query = torch.randn(7, 4, HEAD_DIM, device=DEVICE)  # two rows of padding
    out = torch.full_like(query, torch.nan)
    planned.block_table = planned.block_table_tensor
    cache = token_pages(layer.kv_cache) if unit == 1 else layer.kv_cache
    runtime_cuda.attend(layer.impl, query, cache, planned, out)
    for i, row in enumerate(runtime.rows):
        assert row.dense is None
        length = contexts[i] + new[i]
        blocks = layer.kv_cache[engine.table[i].long()].transpose(1, 2).flatten(0, 1)[:length]
        keys, values = blocks.cpu().split(HEAD_DIM, dim=-1)
        span = slice(sum(new[:i]), sum(new[: i + 1]))
        wanted = reference.sparse_attention(
            query[span].cpu(),
            keys,
            values,
            layer.impl.scale,
            runtime.scores.selections["target"][row.slot.index].tolist(),
            contexts[i],
            unit,
        )
        assert torch.allclose(out[span].cpu(), wanted, atol=1e-5)
    assert out[5:].isnan().all()


@pytest.mark.parametrize(
    ("pairs", "splits"), [(1, 8), (32, 8), (64, 4), (105, 2), (106, 1), (128, 1), (512, 1)]
)
def test_rows_are_split_only_where_they_leave_multiprocessors_idle(monkeypatch, pairs, splits):
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert runtime_cuda._splits(pairs, torch.device("cuda")) == splits


def own_attention(engine: FakeEngine, kernel: str) -> dict:
    settings = dataclasses.replace(
        engine.settings, config=engine.settings.config.model_copy(update={"verify_kernel": kernel})
    )
    vllm_config = engine.runner.vllm_config
    return runtime_cuda._own_attention(vllm_config, settings, 3, torch.device(DEVICE))


def test_without_flash_attention_3_our_kernel_serves_blocks_only(monkeypatch):
    engine = FakeEngine(monkeypatch, 16, None, "auto")
    assert own_attention(engine, "auto") == {}  # FlashAttention
    monkeypatch.setattr(runtime_cuda.config, "flash_attention_version", lambda: 2)
    assert own_attention(engine, "flash") == {}
    made = own_attention(engine, "auto")
    assert made.keys() == {"target", "draft"}
    assert all(own.workspace is not None and own.nbytes for own in made.values())
    runtime_cuda.check_granularity(engine.settings)
    tokens = dataclasses.replace(engine.settings, unit=1)
    with pytest.raises(runtime_cuda.config.ConfigError, match="has version 2. Use 'block'"):
        runtime_cuda.check_granularity(tokens)


def test_the_cuda_kernel_serves_where_it_can(monkeypatch):
    engine = FakeEngine(monkeypatch, 16, None, "flash")
    refused = pytest.raises(runtime_cuda.config.ConfigError, match="verify_kernel='cuda': it is f")
    monkeypatch.setattr(cuda_ops, "is_hopper", lambda: False)
    assert own_attention(engine, "auto") == {}
    with refused:
        own_attention(engine, "cuda")
    monkeypatch.setattr(cuda_ops, "is_hopper", lambda: True)
    with pytest.raises(runtime_cuda.config.ConfigError, match=r"head_dim 16 is none.*\(the target"):
        own_attention(engine, "cuda")
    vllm_config = engine.runner.vllm_config
    draft = vllm_config.speculative_config.draft_model_config
    for model in (vllm_config.model_config, draft):
        model.dtype = torch.bfloat16
        model.get_head_size = lambda: 64

    def no_compiler():
        raise cuda_ops.BuildError("no nvcc on PATH")

    monkeypatch.setattr(cuda_ops, "build", no_compiler)
    with pytest.raises(runtime_cuda.config.ConfigError, match="no nvcc.*use 'auto'"):
        own_attention(engine, "cuda")
    said = []
    monkeypatch.setattr(
        runtime_cuda.logger, "info", lambda text, *values: said.append(text % values)
    )
    assert own_attention(engine, "auto") == {}
    assert said == ["Dustin: verify_kernel='auto' is 'flash': no nvcc on PATH"]

    monkeypatch.setattr(cuda_ops, "build", lambda: "built")
    monkeypatch.setattr(cuda_ops, "load", lambda path: f"loaded {path}")
    made = own_attention(engine, "auto")
    assert [made[name].library for name in ("target", "draft")] == ["loaded built"] * 2
    assert made["target"].least_rows == 16  # of two key heads each
    assert own_attention(engine, "cuda")["draft"].least_rows == 1
    draft.get_num_attention_heads = lambda parallel: 2 * 64
    assert own_attention(engine, "auto") == {}
    with pytest.raises(runtime_cuda.config.ConfigError, match=r"\d+ query rows.*\(the draft"):
        own_attention(engine, "cuda")


def test_small_batches_take_flash_attention(monkeypatch):
    engine = FakeEngine(monkeypatch, 16, None, "triton")
    planned = SimpleNamespace(max_query_len=2, dustin_compacted=True, num_reqs=2)
    assert engine.runtime.uses_own_kernel(planned)
    own = engine.runtime.buffers.attention
    for least, used in ((2, True), (3, False)):
        own["target"] = dataclasses.replace(own["target"], least_rows=least)
        assert engine.runtime.uses_own_kernel(planned) is used


def test_our_kernel_refuses_too_many_queries(monkeypatch):
    monkeypatch.setattr(runtime_cuda, "MAX_QUERY_ROWS", 7)
    with pytest.raises(runtime_cuda.config.ConfigError, match="use 'flash', or lower num_spec"):
        FakeEngine(monkeypatch, 16, None, "triton")


def test_a_graph_is_captured_with_the_compacted_table(monkeypatch):
    """Without requests (capture) the runtime's own buffers are handed out, dense."""
    engine = FakeEngine(monkeypatch, 16, None)
    metadata = engine.metadata([100, 60], [3, 3])
    planned = engine.runtime.plan_verification(metadata)
    table = engine.runtime.buffers.groups["target"].table
    assert planned.block_table_tensor.data_ptr() == table.data_ptr()
    assert planned.seq_lens.tolist() == [103, 63]
    assert torch.equal(planned.block_table_tensor[:, :4], engine.table[:2, :4])
    assert engine.runtime.buffers.target_queries.count == 2 * (GAMMA + 1)


def test_acceptance_is_counted_by_mode(monkeypatch):
    """In every n-th step; the host knows the drafts, the device which were rejected."""
    monkeypatch.setattr(runtime_cuda, "ACCEPTANCE_EVERY", 2)
    engine = FakeEngine(monkeypatch, 16, None)
    runtime = engine.runtime
    engine.runner.input_batch.req_ids = ["a", "b", "c"]
    for name, output in (("a", 1), ("b", 0), ("c", 2)):
        engine.runner.requests[name] = SimpleNamespace(
            num_tokens=0, output_token_ids=[0] * output, sampling_params=None
        )

    def step(contexts, new, rejected):
        for name, tokens in zip("abc", (contexts[0] + 1, 400, contexts[2] + 1), strict=True):
            engine.runner.requests[name].num_tokens = tokens
        metadata = engine.metadata(contexts, new)
        runtime.plan_verification(metadata)
        runtime._count_verified(None if rejected is None else int32(rejected))
        return runtime.stats()

    # a is sparse, b in its prompt, c has no selection; nothing is counted in every other step.
    step([200, 130, 30], [1, 3, 1], None)
    runtime.publish([runtime.rows[0]])
    # vLLM may pad a prompt's last token to a verification's length; b's rejections are none.
    stats = step([201, 133, 31], [3, 3, 3], [1, 2, 2])
    assert runtime.rows[0].dense is None
    assert stats["verifications"] == {"sparse": 1, "dense": 1}
    assert stats["verified_tokens"] == {"sparse": 2, "dense": 1}
    runtime.publish([runtime.rows[0]])
    skipped = step([203, 136, 32], [3, 3, 2], [2, 0, 1])
    for name in ("verifications", "verified_tokens"):
        assert skipped[name] == stats[name]
    runtime.publish([runtime.rows[0]])
    stats = step([204, 139, 33], [3, 3, 1], [0, 0, 0])  # c without drafts
    assert stats["verifications"] == {"sparse": 2, "dense": 1}
    assert stats["verified_tokens"] == {"sparse": 5, "dense": 1}


def test_buffers_for_64_sequences_of_32k_are_small(monkeypatch):
    """Heads of Qwen2.5-72B and 0.5B, the scoring heads of the paper, single tokens."""
    monkeypatch.setattr(runtime_cuda, "get_tp_group", lambda: ONE_RANK)
    monkeypatch.setattr(runtime_cuda.config, "flash_attention_version", lambda: 3)
    heads = {"target": (64, 8, 128), "draft": (14, 2, 64)}
    target, draft = (
        SimpleNamespace(
            get_num_attention_heads=lambda parallel, n=n: n,
            get_num_kv_heads=lambda parallel, n=kv: n,
            get_head_size=lambda n=dim: n,
            dtype=torch.bfloat16,
            max_model_len=32768,
        )
        for n, kv, dim in heads.values()
    )
    settings = Settings(
        config=DustinConfig(sample_recovery_every=100),
        gamma=4,
        unit=1,
        block_size=16,
        dilation_tokens=5,
        target=LayerGroup("target", 1024, 512),
        draft=LayerGroup("draft", 512, 256),
        target_heads=HeadSet(((40, (0, 16, 32, 48)),)),
        draft_heads=HeadSet(tuple((layer, (0, 3, 7, 10)) for layer in (4, 12, 20))),
    )
    monkeypatch.setattr(runtime_cuda.config, "resolve", lambda _: settings)
    parallel = SimpleNamespace(tensor_parallel_size=1)
    vllm_config = SimpleNamespace(
        speculative_config=SimpleNamespace(
            draft_model_config=draft, draft_parallel_config=parallel
        ),
        model_config=target,
        parallel_config=parallel,
        scheduler_config=SimpleNamespace(max_num_seqs=64),
    )
    buffers = runtime_cuda.reserve(vllm_config, torch.device("meta"))
    runtime_cuda._reserved.clear()
    assert set(buffers.scoring) == {"target", "draft", "recovery"}
    held = buffers.num_bytes() / 2**20
    print(f"{held:.0f} MiB")
    assert sum(scratch.nbytes for scratch in buffers.scoring.values()) / 2**20 < held <= 256
