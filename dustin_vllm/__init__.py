# SPDX-License-Identifier: Apache-2.0
"""Dustin: sparse verification for long-context speculative decoding, as a vLLM plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__version__ = "0.1.0"

# In a checkout two subpackages stand beside this one. `python -m` in it imports the checkout,
# installed or not, and must find them.
_root = Path(__file__).parent.parent
if all((_root / name / "__init__.py").is_file() for name in ("configs", "triton_kernels")):
    __path__.append(str(_root))


def register() -> None:
    """Entry point ``vllm.general_plugins``: makes ``--attention-backend DUSTIN`` known.

    vLLM calls it in every process (front end, engine core, workers), possibly more than
    once. It imports no kernels and changes nothing for other attention backends.
    """
    from dustin_vllm import patches

    patches.apply()


def _restore_backend(name: str) -> Any:
    """Unpickles ``AttentionBackendEnum.DUSTIN`` in a process that has not loaded plugins yet."""
    from dustin_vllm import patches

    return patches.add_backend_member(name)
