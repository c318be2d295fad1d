# SPDX-License-Identifier: Apache-2.0
"""ctypes binding of csrc/cuda/attention.cu for torch tensors.

Build: build.sh
"""

from __future__ import annotations

import ctypes

import torch

# Bits of ``variant`` next to a tuning (0 .. 3).
PROGRAMMATIC = 16  # programmatic dependent launch
EARLY_TABLE = 32  # with PROGRAMMATIC; no kernel that may still run writes table or lengths
EARLY_FETCH = 64  # with EARLY_TABLE: the first tokens into L2; tunings 2 and 3

ERRORS = {
    -1: "head_dim must be 64 or 128",
    -2: "more than 64 query rows (queries times heads of a key head)",
    -3: "page size must be a power of two",
    -4: "num_splits must be 1, 2, 4 or 8",
    -5: "unknown variant",
    -6: "a token's value must follow its key",
}


def load(path: str) -> ctypes.CDLL:
    lib = ctypes.CDLL(path)
    pointer, i64, i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    lib.dustin_paged_attention.argtypes = (
        [pointer] * 7 + [i64] * 8 + [i32] * 9 + [ctypes.c_float, pointer]
    )
    lib.dustin_paged_attention.restype = ctypes.c_int
    return lib


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
    num_splits: int,
    variant: int,
    lib: ctypes.CDLL,
) -> torch.Tensor:
    """As triton_kernels.attention.paged_attention, without a workspace."""
    _, num_heads, head_dim = queries.shape
    _, page_size, num_kv_heads, _ = key_cache.shape
    assert queries.dtype in (torch.bfloat16, torch.float16)
    assert out.dtype == key_cache.dtype == value_cache.dtype == queries.dtype
    assert key_cache.stride() == value_cache.stride()
    assert queries.stride(-1) == out.stride(-1) == key_cache.stride(-1) == 1
    assert block_table.stride(-1) == 1
    for tensor in (block_table, seq_lens, query_starts):
        assert tensor.dtype == torch.int32
    for tensor in (out, queries, key_cache, value_cache):  # 16-byte copies
        assert tensor.data_ptr() % 16 == 0
        assert all(stride % 8 == 0 for stride in tensor.stride()[:-1])
    page_stride, token_stride, head_stride, _ = key_cache.stride()
    code = lib.dustin_paged_attention(
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
        num_heads // num_kv_heads,
        head_dim,
        page_size,
        max_queries,
        num_splits,
        queries.dtype == torch.bfloat16,
        variant,
        scale,
        torch.cuda.current_stream().cuda_stream,
    )
    if code:
        raise RuntimeError(f"dustin_paged_attention: {ERRORS.get(code, f'CUDA error {code}')}")
    return out
