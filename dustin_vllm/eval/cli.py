# SPDX-License-Identifier: Apache-2.0
"""The commands ``dustin eval`` and ``dustin trace``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dustin_vllm.bench.cli import json_object, needs_vllm, numbers

DEFAULT_TASKS = "passkey,multikey,copy,edit,agreement,summary,continuation,drift"


def evaluate(
    model: Annotated[Path, typer.Option(help="Target model folder.")],
    draft: Annotated[Path, typer.Option(help="Draft model folder.")],
    json_file: Annotated[
        Path, typer.Option("--json", help="All numbers, written after every configuration.")
    ],
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text files or folders: prose, source code, JSON records. Repeatable. "
            "Default: Python's own documentation and library."
        ),
    ] = None,
    policies: Annotated[
        str,
        typer.Option(
            help="Of dustin, lookahead, history, streaming, static, quest, random, oracle, dense "
            "(always run, as the reference)."
        ),
    ] = "dustin,streaming,static,quest",
    budget: Annotated[str, typer.Option(help="Tokens that a sparse row reads.")] = "512,1024",
    granularity: Annotated[str, typer.Option(help="Of block, token.")] = "block",
    context: Annotated[str, typer.Option(help="Prompt lengths, tokens.")] = "16384",
    tasks: Annotated[
        str, typer.Option(help="Also qa, which needs JSON records in the text.")
    ] = DEFAULT_TASKS,
    samples: Annotated[int, typer.Option(min=1, help="Per task and context.")] = 8,
    output_tokens: Annotated[
        int, typer.Option(min=16, help="Of the tasks agreement and continuation.")
    ] = 512,
    drift_tokens: Annotated[int, typer.Option(min=16, help="Of the task drift.")] = 8192,
    drift_samples: Annotated[
        int, typer.Option(min=1, help="Of the task drift, at the smallest context.")
    ] = 4,
    gamma: Annotated[int, typer.Option(min=1, help="Proposed tokens per step.")] = 4,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 32,
    seed: Annotated[int, typer.Option(help="Of samples and engine.")] = 0,
    max_seconds: Annotated[
        int | None,
        typer.Option(min=1, help="Begin no configuration that would end after so many seconds."),
    ] = None,
    parallel: Annotated[
        int,
        typer.Option(
            min=0,
            help="Engines at once, as Ray tasks with a GPU each (RAY_ADDRESS: of that cluster). "
            "0: one after another, without Ray.",
        ),
    ] = 0,
    resume: Annotated[
        bool, typer.Option(help="Keep what --json has already of the same samples.")
    ] = False,
    enforce_eager: Annotated[bool, typer.Option(help="No CUDA graphs.")] = False,
    dustin_json: Annotated[
        str | None, typer.Option(metavar="JSON", help="More settings of Dustin.")
    ] = None,
    llm_json: Annotated[
        str | None, typer.Option(metavar="JSON", help="More arguments of vllm.LLM.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw the result here (needs matplotlib).")
    ] = None,
    verbose: Annotated[bool, typer.Option(help="Show vLLM's own output.")] = False,
) -> None:
    """Measure what sparse verification costs in quality, against rival selection policies."""
    from rich.console import Console

    with needs_vllm():
        from dustin_vllm.bench.common import BenchError
        from dustin_vllm.config import ConfigError
        from dustin_vllm.eval import report
        from dustin_vllm.eval.run import Options
        from dustin_vllm.eval.run import evaluate as run
        from dustin_vllm.eval.tasks import EvalError
        from dustin_vllm.results import ResultsError
    options = Options(
        model=model,
        draft=draft,
        text=tuple(text or ()),
        tasks=tuple(tasks.split(",")),
        policies=tuple(policies.split(",")),
        budgets=numbers(budget, "--budget"),
        granularities=tuple(granularity.split(",")),
        contexts=numbers(context, "--context"),
        samples=samples,
        output_tokens=output_tokens,
        drift_tokens=drift_tokens,
        drift_samples=drift_samples,
        gamma=gamma,
        batch=batch,
        seed=seed,
        max_seconds=max_seconds,
        enforce_eager=enforce_eager,
        parallel=parallel,
        settings=json_object(dustin_json, "--dustin-json"),
        llm=json_object(llm_json, "--llm-json"),
        verbose=verbose,
    )
    errors = Console(stderr=True)
    try:
        data = run(options, json_file, resume, lambda line: errors.print(line, markup=False))
    except (EvalError, ConfigError, ResultsError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    console = Console()
    for table in report.tables(data):
        console.print(table)
    if plot_file is not None:
        try:
            report.draw(data, plot_file)
        except BenchError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from error
    raise typer.Exit(1 if data["failures"] else 0)


def trace(
    file: Annotated[Path, typer.Argument(help="Picture to write: .html or .png.")],
    model: Annotated[Path, typer.Option(help="Target model folder.")],
    draft: Annotated[Path, typer.Option(help="Draft model folder.")],
    text: Annotated[
        Path | None,
        typer.Option(help="The prompt, UTF-8; longer text is cut. Default: a passage to copy."),
    ] = None,
    context: Annotated[int, typer.Option(min=256, help="Tokens of the prompt at most.")] = 4096,
    max_tokens: Annotated[int, typer.Option(min=8, help="New tokens.")] = 128,
    budget: Annotated[int, typer.Option(min=1, help="Tokens that a sparse row reads.")] = 512,
    gamma: Annotated[int, typer.Option(min=1, help="Proposed tokens per step.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the default prompt.")] = 0,
    dustin_json: Annotated[
        str | None, typer.Option(metavar="JSON", help="More settings of Dustin.")
    ] = None,
) -> None:
    """Draw which positions each verification step of one prompt read, and why."""
    if file.suffix not in (".html", ".png"):
        raise typer.BadParameter("must end in .html or .png", param_hint="FILE")
    settings = {**json_object(dustin_json, "--dustin-json"), "budget": budget}
    from dustin_vllm.bench.common import BenchError
    from dustin_vllm.config import ConfigError
    from dustin_vllm.eval import trace as tracing
    from dustin_vllm.eval.run import trace_prompt
    from dustin_vllm.eval.tasks import EvalError

    try:
        prompt, decode = trace_prompt(model, text, context, seed)
        found = tracing.trace(file, model, draft, prompt, decode, max_tokens, gamma, settings)
    except (EvalError, ConfigError, BenchError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    numbers_ = ", ".join(f"{name} {value:.3g}" for name, value in tracing.summary(found).items())
    typer.echo(f"{file}: {numbers_}")
