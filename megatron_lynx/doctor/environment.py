"""Environment variables that make the host or the device wait, the allocator's settings, and this machine.

Megatron's requirement for CUDA_DEVICE_MAX_CONNECTIONS, the hardware queues that the streams of a rank share, from 0.15 to 0.19:

                                                      GPUs before Blackwell      Blackwell and later
sharded parameters (either FSDP)                      not 1                      not 1
tensor or context parallelism                         1                          -
  with --overlap-moe-expert-parallel-comm             1, or 32                   -
otherwise                                             -                          -

With one queue, collectives start before the GEMMs that hide them, and recomputations after collectives.

Kernels that compete with NCCL's in a window:

norm_margin      a cooperative norm kernel, which needs all multiprocessors at once, cannot start during a collective
stream_priority  with several hardware queues a GEMM may take all multiprocessors before the collective's kernel starts

Both follow from sources of Transformer Engine and CUDA; neither was seen on a GPU here (docs/gpu.md).

GPUs, NUMA nodes and host memory are read from nvidia-smi and /sys, without initialising CUDA.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from megatron_lynx.config.cluster import Cluster
from megatron_lynx.environment import (
    ALLOCATOR,
    AVOIDS_RECORDING,
    BACKWARD_MARGIN,
    CUDNN,
    FORWARD_MARGIN,
    GROWING,
    USUAL_MARGIN,
    Norm,
    nccl_ub_stands_alone,
    records_operands,
    starts_as_one,
    version_of,
)
from megatron_lynx.errors import HookRefused
from megatron_lynx.free_memory import free_memory
from megatron_lynx.launch_arguments import Reading
from megatron_lynx.launch_arguments.given import Given
from megatron_lynx.plan import Plan
from megatron_lynx.plan.timetables import Group, groups_waited_for, norms_in_windows
from megatron_lynx.units import GIB, format_bytes

Level = Literal["good", "note", "slows", "defeats"]
"""good: as it should be; note: worth knowing; slows: overlap gains less; defeats: plans are refused or hide nothing, Megatron
stops, or stock's gradients are wrong."""


@dataclass(frozen=True)
class Finding:
    topic: str
    level: Level
    state: str
    costs: str = ""
    todo: str = ""


BINDERS = ("numactl", "--numa-binding", "--cpu-bind", "--cpu-bind=", "bindpcie")
"""Words of a launcher that bind ranks to their GPU's socket."""


def machine(launcher: Sequence[str] = (), root: Path = Path("/"), *, elsewhere: Cluster | None = None) -> Iterator[Finding]:
    """`launcher`: a launch's words before its script. `elsewhere`: its cluster, if this machine is not one of the nodes."""
    if elsewhere is not None and (node := elsewhere.node) is not None:
        yield Finding("GPUs", "note", f"none here; {node.gpus} on each node of {elsewhere.name}")
        words = f"{node.host_memory_gib:g} GiB on each node, which {elsewhere.name} is taken to have (node.host_memory_gib)"
        yield Finding("host memory", "good", words)
        return
    devices = gpus()
    gpu_names = ", ".join(sorted(set(devices))) + f" ({len(devices)})" if devices else "none here"
    yield Finding("GPUs", "good" if devices else "note", gpu_names)
    nodes = len(list((root / "sys/devices/system/node").glob("node[0-9]*")))
    bound = any(word.startswith(BINDERS) for word in launcher) or len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)
    if nodes > 1 and not bound:
        costs = "copies to the host may cross sockets, at a fraction of PCIe's rate"
        todo = "bind each rank to its GPU's node: torchrun --numa-binding node, or numactl"
        yield Finding("NUMA", "slows", f"{nodes} nodes, ranks not bound", costs, todo)
    else:
        yield Finding("NUMA", "good", f"{nodes} nodes, bound" if nodes > 1 else "one node")
    yield _host_memory(root)


def gpus() -> list[str]:
    return [line.strip() for line in nvidia_smi("--query-gpu=name", "--format=csv,noheader").splitlines() if line.strip()]


