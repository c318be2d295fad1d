# SPDX-License-Identifier: Apache-2.0
"""The drafter: vLLM's draft-model proposer, which also makes the next selection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.spec_decode.draft_model import DraftModelProposer

if TYPE_CHECKING:
    from dustin_vllm.runtime import DustinRuntime


class DustinProposer(DraftModelProposer):
    """Drafts as vLLM does, with the scoring queries of every draft pass kept.

    vLLM constructs the plain proposer; ``runtime.attach`` turns that object into this class.
    """

    runtime: DustinRuntime
    _first_pass_rows: torch.Tensor

    def dummy_run(
        self,
        num_tokens: int,
        use_cudagraphs: bool = True,
        is_graph_capturing: bool = False,
        slot_mappings: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Called while vLLM captures the target's graph of every size; with ``use_cudagraphs``
        for its own piecewise graphs of the draft, without for full graphs of verification."""
        super().dummy_run(num_tokens, use_cudagraphs, is_graph_capturing, slot_mappings)
        full = is_graph_capturing and not use_cudagraphs
        if full and not self.speculative_config.enforce_eager:
            with torch.inference_mode():
                self.runtime.capture_drafting(num_tokens)

    def _determine_batch_execution_and_padding(
        self, num_tokens: int, use_cudagraphs: bool = True
    ) -> tuple[CUDAGraphMode, int, torch.Tensor | None]:
        if self.runtime.capturing:  # no graphs within the graph, and no padding
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
        # Called once before every draft pass. The first pass runs the accepted tokens too, so
        # each sequence's query sits where its draft is sampled; later passes have a row each.
        self.runtime.begin_draft_pass(self._first_pass_rows if draft_index == 0 else None)
        return super().build_per_group_and_layer_attn_metadata(
            self.runtime.compact_draft(common_attn_metadata), draft_index
        )

    def propose(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """See ``DraftModelProposer.propose``. Afterwards the selections for the next
        verification step are published."""
        draft_token_ids = self.runtime.replay_drafting(kwargs)
        if draft_token_ids is None:
            metadata = kwargs["common_attn_metadata"]
            self.runtime.begin_scoring(metadata, kwargs.get("num_rejected_tokens_gpu"))
            draft_token_ids = super().propose(*args, **kwargs)
            self.runtime.finish_scoring()
        return draft_token_ids
