# SPDX-License-Identifier: Apache-2.0
"""One engine that runs every configuration of a job on all samples, in a process of its own
(``python -m dustin_vllm.eval.engine --job FILE --results FILE``).

Results are appended to a file, one JSON object a line, so that what is done is safe.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dustin_vllm import provenance
from dustin_vllm.eval.tasks import BIN, FORCED, Sample

DENSE = "dense"
CPU_BLOCK = 32
MAX_CPU_CACHE = 6 << 30  # bytes
RECOVERY_EVERY = 16  # steps between samples of attention recovery


@dataclass(frozen=True)
class Configuration:
    """What is compared: a policy at a budget (tokens) and a granularity. With dense verification
    only the draft reads as few tokens."""

    policy: str
    budget: int
    granularity: str = "block"

    @property
    def name(self) -> str:
        """For messages and files."""
        if self.policy == DENSE:
            return DENSE
        return f"{self.policy}, budget {self.budget}, {self.granularity}"


@dataclass(frozen=True)
class Job:
    """What one engine does. ``deadline``: seconds since the epoch; no configuration is begun that
    would probably end later. ``settings``: more of Dustin's; ``llm``: more arguments of LLM."""

    model: str
    draft: str
    gamma: int
    batch: int
    max_model_len: int
    samples: list[dict[str, Any]]
    configurations: list[dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    llm: dict[str, Any] = field(default_factory=dict)
    enforce_eager: bool = False
    seed: int = 0
    deadline: float | None = None


def engine_arguments(job: Job, on_cpu: bool) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``."""
    configurations = [Configuration(**entry) for entry in job.configurations]
    budgets = [c.budget for c in configurations if c.policy != DENSE]
    dustin = {
        **job.settings,
        "budget": max(budgets, default=1024),
        "granularity": configurations[0].granularity,
        "dense_below": 0,
        "draft_graphs": False,  # settings are switched, and drafts replaced
        "sample_recovery_every": RECOVERY_EVERY,
    }
    arguments: dict[str, Any] = {
        "model": job.model,
        "seed": job.seed,
        "skip_tokenizer_init": True,
        "max_model_len": job.max_model_len,
        "max_num_seqs": job.batch,
        "max_num_batched_tokens": 2048 if on_cpu else 8192,
        "enable_prefix_caching": True,  # prompts are dense, and the same in every configuration
        "enforce_eager": job.enforce_eager or on_cpu,
        "async_scheduling": False,  # see forcing
        "attention_backend": "DUSTIN",
        "additional_config": {"dustin": dustin},
        "speculative_config": {
            "method": "draft_model",
            "model": job.draft,
            "num_speculative_tokens": job.gamma,
        },
    }
    if on_cpu:
        from dustin_vllm.demo import kv_bytes_per_token, read_model_config

        shapes = [read_model_config(Path(path)) for path in (job.model, job.draft)]
        per_token = sum(kv_bytes_per_token(shape, "float32") for shape in shapes)
        prompts = sum(len(sample["prompt"]) for sample in job.samples)
        least = job.batch * (job.max_model_len + 8 * CPU_BLOCK)
        wanted = min(MAX_CPU_CACHE, per_token * (prompts + least) * 5 // 4)
        arguments["kv_cache_memory_bytes"] = max(1 << 28, per_token * least * 5 // 4, wanted)
        arguments["block_size"] = CPU_BLOCK
    else:
        arguments["gpu_memory_utilization"] = 0.85  # logits and references need some
    return {**arguments, **job.llm}


def bins(measured: Mapping[str, list[Any]]) -> list[dict[str, float]]:
    """Means over every ``BIN`` positions of a continuation: ``first``, ``count``, ``nll``, ``kl``,
    ``same``, ``sparse`` (share). Position 0 is left out: prefill predicts it, densely."""
    groups: dict[int, list[int]] = {}
    for index, position in enumerate(measured["position"]):
        if position:
            groups.setdefault(position // BIN, []).append(index)
    return [
        {
            "first": float(number * BIN),
            "count": float(len(indices)),
            **{
                name: sum(float(measured[name][i]) for i in indices) / len(indices)
                for name in ("nll", "kl", "same", "sparse")
            },
        }
        for number, indices in sorted(groups.items())
    ]


class Evaluation:
    """An engine and what it is asked.

    Args:
        llm: made with ``engine_arguments``.
    """

    def __init__(self, llm: Any, samples: Sequence[Sample], with_oracle: bool) -> None:
        from dustin_vllm.eval import forcing

        self.llm, self.samples = llm, samples
        self._forcing = forcing
        texts = {sample.name: sample.text for sample in samples if sample.task in FORCED}
        llm.collective_rpc(forcing.install, args=(texts, with_oracle))

    def run(self, configuration: Configuration) -> dict[str, Any]:
        """All samples under one configuration; the dense one has to be the first.

        Returns:
            ``outputs``: token ids of free samples by name, ``forced``: ``bins`` of forced ones,
            ``stats``: counters, ``seconds``.
        """
        from vllm import SamplingParams

        from dustin_vllm.demo import difference

        dense, policy = configuration.policy == DENSE, configuration.policy
        changes = {"policy": "dustin" if dense else policy, "budget": configuration.budget}
        self.llm.collective_rpc(self._forcing.reconfigure, args=(changes,))
        chosen = [s for s in self.samples if policy != "oracle" or s.task in FORCED]
        # The longest outputs run all the while, the others beside them.
        chosen.sort(key=lambda sample: -sample.max_tokens)
        parameters = []
        for sample in chosen:
            extra = {"dustin": "dense"} if dense else {}
            if sample.task in FORCED:
                extra[self._forcing.KEY] = sample.name
            parameters.append(
                SamplingParams(
                    temperature=0,
                    max_tokens=sample.max_tokens,
                    ignore_eos=not sample.ends,
                    detokenize=False,
                    extra_args=extra,
                    # It ranks by prompt queries, which a cached prompt does not make.
                    skip_reading_prefix_cache=policy == "static",
                )
            )
        before = self._stats()
        started = time.perf_counter()
        prompts = [{"prompt_token_ids": sample.prompt} for sample in chosen]
        generated = self.llm.generate(prompts, parameters, use_tqdm=False)
        seconds = time.perf_counter() - started
        measured = self.llm.collective_rpc(self._forcing.take)[0]
        outputs = {
            sample.name: list(output.outputs[0].token_ids)
            for sample, output in zip(chosen, generated, strict=True)
            if sample.task not in FORCED
        }
        return {
            "configuration": asdict(configuration),
            "outputs": outputs,
            "forced": {name: bins(values) for name, values in measured["forced"].items()},
            "accepted": measured["accepted"],
            "stats": difference(self._stats(), before),
            "seconds": seconds,
        }

    def _stats(self) -> dict[str, Any]:
        stats = dict(self.llm.collective_rpc("dustin_stats")[0])
        for gauge in ("live_sequences", "selection_tokens"):
            stats.pop(gauge, None)
        return stats


def run_job(job: Job) -> Iterator[dict[str, Any]]:
    """Run a job in this process. The first object yielded is about the engine, then there is
    one for each configuration, dense verification first; ``skipped`` where time ran out."""
    started = time.perf_counter()
    from vllm import LLM
    from vllm.platforms import current_platform

    import dustin_vllm

    dustin_vllm.register()  # idempotent; for a source tree that is not installed
    samples = [Sample(**entry) for entry in job.samples]
    configurations = [Configuration(**entry) for entry in job.configurations]
    llm = LLM(**engine_arguments(job, current_platform.is_cpu()))
    with_oracle = any(c.policy == "oracle" for c in configurations)
    evaluation = Evaluation(llm, samples, with_oracle)
    yield {
        "engine": {
            "environment": provenance.environment(),
            "load_seconds": time.perf_counter() - started,
            "block_size": llm.llm_engine.vllm_config.cache_config.block_size,
            "settings": job.settings,
        }
    }
    longest = 0.0
    # At the smallest budget, so that the oracle's queries are recorded wherever it will choose.
    smallest = min(c.budget for c in configurations)
    ordered = [Configuration(DENSE, smallest, configurations[0].granularity)]
    ordered += [c for c in configurations if c.policy != DENSE]
    for place, configuration in enumerate(ordered):
        if place and job.deadline is not None and time.time() + longest > job.deadline:
            yield {"configuration": asdict(configuration), "skipped": "time"}
            continue
        begun = time.perf_counter()
        yield evaluation.run(configuration)
        # The dense run fills the prefix cache, which the others find filled.
        longest = max(longest, time.perf_counter() - begun) if place > 1 else 0.0


def _main() -> None:
    parser = argparse.ArgumentParser(description="Worker process of `dustin eval`.")
    parser.add_argument("--job", required=True, metavar="FILE", help="JSON file of the job")
    parser.add_argument("--results", required=True, metavar="FILE", help="appended to")
    arguments = parser.parse_args()
    job = Job(**json.loads(Path(arguments.job).read_text(encoding="utf-8")))
    with Path(arguments.results).open("a", encoding="utf-8") as results:
        for result in run_job(job):
            results.write(json.dumps(result) + "\n")
            results.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an engine's destructors may wait for threads; everything has been said


if __name__ == "__main__":
    _main()
