# SPDX-License-Identifier: Apache-2.0
"""An evaluation from options to JSON: samples, one process per engine, resuming, Ray."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dustin_vllm import provenance
from dustin_vllm.bench.common import end_workers_too, last_words, worker_environment
from dustin_vllm.eval import report
from dustin_vllm.eval.engine import CPU_BLOCK, DENSE, Configuration, Job
from dustin_vllm.eval.tasks import FREE, TASKS, EvalError, Maker, Sample, score
from dustin_vllm.results import ResultsError, read_json, write_json

GRACE = 60  # seconds after the deadline in which a configuration may still end
MIN_SPARSE_SHARE = 0.95


@dataclass(frozen=True)
class Options:
    """What a user chooses. Lengths in tokens.

    ``samples`` per task and context; ``drift_samples`` and ``drift_tokens`` for the task drift,
    which runs at the smallest context only; ``output_tokens``: for agreement, continuation.
    ``max_seconds``: no configuration is begun that would end later. ``parallel``: processes by
    Ray; 0: no Ray.
    """

    model: Path
    draft: Path
    text: tuple[Path, ...] = ()
    tasks: tuple[str, ...] = TASKS
    policies: tuple[str, ...] = ("dustin", "streaming", "static", "quest")
    budgets: tuple[int, ...] = (512, 1024)
    granularities: tuple[str, ...] = ("block",)
    contexts: tuple[int, ...] = (16384,)
    samples: int = 8
    output_tokens: int = 512
    drift_tokens: int = 8192
    drift_samples: int = 4
    gamma: int = 4
    batch: int = 32
    seed: int = 0
    max_seconds: int | None = None
    enforce_eager: bool = False
    parallel: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    llm: dict[str, Any] = field(default_factory=dict)
    verbose: bool = False


def check(options: Options) -> None:
    """Refuse options that cannot work, before anything is loaded.

    Raises:
        EvalError: which option, its value and the fix.
    """
    from dustin_vllm import policies

    for name, known in (
        ("tasks", TASKS),
        ("policies", (DENSE, *policies.names())),
        ("granularities", ("block", "token")),
    ):
        given = getattr(options, name)
        wrong = [value for value in given if value not in known]
        if wrong or not given:
            raise EvalError(f"{name}={','.join(given)}: choose among {', '.join(known)}")
    if not options.budgets or not options.contexts:
        raise EvalError("give at least one budget and one context")
    for model in (options.model, options.draft):
        if not (model / "config.json").is_file():
            raise EvalError(f"{model}: no config.json there; give a model folder")


def configurations(options: Options) -> list[Configuration]:
    """What is compared, the cheapest order for one engine: by granularity."""
    return [
        Configuration(policy, budget, granularity)
        for granularity in options.granularities
        for policy in options.policies
        if policy != DENSE
        for budget in options.budgets
    ] or [Configuration(DENSE, min(options.budgets), options.granularities[0])]


def make_maker(model: Path, text: Sequence[Path], vocab: int, seed: int) -> Maker:
    """What draws samples from text, by a model's tokenizer.

    Args:
        text: files and folders; none: Python's own documentation and library.
        vocab: token ids from here on are refused.

    Raises:
        EvalError: no tokenizer, or no usable text.
    """
    from transformers import AutoTokenizer

    from dustin_vllm.calibrate.attention import CalibrationError
    from dustin_vllm.calibrate.text import read_sources

    try:
        sources = read_sources(text)
        tokenizer = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
    except (CalibrationError, OSError, ValueError) as error:
        raise EvalError(str(error)) from error

    def encode(content: str) -> list[int]:
        ids: list[int] = tokenizer(content, add_special_tokens=False)["input_ids"]
        return ids

    def decode(ids: Sequence[int]) -> str:
        content: str = tokenizer.decode(list(ids), skip_special_tokens=True)
        return content

    def chat(message: str) -> str:
        content: str = tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
        )
        return content

    template = chat if getattr(tokenizer, "chat_template", None) else None
    return Maker(sources, encode, decode, template, vocab, seed)


def trace_prompt(
    model: Path, text: Path | None, context: int, seed: int
) -> tuple[list[int], Callable[..., str]]:
    """The prompt of ``dustin trace``, at most ``context`` tokens, and how to decode tokens.

    Raises:
        EvalError: no such file, model or tokenizer.
    """
    maker = make_maker(model, (), 1 << 62, seed)
    if text is None:
        return maker.samples("copy", context, 1, 0)[0].prompt, maker.decode
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EvalError(f"cannot read {text}: {error}") from error
    return maker.ids(content)[:context], maker.decode


def make_samples(options: Options) -> tuple[list[Sample], Callable[..., str], int]:
    """The samples, how to decode tokens, and the model length that all samples fit into.

    Raises:
        EvalError: text or models do not suffice.
    """
    from dustin_vllm.demo import DemoError, read_model_config

    try:
        shapes = [read_model_config(path) for path in (options.model, options.draft)]
    except DemoError as error:
        raise EvalError(str(error)) from error
    vocab = min(shape["vocab_size"] for shape in shapes)
    maker = make_maker(options.model, options.text, vocab, options.seed)
    samples: list[Sample] = []
    for task in options.tasks:
        if task == "drift":
            count = options.drift_samples
            samples += maker.samples(task, min(options.contexts), count, options.drift_tokens)
            continue
        for context in options.contexts:
            samples += maker.samples(task, context, options.samples, options.output_tokens)
    longest = max(len(sample.prompt) + sample.max_tokens for sample in samples)
    needed = -(-(longest + 2 * options.gamma + 2) // CPU_BLOCK) * CPU_BLOCK
    limit = min(shape.get("max_position_embeddings", needed) for shape in shapes)
    if longest + 2 * options.gamma + 2 > limit:
        raise EvalError(
            f"the longest prompt and output need {longest + 2 * options.gamma + 2} positions, but "
            f"the models have {limit}: lower --context, --output-tokens or --drift-tokens"
        )
    return samples, maker.decode, min(needed, limit)


def key_of(options: Options, samples: Sequence[Sample]) -> str:
    """Hash of everything but the configurations: results of equal keys can stand together."""
    from dustin_vllm.calibrate.models import fingerprint

    about = [
        *(fingerprint(options.model), fingerprint(options.draft), options.gamma),
        *(options.settings, options.llm, options.enforce_eager),
        *(asdict(sample) for sample in samples),
    ]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]


def run_engine(job: Job, verbose: bool = False) -> Iterator[dict[str, Any]]:
    """Run a job in a fresh process and yield its results as they come.

    Raises:
        EvalError: the process failed; the message ends with its last output.
    """
    with tempfile.TemporaryDirectory(prefix="dustin-eval-") as temporary:
        job_file, results, log = (Path(temporary) / name for name in ("job", "results", "log"))
        job_file.write_text(json.dumps(asdict(job)), encoding="utf-8")
        results.touch()
        command = [sys.executable, "-m", "dustin_vllm.eval.engine"]
        command += ["--job", str(job_file), "--results", str(results)]
        with log.open("wb") as output, results.open(encoding="utf-8") as lines:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr if verbose else output,
                stderr=None if verbose else subprocess.STDOUT,
                env=worker_environment(os.environ, True, verbose),
                start_new_session=True,  # so that its own workers can be ended with it
            )
            begun = ""
            try:
                while True:
                    ended = process.poll() is not None
                    for line in lines:
                        begun += line
                        if begun.endswith("\n"):
                            yield json.loads(begun)
                            begun = ""
                    if ended:
                        break
                    if job.deadline is not None and time.time() > job.deadline + GRACE:
                        raise EvalError("a configuration took longer than --max-seconds allows")
                    time.sleep(0.2)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode:
            raise EvalError(
                f"the engine failed (exit code {process.returncode}):\n{last_words(log)}"
            )


def _ray_results(jobs: Sequence[Job], options: Options) -> Iterator[tuple[int, dict[str, Any]]]:
    """(job, result) of all jobs, each a Ray task with a GPU of its own where there are any."""
    try:
        import ray
    except ImportError as error:
        raise EvalError("--parallel needs ray: pip install ray") from error
    import torch

    def run(number: int, job: Job) -> tuple[int, list[dict[str, Any]]]:
        found: list[dict[str, Any]] = []
        try:
            found += run_engine(job)
        except EvalError as error:
            found.append({"failure": str(error)})
        return number, found

    own = not ray.is_initialized()
    if own:
        local = not os.environ.get("RAY_ADDRESS")
        cpus = options.parallel if local else None
        ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False)
    try:
        gpus = 1 if torch.cuda.is_available() else 0
        task = ray.remote(num_cpus=1, num_gpus=gpus)(run)
        waiting = [task.remote(number, job) for number, job in enumerate(jobs)]
        while waiting:
            done, waiting = ray.wait(waiting)
            number, found = ray.get(done[0])
            for result in found:
                yield number, result
    finally:
        if own:
            ray.shutdown()


def _results(jobs: Sequence[Job], options: Options) -> Iterator[tuple[int, dict[str, Any]]]:
    if options.parallel:
        yield from _ray_results(jobs, options)
        return
    for number, job in enumerate(jobs):
        try:
            for result in run_engine(job, options.verbose):
                yield number, result
        except EvalError as error:
            yield number, {"failure": str(error)}


def make_jobs(
    options: Options, samples: Sequence[Sample], max_model_len: int, wanted: list[Configuration]
) -> list[Job]:
    """One job per granularity; with ``parallel``, more, so that all processes have work."""
    deadline = None if options.max_seconds is None else time.time() + options.max_seconds
    groups = [
        [entry for entry in wanted if entry.granularity == granularity]
        for granularity in options.granularities
    ]
    if options.parallel:
        share = max(1, options.parallel // len(groups))
        groups = [group[start::share] for group in groups for start in range(share)]
    return [
        Job(
            model=str(options.model),
            draft=str(options.draft),
            gamma=options.gamma,
            batch=options.batch,
            max_model_len=max_model_len,
            samples=[asdict(sample) for sample in samples],
            configurations=[asdict(entry) for entry in group],
            settings=options.settings,
            llm=options.llm,
            enforce_eager=options.enforce_eager,
            seed=options.seed,
            deadline=deadline,
        )
        for group in groups
        if group
    ]


def refusal(result: dict[str, Any], samples: Sequence[Sample]) -> str | None:
    """Why a configuration's numbers must not be reported, or None: it did not verify sparsely."""
    configuration = Configuration(**result["configuration"])
    stats = result["stats"]
    reasons = {why: rows for why, rows in stats["dense_rows"].items() if rows}
    reasons.pop("prefill", None)
    rows, sparse = stats["verification_rows"], stats["sparse_rows"]
    if configuration.policy == DENSE:
        return None if not sparse else f"{sparse} of {rows} rows were sparse under dense"
    short = reasons.pop("short_context", 0)  # a budget that covers the context is no mistake
    if any(len(sample.prompt) < configuration.budget + CPU_BLOCK for sample in samples):
        rows -= short
    if sparse >= MIN_SPARSE_SHARE * rows and rows >= 0:
        return None
    return f"only {sparse} of {rows} verification rows were sparse; dense rows: {reasons}"


