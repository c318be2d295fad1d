# SPDX-License-Identifier: Apache-2.0
"""``dustin trace``: which positions each verification of one prompt read, by which signal, with
what it recovered and how many tokens were accepted; as a web page or an image."""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dustin_vllm.bench.common import pyplot
from dustin_vllm.eval.tasks import EvalError

if TYPE_CHECKING:
    from dustin_vllm.config import Settings
    from dustin_vllm.runtime import Selected

SIGNALS = ("sink", "lookahead", "history", "mixed", "recent")
COLORS = {
    "sink": "#7f7f7f",
    "lookahead": "#d95f02",
    "history": "#1b6fb5",
    "mixed": "#7b4fa3",
    "recent": "#4c9a4c",
    "tail": "#222222",
}
TITLE_CHARACTERS = 120


@dataclass(frozen=True)
class Span:
    """Neighbouring positions [start, end) that were read for one reason."""

    start: int
    end: int
    signal: str


@dataclass
class StepTrace:
    """One sparse verification. ``context``: confirmed tokens; ``tokens``: what it confirmed, the
    bonus token included; ``recovery``: share of the scoring heads' attention that the selection
    covered, None if it was not measured."""

    context: int
    spans: list[Span]
    tokens: list[int] = field(default_factory=list)
    recovery: float | None = None

    @property
    def read(self) -> int:
        """Context tokens read."""
        return sum(span.end - span.start for span in self.spans)


@dataclass
class Trace:
    """All sparse verifications of one prompt."""

    prompt_tokens: int
    gamma: int
    about: str
    steps: list[StepTrace]
    ids: list[int]  # prompt and output


