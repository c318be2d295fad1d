# SPDX-License-Identifier: Apache-2.0
"""Scoring on the CPU: token scores out of vLLM's packed key cache, and unit scores.

Both are torch custom ops (``torch.ops.dustin_vllm.token_scores_``, ``.unit_scores``) with
the semantics of ``reference.token_scores`` and ``reference.unit_scores``. They run in the
C++ library of ``csrc/cpu`` or, where it was not built, in torch.

Key layouts (``layout``), the order of one block's ``block_size * head_dim`` elements:

* ``"vec"``, ``"vec16"``: ``[head_dim, block_size]``.
* ``"amx"`` (bf16): ``[block_size / 16, head_dim / 2, 16 tokens, 2]``.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging

import torch

logger = logging.getLogger(__name__)

_LAYOUTS = {"vec": 0, "vec16": 0, "amx": 1}
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_BF16_ISAS = ("avx512_bf16", "amx")  # read bf16 queries; the others read fp32
_ERRORS = {
    1: "out of memory for the logits",
    2: "block_table names a block outside key_cache",
    3: "seq_lens has a length below Q or beyond block_table",
    4: "bf16 queries for an instruction set that reads fp32 (force_isa during the call?)",
}


class _TokenScores(ctypes.Structure):
    """Mirror of DustinTokenScores in csrc/cpu/score.cpp."""

    _fields_ = [
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("queries", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("block_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("table", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("seq_lens", ctypes.c_void_p),
        ("kv_heads", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("num_queries", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("max_blocks", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("weight", ctypes.c_double),
        ("layout", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("bf16_queries", ctypes.c_int64),
        ("use_max", ctypes.c_int64),
        ("threads", ctypes.c_int64),
    ]


class _UnitScores(ctypes.Structure):
    """Mirror of DustinUnitScores in csrc/cpu/score.cpp."""

    _fields_ = [
        ("out", ctypes.c_void_p),
        ("scores", ctypes.c_void_p),
        ("scores_stride", ctypes.c_int64),
        ("contexts", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("unit", ctypes.c_int64),
        ("dilation", ctypes.c_int64),
        ("threads", ctypes.c_int64),
    ]


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The C++ library, or None if it was not built or does not load."""
    spec = importlib.util.find_spec("dustin_vllm._cpu")
    if spec is None or spec.origin is None:
        return None
    try:
        library = ctypes.CDLL(spec.origin)
    except OSError as error:
        logger.warning("cannot load %s: %s", spec.origin, error)
        return None
    library.dustin_cpu_token_scores.argtypes = [ctypes.POINTER(_TokenScores)]
    library.dustin_cpu_unit_scores.argtypes = [ctypes.POINTER(_UnitScores)]
    library.dustin_cpu_isa.argtypes = [ctypes.c_int64, ctypes.c_int64]
    library.dustin_cpu_isa.restype = ctypes.c_char_p
    library.dustin_cpu_force_isa.argtypes = [ctypes.c_char_p]
    return library


@functools.cache
def _warn_missing() -> None:
    logger.warning("The C++ kernels are not built; Dustin scores in torch, which is slower.")


def is_built() -> bool:
    """Whether the C++ library is there; otherwise the ops run in torch."""
    return _library() is not None


def cpu_isa(layout: str, dtype: torch.dtype) -> str:
    """Instruction set that scores a layout and key dtype on this CPU.

    Args:
        layout: see the module docstring.
        dtype: of the keys, fp32, bf16 or fp16.

    Returns:
        "scalar", "avx2", "avx512", "avx512_bf16" or "amx"; "torch" without the library.

    Raises:
        ValueError: unknown layout or dtype.
    """
    _check_layout(layout, dtype)
    library = _library()
    if library is None:
        return "torch"
    return library.dustin_cpu_isa(_LAYOUTS[layout], _DTYPES[dtype]).decode()


def force_isa(name: str) -> None:
    """Use no instruction set above ``name`` (for tests); "auto" lifts the cap.

    Raises:
        ValueError: this CPU lacks it, or the library is not built.
    """
    library = _library()
    if library is None or library.dustin_cpu_force_isa(name.encode()) != 0:
        raise ValueError(f"name: this CPU or build has no instruction set {name!r}")