def nvidia_smi(*words: str) -> str:
    """Return the program's output; empty if it fails or is missing."""
    try:
        return subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _host_memory(root: Path) -> Finding:
    free = free_memory(root)
    least = free.least
    limited = "" if least is free.pots[0] else f", the limit of {least.words}"
    little = least.free_bytes < 64 * GIB
    words = f"{format_bytes(least.free_bytes)} for offloaded activations, less a reserve of a tenth at least{limited}"
    if free.unread:
        costs = f"limits in {', '.join(free.unread)} cannot be read: whether offloaded activations fit is not known"
        return Finding("host memory", "note", words, costs)
    return Finding("host memory", "note" if little else "good", words, "little can be offloaded" if little else "")


def software() -> Iterator[Finding]:
    """Versions of torch, Transformer Engine, Apex and megatron-core, and whether megatron-core is as recorded."""
    torch = version_of("torch")
    yield Finding("torch", "good", torch) if torch else Finding("torch", "defeats", "not installed", "no training", "install it")
    te = version_of("transformer-engine", "transformer_engine")
    if te is None:
        costs, todo = "Megatron's default layers need it", "install it, or launch with --transformer-impl local"
        yield Finding("Transformer Engine", "note", "not installed", costs, todo)
    else:
        yield _te(te)
    apex = version_of("apex")
    costs = "local layers have no fused norm, and refuse --sequence-parallel" if te is None else ""
    yield Finding("Apex", "good" if apex or te else "note", apex or "not installed", costs if apex is None else "")
    yield from _megatron()


def _te(release: str) -> Finding:
    """Whether this release is known. Its functions are compared when a plan is installed: importing them needs a GPU."""
    from megatron_lynx.apply.releases import KNOWN_TE, minor_of

    if minor_of(release) in KNOWN_TE:
        return Finding("Transformer Engine", "good", release)
    todo = f"install one of {', '.join(KNOWN_TE)}, or launch with --transformer-impl local"
    return Finding("Transformer Engine", "defeats", release, "plans for its layers are refused", todo)


def _megatron() -> Iterator[Finding]:
    try:
        from megatron_lynx.apply.releases import installed_version, present_release

        release = installed_version()
    except ImportError as error:
        yield Finding("megatron-core", "defeats", f"cannot be imported: {error}", "no training", "install it")
        return
    try:
        held = list(present_release().rows())
    except HookRefused as error:
        costs = "every plan is refused: its functions are not known"
        yield Finding("megatron-core", "defeats", release, costs, error.problems[0].needed)
        return
    yield Finding("megatron-core", "good", release)
    stale = [function.site for function in held if not function.as_recorded]
    if stale:
        costs, todo = "every plan is refused", "megatron-lynx hooks says which; install the release as it was published"
        yield Finding("hooks", "defeats", f"{len(stale)} of {len(held)} functions not as recorded: {stale[0]}", costs, todo)
    else:
        yield Finding("hooks", "good", f"all {len(held)} functions as recorded")


def environment(
    variables: Mapping[str, str], gpus: Sequence[str] = (), *, torch: str = "", megatron_core: str = "", nccl_ub: bool = False
) -> Iterator[Finding]:
    """`gpus`: names of the local ones. `torch`, `megatron_core`: installed versions. `nccl_ub`: whether the launch has
    --use-nccl-ub."""
    yield _allocator(variables, alone=nccl_ub and nccl_ub_stands_alone(torch, megatron_core))
    if torch and records_operands(torch, variables):
        yield _recorded(variables, torch, gpus)
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
    """Whether torch reads a variable as true."""
    return variables.get(name, "0").lower() not in ("", "0", "false", "f", "n", "no")


def _allocator(variables: Mapping[str, str], *, alone: bool) -> Finding:
    """`alone`: the launch has --use-nccl-ub, which excludes expandable segments."""
    name = next((name for name in ALLOCATOR if name in variables), ALLOCATOR[-1])
    setting = variables.get(name, "")
    if GROWING in setting:
        if not alone:
            return Finding(name, "good", setting)
        costs = "Megatron raises: below torch 2.11, or megatron-core 0.18, the two do not go together"
        return Finding(name, "defeats", f"{setting}, with --use-nccl-ub", costs, "unset it, or drop --use-nccl-ub")
    costs = "recomputation and copies allocate in another order than forward: fragments count against the memory budget"
    if alone:
        todo = f"leave it so: {GROWING} and --use-nccl-ub need torch 2.11 and megatron-core 0.18"
        return Finding(name, "note", setting or "not set", costs, todo)
    return Finding(name, "note", setting or "not set", costs, f"set {GROWING}")


