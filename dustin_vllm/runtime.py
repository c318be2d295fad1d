# SPDX-License-Identifier: Apache-2.0
"""One verification step, seen from the model runner. What CPU and GPU share.

Order of events in a step, all in the worker:

1. ``plan_verification`` (from the target's metadata builder): decides for every row whether it
   is sparse, and shortens the block tables of sparse rows.
2. The target runs. Its scoring layers keep the last gamma + 1 queries of the rows.
3. ``begin_scoring`` (from the proposer, after sampling): history scores, from the query of the
   last confirmed token.
4. The draft runs, gamma passes, each announced by ``begin_draft_pass`` and, with a draft
   budget, sparse (``compact_draft``). Its scoring layers keep one query per row and pass.
5. ``finish_scoring``: lookahead scores, merge, and the selections are published.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group

from dustin_vllm import config, metrics, policies, selection
from dustin_vllm.config import HeadSet, Settings
from dustin_vllm.proposer import DustinProposer
from dustin_vllm.state import Counters, DenseReason, LoopReason, Mode, SequenceScores, Slot

logger = logging.getLogger("vllm.dustin_vllm")


def reduce_scores(scores: torch.Tensor, aggregate: str) -> torch.Tensor:
    """Bring together the scores of all tensor-parallel ranks' heads, in place.

    Args:
        scores: contiguous fp32; what this rank's heads add to the mean, or their maximum.
        aggregate: "mean" or "max".
    """
    group = get_tp_group()
    if group.world_size == 1:
        return scores
    if aggregate == "max":
        torch.distributed.all_reduce(scores, torch.distributed.ReduceOp.MAX, group.device_group)
        return scores
    # vLLM's own, which picks the quickest way for the size and can be captured in a graph.
    return scores.copy_(group.all_reduce(scores))


def reduce_parts(both: torch.Tensor, settings: Settings) -> None:
    """``reduce_scores`` of what all ranks hold a part of.

    Args:
        both: [2, R, C]: history and lookahead, next to each other in memory.
    """
    last = 1 if settings.draft_replicated else 2  # every rank has run the whole draft
    reduce_scores(both[:last], settings.config.aggregate)


# Settings that an engine can go on with others of: nothing is sized or captured by them for good.
SWITCHABLE = (
    *("policy", "policy_seed", "budget", "draft_budget", "sinks", "recent", "dense_below"),
    *("merge", "lookahead", "lookahead_weight", "dilate_history", "refresh_interval"),
    "wide_budget",
)


@dataclass
class Selected:
    """What the merge made of the scores in one step, for R rows.

    ``lookahead``, ``history``: [R, C] fp32 token scores, C at least every context; ``contexts``:
    confirmed tokens; ``selections``: [R, K] int32.
    """

    rows: list[Row]
    contexts: list[int]
    lookahead: torch.Tensor
    history: torch.Tensor
    selections: torch.Tensor


@dataclass
class Row:
    """One batch row of the current step."""

    slot: Slot
    request: Any
    context: int  # confirmed tokens before this step's queries (async scheduling: at most)
    seq_len: int  # context plus this step's tokens (likewise)
    dense: DenseReason | None  # why verification is dense; None: sparse
    drafts_sparsely: bool  # has a selection that its draft passes may read
    needs_selection: bool  # samples a token in this step, at a context worth a selection
    first_row: int = 0  # token row of its first query

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return int(self.request.num_tokens) - len(self.request.output_token_ids)

    @property
    def samples(self) -> bool:
        """Whether a token is sampled in this step: its prompt is computed."""
        return bool(self.seq_len >= self.request.num_tokens)

    @property
    def mode(self) -> Mode:
        """How the row is verified, if it is."""
        return Mode.SPARSE if self.dense is None else Mode.DENSE

    @property
    def verifies(self) -> bool:
        """Whether there are drafts among the row's tokens."""
        return self.dense is not DenseReason.PREFILL and self.seq_len - self.context > 1


