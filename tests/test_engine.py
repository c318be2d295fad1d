# SPDX-License-Identifier: Apache-2.0
"""The whole engine on the CPU, with tiny random models in fp32."""

from __future__ import annotations

import pytest
from conftest import acceptance, generate, runtime_of, tokens

pytestmark = pytest.mark.engine

SPARSE = {"budget": 128, "recent": 32}
PROMPTS = [tokens(i, n) for i, n in enumerate((300, 5, 520, 133, 256, 417))]


def test_budget_above_context_equals_stock(make_llm, target, draft):
    """Six requests over four slots, chunked prefill and prefix caching on."""
    stock = generate(make_llm(target, draft, None), PROMPTS)
    llm = make_llm(target, draft, {"budget": 4096})
    assert generate(llm, PROMPTS) == stock
    assert generate(llm, PROMPTS) == stock  # again, from the prefix cache
    stats = runtime_of(llm).stats()
    assert stats["sparse_rows"] == 0
    assert stats["dense_rows"]["short_context"] == stats["verification_rows"] > 0


def test_sparse(make_llm, target, draft):
    llm = make_llm(target, draft, SPARSE)
    out = generate(llm, PROMPTS)
    print(runtime_of(llm).stats(), acceptance(llm), out[0])
