#!/usr/bin/env bash
# What only a GPU can tell about the attention backends, in under 8 minutes: correctness in bf16 against fp64, times against
# causal flash, FLOPs by Nsight Compute.  Without a GPU: the Triton kernels in the interpreter, and a list of what is unmeasured.
#   bash aah_dist/bench/gpu_check.sh [FOLDER FOR THE RECORDS]
set -euo pipefail
cd "$(dirname "$0")/../.."
out="${1:-gpu_check}"
python="${PYTHON:-python}"
mkdir -p "$out"
"$python" -m aah_dist.attention | tee "$out/backends.txt"
if "$python" -c 'import sys; from aah_dist.parallel.device import has_gpu; sys.exit(not has_gpu())'; then
  "$python" -m aah_dist.bench.gpu_check | tee "$out/attention.txt"
  "$python" -m aah_dist.bench.step --quick | tee "$out/step.txt"
  "$python" -m aah_dist.bench.flops | tee "$out/flops.txt"
else
  TRITON_INTERPRET=1 "$python" -m aah_dist.bench.gpu_check | tee "$out/attention.txt"
fi
