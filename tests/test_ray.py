# SPDX-License-Identifier: Apache-2.0
"""What Ray needs of the plugin. vLLM does not run its Ray executor on CPUs."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest
from conftest import engine_args, generate, tokens

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


def test_a_node_without_the_plugin_says_what_is_missing(target, draft):
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(**engine_args(target, draft, {"budget": 512})).create_engine_config()
    script = """
import os, pickle, sys
sys.modules["dustin_vllm"] = None  # as if it were not installed
try:
    pickle.loads(bytes.fromhex(sys.stdin.read()))
except ImportError as error:
    print("ERROR", error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=pickle.dumps(config).hex(),
        env={**os.environ, "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert "dustin_vllm" in done.stdout.split("ERROR", 1)[1]


def test_batches_over_replicas_with_ray_data(make_llm, target, draft):
    """The README's recipe, with two replicas on CPUs."""
    import ray
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    args = engine_args(target, draft, {"budget": 160, "recent": 32})
    prompts = [tokens(i, 300 + 40 * i) for i in range(4)]
    expected = generate(make_llm(target, draft, {"budget": 160, "recent": 32}), prompts)
    assert expected != generate(make_llm(target, draft, None), prompts)  # it verifies sparsely
    parameters = {"temperature": 0, "max_tokens": 32, "ignore_eos": True, "detokenize": False}
    model = args.pop("model")
    environment = {"VLLM_PLUGINS": "dustin", "OMP_NUM_THREADS": "1"}
    ray.init(
        num_cpus=3,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": environment},
    )
    try:
        processor = build_processor(
            vLLMEngineProcessorConfig(
                model_source=model,
                engine_kwargs=args,
                concurrency=2,
                batch_size=2,
                placement_group_config={"bundles": [{"CPU": 1}]},  # on GPUs: leave out
                chat_template_stage=False,
                tokenize_stage=False,
                detokenize_stage=False,
                log_engine_metrics=False,  # needs ray[default]
            ),
            preprocess=lambda row: {
                "prompt": "",
                "tokenized_prompt": list(row["ids"]),
                "sampling_params": parameters,
                "number": row["number"],
            },
            postprocess=lambda row: {
                "number": row["number"],
                "ids": list(row["generated_tokens"]),
            },
        )
        rows = [{"number": i, "ids": ids} for i, ids in enumerate(prompts)]
        written = processor(ray.data.from_items(rows)).take_all()
    finally:
        ray.shutdown()
    assert [row["ids"] for row in sorted(written, key=lambda row: row["number"])] == expected
