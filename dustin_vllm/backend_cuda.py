# SPDX-License-Identifier: Apache-2.0
"""Attention backend for CUDA: FlashAttention over compacted block tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from dustin_vllm import config, runtime_cuda

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from dustin_vllm.runtime_cuda import CudaRuntime, OwnAttention, QueryBuffer


class DustinCudaAttentionBackend(FlashAttentionBackend):
    """FLASH_ATTN under another name; verification rows may read a selection of their cache."""

    @staticmethod
    def get_name() -> str:
        return "DUSTIN"

    @staticmethod
    def get_impl_cls() -> type[DustinCudaAttentionImpl]:
        return DustinCudaAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[DustinCudaMetadataBuilder]:
        return DustinCudaMetadataBuilder


def _is_compacted(metadata: CommonAttentionMetadata) -> bool:
    """Whether the runtime has rewritten the block table, see CudaRuntime."""
    return getattr(metadata, "dustin_compacted", False)


class DustinCudaMetadataBuilder(FlashAttentionMetadataBuilder):
    """Hands shortened block tables and lengths of sparse rows to the stock builder."""

    runtime: CudaRuntime | None = None  # set on the target's builder, see runtime.attach
    supports_update_block_table = False  # tables are not the runner's
    draft_runtime: CudaRuntime | None = None  # set on the drafter's builder
    draft_only = False  # set on builders whose layers all belong to the draft

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashAttentionMetadata:
        if self.runtime is None:
            # vLLM also builds for the draft's layers in every target step, and nobody reads
            # it: at least do not launch a scheduling kernel for it.
            skip_schedule = fast_build or self.draft_only
            return self._finish(
                super().build(common_prefix_len, common_attn_metadata, skip_schedule),
                common_attn_metadata,
                self.draft_runtime,
            )
        planned = self.runtime.plan_verification(common_attn_metadata)
        compacted = _is_compacted(planned)
        self.block_size = self.runtime.page_size if compacted else self.kv_cache_spec.block_size
        if self.use_full_cuda_graph and self.aot_schedule:
            # The same number for one batch size at capture and at replay: the schedule is made
            # outside the graph, the kernel's own number is inside.
            self.max_num_splits = self.runtime.num_splits(planned.num_reqs)
        # Our kernel needs no schedule of FlashAttention's.
        fast_build |= self.runtime.uses_own_kernel(planned)
        built = self._finish(super().build(0, planned, fast_build), planned, self.runtime)
        second = getattr(planned, "dustin_second", None)
        if second is not None:
            # Without a schedule, which would take the place of the first one's: FlashAttention
            # makes one in each of these layers.
            built.dustin_second = self._finish(super().build(0, second, True), second, self.runtime)
        return built

    @staticmethod
    def _finish(
        metadata: FlashAttentionMetadata,
        common: CommonAttentionMetadata,
        runtime: CudaRuntime | None,
    ) -> FlashAttentionMetadata:
        """Note what the layers have to know."""
        metadata.dustin_compacted = _is_compacted(common)
        metadata.dustin_own = runtime is not None and runtime.uses_own_kernel(common)
        metadata.dustin_second = None  # what layers with a selection of their own use
        return metadata

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> FlashAttentionMetadata:
        runtime = self.draft_runtime
        if runtime is not None:
            impl = runtime.draft_layers[0].impl
            # The stock builder took these from the runner's configuration: the target's.
            self.num_heads_q, self.num_heads_kv = impl.num_heads, impl.num_kv_heads
            self.headdim = impl.head_size
            compacted = _is_compacted(common_attn_metadata)
            self.block_size = runtime.page_size if compacted else self.kv_cache_spec.block_size
            if self.use_full_cuda_graph and self.aot_schedule:
                self.max_num_splits = runtime.draft_splits()
            if runtime.capturing and not runtime.uses_own_kernel(common_attn_metadata):
                # In a graph one scheduling kernel for all layers replaces one for each.
                return self.build(0, common_attn_metadata)
        return super().build_for_drafting(common_attn_metadata, draft_index)

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        return self.runtime is None and super().use_cascade_attention(*args, **kwargs)


class DustinCudaAttentionImpl(FlashAttentionImpl):
    """The stock kernel; scoring layers also keep the queries that are asked for."""

    capture: QueryBuffer | None = None  # set on scoring layers, see runtime.attach
    own: OwnAttention | None = None  # our kernel, see CudaRuntime
    second = False  # set on layers with a selection of their own, see runtime.attach
    selects: Callable[[Any], None] | None = None  # set on layers that select within a step
    token_pages = False  # whether compacted tables address single tokens

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vllm_config = get_current_vllm_config_or_none()
        if vllm_config is not None and config.is_active(vllm_config):
            # While the model is built, so that vLLM counts our memory when it profiles.
            device = torch.device("cuda", torch.cuda.current_device())
            self.token_pages = runtime_cuda.reserve(vllm_config, device).settings.unit == 1

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if attn_metadata is not None:
            if self.capture is not None:
                self.capture.take(self, query)
            if self.selects is not None:
                self.selects(attn_metadata)
            if self.second:
                attn_metadata = attn_metadata.dustin_second or attn_metadata
            if self.token_pages and attn_metadata.dustin_compacted:
                kv_cache = runtime_cuda.token_pages(kv_cache)
            if attn_metadata.dustin_own:
                runtime_cuda.attend(self, query, kv_cache, attn_metadata, output)
                return output
        return super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
        )
