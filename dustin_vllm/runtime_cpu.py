# SPDX-License-Identifier: Apache-2.0
"""The runtime on vLLM's CPU platform: works on just the rows that need it, in torch and C++."""

from __future__ import annotations

import copy
import logging
import time
from typing import Any

import torch

from dustin_vllm import config, cpu_ops, selection
from dustin_vllm.config import HeadSet, LayerGroup, Settings
from dustin_vllm.runtime import DustinRuntime, Row, Selected, reduce_parts, reduce_scores
from dustin_vllm.state import Mode

logger = logging.getLogger("vllm.dustin_vllm")

LAYOUTS = ("vec", "vec16", "amx")


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
        self.rows: torch.Tensor | None = None  # query rows to keep; None: disarmed
        self.taken: list[torch.Tensor] = []

    def take(self, query: torch.Tensor) -> None:
        """query: [tokens, num_heads, head_dim], rotated."""
        if self.rows is not None:
            self.taken.append(query.index_select(0, self.rows)[:, self.heads])

    def key_cache(self) -> torch.Tensor:
        """Packed keys [num_blocks, num_kv_heads, block_size, head_dim], see cpu_ops."""
        cache = self.layer.kv_cache
        num_blocks, num_kv_heads, block_size, _ = cache.shape
        return cache.view(num_blocks, num_kv_heads, 2 * block_size, -1).chunk(2, dim=2)[0]


