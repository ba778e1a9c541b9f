"""Parallel groups, partition, batch and overlapped communication of a launch, and the arguments that slime, and tools based on
it, set themselves (`with_packing`), from slime's `megatron_utils/arguments.py`.

--max-tokens-per-gpu 20480   ──> one packed micro-batch of this many tokens on each context-parallel rank, priced as one sequence
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from megatron_lynx.config.parallel import ContextExchange
from megatron_lynx.errors import Problem
from megatron_lynx.launch_arguments.command_line import whole_number
from megatron_lynx.launch_arguments.given import Fact, Given, facts_in

EACH, CHUNKS = "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"
LAYOUT = "pipeline_model_parallel_layout"
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
GROUP = "microbatch_group_size_per_vp_stage"


def parallel_facts(given: Given, gpus: int | None, problems: list[Problem], *, left_open: bool) -> Iterator[Fact]:
    yield from _groups(given)
    yield from _context(given, problems)
    yield from _layers(given, problems, left_open=left_open)
    yield from _overlap(given)
    yield from _batch(given, gpus, problems)


def _layers(given: Given, problems: list[Problem], *, left_open: bool) -> Iterator[Fact]:
    layers = given["num_layers"] or given["encoder_num_layers"]
    pipeline = given["pipeline_model_parallel_size"]
    if not layers or not pipeline:
        return
    chunked = bool(given[EACH])
    said = [name for name in (LAYOUT, FIRST, LAST, EMBEDDING, LOSS, CHUNKS, EACH) if given[name]]
    try:
        if sum(bool(given[name]) for name in (LAYOUT, EACH, CHUNKS)) > 1:
            raise ValueError(f"{', '.join(given.origin(name) for name in said)}: Megatron takes only one of them")
        if said == [EACH]:
            yield Fact("parallel.layers_per_chunk", given[EACH], given.origin(EACH))
        elif not said and left_open and pipeline > 1:
            yield Fact("parallel.partition", "auto", "left open: the launch does not say")
        elif said:
            partition = _partition(given, layers, pipeline)
            chunked = len(partition) > pipeline
            yield Fact("parallel.partition", list(partition), given.origin(*said))
    except ValueError as uneven:
        problems.append(Problem(given.origin(*said), str(uneven), ""))
    if given[GROUP] not in (None, pipeline) and chunked:
        yield Fact("parallel.microbatch_group", given[GROUP], given.origin(GROUP))


def _partition(given: Given, layers: int, pipeline: int) -> tuple[int, ...]:
    if given[LAYOUT]:
        return layers_of_layout(given[LAYOUT], given["mtp_num_layers"] or 0)
    stages = _of_stages(given, layers, pipeline)
    chunks = given[CHUNKS] or (stages[0] // given[EACH] if given[EACH] else 1)
    for stage, count in enumerate(stages):
        if not chunks or count % chunks:
            raise ValueError(f"the {count} layers of stage {stage} do not divide into {chunks} chunks")
    partition = [stages[index % pipeline] // chunks for index in range(pipeline * chunks)]
    partition[0] -= bool(given[EMBEDDING])
    partition[-1] -= bool(given[LOSS])
    return tuple(partition)


def _of_stages(given: Given, layers: int, pipeline: int) -> list[int]:
    ends = {0: given[FIRST], pipeline - 1: given[LAST]}
    ends = {stage: count for stage, count in ends.items() if count is not None}
    counted = layers + bool(given[EMBEDDING]) + bool(given[LOSS])
    left, stages = counted - sum(ends.values()), pipeline - len(ends)
    if left < 0 or (left % stages if stages else left):
        raise ValueError(f"{left} layers do not divide among the {stages} stages that are left")
    return [ends.get(stage, left // stages if stages else 0) for stage in range(pipeline)]


def layers_of_layout(text: str, mtp: int = 0) -> tuple[int, ...]:
    """Layers of each virtual stage of a layout. `mtp`: layers of multi-token prediction, on the last one. Raises `ValueError`."""
    plain = re.sub(r"\(([^)]+)\)\*(\d+)", _repeated, text.replace(",", ""))
    plain = re.sub(r"(.)\*(\d+)", _repeated, plain)
    if strange := sorted(set(plain) - set("EtmL|")):
        raise ValueError(f"{', '.join(map(repr, strange))} in {text!r}: needed E, t, m, L and |")
    stages = plain.split("|")
    if (mtp_layers := plain.count("m")) != mtp:
        raise ValueError(f"{mtp_layers} times m in {text!r}: needed {mtp}, as --mtp-num-layers says")
    if stages[-1].count("m") != mtp_layers:
        raise ValueError(f"m in {text!r} before its last stage: needed all beside L; other places are not modelled")
    return tuple(stage.count("t") for stage in stages)


def _repeated(match: re.Match[str]) -> str:
    return match[1] * int(match[2])


INSTANCES = "num_distributed_optimizer_instances"
SIZES = {"parallel.tensor": "tensor_model_parallel_size", "parallel.pipeline": "pipeline_model_parallel_size"}


def _groups(given: Given) -> Iterator[Fact]:
    yield from facts_in(given, SIZES)
    asked, tensor = given["sequence_parallel"], given["tensor_model_parallel_size"]
    without = " has no effect with tensor 1" if asked and tensor == 1 else ""
    yield Fact("parallel.sequence_parallel", bool(asked and tensor != 1), given.origin("sequence_parallel") + without)
    layer_wise = given["optimizer"] == "dist_muon"
    origin = given.origin("optimizer" if layer_wise else "use_distributed_optimizer")
    yield Fact("parallel.distributed_optimizer", given["use_distributed_optimizer"] or layer_wise, origin)
    if given[INSTANCES] != 1:
        yield from facts_in(given, {"parallel.optimizer_instances": INSTANCES})


def _batch(given: Given, gpus: int | None, problems: list[Problem]) -> Iterator[Fact]:
    micro = given["micro_batch_size"]
    if micro is None:
        if "micro_batch_size" not in given.values:
            problems.append(Problem("--micro-batch-size", "nothing", "this flag"))
        return
    yield Fact("batch.micro", micro, given.origin("micro_batch_size"))
    if given.packed:
        yield Fact("batch.packed", True, given.packed)
    elif packs(given) and not given["apply_rope_fusion"]:  # lengths of sequences determine the cost of unfused rotary positions
        yield Fact("batch.packed", True, given.origin("seq_length"))
    ranks = given["tensor_model_parallel_size"] * given["context_parallel_size"] * given["pipeline_model_parallel_size"]
    if given["step_batch_size_schedule"] is not None:
        yield from _last_of_schedule(given, problems)
    elif given["global_batch_size"] is not None:
        ramp = f", the end of {given.origin('rampup_batch_size')}" if given["rampup_batch_size"] else ""
        yield Fact("batch.global", given["global_batch_size"], given.origin("global_batch_size") + ramp)
    elif gpus and gpus >= ranks:
        yield Fact("batch.global", micro * (gpus // ranks), "micro x replicas: no --global-batch-size")


def _last_of_schedule(given: Given, problems: list[Problem]) -> Iterator[Fact]:
    """The final batch size: in `0:16 2.4B:320`, 320 from 2.4e9 samples or tokens on."""
    origin, text, stated = (
        given.origin("step_batch_size_schedule"),
        str(given["step_batch_size_schedule"]),
        given["global_batch_size"],
    )
    last = text.split()[-1].rpartition(":")[2] if text.split() else ""
    if stated is not None and str(stated) != last:
        problems.append(Problem(origin, f"also --global-batch-size {stated}", "one of them: Megatron refuses both"))
    if last.isdecimal():
        yield Fact("batch.global", int(last), f"{origin}: its end")
    else:
        problems.append(Problem(origin, text, "pairs FROM:SIZE"))


SIZE, EXCHANGE, LEVELS = "context_parallel_size", "cp_comm_type", "hierarchical_context_parallel_sizes"


def _context(given: Given, problems: list[Problem]) -> Iterator[Fact]:
    yield Fact("parallel.context", given[SIZE], given.origin(SIZE))
    if given[SIZE] in (None, 1):
        return
    said = given[EXCHANGE]
    kinds = list(dict.fromkeys([said] if isinstance(said, str) else said or ["p2p"]))
    known = get_args(ContextExchange)
    if unknown := [kind for kind in kinds if kind not in known]:
        problems.append(Problem(given.origin(EXCHANGE), str(unknown[0]), f"one of {', '.join(known)}"))
    elif len(kinds) > 1:
        problems.append(Problem(given.origin(EXCHANGE), " ".join(kinds), "the same in every layer: others are not modelled"))
    else:
        yield Fact("parallel.context_exchange", kinds[0], given.origin(EXCHANGE))
        if kinds[0] == "a2a+p2p" and given[LEVELS]:
            yield Fact("parallel.context_levels", list(given[LEVELS]), given.origin(LEVELS))


IN_PLACE, USERBUFFERS = "gradient_accumulation_fusion", "tp_comm_overlap"
OVERLAP = {
    "gradients": "overlap_grad_reduce",
    "aligned": "align_grad_reduce",
    "parameters": "overlap_param_gather",
    "bucket_parameters": "ddp_bucket_size",
    "buckets": "ddp_num_buckets",
    "padded_buckets": "ddp_pad_buckets_for_high_nccl_busbw",
    "linears": "async_tensor_model_parallel_allreduce",
    "messages": "overlap_p2p_comm",
    "userbuffers": USERBUFFERS,
}


def _overlap(given: Given) -> Iterator[Fact]:
    for name, flag in OVERLAP.items():
        default = given.table.default(flag, given.release)
        if given[flag] != default and (given[flag] or default):
            yield Fact(f"overlap.{name}", given[flag], given.origin(flag))
    if given[IN_PLACE] is False:
        yield Fact("overlap.weight_gradients", "none", given.origin(IN_PLACE))


TOKENS, DYNAMIC = "--max-tokens-per-gpu", "--use-dynamic-batch-size"
PACKED = "so many tokens of each rank into one micro-batch"
GPUS = ("--actor-num-nodes", "--actor-num-gpus-per-node")
STEPS = "--num-steps-per-rollout"
SAMPLES = ("--rollout-batch-size", "--n-samples-per-prompt")


def is_of_slime(given: Given) -> bool:
    said = {words.split()[0] for words in given.unknown}
    return not said.isdisjoint((TOKENS, STEPS, *SAMPLES))


def gpus_of_actor(given: Given) -> int | None:
    nodes, each = (_number(given, option) for option in GPUS)
    return nodes * each if nodes and each else None


def packs(given: Given) -> bool:
    return "seq_length" in given.values and PACKED in given.origin("seq_length")


def with_packing(given: Given) -> Given:
    """The launch with slime's arguments set. Unchanged without `--max-tokens-per-gpu`, or with a sequence length."""
    tokens = _number(given, TOKENS)
    if tokens is None or given["seq_length"] is not None:
        return given
    said = f"{TOKENS} {tokens}: slime packs {PACKED}, and sets this"
    seq_length, is_bf16 = tokens * (given["context_parallel_size"] or 1), not given["fp16"]
    values = {"seq_length": seq_length, "micro_batch_size": 1, "use_distributed_optimizer": True, "bf16": is_bf16}
    read = {TOKENS, DYNAMIC, *GPUS}
    packed = given.with_values({name: value for name, value in values.items() if name not in given.values}, said)
    steps, prompts, of_each = (_number(given, option) for option in (STEPS, *SAMPLES))
    if steps and prompts is not None and of_each is not None and "global_batch_size" not in given.values:
        batch = {"global_batch_size": prompts * of_each // steps}
        packed = packed.with_values(batch, f"{STEPS} {steps}: of {prompts} x {of_each} samples")
        read |= {STEPS, *SAMPLES}
    if given["moe_token_dispatcher_type"] == "allgather":
        packed = packed.with_values({"moe_token_dispatcher_type": "alltoall"}, "alltoall, by slime in place of allgather")
    return replace(packed, unknown=tuple(words for words in given.unknown if words.split()[0] not in read))


def _number(given: Given, option: str) -> int | None:
    return whole_number(given.unknown_value(option))
