"""Environment variables that make the host or the device wait, and how the allocator hands out memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_lynx.doctor.finding import Finding
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
