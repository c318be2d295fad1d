"""Times CUDA v3 of the verification kernel against FA3 and Triton. See cases() for what.

The parent starts a worker that goes through all cases in order; a case that hangs or kills the
worker costs that case only. Results: printed, and appended to $OUT/cuda_v3.json (JSON lines).
``--dry [emulator.so]``: tiny sizes on the CPU, without FA3 and Triton.
"""

import ctypes
import json
import os
import pathlib
import queue
import statistics
import subprocess
import sys
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
CAP, CASE_S, START_S = 75.0, 7.0, 60.0
BLOCK, K, CONTEXT = 16, 512, 32768
DRY = "--dry" in sys.argv

# name: (rows, heads, kv_heads, head_dim, queries); with "-p1", pages of one token
SHAPES = {
    "72B-b16": (16, 64, 8, 128, 5),
    "72B-b32": (32, 64, 8, 128, 5),
    "72B-b4": (4, 64, 8, 128, 5),
    "draft-q6": (16, 14, 2, 64, 6),
    "draft-q1": (16, 14, 2, 64, 1),
    "7B-b16": (16, 28, 4, 128, 5),
    "TP2-b16": (16, 32, 4, 128, 5),
}
SHAPES.update({name + "-p1": shape for name, shape in list(SHAPES.items())})
# Tuning and splits: what to add to the tuning (16, 48, 112: see VariantBits in attention.cu).
CUDA = {
    "72B-b16": {(1, 1): (0, 16, 48), (3, 1): (0, 48, 112), (2, 1): (0, 48, 112), (3, 2): (0, 48)},
    "72B-b32": {(2, 1): (0, 16, 48), (3, 1): (0, 48, 112), (1, 1): (0,)},
    "72B-b4": {(3, 4): (0, 48, 112), (2, 4): (0, 48), (1, 2): (0, 48), (3, 2): (0,), (1, 4): (0,)},
    "draft-q6": {(3, 4): (0, 48), (2, 4): (0, 48), (1, 2): (0,), (3, 2): (0,)},
    "draft-q1": {(3, 4): (0, 48), (2, 4): (0, 48), (1, 2): (0,), (3, 2): (0,)},
    "7B-b16": {(1, 2): (0, 48), (3, 2): (0, 48), (1, 1): (0,)},
    "TP2-b16": {(1, 2): (0, 48), (3, 2): (0, 48)},
}
FEWER = {  # with pages of one token
    "72B-b16": {(1, 1): (0, 48), (3, 1): (0, 48), (2, 1): (0,), (3, 2): (0, 48)},
    "72B-b32": {(2, 1): (0, 48), (3, 1): (0, 48)},
    "72B-b4": {(3, 4): (0, 48), (2, 4): (0,), (1, 2): (0,)},
    "draft-q6": {(3, 4): (0,), (2, 4): (0,)},
    "draft-q1": {(3, 4): (0,), (2, 4): (0,)},
    "7B-b16": {(1, 2): (0,), (3, 2): (0,)},
    "TP2-b16": {(1, 2): (0,), (3, 2): (0,)},
}
TRITON = {
    "72B-b16": 1,
    "72B-b32": 1,
    "72B-b4": 4,
    "draft-q6": 4,
    "draft-q1": 4,
    "7B-b16": 2,
    "TP2-b16": 2,
}
LOADS = {
    "72B-b16": [(12, 1), (13, 1), (8, 4)],
    "72B-b32": [(13, 1), (8, 2)],
    "72B-b4": [(13, 4), (12, 2), (8, 8)],
}


def cases():
    result = []
    for shape in [
        x + page
        for x in ("72B-b16", "72B-b32", "72B-b4", "draft-q6", "draft-q1", "7B-b16", "TP2-b16")
        for page in ("", "-p1")
    ]:
        base, by_token = shape.removesuffix("-p1"), shape.endswith("-p1")
        tried = FEWER[base] if by_token else CUDA[base]
        result += [
            (shape, "cuda", [tuning + bits, splits])
            for (tuning, splits), all_bits in tried.items()
            for bits in all_bits
        ]
        result += [(shape, "fa3", [splits]) for splits in (1, 4)]
        result += [(shape, "triton", [TRITON[base], 64, 4, 5])]
        loads = LOADS.get(base, [])
        result += [(shape, "load", list(x)) for x in (loads[:1] if by_token else loads)]
    # Keys and values have (stages - 1) // 2 buffers in Triton 3.6: more of them in flight.
    for shape in ("72B-b16", "72B-b16-p1", "72B-b32-p1", "draft-q6-p1", "draft-q1-p1"):
        splits = TRITON[shape.removesuffix("-p1")]
        for tuning in ((64, 4, 7), (64, 4, 9), (128, 8, 5), (32, 4, 9)):
            result.append((shape, "triton", [splits, *tuning]))
    return result


