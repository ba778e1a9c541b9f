#!/usr/bin/env bash
# GPT-3 175B on 8 nodes of 8 GPUs, or a multiple of them.
#
#   on every node   NODES=8 MASTER_ADDR=first-node MEGATRON_LM_DIR=../Megatron-LM scripts/launches/gpt_175b.sh
#   under Slurm     sbatch --nodes 8 scripts/launches/slurm.sbatch scripts/launches/gpt_175b.sh
#
# launch.sh lists what else can be set: cluster, data, tokenizer, checkpoints, stock recomputation in place of the plan.
set -euo pipefail
NODES=${NODES:-8}
export NVTE_FWD_LAYERNORM_SM_MARGIN=${NVTE_FWD_LAYERNORM_SM_MARGIN:-16} # norms of rows so long would not start beside collectives
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

NAME=gpt-175b
TENSOR=8 PIPELINE=8
MICRO_BATCH_SIZE=2 MICRO_BATCHES=128
VOCABULARY=50257

MODEL=(
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96
    --seq-length 2048 --max-position-embeddings 2048
)

LAYERS=()

launch "$@"
