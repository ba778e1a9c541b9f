"""Environment variables that decide how kernels, collectives and allocations queue up, and so whether replays overlap."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_lynx.doctor.finding import Finding

BLACKWELL = ("B100", "B200", "B300", "GB200", "GB300")


def environment(variables: Mapping[str, str], *, tensor: int | None, gpus: list[str]) -> Iterator[Finding]:
    """`tensor`: the launch's tensor-parallel size, if a launch was given."""
    yield _connections(variables.get("CUDA_DEVICE_MAX_CONNECTIONS"), tensor, gpus)
    yield _allocator(variables)
    if variables.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        costs = "every kernel is waited for: nothing overlaps"
        yield Finding("CUDA_LAUNCH_BLOCKING", "defeats", "set", costs, "unset it")
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"):
        if switched_on(variables, name):
            costs = "the host waits in every collective: a window ends before it begins"
            yield Finding(name, "defeats", "set", costs, "unset it")
    if variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield from _timed_collectives(variables)
    if variables.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper() == "DETAIL":
        costs = "every collective is checked by another one first"
        yield Finding("TORCH_DISTRIBUTED_DEBUG", "slows", "DETAIL", costs, "unset it")


def switched_on(variables: Mapping[str, str], name: str) -> bool:
    """Whether torch takes a variable for yes."""
    return variables.get(name, "0").lower() not in ("", "0", "false", "f", "n", "no")


def _timed_collectives(variables: Mapping[str, str]) -> Iterator[Finding]:
    """An event that takes the time stands at the head of the one hardware queue until what is before it in its stream is over,
    and holds up every stream (measured on an H100: benchmarks/results/2026-11-22-hardware-queues.md)."""
    for name in ("TORCH_NCCL_ENABLE_TIMING", "TORCH_NCCL_DESYNC_DEBUG"):
        if switched_on(variables, name):
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


def _allocator(variables: Mapping[str, str]) -> Finding:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    name = next((name for name in names if name in variables), names[1])
    setting = variables.get(name, "")
    if "expandable_segments:True" in setting:
        return Finding(name, "good", setting)
    costs = "replays and copies allocate in another order than forward did: fragments count against the memory budget"
    return Finding(name, "note", setting or "not set", costs, "set expandable_segments:True")
