# SPDX-License-Identifier: Apache-2.0
"""Counters on vLLM's own ``/metrics`` and in ``LLM.get_metrics()``.

Counting happens in the worker, and vLLM's way from there to the front end has no room for a
plugin's numbers. So the first worker writes them into a small file that the front end made, and
a Prometheus collector reads it when it is asked. Workers find the file through the environment,
not the configuration, which vLLM hashes for its compile cache. A worker on another host finds
none, and then there are no metrics.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from typing import Any

from dustin_vllm.state import DenseReason, LoopReason, Mode

FILE = "DUSTIN_STATS_FILE"
PUBLISH_SECONDS = 0.5
LOG_SECONDS = 10

# Prometheus name, description, and the key in the runtime's stats; keys with a dot are labels.
COUNTERS = (
    ("verification_rows", "Rows that verified drafts or decoded.", "verification_rows"),
    ("sparse_rows", "Rows that were verified sparsely.", "sparse_rows"),
    ("kv_tokens_full", "KV positions that dense verification would have read.", "kv_tokens_full"),
    ("kv_tokens_read", "KV positions that verification read.", "kv_tokens_read"),
    ("draft_kv_tokens_full", "The same for sparse draft passes.", "draft_kv_tokens_full"),
    ("draft_kv_tokens_read", "KV positions that they read.", "draft_kv_tokens_read"),
    ("draft_graphs", "Steps whose drafts came from one CUDA graph.", "draft_graphs"),
    ("selections", "Selections made.", "selections"),
    ("recovery_samples", "Measurements of attention recovery.", "recovery_samples"),
    ("recovery_sum", "Sum of the attention recovery measured.", "recovery_sum"),
)
# The same with a label, its values last.
LABELLED = (
    ("dense_rows", "Rows that were computed densely.", "dense_rows", "reason", DenseReason),
    ("draft_loops", "Steps that drafted pass by pass.", "draft_loops", "reason", LoopReason),
    (
        "verifications",
        "Rows that verified drafts; counted where verified_tokens is.",
        "verifications",
        "mode",
        Mode,
    ),
    (
        "verified_tokens",
        "Tokens that those rows confirmed; over verifications: acceptance length.",
        "verified_tokens",
        "mode",
        Mode,
    ),
)
GAUGES = (
    ("live_sequences", "Sequences that hold state.", "live_sequences"),
    ("selection_tokens", "KV positions of one selection.", "selection_tokens"),
)


def _values(stats: dict[str, Any]) -> Iterator[float]:
    for _, _, key in (*COUNTERS, *GAUGES):
        yield stats[key]
    for _, _, key, _, members in LABELLED:
        for member in members:
            yield stats[key].get(member.value, 0)


LAYOUT = struct.Struct(
    f"<{len(COUNTERS) + len(GAUGES) + sum(len(members) for *_, members in LABELLED)}d"
)


def log_line(stats: dict[str, Any], before: dict[str, Any]) -> str:
    """What happened between two readings of ``DustinRuntime.stats``; "" if nothing did."""

    def since(key: str) -> int:
        return stats[key] - before[key]

    def reasons(key: str) -> str:
        new = {why: n - before[key].get(why, 0) for why, n in stats[key].items()}
        return ", ".join(f"{n} {why}" for why, n in new.items() if n) or "none"

    if not since("verification_rows"):
        return ""
    read = since("kv_tokens_read") / max(1, since("kv_tokens_full"))
    return (
        f"{since('sparse_rows')} of {since('verification_rows')} verification rows sparse, "
        f"{read:.1%} of KV read; dense rows: {reasons('dense_rows')}; steps drafted by a graph: "
        f"{since('draft_graphs')}, pass by pass: {reasons('draft_loops')}"
    )


class StatsFile:
    """The file, mapped into memory.

    Args:
        path: an existing file of LAYOUT.size bytes.
    """

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), LAYOUT.size)

    def write(self, stats: dict[str, Any]) -> None:
        """Publish what ``DustinRuntime.stats`` returned."""
        self._memory[:] = LAYOUT.pack(*_values(stats))

    def read(self) -> tuple[float, ...]:
        """The numbers last published."""
        return LAYOUT.unpack(self._memory[:])


def worker_file() -> StatsFile | None:
    """The file that the front end made for this worker, or None."""
    path = os.environ.get(FILE)
    if path is None:
        return None
    try:
        return StatsFile(path)
    except (OSError, ValueError):
        return None  # made on another host, or gone


class _Collector:
    """Prometheus' view of the latest engine of this process."""

    def __init__(self) -> None:
        self.file: StatsFile | None = None

    def collect(self) -> Iterator[Any]:
        """Called on every scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        if self.file is None:
            return
        values = iter(self.file.read())
        for name, text, _ in COUNTERS:
            yield CounterMetricFamily(f"vllm:dustin_{name}", text, value=next(values))
        for name, text, _ in GAUGES:
            yield GaugeMetricFamily(f"vllm:dustin_{name}", text, value=next(values))
        for name, text, _, label, members in LABELLED:
            family = CounterMetricFamily(f"vllm:dustin_{name}", text, labels=[label])
            for member in members:
                family.add_metric([member.value], next(values))
            yield family


_collector: _Collector | None = None


def expose() -> None:
    """Make a file for the engine that is being configured, and show it. In the front end."""
    global _collector
    from prometheus_client import REGISTRY

    handle, path = tempfile.mkstemp(prefix="dustin-stats-")
    os.write(handle, bytes(LAYOUT.size))
    os.close(handle)
    atexit.register(_remove, path, os.getpid())
    os.environ[FILE] = path
    if _collector is None:
        _collector = _Collector()
        REGISTRY.register(_collector)
    _collector.file = StatsFile(path)


def _remove(path: str, process: int) -> None:
    if os.getpid() == process:  # a forked child inherits this
        with contextlib.suppress(OSError):
            os.unlink(path)