class DustinRuntime(ABC):
    """State of one worker and the decisions of one step, see the module docstring."""

    def __init__(self, runner: Any, settings: Settings, device: torch.device) -> None:
        self.runner = runner
        self.settings = settings
        self.counters = Counters()
        self.scores = self._new_scores(device)
        self.rows: list[Row] = []
        self._step = 0
        self._stats_file = metrics.worker_file() if get_tp_group().rank_in_group == 0 else None
        self._next_publication = self._next_log = 0.0
        self._logged = self.counters.as_dict()

    # ---- evaluation: other policies, other settings, somebody who looks on -----------------

    policy: policies.Policy | None = None  # None: the merge of this package
    on_selection: Callable[[Selected], None] | None = None  # of the merge, see ``dustin trace``

    def use_policy(self) -> None:
        """Make the policy that the settings name, in place of the one before."""
        if self.policy is not None:
            self.policy.close()
        self.policy = policies.make(self.settings, self)

    def reconfigure(self, changes: dict[str, Any]) -> None:
        """Go on with other settings of ``SWITCHABLE``, while no request is running.

        Args:
            changes: settings that differ from those the engine was started with.

        Raises:
            ConfigError: a setting that is fixed at start, or one that ``config`` refuses.
        """
        fixed = set(changes) - set(SWITCHABLE)
        if fixed:
            raise config.ConfigError(f"dustin.{min(fixed)} is fixed when the engine starts")
        if self.settings.config.draft_graphs and self.runner.device.type == "cuda":
            raise config.ConfigError(
                "settings are captured in draft graphs; start with draft_graphs=false"
            )
        settings = config.resolve(self.runner.vllm_config, changes)
        old, new = (
            (s.second_layers, set(s.config.fresh_layers)) for s in (self.settings, settings)
        )
        if old != new:
            raise config.ConfigError(
                "dustin.wide_layers, fresh_layers and merge='split' are fixed when the engine "
                "starts"
            )
        if settings.config.fresh_layers and self.runner.device.type == "cuda":
            self._check_fresh(settings)
        self.settings = settings
        self.scores = self._new_scores(self.runner.device)
        self.rows = []
        self._resize()
        self.use_policy()

    def _check_fresh(self, settings: Settings) -> None:
        """What happens in ``fresh_layers`` is captured in the target's graphs."""
        old, new = ((s.fresh, s.config.sinks, s.config.recent) for s in (self.settings, settings))
        if old != new and not self.runner.vllm_config.model_config.enforce_eager:
            raise config.ConfigError(
                "dustin.fresh_layers select in CUDA graphs, by the budget, policy, sinks and "
                "recent of the start; use enforce_eager, or an engine for each"
            )

    def _new_scores(self, device: torch.device) -> SequenceScores:
        # Twice the batch: preempted sequences keep their slots.
        num_slots = 2 * self.runner.scheduler_config.max_num_seqs
        return SequenceScores(num_slots, self.settings.groups, device)

    def _resize(self) -> None:  # noqa: B027
        """Make room for the selections of other settings."""

    @abstractmethod
    def select_in_step(self, layer: int, metadata: Any) -> None:
        """Called in each of ``fresh_layers``, once its queries and keys are there and before it
        attends: score the context by the step's own queries, and let this layer and all deeper
        ones read what that selects.

        Args:
            layer: index in the target.
            metadata: of the backend, as its builder made it for this step.
        """

    @abstractmethod
    def scoring_layers(self) -> list[tuple[Any, tuple[int, ...]]]:
        """The target's scoring layers and the heads of each, ascending."""

    @abstractmethod
    def scoring_keys(self, block_table: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """Keys of one sequence on all scoring layers.

        Args:
            block_table: [MB] int32.
            start, end: positions.

        Returns:
            [end - start, scoring layers * Hkv, D].
        """

    @abstractmethod
    def verification_queries(self) -> tuple[list[int], torch.Tensor]:
        """Queries of the target pass that has just ended, before the draft runs.

        Returns:
            Batch rows that get a selection, and the last gamma + 1 queries of each, [n, gamma + 1,
            H, D] with H scoring heads; a row with fewer queries repeats its first.
        """

    def scoring_heads(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[H] int64, index in ``scoring_keys`` of each scoring head's key, and [H] fp32 softmax
        scales."""
        key_heads, scales = [], []
        for place, (layer, heads) in enumerate(self.scoring_layers()):
            kv_heads = layer.impl.num_kv_heads
            group = layer.impl.num_heads // kv_heads
            key_heads += [place * kv_heads + head // group for head in heads]
            scales += [float(layer.impl.scale)] * len(heads)
        device = self.runner.device
        return torch.tensor(key_heads, device=device), torch.tensor(scales, device=device)

    def select_by_policy(
        self, rows: list[Row], contexts: list[int], queries: torch.Tensor, tables: torch.Tensor
    ) -> None:
        """Selections of rows with more units than the budget, by the policy; see ``Step``."""
        assert self.policy is not None
        scores = self.policy.unit_scores(policies.Step(rows, contexts, queries, tables))
        slots = [row.slot.index for row in rows]
        lengths = torch.tensor(contexts, device=scores.device)
        for group in self.settings.groups:
            self.scores.selections[group.name][slots] = selection.merge_and_select(
                scores, scores, lengths, self.settings, group
            )

    # ---- statistics -----------------------------------------------------------------------

    def local_heads(self, heads: HeadSet, layers: dict[int, Any], replicated: bool) -> HeadSet:
        """The scoring heads of one model that this rank holds."""
        group = get_tp_group()
        num_heads = next(iter(layers.values())).impl.num_heads
        ranks = 1 if replicated else group.world_size
        return heads.of_rank(group.rank_in_group, ranks, num_heads)

    def stats(self) -> dict[str, Any]:
        """Counters, plus the number of live sequences and the size of a selection."""
        group = self.settings.target
        return {
            **self.counters.as_dict(),
            "live_sequences": len(self.scores),
            "selection_tokens": group.budget_units * self.settings.unit,
        }

    def _publish_stats(self) -> None:
        """Show the counters to the front end, now and then, and more rarely in the log."""
        now = time.monotonic()
        if self._stats_file is None or now < self._next_publication:
            return
        self._next_publication = now + metrics.PUBLISH_SECONDS
        stats = self.stats()
        self._stats_file.write(stats)
        if now >= self._next_log and (line := metrics.log_line(stats, self._logged)):
            logger.info("Dustin: %s", line)
            self._next_log = now + metrics.LOG_SECONDS
            self._logged = stats

    @abstractmethod
    def plan_verification(self, metadata: Any) -> Any:
        """Shorten what the target's kernel reads.

        Args:
            metadata: vLLM's CommonAttentionMetadata of this step's target pass; not modified.

        Returns:
            The metadata to build from.
        """

    @abstractmethod
    def begin_scoring(self, metadata: Any, num_rejected: torch.Tensor | None) -> None:
        """History scores, while the target's queries of this step are at hand.

        Args:
            metadata: CommonAttentionMetadata of this step, before drafting.
            num_rejected: [R] int32 draft tokens rejected in this step, or None.
        """

    @abstractmethod
    def begin_draft_pass(self, rows: torch.Tensor | None) -> None:
        """Keep the scoring queries of the next draft pass.

        Args:
            rows: [R] token row of every batch row's query; None: the batch row itself.
        """

    @abstractmethod
    def compact_draft(self, metadata: Any) -> Any:
        """Shorten what the draft's kernel reads in the next pass, if there is a draft budget.

        The rows that have a selection for this step's verification read it (or the draft's
        smaller one) and everything since. This changes what is drafted and, through the
        lookahead scores, what is selected next.

        Args:
            metadata: CommonAttentionMetadata of the pass; not modified.
        """

    @abstractmethod
    def finish_scoring(self) -> None:
        """Lookahead scores from the kept draft queries; merge; publish."""

    # ---- drafting as one graph; a platform without graphs keeps these ---------------------

    capturing = False  # whether a draft loop is being captured

    def capture_drafting(self, num_tokens: int) -> None:  # noqa: B027
        """Capture steps 3 to 5 for a verification batch of num_tokens target tokens."""

    def replay_drafting(self, arguments: dict[str, Any]) -> torch.Tensor | None:
        """Do steps 3 to 5 by a graph, if one fits.

        Args:
            arguments: those of ``DraftModelProposer.propose``.

        Returns:
            [R, gamma] draft tokens, or None: drive the passes one by one.
        """
        self.counters.draft_loops[LoopReason.NOT_CAPTURED.value] += 1
        return None

    # ---- decisions, on the host, from request state -------------------------------------

    def decide_rows(self, metadata: Any) -> None:
        """Fill ``rows`` for the requests of this step and count them.

        A dummy run (warm-up, graph capture) has no requests and gets no rows.
        """
        requests = self.runner.requests
        request_ids = self.runner.input_batch.req_ids[: metadata.num_reqs]
        self._step += 1
        self.scores.keep_only(requests)
        self._publish_stats()
        starts = metadata.query_start_loc_cpu.tolist()
        seq_lens = metadata.seq_lens_cpu_upper_bound.tolist()
        self.rows = [
            self._decide(request_id, requests[request_id], seq_lens[i], starts[i], starts[i + 1])
            for i, request_id in enumerate(request_ids)
        ]

    def _decide(self, request_id: str, request: Any, seq_len: int, start: int, end: int) -> Row:
        num_new = end - start
        context = seq_len - num_new
        slot = self.scores.slot(request_id)
        dense = self._dense_reason(request, slot, context, num_new)
        drafts_sparsely = dense is None and self.settings.draft is not None
        if dense is None:
            dense = self._asked_for_dense(request, slot)
        slot.sparse_steps = 0 if dense else slot.sparse_steps + 1
        slot.seen = self._step
        counters = self.counters
        if dense is not None:
            counters.dense_rows[dense.value] += 1
        if dense is not DenseReason.PREFILL:
            counters.verification_rows += 1
            counters.sparse_rows += dense is None
            counters.kv_tokens_full += seq_len
            counters.kv_tokens_read += (
                seq_len
                if dense
                else self._sparse_length(self.settings.target_units, context, seq_len)
            )
        needs_selection = seq_len >= request.num_tokens and not self._is_short(seq_len)
        return Row(slot, request, context, seq_len, dense, drafts_sparsely, needs_selection, start)

    def _dense_reason(
        self, request: Any, slot: Slot, context: int, num_new: int
    ) -> DenseReason | None:
        """Why a row must be dense, or None.

        Whether a row verifies is a matter of request state, never of shape: a prompt chunk of
        gamma + 1 tokens looks the same. A verification starts at the one token that was
        sampled but not yet computed; a request that is recomputed after preemption does not.
        """
        prompt_tokens = request.num_tokens - len(request.output_token_ids)
        if context < prompt_tokens or context != request.num_tokens - 1:
            return DenseReason.PREFILL
        if num_new > self.settings.gamma + 1:
            return DenseReason.LONG_QUERY
        if self._is_short(context):
            return DenseReason.SHORT_CONTEXT
        return None if slot.fresh else DenseReason.NO_SELECTION

    def _asked_for_dense(self, request: Any, slot: Slot) -> DenseReason | None:
        """Why a row that could be sparse is not to be, or None."""
        config_ = self.settings.config
        if not config_.sparse_verification or config.wants_dense(request.sampling_params):
            return DenseReason.REQUESTED
        interval = config_.refresh_interval
        return DenseReason.REFRESH if 0 < interval <= slot.sparse_steps + 1 else None

    def _is_short(self, context: int) -> bool:
        settings = self.settings
        too_few = context // settings.unit <= settings.largest.budget_units
        return too_few or context < settings.config.dense_below

    def _sparse_length(self, units: float, context: int, seq_len: int) -> int:
        """Tokens that a sparse row reads: so many selected units and the tail."""
        unit = self.settings.unit
        return round(units * unit) + seq_len - context // unit * unit

    def count_verified(self, rejected: dict[Mode, int]) -> None:
        """Count the verifications of this step and the tokens they confirmed.

        Args:
            rejected: draft tokens that were rejected in this step's rows, by mode.
        """
        counters = self.counters
        for row in self.rows:
            if row.verifies:
                counters.verifications[row.mode.value] += 1
                counters.verified_tokens[row.mode.value] += row.seq_len - row.context
        for mode, tokens in rejected.items():
            counters.verified_tokens[mode.value] -= tokens

    def count_draft_pass(self, seq_lens: list[int]) -> None:
        """Count one sparse draft pass; seq_lens of all rows."""
        group = self.settings.draft
        assert group is not None
        for row, seq_len in zip(self.rows, seq_lens, strict=False):
            if row.drafts_sparsely:
                self.counters.draft_kv_tokens_full += seq_len
                self.counters.draft_kv_tokens_read += self._sparse_length(
                    group.budget_units, row.context, seq_len
                )

    def publish(self, rows: list[Row]) -> None:
        """Note that these rows' slots hold a selection made in this step."""
        for row in rows:
            row.slot.published = self._step
        self.counters.selections += len(rows)


def attention_layers(runner: Any, names: set[str]) -> dict[int, Any]:
    """Attention layers of one model by their index in it."""
    layers = runner.vllm_config.compilation_config.static_forward_context

    def number(name: str) -> int:
        return int(next(part for part in name.split(".") if part.isdigit()))

    return {index: layers[name] for index, name in enumerate(sorted(names, key=number))}


def attach(runner: Any) -> None:
    """Give one model runner its runtime, once its metadata builders exist. Called again after
    memory profiling, it replaces the runtime.

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
    if builder.kv_cache_spec.block_size != settings.block_size:
        raise config.ConfigError(
            f"attention backend DUSTIN: kernel blocks of {builder.kv_cache_spec.block_size} tokens "
            f"in cache blocks of {settings.block_size}; set --block-size to "
            f"{builder.kv_cache_spec.block_size}"
        )
    target_layers = attention_layers(runner, target_names)
    draft_layers = attention_layers(runner, draft_names)
    runtime_class = _runtime_class(runner.device)
    runtime = runtime_class(runner, settings, builder, target_layers, draft_layers)
    runtime.use_policy()
    drafter.__class__ = DustinProposer
    drafter.runtime = runtime
    drafter.draft_attn_groups[0].get_metadata_builder().draft_runtime = runtime
    builder.runtime = runtime
    for index, layer in target_layers.items():
        layer.impl.second = index in settings.second_layers  # read by the backends
        selects = index in settings.config.fresh_layers
        layer.impl.selects = partial(runtime.select_in_step, index) if selects else None
    for group in groups:
        if group is not target_groups[0]:
            group.get_metadata_builder().draft_only = True
    runner.dustin = runtime
    logger.info(
        "Dustin: budget %d tokens in %d units of %d%s, scoring heads %d of the target and %d of "
        "the draft (%s)",
        settings.config.budget,
        settings.target.budget_units,
        settings.unit,
        config.groups_note(settings),
        settings.target_heads.num_heads,
        settings.draft_heads.num_heads,
        config.profile_note(settings.config),
    )


def _runtime_class(device: torch.device) -> Any:
    if device.type == "cpu":
        from dustin_vllm.runtime_cpu import CpuRuntime

        return CpuRuntime
    from dustin_vllm.runtime_cuda import CudaRuntime

    return CudaRuntime
