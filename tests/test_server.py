# SPDX-License-Identifier: Apache-2.0
"""The OpenAI-compatible server, in its usual three processes, with the openai client."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from conftest import GAMMA, VOCAB
from openai import OpenAI
from test_metrics import queried

pytestmark = pytest.mark.engine

TEXT = "the quick brown fox jumps over the lazy dog and runs away into the wood. " * 6


def add_tokenizer(path: Path) -> None:
    """A byte-level tokenizer of VOCAB entries, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<s>", "</s>", *alphabet]
    names += [f"<{i}>" for i in range(VOCAB - len(names))]
    tokenizer = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    fast.save_pretrained(path)


@pytest.fixture(scope="module")
def client(target: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A server with a small budget; its log must stay free of errors."""
    root = tmp_path_factory.mktemp("server")
    models = {}
    for name, source in (("target", target), ("draft", draft)):
        models[name] = root / name
        shutil.copytree(source, models[name])
        add_tokenizer(models[name])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    speculative = {
        "method": "draft_model",
        "model": str(models["draft"]),
        "num_speculative_tokens": GAMMA,
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(models["target"]), "--served-model-name", "tiny"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "4"]
    command += ["--kv-cache-memory-bytes", str(1 << 28), "--attention-backend", "DUSTIN"]
    command += ["--speculative-config", json.dumps(speculative), "--enable-prompt-tokens-details"]
    settings = {"dustin": {"budget": 160, "recent": 32, "dense_below": 0}}
    command += ["--additional-config", json.dumps(settings)]
    # The usual way to run: an engine core and a worker, both spawned.
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    env |= {"TMPDIR": str(root)}
    log = root / "server.log"
    with log.open("w") as out:
        server = subprocess.Popen(
            command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    api = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=120)
    try:
        deadline = time.monotonic() + 300
        while True:
            assert server.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            try:
                api.models.list()
                break
            except Exception:
                time.sleep(0.5)
        yield api
        text = log.read_text()  # before it is stopped, which vLLM itself logs errors about
        assert server.poll() is None, text[-4000:]
        assert "Dustin: budget 160 tokens in 5 units of 32" in text
        assert "verification rows sparse" in text
        assert "Traceback" not in text, text[-4000:]
    finally:
        server.terminate()
        try:
            server.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)  # what a failed server may leave behind


OPTIONS = {"temperature": 0, "extra_body": {"ignore_eos": True}}


def test_completion_is_repeatable(client):
    texts = [
        client.completions.create(model="tiny", prompt=TEXT, max_tokens=40, **OPTIONS)
        for _ in range(2)
    ]
    assert texts[0].usage.completion_tokens == 40
    assert texts[0].usage.prompt_tokens == len(TEXT)


def test_chat_and_stream_agree(client):
    messages = [{"role": "user", "content": TEXT}]
    call = {"model": "tiny", "messages": messages, "max_tokens": 30, **OPTIONS}
    whole = client.chat.completions.create(**call)
    assert whole.usage.completion_tokens == 30
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(stream=True, **call)
        if chunk.choices
    ]
    assert len(pieces) > 2
    assert "".join(pieces) == whole.choices[0].message.content


def test_several_requests_at_once_and_an_abort_in_mid_stream(client):
    def ask(i: int) -> str:
        prompt = f"{i} {TEXT}"
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=24, **OPTIONS)
        return answer.choices[0].text

    def abort(_: int) -> int:
        stream = client.completions.create(
            model="tiny", prompt=TEXT, max_tokens=1000, stream=True, **OPTIONS
        )
        for count, _chunk in enumerate(stream):
            if count == 3:
                stream.close()
                return count
        raise AssertionError("the stream ended before it was aborted")

    with ThreadPoolExecutor(8) as pool:
        aborted = [pool.submit(abort, i) for i in range(2)]
        answers = list(pool.map(ask, range(6)))
        assert [job.result() for job in aborted] == [3, 3]
    assert all(answers)
    assert ask(3) == answers[3]  # the server goes on, with the same result


def metrics(client: OpenAI) -> dict[str, float]:
    """The server's metrics, by sample with its labels but for vLLM's own two."""
    url = str(client.base_url).replace("/v1/", "/metrics")
    with urllib.request.urlopen(url, timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.replace('engine="0",model_name="tiny"', ""): float(n) for name, n in pairs}


def test_a_client_that_hangs_up_leaves_nothing_behind(client):
    def wait_for(running: int) -> None:
        deadline = time.monotonic() + 60
        while metrics(client)["vllm:num_requests_running{}"] != running:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    wait_for(0)
    tokens = "vllm:generation_tokens_total{}"
    before = metrics(client)[tokens]
    with ExitStack() as streams:
        for _ in range(4):  # so that a busy machine does not end them before it sees them go
            stream = client.completions.create(
                model="tiny", prompt=TEXT, max_tokens=1500, stream=True, **OPTIONS
            )
            next(iter(streams.enter_context(stream)))
    wait_for(0)
    assert 0 < metrics(client)[tokens] - before < 4 * 1500  # they ran, and ended before their time
    deadline = time.monotonic() + 60
    while True:  # counters are published every half second, by a step
        time.sleep(1)
        client.completions.create(model="tiny", prompt="a", max_tokens=1, **OPTIONS)
        values = metrics(client)
        names = ("vllm:dustin_live_sequences", "vllm:kv_cache_usage_perc{}")
        if not any(values[name] for name in names):
            break
        assert time.monotonic() < deadline, values


def test_the_same_request_id_again(client):
    """Twice at once, too: vLLM gives every request an id of its own."""

    def ask(_: int) -> str:
        answer = client.completions.create(
            model="tiny",
            prompt=TEXT,
            max_tokens=16,
            extra_headers={"X-Request-Id": "the same"},
            **OPTIONS,
        )
        return answer.choices[0].text

    with ThreadPoolExecutor(2) as pool:
        assert len({*pool.map(ask, range(2)), ask(2)}) == 1


@pytest.mark.parametrize("wanted", ["sparse", "dense"])
def test_turns_of_a_chat(client, wanted):
    """Every turn finds the prompts of the turns before in the prefix cache, but not what was
    generated, and says what a server would say that has never seen any of it."""
    asked = {"ignore_eos": True, "vllm_xargs": {"dustin": wanted}}
    # Text that means the same tokens when it comes back.
    asked["structured_outputs"] = {"regex": "[a-z ]{70}"}

    def say(messages: list[dict[str, str]], salt: str):
        return client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=70,
            temperature=0,
            extra_body={**asked, "cache_salt": salt},
        )

    messages = [{"role": "user", "content": TEXT}]
    known = 0
    for turn in range(3):
        answer = say(messages, f"this chat, {wanted}")
        found = answer.usage.prompt_tokens_details
        cached = 0 if found is None else found.cached_tokens
        assert cached == known // 32 * 32
        fresh = say(messages, f"nobody has said this, {wanted} {turn}")
        again = fresh.usage.prompt_tokens_details
        assert again is None or not again.cached_tokens
        text = answer.choices[0].message.content
        assert len(text) == 70
        assert text == fresh.choices[0].message.content
        known = answer.usage.prompt_tokens
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]


def test_a_bad_request_is_refused_and_the_server_goes_on(client):
    from openai import BadRequestError

    with pytest.raises(BadRequestError, match="2048"):
        client.completions.create(model="tiny", prompt=TEXT * 9, max_tokens=10)
    assert client.completions.create(model="tiny", prompt="hello", max_tokens=4, **OPTIONS)


def test_an_exact_request_and_one_that_asks_for_nonsense(client):
    from openai import BadRequestError

    def ask(wanted: str):
        extra = {"ignore_eos": True, "vllm_xargs": {"dustin": wanted}}
        return client.completions.create(
            model="tiny", prompt=TEXT, max_tokens=8, temperature=0, extra_body=extra
        )

    assert ask("dense").usage.completion_tokens == 8
    with pytest.raises(BadRequestError, match="must be 'sparse' or 'dense'"):
        ask("exact")
    assert ask("sparse").usage.completion_tokens == 8


def test_what_it_does_is_seen_in_the_metrics(client):
    time.sleep(1)
    client.completions.create(model="tiny", prompt=TEXT, max_tokens=8, **OPTIONS)
    values = metrics(client)
    assert values["vllm:spec_decode_num_accepted_tokens_total{}"] > 0
    assert values["vllm:dustin_sparse_rows_total"] > 0
    assert values['vllm:dustin_dense_rows_total{reason="requested"}'] > 0
    for mode in ("sparse", "dense"):
        rows = values[f'vllm:dustin_verifications_total{{mode="{mode}"}}']
        assert rows <= values[f'vllm:dustin_verified_tokens_total{{mode="{mode}"}}']
    names = {name.split("{")[0] for name in values}
    assert {f"vllm:{name}" for name in queried()} <= names  # what the dashboard shows exists
