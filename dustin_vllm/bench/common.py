# SPDX-License-Identifier: Apache-2.0
"""What everything that measures shares."""

from __future__ import annotations

import re
import signal
import sys
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


def end_workers_too() -> None:
    """From now on SIGTERM unwinds this process, so that it ends the engine it has started. Such an
    engine is in a session of its own, and would keep its GPU's memory."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


LAST_LINES, CAUSES = 40, 5
# A line with the name of an exception; the last of a log are seldom the cause of the others.
_RAISED = re.compile(r"\b\w*(Error|Exception)\b: \S")


def last_words(log: Path) -> str:
    """The end of a process's output, after the first exceptions that are not in it."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    earlier = [line for line in lines[:-LAST_LINES] if _RAISED.search(line)]
    return "\n".join([*list(dict.fromkeys(earlier))[:CAUSES], *lines[-LAST_LINES:]])


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
