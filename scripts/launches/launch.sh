# shellcheck shell=bash
# Sourced by the launches beside it, which say what is trained; here is what they have in common, and what can be set from outside.
#
#   NAME TENSOR PIPELINE MICRO_BATCH_SIZE MICRO_BATCHES VOCABULARY     set by the launch
#   CHUNK_LAYERS                                                       layers of each chunk, where stages are interleaved
#   MODEL=(...)   LAYERS=(...)                                         its arguments: the model; which layers are whose under its plan
#
# With --print as its first argument a launch runs nothing and prints its command, a word on each line. Any other argument is
# Megatron's, and is added.

MEGATRON_LM_DIR=${MEGATRON_LM_DIR:-.} # a checkout of Megatron-LM, 0.16 to 0.19
CLUSTER=${CLUSTER:-h100-80g}          # h100-80g, h800-80g or a100-80g: whose plan is used
SETTING=${SETTING:-plan}              # plan, or stock Megatron's recomputation: none, selective, full
PLAN=${PLAN:-}                        # a plan of your own; give the flags it needs as arguments

NODES=${NODES:-1}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
MASTER_ADDR=${MASTER_ADDR:-localhost} # with several nodes: the first one's name, the same on all
MASTER_PORT=${MASTER_PORT:-29500}

DATA_PATH=${DATA_PATH:-}     # prefix of a preprocessed data set; none: Megatron's mock data
TOKENIZER=${TOKENIZER:-}     # a Hugging Face tokenizer, by name or folder; none: NullTokenizer
CHECKPOINTS=${CHECKPOINTS:-} # a folder to load from and to save to; none: nothing is saved
TRAIN_ITERS=${TRAIN_ITERS:-100000}

REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

# Collectives have to be queued before the recomputations that they hide, and recomputations allocate in another order than forwards:
# `megatron-lynx doctor` says more.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
if [[ " $* " != *" --use-nccl-ub "* ]]; then # beside which Megatron raises below torch 2.11
    export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
fi

# What runs it: a launch for machines without GPUs has its own.
if [[ -z ${ENGINE+set} ]]; then
    LAUNCHER=megatron_lynx.launch
    ENGINE=(
        --transformer-impl transformer_engine --attention-backend flash --bf16
        --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
        --log-throughput
    )
fi

refuse() {
    echo "$1" >&2
    exit 2
}

layout_arguments() {
    local name
    for name in NODES GPUS_PER_NODE TRAIN_ITERS; do
        [[ ${!name} =~ ^[1-9][0-9]{0,8}$ ]] || refuse "$name: found ${!name}, needed a whole number from 1"
    done
    if ((NODES * GPUS_PER_NODE % (TENSOR * PIPELINE) != 0)); then
        refuse "NODES x GPUS_PER_NODE: found $((NODES * GPUS_PER_NODE)), needed a multiple of $((TENSOR * PIPELINE)), as $NAME is laid out"
    fi
    # A plan is for so many micro-batches of a pipeline: with more nodes the batch grows, the plan stays.
    local replicas=$((NODES * GPUS_PER_NODE / (TENSOR * PIPELINE)))
    LAYOUT=(
        --tensor-model-parallel-size "$TENSOR" --pipeline-model-parallel-size "$PIPELINE"
        --micro-batch-size "$MICRO_BATCH_SIZE" --global-batch-size $((MICRO_BATCH_SIZE * MICRO_BATCHES * replicas))
    )
    if ((TENSOR > 1)); then
        LAYOUT+=(--sequence-parallel)
    fi
    if [[ -n ${CHUNK_LAYERS:-} ]]; then
        LAYOUT+=(--num-layers-per-virtual-pipeline-stage "$CHUNK_LAYERS")
    fi
}

