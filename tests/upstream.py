# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests of attention backends, with DUSTIN in FlashAttention's place: without a draft
model it must be FlashAttention and nothing else.

    python tests/upstream.py SOURCE [pytest's arguments]

SOURCE: the source of the installed vLLM, or of it the folder tests/v1/attention. Needs a GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path("tests/v1/attention")
FILES = ("test_attention_backends.py", "utils.py")
MODEL = "meta-llama/Meta-Llama-3-8B"  # named by the tests, which only want its shape
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
CONFTEST = """
import pytest

import dustin_vllm

dustin_vllm.register()


def pytest_collection_modifyitems(items):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    replaced = 0
    for module in {item.module for item in items}:
        module.is_torch_equal_or_newer = lambda version: False  # FlexAttention is not our matter
        for value in vars(module).values():
            if isinstance(value, list) and AttentionBackendEnum.FLASH_ATTN in value:
                value[:] = [AttentionBackendEnum.DUSTIN]
                replaced += 1
    assert replaced or not items, "the tests have no list with FLASH_ATTN"


@pytest.fixture
def default_vllm_config():
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config
"""


def main() -> int:
    """Copy what is needed into a folder of its own and run it there."""
    source = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        (root / FOLDER).mkdir(parents=True)
        for name in FILES:
            shutil.copy(source / FOLDER / name, root / FOLDER / name)
        for folder in (FOLDER, *list(FOLDER.parents)[:-1]):
            (root / folder / "__init__.py").touch()
        (root / "conftest.py").write_text(CONFTEST)
        (root / MODEL).mkdir(parents=True)
        (root / MODEL / "config.json").write_text(json.dumps(SHAPE))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["-k", "causal_backend_correctness", str(FOLDER), *sys.argv[2:]]
        env = {**os.environ, "HF_HUB_OFFLINE": "1"}
        return subprocess.run(command, cwd=root, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
