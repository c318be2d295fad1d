# SPDX-License-Identifier: Apache-2.0
"""The command ``dustin calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dustin_vllm.bench.cli import needs_vllm

app = typer.Typer(name="calibrate", add_completion=False)


@app.command()
def calibrate(
    target: Annotated[Path, typer.Argument(help="Target model folder.")],
    draft: Annotated[Path, typer.Argument(help="Draft model folder.")],
    output: Annotated[
        Path,
        typer.Option(help="Profile to write (.json); report and figures get its name."),
    ],
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text files or folders: prose, source code, JSON records. Repeatable. "
            "Default: Python's own documentation and library."
        ),
    ] = None,
    context: Annotated[int, typer.Option(min=256, help="Tokens of a window.")] = 4096,
    budget: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Context tokens that a sparse step reads. Default: 512, or that of --settings.",
        ),
    ] = None,
    gamma: Annotated[int, typer.Option(min=1, help="Proposed tokens per step.")] = 4,
    unit: Annotated[
        int | None,
        typer.Option(min=1, help="Block size, tokens. Default: 16 on a GPU, 32 on a CPU."),
    ] = None,
    tokens: Annotated[
        bool, typer.Option(help="Let the search choose single tokens too (GPU only).")
    ] = False,
    windows: Annotated[int, typer.Option(min=4, help="Windows for the search.")] = 16,
    held_out: Annotated[int, typer.Option(min=4, help="Further windows for the report.")] = 16,
    steps: Annotated[int, typer.Option(min=1, help="Verification steps per window.")] = 3,
    needles: Annotated[int, typer.Option(min=1, help="Questions for finding retrieval heads.")] = 8,
    trials: Annotated[int, typer.Option(min=1, help="Settings that Optuna tries.")] = 40,
    layers: Annotated[int, typer.Option(min=1, help="Scoring layers of each model at most.")] = 4,
    wide: Annotated[
        int,
        typer.Option(
            min=0, help="Find so many layers at most that read four times the budget (wide_layers)."
        ),
    ] = 0,
    fresh: Annotated[
        int,
        typer.Option(
            min=0, help="Find so many layers at most whose own queries select (fresh_layers)."
        ),
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of text, search and intervals.")] = 0,
    settings: Annotated[
        str | None,
        typer.Option(
            help="Search nothing, write no profile, only report on the settings of this one: a "
            "shipped name or a file."
        ),
    ] = None,
    max_seconds: Annotated[
        float | None,
        typer.Option(
            help="Measure no longer, and write a profile and report of what there is. Checked "
            "between steps."
        ),
    ] = None,
    figures: Annotated[bool, typer.Option(help="Draw figures.")] = True,
    work: Annotated[
        Path | None,
        typer.Option(
            help="Folder for recordings, by which an interrupted run resumes. "
            "Default: OUTPUT without .json, with -work."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")] = "cpu",
    dtype: Annotated[str, typer.Option(help="auto (as stored), bfloat16 or float32.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. Default: torch's.")
    ] = None,
) -> None:
    """Find the scoring heads and selection parameters of a pair of models."""
    from rich.console import Console

    with needs_vllm():
        import torch

        from dustin_vllm.calibrate.attention import CalibrationError
        from dustin_vllm.calibrate.run import Options, given_settings
        from dustin_vllm.calibrate.run import calibrate as run
        from dustin_vllm.config import ConfigError
        from dustin_vllm.results import ResultsError
    needed = (["optuna"] if settings is None else []) + (["matplotlib"] if figures else [])
    for package in needed:  # before an hour of work, not after it
        try:
            __import__(package)
        except ImportError as error:
            typer.echo(
                f"{package} is not installed: pip install 'dustin-vllm[calibrate]'", err=True
            )
            raise typer.Exit(1) from error
    if threads is not None:
        torch.set_num_threads(threads)
    console = Console(stderr=True)
    try:
        if budget is None:
            budget = 512 if settings is None else given_settings(settings).budget
        options = Options(
            target=target,
            draft=draft,
            output=output,
            work=work or output.with_name(output.name.removesuffix(".json") + "-work"),
            text=tuple(text or ()),
            context=context,
            budget=budget,
            gamma=gamma,
            unit=unit or (16 if device.startswith("cuda") else 32),
            tokens=tokens,
            windows=windows,
            held_out=held_out,
            steps=steps,
            needles=needles,
            trials=trials,
            layers=layers,
            wide=wide,
            fresh=fresh,
            seed=seed,
            device=device,
            dtype=dtype,
            settings=settings,
            max_seconds=max_seconds,
            figures=figures,
        )
        with _progress(console) as advance:
            files, data = run(options, advance)
    except (CalibrationError, ConfigError, ResultsError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    _show(Console(), data)
    if data["cut_short"]:
        typer.echo(f"cut short by --max-seconds: {', '.join(data['cut_short'])}", err=True)
    if files.profile is not None:
        typer.echo(f"profile: {files.profile}")
    typer.echo(f"report: {files.report}")
    drawn = [file for file in (files.recovery, files.differences, files.heads) if file is not None]
    if drawn:
        typer.echo(f"figures: {', '.join(map(str, drawn))}")


class _progress:
    """A progress bar for every stage."""

    def __init__(self, console: Any) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Any:
        self._bars.start()
        return self._advance

    def __exit__(self, *_: Any) -> None:
        self._bars.stop()

    def _advance(self, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total)
        self._bars.update(self._tasks[what], completed=done, total=total)
        if not self._console.is_terminal:  # a log shows no bars until the end
            self._console.print(f"{what}: {done}/{total}")


def _show(console: Any, data: dict[str, Any]) -> None:
    """The held-out comparison as a table."""
    from rich.table import Table

    table = Table(title="held-out windows: KL to dense in nats, 95 % intervals")
    for name in ("selection", "KL", "over", "difference", "recovery %", "failed copy", "needle"):
        table.add_column(name)
    for row in data["quality"]:
        failed = [f"{row[k]['failed']:.2f}" if k in row else "–" for k in ("copy", "needle")]
        recovered = f"{100 * row['recovery']['mean']:.1f}"
        against = [row["over"], _interval(row["difference"], "+")] if "over" in row else ["", ""]
        table.add_row(row["name"], _interval(row), *against, recovered, *failed)
    console.print(table)


def _interval(values: dict[str, float], sign: str = "") -> str:
    """Mean and 95 % interval."""
    low, high = (f"{values[side]:{sign}.4f}" for side in ("low", "high"))
    return f"{values['mean']:{sign}.4f} [{low}, {high}]"


if __name__ == "__main__":
    app()
