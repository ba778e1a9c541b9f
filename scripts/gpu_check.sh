#!/usr/bin/env bash
# The single-GPU part of what is promised: exactness in bf16, copies to the host, memory, step times, an emulated interconnect.
#   scripts/gpu_check.sh               on a machine with an NVIDIA GPU, torch with CUDA and megatron-core
#   scripts/gpu_check.sh --dry-run     the same script on a CPU, tiny: shows that it runs, and nothing else
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
export CUBLAS_WORKSPACE_CONFIG=:4096:8 CUDA_DEVICE_MAX_CONNECTIONS=1 TORCHDYNAMO_DISABLE=1 LOCAL_RANK=0
case " $* " in *" --dry-run "*) export CUDA_VISIBLE_DEVICES= ;; esac
exec "${PYTHON:-$python}" -m scripts.gpu_check "$@"
