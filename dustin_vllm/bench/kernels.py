# SPDX-License-Identifier: Apache-2.0
"""Attention kernels that ``dustin bench attention`` compares, behind one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from dustin_vllm.bench.presets import ModelShape

BLOCK = 16  # tokens of a KV-cache block, vLLM's default on CUDA
DTYPE = torch.bfloat16


class Unavailable(RuntimeError):
    """A kernel cannot serve a call here; the message says why."""


@dataclass
class Call:
    """Arguments of one attention call but for the cache: R rows of Q queries each."""

    shape: ModelShape
    queries: torch.Tensor  # [R, Q, H, D]
    out: torch.Tensor  # [R, Q, H, D]; a kernel that returns its output puts that here
    table: torch.Tensor  # [R, W] int32, pages of ``page`` tokens
    lens: torch.Tensor  # [R] int32
    max_len: int  # tokens, at least the largest of lens
    page: int
    starts: torch.Tensor = field(init=False)  # [R + 1] int32

    def __post_init__(self) -> None:
        rows, width = self.queries.shape[:2]
        device = self.queries.device
        self.starts = torch.arange(0, rows * width + 1, width, dtype=torch.int32, device=device)

    def flat(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and out as [R * Q, H, D]."""
        return self.queries.flatten(0, 1), self.out.flatten(0, 1)

    def views(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [pages, page, Hkv, D] of a cache [blocks, BLOCK, Hkv, 2 * D].

        At page 1, which needs NHD, every cache slot is a page. Nothing is copied.
        """
        pages = cache if self.page == BLOCK else cache.view(-1, self.page, *cache.shape[2:])
        head_dim = self.shape.head_dim
        return pages[..., :head_dim], pages[..., head_dim:]


# Makes a function of the cache from a call and num_splits.
Attention = Callable[[Call, int], Callable[[torch.Tensor], object]]


def flash_attention(call: Call, num_splits: int) -> Callable[[torch.Tensor], object]:
    """vLLM's FlashAttention 3, called as its attention backend does.

    The schedule is made once and serves every layer, as in vLLM. It must come from the same
    ``num_splits`` as the kernel's, or the output is silently wrong.
    """
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    rows, width, heads, head_dim = call.queries.shape
    queries, out = call.flat()
    schedule = get_scheduler_metadata(
        batch_size=rows,
        max_seqlen_q=width,
        max_seqlen_k=call.max_len,
        num_heads_q=heads,
        num_heads_kv=call.shape.kv_heads,
        headdim=head_dim,
        cache_seqlens=call.lens,
        qkv_dtype=DTYPE,
        cu_seqlens_q=call.starts,
        page_size=call.page,
        causal=True,
        window_size=(-1, -1),
        num_splits=num_splits,
    )

    def run(cache: torch.Tensor) -> None:
        keys, values = call.views(cache)
        flash_attn_varlen_func(
            q=queries,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=call.starts,
            max_seqlen_q=width,
            seqused_k=call.lens,
            max_seqlen_k=call.max_len,
            softmax_scale=head_dim**-0.5,
            causal=True,
            window_size=[-1, -1],
            block_table=call.table,
            softcap=0,
            scheduler_metadata=schedule,
            fa_version=3,
            num_splits=num_splits,
        )

    return run


def triton_attention(call: Call, num_splits: int) -> Callable[[torch.Tensor], object]:
    """This package's kernel."""
    from dustin_vllm.triton_kernels import attention_workspace, paged_attention

    rows, width, heads, head_dim = call.queries.shape
    queries, out = call.flat()
    kv_heads = call.shape.kv_heads
    workspace = attention_workspace(
        rows,
        kv_heads,
        width * heads // kv_heads,
        head_dim,
        rows * kv_heads * num_splits,
        queries.device,
    )

    def run(cache: torch.Tensor) -> None:
        keys, values = call.views(cache)
        paged_attention(
            out,
            queries,
            keys,
            values,
            call.table,
            call.lens,
            call.starts,
            width,
            head_dim**-0.5,
            workspace,
            num_splits,
        )

    return run


def cuda_attention(
    call: Call, num_splits: int, tuning: int = 0
) -> Callable[[torch.Tensor], object]:
    """This package's kernel in CUDA C++.

    Args:
        tuning: of the library, 0 for its own choice.

    Raises:
        Unavailable: it is not for this device or shape, or cannot be built.
    """
    from dustin_vllm import cuda_ops

    _, width, heads, head_dim = call.queries.shape
    queries, out = call.flat()
    why = cuda_ops.why_not(head_dim, width * heads // call.shape.kv_heads, DTYPE)
    if why is not None:
        raise Unavailable(why)
    try:
        library = cuda_ops.load(cuda_ops.build())
    except cuda_ops.BuildError as error:
        raise Unavailable(str(error)) from error

    def run(cache: torch.Tensor) -> None:
        keys, values = call.views(cache)
        cuda_ops.paged_attention(
            *(out, queries, keys, values, call.table, call.lens, call.starts),
            *(width, head_dim**-0.5, num_splits),
            tuning=tuning,
            early=True,  # as in the engine
            library=library,
        )

    return run


# Why xformers' dispatcher refuses every operator when its compiled library does not load.
NOT_BUILT = "xFormers wasn't build with CUDA support"


def xformers_attention(call: Call, num_splits: int) -> Callable[[torch.Tensor], object]:
    """xformers' split-K attention under its paged, causal block-diagonal mask.

    Of xformers' operators that know pages it is the one that is not compiled into its wheel but
    written in Triton, so it runs beside any torch. It is asked directly, since xformers' dispatcher
    refuses every operator when its compiled library does not fit the torch. Heads of a group share
    their keys by a stride of 0, which it turns into query rows.

    Raises:
        Unavailable: not installed, pages too short for it, or it refuses the inputs.
    """
    rows, width, heads, head_dim = call.queries.shape
    if call.page < 16:
        raise Unavailable(f"its tiles lie within pages: 16 tokens or more, not {call.page}")
    try:
        from xformers.ops import fmha
        from xformers.ops.fmha import attn_bias, triton_splitk
    except Exception as error:  # its wheel is built for one torch and can fail in many ways
        raise Unavailable(f"{type(error).__name__}: {error}") from error
    operator = triton_splitk.FwOp.get_operator(num_splits, block_n=min(64, call.page))
    kv_heads, device = call.shape.kv_heads, call.queries.device
    mask = attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        [width] * rows,
        call.lens.tolist(),
        call.table[:, : -(-call.max_len // call.page)],
        call.page,
        device=device,
    )
    group = heads // kv_heads
    queries = call.queries.view(1, rows * width, kv_heads, group, head_dim)

    def grouped(pages: torch.Tensor) -> torch.Tensor:
        return pages.flatten(0, 1)[None, :, :, None].expand(-1, -1, -1, group, -1)

    def run(cache: torch.Tensor) -> None:
        if not cache.is_contiguous():
            raise Unavailable("it would copy an HND cache")
        keys, values = (grouped(pages) for pages in call.views(cache))
        inputs = fmha.Inputs(queries, keys, values, mask, scale=head_dim**-0.5)
        reasons = [r for r in operator.not_supported_reasons(inputs) if r != NOT_BUILT]
        if reasons:
            raise Unavailable("; ".join(reasons))
        call.out = operator.apply(inputs, needs_gradient=False)[0].view(call.queries.shape)

    return run


@dataclass(frozen=True)
class Kernel:
    """A column of the benchmark."""

    make: Attention
    splits: Sequence[int]  # candidates of num_splits
    # Only compared with: what it cannot do or gets wrong is reported and fails nothing.
    peer: bool = False


KERNELS = {
    "flash": Kernel(flash_attention, (1, 4, 8, 32, 0)),
    "triton": Kernel(triton_attention, (1, 2, 4, 8)),
    "cuda": Kernel(cuda_attention, (1, 2, 4)),
    "xformers": Kernel(xformers_attention, (1, 4), peer=True),
}
DENSE_KERNELS = {
    "flash": Kernel(flash_attention, (0, 32)),  # FA3's heuristics; vLLM's bound in full graphs
    "xformers": Kernel(xformers_attention, (1, 16), peer=True),
}
