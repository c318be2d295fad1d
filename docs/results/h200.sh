#!/usr/bin/env bash
# The measurements of this folder, on a host with H200 GPUs where vLLM and this package are installed.
#
#   h200.sh OUT PART...       parts one after the other; JSON, plots and logs go to OUT
#
# CUDA_VISIBLE_DEVICES picks the GPU; MODELS is a folder with qwen2.5-coder-0.5b and its draft, TEXT
# one with books, essays and the factbook. SHARE: the part of the GPU's memory for an evaluation that
# runs beside other parts (what is timed has to run alone). PYTEST: more of its arguments, such as
# -n 8 where pytest-xdist is installed. MAX, SOAK: other limits, in seconds, of two evaluations and a
# soak, where little time is left.
# A part that fails does not stop the next ones.
set -uo pipefail
out=$(realpath "$1"); shift
repo=$(realpath "$(dirname "$0")/../..")
models=${MODELS:-models}
pair=(--model "$models/qwen2.5-coder-0.5b" --draft "$models/qwen2.5-coder-0.5b-draft")
cd "$(mktemp -d)" || exit 1

bench() { python3 -m dustin_vllm.cli bench "$@"; }
test_files() { python3 -m pytest -q -p no:cacheprovider "$@"; }
engine() { bench engine --verbose --json "$out/$1.json" --plot "$out/$1.png" "${@:2}"; }
code() { # vLLM's own source, a long text of a programming language
  python3 -c 'import pathlib, vllm
files = sorted(pathlib.Path(vllm.__file__).parent.rglob("*.py"))
print("\n".join(f.read_text(errors="replace") for f in files))' > code.txt 2>/dev/null
}

