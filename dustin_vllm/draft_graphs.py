# SPDX-License-Identifier: Apache-2.0
"""Drafting as one CUDA graph per padded batch size.

vLLM drives the gamma draft passes from the host: about a thousand launches per step, with
attention outside of its piecewise graphs. For verification batches every shape is known ahead,
so the whole of ``DraftModelProposer.propose`` is captured with its inputs in fixed buffers:
history scoring, all passes, sampling, lookahead scoring, merge, top-k. It is vLLM's own loop that
is captured, so a replay drafts what the loop would. Other batches take the loop, counted.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from dustin_vllm.state import DenseReason, LoopReason

if TYPE_CHECKING:
    from dustin_vllm.proposer import DustinProposer
    from dustin_vllm.runtime_cuda import CudaRuntime

GREEDY = SimpleNamespace(all_greedy=True)  # all that the loop reads of sampling metadata


@dataclass
class DraftInputs:
    """What a captured draft loop reads, at fixed places. q = gamma + 1 tokens per row."""

    token_ids: torch.Tensor  # [R * q] int32
    positions: torch.Tensor  # [R * q] int64
    next_token_ids: torch.Tensor  # [R] int32
    num_rejected: torch.Tensor  # [R] int32
    seq_lens: torch.Tensor  # [R] int32
    query_starts: torch.Tensor  # [R + 1] int32, multiples of q
    block_table: torch.Tensor  # [R, MB] int32


def draft_inputs(rows: int, gamma: int, max_blocks: int, device: torch.device) -> DraftInputs:
    """Inputs for up to ``rows`` sequences of up to ``max_blocks`` blocks."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    width = gamma + 1
    return DraftInputs(
        token_ids=zeros(rows * width),
        positions=zeros(rows * width, dtype=torch.int64),
        next_token_ids=zeros(rows),
        num_rejected=zeros(rows),
        seq_lens=zeros(rows),
        query_starts=torch.arange(rows + 1, dtype=torch.int32, device=device) * width,
        block_table=zeros(rows, max_blocks),
    )


