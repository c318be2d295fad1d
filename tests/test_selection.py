# SPDX-License-Identifier: Apache-2.0
"""The vectorised selection and compaction equal the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch
from conftest import reference_selection

from dustin_vllm import reference, selection
from dustin_vllm.config import DustinConfig, HeadSet, LayerGroup, Settings

HEADS = HeadSet(((0, (0,)),))


def settings(unit: int, budget_units: int, lookahead_units: int, **config: object) -> Settings:
    return Settings(
        config=DustinConfig(budget=budget_units * unit, **config),
        gamma=4,
        unit=unit,
        block_size=32,
        dilation_tokens=5,
        target=LayerGroup("target", budget_units, lookahead_units),
        draft=None,
        target_heads=HEADS,
        draft_heads=HEADS,
    )


@pytest.mark.parametrize("merge", ["fill", "weighted"])
@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize(
    ("unit", "budget_units", "lookahead_units", "sinks", "recent"),
    [
        (32, 4, 2, 4, 32),
        (32, 4, 0, 4, 64),  # history only
        (32, 4, 99, 0, 64),  # lookahead only
        (32, 1, 1, 0, 0),  # budget of one block
        (16, 12, 5, 20, 64),
        (1, 80, 30, 4, 16),
    ],
)
def test_selection_equals_reference(
    merge, ties, unit, budget_units, lookahead_units, sinks, recent
):
    s = settings(unit, budget_units, lookahead_units, merge=merge, sinks=sinks, recent=recent)
    # Contexts around unit edges, the shortest sparse one included.
    shortest = (budget_units + 1) * unit
    more = [shortest + n * unit for n in (7, 20, 90)]
    contexts = torch.tensor([shortest, shortest + unit - 1, more[0], more[1] - 1, more[2] + 1])
    shape = (len(contexts), int(contexts.max()) // unit)
    if ties:
        lookahead = torch.randint(0, 3, shape).float()
        history = torch.randint(0, 3, shape).float()
    else:
        lookahead, history = torch.rand(shape), torch.rand(shape)
    # Scores past the context must not matter.
    beyond = torch.arange(shape[1])[None] >= (contexts // unit)[:, None]
    lookahead[beyond], history[beyond] = 1e9, 1e9
    chosen = selection.merge_and_select(lookahead, history, contexts, s, s.target)
    assert chosen.dtype == torch.int32
    for row, context in enumerate(contexts.tolist()):
        assert chosen[row].tolist() == reference_selection(lookahead[row], history[row], context, s)


def test_selection_holds_sinks_and_recent_window_and_has_no_duplicates():
    s = settings(32, 8, 4, sinks=40, recent=70)
    contexts = torch.tensor([32 * 20 + 5])
    scores = torch.rand(1, 20)
    chosen = selection.merge_and_select(scores, scores, contexts, s, s.target)[0].tolist()
    assert len(set(chosen)) == 8
    assert {0, 1} <= set(chosen)  # 40 sinks
    assert {17, 18, 19} <= set(chosen)  # tokens 575..644


def test_protected_units_may_not_exceed_the_budget_in_the_reference():
    with pytest.raises(ValueError, match="protected"):
        reference.select_units([0.0] * 9, [0.0] * 9, 9 * 32, 32, 2, 4, 64, "fill", 1, 0.5)


def test_dilation_crosses_block_borders():
    scores = torch.zeros(64)
    scores[31] = 1.0  # last token of block 0
    assert reference.unit_scores(scores, 64, 32, 0).tolist() == [1.0, 0.0]
    assert reference.unit_scores(scores, 64, 32, 1).tolist() == [1.0, 1.0]
    token_wise = reference.unit_scores(scores, 64, 1, 3)
    assert token_wise.nonzero()[:, 0].tolist() == [31, 32, 33, 34]


@pytest.mark.parametrize("context", [160, 161, 191, 192])
@pytest.mark.parametrize("new_tokens", [1, 5])
def test_compaction_equals_reference(context, new_tokens):
    block, budget_units = 32, 3
    table = torch.randperm(64, dtype=torch.int32).view(4, 16)
    seq_lens = torch.tensor([50, context + new_tokens, 7, context + 40 + new_tokens]).int()
    rows, contexts = [1, 3], [context, context + 40]
    chosen = torch.tensor([[0, 2, 4], [1, 2, 3]], dtype=torch.int32)
    before = table.clone()
    short_table, short_lens = selection.compact(table, seq_lens, rows, chosen, contexts, block)
    assert torch.equal(table, before)
    assert short_lens[[0, 2]].tolist() == [50, 7]
    assert torch.equal(short_table[[0, 2]], table[[0, 2]])
    for i, row in enumerate(rows):
        entries, length = reference.compact_row(
            table[row].tolist(), chosen[i].tolist(), contexts[i], int(seq_lens[row]), block, block
        )
        assert short_lens[row] == length
        assert short_table[row, : len(entries)].tolist() == entries
        assert len(entries) == -(-length // block)
        assert length <= budget_units * block + block - 1 + new_tokens


def test_attending_to_a_compacted_row_is_masked_attention():
    """The identity that everything rests on, in fp32, for the block granularity."""
    block, length, context = 16, 150, 145
    q, k, v = torch.randn(5, 4, 8), torch.randn(length, 2, 8), torch.randn(length, 2, 8)
    chosen = [0, 3, 4, 8]
    masked = reference.sparse_attention(q, k, v, 0.3, chosen, context, block)
    entries, short = reference.compact_row(list(range(10)), chosen, context, length, block, block)
    kept = torch.cat([torch.arange(b * block, (b + 1) * block) for b in entries])[:short]
    dense = reference.sparse_attention(q, k[kept], v[kept], 0.3, [], 0, block)
    assert torch.allclose(masked, dense, atol=1e-6)


def test_attention_recovery_counts_selection_and_tail():
    scores = torch.zeros(70)
    scores[0], scores[40], scores[69] = 0.5, 0.25, 0.25
    assert reference.attention_recovery(scores, [0], 64, 32) == pytest.approx(0.75)
    assert reference.attention_recovery(scores, [0, 1], 64, 32) == pytest.approx(1.0)
