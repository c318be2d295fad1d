# SPDX-License-Identifier: Apache-2.0
"""``dustin bench soak``: an OpenAI server under mixed load, with stock speculation and Dustin.

Each mode gets a server of its own. First ``vllm bench serve`` measures well-behaved requests
twice. A closed loop, with a fixed number of requests in flight, shows throughput and ITL. Its
TTFT does not compare modes: whoever decodes faster has more of these requests wait for their
prefill. So in an open loop requests arrive at the same rate in all modes. Then clients do what
clients do for a while: ask for short and long answers, stream or wait, hang up in mid-stream, and
send requests that must be refused. In the end nothing may have failed, no sequence may hold state
or KV cache, memory must be flat and the server's log free of tracebacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dustin_vllm import provenance
from dustin_vllm.bench.common import BenchError, end_workers_too, package_environment
from dustin_vllm.results import ResultsError, read_json, write_json

if TYPE_CHECKING:
    from rich.console import Console

STOCK, DUSTIN = "stock", "dustin"
MODES = (STOCK, DUSTIN)
NAME = "soak"  # what the server calls the model
LOG_LINES = 30
SAMPLE_SECONDS = 2.0
# Memory of the last quarter of the samples over that of the second one; the first is warm-up.
MAX_GROWTH = 0.05
MAX_GROWTH_BYTES = 64 << 20
# `vllm bench serve`, which can be reached without a distribution called vllm only like this. Its
# own reader of prompt files needs pandas.
BENCH_SERVE = """
import json, sys
from pathlib import Path
from vllm.benchmarks import serve
from vllm.benchmarks.datasets import SampleRequest
from vllm.utils.argparse_utils import FlexibleArgumentParser

def get_samples(args, tokenizer):
    windows = json.loads(Path(args.dataset_path).read_text(encoding="utf-8"))
    return [SampleRequest(request_id=f"soak-{i}", **w) for i, w in enumerate(windows)]

parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
args = parser.parse_args()
if args.dataset_path:
    serve.get_samples = get_samples
