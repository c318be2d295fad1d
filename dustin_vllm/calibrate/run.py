# SPDX-License-Identifier: Apache-2.0
"""A calibration from models and text to profile, report and figures.

The report is written anew after every step, so that whatever ends a run leaves what it measured.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from dustin_vllm import provenance
from dustin_vllm.calibrate import policies, report
from dustin_vllm.calibrate.attention import CalibrationError
from dustin_vllm.calibrate.heads import Question, ask, combine
from dustin_vllm.calibrate.models import Model, check_pair, load_model
from dustin_vllm.calibrate.quality import Evaluator, Journal
from dustin_vllm.calibrate.search import Advance, Found, Search, Stop
from dustin_vllm.calibrate.text import KINDS, Sources, Window, WindowMaker, read_sources
from dustin_vllm.calibrate.traces import Item, Scores, Trace, record
from dustin_vllm.config import DustinConfig, Settings, load_profile
from dustin_vllm.results import write_json

SEARCH_SHARE, RECORD_SHARE = 0.6, 0.8  # of a time limit, after which these end
ALWAYS = 2  # rows of the quality table that no time limit cuts: a profile states them


@dataclass(frozen=True)
class Options:
    """What a user chooses. Lengths are in tokens.

    ``unit``: block size that the search selects by; ``tokens``: let it choose single tokens
    too. ``windows``: for the search, ``held_out`` further ones for the report, ``steps``
    verification steps in each; ``needles``: questions that find retrieval heads; ``layers``:
    scoring layers of each model at most.
    ``work``: folder for traces and measurements, by which an interrupted run resumes.
    ``settings``: shipped name or path of a profile; only a report on it is made then, at
    ``budget``. ``max_seconds``: how long to go on measuring, None: to the end.
    """

    target: Path
    draft: Path
    output: Path
    work: Path
    text: tuple[Path, ...] = ()
    context: int = 4096
    budget: int = 512
    gamma: int = 4
    unit: int = 16
    tokens: bool = False
    windows: int = 16
    held_out: int = 16
    steps: int = 3
    needles: int = 8
    trials: int = 40
    layers: int = 4
    wide: int = 0  # wide layers at most
    fresh: int = 0  # fresh layers at most
    seed: int = 0
    device: str = "cpu"
    dtype: str = "auto"
    settings: str | None = None
    max_seconds: float | None = None
    figures: bool = True


@dataclass(frozen=True)
class Files:
    """What a run writes; None: it does not."""

    profile: Path | None
    report: Path
    recovery: Path | None
    differences: Path | None
    heads: Path | None

    @classmethod
    def of(cls, options: Options) -> Files:
        """Names next to that of the profile."""
        output, searching = options.output, options.settings is None
        stem = output.name.removesuffix(".json")

        def figure(name: str) -> Path | None:
            return output.with_name(f"{stem}.{name}.png") if options.figures else None

        return cls(
            profile=output if searching else None,
            report=output.with_name(f"{stem}.report.json"),
            recovery=figure("recovery"),
            differences=figure("differences"),
            heads=figure("heads") if searching else None,
        )


class Clock:
    """How long a run has gone on, and what it left out for lack of time.

    Args:
        limit: seconds; None: as long as it takes.
    """

    def __init__(self, limit: float | None) -> None:
        self.limit = float("inf") if limit is None else limit
        self.cut: list[str] = []
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._started

    def over(self, what: str, share: float = 1.0) -> bool:
        """Whether that share of the limit has passed; if so ``what`` is noted as cut short."""
        passed = self.seconds > share * self.limit
        if passed and what not in self.cut:
            self.cut.append(what)
        return passed


def check(options: Options) -> None:
    """Refuse options that cannot work, before anything is loaded.

    Raises:
        CalibrationError: which option, its value and the fix.
    """
    if options.output.suffix != ".json":
        raise CalibrationError(f"output={options.output}: the profile's name must end in .json")
    if not options.output.parent.is_dir():
        raise CalibrationError(f"output={options.output}: no such folder; create it first")
    if options.budget >= options.context * 3 // 4:
        raise CalibrationError(
            f"budget={options.budget}: covers the context of {options.context}, so there is "
            "nothing to choose; lower --budget or raise --context"
        )
    if options.windows < len(KINDS) or options.held_out < len(KINDS):
        raise CalibrationError(
            f"windows={options.windows}, held_out={options.held_out}: use {len(KINDS)} or more "
            "of both, one of every kind of text"
        )
    if options.wide and options.fresh:
        raise CalibrationError(
            f"wide={options.wide}, fresh={options.fresh}: both give layers a selection of their "
            "own; ask for one"
        )
    if options.dtype not in ("auto", "bfloat16", "float32"):
        raise CalibrationError(f"dtype={options.dtype}: choose auto, bfloat16 or float32")
    if (
        options.settings is not None
        and Path(options.settings).resolve() == options.output.resolve()
    ):
        raise CalibrationError(
            f"output={options.output}: is the profile that is reported on, and the report would "
            "replace that of its search; choose another name"
        )
    if options.max_seconds is not None and options.max_seconds <= 0:
        raise CalibrationError(f"max_seconds={options.max_seconds}: must be more than 0")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise CalibrationError(f"device={options.device}: no CUDA device here; use --device cpu")


def given_settings(profile: str) -> DustinConfig:
    """The settings of a profile, by shipped name or path.

    Raises:
        ConfigError: no such profile, or not a valid one.
    """
    return DustinConfig.model_validate(load_profile(profile).settings)


@dataclass(frozen=True)
class _Job:
    """What every stage of a run needs. ``data``: the report, which the stages fill."""

    options: Options
    target: Model
    draft: Model
    maker: WindowMaker
    journal: Journal
    clock: Clock
    advance: Advance
    files: Files
    data: dict[str, Any]

    def settings(self, config: DustinConfig, unit: int) -> Settings:
        """Settings of this pair, see ``policies.settings_for``."""
        return policies.settings_for(
            config, unit, self.options.gamma, self.target.shape, self.draft.shape
        )

    def save(self, finished: bool = False) -> None:
        """Write the report as it stands."""
        self.data["complete"] = finished and not self.clock.cut
        self.data["cut_short"] = self.clock.cut
        self.data["seconds"] = round(self.clock.seconds, 1)
        self.data["measurements_reused"] = len(self.journal.reused)
        write_json(self.files.report, self.data)


def calibrate(options: Options, advance: Advance) -> tuple[Files, dict[str, Any]]:
    """Run a calibration, or with ``options.settings`` only its report.

    Args:
        advance: told about progress.

    Returns:
        The files written and the report.

    Raises:
        CalibrationError, ConfigError: options, models or text that cannot be used.
        ResultsError: a file cannot be written.
    """
    from transformers import AutoTokenizer

    check(options)
    clock = Clock(options.max_seconds)
    given = None if options.settings is None else given_settings(options.settings)
    sources = read_sources(options.text)
    advance("loading the models", 0, 2)
    target = load_model(options.target, options.device, options.dtype, "target")
    draft = load_model(options.draft, options.device, options.dtype, "draft")
    check_pair(target, draft, options.context, options.gamma)
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.target)
    except (OSError, ValueError) as error:
        raise CalibrationError(f"target={options.target}: no usable tokenizer ({error})") from error
    advance("loading the models", 2, 2)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids

    options.work.mkdir(parents=True, exist_ok=True)
    job = _Job(
        options=options,
        target=target,
        draft=draft,
        maker=WindowMaker(encode, sources, options.context, options.gamma, draft.shape.vocab_size),
        journal=Journal(options.work / "journal.jsonl"),
        clock=clock,
        advance=advance,
        files=Files.of(options),
        data=_about(options, target, draft, sources),
    )
    if given is None:
        found = _search(job)
        chosen, unit = found.chosen.config, found.chosen.unit
    else:
        chosen = given
        if options.budget != given.budget:
            chosen = policies.at_budget(given, options.budget)
        unit = 1 if given.granularity == "token" else options.unit
        job.data.update(_given_data(job, chosen, unit))
    _report(job, chosen, unit)
    job.save(finished=True)
    if given is None and job.files.profile is not None:  # last: a profile means a finished run
        source = _source(job, found)
        made = report.profile_data(target, draft, found, options.tokens, source)
        write_json(job.files.profile, made)
    return job.files, job.data


def _search(job: _Job) -> Found:
    """Find settings, into the report."""
    options, target, draft, clock = job.options, job.target, job.draft, job.clock
    needles = job.maker.needles(options.needles, options.seed)
    asked = _ask(job, target, needles, "target heads")
    draft_asked = _ask(job, draft, needles, "draft heads")
    right = [trial.right for trial in asked][: len(draft_asked)]
    heads = {"target": combine(asked), "draft": combine(draft_asked, right)}
    job.data["heads"] = {side: report.heads_data(scores) for side, scores in heads.items()}
    job.save()
    if job.files.heads is not None:
        names = {"target": target.name, "draft": draft.name}
        report.draw_heads(job.files.heads, {names[side]: heads[side] for side in names})

    def stop(what: str) -> bool:
        return clock.over(what, SEARCH_SHARE)

    windows = job.maker.windows(options.windows, options.steps, options.seed)
    scores = _record(job, windows, "recording for the search", stop)
    search = Search(
        scores,
        Evaluator(target, scores, job.journal),
        options.gamma,
        options.budget,
        (options.unit, 1) if options.tokens else (options.unit,),
        (target.shape, heads["target"]),
        (draft.shape, heads["draft"]),
        job.advance,
        stop,
    )
    base = DustinConfig.model_validate({"budget": options.budget})
    found = search.run(
        base, options.trials, options.seed, options.layers, options.wide, options.fresh
    )
    job.data.update(
        search_windows=len(scores.traces),
        layers={"target": found.target_layers, "draft": found.draft_layers},
        chosen=report.trial_data(found.chosen),
        default=report.trial_data(found.default),
        trials=[report.trial_data(trial) for trial in found.trials],
    )
    job.save()
    return found


def _given_data(job: _Job, chosen: DustinConfig, unit: int) -> dict[str, Any]:
    """What the report says about settings that were not searched for."""
    default = DustinConfig.model_validate({"budget": job.options.budget})
    return {
        name: {
            "settings": config.model_dump(mode="json", exclude_defaults=True),
            "unit": unit,
            "scoring_bytes_per_token": policies.scoring_bytes(
                job.settings(config, unit), job.target.shape, job.draft.shape
            ),
        }
        for name, config in (("chosen", chosen), ("default", default))
    }


def _report(job: _Job, chosen: DustinConfig, unit: int) -> None:
    """Measure the settings on held-out windows, into the report and two figures."""
    options, data, clock = job.options, job.data, job.clock
    windows = job.maker.windows(options.held_out, options.steps, options.seed + 1_000_003)
    scores = _record(
        job,
        windows,
        "recording for the report",
        lambda what: clock.over(what, RECORD_SHARE),
    )
    data["held_out_windows"] = len(scores.traces)
    data["draft_agreement"] = report.agreement_data(scores)
    default = DustinConfig.model_validate({"budget": options.budget})
    evaluator = Evaluator(job.target, scores, job.journal)
    rows = len(report.variants(chosen, default, job.target.shape.layers))
    made = report.quality_rows(
        job.settings, scores, evaluator, (chosen, unit), default, options.seed
    )
    data["quality"] = []
    for number in range(rows):
        job.advance("report: quality", number, rows)
        if number >= ALWAYS and clock.over("report: quality"):
            break
        data["quality"].append(next(made))
        job.save()
    else:
        job.advance("report: quality", rows, rows)
    title = f"{job.target.name} + {job.draft.name}: {len(scores.traces)} held-out windows"
    if job.files.differences is not None:
        report.draw_differences(job.files.differences, data["quality"], title)
    shown = tuple(dict.fromkeys((unit, *sorted({1, 16, 32, options.unit}))))
    points = len(shown) * len(report.BUDGETS)
    table = report.recovery_rows(job.settings, scores, chosen, shown, options.seed)
    data["recovery"] = []
    for number in range(points):
        job.advance("report: recovery", number, points)
        if clock.over("report: recovery"):
            break
        data["recovery"] += next(table)
        job.save()
    else:
        job.advance("report: recovery", points, points)
    if job.files.recovery is not None and data["recovery"]:
        report.draw_recovery(job.files.recovery, data["recovery"], title)


def _ask(job: _Job, model: Model, needles: list[Window], what: str) -> list[Question]:
    """All questions to one model; those in the journal are not asked again."""
    trials: list[Question] = []
    for index, window in enumerate(needles):
        if index and job.clock.over(what, SEARCH_SHARE):
            return trials
        job.advance(what, index, len(needles))
        about = [what, model.fingerprint, str(model.module.dtype)]
        about += [str((window.tokens, window.source, window.answer))]
        key = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]
        known = job.journal.get(key)
        if known is None:
            trial = ask(model, window)
            known = {"mass": trial.mass.flatten().tolist(), "right": [float(trial.right)]}
            job.journal.put(key, known)
        mass = torch.tensor(known["mass"]).view(model.shape.layers, model.shape.heads)
        trials.append(Question(mass, bool(known["right"][0])))
    job.advance(what, len(needles), len(needles))
    return trials


def _storage(target: Model, draft: Model, tokens: int) -> torch.device:
    """Where recordings are kept: with the model if they take at most half of what is free."""
    if target.device.type != "cuda":
        return torch.device("cpu")
    needed = tokens * (policies.full_bytes(target.shape) + policies.full_bytes(draft.shape))
    free, _ = torch.cuda.mem_get_info(target.device)
    return target.device if needed * target.module.dtype.itemsize <= free else torch.device("cpu")


def _record(job: _Job, windows: Sequence[Window], what: str, stop: Stop) -> Scores:
    """Recordings of the windows, or of the first, one of each kind at least, until ``stop``."""
    options, target, draft = job.options, job.target, job.draft
    traces: list[Trace] = []
    device = _storage(target, draft, sum(len(window.tokens) for window in windows))
    for index, window in enumerate(windows):
        if index >= len(KINDS) and stop(what):
            break
        job.advance(what, index, len(windows))
        traces.append(record(options.work, window, target, draft, options.gamma, device))
    else:
        job.advance(what, len(windows), len(windows))
    items = [Item(i, n) for i, trace in enumerate(traces) for n in trace.window.positions]
    return Scores(traces, items, options.gamma)


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in ("transformers", "optuna"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # a report needs no optuna
            found[name] = None
    return found


def _text(options: Options) -> str:
    return ", ".join(sorted({path.name for path in options.text})) or "Python's own"


def _about(options: Options, target: Model, draft: Model, sources: Sources) -> dict[str, Any]:
    """The head of a report: what is run, on what and with what."""
    shown = asdict(options)
    # Folders of this machine are nobody's business.
    for name in ("target", "draft", "output", "work", "text"):
        del shown[name]
    if options.settings is not None:
        shown["settings"] = Path(options.settings).name
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "environment": provenance.environment() | _versions(),
        "command": provenance.command(),
        "seed": options.seed,
        "options": shown,
        "models": {
            side: {
                "name": model.name,
                "fingerprint": model.fingerprint,
                "dtype": str(model.module.dtype).removeprefix("torch."),
                **asdict(model.shape),
            }
            for side, model in (("target", target), ("draft", draft))
        },
        "text": {
            "given": _text(options),
            "prose_characters": len(sources.prose),
            "code_characters": len(sources.code),
            "records": len(sources.facts),
        },
        "target_kv_bytes_per_token": policies.full_bytes(target.shape),
    }


def _source(job: _Job, found: Found) -> str:
    """How a profile's settings were found, for the profile."""
    options, data = job.options, job.data
    hybrid, default = data["quality"][:ALWAYS]
    trials = len(found.trials) - 1  # the first is the defaults
    limit = ", cut short by a time limit" if job.clock.cut else ""
    return (
        f"dustin calibrate: {data['search_windows']} windows of {options.context} tokens for the "
        f"search and {data['held_out_windows']} held out ({', '.join(KINDS)}; text: "
        f"{_text(options)}), blocks of {options.unit}, gamma {options.gamma}, {trials} trials, "
        f"seed {options.seed}{limit}. "
        f"Held out at budget {options.budget}: KL to dense {hybrid['mean']:.4f} "
        f"[{hybrid['low']:.4f}, {hybrid['high']:.4f}], attention recovery "
        f"{100 * hybrid['recovery']['mean']:.1f} %; default settings there {default['mean']:.4f} "
        f"[{default['low']:.4f}, {default['high']:.4f}]. Keys read for scoring per token and step: "
        f"{found.chosen.scoring} bytes, by default {found.default.scoring}"
    )
