# SPDX-License-Identifier: Apache-2.0
"""The class behind ``AttentionBackendEnum.DUSTIN`` on the current platform."""

from vllm.platforms import current_platform

from dustin_vllm import patches

patches.check()

if current_platform.is_cpu():
    from dustin_vllm.backend_cpu import DustinCPUAttentionBackend as DustinAttentionBackend
else:
    from dustin_vllm.backend_cuda import DustinCudaAttentionBackend as DustinAttentionBackend

patches.apply_runner_patch()

__all__ = ["DustinAttentionBackend"]
