# SPDX-License-Identifier: Apache-2.0
"""CPU scoring ops against the reference: every instruction set this CPU has, and torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from dustin_vllm import cpu_ops, reference

ISAS = ["scalar", "avx2", "avx512", "avx512_bf16", "amx"]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-3, torch.float16: 2e-3}


@pytest.fixture(params=["torch", *ISAS])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs the test on the torch path and under every instruction set of this CPU."""
    if request.param == "torch":
        monkeypatch.setattr(cpu_ops, "_library", lambda: None)
        yield request.param
        return
    if not cpu_ops.is_built():
        pytest.skip("C++ library not built")
    try:
        cpu_ops.force_isa(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    yield request.param
    cpu_ops.force_isa("auto")


def pack(keys: torch.Tensor, layout: str) -> torch.Tensor:
    """Inverse of unpack_keys, written independently of it: [..., block_size, D]."""
    *outer, block_size, dim = keys.shape
    if layout == "amx":
        packed = torch.stack(
            [
                keys[..., 16 * group : 16 * group + 16, 2 * d : 2 * d + 2]
                for group in range(block_size // 16)
                for d in range(dim // 2)
            ],
            dim=-3,
        )
    else:
        packed = torch.stack([keys[..., d] for d in range(dim)], dim=-2)
    return packed.reshape(*outer, block_size, dim)


class Case(NamedTuple):
    """Arguments of token_scores_ for several sequences, and what the reference needs."""

    args: dict[str, Any]
    keys: list[torch.Tensor]  # per row [L, Hkv, D] fp32

    def expected(self, row: int, aggregate: str) -> torch.Tensor:
        queries = self.args["queries"][row].float()
        # One key head per scoring head, so that the reference's h // group is the identity.
        keys = self.keys[row][:, self.args["kv_heads"].long()]
        scores = reference.token_scores(queries, keys, self.args["scale"], aggregate)
        rows = queries.shape[0] * queries.shape[1]
        return scores * rows * self.args["weight"] if aggregate == "mean" else scores


def make_case(
    dtype: torch.dtype = torch.float32,
    layout: str = "vec",
    dim: int = 64,
    kv_heads: tuple[int, ...] = (0, 0, 1, 1),
    num_kv_heads: int = 2,
    block_size: int = 32,
    lengths: tuple[int, ...] = (70, 0, 300, 64),
    num_queries: int = 3,
    seed: int = 0,
) -> Case:
    """Sequences scattered over a cache view whose every unused element is NaN."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    blocks = [-(-length // block_size) for length in lengths]
    num_blocks = sum(blocks) + 3
    cache = torch.full((num_blocks, num_kv_heads, 2 * block_size, dim), float("nan"), dtype=dtype)
    key_cache = cache.chunk(2, dim=2)[0]  # as cpu_attn does: the values lie in between
    order = torch.randperm(num_blocks, generator=generator).int()
    table = torch.full((len(lengths), max(blocks) + 1), -1, dtype=torch.int32)
    keys = []
    for row, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
        mine, order = order[:count], order[count:]
        table[row, :count] = mine
        padded = torch.full((count * block_size, num_kv_heads, dim), float("nan"), dtype=dtype)
        padded[:length] = normal(length, num_kv_heads, dim).to(dtype)
        by_block = padded.view(count, block_size, num_kv_heads, dim).transpose(1, 2)
        key_cache[mine.long()] = pack(by_block, layout)
        keys.append(padded[:length].float())
    # A large norm makes the softmax sharp, so that a wrong maximum would show.
    queries = 3 * normal(len(lengths), num_queries, len(kv_heads), dim)
    return Case(
        {
            "queries": queries.to(dtype),
            "key_cache": key_cache,
            "block_table": table,
            "seq_lens": torch.tensor(lengths, dtype=torch.int32),
            "kv_heads": torch.tensor(kv_heads, dtype=torch.int32),
            "scale": dim**-0.5,
            "weight": 0.125,
            "layout": layout,
        },
        keys,
    )


def check(case: Case, aggregate: str) -> None:
    """Two accumulated calls equal the reference; positions past seq_lens stay NaN."""
    lengths = case.args["seq_lens"].tolist()
    out = torch.full((len(lengths), max(lengths) + 5), float("nan"))
    for row, length in enumerate(lengths):
        out[row, :length] = 0
    calls = 2
    for _ in range(calls):
        cpu_ops.token_scores_(out, **case.args, aggregate=aggregate)
    for row, length in enumerate(lengths):
        assert out[row, length:].isnan().all()
        if length:
            want = case.expected(row, aggregate) * (calls if aggregate == "mean" else 1)
            error = (out[row, :length] - want).norm() / want.norm()
            assert error < TOLERANCE[case.args["queries"].dtype], (row, float(error))


LAYOUT_CASES = [
    (dtype, layout, block_size)
    for dtype in TOLERANCE
    for layout, block_size in [
        ("vec", 32),
        ("vec", 64),
        ("vec", 128),
        ("vec16", 16),
        ("vec16", 48),
        ("amx", 32),
        ("amx", 64),
        ("amx", 128),
    ]
    if layout != "amx" or dtype == torch.bfloat16
]


@pytest.mark.parametrize("aggregate", ["mean", "max"])
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize(("dtype", "layout", "block_size"), LAYOUT_CASES)
def test_token_scores(
    path: str, dtype: torch.dtype, layout: str, block_size: int, dim: int, aggregate: str
) -> None:
    lengths = (3 * block_size, 3 * block_size + 1, 0, 5, 4 * block_size - 1, 290)
    check(make_case(dtype, layout, dim, block_size=block_size, lengths=lengths), aggregate)


@pytest.mark.parametrize(("dtype", "layout"), [(torch.float32, "vec"), (torch.bfloat16, "amx")])
@pytest.mark.parametrize("num_queries", range(1, 9))
def test_query_counts(path: str, dtype: torch.dtype, layout: str, num_queries: int) -> None:
    """L = Q too, and rows whose last queries see into a chunk that the first ones do not."""
    lengths = (num_queries, 33, 256, 256 + num_queries - 1, 257, 513)
    check(make_case(dtype, layout, num_queries=num_queries, lengths=lengths), "mean")


@pytest.mark.parametrize(("dtype", "layout"), [(torch.float32, "vec"), (torch.bfloat16, "amx")])
@pytest.mark.parametrize(
    ("kv_heads", "num_kv_heads"),
    [
        ((0,), 1),
        ((2,), 4),
        ((0, 1, 2), 3),  # no sharing
        ((1,) * 7 + (0,) * 7, 2),
        ((3, 0, 3, 1, 0), 4),  # interleaved, one key head unused
        ((0,) * 23, 1),
    ],
)
def test_head_sharing(
    path: str, dtype: torch.dtype, layout: str, kv_heads: tuple[int, ...], num_kv_heads: int
) -> None:
    case = make_case(dtype, layout, kv_heads=kv_heads, num_kv_heads=num_kv_heads, num_queries=4)
    check(case, "mean")
    check(case, "max")


def test_batches_and_threads(path: str) -> None:
    """Enough rows for several batches of logits; more threads than one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check(make_case(kv_heads=(0, 1) * 8, num_queries=5, lengths=(2049, 17, 4100, 1500)), "mean")
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("queries", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("keys", "layout"),
    [(torch.float32, "vec"), (torch.bfloat16, "amx"), (torch.float16, "vec")],
)
def test_mixed_dtypes(path: str, queries: torch.dtype, keys: torch.dtype, layout: str) -> None:
    """Queries need not have the dtype of the keys, and are not rounded to it."""
    case = make_case(keys, layout)
    generator = torch.Generator().manual_seed(1)
    mixed = torch.randn(case.args["queries"].shape, generator=generator).to(queries)
    case.args["queries"] = mixed
    check(case, "mean")
    if queries == torch.float32:
        out = torch.zeros(4, 300)
        cpu_ops.token_scores_(out, **case.args, aggregate="max")
        torch.testing.assert_close(out[2], case.expected(2, "max"), rtol=1e-4, atol=1e-6)


def test_strided_arguments(path: str) -> None:
    """Views of out, queries, block_table and seq_lens, as a caller slices them."""
    case = make_case(lengths=(70, 64, 300, 33))
    args = dict(case.args)
    args["queries"] = torch.stack([args["queries"]] * 2, dim=2).flatten(2, 3)[:, :, ::2]
    case.args["queries"] = args["queries"]
    args["block_table"] = torch.stack([args["block_table"]] * 2, dim=-1)[..., 0]
    args["seq_lens"] = torch.stack([args["seq_lens"]] * 2, dim=-1)[:, 0]
    wide = torch.zeros(4, 1000)
    cpu_ops.token_scores_(wide[:, 100:400], **args, aggregate="mean")
    assert (wide[:, :100] == 0).all()
    assert (wide[:, 400:] == 0).all()
    want = case.expected(2, "mean")
    assert (wide[2, 100:400] - want).norm() / want.norm() < 1e-5


def test_extreme_values(path: str) -> None:
    """fp16 subnormals, and logits so far apart that most probabilities vanish."""
    small = make_case(torch.float16, num_queries=1)
    finite = ~small.args["key_cache"].isnan()
    small.args["key_cache"][finite] *= 2.0**-18
    small.args["scale"] *= 2.0**18
    subnormal_keys = [(k.half() * 2.0**-18).float() for k in small.keys]
    check(Case(small.args, subnormal_keys), "mean")
    sharp = make_case()
    sharp.args["queries"] *= 1000
    check(sharp, "max")


def test_isa_report(path: str) -> None:
    order = ["torch", *ISAS]
    for layout, dtype in [
        ("vec", torch.float32),
        ("vec16", torch.float16),
        ("amx", torch.bfloat16),
    ]:
        name = cpu_ops.cpu_isa(layout, dtype)
        assert order.index(name) <= order.index(path)
        if layout == "amx":
            assert name == path
    with pytest.raises(ValueError, match=r"name: .* 'sse9'"):
        cpu_ops.force_isa("sse9")


@pytest.mark.parametrize("unit", [1, 16, 32])
@pytest.mark.parametrize("dilation", [*range(10), 33, 70])
def test_unit_scores(path: str, unit: int, dilation: int) -> None:
    generator = torch.Generator().manual_seed(unit + dilation)
    contexts = [0, unit - 1, unit, 3 * unit + 1, 200, 5000]
    scores = torch.rand(len(contexts), 5003, generator=generator) ** 8
    for row, context in enumerate(contexts):
        scores[row, context:] = float("nan")
    got = cpu_ops.unit_scores(scores, torch.tensor(contexts, dtype=torch.int32), unit, dilation)
    assert got.shape == (len(contexts), 5003 // unit)
    for row, context in enumerate(contexts):
        want = reference.unit_scores(scores[row], context, unit, dilation)
        torch.testing.assert_close(got[row, : len(want)], want, rtol=1e-5, atol=1e-6)
        assert (got[row, len(want) :] == 0).all()


def test_unit_scores_edges(path: str) -> None:
    contexts = torch.tensor([3, 2], dtype=torch.int32)
    scores = torch.tensor([[0.5, 0.25, 0.125], [1.0, 0.0, 0.0]])
    assert cpu_ops.unit_scores(scores, contexts, 4, 1).shape == (2, 0)
    far = cpu_ops.unit_scores(scores, contexts, 1, 50)  # a dilation longer than the context
    assert far.tolist() == [[0.5, 0.5, 0.5], [1.0, 1.0, 0.0]]
    strided = torch.stack([scores, scores], dim=-1)[..., 0]
    assert torch.equal(cpu_ops.unit_scores(strided, contexts, 1, 50), far)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("layout", "nhd", "layout must be one of vec, vec16, amx, not 'nhd'"),
        ("layout", "amx", "key_cache must be bf16 in layout 'amx', not torch.float32"),
        ("aggregate", "sum", "aggregate must be 'mean' or 'max', not 'sum'"),
        ("out", torch.zeros(4, 400).double(), "out must be torch.float32, not torch.float64"),
        ("out", torch.zeros(3, 400), r"out must have shape \[4, \*\], not \[3, 400\]"),
        ("out", torch.zeros(400, 4).T, "out must have unit column stride"),
        ("queries", torch.zeros(4, 3, 4, 32), r"queries must have shape .*, not \[4, 3, 4, 32\]"),
        ("queries", torch.zeros(4, 0, 4, 64), "queries must have Q >= 1"),
        ("queries", torch.zeros(4, 3, 4, 64).double(), "queries must be fp32, .* torch.float64"),
        ("key_cache", torch.zeros(9, 2, 32, 64).int(), "key_cache must be .* torch.int32"),
        ("key_cache", torch.zeros(9, 2, 24, 64), "multiples of 16, not 24 and 64"),
        ("key_cache", torch.zeros(9, 32, 2, 64).transpose(1, 2), "key_cache must be contiguous"),
        ("block_table", torch.zeros(4, 9).long(), "block_table must be torch.int32, .*int64"),
        ("seq_lens", torch.zeros(5).int(), r"seq_lens must have shape \[4\], not \[5\]"),
        ("seq_lens", torch.tensor([9, 9, 9, 2]).int(), r"seq_lens must be .* 3 \(Q\) .* not 2"),
        ("seq_lens", torch.tensor([9, 9, 9, 401]).int(), "seq_lens .* not 401"),
        ("kv_heads", torch.tensor([0, 0, 1, 2]).int(), r"kv_heads must be below 2 .* not 2"),
        ("kv_heads", torch.zeros(3).int(), r"kv_heads must have shape \[4\], not \[3\]"),
    ],
)
def test_token_scores_errors(argument: str, value: Any, message: str) -> None:
    args = {**make_case().args, "out": torch.zeros(4, 400), "aggregate": "mean"}
    with pytest.raises(ValueError, match=message):
        cpu_ops.token_scores_(**{**args, argument: value})


def test_bad_block(path: str) -> None:
    case = make_case()
    case.args["block_table"][2, 1] = 10_000
    with pytest.raises(RuntimeError, match="block_table names a block outside key_cache"):
        cpu_ops.token_scores_(torch.zeros(4, 400), **case.args, aggregate="mean")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unit": 0}, "unit must be positive, not 0"),
        ({"dilation": -1}, "dilation must not be negative, not -1"),
        ({"scores": torch.zeros(2, 8).half()}, "scores must be torch.float32, not torch.float16"),
        ({"contexts": torch.zeros(3).int()}, r"contexts must have shape \[2\], not \[3\]"),
        ({"contexts": torch.tensor([8, 9]).int()}, r"contexts must be from 0 to 8 \(C\), not 9"),
    ],
)
def test_unit_scores_errors(changes: dict[str, Any], message: str) -> None:
    args: dict[str, Any] = {"scores": torch.zeros(2, 8), "contexts": torch.zeros(2).int()}
    args |= {"unit": 1, "dilation": 0, **changes}
    with pytest.raises(ValueError, match=message):
        cpu_ops.unit_scores(**args)


