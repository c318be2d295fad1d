#!/usr/bin/env bash
# The library that bind.py loads.
set -euo pipefail
cd "$(dirname "$0")"
nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -shared -Xcompiler -fPIC -cudart static \
  -o attention.so ../../csrc/cuda/attention.cu
