#!/usr/bin/env bash
# What only a GPU can tell about the attention backends, in under 8 minutes: correctness in bf16 against fp64, times against
# causal flash, FLOPs by Nsight Compute.  Without a GPU: the Triton kernels in the interpreter, and a list of what is unmeasured.
#   bash aah_dist/bench/gpu_check.sh [FOLDER FOR THE RECORDS]    (default: gpu_check; PYTHON=... names another interpreter)
set -euo pipefail
python="${PYTHON:-python}"
out="${1:-gpu_check}"
if [[ "$out" == -* ]]; then
  sed -n '2,4p' "$0" >&2
  exit 2
fi
mkdir -p "$out"
out="$(cd "$out" && pwd)"
cd "$(dirname "$0")/../.."
if ! "$python" -c 'import torch' 2>/dev/null; then
  echo "$python cannot import torch; activate the environment, or name its interpreter: PYTHON=.venv/bin/python bash $0" >&2
  exit 2
fi
"$python" -m aah_dist.attention | tee "$out/backends.txt"
if "$python" -c 'import sys; from aah_dist.parallel.device import has_gpu; sys.exit(not has_gpu())'; then
  "$python" -m aah_dist.bench.gpu_check | tee "$out/attention.txt"
  "$python" -m aah_dist.bench.step --quick | tee "$out/step.txt"
  "$python" -m aah_dist.bench.flops | tee "$out/flops.txt"
else
  TRITON_INTERPRET=1 "$python" -m aah_dist.bench.gpu_check | tee "$out/attention.txt"
fi
