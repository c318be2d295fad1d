# SPDX-License-Identifier: Apache-2.0
"""The command ``dustin``. Imports torch and vLLM inside the commands that need them."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dustin_vllm.bench.cli import app as bench
from dustin_vllm.calibrate.cli import calibrate
from dustin_vllm.doctor import INSTALL_VLLM, Setup, run_checks
from dustin_vllm.eval.cli import evaluate, trace

app = typer.Typer(
    name="dustin",
    help="Sparse verification for long-context speculative decoding in vLLM.",
    no_args_is_help=True,
    add_completion=False,
)
app.add_typer(bench, name="bench")
app.command()(calibrate)
app.command("eval")(evaluate)
app.command()(trace)


@app.command()
def demo(
    model: Annotated[
        Path | None,
        typer.Option(help="Target model folder. Default: SmolLM2-135M, built on first use."),
    ] = None,
    draft: Annotated[Path | None, typer.Option(help="Draft model folder, with --model.")] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Document, UTF-8. Default: the Python language reference."),
    ] = None,
    context_tokens: Annotated[int, typer.Option(min=256, help="Prompt length, tokens.")] = 6400,
    max_tokens: Annotated[int, typer.Option(min=8, help="New tokens.")] = 128,
    gamma: Annotated[int, typer.Option(min=1, help="Proposed tokens per step.")] = 4,
    budget: Annotated[
        int, typer.Option(min=1, help="Context tokens that a sparse step reads.")
    ] = 1024,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. Default: the usable cores, at most 8.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers and outputs here.")
    ] = None,
    keep_going: Annotated[
        bool, typer.Option(help="When a mode fails, run the others all the same.")
    ] = False,
    verbose: Annotated[bool, typer.Option(help="Show vLLM's own output.")] = False,
) -> None:
    """Decode one long document plainly, with stock speculation, and with Dustin."""
    from rich.console import Console

    from dustin_vllm.demo import DemoOptions, run_demo

    if dtype not in ("bfloat16", "float32"):
        raise typer.BadParameter("choose bfloat16 or float32", param_hint="--dtype")
    options = DemoOptions(
        model=model,
        draft=draft,
        text=text,
        context_tokens=context_tokens,
        max_tokens=max_tokens,
        gamma=gamma,
        budget=budget,
        dtype=dtype,
        threads=threads,
        json_file=json_file,
        keep_going=keep_going,
        verbose=verbose,
    )
    raise typer.Exit(run_demo(options, Console(), Console(stderr=True)))


@app.command()
def config(
    model: Annotated[str, typer.Argument(help="Target model: folder or hub name.")],
    draft: Annotated[str | None, typer.Option(help="Draft model: folder or hub name.")] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting, e.g. budget=512. Repeatable."),
    ] = None,
    additional_config: Annotated[
        str | None,
        typer.Option(metavar="JSON", help='As for vLLM, e.g. \'{"dustin": {"budget": 512}}\'.'),
    ] = None,
) -> None:
    """Print the settings that a pair of models would run with, as JSON."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        settings = additional_settings(assignments or [], additional_config)
    except ValueError as error:
        _fail(str(error))
    from dustin_vllm.config import ConfigError, describe

    try:
        # vLLM logs to stdout, which is for the JSON alone.
        with contextlib.redirect_stdout(sys.stderr):
            effective = describe(model, draft, settings)
    except (ConfigError, OSError) as error:  # OSError: transformers finds no such model
        _fail(str(error))
    except ModuleNotFoundError as error:
        if error.name not in ("vllm", "torch"):
            raise
        _fail(f"{error.name} is not installed: {INSTALL_VLLM}")
    data = json.dumps(effective, indent=2, ensure_ascii=False)
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print_json(data)
    else:
        typer.echo(data)


def additional_settings(assignments: list[str], additional_config: str | None) -> dict[str, Any]:
    """vLLM's additional_config from the two ways to give it; ``--set`` wins.

    Args:
        assignments: ``key=value``; a value that is not JSON is taken as a string.
        additional_config: a JSON object, or None.

    Raises:
        ValueError: neither of these; the message says what is wrong.
    """
    data: Any = {}
    if additional_config is not None:
        try:
            data = json.loads(additional_config)
        except ValueError as error:
            raise ValueError(f"--additional-config is not JSON: {error}") from error
        if not isinstance(data, dict):
            raise ValueError("--additional-config must be a JSON object")
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key:
            raise ValueError(f"--set {assignment}: write KEY=VALUE")
        section = data.setdefault("dustin", {})
        if not isinstance(section, dict):
            raise ValueError('--additional-config: "dustin" must be a JSON object')
        try:
            section[key] = json.loads(value)
        except ValueError:
            section[key] = value
    return data


def _fail(message: str) -> Any:
    """Print a message to stderr and exit with code 2."""
    typer.echo(message, err=True)
    raise typer.Exit(2)


@app.command()
def doctor(
    model: Annotated[
        str | None, typer.Argument(help="Target model, to check a pair too: folder or hub name.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model, with MODEL.")] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting, as for config. Repeatable."),
    ] = None,
    additional_config: Annotated[
        str | None, typer.Option(metavar="JSON", help="As for vLLM.")
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="As for vLLM.")] = 1,
) -> None:
    """Check the installation, and a pair of models and its settings if given; say how to mend
    what is wrong. Exit code 1 when something is wrong."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if (model is None) != (draft is None):
        _fail("give MODEL and --draft together, or neither")
    try:
        settings = additional_settings(assignments or [], additional_config)
    except ValueError as error:
        _fail(str(error))
    with contextlib.redirect_stdout(sys.stderr):
        checks = run_checks(Setup(model, draft, settings, tensor_parallel_size))
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for title in ("check", "result", "how to mend"):
        table.add_column(title, overflow="fold")
    for check in checks:
        color = "green" if check.ok else "yellow" if check.optional else "red"
        table.add_row(check.name, f"[{color}]{_escape(check.result)}[/]", _escape(check.mend))
    Console().print(table)
    if any(not check.ok and not check.optional for check in checks):
        raise typer.Exit(1)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


if __name__ == "__main__":
    app()