class DraftGraphs:
    """Captures and replays; owned by one runtime and gone with it.

    Args:
        inputs: fixed buffers, sized for the largest batch.
    """

    def __init__(self, runtime: CudaRuntime, proposer: DustinProposer, inputs: DraftInputs) -> None:
        self.runtime = runtime
        self.proposer = proposer
        self.inputs = inputs
        self.capturing = False
        self.width = runtime.settings.gamma + 1
        self.max_model_len = proposer.max_model_len
        self._pool: Any = None
        self._graphs: dict[int, tuple[Callable[[], None], torch.Tensor]] = {}
        self._sizes: list[int] = []

    def capture(self, num_reqs: int) -> None:
        """Capture the graph for a batch size. Call it as vLLM captures its own: on the capture
        stream, largest size first.

        The run before it compiles kernels. Both runs see sequences of gamma + 1 tokens in vLLM's
        null block, and write selections to the slot of padded rows.
        """
        if num_reqs > len(self.inputs.seq_lens) or not self.runtime.caches_bound():
            return
        self._pad(0, num_reqs)
        self.inputs.positions.zero_()
        self._draft(num_reqs)
        self._graphs[num_reqs] = self._record(num_reqs)
        self._sizes = sorted(self._graphs)

    def _record(self, num_reqs: int) -> tuple[Callable[[], None], torch.Tensor]:
        """What drafts again for the inputs at hand, and where the drafts appear."""
        torch.cuda.synchronize()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=torch.cuda.current_stream()):
            drafts = self._draft(num_reqs)
        return graph.replay, drafts

    def replay(self, arguments: dict[str, Any]) -> torch.Tensor | LoopReason:
        """Draft by a graph.

        Args:
            arguments: those of ``DraftModelProposer.propose``.

        Returns:
            [R, gamma] int64 draft tokens, valid until the next replay; or why the loop has to
            draft.
        """
        metadata = arguments["common_attn_metadata"]
        rejected = arguments.get("num_rejected_tokens_gpu")
        num_reqs = metadata.batch_size()
        reason = self._loop_reason(arguments, num_reqs)
        if reason is not None:
            return reason
        size = self._sizes[bisect.bisect_left(self._sizes, num_reqs)]
        inputs, num_tokens = self.inputs, num_reqs * self.width
        inputs.token_ids[:num_tokens].copy_(arguments["target_token_ids"])
        inputs.positions[:num_tokens].copy_(arguments["target_positions"])
        inputs.next_token_ids[:num_reqs].copy_(arguments["next_token_ids"])
        inputs.num_rejected[:num_reqs].copy_(rejected)
        inputs.seq_lens[:num_reqs].copy_(metadata.seq_lens)
        table = inputs.block_table
        table[:num_reqs].copy_(metadata.block_table_tensor[:, : table.shape[1]])
        if num_reqs < size:
            self._pad(num_reqs, size)
        run, drafts = self._graphs[size]
        run()
        self.proposer._last_draft_probs = None
        return drafts[:num_reqs]

    def _loop_reason(self, arguments: dict[str, Any], num_reqs: int) -> LoopReason | None:
        proposer, metadata = self.proposer, arguments["common_attn_metadata"]
        if not self._sizes or num_reqs > self._sizes[-1]:
            return LoopReason.NOT_CAPTURED
        if any(row.dense is DenseReason.PREFILL for row in self.runtime.rows):
            return LoopReason.PREFILL
        if (
            arguments.get("num_rejected_tokens_gpu") is None
            or metadata.max_query_len != self.width
            or metadata.num_actual_tokens != num_reqs * self.width
            or arguments["num_speculative_tokens"] != self.width - 1
        ):
            return LoopReason.RAGGED
        sampled = not arguments["sampling_metadata"].all_greedy
        if proposer._enable_probabilistic_draft_probs and sampled:
            return LoopReason.SAMPLED
        return None

    def _pad(self, begin: int, end: int) -> None:
        """Make rows begin .. end short sequences in block 0, which vLLM keeps free (the null
        block): what they write is never read."""
        inputs = self.inputs
        inputs.block_table[begin:end].zero_()
        inputs.num_rejected[begin:end].zero_()
        inputs.seq_lens[begin:end].fill_(self.width)

    def _draft(self, num_reqs: int) -> torch.Tensor:
        """vLLM's loop over the fixed buffers, between the two halves of scoring."""
        inputs, runtime, proposer = self.inputs, self.runtime, self.proposer
        num_tokens = num_reqs * self.width
        rejected = inputs.num_rejected[:num_reqs]
        starts = torch.arange(0, num_tokens + 1, self.width, dtype=torch.int32, device="cpu")
        metadata = CommonAttentionMetadata(
            query_start_loc=inputs.query_starts[: num_reqs + 1],
            query_start_loc_cpu=starts,
            seq_lens=inputs.seq_lens[:num_reqs],
            seq_lens_cpu_upper_bound=torch.full_like(starts[1:], self.max_model_len),
            num_reqs=num_reqs,
            num_actual_tokens=num_tokens,
            max_query_len=self.width,
            max_seq_len=self.max_model_len,
            block_table_tensor=inputs.block_table[:num_reqs],
            slot_mapping=inputs.positions[:num_tokens],  # replaced in the first pass
        )
        self.capturing = True
        try:
            runtime.score_history(metadata, rejected)
            drafts = proposer.draft(
                num_speculative_tokens=self.width - 1,
                target_token_ids=inputs.token_ids[:num_tokens],
                target_positions=inputs.positions[:num_tokens],
                target_hidden_states=None,  # draft models read none
                next_token_ids=inputs.next_token_ids[:num_reqs],
                token_indices_to_sample=None,
                common_attn_metadata=metadata,
                sampling_metadata=GREEDY,
                num_rejected_tokens_gpu=rejected,
            )
            runtime.select()
        finally:
            self.capturing = False
        return drafts