serve.main(args)
"""
WORDS = "the of and to in that was his he it with is for as had you not be her on at by which have"


@dataclass(frozen=True)
class SoakOptions:
    """What ``dustin bench soak`` was asked for. Lengths are in tokens, times in seconds."""

    model: Path
    draft: Path
    modes: tuple[str, ...] = MODES
    text: Path | None = None  # prompts of the measured phase; None: random tokens
    seconds: float = 600
    requests: int = 64  # of each loop of the measured phase
    concurrency: int = 8
    rate: float | None = None  # requests/s of the open loop; None: half of the first closed loop's
    shortest: int = 512
    longest: int = 8192
    answer: int = 128  # longest answer
    gamma: int = 4
    dustin: Mapping[str, Any] = field(default_factory=dict)
    server: tuple[str, ...] = ()  # more arguments of the server
    start_timeout: float = 600
    seed: int = 0


# ---- the server ---------------------------------------------------------------------------


def server_command(mode: str, options: SoakOptions, port: int) -> list[str]:
    """The command line of one mode's server."""
    speculative = {
        "method": "draft_model",
        "model": str(options.draft),
        "num_speculative_tokens": options.gamma,
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(options.model), "--served-model-name", NAME]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    # Sampling defaults that a model brings along would differ from what requests say.
    command += ["--generation-config", "vllm"]
    command += ["--speculative-config", json.dumps(speculative), *options.server]
    if mode == DUSTIN:
        command += ["--attention-backend", "DUSTIN"]
        command += ["--additional-config", json.dumps({"dustin": dict(options.dustin)})]
    return command


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Server:
    """One running server; ends with the ``with`` statement, its workers too.

    Raises:
        BenchError: it ended, or did not answer in time; the message ends with its log.
    """

    def __init__(self, mode: str, options: SoakOptions, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"{mode}.log"
        # Its own, to leave nothing behind; short, as vLLM binds sockets there, whose paths may
        # have 107 characters.
        self._temporary = tempfile.TemporaryDirectory(prefix="dustin-", ignore_cleanup_errors=True)
        environment = {**os.environ, **package_environment(), "TMPDIR": self._temporary.name}
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        environment.setdefault("HF_HUB_OFFLINE", "1")
        started = time.perf_counter()
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                server_command(mode, options, self.port),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its workers can be ended with it
            )
        try:
            self._wait(started + options.start_timeout)
        except BaseException:
            self.stop()
            raise
        self.start_seconds: float = time.perf_counter() - started

    def _wait(self, deadline: float) -> None:
        while True:
            if self.process.poll() is not None:
                raise BenchError(f"the server ended at its start:\n{self.tail()}")
            if time.perf_counter() > deadline:
                raise BenchError(f"the server does not answer:\n{self.tail()}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health"):
                return
            time.sleep(0.5)

    def text(self) -> str:
        """Its log so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def tail(self) -> str:
        """The end of its log."""
        return "\n".join(self.text().splitlines()[-LOG_LINES:])

    def metrics(self) -> dict[str, float]:
        """Its metrics, summed over their labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        values: dict[str, float] = {}
        for line in lines:
            name, _, value = line.rpartition(" ")
            if name and not line.startswith("#"):
                name = name.split("{")[0]
                values[name] = values.get(name, 0.0) + float(value)
        return values

    def stop(self) -> None:
        """End it and whatever it started."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._temporary.cleanup()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()


def resident_bytes(process: int) -> int:
    """Resident memory of a process and all it started, in bytes; shared pages count each time."""
    import psutil

    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process)
        for one in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += one.memory_info().rss
    return total


def gpu_bytes() -> int | None:
    """Memory in use on all GPUs, in bytes, or None without any."""
    if shutil.which("nvidia-smi") is None:
        return None
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    try:
        return sum(int(line) << 20 for line in done.stdout.split())
    except ValueError:
        return None


# ---- the measured phase -------------------------------------------------------------------


def text_windows(options: SoakOptions) -> list[dict[str, Any]]:
    """Windows of --text of random lengths, as ``vllm bench serve`` reads them.

    Raises:
        BenchError: the text cannot be read or is too short.
    """
    from transformers import AutoTokenizer

    assert options.text is not None
    try:
        content = options.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read {options.text}: {error}") from error
    tokenizer = AutoTokenizer.from_pretrained(str(options.model), local_files_only=True)
    ids = tokenizer(content, add_special_tokens=False)["input_ids"]
    if len(ids) <= options.longest:
        raise BenchError(f"{options.text} has {len(ids)} tokens; --longest needs more")
    generator = random.Random(options.seed)
    windows = []
    for _ in range(options.requests):
        length = generator.randint(options.shortest, options.longest)
        begin = generator.randrange(len(ids) - length)
        windows.append(
            {
                "prompt": tokenizer.decode(ids[begin : begin + length]),
                "prompt_len": length,
                "expected_output_len": generator.randint(
                    max(1, options.answer // 2), options.answer
                ),
            }
        )
    return windows


def dataset_arguments(options: SoakOptions, folder: Path) -> list[str]:
    """What ``vllm bench serve`` is to send."""
    if options.text is None:
        middle = (options.shortest + options.longest) // 2
        ratio = (options.longest - options.shortest) / (options.longest + options.shortest)
        return [
            *("--dataset-name", "random", "--random-input-len", str(middle)),
            *("--random-output-len", str(max(1, options.answer * 3 // 4))),
            *("--random-range-ratio", f"{ratio:.3f}"),
        ]
    path = folder / "prompts.json"
    path.write_text(json.dumps(text_windows(options)), encoding="utf-8")
    return ["--dataset-name", "custom", "--dataset-path", str(path)]


def arrival_rate(options: SoakOptions, results: Iterable[Mapping[str, Any]]) -> float:
    """Requests/s of the open loop: as asked for, or half of what the first closed loop managed."""
    if options.rate is not None:
        return options.rate
    closed = next(result["bench_serve"] for result in results if "bench_serve" in result)
    return closed["request_throughput"] / 2


def measure(
    server: Server, options: SoakOptions, folder: Path, rate: float | None = None
) -> dict[str, Any]:
    """Run ``vllm bench serve`` against the server; what it says, without the single requests.

    Args:
        rate: requests/s that arrive (open loop); None: ``concurrency`` requests are always in
            flight (closed loop), after two that warm the server up.

    Raises:
        BenchError: it failed, or requests did.
    """
    name = "bench-serve.json"
    command = [sys.executable, "-c", BENCH_SERVE, "--backend", "openai"]
    command += ["--base-url", server.url, "--endpoint", "/v1/completions"]
    command += ["--model", NAME, "--served-model-name", NAME, "--tokenizer", str(options.model)]
    command += ["--num-prompts", str(options.requests), "--seed", str(options.seed)]
    if rate is None:
        command += ["--max-concurrency", str(options.concurrency), "--num-warmups", "2"]
    else:
        # The salt keeps the closed loop's prompts, which are the same, out of the prefix cache.
        command += ["--request-rate", str(rate), "--extra-body", '{"cache_salt": "open loop"}']
    command += ["--ignore-eos", "--temperature", "0", "--disable-tqdm", "--save-result"]
    command += ["--result-dir", str(folder), "--result-filename", name]
    command += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99"]
    command += dataset_arguments(options, folder)
    done = subprocess.run(
        command,
        env={**os.environ, **package_environment()},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=3600 + (options.requests / rate if rate else 0),
        check=False,
    )
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()[-LOG_LINES:]
        raise BenchError("vllm bench serve failed:\n" + "\n".join(lines))
    try:
        said = read_json(folder / name)
    except ResultsError as error:
        raise BenchError(str(error)) from error
    if said["completed"] != options.requests or said.get("failed", 0):
        raise BenchError(
            f"vllm bench serve: {said['completed']} of {options.requests} requests completed"
        )
    return {k: v for k, v in said.items() if isinstance(v, int | float) or v is None}


# ---- the rough phase ----------------------------------------------------------------------


@dataclass
class Tally:
    """What became of the requests of the rough phase."""

    completed: int = 0
    aborted: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by what was wrong with them
    failed: list[str] = field(default_factory=list)  # what should not have happened


BAD_REQUESTS: dict[str, tuple[dict[str, Any], int]] = {
    "too long": ({"prompt": "a b c d e f g h " * 300_000}, 400),
    "negative max_tokens": ({"max_tokens": -1}, 400),
    "negative temperature": ({"temperature": -1}, 400),
    "unknown model": ({"model": "another"}, 404),
    "no prompt": ({"prompt": ""}, 400),
    "unknown mode": ({"vllm_xargs": {"dustin": "exact"}}, 400),
}


def bad_kinds(mode: str) -> list[str]:
    """The bad requests of a mode; stock does not read Dustin's own key."""
    return [kind for kind in BAD_REQUESTS if mode == DUSTIN or kind != "unknown mode"]


