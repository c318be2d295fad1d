# SPDX-License-Identifier: Apache-2.0
"""A calibration from models and text to profile, report and figures."""

from __future__ import annotations

import datetime
import hashlib
import json
import time
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
from dustin_vllm.calibrate.search import Advance, Search
from dustin_vllm.calibrate.text import KINDS, Sources, Window, WindowMaker, read_sources
from dustin_vllm.calibrate.traces import Item, Scores, Trace, record
from dustin_vllm.config import DustinConfig
from dustin_vllm.results import write_json


@dataclass(frozen=True)
class Options:
    """What a user chooses. Lengths are in tokens.

    ``unit``: block size that the search selects by; ``tokens``: let it choose single tokens
    too. ``windows``: for the search, ``held_out`` further ones for the report, ``steps``
    verification steps in each; ``needles``: questions that find retrieval heads; ``layers``:
    scoring layers of each model at most.
    ``work``: folder for traces and measurements, by which an interrupted run resumes.
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
    seed: int = 0
    device: str = "cpu"
    dtype: str = "auto"


@dataclass(frozen=True)
class Files:
    """What a run writes."""

    profile: Path
    report: Path
    recovery: Path
    heads: Path

    @classmethod
    def beside(cls, profile: Path) -> Files:
        """Names next to that of the profile."""
        stem = profile.name.removesuffix(".json")
        return cls(
            profile,
            *(
                profile.with_name(f"{stem}.{end}")
                for end in ("report.json", "recovery.png", "heads.png")
            ),
        )


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
    if options.dtype not in ("auto", "bfloat16", "float32"):
        raise CalibrationError(f"dtype={options.dtype}: choose auto, bfloat16 or float32")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise CalibrationError(f"device={options.device}: no CUDA device here; use --device cpu")


def calibrate(options: Options, advance: Advance) -> tuple[Files, dict[str, Any]]:
    """Run a calibration.

    Args:
        advance: told about progress.

    Returns:
        The files written and the report.

    Raises:
        CalibrationError, ConfigError: options, models or text that cannot be used.
    """
    from transformers import AutoTokenizer

    check(options)
    started = time.perf_counter()
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

    result = calibrate_models(options, target, draft, sources, encode, advance)
    return _write(options, target, draft, sources, result, time.perf_counter() - started)


def calibrate_models(
    options: Options,
    target: Model,
    draft: Model,
    sources: Sources,
    encode: Any,
    advance: Advance,
) -> dict[str, Any]:
    """The measurements of ``calibrate``, on loaded models.

    Returns:
        "heads" (by "target" and "draft"), "found", "search" and the two tables.
    """
    options.work.mkdir(parents=True, exist_ok=True)
    journal = Journal(options.work / "journal.jsonl")
    maker = WindowMaker(encode, sources, options.context, options.gamma, draft.shape.vocab_size)
    needles = maker.needles(options.needles, options.seed)
    asked = _ask(journal, target, needles, "target heads", advance)
    target_heads = combine(asked)
    draft_heads = combine(
        _ask(journal, draft, needles, "draft heads", advance), [trial.right for trial in asked]
    )

    search_windows = maker.windows(options.windows, options.steps, options.seed)
    held_out = maker.windows(options.held_out, options.steps, options.seed + 1_000_003)
    scores = _record(options, target, draft, search_windows, "recording for the search", advance)
    units = (options.unit, 1) if options.tokens else (options.unit,)
    search = Search(
        scores,
        Evaluator(target, scores, journal),
        options.gamma,
        options.budget,
        units,
        (target.shape, target_heads),
        (draft.shape, draft_heads),
        advance,
    )
    found = search.run(
        DustinConfig.model_validate({"budget": options.budget}),
        options.trials,
        options.seed,
        options.layers,
    )
    unseen = _record(options, target, draft, held_out, "recording for the report", advance)
    evaluator = Evaluator(target, unseen, journal)
    advance("report", 0, 2)
    quality = report.quality_table(search, unseen, evaluator, found, options.seed)
    advance("report", 1, 2)
    shown = tuple(sorted({1, 16, 32, options.unit}))
    table = report.recovery_table(search, unseen, found.chosen.config, shown, options.seed)
    advance("report", 2, 2)
    return {
        "heads": {"target": target_heads, "draft": draft_heads},
        "found": found,
        "search": search,
        "quality": quality,
        "recovery": table,
        "reused": len(journal) - search.evaluator.measured - evaluator.measured,
    }


def _ask(
    journal: Journal, model: Model, needles: list[Window], what: str, advance: Advance
) -> list[Question]:
    """All questions to one model; those in the journal are not asked again."""
    trials = []
    for index, window in enumerate(needles):
        advance(what, index, len(needles))
        about = [what, model.fingerprint, str(model.module.dtype)]
        about += [str((window.tokens, window.source, window.answer))]
        key = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]
        known = journal.get(key)
        if known is None:
            trial = ask(model, window)
            known = {"mass": trial.mass.flatten().tolist(), "right": [float(trial.right)]}
            journal.put(key, known)
        mass = torch.tensor(known["mass"]).view(model.shape.layers, model.shape.heads)
        trials.append(Question(mass, bool(known["right"][0])))
    advance(what, len(needles), len(needles))
    return trials


def _storage(target: Model, draft: Model, tokens: int) -> torch.device:
    """Where recordings are kept: with the model if they take at most half of what is free."""
    if target.device.type != "cuda":
        return torch.device("cpu")
    needed = tokens * (policies.full_bytes(target.shape) + policies.full_bytes(draft.shape))
    free, _ = torch.cuda.mem_get_info(target.device)
    return target.device if needed * target.module.dtype.itemsize <= free else torch.device("cpu")


def _record(
    options: Options,
    target: Model,
    draft: Model,
    windows: list[Window],
    what: str,
    advance: Advance,
) -> Scores:
    traces: list[Trace] = []
    device = _storage(target, draft, sum(len(window.tokens) for window in windows))
    for index, window in enumerate(windows):
        advance(what, index, len(windows))
        traces.append(record(options.work, window, target, draft, options.gamma, device))
    advance(what, len(windows), len(windows))
    items = [Item(i, n) for i, window in enumerate(windows) for n in window.positions]
    return Scores(traces, items, options.gamma)


def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("transformers", "optuna")}


def _write(
    options: Options,
    target: Model,
    draft: Model,
    sources: Sources,
    result: dict[str, Any],
    seconds: float,
) -> tuple[Files, dict[str, Any]]:
    files = Files.beside(options.output)
    found, search = result["found"], result["search"]
    hybrid = result["quality"][0]
    default = next(row for row in result["quality"] if row["name"] == "default settings")
    given = ", ".join(sorted({path.name for path in options.text})) or "Python's own"
    source = (
        f"dustin calibrate: {options.windows} windows of {options.context} tokens for the search "
        f"and {options.held_out} held out ({', '.join(KINDS)}; text: {given}), blocks of "
        f"{options.unit}, gamma {options.gamma}, {options.trials} trials, seed {options.seed}. "
        f"Held out at budget {options.budget}: KL to dense {hybrid['mean']:.4f} "
        f"[{hybrid['low']:.4f}, {hybrid['high']:.4f}], attention recovery "
        f"{100 * hybrid['recovery']['mean']:.1f} %; default settings there {default['mean']:.4f} "
        f"[{default['low']:.4f}, {default['high']:.4f}]. Keys read for scoring per token and step: "
        f"{found.chosen.scoring} bytes, by default {found.default.scoring}"
    )
    profile = report.profile_data(target, draft, found, options.tokens, source)
    data = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "environment": provenance.environment() | _versions(),
        # Folders of this machine are nobody's business.
        "command": provenance.command(),
        "seed": options.seed,
        "options": {
            key: value
            for key, value in asdict(options).items()
            if key not in ("target", "draft", "output", "work", "text")
        },
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
            "given": given,
            "prose_characters": len(sources.prose),
            "code_characters": len(sources.code),
            "records": len(sources.facts),
        },
        "seconds": round(seconds, 1),
        "measurements_reused": result["reused"],
        "heads": {side: report.heads_data(heads) for side, heads in result["heads"].items()},
        "layers": {"target": found.target_layers, "draft": found.draft_layers},
        "chosen": report.trial_data(found.chosen),
        "default": report.trial_data(found.default),
        "target_kv_bytes_per_token": policies.full_bytes(search.target),
        "quality": result["quality"],
        "recovery": result["recovery"],
        "trials": [report.trial_data(trial) for trial in found.trials],
    }
    write_json(files.report, data)
    title = f"{target.name} + {draft.name}: {options.held_out} held-out windows"
    report.draw_recovery(files.recovery, result["recovery"], title)
    report.draw_heads(
        files.heads,
        {
            model.name: result["heads"][side]
            for side, model in (("target", target), ("draft", draft))
        },
    )
    write_json(files.profile, profile)  # last: a profile means a finished run
    return files, data
