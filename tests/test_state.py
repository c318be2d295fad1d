# SPDX-License-Identifier: Apache-2.0
"""Slots of sequences: fresh exactly when the latest step made a selection."""

from __future__ import annotations

import torch

from dustin_vllm import metrics
from dustin_vllm.config import LayerGroup
from dustin_vllm.state import Counters, SequenceScores


def scores(num_slots: int) -> SequenceScores:
    return SequenceScores(num_slots, [LayerGroup("target", 3, 1)], torch.device("cpu"))


def test_a_selection_is_fresh_only_in_the_sequences_next_step():
    slot = scores(2).slot("a")
    assert not slot.fresh
    slot.seen = 1
    assert not slot.fresh  # a step without a selection, as every first step
    slot.published = 1
    assert slot.fresh
    slot.seen = 2  # the next step made none
    assert not slot.fresh


def test_slots_are_distinct_reused_and_never_the_padding_slot():
    s = scores(2)
    a, b = s.slot("a"), s.slot("b")
    assert {a.index, b.index} == {0, 1}
    assert s.slot("a") is a
    assert s.padding_index == 2
    s.keep_only(["b"])
    assert len(s) == 1
    c = s.slot("c")
    assert c.index == a.index
    assert not c.fresh


def test_when_slots_run_out_the_one_unseen_for_longest_is_lost():
    s = scores(2)
    a, b = s.slot("a"), s.slot("b")
    a.seen = a.published = 5
    b.seen = b.published = 4
    c = s.slot("c")
    assert c.index == b.index
    assert s.slot("a").fresh
    assert not s.slot("b").fresh  # a new, empty slot


def test_the_log_says_what_happened_since_the_last_line():
    counters = Counters()
    before = counters.as_dict()
    assert metrics.log_line(counters.as_dict(), before) == ""
    counters.verification_rows, counters.sparse_rows = 5, 4
    counters.kv_tokens_full, counters.kv_tokens_read = 1000, 250
    counters.dense_rows["short_context"] += 1
    counters.draft_graphs = 2
    middle = counters.as_dict()
    line = metrics.log_line(middle, before)
    assert line == (
        "4 of 5 verification rows sparse, 25.0% of KV read; dense rows: 1 short_context; "
        "steps drafted by a graph: 2, pass by pass: none"
    )
    counters.verification_rows += 1
    counters.dense_rows["prefill"] += 3
    line = metrics.log_line(counters.as_dict(), middle)
    assert line.startswith("0 of 1 verification rows sparse, 0.0% of KV read; dense rows: 3 pref")
