#!/usr/bin/env bash
# Llama 3 8B on one node of 8 GPUs.
#
#   MEGATRON_LM_DIR=../Megatron-LM scripts/launches/llama3_8b.sh
#
# launch.sh lists what else can be set: data, tokenizer, checkpoints, stock recomputation in place of the plan.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

NAME=llama3-8b
TENSOR=2 PIPELINE=1
MICRO_BATCH_SIZE=2 MICRO_BATCHES=16
VOCABULARY=128256

MODEL=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 500000
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
)

LAYERS=()

launch "$@"
