"""Environment variables that make the host or the device wait, and how the allocator hands out memory.

Hardware queues that the streams of a rank share (CUDA_DEVICE_MAX_CONNECTIONS), and how many Megatron wants:

what Megatron asserts, alike from 0.15 to 0.19        GPUs before Blackwell      Blackwell and later
sharded parameters (either FSDP)                      not 1                      not 1
tensor or context parallelism                         1                          -
  beside --overlap-moe-expert-parallel-comm           1, or 32                   -
nothing of these                                      -                          -

One queue keeps collectives in front of the GEMMs behind which they hide, and replays behind collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_lynx.doctor.finding import Finding
from megatron_lynx.launch_arguments.given import Given
from megatron_lynx.torch_release import ALLOCATOR, AVOIDS_RECORDING, GROWING, nccl_ub_stands_alone, records_operands


@dataclass(frozen=True)
class Software:
    """Versions by which variables mean one thing or another; empty where something is not installed."""

    torch: str = ""
    megatron_core: str = ""


def environment(
    variables: Mapping[str, str], gpus: Sequence[str] = (), *, installed: Software = Software(), nccl_ub: bool = False
) -> Iterator[Finding]:
    """`gpus`: names of those that are here. `nccl_ub`: whether a launch was given that has --use-nccl-ub."""
    yield _allocator(variables, alone=nccl_ub and nccl_ub_stands_alone(installed.torch, installed.megatron_core))
    if installed.torch and records_operands(installed.torch, variables):
        yield _recorded(variables, installed.torch, gpus)
    if variables.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        costs = "every kernel is waited for: nothing overlaps"
        yield Finding("CUDA_LAUNCH_BLOCKING", "defeats", "set", costs, "unset it")
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"):
        if switched_on(variables, name):
            costs = "the host waits in every collective: a window ends before it begins"
            yield Finding(name, "defeats", "set", costs, "unset it")
    if variables.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper() == "DETAIL":
        costs = "every collective is checked by another one first"
        yield Finding("TORCH_DISTRIBUTED_DEBUG", "slows", "DETAIL", costs, "unset it")


def switched_on(variables: Mapping[str, str], name: str) -> bool:
    """Whether torch takes a variable for yes."""
    return variables.get(name, "0").lower() not in ("", "0", "false", "f", "n", "no")


def _allocator(variables: Mapping[str, str], *, alone: bool) -> Finding:
    """`alone`: the launch has --use-nccl-ub, which does not go with segments that grow."""
    name = next((name for name in ALLOCATOR if name in variables), ALLOCATOR[-1])
    setting = variables.get(name, "")
    if GROWING in setting:
        if not alone:
            return Finding(name, "good", setting)
        costs = "Megatron raises: below torch 2.11, or megatron-core 0.18, the two do not go together"
        return Finding(name, "defeats", f"{setting}, with --use-nccl-ub", costs, "unset it, or drop --use-nccl-ub")
    costs = "replays and copies allocate in another order than forward did: fragments count against the memory budget"
    if alone:
        todo = f"leave it so: {GROWING} and --use-nccl-ub need torch 2.11 and megatron-core 0.18"
        return Finding(name, "note", setting or "not set", costs, todo)
    return Finding(name, "note", setting or "not set", costs, f"set {GROWING}")


def _recorded(variables: Mapping[str, str], torch: str, gpus: Sequence[str]) -> Finding:
    """Windows are asynchronous collectives, whose operands torch below 2.8 keeps until the host sees them over."""
    found = f"{variables.get(AVOIDS_RECORDING) or 'not set'}, with torch {torch.partition('+')[0]}"
    costs = "plans with windows are refused on GPUs: their collectives would hold memory that a plan does not count"
    return Finding(AVOIDS_RECORDING, "defeats" if gpus else "note", found, costs, "set 1, or install torch 2.8 or later")


TOPIC = "CUDA_DEVICE_MAX_CONNECTIONS"
BLACKWELL = ("B100", "B200", "B300", "Blackwell", "GB10")
"""Parts of names of GPUs: GB200 and GB300 have theirs, too."""
SHARDED = ("use_megatron_fsdp", "use_torch_fsdp2")
SPLIT = ("tensor_model_parallel_size", "context_parallel_size")

Wanted = Literal["one", "several", "any"]


def hardware_queues(variables: Mapping[str, str], given: Given | None, gpus: Sequence[str]) -> Iterator[Finding]:
    """`given`: the launch's arguments, if a launch was given; `gpus`: names of those that are here, or of its cluster."""
    value, blackwell = variables.get(TOPIC), any(chip.lower() in name.lower() for name in gpus for chip in BLACKWELL)
    yield _without_launch(value, blackwell) if given is None else _of_launch(value, given, blackwell, known=bool(gpus))
    if value == "1":
        yield from _timed_collectives(variables)


def _without_launch(value: str | None, blackwell: bool) -> Finding:
    if value != "1":
        return Finding(TOPIC, "good", value or "not set")
    return _needless("on Blackwell") if blackwell else _as_megatron_wants_it()


def _of_launch(value: str | None, given: Given, blackwell: bool, *, known: bool) -> Finding:
    wanted = _wanted(given, blackwell)
    if wanted == "several" and value == "1":
        return Finding(TOPIC, "defeats", value, "Megatron stops: sharded parameters need several queues", "unset it, or set 32")
    if wanted == "one" and value != "1":
        needs = "Megatron stops: with tensor or context parallelism it needs one queue on GPUs before Blackwell"
        todo = "set 1" if known else "set 1, unless the launch is for Blackwell: --cluster says so"
        return Finding(TOPIC, "defeats", value or "not set", needs, todo)
    if value != "1":
        return Finding(TOPIC, "good", value or "not set")
    if blackwell or not _split(given):
        return _needless("on Blackwell" if blackwell else "without tensor or context parallelism")
    return _as_megatron_wants_it()


def _wanted(given: Given, blackwell: bool) -> Wanted:
    if any(given[name] for name in SHARDED):
        return "several"
    if blackwell or not _split(given) or given["overlap_moe_expert_parallel_comm"]:
        return "any"
    return "one"


def _split(given: Given) -> bool:
    """Whether ranks share a layer's work, by tensors or by sequences."""
    return any((given[name] or 1) > 1 for name in SPLIT)


def _needless(why: str) -> Finding:
    costs = "all streams share one queue: replays may wait behind collectives; Megatron does not need it here"
    return Finding(TOPIC, "slows", f"1, {why}", costs, "unset it, or set 32")


def _as_megatron_wants_it() -> Finding:
    costs = "one queue for all streams: the gain of overlap differs by up to 2x with the order of launches"
    return Finding(TOPIC, "note", "1, as Megatron wants it before Blackwell", costs, "measure: megatron-lynx compare")


def _timed_collectives(variables: Mapping[str, str]) -> Iterator[Finding]:
    """An event that takes the time stands at the head of the one hardware queue until what is before it in its stream is over,
    and holds up every stream (measured on an H100: benchmarks/results/2026-11-22-hardware-queues.md)."""
    for name in ("TORCH_NCCL_ENABLE_TIMING", "TORCH_NCCL_DESYNC_DEBUG"):
        if switched_on(variables, name):
            costs = "torch takes the time behind every collective; with one hardware queue compute waits for it: nothing overlaps"
            yield Finding(name, "defeats", f"set, with {TOPIC}=1", costs, "unset it")
