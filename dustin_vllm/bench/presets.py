# SPDX-License-Identifier: Apache-2.0
"""Shapes of the benchmarks: enough of a model to time it, without its weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

MAX_POSITIONS = 131072


@dataclass(frozen=True)
class ModelShape:
    """A Qwen2 model. Attention shapes are query heads / key heads x head_dim."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int = 0
    intermediate: int = 0
    vocab: int = 0
    tied: bool = False

    @property
    def label(self) -> str:
        """As ``parse_shape`` reads it."""
        return f"{self.heads}/{self.kv_heads}x{self.head_dim}"


@dataclass(frozen=True)
class Preset:
    """A target, its draft, and how many layers x heads of each score by default.

    The rest are defaults of ``dustin bench engine``, see there.
    """

    target: ModelShape
    draft: ModelShape
    target_scoring: tuple[int, int] = (1, 4)
    draft_scoring: tuple[int, int] = (3, 4)
    batches: tuple[int, ...] = (16,)
    budgets: tuple[int, ...] = (512,)
    fill_kv: bool = False


QWEN_72B = ModelShape(80, 64, 8, 128, 8192, 29568, 152064)
QWEN_7B = ModelShape(28, 28, 4, 128, 3584, 18944, 152064)
QWEN_05B = ModelShape(24, 14, 2, 64, 896, 4864, 151936, tied=True)

PRESETS = {
    "72b": Preset(QWEN_72B, QWEN_05B),
    "7b": Preset(QWEN_7B, QWEN_05B),
    # The paper's own measurement: four GPUs, --tp 4.
    "paper-72b": Preset(
        QWEN_72B, QWEN_05B, batches=(16, 32), budgets=(512, 256, 128), fill_kv=True
    ),
}


def divisible(shape: ModelShape, ranks: int) -> ModelShape:
    """The shape with so many more heads that ``ranks`` divide them, as stock vLLM demands of a
    draft; the head_dim stays, so the model gets wider."""
    heads = -(-shape.heads // ranks) * ranks
    while heads % shape.kv_heads:
        heads += ranks
    return replace(shape, heads=heads, hidden=heads * shape.head_dim)


def parse_shape(text: str, layers: int) -> ModelShape:
    """``64/8x128`` as a shape.

    Raises:
        ValueError: not of this form, or heads that key heads do not divide.
    """
    try:
        heads, rest = text.split("/")
        kv_heads, head_dim = rest.split("x")
        shape = ModelShape(layers, int(heads), int(kv_heads), int(head_dim))
    except ValueError:
        raise ValueError(
            f"shape {text!r}: write query heads/key heads x head_dim, as 64/8x128"
        ) from None
    if min(shape.heads, shape.kv_heads, shape.head_dim) < 1 or shape.heads % shape.kv_heads:
        raise ValueError(f"shape {text!r}: query heads must be a multiple of key heads")
    return shape


def parse_scoring(text: str) -> tuple[int, int]:
    """``3x4`` as (layers, heads of each).

    Raises:
        ValueError: not of this form.
    """
    try:
        layers, heads = map(int, text.split("x"))
    except ValueError:
        raise ValueError(f"scoring heads {text!r}: write layers x heads, as 3x4") from None
    if layers < 1 or heads < 1:
        raise ValueError(f"scoring heads {text!r}: at least 1x1")
    return layers, heads


def spread(count: int, total: int) -> tuple[int, ...]:
    """``count`` of ``total`` indices, evenly spread, so that heads read different key heads."""
    count = min(count, total)
    return tuple(i * total // count for i in range(count))


def scoring_layers(scoring: tuple[int, int], shape: ModelShape) -> list[dict[str, Any]]:
    """Scoring heads as ``DustinConfig`` takes them: layers in the middle of equal thirds etc."""
    layers, heads = min(scoring[0], shape.layers), scoring[1]
    chosen = [(2 * i + 1) * shape.layers // (2 * layers) for i in range(layers)]
    return [{"layer": layer, "heads": list(spread(heads, shape.heads))} for layer in chosen]


def model_config(shape: ModelShape, layers: int | None = None, vocab: int | None = None) -> dict:
    """config.json of a Qwen2 of this shape, for vLLM's dummy weights.

    Args:
        layers: replaces the shape's number of layers.
        vocab: replaces the shape's vocabulary size.
    """
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": layers or shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": vocab or shape.vocab,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": shape.tied,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def write_models(
    preset: Preset,
    folder: Path,
    layers: int | None = None,
    draft_vocab: int | None = None,
    ranks: int = 1,
) -> tuple[Path, Path, Path]:
    """Folders of the preset's target and draft, with a config.json and nothing else.

    Args:
        layers: of the target; fewer than the real model's let it fit one GPU.
        draft_vocab: None: the target's, because stock vLLM refuses a draft with another.
        ranks: tensor-parallel ranks; stock vLLM gets a draft whose heads they divide.

    Returns:
        (target folder, draft folder, the draft's folder for stock vLLM).
    """
    draft = replace(preset.draft, vocab=draft_vocab or preset.target.vocab)
    stock = draft if draft.heads % ranks == 0 else divisible(draft, ranks)
    folders = []
    for name, config in (
        ("target", model_config(preset.target, layers)),
        ("draft", model_config(draft)),
        (f"draft-{stock.heads}", model_config(stock)),
    ):
        path = folder / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        folders.append(path)
    return folders[0], folders[1], folders[1] if stock is draft else folders[2]
