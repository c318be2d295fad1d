# SPDX-License-Identifier: Apache-2.0
"""``dustin bench soak`` on the tiny pair, what it must find, and servers that are hurt.

``DUSTIN_SOAK_SECONDS`` sets how long the load lasts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import shutil
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from rich.console import Console
from test_server import add_tokenizer
from typer.testing import CliRunner

from dustin_vllm.bench import soak
from dustin_vllm.bench.common import BenchError
from dustin_vllm.bench.soak import DUSTIN, STOCK, SoakOptions
from dustin_vllm.cli import app

SECONDS = float(os.environ.get("DUSTIN_SOAK_SECONDS", 180))
SERVER = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]
SERVER += ["--max-num-seqs", "8", "--kv-cache-memory-bytes", str(1 << 26)]
# Too few blocks for eight long sequences: some are preempted.
SERVER += ["--num-gpu-blocks-override", "120"]


@pytest.fixture(scope="module")
def options(target, draft, tmp_path_factory) -> SoakOptions:
    folder = tmp_path_factory.mktemp("soak")
    models = [shutil.copytree(s, folder / n) for n, s in (("target", target), ("draft", draft))]
    for path in models:
        add_tokenizer(path)
    text = folder / "text"
    text.write_text("the quick brown fox jumps over the lazy dog, again and again. " * 40)
    return SoakOptions(
        model=models[0],
        draft=models[1],
        modes=(DUSTIN,),
        text=text,
        seconds=SECONDS,
        requests=12,
        concurrency=8,
        shortest=20,
        longest=900,
        answer=80,
        dustin={"budget": 160, "recent": 32, "dense_below": 0},
        server=tuple(SERVER),
        start_timeout=400,
    )


@pytest.mark.engine
def test_soak(options, tmp_path):
    """A few minutes of rough load: nothing fails, nothing is left behind."""
    path = tmp_path / "soak.json"
    out, err = (Console(file=io.StringIO(), width=200) for _ in range(2))
    code = soak.run_soak(options, out, err, path)
    said = err.file.getvalue()
    data = json.loads(path.read_text())
    result = data["results"][DUSTIN]
    assert (code, result["faults"]) == (0, []), said
    rough = result["rough"]
    assert rough["completed"] > 20
    assert rough["aborted"] > 5
    assert set(rough["refused"]) == set(soak.BAD_REQUESTS)
    assert result["bench_serve"]["completed"] == 12
    assert result["bench_serve"]["median_ttft_ms"] > 0
    closed, opened = result["bench_serve"], result["open_loop"]
    assert opened["completed"] == 12
    assert opened["rate"] == opened["request_rate"] == closed["request_throughput"] / 2
    assert (closed["max_concurrency"], opened["max_concurrency"]) == (8, None)
    metrics = result["metrics"]
    assert metrics["vllm:dustin_sparse_rows_total"] > 100
    assert metrics["vllm:num_preemptions_total"] > 0
    assert data["dustin_over_stock"] == {}  # stock did not run
    assert "completed under load" in out.file.getvalue()


# ---- servers that are hurt --------------------------------------------------------------------


@pytest.mark.engine
def test_a_worker_that_is_killed_ends_the_server_with_a_clear_error(options, tmp_path):
    folder = tmp_path / ("deep" * 20)  # sockets must not be made there
    folder.mkdir()
    with soak.Server(DUSTIN, options, folder) as server:
        everyone = psutil.Process(server.process.pid).children(recursive=True)
        workers = [p for p in everyone if "Worker" in p.name() or "Worker" in " ".join(p.cmdline())]
        assert workers, [(p.name(), p.cmdline()) for p in everyone]
        workers[0].kill()
        deadline = time.monotonic() + 90
        while server.process.poll() is None and time.monotonic() < deadline:
            # A request must be answered with an error, and not wait for ever.
            body = json.dumps({"model": soak.NAME, "prompt": "a", "max_tokens": 4}).encode()
            request = urllib.request.Request(
                f"{server.url}/v1/completions", body, {"Content-Type": "application/json"}
            )
            with contextlib.suppress(OSError):
                urllib.request.urlopen(request, timeout=30)
            time.sleep(0.5)
        assert server.process.poll() is not None, server.tail()
        assert "died" in server.text() or "EngineDeadError" in server.text(), server.tail()
        _, alive = psutil.wait_procs(everyone, timeout=30)
        assert not alive


@pytest.mark.engine
def test_a_corrupted_profile_stops_the_server_at_its_start(options, tmp_path):
    profile = tmp_path / "pair.json"
    profile.write_text('{"format": 1, "target": "this", "dr')
    broken = dataclasses.replace(options, dustin={"profile": str(profile)})
    with pytest.raises(BenchError, match=r"pair\.json': not JSON") as caught:
        soak.Server(DUSTIN, broken, tmp_path)
    assert "the server ended at its start" in str(caught.value)


# ---- what a soak must find --------------------------------------------------------------------


def sound(**changes: Any) -> dict[str, Any]:
    """What ``soak`` has measured before it looks for faults."""
    metrics = {"vllm:num_requests_running": 0.0, "vllm:dustin_live_sequences": 0.0}
    metrics |= {"vllm:dustin_sparse_rows_total": 5.0, "vllm:kv_cache_usage_perc": 0.0}
    flat = {"early": 1, "late": 1, "flat": True}
    result = {
        "rough": {"completed": 3, "failed": []},
        "memory": {"resident": flat, "gpu": None},
        "metrics": metrics,
    }
    for name, value in changes.items():
        part, _, key = name.partition("__")
        result[part][key.replace("__", ":")] = value
    return result


def test_a_sound_run_has_no_faults():
    assert soak.find_faults(DUSTIN, sound(), "all well", alive=True) == []
    stock = sound()
    stock["metrics"] = {}
    assert soak.find_faults(STOCK, stock, "", alive=True) == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"rough__failed": ["wait: status 500"]}, "request failed: wait: status 500"),
        ({"rough__completed": 0}, "no request completed"),
        ({"memory__resident": {"early": 1, "late": 9, "flat": False}}, "resident memory grew"),
        ({"memory__gpu": {"early": 1, "late": 9, "flat": False}}, "gpu memory grew"),
        ({"metrics__vllm__num_requests_running": 2.0}, "num_requests_running is 2"),
        ({"metrics__vllm__num_requests_waiting": 1.0}, "num_requests_waiting is 1"),
        ({"metrics__vllm__kv_cache_usage_perc": 0.02}, "2.0% of the KV cache is not freed"),
        ({"metrics__vllm__dustin_live_sequences": 4.0}, "4 sequences hold state"),
        ({"metrics__vllm__dustin_sparse_rows_total": 0.0}, "no row was verified sparsely"),
    ],
)
def test_every_fault_is_found(changes, fault):
    (found,) = soak.find_faults(DUSTIN, sound(**changes), "", alive=True)
    assert fault in found


def test_a_server_that_ended_or_left_a_traceback_is_a_fault():
    assert soak.find_faults(DUSTIN, sound(), "", alive=False) == ["the server ended"]
    assert "traceback" in soak.find_faults(DUSTIN, sound(), "Traceback (most", alive=True)[0]
    stock = sound()
    stock["metrics"] = {}
    assert "no metrics" in soak.find_faults(DUSTIN, stock, "", alive=True)[0]


def samples(*mebibytes: float) -> list[dict[str, Any]]:
    return [{"resident": int(m * 2**20), "gpu": None} for m in mebibytes]


def test_memory_that_grows_is_told_from_memory_that_warms_up():
    flat = samples(100, 900, *[2000, 2010] * 10)
    assert soak.growth(flat, "resident")["flat"]
    growing = soak.growth(samples(*range(1000, 3000, 100)), "resident")
    assert not growing["flat"]
    assert growing["late"] - growing["early"] == 1000 * 2**20
    assert soak.growth(flat, "gpu") is None
    assert soak.growth(samples(1, 2, 3), "resident") is None


def test_dustin_over_stock():
    results = {
        mode: {
            "bench_serve": {"output_throughput": t, "median_ttft_ms": 50.0},
            "open_loop": {"rate": 2.0, "median_ttft_ms": t, "p99_ttft_ms": 9.0, "mean_tpot_ms": t},
        }
        for mode, t in ((STOCK, 100.0), (DUSTIN, 150.0))
    }
    assert soak.compare(results) == {
        "output_throughput": 1.5,
        "median_ttft_ms": 1.0,
        "open_loop_median_ttft_ms": 1.5,
        "open_loop_mean_tpot_ms": 1.5,
    }
    assert soak.compare({DUSTIN: results[DUSTIN]}) == {}
    assert soak.compare({**results, STOCK: {"faults": ["it did not start"]}}) == {}


def test_the_table_shows_ttft_at_the_rate():
    opened = {"rate": 2.346, "median_ttft_ms": 71.0, "p99_ttft_ms": 82.0}
    results = {STOCK: {"faults": ["it did not start"]}, DUSTIN: {"open_loop": opened}}
    out = Console(file=io.StringIO(), width=200)
    out.print(soak.make_table(results))
    rows = [[cell.strip() for cell in line.split("│")] for line in out.file.getvalue().split("\n")]
    assert ["", "TTFT at 2.35 requests/s, median, ms", "-", "71.0", ""] in rows
    assert ["", "TTFT at 2.35 requests/s, 99 %, ms", "-", "82.0", ""] in rows


@pytest.fixture
def measured(monkeypatch) -> list[tuple[str, float | None]]:
    """Modes and rates that ``measure`` is called with; no server runs, stock is slower."""
    calls: list[tuple[str, float | None]] = []

    def server(mode, options, folder):
        alive = SimpleNamespace(poll=lambda: None)
        return contextlib.nullcontext(
            SimpleNamespace(mode=mode, url="", start_seconds=0, process=alive, text=str, tail=str)
        )

    def measure(server, options, folder, rate=None):
        calls.append((server.mode, rate))
        return {"request_throughput": {STOCK: 3.0, DUSTIN: 5.0}[server.mode]}

    async def load(*_):
        return soak.Tally(completed=1), []

    monkeypatch.setattr(soak, "Server", server)
    monkeypatch.setattr(soak, "measure", measure)
    monkeypatch.setattr(soak, "load", load)
    monkeypatch.setattr(soak, "drain", lambda _: sound()["metrics"])
    return calls


@pytest.mark.parametrize(
    ("modes", "rate", "used"),
    [
        ((STOCK, DUSTIN), None, 1.5),
        ((DUSTIN, STOCK), None, 2.5),
        ((DUSTIN,), None, 2.5),
        ((STOCK, DUSTIN), 7.0, 7.0),
    ],
)
def test_requests_arrive_at_one_rate_in_all_modes(options, measured, tmp_path, modes, rate, used):
    path, quiet = tmp_path / "soak.json", Console(file=io.StringIO())
    asked = dataclasses.replace(options, modes=modes, rate=rate)
    assert soak.run_soak(asked, quiet, quiet, path) == 0, quiet.file.getvalue()
    assert measured == [(mode, r) for mode in modes for r in (None, used)]
    results = json.loads(path.read_text())["results"]
    assert [results[mode]["open_loop"]["rate"] for mode in modes] == [used] * len(modes)


def test_a_mode_that_failed_sets_no_rate(options):
    failed = {"faults": ["it did not start"]}
    assert soak.arrival_rate(options, [failed, {"bench_serve": {"request_throughput": 4.0}}]) == 2


def test_the_loops_differ_only_in_how_requests_arrive(options, monkeypatch, tmp_path):
    seen: list[list[str]] = []

    def run(command, **_):
        seen.append(command)
        (tmp_path / "bench-serve.json").write_text(json.dumps({"completed": options.requests}))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(soak.subprocess, "run", run)
    server = SimpleNamespace(url="http://127.0.0.1:1")
    for rate in (None, 2.5):
        soak.measure(server, options, tmp_path, rate)
    closed, opened = seen
    left = " ".join(a for a in closed if a not in opened)
    assert left == "--max-concurrency 8 --num-warmups 2"
    (salt,) = (a for a in opened if a.startswith("{"))
    # Without it, the prompts would come from the prefix cache the second time.
    assert json.loads(salt)["cache_salt"]
    assert [a for a in opened if a not in closed] == ["--request-rate", "2.5", "--extra-body", salt]


def test_the_server_of_each_mode(options):
    stock, ours = (soak.server_command(mode, options, 8000) for mode in (STOCK, DUSTIN))
    assert ours[: len(stock)] == stock
    assert ours[len(stock) : len(stock) + 2] == ["--attention-backend", "DUSTIN"]
    assert json.loads(ours[-1]) == {"dustin": options.dustin}


def test_prompts_have_the_lengths_that_were_asked_for(options):
    windows = soak.text_windows(options)
    assert len(windows) == options.requests
    lengths = [len(window["prompt"]) for window in windows]  # a byte is a token here
    assert lengths == [window["prompt_len"] for window in windows]
    assert options.shortest <= min(lengths) < max(lengths) <= options.longest
    assert {40 <= w["expected_output_len"] <= 80 for w in windows} == {True}


def test_command_line(monkeypatch, tmp_path):
    seen: list[Any] = []
    monkeypatch.setattr(soak, "run_soak", lambda *arguments: seen.append(arguments) or 1)
    command = ["bench", "soak", "--model", "m", "--draft", "d", "--seconds", "5", "--budget", "256"]
    command += ["--server-args", "--dtype float32 --port-like 'a b'", "--modes", "dustin"]
    command += ["--dustin-json", '{"recent": 32}', "--json", str(tmp_path / "out.json")]
    command += ["--rate", "2.5"]
    assert CliRunner().invoke(app, command).exit_code == 1
    options = seen[0][0]
    assert (options.model, options.seconds, options.modes) == (Path("m"), 5.0, (DUSTIN,))
    assert options.dustin == {"budget": 256, "recent": 32}
    assert options.rate == 2.5
    assert options.server == ("--dtype", "float32", "--port-like", "a b")
    assert seen[0][3] == tmp_path / "out.json"
    wrongs = [["--modes", "plain"], ["--shortest", "9000"], ["--dustin-json", "[]"]]
    wrongs += [["--rate", rate] for rate in ("0", "-1", "inf", "nan", "fast")]
    for wrong in wrongs:
        assert CliRunner().invoke(app, [*command, *wrong]).exit_code == 2, wrong
    assert CliRunner().invoke(app, [*command[:-2]]).exit_code == 1
    assert seen[-1][0].rate is None
