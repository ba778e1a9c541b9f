#!/usr/bin/env bash
# Eight layers of Llama 3 8B on one GPU of 80 GB, with a vocabulary of 32000: what fits with all that training keeps.
# For a first try of a plan of yours, and for its figures beside stock's:
#
#   launch() { SETTING=none MEGATRON_LM_DIR=../Megatron-LM scripts/launches/llama3_8b_one_gpu.sh --print; }
#   megatron-lynx plan --cluster h100-80g --memory-gib 48 -o plan.yaml -- $(launch)
#   PLAN=plan.yaml MEGATRON_LM_DIR=../Megatron-LM python scripts/launches/sweep.py scripts/launches/llama3_8b_one_gpu.sh
#
# launch.sh lists what else can be set.
set -euo pipefail
GPUS_PER_NODE=${GPUS_PER_NODE:-1}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

NAME=llama3-8b-one-gpu
TENSOR=1 PIPELINE=1
MICRO_BATCH_SIZE=2 MICRO_BATCHES=2
VOCABULARY=32000

MODEL=(
    --num-layers 8 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 500000
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
)

LAYERS=()

launch "$@"
