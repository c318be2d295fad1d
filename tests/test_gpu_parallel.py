# SPDX-License-Identifier: Apache-2.0
"""Two GPUs: both executors, and the command of the README through the OpenAI server.

Skipped with fewer GPUs only; the logic is tested on two CPU ranks (test_tensor_parallel.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace

import pytest
import torch
from conftest import engine_args, run_python, write_layer_dropped, write_tiny_qwen2
from openai import OpenAI
from test_server import add_tokenizer
from test_tensor_parallel import HEADS, PROMPTS, SCRIPT

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

from dustin_vllm.bench import presets

pytestmark = pytest.mark.engine

DUSTIN = {"budget": 128, "recent": 32, **HEADS}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    target = write_tiny_qwen2(root / "target", layers=4, heads=8, kv_heads=2, head_dim=64)
    return target, write_layer_dropped(root / "draft", target, keep=2)


def generate_in_child(pair, ranks: int, **arguments) -> dict:
    options = {"dtype": "float16", "block_size": 16, "max_model_len": 4096, **arguments}
    options |= {
        "enforce_eager": False,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    }
    args = engine_args(*pair, DUSTIN, tensor_parallel_size=ranks, **options)
    out = run_python(
        SCRIPT,
        JOB=json.dumps({"args": args, "prompts": PROMPTS}),
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",  # a function as a remote call
        VLLM_WORKER_MULTIPROC_METHOD="spawn",
        VLLM_PLUGINS="dustin",
    )
    line = next(line for line in out.splitlines() if "RESULT " in line)
    return json.loads(line.split("RESULT ", 1)[1])


@pytest.mark.parametrize("executor", ["mp", "ray"])
def test_both_ranks_select_the_same(pair, executor):
    one = generate_in_child(pair, 1)
    two = generate_in_child(pair, 2, distributed_executor_backend=executor)
    assert two["selections"][0] == two["selections"][1]
    for stats in two["stats"]:
        assert stats["sparse_rows"] > 20
        assert stats["draft_graphs"] > 5
    # Random weights flip near-ties when rounding differs.
    first = [[ids[0] for ids in run["tokens"]] for run in (one, two)]
    assert sum(a == b for a, b in zip(*first, strict=True)) >= 2


@pytest.mark.parametrize("executor", ["mp", "ray"])
def test_the_command_of_the_readme(tmp_path, executor):
    """Shapes of Qwen2.5-72B, four layers of it, and of Qwen2.5-0.5B; vocabularies as they are."""
    preset = presets.PRESETS["72b"]
    preset = replace(preset, draft=replace(preset.draft, layers=4))
    target, draft, _ = presets.write_models(preset, tmp_path, layers=4, draft_vocab=151936)
    for path in (target, draft):
        add_tokenizer(path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4}
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(target)]
    command += ["--speculative-config", json.dumps(speculative), "--attention-backend", "DUSTIN"]
    command += ["--tensor-parallel-size", "2", "--distributed-executor-backend", executor]
    command += ["--load-format", "dummy", "--max-model-len", "16384", "--port", str(port)]
    command += ["--gpu-memory-utilization", "0.5", "--served-model-name", "shape"]
    log = tmp_path / "server.log"
    with log.open("w") as out:
        server = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    api = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=120)
    try:
        deadline = time.monotonic() + 280
        while True:
            assert server.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            with contextlib.suppress(Exception):
                api.models.list()
                break
            time.sleep(0.5)
        prompt = torch.randint(1000, 150000, (6000,)).tolist()
        answer = api.completions.create(
            model="shape",
            prompt=prompt,
            max_tokens=64,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        assert answer.usage.completion_tokens == 64
        time.sleep(1)  # metrics are up to half a second old
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
            found = re.search(
                r"^vllm:dustin_sparse_rows_total\S* (\S+)", page.read().decode(), re.M
            )
        assert found is not None
        assert float(found[1]) > 10
        assert "Dustin: budget 1024 tokens" in log.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
