"""Environment variables that decide how kernels, collectives and allocations queue up, and so whether replays overlap."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_lynx.doctor.finding import Finding
from megatron_lynx.torch_release import ALLOCATOR, AVOIDS_RECORDING, GROWING, nccl_ub_stands_alone, records_operands

BLACKWELL = ("B100", "B200", "B300", "GB200", "GB300")


@dataclass(frozen=True)
class Software:
    """Versions by which variables mean one thing or another; empty where something is not installed."""

    torch: str = ""
    megatron_core: str = ""


def environment(
    variables: Mapping[str, str],
    *,
    tensor: int | None,
    gpus: list[str],
    installed: Software = Software(),
    nccl_ub: bool = False,
) -> Iterator[Finding]:
    """`tensor`: the launch's tensor-parallel size, if a launch was given. `nccl_ub`: whether it has --use-nccl-ub."""
    yield _connections(variables.get("CUDA_DEVICE_MAX_CONNECTIONS"), tensor, gpus)
    yield _allocator(variables, alone=nccl_ub and nccl_ub_stands_alone(installed.torch, installed.megatron_core))
    if installed.torch and records_operands(installed.torch, variables):
        yield _recorded(variables, installed.torch, gpus)
    if variables.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        costs = "every kernel is waited for: nothing overlaps"
        yield Finding("CUDA_LAUNCH_BLOCKING", "defeats", "set", costs, "unset it")
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"):
        if variables.get(name, "0") not in ("", "0"):
            costs = "the host waits in every collective: a window ends before it begins"
            yield Finding(name, "defeats", "set", costs, "unset it")
    if variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield from _timed_collectives(variables)
    if variables.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper() == "DETAIL":
        costs = "every collective is checked by another one first"
        yield Finding("TORCH_DISTRIBUTED_DEBUG", "slows", "DETAIL", costs, "unset it")


def _timed_collectives(variables: Mapping[str, str]) -> Iterator[Finding]:
    """An event that takes the time stands at the head of the one hardware queue until what is before it in its stream is over,
    and holds up every stream (measured on an H100: benchmarks/results/2026-11-22-hardware-queues.md)."""
    for name in ("TORCH_NCCL_ENABLE_TIMING", "TORCH_NCCL_DESYNC_DEBUG"):
        if variables.get(name, "0").lower() not in ("", "0", "false", "n", "no"):
            costs = "torch takes the time behind every collective; with one hardware queue compute waits for it: nothing overlaps"
            yield Finding(name, "defeats", "set, with CUDA_DEVICE_MAX_CONNECTIONS=1", costs, "unset it")


def _connections(value: str | None, tensor: int | None, gpus: list[str]) -> Finding:
    """One hardware queue keeps collectives in front of the GEMMs they hide behind, and replays behind collectives."""
    topic, blackwell = "CUDA_DEVICE_MAX_CONNECTIONS", any(chip in name for name in gpus for chip in BLACKWELL)
    needs_one = not blackwell and (tensor is None or tensor > 1)
    if value == "1" and not needs_one:
        why = "on Blackwell" if blackwell else "without tensor parallelism"
        costs = "all streams share one queue: replays may wait behind collectives; Megatron does not need it here"
        return Finding(topic, "slows", f"1, {why}", costs, "unset it, or set 32")
    if value == "1":
        costs = "one queue for all streams: the gain of overlap differs by up to 2x with the order of launches"
        return Finding(topic, "note", "1, as Megatron wants it before Blackwell", costs, "measure: megatron-lynx compare")
    if needs_one and tensor is not None:
        costs = "Megatron stops (sequence or context parallelism), or its own overlap of collectives and GEMMs is lost"
        return Finding(topic, "slows", value or "not set", costs, "set 1 on GPUs before Blackwell")
    return Finding(topic, "good", value or "not set")


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


def _recorded(variables: Mapping[str, str], torch: str, gpus: list[str]) -> Finding:
    """Windows are asynchronous collectives, whose operands torch below 2.8 keeps until the host sees them over."""
    found = f"{variables.get(AVOIDS_RECORDING) or 'not set'}, with torch {torch.partition('+')[0]}"
    costs = "plans with windows are refused on GPUs: their collectives would hold memory that a plan does not count"
    return Finding(AVOIDS_RECORDING, "defeats" if gpus else "note", found, costs, "set 1, or install torch 2.8 or later")
