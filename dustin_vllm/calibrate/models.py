# SPDX-License-Identifier: Apache-2.0
"""Loading a pair, checking that it can be calibrated, and telling it from other pairs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dustin_vllm.calibrate.attention import NAME, CalibrationError, Prefill, active, register
from dustin_vllm.config import ModelShape

CHUNK = 512
FINGERPRINT_BYTES = 1 << 20


@dataclass(frozen=True)
class Model:
    """A loaded model. ``module`` is a transformers causal language model in eval mode."""

    name: str
    module: Any
    shape: ModelShape
    fingerprint: str
    max_tokens: int

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.module.device
        return device


@dataclass(frozen=True)
class Prefilled:
    """One sequence through one model, densely.

    ``keys``, ``values``: [layers, Hkv, L, D]; ``queries``: [layers, rows, H, D], all rotated;
    ``scales``: [layers] fp32; ``logits``: [logit rows, V] fp32.
    """

    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    scales: torch.Tensor
    logits: torch.Tensor


def fingerprint(folder: Path) -> str:
    """Hash of a model folder: its config.json, and size and first MiB of every weight file."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as stream:
            digest.update(stream.read(FINGERPRINT_BYTES))
    return digest.hexdigest()[:16]


def load_model(folder: Path, device: str, dtype: str, option: str) -> Model:
    """Load a model folder with the attention of this package.

    Args:
        dtype: "auto" (as stored), "bfloat16" or "float32".
        option: name of the setting, for messages.

    Raises:
        CalibrationError: no such model, or one that Dustin does not support.
    """
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise CalibrationError(
            f"{option}={folder}: no config.json there; give the folder of a Hugging Face model"
        )
    register()
    try:
        module = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            attn_implementation=NAME,
        )
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{option}={folder}: {error}") from error
    config = module.config
    used = [kind for kind in getattr(config, "layer_types", None) or [] if kind != "full_attention"]
    if used:
        raise CalibrationError(
            f"{option}={folder}: has layers of type {used[0]}; Dustin needs full attention in all"
        )
    return Model(
        name=folder.name,
        module=module.to(device).eval(),
        shape=ModelShape.of(config),
        fingerprint=fingerprint(folder),
        max_tokens=getattr(config, "max_position_embeddings", 1 << 62),
    )


def check_pair(target: Model, draft: Model, context: int, gamma: int) -> None:
    """Refuse models that do not fit each other, or the context with a step behind it.

    Raises:
        CalibrationError: which option, its value and the fix.
    """
    if draft.shape.vocab_size > target.shape.vocab_size:
        raise CalibrationError(
            f"draft={draft.name}: vocabulary of {draft.shape.vocab_size} exceeds the target's "
            f"{target.shape.vocab_size}; use a draft of the same family"
        )
    for model, option in ((target, "target"), (draft, "draft")):
        if context + 2 * gamma + 2 > model.max_tokens:
            raise CalibrationError(
                f"context={context}: {option}={model.name} takes at most {model.max_tokens} "
                "tokens; lower --context"
            )


@torch.inference_mode()
def prefill(
    model: Model,
    tokens: Sequence[int],
    query_rows: Sequence[int],
    logit_rows: Sequence[int] = (),
) -> Prefilled:
    """Run one sequence densely, in chunks of ``CHUNK`` tokens.

    Args:
        query_rows: positions whose queries are kept, ascending.
        logit_rows: positions whose logits are kept, ascending.
    """
    plan = Prefill(len(tokens), query_rows)
    ids = torch.tensor([list(tokens)], device=model.device)
    logits = []
    with active(plan):
        for start in range(0, len(tokens), CHUNK):
            end = min(start + CHUNK, len(tokens))
            plan.start = start
            wanted = [row - start for row in logit_rows if start <= row < end]
            output = model.module(
                input_ids=ids[:, start:end],
                position_ids=torch.arange(start, end, device=model.device)[None],
                use_cache=False,
                # An index tensor: the number 0 would mean all rows.
                logits_to_keep=torch.tensor(wanted or [0], device=model.device),
            ).logits
            if wanted:
                logits.append(output[0].float())
    layers = range(model.shape.layers)
    return Prefilled(
        keys=torch.stack([plan.keys[i] for i in layers]),
        values=torch.stack([plan.values[i] for i in layers]),
        queries=torch.stack([plan.queries[i] for i in layers]),
        scales=torch.tensor([plan.scales[i] for i in layers]),
        logits=torch.cat(logits) if logits else torch.empty(0, model.shape.vocab_size),
    )
