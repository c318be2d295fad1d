# SPDX-License-Identifier: Apache-2.0
"""What both benchmarks share."""

from __future__ import annotations

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
