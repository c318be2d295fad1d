# SPDX-License-Identifier: Apache-2.0
"""What a request or a server may ask for: every row of the README's table of support.

One stock engine, one DUSTIN engine whose budget holds every context, and one that verifies
sparsely serve the same requests, in this process.
"""

from __future__ import annotations

import gc
import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import GAMMA, engine_args, runtime_of, tokens
from test_server import add_tokenizer
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.engine

SPARSE = {"budget": 160, "recent": 32}
PROMPTS = [tokens(i, n) for i, n in enumerate((250, 333, 417))]
LENGTH = 40
PATTERN = "[ab]{20,30}"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["fox", "dog"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
# Requests of every kind; the rest of their parameters is in ``parameters``.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "one token": {"max_tokens": 1},
    "inside a verification": {"max_tokens": 9},
    "logprobs": {"logprobs": 3},
    "prompt logprobs": {"prompt_logprobs": 1},
    "min_tokens": {"min_tokens": 20, "stop_token_ids": list(range(2, 300))},
    "stop tokens": {"stop_token_ids": list(range(2, 60))},
    "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.2},
    "bad words": {"bad_words": ["t", "h"]},
    "regular expression": {"structured_outputs": {"regex": PATTERN}, "ignore_eos": False},
    "JSON schema": {"structured_outputs": {"json": SCHEMA}, "ignore_eos": False},
    "choice": {
        "structured_outputs": {"choice": ["the quick brown fox", "the lazy dog"]},
        "ignore_eos": False,
    },
}


@pytest.fixture(scope="module")
def pair(target, draft, tmp_path_factory):
    """The tiny models with a tokenizer, which grammars and stop strings need."""
    folder = tmp_path_factory.mktemp("support")
    made = [shutil.copytree(s, folder / n) for n, s in (("target", target), ("draft", draft))]
    for path in made:
        add_tokenizer(path)
    return made


def start(pair, dustin: dict[str, Any] | None) -> Any:
    from vllm import LLM

    return LLM(
        **engine_args(
            *pair,
            dustin,
            skip_tokenizer_init=False,
            max_num_batched_tokens=2048,
            max_num_seqs=6,
            # A random model would fill its answer with it.
            structured_outputs_config={
                "backend": "xgrammar",
                "disable_any_whitespace": True,
            },
        )
    )


def stop(llm: Any) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    gc.collect()
    cleanup_dist_env_and_memory()


def parameters(**asked: Any) -> SamplingParams:
    options = {"temperature": 0, "max_tokens": LENGTH, "ignore_eos": True, **asked}
    if "structured_outputs" in options:
        options["structured_outputs"] = StructuredOutputsParams(**options["structured_outputs"])
    return SamplingParams(**options)


def ask(llm: Any, prompts: list[list[int]] = PROMPTS, **asked: Any) -> list[Any]:
    """vLLM's outputs."""
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(inputs, parameters(**asked), use_tqdm=False)


def ids(outputs: list[Any]) -> list[list[int]]:
    return [list(one.token_ids) for output in outputs for one in output.outputs]


def ask_all(llm: Any) -> dict[str, list[Any]]:
    """Requests of all kinds, one kind after the other."""
    return {kind: ask(llm, **asked) for kind, asked in KINDS.items()}


@pytest.fixture(scope="module")
def answers(pair) -> dict[str, dict[str, list[Any]]]:
    """Of the stock engine and of the one whose budget holds every context."""
    found = {}
    for name, settings in (("stock", None), ("exact", {"budget": 4096})):
        llm = start(pair, settings)
        found[name] = ask_all(llm)
        stop(llm)
    return found


@pytest.fixture(scope="module")
def sparse(pair, answers) -> Iterator[Any]:
    """The engine that verifies sparsely. It comes last: there is one engine at a time."""
    llm = start(pair, SPARSE)
    yield llm
    stop(llm)


@pytest.fixture
def counted(sparse) -> Iterator[None]:
    """Fails a test in which no row was verified sparsely."""
    before = runtime_of(sparse).stats()["sparse_rows"]
    yield
    assert runtime_of(sparse).stats()["sparse_rows"] > before


def told(outputs: list[Any]) -> list[Any]:
    """What a client is told, but for log-probabilities, which are compared apart."""
    return [(o.text, list(o.token_ids), o.finish_reason) for out in outputs for o in out.outputs]


