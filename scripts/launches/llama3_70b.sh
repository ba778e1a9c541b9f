#!/usr/bin/env bash
# Llama 3 70B on 8 nodes of 8 GPUs, or a multiple of them.
#
#   on every node   NODES=8 MASTER_ADDR=first-node MEGATRON_LM_DIR=../Megatron-LM scripts/launches/llama3_70b.sh
#   under Slurm     sbatch --nodes 8 scripts/launches/slurm.sbatch scripts/launches/llama3_70b.sh
#
# launch.sh lists what else can be set: cluster, data, tokenizer, checkpoints, stock recomputation in place of the plan.
set -euo pipefail
NODES=${NODES:-8}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

NAME=llama3-70b
TENSOR=4 PIPELINE=4
MICRO_BATCH_SIZE=1 MICRO_BATCHES=32
VOCABULARY=128256

MODEL=(
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672
    --num-attention-heads 64 --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 500000
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
)

# What the planner moves between stages: the first and the last also have the large vocabulary. On H100 stages are interleaved, as in
# NVIDIA's recipes (dgxc-benchmarking v25.02).
LAYERS=()
case $CLUSTER in
    h100-80g) CHUNK_LAYERS=4 ;;
    a100-80g) LAYERS=(--decoder-first-pipeline-num-layers 19 --decoder-last-pipeline-num-layers 19) ;;
esac

launch "$@"
