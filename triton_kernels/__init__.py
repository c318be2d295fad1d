# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the GPU path, packaged as ``dustin_vllm.triton_kernels``.

They compute what ``dustin_vllm.reference`` defines, for a whole batch, with launch counts and
grids that depend on shapes only: no host sync, no allocation, so all of them can be captured
in a CUDA graph and replayed with other values in the same buffers. Importing this package
imports Triton; the plugin's entry point must not do that.
"""

from dustin_vllm.triton_kernels.attention import (
    MAX_QUERY_ROWS,
    AttentionWorkspace,
    attention_workspace,
    paged_attention,
)
from dustin_vllm.triton_kernels.compact import compact
from dustin_vllm.triton_kernels.gather import gather_queries
from dustin_vllm.triton_kernels.score import (
    ScoringPlan,
    ScoringWorkspace,
    scoring_plan,
    scoring_size,
    token_scores,
    token_scores_workspace,
)
from dustin_vllm.triton_kernels.select import (
    SelectionWorkspace,
    merge_and_select,
    select_workspace,
)

__all__ = [
    "MAX_QUERY_ROWS",
    "AttentionWorkspace",
    "ScoringPlan",
    "ScoringWorkspace",
    "SelectionWorkspace",
    "attention_workspace",
    "compact",
    "gather_queries",
    "merge_and_select",
    "paged_attention",
    "scoring_plan",
    "scoring_size",
    "select_workspace",
    "token_scores",
    "token_scores_workspace",
]
