# SPDX-License-Identifier: Apache-2.0
"""vLLM's schedulers, which keep approximate keys and values out of the prefix cache.

What the target computes for generated tokens while it verifies sparsely is not what it would
compute densely. Another request, or the next turn of a chat, must not be given that as the
exact prefix it asked for; it computes those tokens again.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


def publish_prompts_only(coordinator: Any) -> None:
    """Let a KVCacheCoordinator publish no blocks beyond those of a request's prompt."""
    cache_blocks = coordinator.cache_blocks

    def cache_prompt_blocks(request: Any, num_computed_tokens: int) -> None:
        cache_blocks(request, min(num_computed_tokens, request.num_prompt_tokens))

    coordinator.cache_blocks = cache_prompt_blocks


class DustinScheduler(Scheduler):
    """vLLM's scheduler; generated blocks are not published to the prefix cache."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        publish_prompts_only(self.kv_cache_manager.coordinator)


class DustinAsyncScheduler(AsyncScheduler):
    """The same for async scheduling."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        publish_prompts_only(self.kv_cache_manager.coordinator)