class Clients:
    """Clients that behave as clients do, until a deadline."""

    def __init__(self, mode: str, options: SoakOptions, url: str) -> None:
        self.mode = mode
        self.options = options
        self.url = f"{url}/v1/completions"
        self.tally = Tally()
        self.deadline = 0.0
        self._number = 0  # of bad requests so far

    def prompt(self, generator: random.Random) -> str:
        """Words; about as many tokens as asked for with most tokenizers, at most so many."""
        length = generator.randint(self.options.shortest, self.options.longest)
        words = [generator.choice(WORDS.split()) for _ in range(max(1, length // 5))]
        return " ".join(words)[:length]  # a token is at least one character

    async def run(self, seconds: float) -> Tally:
        """Let ``concurrency`` clients send one request after the other."""
        import aiohttp

        self.deadline = time.monotonic() + seconds
        limit = aiohttp.ClientTimeout(total=600)
        # A connection for each request: servers close idle ones, which a client may learn too late.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=limit, connector=connector) as session:
            seeds = range(self.options.concurrency)
            await asyncio.gather(*(self._client(session, seed) for seed in seeds))
        return self.tally

    async def _client(self, session: Any, seed: int) -> None:
        import aiohttp

        generator = random.Random(1000 * self.options.seed + seed)
        while time.monotonic() < self.deadline:
            kind = generator.choices(("wait", "stream", "abort", "bad"), (4, 4, 3, 1))[0]
            try:
                await getattr(self, f"_{kind}")(session, generator)
            except (aiohttp.ClientError, asyncio.TimeoutError, ValueError, KeyError) as error:
                self.tally.failed.append(f"{kind}: {type(error).__name__}: {error}"[:300])
                await asyncio.sleep(1)  # a server that is gone refuses quickly

    def _body(self, generator: random.Random, **more: Any) -> dict[str, Any]:
        tokens = generator.choice((1, 2, self.options.answer // 4, self.options.answer))
        body = {
            "model": NAME,
            "prompt": self.prompt(generator),
            "max_tokens": max(1, tokens),
            "ignore_eos": True,
            "temperature": generator.choice((0, 0, 0.8)),
            **more,
        }
        if self.mode == DUSTIN and generator.random() < 0.2:
            body["vllm_xargs"] = {"dustin": generator.choice(("dense", "sparse"))}
        return body

    async def _wait(self, session: Any, generator: random.Random) -> None:
        body = self._body(generator)
        async with session.post(self.url, json=body) as answer:
            said = await answer.json()
            if answer.status != 200 or said["usage"]["completion_tokens"] != body["max_tokens"]:
                raise ValueError(f"status {answer.status}: {said}")
        self.tally.completed += 1

    async def _stream(self, session: Any, generator: random.Random) -> None:
        body = self._body(generator, stream=True)
        async with session.post(self.url, json=body) as answer:
            last = b""
            async for line in answer.content:
                last = line.strip() or last
            if answer.status != 200 or last != b"data: [DONE]":
                raise ValueError(f"status {answer.status}, stream ends with {last[:200]!r}")
        self.tally.completed += 1

    async def _abort(self, session: Any, generator: random.Random) -> None:
        """Hang up after a few pieces of the answer, or before the first."""
        body = self._body(generator, stream=True, max_tokens=4 * self.options.answer)
        wanted = generator.choice((0, 1, 5))
        async with session.post(self.url, json=body) as answer:
            if answer.status != 200:
                raise ValueError(f"status {answer.status}: {await answer.text()}")
            async for line in answer.content:
                wanted -= line.startswith(b"data:")
                if wanted <= 0:
                    break
            answer.close()
        self.tally.aborted += 1

    async def _bad(self, session: Any, generator: random.Random) -> None:
        kinds = bad_kinds(self.mode)
        kind = kinds[self._number % len(kinds)]
        self._number += 1
        wrong, status = BAD_REQUESTS[kind]
        body = {**self._body(generator), **wrong}
        async with session.post(self.url, json=body) as answer:
            said = await answer.text()
            if answer.status != status or "error" not in said:
                raise ValueError(f"{kind}: status {answer.status}, not {status}: {said[:200]}")
        self.tally.refused[kind] += 1


async def load(
    clients: Clients, server: Server, seconds: float
) -> tuple[Tally, list[dict[str, Any]]]:
    """The rough phase, and the memory meanwhile."""
    samples: list[dict[str, Any]] = []
    begin = time.monotonic()

    async def watch() -> None:
        while True:
            memory = await asyncio.to_thread(resident_bytes, server.process.pid)
            gpu = await asyncio.to_thread(gpu_bytes)
            at = time.monotonic() - begin
            samples.append({"seconds": round(at, 1), "resident": memory, "gpu": gpu})
            await asyncio.sleep(SAMPLE_SECONDS)

    watching = asyncio.create_task(watch())
    try:
        return await clients.run(seconds), samples
    finally:
        watching.cancel()


# ---- what it comes to -----------------------------------------------------------------------


def growth(samples: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any] | None:
    """Median memory of the second and of the last quarter of the samples, in bytes; None if it
    was not measured."""
    values = [sample[key] for sample in samples if sample[key] is not None]
    if len(values) < 4:
        return None
    quarter = len(values) // 4
    early = statistics.median(values[quarter : 2 * quarter])
    late = statistics.median(values[-quarter:])
    flat = late - early <= max(MAX_GROWTH_BYTES, MAX_GROWTH * early)
    return {"early": early, "late": late, "flat": flat}


def drain(server: Server, timeout: float = 60) -> dict[str, float]:
    """Metrics once nothing runs and one more short request has gone through, which frees state
    and publishes Dustin's counters."""
    deadline = time.monotonic() + timeout
    waiting = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    while sum(server.metrics().get(name, 0) for name in waiting):
        if time.monotonic() > deadline:
            break
        time.sleep(0.5)
    time.sleep(1)  # counters are published every half second
    body = {"model": NAME, "prompt": "a", "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()
    time.sleep(1)
    return server.metrics()


def find_faults(mode: str, result: Mapping[str, Any], log: str, alive: bool) -> list[str]:
    """What a soak must not show, one line each."""
    faults = [f"request failed: {line}" for line in result["rough"]["failed"]]
    if not alive:
        faults.append("the server ended")
    if "Traceback" in log:
        faults.append("there is a traceback in the server's log")
    metrics = result["metrics"]
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
        if metrics.get(name):
            faults.append(f"{name} is {metrics[name]:.0f} in the end")
    if metrics.get("vllm:kv_cache_usage_perc", 0) > 1e-6:
        faults.append(f"{metrics['vllm:kv_cache_usage_perc']:.1%} of the KV cache is not freed")
    for what in ("resident", "gpu"):
        grown = result["memory"][what]
        if grown is not None and not grown["flat"]:
            faults.append(f"{what} memory grew from {grown['early']} to {grown['late']} bytes")
    if not result["rough"]["completed"]:
        faults.append("no request completed")
    if mode == DUSTIN:
        if "vllm:dustin_live_sequences" not in metrics:
            faults.append("the server shows no metrics of Dustin")
        elif metrics["vllm:dustin_live_sequences"]:
            faults.append(f"{metrics['vllm:dustin_live_sequences']:.0f} sequences hold state")
        elif not metrics["vllm:dustin_sparse_rows_total"]:
            faults.append("no row was verified sparsely")
    return faults


def soak(
    mode: str, options: SoakOptions, folder: Path, earlier: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """One mode from start to end.

    Args:
        earlier: results of the modes before it, which decide at what rate requests arrive.

    Returns:
        Numbers, and "faults": a list that should be empty.

    Raises:
        BenchError: the server did not start, or the measured phase failed.
    """
    with Server(mode, options, folder) as server:
        result: dict[str, Any] = {"start_seconds": server.start_seconds}
        result["bench_serve"] = measure(server, options, folder)
        rate = arrival_rate(options, [*earlier.values(), result])
        result["open_loop"] = {"rate": rate, **measure(server, options, folder, rate)}
        clients = Clients(mode, options, server.url)
        tally, samples = asyncio.run(load(clients, server, options.seconds))
        alive = server.process.poll() is None
        result["rough"] = {**asdict(tally), "refused": dict(tally.refused)}
        result["memory"] = {
            "samples": samples,
            **{what: growth(samples, what) for what in ("resident", "gpu")},
        }
        try:
            metrics = drain(server) if alive else {}
        except OSError as error:  # it does not answer any more
            metrics, alive = {}, False
            result["rough"]["failed"].append(f"after the load: {error}")
        ours = ("vllm:dustin", "vllm:num_", "vllm:kv_cache", "vllm:spec_decode", "vllm:request_su")
        result["metrics"] = {
            k: v for k, v in metrics.items() if k.startswith(ours) and not k.endswith("_created")
        }
        result["faults"] = find_faults(mode, result, server.text(), alive)
        if result["faults"]:
            result["log_tail"] = server.tail().splitlines()
    return result


def compare(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Dustin over stock, of the measured phase; {} unless both ran. Names of the open loop's
    numbers begin with ``open_loop_``."""
    if not all("bench_serve" in results.get(mode, {}) for mode in MODES):
        return {}
    times = ("median_ttft_ms", "mean_ttft_ms", "mean_tpot_ms")
    ratios: dict[str, float] = {}
    for loop, prefix, names in (
        ("bench_serve", "", ("output_throughput", "median_itl_ms", *times)),
        ("open_loop", "open_loop_", times),
    ):
        stock, ours = (results[mode][loop] for mode in MODES)
        ratios |= {prefix + name: ours[name] / stock[name] for name in names if stock.get(name)}
    return ratios


def make_table(results: Mapping[str, Mapping[str, Any]]) -> Any:
    """A column for each mode."""
    from rich.table import Table

    table = Table(title="soak")
    table.add_column("")
    for mode in results:
        table.add_column(mode, justify="right")

    def cells(read: Any, form: str) -> Iterator[str]:
        for result in results.values():
            try:
                yield format(read(result), form)
            except (KeyError, TypeError):
                yield "-"

    rates = (f"{r['open_loop']['rate']:.3g}" for r in results.values() if "open_loop" in r)
    at = f"TTFT at {next(rates, '-')} requests/s"
    rows = [
        ("output tokens/s", lambda r: r["bench_serve"]["output_throughput"], ".1f"),
        ("TTFT, median, ms", lambda r: r["bench_serve"]["median_ttft_ms"], ".1f"),
        ("TTFT, 99 %, ms", lambda r: r["bench_serve"]["p99_ttft_ms"], ".1f"),
        ("ITL, median, ms", lambda r: r["bench_serve"]["median_itl_ms"], ".2f"),
        ("time per output token, ms", lambda r: r["bench_serve"]["mean_tpot_ms"], ".2f"),
        (f"{at}, median, ms", lambda r: r["open_loop"]["median_ttft_ms"], ".1f"),
        (f"{at}, 99 %, ms", lambda r: r["open_loop"]["p99_ttft_ms"], ".1f"),
        ("completed under load", lambda r: r["rough"]["completed"], "d"),
        ("aborted", lambda r: r["rough"]["aborted"], "d"),
        ("refused as they must be", lambda r: sum(r["rough"]["refused"].values()), "d"),
        ("failed", lambda r: len(r["rough"]["failed"]), "d"),
        ("resident MiB, then", lambda r: r["memory"]["resident"]["early"] / 2**20, ".0f"),
        ("resident MiB, in the end", lambda r: r["memory"]["resident"]["late"] / 2**20, ".0f"),
    ]
    for title, read, form in rows:
        table.add_row(title, *cells(read, form))
    return table


def run_soak(
    options: SoakOptions, console: Console, errors: Console, json_file: Path | None
) -> int:
    """All modes; the JSON file is written after each.

    Returns:
        Exit code: 0, or 1 when something failed, leaked or was wrong.
    """
    results: dict[str, Any] = {}
    failed = False
    end_workers_too()
    for mode in options.modes:
        errors.print(f"{mode} ...")
        with tempfile.TemporaryDirectory(prefix="dustin-soak-") as folder:
            try:
                results[mode] = soak(mode, options, Path(folder), results)
            except BenchError as error:
                results[mode] = {"faults": [str(error)]}
        for fault in results[mode]["faults"]:
            failed = True
            errors.print(f"Error: {mode}: {fault}", style="red", markup=False, highlight=False)
        if json_file is not None:
            data = {
                "benchmark": "soak",
                "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                "command": provenance.command(),
                "environment": provenance.environment(),
                "options": provenance.options(options),
                "results": results,
                "dustin_over_stock": compare(results),
            }
            try:
                write_json(json_file, data)
            except ResultsError as error:
                failed = True
                errors.print(str(error), style="red", markup=False, highlight=False)
    console.print(make_table(results))
    return 1 if failed else 0
