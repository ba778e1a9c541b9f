#!/usr/bin/env bash
# GPT-3 13B on one node of 8 GPUs.
#
#   MEGATRON_LM_DIR=../Megatron-LM CLUSTER=h800-80g scripts/launches/gpt_13b.sh
#
# launch.sh lists what else can be set: data, tokenizer, checkpoints, stock recomputation in place of the plan.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

NAME=gpt-13b
TENSOR=2 PIPELINE=2
MICRO_BATCH_SIZE=8 MICRO_BATCHES=16
VOCABULARY=50257

MODEL=(
    --num-layers 40 --hidden-size 5120 --num-attention-heads 40
    --seq-length 2048 --max-position-embeddings 2048
)

LAYERS=()

launch "$@"