def _recorded(variables: Mapping[str, str], torch: str, gpus: Sequence[str]) -> Finding:
    """Torch before 2.8 keeps operands of asynchronous collectives, our windows, until the host sees their end."""
    setting = f"{variables.get(AVOIDS_RECORDING) or 'not set'}, with torch {torch.partition('+')[0]}"
    costs = "plans with windows are refused on GPUs: their collectives would hold memory that a plan does not count"
    return Finding(AVOIDS_RECORDING, "defeats" if gpus else "note", setting, costs, "set 1, or install torch 2.8 or later")


TOPIC = "CUDA_DEVICE_MAX_CONNECTIONS"
BLACKWELL = ("B100", "B200", "B300", "Blackwell", "GB10")
"""Parts of GPU names, also of GB200 and GB300."""
SHARDED = ("use_megatron_fsdp", "use_torch_fsdp2")
SPLIT = ("tensor_model_parallel_size", "context_parallel_size")


def hardware_queues(variables: Mapping[str, str], given: Given | None, gpus: Sequence[str]) -> Iterator[Finding]:
    """`given`: the launch's arguments, if any. `gpus`: names of the local GPUs, or the cluster."""
    value, blackwell = variables.get(TOPIC), any(chip.lower() in name.lower() for name in gpus for chip in BLACKWELL)
    split = given is None or any((given[name] or 1) > 1 for name in SPLIT)
    sharded = given is not None and any(given[name] for name in SHARDED)
    overlapped = given is None or bool(given["overlap_moe_expert_parallel_comm"])
    if sharded and value == "1":
        needs = "Megatron stops: sharded parameters need several queues"
        yield Finding(TOPIC, "defeats", value, needs, "unset it, or set 32")
    elif value != "1" and split and not (sharded or blackwell or overlapped):
        needs = "Megatron stops: with tensor or context parallelism it needs one queue on GPUs before Blackwell"
        todo = "set 1" if gpus else "set 1, unless the launch is for Blackwell: --cluster says so"
        yield Finding(TOPIC, "defeats", value or "not set", needs, todo)
    elif value != "1":
        yield Finding(TOPIC, "good", value or "not set")
    elif blackwell or not split:
        costs = "all streams share one queue: recomputation may wait for collectives; Megatron does not need it here"
        why = "on Blackwell" if blackwell else "without tensor or context parallelism"
        yield Finding(TOPIC, "slows", f"1, {why}", costs, "unset it, or set 32")
    else:
        costs = "one queue for all streams: the gain of overlap differs by up to 2x with the order of launches"
        yield Finding(TOPIC, "note", "1, as Megatron wants it before Blackwell", costs, "measure: megatron-lynx compare")
    for name in ("TORCH_NCCL_ENABLE_TIMING", "TORCH_NCCL_DESYNC_DEBUG") if value == "1" else ():
        if switched_on(variables, name):  # measured on an H100: benchmarks/results/2026-11-22-hardware-queues.md
            costs = "torch takes the time behind every collective; with one hardware queue compute waits for it: nothing overlaps"
            yield Finding(name, "defeats", f"set, with {TOPIC}=1", costs, "unset it")


ALL_STREAMS = "TORCH_NCCL_HIGH_PRIORITY"

H100 = 132


def beside_collectives(reading: Reading | None, variables: Mapping[str, str], plan: Plan | None) -> Iterator[Finding]:
    """Kernels that compete with collectives. A plan determines the norms in windows, and the groups of windows."""
    yield from _norm_margin(reading, variables, plan)
    if reading is not None:
        yield from _stream_priority(reading, variables, plan)


