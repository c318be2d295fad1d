# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernel against the reference: on a GPU, or else its source in a CPU emulator."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from test_triton_kernels import CUDA, LENS, check_attention, int32, on_device  # noqa: F401

from dustin_vllm import cuda_ops

HERE = Path(__file__).parent
if not CUDA and shutil.which("g++") is None:
    pytest.skip("needs a GPU or g++", allow_module_level=True)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The kernel for this GPU, or its source compiled for the CPU (emu.h takes ptx.h's place)."""
    if CUDA:
        return cuda_ops.load(cuda_ops.build())
    folder = tmp_path_factory.mktemp("emulator")
    # What may be read early, test.cpp checks.
    (folder / "all.cpp").write_text(
        '#include "emu.h"\n#include "attention.cu"\nstatic bool early = emu::early_ok = true;\n'
    )
    command = ["g++", "-std=c++17", "-O1", "-w", "-mf16c", "-shared", "-fPIC"]
    command += ["-I", str(HERE / "cuda_emulator"), "-I", str(cuda_ops.sources()[0].parent)]
    subprocess.run([*command, "-o", "all.so", "all.cpp"], cwd=folder, check=True)
    return cuda_ops.load(folder / "all.so")


@pytest.fixture
def launch(library):
    return functools.partial(cuda_ops.paged_attention, library=library)


NEW = (5, 1, 5, 0, 3, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 2, 7, 8])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_attention(launch, dtype, head_dim, group, page_size, num_splits) -> None:
    check_attention(LENS, NEW, dtype, head_dim, 2, group, page_size, num_splits, "nhd", launch)


@pytest.mark.parametrize("queries", [1, 2, 6, 8])
@pytest.mark.parametrize("tuning", [0, 1, 2])
@pytest.mark.parametrize("num_splits", [1, 2, 8])
def test_attention_of_every_tuning(launch, queries, tuning, num_splits) -> None:
    lens = [queries, queries + 1, 129, 1300]
    launch = functools.partial(launch, tuning=tuning, early=num_splits == 2)
    check_attention(lens, [queries] * 4, torch.bfloat16, 128, 1, 5, 1, num_splits, "nhd", launch)


@pytest.mark.parametrize("page_size", [16, 32])
def test_attention_of_the_other_layout(launch, page_size) -> None:
    check_attention(LENS, NEW, torch.bfloat16, 128, 2, 8, page_size, 1, "hnd", launch)


@pytest.mark.parametrize("tuning", [1, 2])
def test_a_quarter_of_the_weights_is_not_rounded(launch, tuning) -> None:
    """Rounding all weights, too, makes 1.4 of the output's own error; three quarters 1.3."""
    length, queries, heads, group, head_dim = 530, 5, 2, 8, 128
    cache = torch.randn(length, 1, heads, 2 * head_dim).bfloat16()
    asked = torch.randn(queries, heads * group, head_dim).bfloat16()
    out = torch.full_like(asked, torch.nan)
    table = torch.randperm(length).int()[None]
    launch(
        *(out, asked, *cache.split(head_dim, dim=-1), table, int32([length])),
        *(int32([0, queries]), queries, head_dim**-0.5),
        tuning=tuning,
    )
    keys, values = cache[table[0].long(), 0].double().split(head_dim, dim=-1)
    grouped = asked.double().view(queries, heads, group, head_dim)
    logits = torch.einsum("qhgd,khd->hgqk", grouped, keys) * head_dim**-0.5
    seen = torch.arange(length) < length - queries + 1 + torch.arange(queries)[:, None]
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    exact = torch.einsum("hgqk,khd->qhgd", weights, values).flatten(1, 2)
    rounding = (exact.bfloat16().double() - exact).norm()
    assert (out.double() - exact).norm() < 1.35 * rounding


def test_what_does_not_fit_is_refused(launch) -> None:
    cache = torch.zeros(4, 16, 2, 128, dtype=torch.bfloat16)
    queries = torch.zeros(6, 8, 64, dtype=torch.bfloat16)
    arguments = {
        "out": torch.zeros_like(queries),
        "queries": queries,
        "key_cache": cache[..., :64],
        "value_cache": cache[..., 64:],
        "block_table": int32([[1], [2]]),
        "seq_lens": int32([5, 6]),
        "query_starts": int32([0, 3, 6]),
        "max_queries": 3,
        "scale": 0.1,
    }
    launch(**arguments)
    for changes, message in (
        ({"max_queries": 17}, "17 queries of 4 heads"),
        ({"num_splits": 3}, "1, 2, 4 or 8, not 3"),
        ({"value_cache": cache[..., :64]}, "must follow its keys"),
        ({"query_starts": int32([0, 3])}, "query_starts must be"),
        (
            {
                name: arguments[name].float()
                for name in ("out", "queries", "key_cache", "value_cache")
            },
            "fp16 or bf16",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            launch(**{**arguments, **changes})


def test_tensors_elsewhere_are_refused() -> None:
    tensors = [torch.zeros(2, 8, 64, dtype=torch.bfloat16, device="cpu") for _ in range(2)]
    cache = torch.zeros(4, 16, 2, 128, dtype=torch.bfloat16, device="cpu")
    table, lens, starts = (
        torch.zeros(*size, dtype=torch.int32, device="cpu") for size in ((1, 2), (1,), (2,))
    )
    with pytest.raises(ValueError, match="must be on a GPU, not on cpu"):
        cuda_ops.paged_attention(
            *tensors, cache[..., :64], cache[..., 64:], table, lens, starts, 2, 0.1
        )
    with pytest.raises(ValueError, match="on one device, not on cpu, meta"):
        cuda_ops.paged_attention(
            *tensors, cache[..., :64], cache[..., 64:], table.to("meta"), lens, starts, 2, 0.1
        )


def test_a_build_without_a_compiler_says_so(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("DUSTIN_CACHE", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(cuda_ops.BuildError, match="no nvcc"):
        cuda_ops.build()


def test_a_build_that_fails_leaves_nothing(monkeypatch, tmp_path) -> None:
    compiler = tmp_path / "nvcc"
    compiler.write_text("#!/bin/sh\necho 'no such architecture' >&2; exit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("DUSTIN_CACHE", str(tmp_path))
    monkeypatch.setattr(cuda_ops, "find_compiler", lambda: str(compiler))
    with pytest.raises(cuda_ops.BuildError, match=r"nvcc failed \(3\):\nno such architecture"):
        cuda_ops.build()
    assert not list(tmp_path.rglob("*.so"))
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; echo made > "$2"\n')
    built = cuda_ops.build()
    assert built.read_text() == "made\n"
    compiler.unlink()
    assert cuda_ops.build() == built  # not again


def test_a_folder_that_cannot_be_written_says_so(monkeypatch, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DUSTIN_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(cuda_ops, "find_compiler", lambda: "nvcc")
    with pytest.raises(cuda_ops.BuildError, match="cannot be built: .*file"):
        cuda_ops.build()


def test_a_damaged_library_says_so(tmp_path) -> None:
    (tmp_path / "attention.so").write_text("half a library")
    with pytest.raises(cuda_ops.BuildError, match="delete .*attention.so, it does not load"):
        cuda_ops.load(tmp_path / "attention.so")


@pytest.mark.parametrize(
    ("head_dim", "pairs", "wanted"),
    [(64, 1, 4), (64, 33, 4), (64, 34, 2), (64, 67, 1), (128, 1, 2), (128, 66, 2), (128, 67, 1)],
)
def test_splits_fill_the_device(head_dim, pairs, wanted) -> None:
    assert cuda_ops.splits(pairs, head_dim, 132) == wanted