def unpack_keys(key_cache_block: torch.Tensor, layout: str) -> torch.Tensor:
    """Row-major keys of packed blocks.

    Args:
        key_cache_block: [..., block_size, head_dim], each block packed as ``layout``.
        layout: see the module docstring.

    Returns:
        [..., block_size, head_dim], same dtype, contiguous for "amx", a view for the others
        where the strides permit.

    Raises:
        ValueError: unknown layout, or "amx" with a dtype other than bf16.
    """
    _check_layout(layout, key_cache_block.dtype)
    *outer, block_size, dim = key_cache_block.shape
    if _LAYOUTS[layout] == 0:
        return key_cache_block.reshape(*outer, dim, block_size).transpose(-1, -2)
    groups = key_cache_block.reshape(*outer, block_size // 16, dim // 2, 16, 2)
    return groups.transpose(-3, -2).reshape(*outer, block_size, dim)


def _check_layout(layout: str, dtype: torch.dtype) -> None:
    if layout not in _LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(_LAYOUTS)}, not {layout!r}")
    if dtype not in _DTYPES:
        raise ValueError(f"key_cache must be fp32, bf16 or fp16, not {dtype}")
    if layout == "amx" and dtype != torch.bfloat16:
        raise ValueError(f"key_cache must be bf16 in layout 'amx', not {dtype}")


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless ``tensor`` is a CPU tensor of that dtype and shape (-1: any)."""
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} must be on the CPU, not on {tensor.device}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, not {tensor.dtype}")
    wrong = len(shape) != tensor.dim() or any(
        want not in (-1, have) for want, have in zip(shape, tensor.shape, strict=True)
    )
    if wrong:
        wanted = ", ".join("*" if size == -1 else str(size) for size in shape)
        raise ValueError(f"{name} must have shape [{wanted}], not {list(tensor.shape)}")


def token_scores_(
    out: torch.Tensor,
    queries: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_heads: torch.Tensor,
    scale: float,
    weight: float,
    layout: str,
    aggregate: str,
) -> None:
    """Add one layer's token scores to ``out``, in place.

    Every row p of the Q * H attention probabilities is a softmax over the whole visible
    context. Calling this for every scoring layer with ``weight = 1 / (all rows)`` gives
    ``reference.token_scores``.

    Args:
        out: [R, C] fp32, unit column stride. "mean": ``out[r] += weight * p.sum(rows)``;
            "max": ``out[r] = max(out[r], p.amax(rows))``. Positions from seq_lens[r] on
            are not touched.
        queries: [R, Q, H, D] fp32, bf16 or fp16, rotated, H the scoring heads of the layer.
            Query i of row r sits at position seq_lens[r] - Q + i.
        key_cache: [num_blocks, Hkv, block_size, D] fp32, bf16 or fp16; the last two
            dimensions contiguous and packed as ``layout``, the outer strides free.
            block_size and D are multiples of 16.
        block_table: [R, MB] int32, physical block of every logical block.
        seq_lens: [R] int32, tokens with keys in the cache, from Q on; 0 skips the row.
        kv_heads: [H] int32, key head of every scoring head. Heads that share one are
            scored in one pass over its keys.
        scale: softmax scale, normally D ** -0.5.
        weight: factor of the sum under "mean"; unused under "max".
        layout: "vec", "vec16" or "amx", see the module docstring.
        aggregate: "mean" or "max".

    Raises:
        ValueError: an argument has the wrong dtype, shape, stride or value.
        RuntimeError: ``block_table`` names a block outside the cache, or out of memory.
    """
    torch.ops.dustin_vllm.token_scores_.default(
        out,
        queries,
        key_cache,
        block_table,
        seq_lens,
        kv_heads,
        scale,
        weight,
        layout,
        aggregate,
    )


def _token_scores_(
    out: torch.Tensor,
    queries: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_heads: torch.Tensor,
    scale: float,
    weight: float,
    layout: str,
    aggregate: str,
) -> None:
    lengths = _check_token_scores(
        out, queries, key_cache, block_table, seq_lens, kv_heads, layout, aggregate
    )
    library = _library()
    if library is None:
        _warn_missing()
        _torch_token_scores_(
            out,
            queries,
            key_cache,
            block_table,
            lengths,
            kv_heads,
            scale,
            weight,
            layout,
            aggregate,
        )
        return
    bf16_queries = (
        queries.dtype == key_cache.dtype == torch.bfloat16
        and layout == "amx"
        and cpu_isa(layout, key_cache.dtype) in _BF16_ISAS
    )
    # These copies (no-ops as a rule) must outlive the call.
    queries = (queries if bf16_queries else queries.float()).contiguous()
    block_table = block_table if block_table.stride(-1) == 1 else block_table.contiguous()
    seq_lens, kv_heads = seq_lens.contiguous(), kv_heads.contiguous()
    rows, num_queries, heads, dim = queries.shape
    arguments = _TokenScores(
        out=out.data_ptr(),
        out_stride=out.stride(0),
        queries=queries.data_ptr(),
        keys=key_cache.data_ptr(),
        block_stride=key_cache.stride(0),
        head_stride=key_cache.stride(1),
        table=block_table.data_ptr(),
        table_stride=block_table.stride(0),
        seq_lens=seq_lens.data_ptr(),
        kv_heads=kv_heads.data_ptr(),
        rows=rows,
        num_queries=num_queries,
        heads=heads,
        dim=dim,
        block_size=key_cache.shape[2],
        num_blocks=key_cache.shape[0],
        max_blocks=block_table.shape[1],
        scale=scale,
        weight=weight,
        layout=_LAYOUTS[layout],
        dtype=_DTYPES[key_cache.dtype],
        bf16_queries=bf16_queries,
        use_max=aggregate == "max",
        threads=torch.get_num_threads(),
    )
    code = library.dustin_cpu_token_scores(ctypes.byref(arguments))
    if code:
        raise RuntimeError(f"token_scores_: {_ERRORS.get(code, f'error {code}')}")


def _check_token_scores(
    out: torch.Tensor,
    queries: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_heads: torch.Tensor,
    layout: str,
    aggregate: str,
) -> list[int]:
    """Raise ValueError for arguments the kernels cannot take; returns seq_lens as a list."""
    if aggregate not in ("mean", "max"):
        raise ValueError(f"aggregate must be 'mean' or 'max', not {aggregate!r}")
    _check_layout(layout, key_cache.dtype)
    _check("key_cache", key_cache, key_cache.dtype, (-1, -1, -1, -1))
    _, num_kv_heads, block_size, dim = key_cache.shape
    if block_size % 16 or dim % 16:
        raise ValueError(
            f"key_cache must have block_size and head_dim in multiples of 16, not {block_size}"
            f" and {dim}"
        )
    if key_cache.stride(3) != 1 or key_cache.stride(2) != dim:
        raise ValueError(
            "key_cache must be contiguous within a block and head, not of strides"
            f" {key_cache.stride()}"
        )
    if queries.dtype not in _DTYPES:
        raise ValueError(f"queries must be fp32, bf16 or fp16, not {queries.dtype}")
    _check("queries", queries, queries.dtype, (-1, -1, -1, dim))
    rows, num_queries, heads, _ = queries.shape
    if num_queries == 0 or heads == 0:
        raise ValueError(f"queries must have Q >= 1 and H >= 1, not shape {list(queries.shape)}")
    _check("out", out, torch.float32, (rows, -1))
    _check("block_table", block_table, torch.int32, (rows, -1))
    _check("seq_lens", seq_lens, torch.int32, (rows,))
    _check("kv_heads", kv_heads, torch.int32, (heads,))
    if out.stride(1) != 1 and out.shape[1] > 1:
        raise ValueError(f"out must have unit column stride, not strides {out.stride()}")
    longest = min(out.shape[1], block_table.shape[1] * block_size)
    lengths: list[int] = seq_lens.tolist()
    for length in lengths:
        if length and not num_queries <= length <= longest:
            raise ValueError(
                f"seq_lens must be 0 or from {num_queries} (Q) to {longest} (columns of out,"
                f" slots of block_table), not {length}"
            )
    for head in kv_heads.tolist():
        if not 0 <= head < num_kv_heads:
            raise ValueError(f"kv_heads must be below {num_kv_heads} (Hkv), not {head}")
    return lengths


def _torch_token_scores_(
    out: torch.Tensor,
    queries: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: list[int],
    kv_heads: torch.Tensor,
    scale: float,
    weight: float,
    layout: str,
    aggregate: str,
) -> None:
    """``token_scores_`` after its checks, one row and key head at a time."""
    num_queries, block_size = queries.shape[1], key_cache.shape[2]
    for r, length in enumerate(lengths):
        if length == 0:
            continue
        blocks = block_table[r, : -(-length // block_size)].long()
        if int(blocks.min()) < 0 or int(blocks.max()) >= key_cache.shape[0]:
            raise RuntimeError(f"token_scores_: {_ERRORS[2]}")
        last_visible = torch.arange(length - num_queries, length)
        hidden = torch.arange(length)[None, :] > last_visible[:, None]
        for head in kv_heads.unique().tolist():
            keys = unpack_keys(key_cache[blocks, head], layout).flatten(0, 1)[:length].float()
            rows = queries[r][:, kv_heads == head].float()  # [Q, heads of this key head, D]
            logits = (rows @ keys.T * scale).masked_fill(hidden[:, None], float("-inf"))
            p = logits.softmax(-1).flatten(0, 1)
            if aggregate == "mean":
                out[r, :length].add_(p.sum(0), alpha=weight)
            else:
                torch.maximum(out[r, :length], p.amax(0), out=out[r, :length])


def unit_scores(
    scores: torch.Tensor, contexts: torch.Tensor, unit: int, dilation: int
) -> torch.Tensor:
    """Mass of every full unit of every row's context, see ``reference.unit_scores``.

    Args:
        scores: [R, C] fp32 token scores, not negative; positions from contexts[r] on are
            ignored.
        contexts: [R] int32, tokens, at most C.
        unit: tokens per unit.
        dilation: tokens.

    Returns:
        [R, C // unit] fp32, 0 from contexts[r] // unit on.

    Raises:
        ValueError: an argument has the wrong dtype, shape or value.
    """
    return torch.ops.dustin_vllm.unit_scores.default(scores, contexts, unit, dilation)


def _unit_scores(
    scores: torch.Tensor, contexts: torch.Tensor, unit: int, dilation: int
) -> torch.Tensor:
    if unit < 1:
        raise ValueError(f"unit must be positive, not {unit}")
    if dilation < 0:
        raise ValueError(f"dilation must not be negative, not {dilation}")
    _check("scores", scores, torch.float32, (-1, -1))
    rows, columns = scores.shape
    _check("contexts", contexts, torch.int32, (rows,))
    lengths: list[int] = contexts.tolist()
    for context in lengths:
        if not 0 <= context <= columns:
            raise ValueError(f"contexts must be from 0 to {columns} (C), not {context}")
    library = _library()
    if library is None:
        _warn_missing()
        return _torch_unit_scores(scores, lengths, unit, dilation)
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    contexts = contexts.contiguous()
    out = scores.new_empty(rows, columns // unit)
    arguments = _UnitScores(
        out=out.data_ptr(),
        scores=scores.data_ptr(),
        scores_stride=scores.stride(0),
        contexts=contexts.data_ptr(),
        rows=rows,
        columns=columns,
        unit=unit,
        dilation=dilation,
        threads=torch.get_num_threads(),
    )
    library.dustin_cpu_unit_scores(ctypes.byref(arguments))
    return out


def _torch_unit_scores(
    scores: torch.Tensor, contexts: list[int], unit: int, dilation: int
) -> torch.Tensor:
    """``unit_scores`` after its checks."""
    rows, columns = scores.shape
    width = columns // unit
    out = scores.new_zeros(rows, width)
    for shift in range(min(dilation, columns) + 1):
        moved = torch.nn.functional.pad(scores[:, : columns - shift], (shift, 0))
        out = torch.maximum(out, moved[:, : width * unit].reshape(rows, width, unit).sum(-1))
    full = torch.tensor(contexts)[:, None] // unit
    return out.where(torch.arange(width)[None, :] < full, 0.0)


# Not torch.library.custom_op: its wrappers add 40 us to every call, and a step makes one
# call per scoring layer.
_OPS = torch.library.Library("dustin_vllm", "FRAGMENT")
_OPS.define(
    "token_scores_(Tensor(a!) out, Tensor queries, Tensor key_cache, Tensor block_table,"
    " Tensor seq_lens, Tensor kv_heads, float scale, float weight, str layout,"
    " str aggregate) -> ()"
)
_OPS.define("unit_scores(Tensor scores, Tensor contexts, int unit, int dilation) -> Tensor")
_OPS.impl("token_scores_", _token_scores_, "CPU")
_OPS.impl("unit_scores", _unit_scores, "CPU")


@torch.library.register_fake("dustin_vllm::token_scores_", lib=_OPS)
def _(
    out: torch.Tensor,
    queries: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_heads: torch.Tensor,
    scale: float,
    weight: float,
    layout: str,
    aggregate: str,
) -> None:
    return None


@torch.library.register_fake("dustin_vllm::unit_scores", lib=_OPS)
def _(scores: torch.Tensor, contexts: torch.Tensor, unit: int, dilation: int) -> torch.Tensor:
    return scores.new_empty(scores.shape[0], scores.shape[1] // unit)