def _norm_margin(reading: Reading | None, variables: Mapping[str, str], plan: Plan | None) -> Iterator[Finding]:
    rows = _rows_of(reading) if reading is not None else None if plan is None else _planned_rows(plan)
    if rows is None or switched_on(variables, CUDNN):
        return
    margin = variables.get(FORWARD_MARGIN, "0")
    if margin.isdecimal() and int(margin) > 0:
        yield Finding(FORWARD_MARGIN, "good", f"{margin}; {rows}")
        return
    norms = None if plan is None else norms_in_windows(plan)
    if norms == ():
        yield Finding(FORWARD_MARGIN, "good", f"{margin}; the plan recomputes no norm in a window")
        return
    which = "" if norms is None else f"the plan recomputes {' and '.join(norms)} in windows: "
    costs = (
        f"{which}such a norm starts on all multiprocessors or not at all, so in a window it waits until the collective is over, "
        "and everything behind it waits, too: nothing is hidden"
    )
    todo = (
        f"export {FORWARD_MARGIN}={USUAL_MARGIN}, as Megatron's examples do, or as many as NCCL has channels; norms then take at "
        f"most {USUAL_MARGIN / (H100 - USUAL_MARGIN):.0%} longer on {H100} multiprocessors. {BACKWARD_MARGIN} does the same for "
        "backward, beside reductions of gradients"
    )
    yield Finding(FORWARD_MARGIN, "note" if norms is None else "slows", f"{margin}; {rows}", costs, todo)


def _rows_of(reading: Reading) -> str | None:
    """Rows of a launch's norms, if they are cooperative kernels."""
    given = reading.given
    if given["transformer_impl"] == "local" or (given["fp8"] and given["fp8_recipe"] == "mxfp8"):  # mxfp8 uses cuDNN's norms
        return None
    width, kind = given["hidden_size"] or 0, given["normalization"]
    norm: Norm = "rmsnorm" if kind == "RMSNorm" else "layernorm"
    as_one = starts_as_one(norm, width, half_precision=bool(given["bf16"] or given["fp16"]))
    return f"{kind} of rows of {width}" if as_one else None


def _planned_rows(plan: Plan) -> str | None:
    """Rows of a plan's norms, if cooperative kernels for both kinds of norm: the plan does not know the kind."""
    model = plan.model
    of_te = model.implementation == "transformer_engine" and model.fp8 != "mxfp8"
    as_one = all(starts_as_one(norm, model.hidden) for norm in get_args(Norm))
    return f"norms of rows of {model.hidden}" if of_te and as_one else None


def _stream_priority(reading: Reading, variables: Mapping[str, str], plan: Plan | None) -> Iterator[Finding]:
    """With one hardware queue kernels start in the order of their issue, and priorities have no effect."""
    topic, given = "priority of collectives", reading.given
    groups = groups_of(reading) if plan is None else groups_waited_for(plan)
    if variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1" or not groups:
        return
    if switched_on(variables, ALL_STREAMS):
        yield Finding(topic, "good", f"{ALL_STREAMS}: high for all groups")
        return
    if (path := given["nccl_communicator_config_path"]) is not None:
        costs = f"with several hardware queues these need it: {' '.join(groups)}"
        yield Finding(topic, "note", f"as {path} says", costs, "is_high_priority_stream: true there, for each")
        return
    # interleaved schedules may receive gradients in other groups than Megatron's (`apply.hooks.steps`)
    apart = "pp" in groups and reading.is_chunked and given["overlap_p2p_comm"] is not False
    raised = given["high_priority_stream_groups"] or []
    missing = [group for group in groups if group not in raised or (group == "pp" and apart)]
    if not missing:
        yield Finding(topic, "good", f"high for {' '.join(groups)}")
        return
    costs = (
        "several hardware queues: a GEMM that is recomputed in a window may take all multiprocessors before the collective's "
        "kernel has any; each collective then ends later by up to one kernel, and its window is that much shorter"
    )
    flag = f"--high-priority-stream-groups {' '.join(dict.fromkeys([*raised, *missing]))}"
    todo = f"export {ALL_STREAMS}=1: gradients are received in other groups than pp" if apart else flag
    whose = "windows of" if plan is None else "the plan's windows:"
    yield Finding(topic, "slows", f"normal; {whose} {' '.join(missing)}", costs, todo)


def groups_of(reading: Reading) -> tuple[Group, ...]:
    """Groups that the launch waits for in a pass: a plan may put work there."""
    given = reading.given
    sizes: dict[Group, int] = {
        "tp": 1 if given["tp_comm_overlap"] else given["tensor_model_parallel_size"] or 1,
        "ep": (given["expert_model_parallel_size"] or 1) if given["num_experts"] else 1,
        "pp": given["pipeline_model_parallel_size"] or 1,
    }
    return tuple(group for group, size in sizes.items() if size > 1)