# ---- worker -------------------------------------------------------------------------------


def load_library():
    path = HERE / "cuda_v3.so"
    if DRY:
        path = sys.argv[sys.argv.index("--dry") + 1]
    lib = ctypes.CDLL(str(path))
    pointer, i64, i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    lib.dustin_paged_attention.argtypes = (
        [pointer] * 7 + [i64] * 8 + [i32] * 9 + [ctypes.c_float, pointer]
    )
    lib.dustin_paged_attention.restype = ctypes.c_int
    return lib


class Inputs:
    def __init__(self, torch, flat, name, device, l2):
        rows, heads, kv_heads, dim, width = SHAPES[name]
        context, k = (CONTEXT, K) if not DRY else (512, 128)
        self.page = page = 1 if name.endswith("-p1") else BLOCK
        if DRY:
            rows = 2
        self.torch, self.rows, self.heads, self.kv_heads = torch, rows, heads, kv_heads
        self.dim, self.width, self.device = dim, width, device
        gen = torch.Generator().manual_seed(5)
        contexts = context - torch.arange(rows) * 7 % 49
        per_row = -(-(context + width) // BLOCK)
        blocks = rows * per_row + 1
        order = (torch.randperm(rows * per_row, generator=gen) + 1).view(rows, per_row)
        table = torch.zeros(rows, k // page + 2 * BLOCK, dtype=torch.int32)
        lens = torch.zeros(rows, dtype=torch.int32)
        for row in range(rows):
            whole = int(contexts[row]) // BLOCK  # blocks that are selected from
            units = k // page
            if page == 1:  # single tokens of all whole blocks, then the rest of the context
                chosen = torch.randperm(whole * BLOCK, generator=gen)[:units].sort().values
            else:
                picked = torch.randperm(whole - 5, generator=gen)[: units - 5] + 1
                chosen = torch.cat(
                    [torch.tensor([0]), picked.sort().values, torch.arange(whole - 4, whole)]
                )
            assert len(chosen) == units and len(set(chosen.tolist())) == units
            first = whole * BLOCK // page
            rest = torch.arange(
                first, first + -(-(int(contexts[row]) + width - whole * BLOCK) // page)
            )
            logical = torch.cat([chosen, rest])
            if page == 1:
                pages = order[row][logical // BLOCK] * BLOCK + logical % BLOCK
            else:
                pages = order[row][logical]
            table[row, : len(pages)] = pages
            lens[row] = k + int(contexts[row]) - whole * BLOCK + width
        self.max_len = k + BLOCK + width
        self.tokens = int(lens.sum())
        self.bytes = (self.tokens * kv_heads * 2 * dim + 2 * rows * width * heads * dim) * 2
        size = blocks * BLOCK * kv_heads * 2 * dim
        layers = min(64, max(4, -(-5 * l2 // self.bytes)), flat.numel() // size)
        assert layers > 0
        self.caches = [
            flat[i * size : (i + 1) * size].view(blocks * BLOCK // page, page, kv_heads, 2 * dim)
            for i in range(layers)
        ]
        self.queries = torch.empty(
            rows * width, heads, dim, dtype=torch.bfloat16, device=device
        ).normal_()
        self.others = torch.empty_like(self.queries).copy_(self.queries)
        self.out = torch.empty_like(self.queries)
        self.table, self.lens = table.to(device), lens.to(device)
        self.starts = torch.arange(0, rows * width + 1, width, dtype=torch.int32, device=device)
        self.expected = self.reference(self.caches[-1])
        self.passes = max(1, 48 // layers)

    def views(self, cache):
        return cache[..., : self.dim], cache[..., self.dim :]

    def reference(self, cache):
        torch = self.torch
        group = self.heads // self.kv_heads
        outs = []
        for row in range(self.rows):
            n = int(self.lens[row])
            kv = cache[self.table[row, : -(-n // self.page)].long()].flatten(0, 1)[:n].float()
            keys, values = kv[..., : self.dim], kv[..., self.dim :]
            q = self.queries[row * self.width : (row + 1) * self.width].float()
            q = q.view(self.width, self.kv_heads, group, self.dim)
            logits = torch.einsum("qhgd,nhd->hgqn", q, keys) * self.dim**-0.5
            seen = (
                torch.arange(n, device=self.device)[None, :]
                <= (n - self.width + torch.arange(self.width, device=self.device))[:, None]
            )
            p = logits.masked_fill(~seen, float("-inf")).softmax(-1)
            outs.append(
                torch.einsum("hgqn,nhd->qhgd", p, values).reshape(self.width, self.heads, self.dim)
            )
        return torch.cat(outs)


def fa3(x, splits):
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    schedule = get_scheduler_metadata(
        batch_size=x.rows,
        max_seqlen_q=x.width,
        max_seqlen_k=x.max_len,
        num_heads_q=x.heads,
        num_heads_kv=x.kv_heads,
        headdim=x.dim,
        cache_seqlens=x.lens,
        qkv_dtype=x.torch.bfloat16,
        cu_seqlens_q=x.starts,
        page_size=x.page,
        causal=True,
        window_size=(-1, -1),
        num_splits=splits,
    )

    def run(cache):
        keys, values = x.views(cache)
        flash_attn_varlen_func(
            q=x.queries,
            k=keys,
            v=values,
            out=x.out,
            cu_seqlens_q=x.starts,
            max_seqlen_q=x.width,
            seqused_k=x.lens,
            max_seqlen_k=x.max_len,
            softmax_scale=x.dim**-0.5,
            causal=True,
            window_size=[-1, -1],
            block_table=x.table,
            softcap=0,
            scheduler_metadata=schedule,
            fa_version=3,
            num_splits=splits,
        )

    return run


def triton(x, splits, tile, warps, stages):
    from dustin_vllm.triton_kernels import attention_workspace, paged_attention
    from dustin_vllm.triton_kernels.attention import Tuning

    work = attention_workspace(
        x.rows,
        x.kv_heads,
        x.width * x.heads // x.kv_heads,
        x.dim,
        x.rows * x.kv_heads * splits,
        x.device,
    )
    tuning = Tuning(tile, warps, stages)

    def run(cache):
        keys, values = x.views(cache)
        paged_attention(
            x.out,
            x.queries,
            keys,
            values,
            x.table,
            x.lens,
            x.starts,
            x.width,
            x.dim**-0.5,
            work,
            splits,
            tuning,
        )

    return run


def cuda(x, lib, variant, splits):
    torch = x.torch

    def run(cache):
        keys, values = x.views(cache)
        stream = None if DRY else torch.cuda.current_stream().cuda_stream
        page, token, head, _ = keys.stride()
        code = lib.dustin_paged_attention(
            x.out.data_ptr(),
            x.queries.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            x.table.data_ptr(),
            x.lens.data_ptr(),
            x.starts.data_ptr(),
            x.queries.stride(0),
            x.queries.stride(1),
            x.out.stride(0),
            x.out.stride(1),
            page,
            token,
            head,
            x.table.stride(0),
            x.rows,
            x.kv_heads,
            x.heads // x.kv_heads,
            x.dim,
            x.page,
            x.width,
            splits,
            1,
            variant,
            x.dim**-0.5,
            stream,
        )
        if code:
            raise RuntimeError(f"dustin_paged_attention: {code}")

    return run


def load(x, library, variant, splits):
    torch = x.torch
    sink = torch.zeros(1024, dtype=torch.int32, device=x.device)
    pointer, i64, i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    library.load_floor.argtypes = [pointer] * 3 + [i64] * 4 + [i32] * 6 + [pointer] * 2

    def run(cache):
        keys, _ = x.views(cache)
        page, token, head, _ = keys.stride()
        code = library.load_floor(
            keys.data_ptr(),
            x.table.data_ptr(),
            x.lens.data_ptr(),
            page * 2,
            token * 2,
            head * 2,
            x.table.stride(0),
            x.rows,
            x.kv_heads,
            x.dim * 4,
            x.page,
            splits,
            variant,
            sink.data_ptr(),
            torch.cuda.current_stream().cuda_stream,
        )
        if code:
            raise RuntimeError(f"load_floor: {code}")

    return run


def time_graph(torch, record, calls, prepare=None):
    if DRY:
        record()
        return 1.0, 1.0
    record()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        record()
    if prepare:
        prepare()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(60)]

    def replay(count):
        torch.cuda._sleep(4_000_000)
        for start, end in events[:count]:
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1000 / calls for start, end in events[:count]]

    first = min(replay(3)) * calls
    times = sorted(replay(int(min(60, max(8, 20_000 / max(first, 1.0))))))
    return statistics.median(times), times[len(times) // 10]


def worker():
    import torch

    todo = json.loads(sys.stdin.readline())
    emit = lambda **kw: print(json.dumps(kw), flush=True)
    lib = load_library()
    floor_lib = None if DRY else ctypes.CDLL(str(HERE / "load.so"))
    device, l2, bandwidth = "cpu", 1, 1e12
    if DRY:
        flat = torch.empty(1 << 22, dtype=torch.bfloat16).normal_()
    else:
        device = "cuda"
        props = torch.cuda.get_device_properties(0)
        l2 = props.L2_cache_size
        free, _ = torch.cuda.mem_get_info()
        flat = torch.empty(int(min(18e9, free * 0.6)) // 2, dtype=torch.bfloat16, device=device)
        for begin in range(0, flat.numel(), 1 << 30):
            flat[begin : begin + (1 << 30)].normal_()
        a, b = flat[: 1 << 29], flat[1 << 29 : 1 << 30]
        us, _ = time_graph(torch, lambda: torch.neg(a, out=b), 1)
        bandwidth = 4 * a.numel() / (us * 1e-6)
        one = torch.zeros(1, device=device)

        def tiny():
            for _ in range(100):
                one.add_(1)

        us, _ = time_graph(torch, tiny, 100)
        emit(
            device=props.name,
            l2=l2,
            copy_TBps=round(bandwidth / 1e12, 3),
            us_of_a_tiny_kernel_in_a_graph=round(us, 2),
            torch=torch.__version__,
        )
        for module in ("vllm.vllm_flash_attn", "dustin_vllm.triton_kernels"):
            try:  # here, where there is time for it
                __import__(module)
            except Exception as error:
                emit(module=module, failed=f"{type(error).__name__}: {error}"[:300])
        begin = time.monotonic()
        try:  # the first call of FA3 in a process took more than 9 s
            warm = Inputs(torch, flat, "72B-b4", device, l2)
            fa3(warm, 1)(warm.caches[0])
            torch.cuda.synchronize()
        except Exception as error:
            emit(warm_up="fa3", failed=f"{type(error).__name__}: {error}"[:300])
        emit(fa3_first_call_s=round(time.monotonic() - begin, 1))
    emit(ready=True)
    name, x, copy_us = None, None, 0.0
    for index, (shape, kernel, parameters) in todo:
        emit(begin=index)
        try:
            if shape != name:
                x = None
                x = Inputs(torch, flat, shape, device, l2)
                name = shape
                n = x.passes * len(x.caches)

                def copies():
                    for _ in range(n):
                        x.queries.copy_(x.others)

                copy_us, _ = time_graph(torch, copies, n)
            make = {"fa3": fa3, "triton": triton}.get(kernel)
            if kernel == "load":
                run = load(x, floor_lib, *parameters)
            else:
                run = cuda(x, lib, *parameters) if make is None else make(x, *parameters)

            def record(between=False):
                for _ in range(x.passes):
                    for cache in x.caches:
                        if between:
                            x.queries.copy_(x.others)
                        run(cache)

            n = x.passes * len(x.caches)
            us, low = time_graph(torch, record, n, lambda: x.out.fill_(float("nan")))
            error = float((x.out.float() - x.expected).norm() / x.expected.norm())
            both, _ = time_graph(torch, lambda: record(True), n, lambda: x.out.fill_(float("nan")))
            error2 = float((x.out.float() - x.expected).norm() / x.expected.norm())
            floor = x.bytes / bandwidth * 1e6
            emit(
                end=index,
                shape=shape,
                kernel=kernel,
                parameters=parameters,
                us=round(us, 3),
                us_p10=round(low, 3),
                us_after_copy=round(both - copy_us, 3),
                copy_us=round(copy_us, 3),
                error=error,
                error_after_copy=error2,
                correct=kernel == "load" or (error < 1e-2 and error2 < 1e-2),
                floor_us=round(floor, 3),
                of_floor=round(us / floor, 2),
                TBps=round(x.bytes / us * 1e-6, 3),
                layers=len(x.caches),
                tokens=x.tokens,
            )
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:300]
            emit(end=index, shape=shape, kernel=kernel, parameters=parameters, failed=text)
            if "CUDA error" in text or "illegal" in text:
                os._exit(1)  # the context is lost


# ---- parent -------------------------------------------------------------------------------


def main():
    begin = time.monotonic()
    cap = 600 if DRY else CAP
    out = pathlib.Path(os.environ.get("OUT", ".")) / "cuda_v3.json"
    todo = list(enumerate(cases()))
    if DRY:
        todo = [c for c in todo if c[1][1] == "cuda"][:: int(os.environ.get("EVERY", "9"))]
    results = []

    def keep(line):
        results.append(line)
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if "us" in line:
            print(
                f"{line['shape']:13} {line['kernel']:10} {line['parameters']!s:15} "
                f"{line['us']:8.2f} us  after copy {line['us_after_copy']:8.2f}  "
                f"{line['of_floor']:5.2f}x floor {line['floor_us']:.2f}  err {line['error']:.1e}"
                f"{'' if line['correct'] else '  WRONG'}",
                flush=True,
            )
        else:
            print(line, flush=True)

    restarts = 0
    while todo and time.monotonic() - begin < cap and restarts < 6:
        restarts += 1
        process = subprocess.Popen(
            [sys.executable, __file__, "--worker", *sys.argv[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        process.stdin.write(json.dumps(todo) + "\n")
        process.stdin.flush()
        lines = queue.Queue()

        def pump(stream=process.stdout, lines=lines):
            for line in stream:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=pump, daemon=True).start()
        current, patience = None, START_S
        while True:
            left = cap - (time.monotonic() - begin)
            try:
                line = lines.get(timeout=max(0.1, min(600 if DRY else patience, left)))
            except queue.Empty:
                line = None
                if current is not None:
                    keep(
                        {
                            "end": current,
                            "case": dict(todo)[current],
                            "failed": "no answer in time" if left > 0 else "total time is up",
                        }
                    )
            else:
                if line is None and current is not None:
                    process.wait()
                    keep(
                        {
                            "end": current,
                            "case": dict(todo)[current],
                            "failed": f"worker died: {process.returncode}",
                        }
                    )
            if line is None:
                if current is not None:
                    todo = [c for c in todo if c[0] > current]
                break
            if not line.startswith("{"):
                continue
            data = json.loads(line)
            if "ready" in data or "end" in data:
                patience = CASE_S
            if "begin" in data:
                current = data["begin"]
            elif "end" in data:
                keep(data)
                todo = [c for c in todo if c[0] > data["end"]]
                current = None
            elif "ready" not in data:
                keep(data)
        process.kill()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            pass
    print(
        f"--- best by shape and kernel ({time.monotonic() - begin:.0f} s, "
        f"{len(todo)} cases not reached)"
    )
    for shape in SHAPES:
        for kernel in ("load", "fa3", "triton", "cuda"):
            mine = [
                r
                for r in results
                if r.get("shape") == shape and r.get("correct") and r["kernel"] == kernel
            ]
            if mine:
                a = min(mine, key=lambda r: r["us"])
                b = min(mine, key=lambda r: r["us_after_copy"])
                print(
                    f"{shape:13} {kernel:10} {a['us']:7.2f} {a['parameters']}; after copy "
                    f"{b['us_after_copy']:7.2f} {b['parameters']}; floor {a['floor_us']}"
                )
    bad = [r for r in results if "failed" in r or r.get("correct") is False]
    print(f"{len(bad)} failed or wrong", *[json.dumps(r)[:200] for r in bad[:20]], sep="\n")


if __name__ == "__main__":
    worker() if "--worker" in sys.argv else main()
