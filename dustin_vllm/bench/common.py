# SPDX-License-Identifier: Apache-2.0
"""What both benchmarks share."""

from __future__ import annotations

from typing import Any


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
