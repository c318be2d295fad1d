# SPDX-License-Identifier: Apache-2.0
"""The runtime on CUDA: fixed shapes, persistent buffers, no host sync.

Which rows are sparse is decided on the host from request state, one small copy takes it to the
device, and everything else follows on the stream: how many drafts were accepted is never read
back. Under async scheduling the host knows lengths as upper bounds only (as if all drafts of
the step in flight were accepted); lengths that matter come from the device.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group

from dustin_vllm import config, cuda_ops
from dustin_vllm.config import HeadSet, LayerGroup, Settings
from dustin_vllm.draft_graphs import DraftGraphs, DraftInputs, draft_inputs
from dustin_vllm.runtime import DustinRuntime, Row, Selected, reduce_parts, reduce_scores
from dustin_vllm.state import LoopReason, Mode
from dustin_vllm.triton_kernels import (
    MAX_QUERY_ROWS,
    AttentionWorkspace,
    ScoringPlan,
    ScoringWorkspace,
    attention_workspace,
    compact,
    gather_queries,
    merge_and_select,
    paged_attention,
    scoring_plan,
    scoring_size,
    select_workspace,
    token_scores,
    token_scores_workspace,
)

logger = logging.getLogger("vllm.dustin_vllm")

GRAPH_SPLITS = 32  # vLLM's upper bound on FlashAttention's KV splits under CUDA graphs
SCORE_SCRATCH_BYTES = 96 << 20
MAX_SPLITS = 8  # of our kernel
ACCEPTANCE_EVERY = 8  # steps; see CudaRuntime._count_verified
FULL = 0.8  # pairs of row and key head per multiprocessor, from which splitting does not pay
LEAST_PAIRS = 32  # of row and key head, from which the CUDA kernel is known to be faster
ATTENTION_PARTS = 1024  # programs of our kernel that may hold a part of a row at once
# Rows of Buffers.row_info: flags, and the slot in SequenceScores.
VERIFY_SPARSELY, SLOT, NEEDS_SELECTION, DRAFT_SPARSELY, ACCEPTANCE = range(5)
# Values of ACCEPTANCE, places in Buffers.rejected.
OF_DENSE, OF_SPARSE, OF_NONE = range(3)


def token_pages(kv_cache: torch.Tensor) -> torch.Tensor:
    """View a paged cache as pages of one token, for selections of single tokens.

    Args:
        kv_cache: [B, H, N, 2 * D], NHD or HND in memory.

    Returns:
        [pages, H, 1, 2 * D] of the same memory. Token t of block b is page
        b * block_pages(kv_cache) + t; under HND the pages in between are no tokens.
    """
    num_blocks, num_heads, block_size, width = kv_cache.shape
    _, head_stride, token_stride, _ = kv_cache.stride()
    pages = (num_blocks - 1) * block_pages(kv_cache) + block_size
    return kv_cache.as_strided(
        (pages, num_heads, 1, width), (token_stride, head_stride, token_stride, 1)
    )


def block_pages(kv_cache: torch.Tensor) -> int:
    """Pages of one token from one block to the next: N under NHD, H * N under HND."""
    return kv_cache.stride(0) // kv_cache.stride(2)


class QueryBuffer:
    """Queries of one model's scoring heads, [places, scoring heads of all layers, D].

    Which token rows are kept is in ``rows`` (device) and ``count`` (host): both are the same
    whether a layer runs eagerly or is captured in a graph for that batch size.
    """

    def __init__(
        self, heads: HeadSet, num_places: int, head_dim: int, dtype: torch.dtype, device: Any
    ) -> None:
        self.heads = heads
        self.queries = torch.zeros(
            num_places, heads.num_heads, head_dim, dtype=dtype, device=device
        )
        self.rows = torch.zeros(num_places, dtype=torch.int64, device=device)
        self.first_place = 0
        self.count = 0
        self._layers: dict[int, tuple[slice, torch.Tensor]] = {}

    def of_layer(self, layer: int) -> torch.Tensor:
        """The part of ``queries`` with the heads of one layer, which may be none."""
        begin = sum(len(heads) for index, heads in self.heads.layers if index < layer)
        return self.queries[:, begin : begin + self.heads.of_layer(layer).num_heads]

    def attach(self, layers: dict[int, Any]) -> None:
        """Give every scoring layer its share of the buffer."""
        begin = 0
        for index, heads in self.heads.layers:
            impl = layers[index].impl
            chosen = torch.tensor(heads, dtype=torch.int32, device=self.queries.device)
            self._layers[id(impl)] = (slice(begin, begin + len(heads)), chosen)
            impl.capture = self
            begin += len(heads)

    def take(self, impl: Any, query: torch.Tensor) -> None:
        """query: [tokens, num_heads, head_dim], rotated."""
        if self.count == 0:
            return
        share, heads = self._layers[id(impl)]
        places = slice(self.first_place, self.first_place + self.count)
        gather_queries(self.queries[places, share], query, self.rows[: self.count], heads)


@dataclass
class GroupBuffers:
    """What layers of one group read. The draft may share the target's: it runs after it."""

    table: torch.Tensor  # [R, W] int32 compacted block tables
    lens: torch.Tensor  # [R] int32 compacted lengths
    selected: torch.Tensor  # [R, K] int32, this step's, by batch row
    select: Any  # triton_kernels.SelectionWorkspace


