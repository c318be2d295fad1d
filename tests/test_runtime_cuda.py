# SPDX-License-Identifier: Apache-2.0
"""Parts of the CUDA runtime that need no GPU: cache views and query buffers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dustin_vllm.config import HeadSet
from dustin_vllm.runtime_cuda import QueryBuffer, block_pages, token_pages
from dustin_vllm.triton_kernels import compact

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # CPU: under Triton's interpreter
BLOCKS, HEADS, BLOCK_SIZE, WIDTH = 6, 3, 16, 8


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_token_pages_address_every_token_of_every_block(layout):
    if layout == "NHD":
        cache = torch.randn(BLOCKS, BLOCK_SIZE, HEADS, WIDTH, device=DEVICE).transpose(1, 2)
    else:
        cache = torch.randn(BLOCKS, HEADS, BLOCK_SIZE, WIDTH, device=DEVICE)
    pages, step = token_pages(cache), block_pages(cache)
    assert pages.shape[1:] == (HEADS, 1, WIDTH)
    assert pages.data_ptr() == cache.data_ptr()
    for block in range(BLOCKS):
        for token in range(BLOCK_SIZE):
            page = pages[block * step + token, :, 0]
            assert torch.equal(page, cache[block, :, token])

    # And the compaction kernel writes these page numbers.
    table = torch.tensor([[4, 1, 5]], dtype=torch.int32, device=DEVICE)
    selection = torch.tensor([[0, 2, 17]], dtype=torch.int32, device=DEVICE)
    out = torch.full((1, 48), -7, dtype=torch.int32, device=DEVICE)
    lens = torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def one(value: int) -> torch.Tensor:
        return torch.tensor([value], dtype=torch.int32, device=DEVICE)

    compact(out, lens, table, selection, one(33), one(35), one(1), 1, BLOCK_SIZE, step)
    wanted = [4 * step, 4 * step + 2, 1 * step + 1, 5 * step + 1, 5 * step + 2]
    assert lens.tolist() == [5]
    assert out[0, :5].tolist() == wanted


def test_query_buffer_keeps_the_rows_and_heads_that_are_asked_for():
    heads = HeadSet(((1, (0, 3)), (4, (0, 1, 2, 3))))
    buffer = QueryBuffer(heads, 6, 8, torch.float32, "cpu")
    layers = {i: SimpleNamespace(impl=SimpleNamespace(num_heads=4)) for i in range(5)}
    buffer.attach(layers)
    buffer.rows[:3] = torch.tensor([5, 2, 0])
    query = torch.randn(7, 4, 8)
    buffer.take(layers[1].impl, query)
    assert not buffer.queries.any()  # nothing is asked for
    buffer.count, buffer.first_place = 3, 2
    buffer.take(layers[1].impl, query)
    buffer.take(layers[4].impl, 2 * query)
    assert torch.equal(buffer.queries[2:5, :2], query[[5, 2, 0]][:, [0, 3]])
    assert torch.equal(buffer.queries[2:5, 2:], 2 * query[[5, 2, 0]])
    assert not buffer.queries[[0, 1, 5]].any()