def evaluate(
    options: Options, json_file: Path | None, resume: bool, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Run an evaluation.

    Args:
        json_file: written after every configuration.
        resume: keep the configurations that ``json_file`` has already.
        tell: told about progress.

    Returns:
        The content of the JSON file; ``failures`` is not empty when something went wrong.

    Raises:
        EvalError: options, models or text that cannot be used.
    """
    check(options)
    end_workers_too()
    samples, decode, max_model_len = make_samples(options)
    key = key_of(options, samples)
    wanted = configurations(options)
    data = _start(options, samples, key)
    if resume and json_file is not None and json_file.is_file():
        before = read_json(json_file)
        if before.get("key") != key:
            raise EvalError(f"{json_file} is of other samples, models or settings; leave --resume")
        for name in ("engines", "configurations"):
            data[name] = before[name]
        known = [Configuration(**entry["configuration"]) for entry in data["configurations"]]
        wanted = [entry for entry in wanted if entry not in known]
        report.summarise(data)
        tell(f"{len(known)} configurations are done")
    by_name = {sample.name: sample for sample in samples}
    jobs = make_jobs(options, samples, max_model_len, wanted) if wanted else []
    first_engine = len(data["engines"])
    data["engines"] += [None] * len(jobs)
    dense: dict[int, dict[str, list[int]]] = {}
    for number, result in _results(jobs, options):
        engine = first_engine + number
        if "failure" in result:
            data["failures"].append(result["failure"])
            tell(f"Error: {result['failure']}")
        elif "engine" in result:
            data["engines"][engine] = result["engine"]
            tell(f"engine {engine}: loaded in {result['engine']['load_seconds']:.0f} s")
        elif "skipped" in result:
            data["skipped"].append(result["configuration"])
            tell(f"{Configuration(**result['configuration']).name}: skipped, no time left")
        else:
            name = Configuration(**result["configuration"]).name
            why = refusal(result, samples)
            if why is not None:
                data["failures"].append(f"{name}: {why}")
                tell(f"Error: {name}: {why}")
                continue
            outputs = result.pop("outputs")
            dense.setdefault(engine, outputs)
            result["scores"] = {
                sample: score(by_name[sample], ids, dense[engine][sample], decode)
                for sample, ids in outputs.items()
            }
            result["engine"] = engine
            data["configurations"].append(result)
            tell(f"{name}: {result['seconds']:.0f} s")
        report.summarise(data)
        if json_file is not None:
            try:
                write_json(json_file, data)
            except ResultsError as error:  # what was measured is still shown at the end
                data["failures"].append(str(error))
                tell(f"Error: {error}")
    return data


def _start(options: Options, samples: Sequence[Sample], key: str) -> dict[str, Any]:
    return {
        "evaluation": "dustin eval",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": provenance.command(),
        "options": provenance.options(options),
        "key": key,
        "samples": [
            {
                "name": sample.name,
                "task": sample.task,
                "context": sample.context,
                "prompt_tokens": len(sample.prompt),
                "max_tokens": sample.max_tokens,
                "depth": sample.depth,
                "known_answer": sample.task in FREE and bool(sample.answer),
                "sha256": hashlib.sha256(json.dumps(sample.prompt).encode()).hexdigest()[:16],
            }
            for sample in samples
        ],
        "engines": [],
        "configurations": [],
        "skipped": [],
        "failures": [],
        "table": [],
    }
