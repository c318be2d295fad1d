# SPDX-License-Identifier: Apache-2.0
"""One verification step, seen from the model runner.

Order of events in a step, all in the worker:

1. ``plan_verification`` (from the target's metadata builder): decides for every row whether it
   is sparse, and shortens the block tables of sparse rows.
2. The target runs. Its scoring layers keep the last gamma + 1 queries of the rows to be scored.
3. ``begin_scoring`` (from the proposer, after sampling): history scores, from the query of the
   last confirmed token.
4. The draft runs, gamma passes. Its scoring layers keep one query per row and pass.
5. ``finish_scoring``: lookahead scores, merge, and the selections are published.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import torch

from dustin_vllm import compat, config, cpu_ops, selection, state
from dustin_vllm.config import HeadSet, Settings
from dustin_vllm.proposer import DustinProposer
from dustin_vllm.state import DenseReason

logger = logging.getLogger("vllm.dustin_vllm")

CPU_LAYOUTS = ("vec", "vec16", "amx")


class QueryCapture:
    """Keeps queries of one scoring layer while it is armed.

    Args:
        layer: vLLM's attention layer.
        heads: query-head indices to keep.
    """

    def __init__(self, layer: Any, heads: tuple[int, ...]) -> None:
        self.layer = layer
        self.heads = torch.tensor(heads)
        group = layer.impl.num_heads // layer.impl.num_kv_heads
        self.kv_heads = (self.heads // group).to(torch.int32)
        self.rows: torch.Tensor | None = None
        self.taken: list[torch.Tensor] = []

    def arm(self, rows: torch.Tensor | None) -> None:
        """Keep query rows ``rows`` of the next forward pass; None: keep nothing."""
        self.rows = rows

    def take(self, query: torch.Tensor) -> None:
        """query: [tokens, num_heads, head_dim], rotated."""
        if self.rows is not None:
            self.taken.append(query.index_select(0, self.rows)[:, self.heads])

    def key_cache(self) -> torch.Tensor:
        """Packed keys [num_blocks, num_kv_heads, block_size, head_dim], see cpu_ops."""
        cache = compat.layer_kv_cache(self.layer)
        num_blocks, num_kv_heads, block_size, _ = cache.shape
        return cache.view(num_blocks, num_kv_heads, 2 * block_size, -1).chunk(2, dim=2)[0]


class Scorer:
    """Token scores of one model's scoring heads over its own CPU cache."""

    def __init__(self, layers: dict[int, Any], heads: HeadSet, layout: str, aggregate: str) -> None:
        self.captures = [QueryCapture(layers[index], chosen) for index, chosen in heads.layers]
        self.num_heads = heads.num_heads
        self.layout = layout
        self.aggregate = aggregate
        for capture in self.captures:
            capture.layer.impl.capture = capture

    def arm(self, rows: torch.Tensor | None) -> None:
        """See ``QueryCapture.arm``."""
        for capture in self.captures:
            capture.arm(rows)

    def reset(self) -> None:
        """Forget what was captured."""
        for capture in self.captures:
            capture.taken.clear()

    def token_scores(
        self,
        queries: list[torch.Tensor],
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> torch.Tensor:
        """Aggregate over layers, heads and queries, see ``reference.token_scores``.

        Args:
            queries: per scoring layer [R, Q, heads of the layer, head_dim].
            block_table: [R, MB] int32.
            seq_lens: [R] int32; query i of a row sits at position seq_len - Q + i.

        Returns:
            [R, max(seq_lens)] fp32.
        """
        rows = self.num_heads * queries[0].shape[1]
        out = torch.zeros(len(seq_lens), int(seq_lens.max()))
        for capture, layer_queries in zip(self.captures, queries, strict=True):
            cpu_ops.token_scores_(
                out,
                layer_queries.contiguous(),
                capture.key_cache(),
                block_table,
                seq_lens,
                capture.kv_heads,
                float(capture.layer.impl.scale),
                1.0 / rows,
                self.layout,
                self.aggregate,
            )
        return out


@dataclass
class Row:
    """One batch row of the current step."""

    request_id: str
    request: Any
    context: int  # confirmed tokens before this step's queries
    seq_len: int  # context plus this step's tokens
    selection: torch.Tensor | None  # set when the row is sparse


class DustinRuntime:
    """State and logic of one worker, see the module docstring."""

    def __init__(self, runner: Any, settings: Settings, target: Scorer, draft: Scorer) -> None:
        self.runner = runner
        self.settings = settings
        self.target = target
        self.draft = draft
        self.scores = state.SequenceScores()
        self.counters = state.Counters()
        self._rows: list[Row] = []
        self._to_score: list[int] = []  # batch rows that get a selection after this step
        self._history: torch.Tensor | None = None
        self._contexts: torch.Tensor | None = None
        self._block_table: torch.Tensor | None = None
        self._steps = 0

    def stats(self) -> dict[str, Any]:
        """Counters, plus the number of live sequences."""
        return {**self.counters.as_dict(), "live_sequences": len(self.scores)}

    # ---- verification -------------------------------------------------------------------

    def plan_verification(self, metadata: Any) -> Any:
        """Decide row by row, and shorten what the kernel reads.

        Args:
            metadata: vLLM's CommonAttentionMetadata of this step's target pass.

        Returns:
            The same object when every row is dense, else a copy with a compacted block table.
        """
        self._rows, self._to_score = [], []
        self.target.arm(None)
        self.target.reset()
        request_ids = self.runner.input_batch.req_ids[: metadata.num_reqs]
        if len(request_ids) < metadata.num_reqs:
            return metadata  # a dummy run
        self.scores.drop_missing(self.runner.requests)
        starts = metadata.query_start_loc_cpu.tolist()
        verifying = False
        for row, (request_id, seq_len) in enumerate(
            zip(request_ids, metadata.seq_lens.tolist(), strict=False)
        ):
            request = self.runner.requests[request_id]
            context = seq_len - (starts[row + 1] - starts[row])
            chosen = self._row_selection(request_id, request, context, seq_len)
            dense = isinstance(chosen, DenseReason)
            self._rows.append(Row(request_id, request, context, seq_len, None if dense else chosen))
            if dense:
                self.counters.dense_rows[chosen.value] += 1
            if chosen is not DenseReason.PREFILL:
                verifying = True
                self.counters.verification_rows += 1
                self.counters.sparse_rows += not dense
                self.counters.kv_tokens_full += seq_len
                self.counters.kv_tokens_read += seq_len
            if self._will_need_selection(request, seq_len):
                self._to_score.append(row)
        self._steps += verifying
        if self._to_score:
            self.target.arm(self._last_query_rows(starts))
        return self._compact(metadata)

    def _row_selection(
        self, request_id: str, request: Any, context: int, seq_len: int
    ) -> torch.Tensor | DenseReason:
        """The selection a row reads, or why it is dense.

        Whether a row verifies is a matter of request state, never of shape: a prompt chunk of
        gamma + 1 tokens looks the same. A verification starts at the one token that was
        sampled but not yet computed; a request that is recomputed after preemption does not.
        """
        prompt_tokens = request.num_tokens - len(request.output_token_ids)
        if context < prompt_tokens or context != request.num_tokens - 1:
            return DenseReason.PREFILL
        if seq_len - context > self.settings.gamma + 1:
            return DenseReason.LONG_QUERY
        if self._is_short(context):
            return DenseReason.SHORT_CONTEXT
        found = self.scores.fresh(request_id, request, context)
        return DenseReason.NO_SELECTION if found is None else found

    def _is_short(self, context: int) -> bool:
        settings = self.settings
        too_few = context // settings.unit <= settings.budget_units
        return too_few or context < settings.config.dense_below

    def _will_need_selection(self, request: Any, seq_len: int) -> bool:
        """Whether this step samples a token for the row, at a context worth a selection."""
        return seq_len >= request.num_tokens and not self._is_short(seq_len)

    def _last_query_rows(self, starts: list[int]) -> torch.Tensor:
        """Token rows of the last gamma + 1 queries of every row to be scored.

        [len(to_score) * (gamma + 1)]; a row with fewer queries repeats its first one.
        """
        width = self.settings.gamma + 1
        rows = [
            max(starts[row], starts[row + 1] - width + i)
            for row in self._to_score
            for i in range(width)
        ]
        return torch.tensor(rows)

    def _compact(self, metadata: Any) -> Any:
        sparse = [i for i, row in enumerate(self._rows) if row.selection is not None]
        if not sparse:
            return metadata
        selections = torch.stack([self._rows[i].selection for i in sparse])
        table, lens = selection.compact(
            metadata.block_table_tensor,
            metadata.seq_lens,
            sparse,
            selections,
            [self._rows[i].context for i in sparse],
            self.settings.block_size,
        )
        dropped = int((metadata.seq_lens[sparse] - lens[sparse]).sum())
        self.counters.kv_tokens_read -= dropped
        return metadata.replace(
            block_table_tensor=table, seq_lens=lens, max_seq_len=int(lens.max())
        )

    # ---- scoring ------------------------------------------------------------------------

    def begin_scoring(self, metadata: Any, num_rejected: torch.Tensor | None) -> None:
        """History scores, while the target's queries of this step are at hand.

        Args:
            metadata: CommonAttentionMetadata of this step, before drafting.
            num_rejected: [R] int32 draft tokens rejected in this step, or None.
        """
        self.target.arm(None)
        self._history = None
        if not self._to_score or not self.target.captures[0].taken:
            self._to_score = []
            return
        started = time.perf_counter()
        contexts = torch.tensor([self._rows[row].seq_len for row in self._to_score])
        rejected = torch.zeros_like(contexts)
        if num_rejected is not None:
            rejected = num_rejected[self._to_score].to(contexts.dtype)
        contexts = contexts - rejected
        width = self.settings.gamma + 1
        keep = [i for i, context in enumerate(contexts.tolist()) if not self._is_short(context)]
        captured = [capture.taken[-1].unflatten(0, (-1, width)) for capture in self.target.captures]
        self._sample_recovery(captured, metadata.block_table_tensor)
        self._to_score = [self._to_score[i] for i in keep]
        if keep:
            last = (width - 1 - rejected)[keep]
            queries = [rows[keep, last][:, None] for rows in captured]
            self._contexts = contexts[keep].to(torch.int32)
            self._block_table = metadata.block_table_tensor[self._to_score]
            self._history = self.target.token_scores(queries, self._block_table, self._contexts)
            self.draft.reset()
        self.counters.scoring_seconds += time.perf_counter() - started

    def begin_draft_pass(self, rows: torch.Tensor | None) -> None:
        """Keep the scoring queries of the next draft pass.

        Args:
            rows: [R] token row of every batch row's query; None: the batch row itself.
        """
        if self._history is None:
            self.draft.arm(None)
            return
        wanted = torch.tensor(self._to_score)
        self.draft.arm(wanted if rows is None else rows[wanted].long())

    def finish_scoring(self) -> None:
        """Lookahead scores from the captured draft queries; merge; publish."""
        self.draft.arm(None)
        if self._history is None:
            return
        started = time.perf_counter()
        settings, contexts = self.settings, self._contexts
        assert contexts is not None
        assert self._block_table is not None
        passes = len(self.draft.captures[0].taken)
        queries = [torch.stack(capture.taken, dim=1) for capture in self.draft.captures]
        lookahead = self.draft.token_scores(queries, self._block_table, contexts + passes)
        width = int(contexts.max())
        selections = selection.merge_and_select(
            cpu_ops.unit_scores(lookahead[:, :width].contiguous(), contexts, settings.unit, 0),
            cpu_ops.unit_scores(self._history, contexts, settings.unit, settings.dilation_tokens),
            contexts,
            settings,
        )
        for row, context, chosen in zip(self._to_score, contexts.tolist(), selections, strict=True):
            sequence = self._rows[row]
            self.scores.publish(sequence.request_id, sequence.request, context, chosen)
        self.counters.selections += len(self._to_score)
        self._history = None
        self.counters.scoring_seconds += time.perf_counter() - started

    def _sample_recovery(self, captured: list[torch.Tensor], block_table: torch.Tensor) -> None:
        """Measure how much attention mass this step's selections covered, now and then.

        Over the target's scoring heads and all verification queries of sparse rows.
        """
        every = self.settings.config.sample_recovery_every
        if not every or self._steps % every:
            return
        for index, row in enumerate(self._to_score):
            sequence = self._rows[row]
            if sequence.selection is None:
                continue
            num_queries = sequence.seq_len - sequence.context
            mass = self.target.token_scores(
                [rows[index, -num_queries:][None] for rows in captured],
                block_table[row : row + 1],
                torch.tensor([sequence.seq_len], dtype=torch.int32),
            )[0]
            unit, tail = self.settings.unit, sequence.context // self.settings.unit
            units = mass[: tail * unit].view(tail, unit).sum(1)
            covered = units[sequence.selection.long()].sum() + mass[tail * unit :].sum()
            self.counters.recovery_sum += float(covered / mass.sum())
            self.counters.recovery_samples += 1


def _attention_layers(runner: Any, names: set[str]) -> dict[int, Any]:
    """Attention layers by index within their model, in the order of their names' numbers."""
    layers = runner.vllm_config.compilation_config.static_forward_context

    def number(name: str) -> int:
        return int(next(part for part in name.split(".") if part.isdigit()))

    return {index: layers[name] for index, name in enumerate(sorted(names, key=number))}


def attach(runner: Any) -> None:
    """Give one model runner its runtime. Called once its metadata builders exist; called again
    (after memory profiling), it replaces the runtime.

    Raises:
        ConfigError: the model's attention layers are not what Dustin can verify sparsely.
    """
    settings = config.resolve(runner.vllm_config)
    drafter = runner.drafter
    draft_names = set(drafter._draft_attn_layer_names)
    groups = [group for groups in runner.attn_groups for group in groups]
    target_groups = [group for group in groups if set(group.layer_names) - draft_names]
    if len(target_groups) != 1 or len(drafter.draft_attn_groups) != 1:
        raise config.ConfigError(
            "attention backend DUSTIN: the target's and the draft's attention layers must each "
            f"be of one kind; found {len(target_groups)} and {len(drafter.draft_attn_groups)} kinds"
        )
    target_names = set(target_groups[0].layer_names) - draft_names
    builder = target_groups[0].get_metadata_builder()
    layout = compat.cpu_isa(builder)
    if layout not in CPU_LAYOUTS:
        raise config.ConfigError(
            f"attention backend DUSTIN: this CPU packs its KV cache as {layout!r}; supported are "
            f"{', '.join(CPU_LAYOUTS)} (x86)"
        )
    if builder.kv_cache_spec.block_size != settings.block_size:
        raise config.ConfigError(
            f"attention backend DUSTIN: kernel blocks of {builder.kv_cache_spec.block_size} tokens "
            f"in cache blocks of {settings.block_size}; set --block-size to a multiple of 32"
        )
    aggregate = settings.config.aggregate
    target = Scorer(
        _attention_layers(runner, target_names), settings.target_heads, layout, aggregate
    )
    draft = Scorer(_attention_layers(runner, draft_names), settings.draft_heads, layout, aggregate)
    runtime = DustinRuntime(runner, settings, target, draft)
    drafter.__class__ = DustinProposer
    drafter.runtime = runtime
    builder.runtime = runtime
    runner.dustin = runtime
    logger.info(
        "Dustin: budget %d tokens in %d units of %d, scoring heads %d of the target and %d of the "
        "draft%s%s",
        settings.config.budget,
        settings.budget_units,
        settings.unit,
        settings.target_heads.num_heads,
        settings.draft_heads.num_heads,
        "" if settings.config.profile else " (default heads: no profile for this pair)",
        "" if cpu_ops.is_built() else "; C++ kernels are not built, scoring runs in torch",
    )
