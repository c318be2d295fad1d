# SPDX-License-Identifier: Apache-2.0
"""What vLLM's Ray executor needs of the plugin. vLLM itself does not run Ray on CPUs."""

from __future__ import annotations

import pickle
import sys

import pytest
from conftest import engine_args

pytestmark = pytest.mark.engine


def unpack(payload: bytes) -> dict[str, object]:
    """In a Ray actor, as a worker of another node: the configuration comes before plugins."""
    import pickle

    config = pickle.loads(payload)
    from vllm.plugins import load_general_plugins
    from vllm.utils.import_utils import resolve_obj_by_qualname

    load_general_plugins()
    from dustin_vllm import config as ours
    from dustin_vllm import metrics

    extension = resolve_obj_by_qualname(config.parallel_config.worker_extension_cls)
    return {
        "backend": config.attention_config.backend.get_class().get_name(),
        "draft_backend": config.speculative_config.attention_backend.name,
        "budget": ours.resolve(config).config.budget,
        "scheduler": config.scheduler_config.get_scheduler_cls().__name__,
        "rpc": hasattr(extension, "dustin_stats"),
        "metrics": metrics.worker_file() is not None,
    }


def test_a_ray_actor_unpacks_the_configuration_and_loads_the_plugin(target, draft):
    import ray
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(**engine_args(target, draft, {"budget": 512})).create_engine_config()
    environment = {"VLLM_PLUGINS": "dustin", "DUSTIN_STATS_FILE": "/on/another/host"}
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # not importable over there
    ray.init(num_cpus=1, include_dashboard=False, configure_logging=False, log_to_driver=False)
    try:
        worker = ray.remote(num_cpus=1, runtime_env={"env_vars": environment})(unpack)
        seen = ray.get(worker.remote(pickle.dumps(config)), timeout=240)
    finally:
        ray.shutdown()
    assert seen == {
        "backend": "DUSTIN",
        "draft_backend": "DUSTIN",
        "budget": 512,
        "scheduler": "DustinScheduler",
        "rpc": True,
        "metrics": False,
    }