part_attention() {
  bench attention --preset 72b --batch 4,16,32 --budget 512,1024 --json "$out/attention-72b-h200.json" --plot "$out/attention-72b-h200.png"
}
part_attention_hnd() {
  bench attention --preset 72b --batch 4,16,32 --budget 512 --granularity block --layout HND --json "$out/attention-72b-hnd-h200.json"
}
part_attention_tunings() { # TUNINGS of the CUDA kernel, each with some numbers of SPLITS
  TUNINGS="${TUNINGS:-1 2}" SPLITS="${SPLITS:-1 2 4 8}" python3 -c 'import functools, os
from dustin_vllm.bench import kernels
from dustin_vllm.cli import app
kernels.KERNELS.clear()
kernels.KERNELS["flash"] = kernels.Kernel(kernels.flash_attention, (0,))
for tuning in os.environ["TUNINGS"].split():
    made = functools.partial(kernels.cuda_attention, tuning=int(tuning))
    kernels.KERNELS[f"tuning {tuning}"] = kernels.Kernel(made, tuple(map(int, os.environ["SPLITS"].split())))
app()' bench attention --preset 72b --batch 4,16,32 --budget 512 --granularity block --json "$out/attention-72b-tunings-h200.json"
}
part_7b() { engine engine-7b-h200 --preset 7b --fill-kv --modes plain,stock,loop,dustin; }
with_kernel() { # our attention kernels in the engine
  engine "engine-7b-$1-h200" --preset 7b --fill-kv --modes dustin --dustin-json "{\"verify_kernel\": \"$1\"}"
}
part_7b_triton() { with_kernel triton; }
part_7b_cuda() { with_kernel cuda; }
part_7b_flash() { with_kernel flash; }
part_72b() { engine engine-72b-20-layers-h200 --preset 72b --layers 20 --fill-kv --modes plain,stock,dustin; }
part_7b_contexts() { # how a step grows with the context; a large batch; 2k, where every row is dense
  engine engine-7b-contexts-h200 --preset 7b --fill-kv --modes stock,dustin --steps 60 --dustin-json '{"dense_below": 4096}' \
    --cells 16x2048,64x8192,4x32768,4x65536,4x130000
}
part_pair() {
  code
  engine qwen-24k-h200 "${pair[@]}" --text code.txt --modes stock,dustin,plain --batch 32 --context 24576 --budget 1024
}
part_pair_fresh() { # the selection made within the step
  code
  engine qwen-24k-fresh-h200 "${pair[@]}" --text code.txt --modes dustin --batch 32 --context 24576 --budget 1024 --dustin-json '{"fresh_layers": [16]}'
}
part_pair_draft_budgets() { # acceptance of drafting sparsely, with dense verification
  code
  for budget in 256 512; do
    engine "qwen-draft-$budget-h200" "${pair[@]}" --text code.txt --modes lossless --batch 32 --context 16384,28672 --budget 1024 --steps 60 --dustin-json "{\"draft_budget\": $budget}"
  done
}
tp2() { # 72B shape whole; graphs for the measured batch only; Dustin's draft whole on both GPUs
  engine "$1" --preset 72b --fill-kv --tp 2 --draft-tp 1 --batch "$2" --modes plain,dustin,stock --steps 60 "${@:4}" \
    --llm-json "{\"gpu_memory_utilization\": 0.95, \"compilation_config\": {\"cudagraph_capture_sizes\": [$3]}}"
}
part_tp2_fp8() { tp2 engine-72b-fp8-tp2-h200 16 16,80 --quantization fp8; }
part_tp2_bf16() { tp2 engine-72b-bf16-tp2-h200 8 8,40; }
part_paper() { # four GPUs
  engine paper-72b-tp4-h200 --preset paper-72b --tp 4
}
calibrate() { # TEXT: a folder with books, essays and the factbook
  texts=$(find "$TEXT" -mindepth 1 -maxdepth 1 -printf '--text %p ')
  python3 -m dustin_vllm.cli calibrate "$models/qwen2.5-coder-0.5b" "$models/qwen2.5-coder-0.5b-draft" --output "$out/$1.json" \
    $texts --text "$(python3 -c 'import vllm; print(vllm.__path__[0])' 2>/dev/null)/v1" --work "work-$1" --device cuda --budget 512 "${@:2}"
}
part_calibrate() { calibrate calibrate-qwen-coder-0.5b-h200 --context 8192 --tokens --windows 16 --held-out 16 --needles 8 --trials 40 --max-seconds 900; }
part_calibrate_16k() { # no search
  calibrate calibrate-qwen-coder-0.5b-16k-h200 --settings "qwen2.5-coder-0.5b-instruct+qwen2.5-coder-0.5b-draft4" --context 16384 --held-out 16 --max-seconds 300
}
evaluate() { # quality on tasks; TEXT as above
  python3 -m dustin_vllm.cli eval "${pair[@]}" --text "$TEXT" --batch 32 --llm-json "{\"gpu_memory_utilization\": ${SHARE:-0.85}}" --json "$out/$1.json" --plot "$out/$1.png" "${@:2}"
}
part_eval_smoke() { evaluate eval-smoke --context 16384 --samples 2 --policies dustin --budget 512 --output-tokens 64 --tasks passkey,copy,continuation --max-seconds 120; }
part_eval_tasks() {
  evaluate eval-tasks-h200 --context 16384,28672 --budget 512,1024 --policies dustin,history,lookahead \
    --tasks passkey,multikey,qa,copy,edit,agreement,summary,continuation --samples 16 --max-seconds 520
}
part_eval_rivals() { # the same samples; what OUT has already is kept
  evaluate eval-rivals-h200 --context 16384,28672 --budget 1024,512 --policies dustin,streaming,static,quest --resume \
    --tasks passkey,multikey,qa,copy,edit,agreement,summary,continuation --samples 16 --max-seconds "${MAX:-520}"
}
eval_tokens() { # single tokens, as by default here
  evaluate "$1" --context 16384,28672 --granularity token --policies dustin --tasks passkey,multikey,qa,copy,edit,continuation \
    --samples 16 --max-seconds "${MAX:-300}" "${@:2}"
}
part_eval_wide() { # three of 24 layers read 4096: 1408 on average
  eval_tokens eval-wide-h200 --budget 1024 --dustin-json '{"wide_layers": [16, 21, 22]}'
}
part_eval_fresh() { # layer 16's own queries select for it and all deeper ones
  eval_tokens eval-fresh-h200 --budget 1024 --dustin-json '{"fresh_layers": [16]}'
}
part_eval_fresh_two() { eval_tokens eval-fresh-two-h200 --budget 1024 --dustin-json '{"fresh_layers": [16, 21]}'; }
part_eval_fresh_four() { eval_tokens eval-fresh-four-h200 --budget 1024 --dustin-json '{"fresh_layers": [7, 11, 16, 21]}'; }
part_eval_fresh_max() { eval_tokens eval-fresh-max-h200 --budget 1024 --dustin-json '{"fresh_layers": [16], "aggregate": "max"}'; }
part_eval_fresh_block() { eval_tokens eval-fresh-block-h200 --budget 1024 --granularity block --dustin-json '{"fresh_layers": [16]}'; }
part_eval_token() { eval_tokens eval-token-h200 --budget 1024; } # beside them
part_eval_fresh_512() { eval_tokens eval-fresh-512-h200 --budget 512 --dustin-json '{"fresh_layers": [16]}'; }
part_eval_drift_fresh() {
  evaluate eval-drift-fresh-h200 --context 16384 --granularity token --tasks drift --drift-samples 8 --policies dustin --budget 1024 --max-seconds "${MAX:-300}" --dustin-json '{"fresh_layers": [16]}'
}
part_eval_wide_8192() { # 1920 on average
  eval_tokens eval-wide-8192-h200 --budget 1024 --tasks continuation --dustin-json '{"wide_layers": [16, 21, 22], "wide_budget": 8192}'
}
part_eval_one_budget() { eval_tokens eval-one-budget-h200 --budget 1024,1408,1920 --tasks continuation; } # of as many reads
part_calibrate_wide() { calibrate calibrate-qwen-coder-0.5b-wide-h200 --context 8192 --tokens --windows 16 --held-out 16 --wide 3 --max-seconds 900; }
part_calibrate_fresh() { calibrate calibrate-qwen-coder-0.5b-fresh-h200 --context 8192 --tokens --windows 16 --held-out 16 --fresh 4 --max-seconds 900; }
part_eval_drift() { evaluate eval-drift-h200 --context 16384 --tasks drift --drift-samples 8 --policies dustin,streaming --budget 1024 --max-seconds 300; }
part_eval_budgets() {
  evaluate eval-budgets-h200 --context 16384 --tasks continuation --samples 16 --budget 128,256,512,1024,2048,4096 \
    --policies dustin,streaming,static,quest,oracle,random --max-seconds "${MAX:-560}"
}
part_eval_granularity() {
  evaluate eval-granularity-h200 --context 16384 --granularity block,token --policies dustin --budget 512,1024 \
    --tasks passkey,multikey,copy,edit,continuation --samples 16 --max-seconds 300
}
soak() { # requests against the OpenAI server
  cat "$TEXT"/books/* > books.txt
  bench soak "${pair[@]}" --text books.txt --longest 24576 --concurrency 16 --json "$out/$1.json" "${@:2}"
}
part_soak() { soak soak-h200 --modes stock,dustin --seconds 10 --requests 200; } # measured: alone on its GPU
part_soak_load() { soak soak-load-h200 --modes dustin --seconds "${SOAK:-600}" --requests 200 --server-args "--gpu-memory-utilization 0.2"; }
part_tests() { # on real weights: outputs equal the reference and stock vLLM's
  DUSTIN_TEST_MODELS=$models test_files "$repo/tests/test_gpu_engine.py"
}
part_mixed() { # five minutes of requests of all kinds
  DUSTIN_TEST_MODELS=$models DUSTIN_TEST_SECONDS=300 test_files -s "$repo/tests/test_gpu_engine.py" -k mixed
}
part_hnd() { # the other layout of the KV cache
  VLLM_KV_CACHE_LAYOUT=HND DUSTIN_TEST_MODELS=$models test_files "$repo/tests/test_gpu_engine.py" -k 'reference or graphs_and_eager'
}
part_two_gpus() { # tensor parallel by both executors; the README's command; needs Ray and openai
  test_files "$repo/tests/test_gpu_parallel.py"
}
part_kernels() { test_files ${PYTEST:-} "$repo/tests/test_triton_kernels.py" "$repo/tests/test_cuda_ops.py"; }
part_upstream() { python3 "$repo/tests/upstream.py" "$UPSTREAM"; } # vLLM's own tests; UPSTREAM: its source
sanitized() { PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9 python3 -m pytest -q -x -p no:cacheprovider "$@"; }
part_sanitizer() { # a few shapes of every kernel; the tool slows them down hundredfold
  sanitized "$repo/tests/test_triton_kernels.py" -k 'layouts or strided_queries or splits_the_budget or narrow_table or gathered or with_preselection' &&
    sanitized "$repo/tests/test_cuda_ops.py" -k 'every_tuning or other_layout'
}

for part in "$@"; do
  began=$SECONDS
  "part_$part" > "$out/$part.log" 2>&1
  echo "$part: exit code $?, $((SECONDS - began)) s" | tee -a "$out/parts.txt"
done