def chosen_logprobs(outputs: list[Any]) -> list[float]:
    return [
        entry[token].logprob
        for output in outputs
        for one in output.outputs
        for token, entry in zip(one.token_ids, one.logprobs or (), strict=False)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_budget_above_the_context_equals_stock(answers, kind):
    stock, exact = answers["stock"][kind], answers["exact"][kind]
    assert told(exact) == told(stock)
    assert chosen_logprobs(exact) == pytest.approx(chosen_logprobs(stock), abs=1e-4)
    if kind == "prompt logprobs":
        for ours, theirs in zip(exact, stock, strict=True):
            assert len(ours.prompt_logprobs) == len(theirs.prompt_logprobs) > 200
            for own, other in zip(
                ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True
            ):
                assert own.keys() == other.keys()


# ---- what a request may ask of sparse verification ------------------------------------------


@pytest.fixture(scope="module")
def greedy(sparse) -> list[list[int]]:
    """The sparse engine's own continuations, of which other requests must get a part."""
    return ids(ask(sparse))


@pytest.mark.parametrize("max_tokens", range(1, 2 * GAMMA + 5))
def test_max_tokens_inside_a_verification(sparse, greedy, max_tokens):
    outputs = ask(sparse, max_tokens=max_tokens)
    assert ids(outputs) == [tokens_[:max_tokens] for tokens_ in greedy]
    assert {o.outputs[0].finish_reason for o in outputs} == {"length"}


@pytest.mark.usefixtures("counted")
def test_stop_strings_and_tokens(sparse, greedy):
    texts = [output.outputs[0].text for output in ask(sparse)]
    for place in range(6, 14):
        wanted = greedy[0][place]
        end = greedy[0].index(wanted) + 1
        found = ask(sparse, PROMPTS[:1], stop_token_ids=[wanted])[0].outputs[0]
        assert (list(found.token_ids), found.finish_reason) == (greedy[0][:end], "stop")
        assert found.stop_reason == wanted
        string = texts[0][place : place + 3]
        found = ask(sparse, PROMPTS[:1], stop=[string])[0].outputs[0]
        assert found.text == texts[0][: texts[0].index(string)]
        assert found.stop_reason == string


@pytest.mark.usefixtures("counted")
def test_min_tokens(sparse, greedy):
    stops = list(range(2, 512))
    early = ask(sparse, stop_token_ids=stops)
    assert [len(i) for i in ids(early)] == [1, 1, 1]
    late = ask(sparse, stop_token_ids=[first[0] for first in greedy], min_tokens=25)
    for output, unstopped in zip(late, greedy, strict=True):
        assert len(output.outputs[0].token_ids) >= 25
        assert not set(unstopped[:1]) & set(output.outputs[0].token_ids[:25])


@pytest.mark.usefixtures("counted")
def test_logprobs_are_those_of_the_sparse_target(sparse, greedy):
    outputs = ask(sparse, logprobs=3)
    assert ids(outputs) == greedy
    for output in outputs:
        one = output.outputs[0]
        assert len(one.logprobs) == LENGTH
        for token, entry in zip(one.token_ids, one.logprobs, strict=True):
            assert len(entry) == 3
            assert entry[token].rank == 1
            assert entry[token].logprob == max(e.logprob for e in entry.values()) < 0


@pytest.mark.usefixtures("counted")
def test_prompt_logprobs_are_dense(sparse, answers):
    """The prompt is computed densely; asking for it takes it out of the prefix cache."""
    outputs = ask(sparse, prompt_logprobs=1)
    for ours, stock in zip(outputs, answers["stock"]["prompt logprobs"], strict=True):
        for own, other in zip(ours.prompt_logprobs[1:], stock.prompt_logprobs[1:], strict=True):
            assert own.keys() == other.keys()
            for token, entry in own.items():
                assert entry.logprob == pytest.approx(other[token].logprob, abs=1e-4)


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("sampling", [{"temperature": 0.9}, {"temperature": 1.0, "top_p": 0.8}])
def test_temperature_n_and_seeds_run(sparse, greedy, sampling):
    """Under speculation on the CPU stock vLLM 0.32 does not say the same again for the same
    seed, so what a seed gives is not compared."""
    outputs = ask(sparse, n=3, seed=7, **sampling)
    for output, likeliest in zip(outputs, greedy, strict=True):
        found = [tuple(one.token_ids) for one in output.outputs]
        assert [len(one) for one in found] == [LENGTH] * 3
        assert len({*found, tuple(likeliest)}) == 4


@pytest.mark.usefixtures("counted")
def test_structured_output(sparse):
    for output in ask(sparse, **KINDS["regular expression"]):
        assert re.fullmatch(PATTERN, output.outputs[0].text)
    for output in ask(sparse, **KINDS["JSON schema"]):
        data = json.loads(output.outputs[0].text)
        assert data["name"] in ("fox", "dog")
        assert data["age"] <= 99
    for output in ask(sparse, **KINDS["choice"]):
        assert output.outputs[0].text in ("the quick brown fox", "the lazy dog")


@pytest.mark.usefixtures("counted")
def test_penalties_and_bad_words(sparse, greedy):
    for kind in ("penalties", "bad words"):
        found = ids(ask(sparse, **KINDS[kind]))
        assert found == ids(ask(sparse, **KINDS[kind]))
        assert [len(one) for one in found] == [LENGTH] * 3
    tokenizer = sparse.get_tokenizer()
    letter = next(
        i for i in greedy[0] if tokenizer.decode([i]).isascii() and len(tokenizer.decode([i])) == 1
    )
    assert letter not in ids(ask(sparse, PROMPTS[:1], bad_words=[tokenizer.decode([letter])]))[0]


def test_what_vllm_refuses_beside_speculation_leaves_the_engine_alive(sparse, greedy):
    for asked in ({"logit_bias": {5: 1.0}}, {"min_p": 0.1, "temperature": 1.0}, {"n": 2}):
        with pytest.raises(VLLMValidationError, match="speculative|greedy"):
            ask(sparse, **asked)
    assert ids(ask(sparse)) == greedy


# ---- how requests are scheduled ---------------------------------------------------------------


def scheduler_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


@pytest.fixture
def uncached(sparse):
    """No prompt is found in the prefix cache."""
    assert sparse.reset_prefix_cache()
    return sparse


def serve(llm: Any, prompts: list[list[int]], chunks: tuple[int, int]) -> list[list[int]]:
    """Greedy tokens, with at most so many prompt tokens and drafts of a sequence per step: of
    the first step, and of all others. 0: no limit."""
    engine, config = llm.llm_engine, scheduler_of(llm).scheduler_config
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, parameters())
    found: dict[str, list[int]] = {}
    usual, config.long_prefill_token_threshold = config.long_prefill_token_threshold, chunks[0]
    try:
        while engine.has_unfinished_requests():
            for output in engine.step():
                found[output.request_id] = list(output.outputs[0].token_ids)
            config.long_prefill_token_threshold = chunks[1]
    finally:
        config.long_prefill_token_threshold = usual
    return [found[str(number)] for number in range(len(prompts))]


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("chunk", range(1, 2 * GAMMA + 3))
def test_prompt_chunks_of_every_size(uncached, chunk):
    """Chunks of gamma + 1 tokens look like verifications. Every remainder of the prompt's length
    is met, and rows in their prompt stand beside rows that verify."""
    prompts = [tokens(20 + i, 166 + 3 * chunk * i + i % chunk) for i in range(min(chunk + 1, 5))]
    whole = serve(uncached, prompts, (0, chunk))
    assert uncached.reset_prefix_cache()
    before = runtime_of(uncached).stats()
    assert serve(uncached, prompts, (chunk, chunk)) == whole
    after = runtime_of(uncached).stats()
    prefills = after["dense_rows"]["prefill"] - before["dense_rows"]["prefill"]
    assert prefills == sum(-(-len(prompt) // chunk) for prompt in prompts)


def preempted(llm: Any) -> float:
    values = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    return values["vllm:num_preemptions"]


@pytest.fixture
def pressure(uncached, monkeypatch):
    """All but 40 blocks of the KV cache are taken, which is too few for four sequences. By
    request: how many tokens it had when it was preempted first."""
    scheduler = scheduler_of(uncached)
    pool, preempt = scheduler.kv_cache_manager.block_pool, scheduler._preempt_request
    had: dict[str, int] = {}

    def _preempt_request(request, *args, **kwargs):
        had.setdefault(request.request_id.split("-")[0], request.num_output_tokens)
        return preempt(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", _preempt_request)
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 40)
    yield had
    pool.free_blocks(taken)


LONG = [tokens(i, 200 + 7 * i) for i in range(4)]


@pytest.fixture(scope="module")
def unpressured(sparse) -> dict[str, list[list[int]]]:
    asked = {"dense": {"extra_args": {"dustin": "dense"}}, "sparse": {}}
    return {mode: ids(ask(sparse, LONG, max_tokens=160, **a)) for mode, a in asked.items()}


def test_preemption_of_dense_requests_changes_nothing(unpressured, pressure, sparse):
    outputs = ask(sparse, LONG, max_tokens=160, extra_args={"dustin": "dense"})
    assert pressure
    assert ids(outputs) == unpressured["dense"]


@pytest.mark.usefixtures("counted")
def test_preemption_of_sparse_requests_changes_only_what_comes_after_it(
    unpressured, pressure, sparse
):
    """A sequence that is preempted gets its KV anew, all of it dense; what it says from there on
    is as good or better, but may be something else."""
    outputs = ask(sparse, LONG, max_tokens=160)
    assert 0 < len(pressure) < len(LONG)
    for output, expected in zip(outputs, unpressured["sparse"], strict=True):
        found = list(output.outputs[0].token_ids)
        same = pressure.get(output.request_id.split("-")[0], 160)
        assert found[:same] == expected[:same]
        assert len(found) == 160
