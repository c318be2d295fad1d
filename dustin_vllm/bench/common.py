# SPDX-License-Identifier: Apache-2.0
"""What everything that measures shares."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dustin_vllm


def package_environment() -> dict[str, str]:
    """Environment in which a worker started by ``python -m`` imports this very package.

    In a checkout it would otherwise take the source tree of the working folder, which lacks the
    built C++ library, and not the package that is installed. Python 3.11 and later.
    """
    root = Path(dustin_vllm.__file__).resolve().parents[1]
    return {} if root == Path.cwd() else {"PYTHONSAFEPATH": "1"}


def worker_environment(base: Mapping[str, str], plugin: bool, verbose: bool) -> dict[str, str]:
    """Environment variables of a process that runs an engine for a measurement.

    Args:
        base: what it inherits.
        plugin: whether it loads this plugin; stock vLLM loads none.
    """
    return {
        **base,
        **package_environment(),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_PLUGINS": "dustin" if plugin else "",
        "VLLM_LOGGING_LEVEL": "INFO" if verbose else "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


class BenchError(RuntimeError):
    """The benchmark cannot run, or measured something that must not be reported."""


def pyplot() -> Any:
    """matplotlib.pyplot, drawing into files.

    Raises:
        BenchError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise BenchError("--plot needs matplotlib: pip install 'dustin-vllm[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
