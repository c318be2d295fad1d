# SPDX-License-Identifier: Apache-2.0
"""Attention backend for vLLM's CPU platform: CPU_ATTN with compacted block tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from dustin_vllm.runtime import DustinRuntime
    from dustin_vllm.runtime_cpu import QueryCapture


class DustinCPUAttentionBackend(CPUAttentionBackend):
    """CPU_ATTN under another name; verification rows may read a selection of their blocks."""

    @staticmethod
    def get_name() -> str:
        return "DUSTIN"

    @staticmethod
    def get_impl_cls() -> type[DustinCPUAttentionBackendImpl]:
        return DustinCPUAttentionBackendImpl

    @staticmethod
    def get_builder_cls() -> type[DustinCPUAttentionMetadataBuilder]:
        return DustinCPUAttentionMetadataBuilder


class DustinCPUAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """Hands shortened block tables and lengths of sparse rows to the stock builder."""

    runtime: DustinRuntime | None = None  # set on the target's builder, see runtime.attach

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        if self.runtime is not None:
            common_attn_metadata = self.runtime.plan_verification(common_attn_metadata)
        built = super().build(common_prefix_len, common_attn_metadata, fast_build)
        # What layers with a selection of their own use; None: the same.
        second = getattr(common_attn_metadata, "dustin_second", None)
        built.dustin_second = second and super().build(common_prefix_len, second, fast_build)
        return built


class DustinCPUAttentionBackendImpl(CPUAttentionBackendImpl):
    """The stock kernel; scoring layers also keep the queries that are asked for."""

    capture: QueryCapture | None = None  # set on scoring layers, see runtime.attach
    second = False  # set on layers with a selection of their own, see runtime.attach
    selects: Callable[[Any], None] | None = None  # set on layers that select within a step

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if self.capture is not None and attn_metadata is not None:
            self.capture.take(query)
        if self.selects is not None and attn_metadata is not None:
            self.selects(attn_metadata)
        if self.second and attn_metadata is not None:
            attn_metadata = attn_metadata.dustin_second or attn_metadata
        return super().forward(layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs)