@dataclass
class Buffers:
    """Everything Dustin keeps on the device, sized once for the largest batch and context."""

    settings: Settings
    max_rows: int
    row_info: torch.Tensor  # [5, R] int32: VERIFY_SPARSELY and so on
    row_info_host: torch.Tensor  # the same, pinned
    contexts: torch.Tensor  # [R] int32
    verified: torch.Tensor  # [R] int32, contexts of this step's verification
    scores: torch.Tensor  # [2, R, C] fp32, see score_rows
    fresh: torch.Tensor  # [R, C] fp32, of the step's own queries; empty without fresh_layers
    fresh_lens: torch.Tensor  # [R] int32, lengths they are made for; 0: not wanted
    target_queries: QueryBuffer  # R * (gamma + 1) places
    draft_queries: QueryBuffer  # gamma * R places, pass by pass
    groups: dict[str, GroupBuffers]
    draft_inputs: DraftInputs
    attention: dict[str, OwnAttention]  # by model; none where FlashAttention is used
    scoring: dict[str, ScoringWorkspace]  # by what is scored, where this rank has scoring heads
    recovery: torch.Tensor  # [2] fp32: sum, samples
    rejected: torch.Tensor  # [3] int64: draft tokens, by ACCEPTANCE of their rows

    def score_rows(self, rows: int) -> torch.Tensor:
        """[2, rows, C]: history and lookahead of a batch, next to each other in memory, so that
        one all-reduce takes both."""
        context = self.scores.shape[2]
        return self.scores.view(-1)[: 2 * rows * context].view(2, rows, context)

    def num_bytes(self) -> int:
        """Device memory of all buffers."""
        holders = [self, self.draft_inputs, *self.groups.values()]
        holders += [group.select for group in self.groups.values()]
        holders += [*self.attention.values(), *self.scoring.values()]
        tensors = [v for h in holders for v in vars(h).values() if isinstance(v, torch.Tensor)]
        for query_buffer in (self.target_queries, self.draft_queries):
            tensors += [query_buffer.queries, query_buffer.rows]
        owned = {id(t): t for t in tensors if t.device.type != "cpu"}  # fresh layers share
        return sum(t.nbytes for t in owned.values())


_reserved: dict[int, tuple[Any, Buffers]] = {}