def test_registration() -> None:
    """Schemas, mutation and fake kernels are right in the eyes of torch."""
    case = make_case()
    args = (torch.zeros(4, 400), *case.args.values(), "mean")
    torch.library.opcheck(torch.ops.dustin_vllm.token_scores_.default, args)
    unit_args = (torch.rand(2, 9), torch.tensor([9, 4], dtype=torch.int32), 2, 1)
    torch.library.opcheck(torch.ops.dustin_vllm.unit_scores.default, unit_args)


def test_missing_library_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu_ops, "_library", lambda: None)
    cpu_ops._warn_missing.cache_clear()
    # vLLM may have configured loggers that do not propagate; listen at the source.
    monkeypatch.setattr(cpu_ops.logger, "propagate", True)
    for _ in range(2):
        cpu_ops.unit_scores(torch.rand(1, 4), torch.tensor([4], dtype=torch.int32), 1, 0)
    assert not cpu_ops.is_built()
    assert cpu_ops.cpu_isa("vec", torch.float32) == "torch"
    messages = [r.message for r in caplog.records if r.name == cpu_ops.logger.name]
    assert len([m for m in messages if "not built" in m]) == 1


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize(
    ("isa", "dtype", "block_size"),
    [
        ("vec", torch.float32, 32),
        ("vec", torch.bfloat16, 128),
        ("vec", torch.float16, 64),
        ("vec16", torch.float32, 16),
        ("vec16", torch.bfloat16, 48),
        ("amx", torch.bfloat16, 32),
        ("amx", torch.bfloat16, 128),
    ],
)
def test_packing_is_vllms(isa: str, dtype: torch.dtype, block_size: int, dim: int) -> None:
    """Keys that vLLM's own op wrote into its cache come back from unpack_keys."""
    ops = pytest.importorskip("vllm._custom_ops")
    if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        pytest.skip("not the CPU build of vLLM")
    if dim % 32 and isa != "vec16":
        pytest.skip("vLLM packs such heads as vec16 only")
    if isa == "amx":
        if not torch.cpu._is_amx_tile_supported():
            pytest.skip("no AMX")
        torch.cpu._init_amx()
    heads, tokens = 2, 3 * block_size - 5
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(tokens, heads, dim, generator=generator).to(dtype)
    cache = torch.zeros(5, heads, block_size, 2 * dim, dtype=dtype)
    key_cache, value_cache = cache.view(5, heads, 2 * block_size, dim).chunk(2, dim=2)
    blocks = torch.tensor([4, 0, 2])
    slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()[:tokens]
    ops.cpu_attn_reshape_and_cache(key, key + 1, key_cache, value_cache, slots, isa)
    rows = cpu_ops.unpack_keys(key_cache, layout=isa)[blocks].transpose(1, 2).flatten(0, 1)
    assert torch.equal(rows[:tokens], key)


@pytest.mark.parametrize("layout", ["vec", "amx"])
def test_unpack_keys(layout: str) -> None:
    keys = torch.randn(3, 2, 64, 48).bfloat16()
    assert torch.equal(cpu_ops.unpack_keys(pack(keys, layout), layout), keys)