def spans_of(selected: Selected, index: int, settings: Settings) -> list[Span]:
    """What row ``index`` of a selection reads, and why, by position."""
    from dustin_vllm import reference

    config, unit = settings.config, settings.unit
    context = selected.contexts[index]
    lookahead = reference.unit_scores(selected.lookahead[index].cpu(), context, unit).tolist()
    dilation = settings.dilation_tokens
    history = reference.unit_scores(selected.history[index].cpu(), context, unit, dilation).tolist()
    protected = reference.protected_units(context, unit, config.sinks, config.recent)
    free = settings.target.budget_units - len(protected)
    first = min(settings.target.lookahead_units, free)
    ahead = set(
        reference.select_units(
            lookahead,
            history,
            context,
            unit,
            len(protected) + first,
            config.sinks,
            config.recent,
            "fill",
            first,
            0.0,
        )
    )
    sinks = -(-config.sinks // unit)
    made: list[Span] = []
    for number in selected.selections[index].tolist():
        if number in protected:
            signal = "sink" if number < sinks else "recent"
        elif config.merge == "weighted":
            signal = "mixed"
        else:
            signal = "lookahead" if number in ahead else "history"
        start = number * unit
        if made and made[-1].end == start and made[-1].signal == signal:
            made[-1] = Span(made[-1].start, start + unit, signal)
        else:
            made.append(Span(start, start + unit, signal))
    tail = context // unit * unit
    if tail < context:
        made.append(Span(tail, context, "tail"))
    return made


def record(llm: Any, prompt: Sequence[int], max_tokens: int, about: str) -> Trace:
    """Generate greedily and watch.

    Args:
        llm: an engine in this process with draft_graphs off and sample_recovery_every 1.

    Raises:
        EvalError: no verification was sparse.
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    runtime = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.dustin
    settings = runtime.settings
    made: list[StepTrace] = []
    runtime.on_selection = lambda selected: made.append(
        StepTrace(selected.contexts[0], spans_of(selected, 0, settings))
    )
    parameters = SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False)
    engine.add_request("trace", {"prompt_token_ids": list(prompt)}, parameters)
    steps: list[StepTrace] = []
    output: list[int] = []
    pending: StepTrace | None = None  # made in the step before, to be used in this one
    while engine.has_unfinished_requests():
        before = runtime.stats()
        made.clear()
        outputs = engine.step()
        after = runtime.stats()
        ids = list(outputs[0].outputs[0].token_ids) if outputs else output
        if pending is not None and after["sparse_rows"] > before["sparse_rows"]:
            pending.tokens = ids[len(output) :]
            if after["recovery_samples"] > before["recovery_samples"]:
                pending.recovery = after["recovery_sum"] - before["recovery_sum"]
            steps.append(pending)
        output = ids
        pending = made[-1] if made else None
    runtime.on_selection = None
    if not steps:
        raise EvalError(
            f"no verification was sparse: the prompt has {len(prompt)} tokens, the budget is "
            f"{settings.config.budget}; raise --context or lower --budget"
        )
    return Trace(len(prompt), settings.gamma, about, steps, [*prompt, *output])


def engine_arguments(
    model: Path,
    draft: Path,
    prompt_tokens: int,
    max_tokens: int,
    gamma: int,
    dustin: dict[str, Any],
) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` for ``record``."""
    from vllm.platforms import current_platform

    from dustin_vllm.demo import kv_bytes_per_token, read_model_config

    length = -(-(prompt_tokens + max_tokens + 2 * gamma + 2) // 32) * 32
    arguments: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "max_model_len": length,
        "max_num_seqs": 1,
        "enforce_eager": True,
        "async_scheduling": False,
        "attention_backend": "DUSTIN",
        "speculative_config": {
            "method": "draft_model",
            "model": str(draft),
            "num_speculative_tokens": gamma,
        },
        "additional_config": {
            "dustin": {
                "dense_below": 0,
                **dustin,
                "draft_graphs": False,
                "sample_recovery_every": 1,
            }
        },
    }
    if current_platform.is_cpu():
        shapes = [read_model_config(path) for path in (model, draft)]
        per_token = sum(kv_bytes_per_token(shape, "float32") for shape in shapes)
        arguments["kv_cache_memory_bytes"] = max(1 << 28, 2 * per_token * length)
        arguments["block_size"] = 32
    return arguments


def trace(
    file: Path,
    model: Path,
    draft: Path,
    prompt: Sequence[int],
    decode: Callable[[Sequence[int]], str],
    max_tokens: int,
    gamma: int,
    dustin: dict[str, Any],
) -> Trace:
    """Run one prompt and draw it into ``file``, .html or .png.

    Raises:
        EvalError: nothing was sparse. ConfigError: a setting is refused.
        BenchError: a .png without matplotlib.
    """
    if file.suffix == ".png":
        pyplot()  # before the engine starts, not after
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    import dustin_vllm

    dustin_vllm.register()  # idempotent; for a source tree that is not installed
    llm = LLM(**engine_arguments(model, draft, len(prompt), max_tokens, gamma, dustin))
    about = f"{model.name}, budget {dustin.get('budget', 1024)}, {len(prompt)} prompt tokens"
    found = record(llm, prompt, max_tokens, about)
    if file.suffix == ".png":
        draw(found, file)
    else:
        file.write_text(page(found, decode), encoding="utf-8")
    return found


def summary(found: Trace) -> dict[str, float]:
    """Means over the steps: ``acceptance`` (tokens per step), ``read`` (share of the context),
    ``recovery``, and the share of what is read by each signal."""
    steps = found.steps
    total = sum(step.read for step in steps)
    recovered = [step.recovery for step in steps if step.recovery is not None]
    by_signal = {
        f"by {signal}": sum(
            span.end - span.start for step in steps for span in step.spans if span.signal == signal
        )
        / total
        for signal in COLORS
    }
    return {
        "steps": len(steps),
        "acceptance": sum(len(step.tokens) for step in steps) / len(steps),
        "read": total / sum(step.context for step in steps),
        "recovery": sum(recovered) / len(recovered) if recovered else float("nan"),
        **{name: share for name, share in by_signal.items() if share},
    }


# ---- the page -----------------------------------------------------------------------------

WIDTH, ROW, LEFT, COLUMN = 900, 9, 60, 120

STYLE = """body{font:14px system-ui,sans-serif;margin:24px;max-width:1180px;color:#222}
svg text{font:11px system-ui,sans-serif;fill:#444}rect.s:hover{stroke:#000;stroke-width:1}
.key{display:inline-block;width:12px;height:12px;margin:0 4px 0 14px;vertical-align:-1px}
.t{white-space:pre-wrap;font:13px ui-monospace,monospace;background:#f6f6f6;padding:10px}
.t span:nth-child(odd){background:#e4ecf7}"""


def page(found: Trace, decode: Callable[[Sequence[int]], str]) -> str:
    """A self-contained page: nothing is loaded, no script runs."""

    def text_of(start: int, end: int) -> str:
        text = " ".join(decode(found.ids[start:end]).split())
        return text if len(text) <= TITLE_CHARACTERS else text[:TITLE_CHARACTERS] + " …"

    length = max(step.context for step in found.steps)
    scale = WIDTH / length
    height = ROW * len(found.steps) + 40
    parts = []
    for index, step in enumerate(found.steps):
        y = 20 + index * ROW
        row = f'y="{y}" height="{ROW - 2}"'
        parts.append(
            f'<rect x="{LEFT}" {row} width="{step.context * scale:.1f}" fill="#eee"/>'
            f'<text x="{LEFT - 8}" y="{y + ROW - 2}" text-anchor="end">{step.context}</text>'
        )
        for span in step.spans:
            title = f"{span.signal}, {span.start} to {span.end}: {text_of(span.start, span.end)}"
            parts.append(
                f'<rect class="s" x="{LEFT + span.start * scale:.1f}" {row} '
                f'width="{max(1.0, (span.end - span.start) * scale):.1f}" '
                f'fill="{COLORS[span.signal]}"><title>{html.escape(title)}</title></rect>'
            )
        x = LEFT + WIDTH + 20
        if step.recovery is not None:
            parts.append(
                f'<rect x="{x}" {row} width="{step.recovery * COLUMN:.1f}" fill="#9ecae1">'
                f"<title>recovery {step.recovery:.3f}</title></rect>"
            )
        x += COLUMN + 20
        said = html.escape(decode(step.tokens))
        for place in range(found.gamma + 1):
            fill = "#2c7a2c" if place < len(step.tokens) else "#ddd"
            parts.append(
                f'<rect x="{x + place * (ROW + 1)}" {row} width="{ROW - 1}" fill="{fill}">'
                f"<title>{len(step.tokens)} tokens: {said}</title></rect>"
            )
    ends = LEFT + WIDTH
    parts.append(
        f'<text x="{LEFT}" y="12">position 0</text>'
        f'<text x="{ends}" y="12" text-anchor="end">{length}</text>'
        f'<text x="{ends + 20}" y="12">attention recovery</text>'
        f'<text x="{ends + COLUMN + 40}" y="12">tokens</text>'
    )
    prompt_end = LEFT + found.prompt_tokens * scale
    parts.append(
        f'<line x1="{prompt_end:.1f}" x2="{prompt_end:.1f}" y1="16" y2="{height - 18}" '
        'stroke="#c00" stroke-dasharray="3 3"/>'
        f'<text x="{prompt_end:.1f}" y="{height - 6}" text-anchor="end">end of the prompt</text>'
    )
    used = {span.signal for step in found.steps for span in step.spans}
    key = "".join(
        f'<span class="key" style="background:{color}"></span>{signal}'
        for signal, color in COLORS.items()
        if signal in used
    )
    numbers = summary(found)
    listed = "; ".join(f"{name} {value:.3g}" for name, value in numbers.items())
    output = "".join(f"<span>{html.escape(decode(step.tokens))}</span>" for step in found.steps)
    total = ends + COLUMN + 40 + (found.gamma + 1) * (ROW + 1)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>dustin trace</title><style>{STYLE}</style></head>
<body><h1>What each verification read</h1>
<p>{html.escape(found.about)}. A row is one verification step, from top to bottom; a coloured place
is read, a grey one is skipped. Hold the pointer over a place to see its text.</p>
<p>{key}</p>
<svg width="{total}" height="{height}" viewBox="0 0 {total} {height}">{"".join(parts)}</svg>
<p>{html.escape(listed)}</p>
<h2>What was confirmed, step by step</h2><div class="t">{output}</div>
</body></html>
"""


def draw(found: Trace, path: Path) -> None:
    """The same as an image.

    Raises:
        BenchError: matplotlib is not installed.
    """
    plt = pyplot()
    figure, (left, middle, right) = plt.subplots(
        1,
        3,
        figsize=(12, max(3.0, 0.09 * len(found.steps) + 1.5)),
        width_ratios=[6, 1, 1],
        sharey=True,
        layout="constrained",
    )
    places = range(len(found.steps))
    for index, step in enumerate(found.steps):
        left.broken_barh([(0, step.context)], (index - 0.4, 0.8), color="#eeeeee")
        for span in step.spans:
            bar = (span.start, max(span.end - span.start, step.context / 900))
            left.broken_barh([bar], (index - 0.4, 0.8), color=COLORS[span.signal])
    used = {span.signal for step in found.steps for span in step.spans}
    for signal in COLORS:
        if signal in used:
            left.barh([0], [0], color=COLORS[signal], label=signal)
    left.axvline(found.prompt_tokens, color="#cc0000", ls=":", lw=1)
    left.legend(fontsize=8, ncols=len(used), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    left.set_xlabel("position")
    left.set_ylabel("verification step")
    left.invert_yaxis()
    middle.barh(places, [step.recovery or 0 for step in found.steps], color="#9ecae1")
    middle.set_xlabel("attention recovery")
    middle.set_xlim(0, 1)
    right.barh(places, [len(step.tokens) for step in found.steps], color="#2c7a2c")
    right.set_xlabel("tokens confirmed")
    right.set_xlim(0, found.gamma + 1)
    figure.suptitle(found.about, fontsize=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)
