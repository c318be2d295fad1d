# SPDX-License-Identifier: Apache-2.0
"""What Dustin adds to vLLM's worker: methods for ``LLM.collective_rpc``."""

from __future__ import annotations

from typing import Any

from dustin_vllm import patches

# vLLM imports this module in every worker, before it makes the model runner and the proposer.
patches.apply_proposer_patch()


class DustinWorkerExtension:
    """Mixed into the worker class through vLLM's ``worker_extension_cls``."""

    model_runner: Any

    def dustin_stats(self) -> dict[str, Any]:
        """Counters since start-up, see ``dustin_vllm.state.Counters``. Empty when inactive."""
        runtime = getattr(self.model_runner, "dustin", None)
        return {} if runtime is None else runtime.stats()
