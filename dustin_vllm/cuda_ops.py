# SPDX-License-Identifier: Apache-2.0
"""Verification attention in CUDA C++ for Hopper (csrc/cuda), with the semantics of
``triton_kernels.paged_attention``.

The library has a C ABI and no headers of Python or torch, so one build serves any torch. nvcc
builds it when it is first needed, into the cache folder, under a name that tells what it was
built from; ranks of one host wait for the first.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import torch

from dustin_vllm.demo_models import cache_folder
from dustin_vllm.triton_kernels.attention import check_inputs

logger = logging.getLogger(__name__)

MAX_QUERY_ROWS = 64  # queries times heads that share one key head
HEAD_DIMS = (64, 128)
CAPABILITY = (9, 0)
EARLY = 16  # bit of the library's variant, see attention.cu
BUILD = (
    *("-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"),
    *("-shared", "-Xcompiler", "-fPIC", "-cudart", "static"),
)


class BuildError(RuntimeError):
    """The library cannot be built or loaded here; the message says why."""


def sources() -> list[Path]:
    """Files that the library is built from, the one to compile first."""
    folder = resources.files("dustin_vllm.csrc.cuda")
    return [Path(str(folder / name)) for name in ("attention.cu", "ptx.h")]


def find_compiler() -> str:
    """nvcc.

    Raises:
        BuildError: there is none.
    """
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    for home in filter(None, homes):
        found = shutil.which("nvcc", path=str(Path(home) / "bin"))
        if found:
            return found
    found = shutil.which("nvcc")
    if found is None:
        raise BuildError("no nvcc on PATH or in CUDA_HOME; install the CUDA toolkit")
    return found


def library_file() -> Path:
    """Where the library is once it has been built."""
    digest = hashlib.sha256(" ".join(BUILD).encode())
    for file in sources():
        digest.update(file.read_bytes())
    return cache_folder() / "kernels" / f"attention-{digest.hexdigest()[:16]}.so"


def build() -> Path:
    """The library's file; compiled, in half a minute, unless it was before.

    Raises:
        BuildError: no compiler, it fails, or its output cannot be written.
    """
    library = library_file()
    if not library.is_file():
        compiler = find_compiler()
        try:
            _compile(compiler, library)
        except OSError as error:
            raise BuildError(f"the CUDA kernel cannot be built: {error}") from error
    return library


def _compile(compiler: str, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with (library.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.is_file():  # by another process meanwhile
            return
        logger.info("Dustin: building the CUDA kernel for sm_90 (once, half a minute)")
        part = library.with_suffix(f".{os.getpid()}")
        command = [compiler, *BUILD, "-o", str(part), str(sources()[0])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"nvcc failed ({done.returncode}):\n{done.stderr[-2000:]}")
        part.rename(library)  # complete or absent


@functools.cache
def load(path: Path) -> ctypes.CDLL:
    """A built library.

    Raises:
        BuildError: it is damaged.
    """
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"delete {path}, it does not load: {error}") from error
    pointer, i64, i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    library.dustin_paged_attention.argtypes = (
        [pointer] * 7 + [i64] * 8 + [i32] * 9 + [ctypes.c_float, pointer]
    )
    library.dustin_paged_attention.restype = ctypes.c_int
    return library


def is_hopper() -> bool:
    """Whether the current device is one that the kernel is for."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == CAPABILITY


def why_not(head_dim: int, query_rows: int, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot serve a model on this device; None if it can.

    Args:
        query_rows: queries of a sequence times heads that share a key head, at most.
    """
    if not is_hopper():
        return "it is for compute capability 9.0 (Hopper)"
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim} is none of {', '.join(map(str, HEAD_DIMS))}"
    if query_rows > MAX_QUERY_ROWS:
        return f"{query_rows} query rows per key head, at most {MAX_QUERY_ROWS} are supported"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"{dtype} is neither fp16 nor bf16"
    return None


def paged_attention(
    out: torch.Tensor,
    queries: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    max_queries: int,
    scale: float,
    num_splits: int = 1,
    tuning: int = 0,
    early: bool = False,
    library: ctypes.CDLL | None = None,
) -> torch.Tensor:
    """See ``triton_kernels.paged_attention``, whose arguments these are; fp16 and bf16.

    Args:
        value_cache: a token's values follow its keys in memory, as in vLLM's caches.
        num_splits: 1, 2, 4 or 8 blocks per sequence and key head.
        tuning: 1 or 2 of the library, 0 for its own choice.
        early: block_table, seq_lens, query_starts and what the cache holds of tokens before each
            sequence's queries may be read while the previous kernel of the stream still runs. It
            must not write them, and an ordinary launch must lie between those that did and this
            one.
        library: None: the one for this device, built if need be.

    Raises:
        ValueError: a shape, dtype or stride does not fit.
        BuildError: there is no library and none can be built.
        RuntimeError: the launch failed.
    """
    check_inputs(out, queries, key_cache, value_cache, block_table, seq_lens, query_starts)
    _, num_heads, head_dim = queries.shape
    _, page_size, num_kv_heads, _ = key_cache.shape
    group = num_heads // num_kv_heads
    if queries.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"queries must be fp16 or bf16, not {queries.dtype}")
    if head_dim not in HEAD_DIMS or max_queries * group > MAX_QUERY_ROWS:
        raise ValueError(
            f"head_dim {head_dim} must be 64 or 128, and {max_queries} queries of {group} heads "
            f"at most {MAX_QUERY_ROWS} rows"
        )
    if num_splits not in (1, 2, 4, 8):
        raise ValueError(f"num_splits must be 1, 2, 4 or 8, not {num_splits}")
    tensors = (out, queries, key_cache, value_cache, block_table, seq_lens, query_starts)
    if len(devices := {tensor.device for tensor in tensors}) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"all tensors must be on one device, not on {names}")
    if library is None and not queries.is_cuda:
        raise ValueError(f"tensors must be on a GPU, not on {queries.device}")
    size = queries.element_size()
    if value_cache.data_ptr() - key_cache.data_ptr() != head_dim * size:
        raise ValueError("value_cache: a token's values must follow its keys in memory")
    for name, tensor in (("out", out), ("queries", queries), ("key_cache", key_cache)):
        strides = [stride * size for stride in tensor.stride()[:-1]]
        if tensor.data_ptr() % 16 or any(stride % 16 for stride in strides):
            raise ValueError(f"{name}: rows must begin at multiples of 16 bytes")
    page_stride, token_stride, head_stride, _ = key_cache.stride()
    stream = None if queries.device.type == "cpu" else torch.cuda.current_stream().cuda_stream
    code = (library or load(build())).dustin_paged_attention(
        out.data_ptr(),
        queries.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        block_table.data_ptr(),
        seq_lens.data_ptr(),
        query_starts.data_ptr(),
        queries.stride(0),
        queries.stride(1),
        out.stride(0),
        out.stride(1),
        page_stride,
        token_stride,
        head_stride,
        block_table.stride(0),
        seq_lens.shape[0],
        num_kv_heads,
        group,
        head_dim,
        page_size,
        max_queries,
        num_splits,
        queries.dtype == torch.bfloat16,
        tuning + EARLY * early,
        scale,
        stream,
    )
    if code:
        raise RuntimeError(f"dustin_paged_attention: error {code}")
    return out


def splits(pairs: int, head_dim: int, multiprocessors: int) -> int:
    """Blocks per sequence and key head: as many as fit at once, up to what pays on an H200."""
    return next((n for n in (4, 2) if n * head_dim <= 256 and pairs * n <= multiprocessors), 1)
