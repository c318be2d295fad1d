# SPDX-License-Identifier: Apache-2.0
"""The drafter: vLLM's draft-model proposer, which also makes the next selection."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import get_tp_group, init_model_parallel_group
from vllm.v1.spec_decode.draft_model import DraftModelProposer

from dustin_vllm import config, patches

if TYPE_CHECKING:
    from dustin_vllm.runtime import DustinRuntime

logger = logging.getLogger("vllm.dustin_vllm")


class DustinProposer(DraftModelProposer):
    """Drafts as vLLM does, with the scoring queries of every draft pass kept.

    vLLM constructs the plain proposer, which becomes this class in its constructor (patches),
    at the latest in ``runtime.attach``.
    """

    runtime: DustinRuntime | None = None  # None until vLLM knows its KV cache
    _first_pass_rows: torch.Tensor
    _group_of_one: Any = None

    def one_rank(self) -> AbstractContextManager[None]:
        """Where the model is built and run. A replicated draft knows of this rank only."""
        if not config.is_replicated(self.vllm_config):
            return nullcontext()
        if self._group_of_one is None:
            group = get_tp_group()
            backend = torch.distributed.get_backend(group.device_group)
            ranks = [[rank] for rank in range(torch.distributed.get_world_size())]
            self._group_of_one = init_model_parallel_group(
                ranks, group.local_rank, backend, group_name="dustin_draft"
            )
        return patches.tensor_parallel_group(self._group_of_one)

    def _get_model(self) -> torch.nn.Module:
        with self.one_rank():
            return super()._get_model()

    def draft(self, **kwargs: Any) -> torch.Tensor:
        """vLLM's loop over all draft passes; the same drafts on every rank."""
        with self.one_rank():
            draft_token_ids = super().propose(**kwargs)
        if config.is_replicated(self.vllm_config):
            # Replicas may differ by rounding, and a token that differs between the ranks of the
            # target would spoil all of its layers.
            own = draft_token_ids
            draft_token_ids = get_tp_group().broadcast(own.clone())
            # With vLLM's debug logging only: comparing waits for the device.
            if logger.isEnabledFor(logging.DEBUG) and not self._capturing:
                self._compare_replicas(own, draft_token_ids)
        return draft_token_ids

    @property
    def _capturing(self) -> bool:
        return self.runtime is not None and self.runtime.capturing

    def _compare_replicas(self, own: torch.Tensor, first: torch.Tensor) -> None:
        """Count the drafts [R, gamma] of this rank that are not those of the first rank."""
        if self.runtime is None:
            return
        different = int((own != first).sum())
        self.runtime.counters.replicas_compared += 1
        self.runtime.counters.replica_mismatches += different
        if different:
            logger.debug("Dustin: %d drafts of this rank's replica differ", different)

    def dummy_run(
        self,
        num_tokens: int,
        use_cudagraphs: bool = True,
        is_graph_capturing: bool = False,
        slot_mappings: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Called while vLLM captures the target's graph of every size; with ``use_cudagraphs``
        for its own piecewise graphs of the draft, without for full graphs of verification."""
        with self.one_rank():
            super().dummy_run(num_tokens, use_cudagraphs, is_graph_capturing, slot_mappings)
        full = is_graph_capturing and not use_cudagraphs
        if full and self.runtime is not None and not self.speculative_config.enforce_eager:
            with torch.inference_mode():
                self.runtime.capture_drafting(num_tokens)

    def _determine_batch_execution_and_padding(
        self, num_tokens: int, use_cudagraphs: bool = True
    ) -> tuple[CUDAGraphMode, int, torch.Tensor | None]:
        if self._capturing:  # no graphs within the graph, and no padding
            return CUDAGraphMode.NONE, num_tokens, None
        return super()._determine_batch_execution_and_padding(num_tokens, use_cudagraphs)

    def set_inputs_first_pass(self, *args: Any, **kwargs: Any) -> tuple[int, torch.Tensor, Any]:
        num_tokens, rows, metadata = super().set_inputs_first_pass(*args, **kwargs)
        # The draft's vocabulary may be the smaller one. No trained model emits the padding
        # entries above it, but a request may send them, and they must not end the server.
        self.input_ids[:num_tokens].clamp_(max=self.draft_model_config.get_vocab_size() - 1)
        self._first_pass_rows = rows
        return num_tokens, rows, metadata

    def build_per_group_and_layer_attn_metadata(
        self, common_attn_metadata: Any, draft_index: int = 0
    ) -> tuple[list[object], dict[str, object]]:
        assert self.runtime is not None
        # Called once before every draft pass. The first pass runs the accepted tokens too, so
        # each sequence's query sits where its draft is sampled; later passes have a row each.
        self.runtime.begin_draft_pass(self._first_pass_rows if draft_index == 0 else None)
        return super().build_per_group_and_layer_attn_metadata(
            self.runtime.compact_draft(common_attn_metadata), draft_index
        )

    def propose(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """See ``DraftModelProposer.propose``. Afterwards the selections for the next
        verification step are published."""
        assert self.runtime is not None
        draft_token_ids = self.runtime.replay_drafting(kwargs)
        if draft_token_ids is None:
            metadata = kwargs["common_attn_metadata"]
            self.runtime.begin_scoring(metadata, kwargs.get("num_rejected_tokens_gpu"))
            draft_token_ids = self.draft(**kwargs)
            self.runtime.finish_scoring()
        return draft_token_ids
