# SPDX-License-Identifier: Apache-2.0
"""What every measurement's JSON says about where it came from."""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any


def command() -> list[str]:
    """The command line, with files and folders by their names only."""
    program = "dustin" if Path(sys.argv[0]).name == "cli.py" else sys.argv[0]
    return [shown(word) for word in (program, *sys.argv[1:])]


def shown(word: str) -> str:
    """An absolute path by its name; anything else as it is."""
    return Path(word).name if word.startswith("/") else word


def options(chosen: Any) -> dict[str, Any]:
    """Fields of a dataclass of options, for JSON: paths as ``command`` shows them."""

    def plain(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [plain(one) for one in value]
        return shown(str(value)) if isinstance(value, Path) else value

    return {name: plain(value) for name, value in asdict(chosen).items()}


def environment() -> dict[str, Any]:
    """Versions, processor and GPU."""
    import torch

    from dustin_vllm import __version__, compat

    distribution = compat.vllm_distribution()
    triton = sys.modules.get("triton")
    return {
        "dustin": __version__,
        "vllm": None if distribution is None else " ".join(distribution),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": getattr(triton, "__version__", None),
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _cpu_model() -> str:
    """Name of the processor, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
