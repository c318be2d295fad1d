# SPDX-License-Identifier: Apache-2.0
"""Tiny random models for engine tests, and helpers to run engines inside the test process."""

from __future__ import annotations

import os

# Read when torch and vLLM are imported, so before anything else.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# In this process the engine core, scheduler and worker are plain objects that tests can look at.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

VOCAB = 512
GAMMA = 4


def write_tiny_qwen2(
    path: Path,
    layers: int,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    seed: int = 0,
    **config: Any,
) -> Path:
    """A random Qwen2 whose attention is sharp enough to look far back."""
    from safetensors.torch import save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    model_config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=head_dim * heads,
        intermediate_size=2 * head_dim * heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        **config,
    )
    model = Qwen2ForCausalLM(model_config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj.weight" in name or "k_proj.weight" in name:
                weight.mul_(8)
            if any(f"layers.{late}." in name for late in range(2, layers)) and "_proj" in name:
                weight.mul_(0.7)  # the draft is the first 2 layers: let it be right often
    path.mkdir(parents=True)
    weights = {k: v.contiguous() for k, v in model.state_dict().items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    data = model_config.to_dict()
    data.update(architectures=["Qwen2ForCausalLM"], torch_dtype="float32")
    (path / "config.json").write_text(json.dumps(data))
    return path


def write_layer_dropped(path: Path, source: Path, keep: int) -> Path:
    """The first ``keep`` layers of a tiny model: a draft whose acceptance is real but partial."""
    from safetensors.torch import load_file, save_file

    path.mkdir(parents=True)
    data = json.loads((source / "config.json").read_text())
    data["num_hidden_layers"] = keep
    data.pop("layer_types", None)
    (path / "config.json").write_text(json.dumps(data))
    kept = {
        name: weight
        for name, weight in load_file(source / "model.safetensors").items()
        if ".layers." not in name or int(name.split(".layers.")[1].split(".")[0]) < keep
    }
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random 4-layer target."""
    return write_tiny_qwen2(tmp_path_factory.mktemp("models") / "target", layers=4)


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    """The target's first 2 layers."""
    return write_layer_dropped(tmp_path_factory.mktemp("models") / "draft", target, keep=2)


def tokens(seed: int, length: int) -> list[int]:
    """A random prompt that repeats itself, so that attention has something to find."""
    generator = torch.Generator().manual_seed(seed)
    phrase = torch.randint(2, VOCAB, (max(1, length // 3),), generator=generator).tolist()
    return (phrase * 4)[:length]


def engine_args(target: Path, draft: Path | None, dustin: dict[str, Any] | None, **kw: Any) -> dict:
    """Arguments of ``LLM``; ``dustin`` None means stock vLLM."""
    args: dict[str, Any] = {
        "model": str(target),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "block_size": 32,
        "kv_cache_memory_bytes": 1 << 28,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "seed": 0,
    }
    if draft is not None:
        args["speculative_config"] = {
            "method": "draft_model",
            "model": str(draft),
            "num_speculative_tokens": GAMMA,
        }
    if dustin is not None:
        args["attention_backend"] = "DUSTIN"
        args["additional_config"] = {"dustin": {"dense_below": 0, **dustin}}
    return {**args, **kw}


@pytest.fixture
def make_llm() -> Iterator[Callable[..., Any]]:
    """Starts engines in this process, one at a time, and takes them down again."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    alive: list[Any] = []

    def stop() -> None:
        while alive:
            llm = alive.pop()
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            cleanup_dist_env_and_memory()

    def start(*args: Any, **kw: Any) -> Any:
        stop()
        alive.append(LLM(**engine_args(*args, **kw)))
        return alive[-1]

    yield start
    stop()


def generate(llm: Any, prompts: list[list[int]], max_tokens: int = 32) -> list[list[int]]:
    """Greedy token ids of every prompt."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def serve_mixed_requests(
    llm: Any, prompts: list[list[int]], seconds: float, at_least: int, seed: int = 0
) -> dict[str, int]:
    """Requests of all kinds come and go at random: short and long prompts, any number of new
    tokens, greedy or sampled, with penalties or logprobs, some aborted, ids used again.

    Goes on for ``seconds`` and until ``at_least`` requests are finished. Every request that is
    not aborted must end as asked.

    Returns:
        Numbers of requests "finished" and "aborted".
    """
    from vllm import SamplingParams

    generator = random.Random(seed)
    engine = llm.llm_engine
    running: dict[str, SamplingParams] = {}
    count = {"finished": 0, "aborted": 0}
    deadline = time.monotonic() + seconds
    number = 0

    def parameters() -> SamplingParams:
        options: dict[str, Any] = {"temperature": generator.choice([0, 0, 0.8])}
        if generator.random() < 0.2:
            options["logprobs"] = 2
        if generator.random() < 0.1:
            options["presence_penalty"] = 0.5
        length = generator.choice([1, 2, 5, 6, 20, 60])
        return SamplingParams(max_tokens=length, ignore_eos=True, detokenize=False, **options)

    while running or time.monotonic() < deadline or count["finished"] < at_least:
        more = time.monotonic() < deadline or count["finished"] < at_least
        if more and len(running) < 12 and generator.random() < 0.4:
            prompt = generator.choice(prompts)
            prompt = prompt[: generator.choice([len(prompt), len(prompt), GAMMA + 1, 40])]
            request_id = str(number % 50)  # used again soon after it is gone
            number += 1
            if request_id not in running:
                running[request_id] = parameters()
                engine.add_request(request_id, {"prompt_token_ids": prompt}, running[request_id])
        if running and generator.random() < 0.04:
            gone = generator.choice(sorted(running))
            engine.abort_request([gone])
            del running[gone]
            count["aborted"] += 1
        for output in engine.step():
            if output.finished and output.request_id in running:
                asked = running.pop(output.request_id)
                assert len(output.outputs[0].token_ids) == asked.max_tokens
                count["finished"] += 1
    return count


def run_python(code: str, **env: str) -> str:
    """Run code in a fresh interpreter; its standard output."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        cwd=tempfile.gettempdir(),  # not the checkout, whose folders would be importable
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def reference_selection(
    lookahead: Any, history: Any, context: int, settings: Any, group: Any = None
) -> list[int]:
    """``reference.select_units`` with the parameters of resolved settings, for a layer group."""
    from dustin_vllm import reference

    group = group or settings.target
    return reference.select_units(
        lookahead.tolist(),
        history.tolist(),
        context,
        settings.unit,
        group.budget_units,
        settings.config.sinks,
        settings.config.recent,
        settings.group_merge,
        group.lookahead_units,
        settings.config.lookahead_weight,
    )


def runtime_of(llm: Any) -> Any:
    """The DustinRuntime of an engine in this process."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    return worker.model_runner.dustin


def acceptance(llm: Any) -> tuple[int, int]:
    """(draft tokens, accepted draft tokens) so far."""
    values = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    return (
        int(values["vllm:spec_decode_num_draft_tokens"]),
        int(values["vllm:spec_decode_num_accepted_tokens"]),
    )
