# SPDX-License-Identifier: Apache-2.0
"""Two ranks on the CPU: each scores with the heads it holds, and all select the same."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import engine_args, run_python, tokens, write_tiny_qwen2

from dustin_vllm.proposer import DustinProposer
from dustin_vllm.state import Counters

pytestmark = pytest.mark.engine

# Rank 0 holds heads 0 and 1, rank 1 heads 2 and 3. A layer with heads on both ranks, one with
# heads on one rank only, and a rank without any scoring head of the draft.
HEADS = {
    "target_heads": [{"layer": 1, "heads": [0]}, {"layer": 2, "heads": [0, 1, 3]}],
    "draft_heads": [{"layer": 0, "heads": [2, 3]}],
}
# Weighted: a history that is summed over ranks twice selects otherwise.
FRESH = {**HEADS, "fresh_layers": [1, 2], "merge": "weighted"}
PROMPTS = [tokens(i, n) for i, n in enumerate((300, 520, 256))]

SCRIPT = """
import json, os

def selections(worker):
    scores = worker.model_runner.dustin.scores.selections
    return {name: held.tolist() for name, held in scores.items()}

if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    job = json.loads(os.environ["JOB"])
    llm = LLM(**job["args"])
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": p} for p in job["prompts"]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    result = {
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "stats": llm.collective_rpc("dustin_stats"),
        "selections": llm.collective_rpc(selections),
    }
    print("RESULT " + json.dumps(result))
    llm.llm_engine.engine_core.shutdown()
"""


def generate_in_child(
    target, draft, dustin, ranks: int, draft_ranks: int | None = None, **env: str
) -> dict:
    args = engine_args(target, draft, dustin, tensor_parallel_size=ranks)
    if draft_ranks is not None:
        args["speculative_config"]["draft_tensor_parallel_size"] = draft_ranks
    out = run_python(
        SCRIPT,
        JOB=json.dumps({"args": args, "prompts": PROMPTS}),
        VLLM_CPU_OMP_THREADS_BIND="|".join("01"[:ranks]),
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",  # a function as a remote call
        VLLM_PLUGINS="dustin",
        **env,
    )
    line = next(line for line in out.splitlines() if "RESULT " in line)
    return json.loads(line.split("RESULT ", 1)[1])


def assert_same(two: dict, one: dict) -> None:
    assert two["selections"][0] == two["selections"][1] == one["selections"][0]
    assert two["tokens"] == one["tokens"]
    for counts in two["stats"]:
        assert counts["sparse_rows"] == one["stats"][0]["sparse_rows"] > 20


@pytest.mark.parametrize(
    ("aggregate", "kv_heads", "heads"),
    [("mean", 2, HEADS), ("max", 2, HEADS), ("mean", 1, HEADS), ("mean", 2, FRESH)],
    ids=["mean", "max", "one_key_head", "fresh"],
)
def test_two_ranks_select_and_write_what_one_does(
    target, draft, tmp_path, aggregate, kv_heads, heads
):
    if kv_heads == 1:  # vLLM gives both ranks the same key head
        target = write_tiny_qwen2(tmp_path / "target", layers=4, kv_heads=1)
    dustin = {"budget": 160, "recent": 32, "aggregate": aggregate, **heads}
    one = generate_in_child(target, draft, dustin, 1)
    assert_same(generate_in_child(target, draft, dustin, 2), one)


@pytest.mark.parametrize("asked", [None, 1])
def test_a_draft_whose_heads_do_not_divide_runs_whole_on_every_rank(target, tmp_path, asked):
    draft = write_tiny_qwen2(tmp_path / "odd", layers=2, heads=3, kv_heads=1, seed=1)
    dustin = {"budget": 160, "recent": 32, "draft_budget": 96}
    if asked is None:  # without the plugin's backend, vLLM's own error
        with pytest.raises(AssertionError, match=r"attention heads \(3\) must be divisible"):
            generate_in_child(target, draft, None, 2)
    one = generate_in_child(target, draft, dustin, 1)
    two = generate_in_child(target, draft, dustin, 2, asked, VLLM_LOGGING_LEVEL="DEBUG")
    assert_same(two, one)
    for counts in two["stats"]:  # debug logging compares the replicas
        assert counts["replicas_compared"] > 10
        assert counts["replica_mismatches"] == 0


def test_drafts_of_replicas_that_differ_are_counted():
    proposer = DustinProposer.__new__(DustinProposer)
    proposer.runtime = SimpleNamespace(counters=Counters())
    proposer._compare_replicas(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 5]]))
    counters = proposer.runtime.counters
    assert (counters.replicas_compared, counters.replica_mismatches) == (1, 1)
