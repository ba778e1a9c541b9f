"""Environment variables that make the host or the device wait, and how the allocator hands out memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_lynx.doctor.finding import Finding


def environment(variables: Mapping[str, str]) -> Iterator[Finding]:
    yield _allocator(variables)
    if variables.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        costs = "every kernel is waited for: nothing overlaps"
        yield Finding("CUDA_LAUNCH_BLOCKING", "defeats", "set", costs, "unset it")
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"):
        if variables.get(name, "0") not in ("", "0"):
            costs = "the host waits in every collective: a window ends before it begins"
            yield Finding(name, "defeats", "set", costs, "unset it")
    if variables.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper() == "DETAIL":
        costs = "every collective is checked by another one first"
        yield Finding("TORCH_DISTRIBUTED_DEBUG", "slows", "DETAIL", costs, "unset it")


def _allocator(variables: Mapping[str, str]) -> Finding:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    name = next((name for name in names if name in variables), names[1])
    setting = variables.get(name, "")
    if "expandable_segments:True" in setting:
        return Finding(name, "good", setting)
    costs = "replays and copies allocate in another order than forward did: fragments count against the memory budget"
    return Finding(name, "note", setting or "not set", costs, "set expandable_segments:True")
