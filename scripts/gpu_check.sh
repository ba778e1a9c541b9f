#!/usr/bin/env bash
# The acceptance run: what 1, 2, 4 or 8 GPUs can show of this package. docs/gpu.md says how to read it, and what to send us.
#   scripts/gpu_check.sh               on a machine with NVIDIA GPUs, torch with CUDA and NCCL, and megatron-core
#   scripts/gpu_check.sh --gpus 2      on two of them
#   scripts/gpu_check.sh --dry-run     the same on CPU ranks, tiny: shows that it runs, and nothing else
# Exit status: 0 all parts that could run passed, 1 a part failed (it is named), 2 the run cannot begin (it says why).
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
export CUBLAS_WORKSPACE_CONFIG=:4096:8 CUDA_DEVICE_MAX_CONNECTIONS=1
case " $* " in *" --dry-run "*) export CUDA_VISIBLE_DEVICES= ;; esac
exec "${PYTHON:-$python}" -m scripts.gpu_check "$@"