class Scorer:
    """Token scores of one model's scoring heads over its own cache.

    Args:
        layers: attention layers of the model.
        heads: scoring heads that this rank holds; may be none.
        num_heads: scoring heads of all ranks.
    """

    def __init__(
        self,
        layers: dict[int, Any],
        heads: HeadSet,
        num_heads: int,
        layout: str,
        aggregate: str,
    ) -> None:
        self.captures = [QueryCapture(layers[index], chosen) for index, chosen in heads.layers]
        self.num_heads = num_heads
        self.layout = layout
        self.aggregate = aggregate
        for capture in self.captures:
            capture.layer.impl.capture = capture

    def of_layer(self, layer: Any, num_heads: int) -> Scorer:
        """For the scoring heads of one layer, ``num_heads`` on all ranks, by the same captures."""
        part = copy.copy(self)
        part.captures = [capture for capture in self.captures if capture.layer is layer]
        part.num_heads = num_heads
        return part

    def arm(self, rows: torch.Tensor | None) -> None:
        """Keep query rows ``rows`` of the coming forward passes; None: keep nothing."""
        for capture in self.captures:
            capture.rows = rows

    def reset(self) -> None:
        """Forget what was kept."""
        for capture in self.captures:
            capture.taken.clear()

    def token_scores(
        self,
        queries: list[torch.Tensor],
        num_queries: int,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> torch.Tensor:
        """This rank's part of ``reference.token_scores`` over all layers, heads and queries, see
        ``reduce_scores``.

        Args:
            queries: per scoring layer [R, Q, heads of the layer, head_dim].
            num_queries: Q.
            block_table: [R, MB] int32.
            seq_lens: [R] int32; query i of a row sits at position seq_len - Q + i.

        Returns:
            [R, max(seq_lens)] fp32.
        """
        rows = self.num_heads * num_queries
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


class CpuRuntime(DustinRuntime):
    """See ``DustinRuntime``.

    Raises:
        ConfigError: the CPU's KV-cache layout is not one that can be scored.
    """

    def __init__(
        self,
        runner: Any,
        settings: Settings,
        builder: Any,
        target_layers: dict[int, Any],
        draft_layers: dict[int, Any],
    ) -> None:
        super().__init__(runner, settings, torch.device("cpu"))
        layout = builder.isa  # the instruction set decides how keys are packed
        if layout not in LAYOUTS:
            raise config.ConfigError(
                f"attention backend DUSTIN: this CPU packs its KV cache as {layout!r}; supported "
                f"are {', '.join(LAYOUTS)} (x86)"
            )
        if not cpu_ops.is_built():
            logger.warning("Dustin's C++ kernels are not built; scoring runs in torch, slowly")
        aggregate = settings.config.aggregate
        self.target, self.draft = (
            Scorer(
                layers,
                self.local_heads(heads, layers, replicated),
                heads.num_heads,
                layout,
                aggregate,
            )
            for layers, heads, replicated in (
                (target_layers, settings.target_heads, False),
                (draft_layers, settings.draft_heads, settings.draft_replicated),
            )
        )
        # Of the target's scoring heads those that select within a step, by layer.
        self._in_step = {
            layer: self.target.of_layer(
                target_layers[layer], settings.target_heads.of_layer(layer).num_heads
            )
            for layer in settings.config.fresh_layers
        }
        self._to_score: list[int] = []  # batch rows that get a selection in this step
        self._history: torch.Tensor | None = None  # [len(to_score), C] token scores of this rank
        self._whole: Any = None  # vLLM's metadata of this step, with whole block tables
        self._contexts = torch.empty(0)  # [len(to_score)] int32
        self._block_table = torch.empty(0)  # [len(to_score), MB] int32
        self._last_queries = torch.empty(0)  # [len(to_score), scoring heads, D]
        self._verified_steps = 0

    def plan_verification(self, metadata: Any) -> Any:
        self.target.arm(None)
        self.target.reset()
        self._whole = metadata
        self.decide_rows(metadata)
        self._to_score = [i for i, row in enumerate(self.rows) if row.needs_selection]
        if self._to_score:
            self.target.arm(self._last_query_rows(metadata.query_start_loc_cpu.tolist()))
        sparse = [i for i, row in enumerate(self.rows) if row.dense is None]
        if not sparse:
            return metadata
        self._verified_steps += 1
        planned = self._compact(metadata, sparse, self.settings.target)
        if self.settings.second is not None:
            planned.dustin_second = self._compact(metadata, sparse, self.settings.second)
        return planned

    def _compact(self, metadata: Any, sparse: list[int], group: LayerGroup) -> Any:
        """A copy of the metadata in which the rows ``sparse`` read the group's selections."""
        selections = self.scores.selections[group.name]
        table, lens = selection.compact(
            metadata.block_table_tensor,
            metadata.seq_lens,
            sparse,
            selections[[self.rows[i].slot.index for i in sparse]],
            [self.rows[i].context for i in sparse],
            self.settings.block_size,
        )
        return metadata.replace(
            block_table_tensor=table, seq_lens=lens, max_seq_len=int(lens.max())
        )

    def _last_query_rows(self, starts: list[int]) -> torch.Tensor:
        """Token rows of the last gamma + 1 queries of every row to be scored.

        [len(to_score) * (gamma + 1)]; a row with fewer queries repeats its first one.
        """
        width = self.settings.gamma + 1
        return torch.tensor(
            [
                max(starts[row], starts[row + 1] - width + i)
                for row in self._to_score
                for i in range(width)
            ]
        )

    def select_in_step(self, layer: int, metadata: Any) -> None:
        settings, group, whole = self.settings, self.settings.fresh, self._whole
        sparse = [i for i, row in enumerate(self.rows) if row.dense is None]
        if not sparse or group is None:
            return
        started = time.perf_counter()
        width = settings.gamma + 1
        places = [self._to_score.index(i) for i in sparse]
        scorer = self._in_step[layer]
        own = scorer.token_scores(
            [capture.taken[-1].unflatten(0, (-1, width))[places] for capture in scorer.captures],
            width,
            whole.block_table_tensor[sparse],
            whole.seq_lens[sparse],
        )
        reduce_scores(own, settings.config.aggregate)
        rows = [self.rows[i] for i in sparse]
        contexts = torch.tensor([row.context for row in rows], dtype=torch.int32)
        units = cpu_ops.unit_scores(own, contexts, settings.unit, 0)
        made = selection.merge_and_select(units, units, contexts, settings, group)
        self.scores.selections[group.name][[row.slot.index for row in rows]] = made
        compacted = self._compact(whole, sparse, group)
        metadata.dustin_second.block_table.copy_(compacted.block_table_tensor)
        self.counters.scoring_seconds += time.perf_counter() - started

    def begin_scoring(self, metadata: Any, num_rejected: torch.Tensor | None) -> None:
        self.target.arm(None)
        self._history = None
        self._count_verified(num_rejected)
        if not self._to_score:
            return
        started = time.perf_counter()
        contexts = torch.tensor([self.rows[row].seq_len for row in self._to_score])
        rejected = torch.zeros_like(contexts)
        if num_rejected is not None:
            rejected = num_rejected[self._to_score].to(contexts.dtype)
        contexts -= rejected
        width = self.settings.gamma + 1
        kept = [capture.taken[-1].unflatten(0, (-1, width)) for capture in self.target.captures]
        self._sample_recovery(kept, metadata.block_table_tensor)
        # Rejected tokens may have brought a row back to where nothing can be dropped.
        worth = [i for i, context in enumerate(contexts.tolist()) if not self._is_short(context)]
        self._to_score = [self._to_score[i] for i in worth]
        if worth:
            last = (width - 1 - rejected)[worth]
            self._contexts = contexts[worth].to(torch.int32)
            self._block_table = metadata.block_table_tensor[self._to_score]
            queries = [rows[worth, last][:, None] for rows in kept]
            if self.policy is not None:
                self._last_queries = torch.cat([layer[:, 0] for layer in queries], dim=1)
            self._history = self.target.token_scores(queries, 1, self._block_table, self._contexts)
            self.draft.reset()
        self.counters.scoring_seconds += time.perf_counter() - started

    def _count_verified(self, num_rejected: torch.Tensor | None) -> None:
        rejected = dict.fromkeys(Mode, 0)
        if num_rejected is not None:
            for row, tokens in zip(self.rows, num_rejected.tolist(), strict=False):
                # vLLM pads a prompt's last token to the length of a verification, and rejects that.
                rejected[row.mode] += tokens * row.verifies
        self.count_verified(rejected)

    def begin_draft_pass(self, rows: torch.Tensor | None) -> None:
        if self._history is not None:
            wanted = torch.tensor(self._to_score)
            self.draft.arm(wanted if rows is None else rows[wanted].long())

    def compact_draft(self, metadata: Any) -> Any:
        sparse = [i for i, row in enumerate(self.rows) if row.drafts_sparsely]
        group = self.settings.draft
        if group is None or not sparse:
            return metadata
        self.count_draft_pass(metadata.seq_lens.tolist())
        return self._compact(metadata, sparse, group)

    def finish_scoring(self) -> None:
        self.draft.arm(None)
        if self._history is None:
            return
        started = time.perf_counter()
        contexts = self._contexts
        rows = [self.rows[i] for i in self._to_score]
        if self.policy is not None:
            self.select_by_policy(rows, contexts.tolist(), self._last_queries, self._block_table)
        else:
            self._merge(rows)
        self.publish(rows)
        self._history = None
        self.counters.scoring_seconds += time.perf_counter() - started

    def _merge(self, rows: list[Row]) -> None:
        """Lookahead scores; both signals to selections."""
        settings, contexts = self.settings, self._contexts
        assert self._history is not None
        queries = [torch.stack(capture.taken, dim=1) for capture in self.draft.captures]
        seq_lens = contexts + settings.gamma
        own = self.draft.token_scores(queries, settings.gamma, self._block_table, seq_lens)
        both = torch.stack([self._history, own[:, : self._history.shape[1]]])
        reduce_parts(both, settings)
        history, lookahead = both
        unit, dilation = settings.unit, settings.dilation_tokens
        scores = (
            cpu_ops.unit_scores(lookahead, contexts, unit, 0),
            cpu_ops.unit_scores(history, contexts, unit, dilation),
        )
        slots = [row.slot.index for row in rows]
        for group in settings.merged_groups:
            self.scores.selections[group.name][slots] = selection.merge_and_select(
                *scores, contexts, settings, group
            )
        if self.on_selection is not None:
            made = self.scores.selections[settings.target.name][slots]
            self.on_selection(Selected(rows, contexts.tolist(), lookahead, history, made))

    def scoring_layers(self) -> list[tuple[Any, tuple[int, ...]]]:
        return [(c.layer, tuple(c.heads.tolist())) for c in self.target.captures]

    def scoring_keys(self, block_table: torch.Tensor, start: int, end: int) -> torch.Tensor:
        size = self.settings.block_size
        blocks = block_table[start // size : -(-end // size)].long()
        keys = [
            cpu_ops.unpack_keys(capture.key_cache()[blocks], self.target.layout)
            .transpose(1, 2)
            .flatten(0, 1)
            for capture in self.target.captures
        ]
        return torch.cat(keys, dim=1)[start % size :][: end - start]

    def verification_queries(self) -> tuple[list[int], torch.Tensor]:
        if not self._to_score:
            return [], torch.empty(0)
        width = self.settings.gamma + 1
        kept = [capture.taken[-1].unflatten(0, (-1, width)) for capture in self.target.captures]
        return list(self._to_score), torch.cat(kept, dim=2)

    def _sample_recovery(self, kept: list[torch.Tensor], block_table: torch.Tensor) -> None:
        """Measure how much attention mass this step's selections covered, now and then.

        Over the target's scoring heads and all verification queries of sparse rows.
        """
        every = self.settings.config.sample_recovery_every
        if not every or self._verified_steps % every:
            return
        for index, row_index in enumerate(self._to_score):
            row = self.rows[row_index]
            if row.dense is not None:
                continue
            num_queries = row.seq_len - row.context
            own = self.target.token_scores(
                [queries[index, -num_queries:][None] for queries in kept],
                num_queries,
                block_table[row_index : row_index + 1],
                torch.tensor([row.seq_len], dtype=torch.int32),
            )
            mass = reduce_scores(own, self.settings.config.aggregate)[0]
            unit = self.settings.unit
            tail = row.context // unit
            units = mass[: tail * unit].view(tail, unit).sum(1)
            chosen = self.scores.selections[self.settings.target.name][row.slot.index].long()
            covered = units[chosen].sum() + mass[tail * unit :].sum()
            self.counters.recovery_sum += float(covered / mass.sum())
            self.counters.recovery_samples += 1