def reserve(vllm_config: Any, device: torch.device) -> Buffers:
    """The buffers of one engine, allocated at the first call."""
    speculative = vllm_config.speculative_config
    key = id(speculative)  # shared by the target's configuration and the draft's copy of it
    if key in _reserved:
        return _reserved[key][1]
    if vllm_config.model_config is speculative.draft_model_config:
        raise RuntimeError("dustin_vllm: the draft was built before the target")
    settings = config.resolve(vllm_config)
    check_granularity(settings)
    rows = vllm_config.scheduler_config.max_num_seqs
    context = vllm_config.model_config.max_model_len
    width = -(-context // settings.unit)
    gamma = settings.gamma

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    group = get_tp_group()

    def queries(heads: HeadSet, places: int, model: Any, parallel: Any) -> QueryBuffer:
        per_rank = model.get_num_attention_heads(parallel)
        ranks = parallel.tensor_parallel_size
        local = heads.of_rank(group.rank_in_group, ranks, per_rank)
        return QueryBuffer(local, places, model.get_head_size(), model.dtype, device)

    in_step = bool(settings.config.fresh_layers)
    buffers = Buffers(
        settings=settings,
        max_rows=rows,
        row_info=zeros(5, rows),
        row_info_host=torch.zeros(
            5, rows, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda"
        ),
        contexts=zeros(rows),
        verified=zeros(rows),
        scores=zeros(2, rows, context, dtype=torch.float32),
        fresh=zeros(rows if in_step else 0, context, dtype=torch.float32),
        fresh_lens=zeros(rows),
        target_queries=queries(
            settings.target_heads,
            rows * (gamma + 1),
            vllm_config.model_config,
            vllm_config.parallel_config,
        ),
        draft_queries=queries(
            settings.draft_heads,
            rows * gamma,
            speculative.draft_model_config,
            speculative.draft_parallel_config,
        ),
        groups={
            group.name: GroupBuffers(
                table=zeros(rows, width),
                lens=zeros(rows),
                **_selection_buffers(settings, group, rows, context, device),
            )
            for group in settings.groups
        },
        draft_inputs=draft_inputs(rows, gamma, -(-context // settings.block_size), device),
        attention=_own_attention(vllm_config, settings, rows, device),
        recovery=zeros(2, dtype=torch.float32),
        rejected=zeros(3, dtype=torch.int64),
        scoring={},
    )
    buffers.scoring = _scoring_workspaces(vllm_config, buffers, device)
    # The previous engine of this process, if any, is gone or has its own reference.
    _reserved.clear()
    _reserved[key] = (speculative, buffers)
    return buffers


def _scoring_workspaces(
    vllm_config: Any, buffers: Buffers, device: torch.device
) -> dict[str, ScoringWorkspace]:
    """Scratch of scoring: history, lookahead and what else there is."""
    settings, speculative = buffers.settings, vllm_config.speculative_config
    gamma, room = settings.gamma, SCORE_SCRATCH_BYTES
    heads = buffers.target_queries.heads
    target = (vllm_config.model_config, vllm_config.parallel_config)
    draft = (speculative.draft_model_config, speculative.draft_parallel_config)
    wanted = {
        "target": (heads, *target, 1, room),
        "draft": (buffers.draft_queries.heads, *draft, gamma, room),
    }
    for layer in settings.config.fresh_layers:
        wanted[f"fresh {layer}"] = (heads.of_layer(layer), *target, gamma + 1, room)
    if settings.config.sample_recovery_every:
        wanted["recovery"] = (heads, *target, gamma + 1, room // 4)
    made: dict[str, ScoringWorkspace] = {}
    scratch: dict[Any, ScoringWorkspace] = {}
    for name, (chosen, model, parallel, num_queries, max_bytes) in wanted.items():
        if chosen.num_heads:
            group = model.get_num_attention_heads(parallel) // model.get_num_kv_heads(parallel)
            size = scoring_size([heads for _, heads in chosen.layers], group, model.dtype)
            _, rows, context = buffers.scores.shape
            key = size if name.startswith("fresh") else name  # fresh layers take turns
            if key not in scratch:
                scratch[key] = token_scores_workspace(
                    size, num_queries, rows, context, device, max_bytes
                )
            made[name] = scratch[key]
    return made


def _selection_buffers(
    settings: Settings, group: LayerGroup, rows: int, context: int, device: Any
) -> dict[str, Any]:
    """``selected`` and ``select`` of GroupBuffers, which depend on the budget."""
    budget, lookahead = group.budget_units, group.lookahead_units
    return {
        "selected": torch.zeros(rows, budget, dtype=torch.int32, device=device),
        "select": select_workspace(rows, context, settings.unit, budget, lookahead, device),
    }


@dataclass(frozen=True)
class OwnAttention:
    """Our attention kernel as one model's layers use it."""

    workspace: AttentionWorkspace | None  # of the Triton kernel
    library: Any = None  # with the CUDA kernel, or None
    least_rows: int = 1  # smaller batches take FlashAttention

    @property
    def nbytes(self) -> int:
        """Device memory held."""
        return 0 if self.workspace is None else self.workspace.nbytes


@dataclass(frozen=True)
class AttentionShape:
    """What this rank's layers of a model ask of an attention kernel."""

    queries: int  # of a sequence, at most
    group: int  # query heads that share a key head
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def query_rows(self) -> int:
        """Queries of a sequence times heads that share a key head."""
        return self.queries * self.group


def _attention_shape(model: Any, parallel: Any, queries: int) -> AttentionShape:
    kv_heads = model.get_num_kv_heads(parallel)
    group = model.get_num_attention_heads(parallel) // kv_heads
    return AttentionShape(queries, group, kv_heads, model.get_head_size(), model.dtype)


def _own_attention(
    vllm_config: Any, settings: Settings, rows: int, device: torch.device
) -> dict[str, OwnAttention]:
    """Our kernel for both models; empty if FlashAttention serves.

    Raises:
        ConfigError: the kernel that the settings name cannot serve one of them.
    """
    speculative, gamma = vllm_config.speculative_config, settings.gamma
    shapes = {
        "target": _attention_shape(
            vllm_config.model_config, vllm_config.parallel_config, gamma + 1
        ),
        "draft": _attention_shape(
            speculative.draft_model_config, speculative.draft_parallel_config, gamma + 2
        ),
    }
    kernel: str = settings.config.verify_kernel
    if kernel in ("auto", "cuda"):
        library, why = _cuda_library(shapes)
        if library is not None:
            least = -(-LEAST_PAIRS // shapes["target"].kv_heads) if kernel == "auto" else 1
            return dict.fromkeys(shapes, OwnAttention(None, library, least))
        if kernel == "cuda":
            raise config.ConfigError(
                f"dustin.verify_kernel='cuda': {why}; use 'auto', 'flash' or 'triton'"
            )
        # FlashAttention 2 has no schedule to share between layers and was not measured.
        kernel = "flash" if config.flash_attention_version() == 3 else "triton"
        if cuda_ops.is_hopper():
            logger.info("Dustin: verify_kernel='auto' is %r: %s", kernel, why)
    if kernel == "flash":
        return {}
    return {name: _triton_attention(shape, rows, device) for name, shape in shapes.items()}


def _cuda_library(shapes: Mapping[str, AttentionShape]) -> tuple[Any, str]:
    """The CUDA kernel if it can serve these models, or None and why not."""
    for name, shape in shapes.items():
        why = cuda_ops.why_not(shape.head_dim, shape.query_rows, shape.dtype)
        if why is not None:
            return None, f"{why} (the {name})"
    try:
        return cuda_ops.load(cuda_ops.build()), ""
    except cuda_ops.BuildError as error:
        return None, str(error)


def _triton_attention(shape: AttentionShape, rows: int, device: torch.device) -> OwnAttention:
    if shape.query_rows > MAX_QUERY_ROWS:
        raise config.ConfigError(
            f"dustin.verify_kernel='triton': {shape.queries} queries of {shape.group} heads that "
            f"share a key head are {shape.query_rows} rows, at most {MAX_QUERY_ROWS} are "
            "supported; use 'flash', or lower num_speculative_tokens"
        )
    workspace = attention_workspace(
        rows, shape.kv_heads, shape.query_rows, shape.head_dim, ATTENTION_PARTS, device
    )
    return OwnAttention(workspace)


def check_granularity(settings: Settings) -> None:
    """Refuse what the device's kernels cannot read.

    Raises:
        ConfigError: token granularity without FlashAttention 3.
    """
    version = config.flash_attention_version()
    if settings.unit == 1 and version != 3:
        raise config.ConfigError(
            f"dustin.granularity='token' needs FlashAttention 3 (Hopper), which reads pages of one "
            f"token; this device has version {version}. Use 'block'"
        )


def attend(impl: Any, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, out: Any) -> None:
    """Our kernel in FlashAttention's place, for one layer.

    Args:
        impl: the layer's attention, whose ``own`` CudaRuntime has set.
        query, out: [T, Hq, D]; rows of padding are not written.
        kv_cache: pages of what metadata.block_table addresses, [pages, Hkv, page size, 2 * D].
    """
    keys, values = kv_cache.transpose(1, 2).split(impl.head_size, dim=-1)
    inputs = (
        *(out, query, keys, values, metadata.block_table, metadata.seq_lens),
        *(metadata.query_start_loc, metadata.max_query_len, impl.scale),
    )
    pairs = metadata.seq_lens.shape[0] * impl.num_kv_heads
    if impl.own.workspace is not None:
        paged_attention(*inputs, impl.own.workspace, _splits(pairs, query.device))
        return
    device = torch.cuda.get_device_properties(query.device)
    splits = cuda_ops.splits(pairs, impl.head_size, device.multi_processor_count)
    # What writes the table is far behind: at least the layer's write into the cache is between.
    # But not in a layer that has just selected.
    early = impl.selects is None
    cuda_ops.paged_attention(*inputs, splits, early=early, library=impl.own.library)


def _splits(pairs: int, device: torch.device) -> int:
    """Programs per sequence and key head: two for every multiprocessor in all.

    One where pairs about fill the device: combining parts took longer on an H200 (batch 16, 8
    key heads) than a second program per multiprocessor gained.
    """
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    if pairs >= FULL * multiprocessors:
        return 1
    return max(1, min(MAX_SPLITS, 2 * multiprocessors // pairs))


class CudaRuntime(DustinRuntime):
    """See ``DustinRuntime``."""

    def __init__(
        self,
        runner: Any,
        settings: Settings,
        builder: Any,
        target_layers: dict[int, Any],
        draft_layers: dict[int, Any],
    ) -> None:
        super().__init__(runner, settings, runner.device)
        self.buffers = reserve(runner.vllm_config, runner.device)
        self.target_layers = target_layers
        self.draft_layers = draft_layers
        self.page_size = settings.unit
        self._kv_heads = target_layers[0].impl.num_kv_heads
        self.buffers.target_queries.attach(target_layers)
        self.buffers.draft_queries.attach(draft_layers)
        for name, layers in (("target", target_layers), ("draft", draft_layers)):
            for layer in layers.values():
                layer.impl.own = self.buffers.attention.get(name)
        self._places = torch.arange(self.buffers.max_rows, device=runner.device)
        self._offsets = torch.arange(settings.gamma + 1, device=runner.device)
        # Scoring plans by model; None where this rank holds no scoring heads.
        self._plans: dict[str, ScoringPlan | None] = {}
        self._block_pages = 0
        self._scoring = False
        self._draft_sparse = False  # whether rows of this step draft sparsely
        self._passes = 0
        self._num_reqs = 0  # rows that are drafted for; padded ones too within a graph
        self._graphs = DraftGraphs(self, runner.drafter, self.buffers.draft_inputs)
        self._verified_steps = 0
        self._block_table: torch.Tensor | None = None
        self._whole: Any = None  # for select_in_step: vLLM's metadata, with whole block tables
        self._last_queries = torch.empty(0)  # [R, scoring heads, D], of the last confirmed token
        pinned = runner.device.type == "cuda"
        self._recovery_host = torch.zeros(2, device="cpu", pin_memory=pinned)
        self._rejected_host = torch.zeros(3, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._proposals = 0
        logger.info("Dustin: %.0f MiB of device buffers", self.buffers.num_bytes() / 2**20)

    def stats(self) -> dict[str, Any]:
        total, samples = self._recovery_host.tolist()
        self.counters.recovery_sum, self.counters.recovery_samples = total, int(samples)
        stats = super().stats()
        # The counters hold drafts that were verified; how many were rejected the device knows.
        *known, _ = self._rejected_host.tolist()
        for mode, rejected in zip((Mode.DENSE, Mode.SPARSE), known, strict=True):
            if mode.value in stats["verified_tokens"]:
                stats["verified_tokens"][mode.value] -= rejected
        return stats

    def num_splits(self, num_reqs: int) -> int:
        """Upper bound on FlashAttention's KV splits for verification.

        One split needs no combine kernel; with a compacted row of a few tiles, rows times KV
        heads fill the device alone.
        """
        if not self.settings.config.sparse_verification:
            return GRAPH_SPLITS
        device = torch.cuda.get_device_properties(self.runner.device)
        full = num_reqs * self._kv_heads >= FULL * device.multi_processor_count
        return 1 if full else GRAPH_SPLITS

    def draft_splits(self) -> int:
        """The same for the draft. Its heads are few and its layers short: one split reads a
        selection faster than two kernels do."""
        return GRAPH_SPLITS if self.settings.draft is None else 1

    def uses_own_kernel(self, metadata: Any) -> bool:
        """Whether our attention kernel serves a pass: short queries over compacted tables."""
        short = metadata.max_query_len <= self.settings.gamma + 2
        compacted = getattr(metadata, "dustin_compacted", False)
        own = self.buffers.attention.get("target")
        return own is not None and compacted and short and metadata.num_reqs >= own.least_rows

    # ---- verification -------------------------------------------------------------------

    def plan_verification(self, metadata: Any) -> Any:
        self.decide_rows(metadata)
        buffers, settings, rows = self.buffers, self.settings, self.rows
        num_reqs = metadata.num_reqs
        self._scoring = any(row.needs_selection for row in rows)
        sparse = any(row.dense is None for row in rows)
        self._draft_sparse = any(row.drafts_sparsely for row in rows)
        self._whole = None
        # In a captured graph the queries are always kept.
        queries = buffers.target_queries
        width = settings.gamma + 1
        queries.count = num_reqs * width if self._scoring or not rows else 0
        if num_reqs > buffers.max_rows or not self.caches_bound():
            queries.count = 0
            self._scoring = False
            return metadata
        self._copy_row_info()
        if queries.count:
            ends = metadata.query_start_loc[1 : num_reqs + 1, None]
            kept = (ends - width + self._offsets).maximum(metadata.query_start_loc[:num_reqs, None])
            # Padded rows start behind the last token.
            kept = kept.clamp(max=metadata.num_actual_tokens - 1)
            queries.rows[: queries.count].copy_(kept.view(-1))
        selected = sparse or self._draft_sparse
        if rows and not selected and metadata.max_query_len > width:
            return metadata  # never in a full graph: the stock path is the same and cheaper
        slots = buffers.row_info[SLOT, :num_reqs]
        starts = metadata.query_start_loc[: num_reqs + 1]
        seq_lens = metadata.seq_lens[:num_reqs]
        contexts = buffers.contexts[:num_reqs]
        torch.sub(seq_lens, starts[1:] - starts[:-1], out=contexts)
        for group in settings.groups if selected else (settings.target,):
            torch.index_select(
                self.scores.selections[group.name],
                0,
                slots,
                out=buffers.groups[group.name].selected[:num_reqs],
            )
        self._verified_steps += sparse
        buffers.verified[:num_reqs].copy_(contexts)
        if not settings.config.sparse_verification:
            return metadata
        planned = self._compact(metadata, num_reqs, settings.target, contexts, VERIFY_SPARSELY)
        if settings.second is not None:
            # Of a selection that is made within the step these are the lengths, and room for it.
            planned.dustin_second = self._compact(
                metadata, num_reqs, settings.second, contexts, VERIFY_SPARSELY
            )
            self._whole = metadata if queries.count else None
        return planned

    def select_in_step(self, layer: int, metadata: Any) -> None:
        buffers, settings, group = self.buffers, self.settings, self.settings.fresh
        whole = self._whole
        if whole is None or group is None:
            return
        num_reqs = whole.num_reqs
        lens, scores = buffers.fresh_lens[:num_reqs], buffers.fresh[:num_reqs]
        torch.mul(whole.seq_lens[:num_reqs], buffers.row_info[VERIFY_SPARSELY, :num_reqs], out=lens)
        kept = buffers.target_queries.of_layer(layer)
        self._token_scores(
            f"fresh {layer}",
            scores,
            kept.unflatten(0, (-1, settings.gamma + 1))[:num_reqs],
            whole.block_table_tensor[:num_reqs],
            lens,
            settings.config.aggregate,
        )
        reduce_scores(scores, settings.config.aggregate)
        contexts, own = buffers.verified[:num_reqs], buffers.groups[group.name]
        merge_and_select(
            own.selected[:num_reqs],
            scores,
            scores,
            contexts,
            own.select,
            settings.config.sinks,
            settings.config.recent,
            0,
            "fill",
            0,
            settings.config.lookahead_weight,
        )
        # Into the table that the layers' metadata has already.
        self._compact(whole, num_reqs, group, contexts, VERIFY_SPARSELY)

    def _compact(
        self, metadata: Any, num_reqs: int, group: LayerGroup, contexts: torch.Tensor, flag: int
    ) -> Any:
        """A copy of the metadata in which rows with the flag read the group's selection and
        their tail.

        Its tables address pages of ``page_size`` tokens, dense rows' too.
        """
        settings, rows = self.settings, self.rows
        buffers = self.buffers.groups[group.name]
        table, lens = buffers.table[:num_reqs], buffers.lens[:num_reqs]
        compact(
            table,
            lens,
            metadata.block_table_tensor[:num_reqs],
            buffers.selected[:num_reqs],
            contexts,
            metadata.seq_lens[:num_reqs],
            self.buffers.row_info[flag, :num_reqs],
            settings.unit,
            settings.block_size,
            self._block_pages if settings.unit == 1 else None,
        )
        info = self.buffers.row_info_host[flag, : len(rows)]
        all_sparse = rows and bool(info.all())
        # Selection, unfilled unit, and at most 2 * gamma + 2 new tokens of verification and draft.
        longest = (group.budget_units + 1) * settings.unit + 2 * settings.gamma + 2
        compacted = metadata.replace(
            block_table_tensor=table,
            seq_lens=lens,
            max_seq_len=longest if all_sparse else metadata.max_seq_len,
        )
        compacted.dustin_compacted = True
        return compacted

    def _copy_row_info(self) -> None:
        host = self.buffers.row_info_host
        info = host.numpy()  # assigning to tensor elements one by one costs the host more
        info[:] = 0
        info[SLOT] = self.scores.padding_index
        for i, row in enumerate(self.rows):
            info[:, i] = (
                row.dense is None,
                row.slot.index,
                row.needs_selection,
                row.drafts_sparsely,
                (OF_SPARSE if row.dense is None else OF_DENSE) if row.verifies else OF_NONE,
            )
        # vLLM prepares a step's inputs, this among them, only after the copies of the step
        # before have ended (GPUModelRunner.synchronize_input_prep), so the host may write again.
        self.buffers.row_info.copy_(host, non_blocking=True)

    def caches_bound(self) -> bool:
        """Whether the KV caches exist; makes the scoring plans when they first do."""
        if self._plans:
            return True
        first = self.target_layers[0].kv_cache
        if first.numel() == 0 or first.dim() != 4:
            return False
        self._block_pages = block_pages(first)
        of_target = self.buffers.target_queries.heads
        for name, layers, chosen in (
            ("target", self.target_layers, of_target),
            ("draft", self.draft_layers, self.buffers.draft_queries.heads),
            *(
                (f"fresh {layer}", self.target_layers, of_target.of_layer(layer))
                for layer in self.settings.config.fresh_layers
            ),
        ):
            self._plans[name] = None
            if not chosen.num_heads:
                continue
            impl = layers[0].impl
            keys = [
                layers[index].kv_cache.transpose(1, 2)[..., : impl.head_size]
                for index, _ in chosen.layers
            ]
            heads = [heads for _, heads in chosen.layers]
            self._plans[name] = scoring_plan(keys, heads, impl.num_heads)
        return True

    def _token_scores(
        self,
        name: str,
        out: torch.Tensor,
        queries: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        aggregate: str,
    ) -> None:
        """What this rank's heads of a model add to the mean over all, or their maximum."""
        plan = self._plans["target" if name == "recovery" else name]
        if plan is None:
            out.zero_()
            return
        layers = self.draft_layers if name == "draft" else self.target_layers
        layer = name.partition(" ")[2]
        heads = self.settings.draft_heads if name == "draft" else self.settings.target_heads
        if layer:
            heads = heads.of_layer(int(layer))
        token_scores(
            out,
            queries,
            plan,
            block_table,
            seq_lens,
            self.buffers.scoring[name],
            layers[0].impl.scale,
            aggregate,
            1.0 / (queries.shape[1] * heads.num_heads),
        )

    # ---- scoring ------------------------------------------------------------------------

    def begin_scoring(self, metadata: Any, num_rejected: torch.Tensor | None) -> None:
        self.buffers.target_queries.count = 0
        self._num_reqs = len(self.rows)
        if self._scoring:
            self.score_history(metadata, num_rejected)

    def score_history(self, metadata: Any, num_rejected: torch.Tensor | None) -> None:
        """The device's part of ``begin_scoring``, for all rows of the metadata."""
        buffers, gamma = self.buffers, self.settings.gamma
        num_reqs = self._num_reqs = metadata.num_reqs
        needs = buffers.row_info[NEEDS_SELECTION, :num_reqs]
        contexts = buffers.contexts[:num_reqs]
        kept = buffers.target_queries.queries.unflatten(0, (-1, gamma + 1))
        if num_rejected is None:
            last = kept[:num_reqs, gamma]
            torch.mul(metadata.seq_lens[:num_reqs], needs, out=contexts)
        else:
            rejected = num_rejected[:num_reqs]
            last = kept[self._places[:num_reqs], gamma - rejected]
            torch.mul(metadata.seq_lens[:num_reqs] - rejected, needs, out=contexts)
        self._block_table = metadata.block_table_tensor[:num_reqs]
        self._last_queries = last
        history = buffers.score_rows(num_reqs)[0]
        self._token_scores(
            "target",
            history,
            last[:, None],
            self._block_table,
            contexts,
            self.settings.config.aggregate,
        )
        self._passes = 0

    def begin_draft_pass(self, rows: torch.Tensor | None) -> None:
        queries, num_reqs = self.buffers.draft_queries, self._num_reqs
        scoring = self._scoring or self.capturing
        if not scoring or self._passes == self.settings.gamma:
            queries.count = 0
            return
        wanted = self._places[:num_reqs] if rows is None else rows[:num_reqs]
        queries.rows[:num_reqs].copy_(wanted)
        queries.first_place = self._passes * self.buffers.max_rows
        queries.count = num_reqs
        self._passes += 1

    def compact_draft(self, metadata: Any) -> Any:
        group = self.settings.draft
        if group is None or not (self._draft_sparse or self.capturing):
            return metadata
        num_reqs = self._num_reqs
        self._count_draft(self._passes)
        return self._compact(
            metadata, num_reqs, group, self.buffers.verified[:num_reqs], DRAFT_SPARSELY
        )

    def _count_draft(self, index: int) -> None:
        # Upper bounds: how many drafts were rejected is not known on the host.
        self.count_draft_pass([row.seq_len + index for row in self.rows])

    def finish_scoring(self) -> None:
        self.buffers.draft_queries.count = 0
        if self._scoring and self._passes == self.settings.gamma:
            self.select()
            self._publish()

    def select(self) -> None:
        """The device's part of ``finish_scoring``."""
        buffers, settings = self.buffers, self.settings
        buffers.draft_queries.count = 0
        num_reqs = self._num_reqs
        contexts = buffers.contexts[:num_reqs]
        if self.policy is not None:
            self._rank()
            return
        needs = buffers.row_info[NEEDS_SELECTION, :num_reqs]
        queries = buffers.draft_queries.queries.unflatten(0, (settings.gamma, -1))
        assert self._block_table is not None
        both = buffers.score_rows(num_reqs)
        history, lookahead = both
        self._token_scores(
            "draft",
            lookahead,
            queries[:, :num_reqs].transpose(0, 1),
            self._block_table,
            contexts + settings.gamma * needs,
            settings.config.aggregate,
        )
        reduce_parts(both, settings)
        # Rows without a selection write too, but their slots are not marked as published.
        slots = buffers.row_info[SLOT, :num_reqs].long()
        for group in settings.merged_groups:
            own = buffers.groups[group.name]
            selected = own.selected[:num_reqs]
            merge_and_select(
                selected,
                lookahead,
                history,
                contexts,
                own.select,
                settings.config.sinks,
                settings.config.recent,
                settings.dilation_tokens,
                settings.group_merge,
                group.lookahead_units,
                settings.config.lookahead_weight,
            )
            self.scores.selections[group.name].index_copy_(0, slots, selected)
        if self.on_selection is not None:
            made = buffers.groups[settings.target.name].selected
            places, rows, lengths = self._larger_than_budget()
            scores = (lookahead[places], history[places])
            self.on_selection(Selected(rows, lengths, *scores, made[places]))

    def _rank(self) -> None:
        """Selections by the policy."""
        places, rows, lengths = self._larger_than_budget()
        if rows:
            assert self._block_table is not None
            tables = self._block_table[places]
            self.select_by_policy(rows, lengths, self._last_queries[places], tables)

    def _larger_than_budget(self) -> tuple[list[int], list[Row], list[int]]:
        """Batch rows that get a selection and have something to drop, and their contexts, which
        are read back from the device."""
        unit, budget = self.settings.unit, self.settings.largest.budget_units
        lengths = self.buffers.contexts[: len(self.rows)].tolist()
        places = [
            i
            for i, row in enumerate(self.rows)
            if row.needs_selection and lengths[i] // unit > budget
        ]
        return places, [self.rows[i] for i in places], [lengths[i] for i in places]

    def scoring_layers(self) -> list[tuple[Any, tuple[int, ...]]]:
        heads = self.buffers.target_queries.heads
        return [(self.target_layers[index], chosen) for index, chosen in heads.layers]

    def scoring_keys(self, block_table: torch.Tensor, start: int, end: int) -> torch.Tensor:
        size = self.settings.block_size
        blocks = block_table[start // size : -(-end // size)].long()
        keys = [
            layer.kv_cache[blocks].transpose(1, 2)[..., : layer.impl.head_size].flatten(0, 1)
            for layer, _ in self.scoring_layers()
        ]
        return torch.cat(keys, dim=1)[start % size :][: end - start]

    def verification_queries(self) -> tuple[list[int], torch.Tensor]:
        rows = [i for i, row in enumerate(self.rows) if row.needs_selection]
        kept = self.buffers.target_queries.queries.unflatten(0, (-1, self.settings.gamma + 1))
        return rows, kept[rows]

    def _resize(self) -> None:
        buffers, settings = self.buffers, self.settings
        # The tables are captured in target graphs.
        target = buffers.groups[settings.target.name]
        sizes = (buffers.max_rows, buffers.scores.shape[2], self.runner.device)
        # So is what is used within a step, where it stays the same, see _check_fresh.
        unchanged = settings.fresh if settings.fresh == buffers.settings.fresh else None
        buffers.settings = settings
        buffers.groups = {
            group.name: buffers.groups[group.name]
            if group == unchanged
            else replace(
                buffers.groups.get(group.name, target),
                **_selection_buffers(settings, group, *sizes),
            )
            for group in settings.groups
        }

    def _publish(self) -> None:
        self.publish([row for row in self.rows if row.needs_selection])
        self._scoring = False

    # ---- drafting as one graph ----------------------------------------------------------

    @property
    def capturing(self) -> bool:  # type: ignore[override]
        """Whether a draft loop is being captured."""
        return self._graphs.capturing

    def capture_drafting(self, num_tokens: int) -> None:
        if self.policy is not None:
            return  # what it does is not captured
        if self.settings.config.draft_graphs and num_tokens % (self.settings.gamma + 1) == 0:
            self._graphs.capture(num_tokens // (self.settings.gamma + 1))

    def _count_verified(self, num_rejected: torch.Tensor | None) -> None:
        """Count acceptance now and then: reading it back costs the host two launches and a copy."""
        self._proposals += 1
        if num_rejected is None or self._proposals % ACCEPTANCE_EVERY:
            return
        self.count_verified({})
        buffers, num_reqs = self.buffers, len(self.rows)
        buffers.rejected.index_add_(
            0, buffers.row_info[ACCEPTANCE, :num_reqs], num_rejected[:num_reqs].long()
        )
        self._rejected_host.copy_(buffers.rejected, non_blocking=True)  # read when it is there

    def replay_drafting(self, arguments: dict[str, Any]) -> torch.Tensor | None:
        metadata = arguments["common_attn_metadata"]
        self._count_verified(arguments.get("num_rejected_tokens_gpu"))
        if self._scoring:
            self._sample_recovery(metadata)
        drafts = self._graphs.replay(arguments)
        if isinstance(drafts, LoopReason):
            self.counters.draft_loops[drafts.value] += 1
            return None
        self.counters.draft_graphs += 1
        self.buffers.target_queries.count = 0
        if self._draft_sparse:
            for index in range(self.settings.gamma):
                self._count_draft(index + 1)
        if self._scoring:
            self._publish()
        return drafts

    def _sample_recovery(self, metadata: Any) -> None:
        """Measure how much attention mass this step's selections covered, now and then.

        Over the target's scoring heads and the gamma + 1 queries of rows that verified a full
        set of drafts. Uses the lookahead buffer, which is free until the drafts exist.
        """
        every, settings = self.settings.config.sample_recovery_every, self.settings
        rows = self.rows
        sparse = [r.dense is None and r.seq_len - r.context == settings.gamma + 1 for r in rows]
        if not every or self._verified_steps % every or not any(sparse):
            return
        buffers, unit, num_reqs = self.buffers, settings.unit, len(rows)
        sampled = torch.tensor(sparse, device=self.buffers.contexts.device)
        seq_lens = metadata.seq_lens[:num_reqs] * sampled
        kept = buffers.target_queries.queries.unflatten(0, (-1, settings.gamma + 1))[:num_reqs]
        mass = buffers.score_rows(num_reqs)[1]
        table = metadata.block_table_tensor[:num_reqs]
        self._token_scores("recovery", mass, kept, table, seq_lens.int(), "mean")
        reduce_scores(mass, "mean")
        tail = buffers.verified[:num_reqs, None] // unit * unit
        whole = mass.shape[1] // unit * unit
        units = mass[:, :whole].view(num_reqs, -1, unit).sum(2)
        chosen = self.scores.selections[settings.target.name][
            buffers.row_info[SLOT, :num_reqs].long()
        ].long()
        places = torch.arange(mass.shape[1], device=mass.device)[None]
        covered = units.gather(1, chosen).sum(1) + (mass * (places >= tail)).sum(1)
        total = mass.sum(1).clamp(min=1e-9)
        buffers.recovery[0] += (covered / total * sampled).sum()
        buffers.recovery[1] += sampled.sum()
        self._recovery_host.copy_(buffers.recovery, non_blocking=True)  # read when it is there