training_arguments() {
    TRAINING=(
        --train-iters "$TRAIN_ITERS" --lr 1.5e-4 --min-lr 1.5e-5 --lr-decay-style cosine --lr-warmup-iters $((TRAIN_ITERS / 100))
        --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --log-interval 1 --eval-iters 0 --eval-interval "$TRAIN_ITERS"
    )
    if [[ -n $CHECKPOINTS ]]; then
        TRAINING+=(--load "$CHECKPOINTS" --save "$CHECKPOINTS" --save-interval 1000)
    fi
}

data_arguments() {
    DATA=(--split "99,1,0" --vocab-size "$VOCABULARY")
    if [[ -n $DATA_PATH ]]; then
        DATA+=(--data-path "$DATA_PATH")
    else
        DATA+=(--mock-data)
    fi
    if [[ -n $TOKENIZER ]]; then
        DATA+=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
    else
        DATA+=(--tokenizer-type NullTokenizer)
    fi
}

# The plan that comes with the launch for CLUSTER; without one, what there is.
ready_plan() {
    local path=$REPOSITORY/configs/plans/launches/$NAME-$CLUSTER.yaml ready clusters=""
    if [[ ! -f $path ]]; then
        for ready in "$REPOSITORY/configs/plans/launches/$NAME"-*.yaml; do
            [[ ! -f $ready ]] || clusters+="${clusters:+, }$(basename "${ready#*"/$NAME-"}" .yaml)"
        done
        refuse "CLUSTER $CLUSTER: found no plan of $NAME, needed ${clusters:+one of $clusters, or }a plan of your own as PLAN; megatron-lynx plan makes one of SETTING=none $0 --print"
    fi
    echo "$path"
}

setting_arguments() {
    case $SETTING in
        # Only a ready plan comes with its layers: stock Megatron divides them evenly, and so does whoever makes another plan.
        plan) RECOMPUTATION=(--lynx-plan "${PLAN:-$(ready_plan)}") || exit 2 ;;
        none) RECOMPUTATION=() ;;
        selective) RECOMPUTATION=(--recompute-granularity selective) ;;
        full) RECOMPUTATION=(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1) ;;
        *) refuse "SETTING: found $SETTING, needed plan, none, selective or full" ;;
    esac
    if [[ $SETTING == plan && -z $PLAN ]]; then
        RECOMPUTATION+=("${LAYERS[@]}")
    fi
}

launch() {
    local print=""
    if [[ ${1:-} == --print ]]; then
        print=yes
        shift
    fi
    layout_arguments
    training_arguments
    data_arguments
    setting_arguments

    local command=(torchrun --nproc-per-node "$GPUS_PER_NODE" --nnodes "$NODES")
    if ((NODES > 1)); then
        command+=(--rdzv-backend c10d --rdzv-id "${SLURM_JOB_ID:-$NAME}" --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT")
    else
        command+=(--standalone)
    fi
    command+=(-m "$LAUNCHER" "$MEGATRON_LM_DIR/pretrain_gpt.py")
    command+=("${MODEL[@]}" "${LAYOUT[@]}" "${ENGINE[@]}" "${TRAINING[@]}" "${DATA[@]}" "${RECOMPUTATION[@]}" "$@")
    if [[ -n $print ]]; then
        local variable
        for variable in CUDA_DEVICE_MAX_CONNECTIONS PYTORCH_CUDA_ALLOC_CONF NVTE_FWD_LAYERNORM_SM_MARGIN; do
            [[ -z ${!variable+set} ]] || printf '%s=%s\n' "$variable" "${!variable}"
        done
        printf '%s\n' "${command[@]}"
    else
        [[ $SETTING != plan || -f ${RECOMPUTATION[1]} ]] || refuse "PLAN: found no file ${RECOMPUTATION[1]}, needed a plan"
        [[ -f $MEGATRON_LM_DIR/pretrain_gpt.py ]] ||
            refuse "MEGATRON_LM_DIR: found no $MEGATRON_LM_DIR/pretrain_gpt.py, needed a checkout of Megatron-LM, 0.16 to 0.19"
        exec "${command[@]}"
    fi
}
