#!/usr/bin/env bash
# A GPT of eight small layers on a machine without GPUs: four ranks, two stages of two, the CPU in place of CUDA.
#
#   export MEGATRON_LM_DIR=../Megatron-LM PLAN=build/tiny.yaml TRAIN_ITERS=10
#   megatron-lynx plan --cluster clusters/testbed -o $PLAN -- $(SETTING=none scripts/launches/gpt_tiny_cpu.sh --print)
#   scripts/launches/gpt_tiny_cpu.sh
#
# Its plan is made from what this machine measures, so none comes with it. launch.sh lists what else can be set.
set -euo pipefail

GPUS_PER_NODE=4
LAUNCHER=tests.instruments
# Without a compiler, Apex and Transformer Engine: Megatron's own layers, nothing fused.
ENGINE=(
    --transformer-impl local --distributed-backend gloo --use-cpu-initialization
    --no-persist-layer-norm --no-gradient-accumulation-fusion --num-workers 0
)
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

NAME=gpt-tiny-cpu
TENSOR=2 PIPELINE=2
MICRO_BATCH_SIZE=2 MICRO_BATCHES=4
VOCABULARY=255

MODEL=(
    --num-layers 8 --hidden-size 128 --num-attention-heads 4
    --seq-length 128 --max-position-embeddings 128
)

LAYERS=()

launch "$@"
