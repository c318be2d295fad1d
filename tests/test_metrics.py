# SPDX-License-Identifier: Apache-2.0
"""Counters on their way to Prometheus, and the Grafana dashboard that queries them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dustin_vllm import metrics
from dustin_vllm.runtime import Row
from dustin_vllm.runtime_cpu import CpuRuntime
from dustin_vllm.state import Counters, DenseReason, LoopReason, Slot

DASHBOARD = Path(__file__).resolve().parent.parent / "docs" / "grafana-dashboard.json"
# vLLM's own metrics that the dashboard queries; test_server.py finds them on a real server.
OF_VLLM = {
    "generation_tokens_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "num_requests_running",
    "num_requests_waiting",
    "num_preemptions_total",
    "kv_cache_usage_perc",
}


def queries() -> list[str]:
    """Every PromQL expression of the dashboard."""
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    found = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    return found + [v["definition"] for v in board["templating"]["list"] if "definition" in v]


def queried() -> set[str]:
    """Names of the metrics that the dashboard queries, without vllm:."""
    return {name for query in queries() for name in re.findall(r"vllm:(\w+)", query)}


@pytest.fixture
def shown(tmp_path) -> dict[tuple[str, str], float]:
    """(sample, label's value) -> value, from counters that are all different."""
    counters = Counters()
    number = 0
    for name, value in vars(counters).items():
        if isinstance(value, int | float):
            number += 1
            setattr(counters, name, number)
    for reasons, values in (("dense_rows", DenseReason), ("draft_loops", LoopReason)):
        for one in values:
            number += 1
            getattr(counters, reasons)[one.value] = number
    for name in ("verifications", "verified_tokens"):
        for mode in ("sparse", "dense"):
            number += 1
            getattr(counters, name)[mode] = number
    stats: dict[str, Any] = {**counters.as_dict(), "live_sequences": 90, "selection_tokens": 91}
    path = tmp_path / "stats"
    path.write_bytes(bytes(metrics.LAYOUT.size))
    collector = metrics._Collector()
    collector.file = metrics.StatsFile(str(path))
    collector.file.write(stats)
    samples = [sample for family in collector.collect() for sample in family.samples]
    found = {(s.name.removeprefix("vllm:dustin_"), "".join(s.labels.values())): s.value
             for s in samples}  # fmt: skip
    assert len(found) == len(samples)
    found["stats"] = stats
    return found


def test_every_counter_arrives_as_what_it_was(shown):
    stats = shown.pop("stats")
    for (sample, label), value in shown.items():
        name = sample.removesuffix("_total")
        assert value == (stats[name][label] if label else stats[name]), sample
    # All but the time, which is no count, and what only debug logging counts.
    rest = {"scoring_seconds", "replicas_compared", "replica_mismatches"}
    assert {sample.removesuffix("_total") for sample, _ in shown} == set(stats) - rest


def test_the_dashboard_queries_metrics_that_exist(shown):
    del shown["stats"]
    names = {f"dustin_{sample}" for sample, _ in shown}
    assert queried() <= names | OF_VLLM
    assert names - queried() == set()  # and shows everything that Dustin counts
    assert queried() >= OF_VLLM


def test_the_dashboard_is_whole():
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    places = [tuple(panel["gridPos"][k] for k in "xy") for panel in panels]
    assert len(set(places)) == len(panels)
    for panel in panels:
        assert panel["title"]
        assert panel["targets"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    for query in queries():
        assert query.count("(") == query.count(")")
        assert "$instance" in query or "label_values" in query


def test_a_line_of_the_log_says_what_happened():
    before = Counters().as_dict()
    counters = Counters(verification_rows=8, sparse_rows=6, kv_tokens_full=100, kv_tokens_read=25)
    counters.dense_rows["refresh"] = 2
    line = metrics.log_line(counters.as_dict(), before)
    assert line.startswith("6 of 8 verification rows sparse, 25.0% of KV read; dense rows: 2 refr")
    assert metrics.log_line(counters.as_dict(), counters.as_dict()) == ""


def test_a_prompt_that_vllm_pads_counts_for_no_mode():
    """Its padding looks like drafts that were rejected."""
    runtime = object.__new__(CpuRuntime)
    runtime.counters = Counters()

    def row(dense: DenseReason | None, drafts: int) -> Row:
        return Row(Slot(0), None, 50, 51 + drafts, dense, False, True)

    runtime.rows = [
        row(None, 4),
        row(DenseReason.PREFILL, 4),
        row(DenseReason.SHORT_CONTEXT, 2),
        row(DenseReason.NO_SELECTION, 0),
    ]
    runtime._count_verified(torch.tensor([1, 4, 2, 0]))
    assert runtime.counters.verifications == {"sparse": 1, "dense": 1}
    assert runtime.counters.verified_tokens == {"sparse": 4, "dense": 1}
    runtime._count_verified(None)  # nothing was drafted before: nothing was rejected
    assert runtime.counters.verified_tokens == {"sparse": 9, "dense": 4}
