"""Finds settings of this machine, or of a launch, that keep recomputation from overlapping with communication.

machine       versions, fingerprints, GPUs, NUMA, host memory, NICs and NVLink, without initialising CUDA
environment   variables: waits, the allocator, hardware queues
launch        flags that remove windows, messages that synchronise, results that the host reads
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from megatron_lynx.config.cluster import Cluster
from megatron_lynx.config.loader import load_cluster
from megatron_lynx.environment import ALLOCATOR, GROWING, nccl_ub_stands_alone, switched_on, version_of
from megatron_lynx.errors import HookRefused
from megatron_lynx.free_memory import free_memory
from megatron_lynx.launch_arguments import Reading, read_launch
from megatron_lynx.launch_arguments.given import Given
from megatron_lynx.launch_arguments.reading import unknown_in_words
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


def findings(words: Sequence[str] = (), *, cluster: str | None = None) -> Iterator[Finding]:
    """`cluster`: of the launch, judged instead of a machine without GPUs. Raises `ConfigError` for words that are no launch."""
    reading = read_launch(words) if words else None
    variables = {**os.environ, **dict(reading.command.environment if reading else ())}
    yield from software()
    named = None if cluster is None else load_cluster(cluster, "--cluster")
    here = gpus()
    elsewhere = None if named is None or named.node is None or here else named
    yield from machine(reading.command.launcher if reading else (), elsewhere=elsewhere)
    if here:
        yield from links(named, Links.of_machine())
    devices = here if elsewhere is None else [elsewhere.name]
    yield from hardware_queues(variables, reading.given if reading else None, devices)
    yield from environment(variables, nccl_ub=reading is not None and bool(reading.given["nccl_ub"]))
    if reading is not None:
        yield from launch(reading)


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


def environment(variables: Mapping[str, str], *, nccl_ub: bool = False) -> Iterator[Finding]:
    """`nccl_ub`: whether the launch has --use-nccl-ub."""
    yield _allocator(variables, nccl_ub=nccl_ub)
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


def _allocator(variables: Mapping[str, str], *, nccl_ub: bool) -> Finding:
    name = next((name for name in ALLOCATOR if name in variables), ALLOCATOR[-1])
    setting = variables.get(name, "")
    if GROWING in setting:
        return Finding(name, "good", setting)
    costs = "recomputation and copies allocate in another order than forward: fragments count against the memory budget"
    todo = f"set {GROWING}"
    if nccl_ub and nccl_ub_stands_alone(version_of("torch") or "", version_of("megatron-core", "megatron_core") or ""):
        todo = f"leave it so: {GROWING} and --use-nccl-ub need torch 2.11 and megatron-core 0.18"
    return Finding(name, "note", setting or "not set", costs, todo)


TOPIC = "CUDA_DEVICE_MAX_CONNECTIONS"
BLACKWELL = ("B100", "B200", "B300", "Blackwell", "GB10")
"""Parts of GPU names, also of GB200 and GB300."""


def hardware_queues(variables: Mapping[str, str], given: Given | None, gpus: Sequence[str]) -> Iterator[Finding]:
    """`given`: the launch's arguments, if any. `gpus`: names of the local GPUs, or the cluster."""
    value, blackwell = variables.get(TOPIC), any(chip.lower() in name.lower() for name in gpus for chip in BLACKWELL)
    split = given is None or any((given[f"{group}_parallel_size"] or 1) > 1 for group in ("tensor_model", "context"))
    if value != "1":
        yield Finding(TOPIC, "good", value or "not set")
        return
    if blackwell or not split:
        costs = "all streams share one queue: recomputation may wait for collectives; Megatron does not need it here"
        why = "on Blackwell" if blackwell else "without tensor or context parallelism"
        yield Finding(TOPIC, "slows", f"1, {why}", costs, "unset it, or set 32")
    else:
        costs = "one queue for all streams: the gain of overlap differs by up to 2x with the order of launches"
        yield Finding(TOPIC, "note", "1, as Megatron wants it before Blackwell", costs, "measure: megatron-lynx compare")
    for name in ("TORCH_NCCL_ENABLE_TIMING", "TORCH_NCCL_DESYNC_DEBUG"):
        if switched_on(variables, name):  # measured on an H100: benchmarks/results/2026-11-22-hardware-queues.md
            costs = "torch takes the time behind every collective; with one hardware queue compute waits for it: nothing overlaps"
            yield Finding(name, "defeats", f"set, with {TOPIC}=1", costs, "unset it")


def launch(reading: Reading) -> Iterator[Finding]:
    given = reading.given
    tensor, pipeline = given["tensor_model_parallel_size"] or 1, given["pipeline_model_parallel_size"] or 1
    userbuffers = bool(given["tp_comm_overlap"]) and tensor > 1
    if userbuffers:
        costs = "exchanges lie inside GEMMs: no tensor-parallel windows, linears do not run again; `plan` says whether that pays"
        yield Finding("userbuffers", "note", given.origin("tp_comm_overlap"), costs)
    experts = (given["expert_model_parallel_size"] or 1) if given["num_experts"] else 1
    sizes = {"tp": 1 if userbuffers else tensor, "ep": experts, "pp": pipeline}
    if groups := [group for group, size in sizes.items() if size > 1]:
        yield Finding("windows", "good", f"waits for {', '.join(groups)}")
    else:
        state = f"{'userbuffers' if userbuffers else f'tensor {tensor}'}, pipeline {pipeline}, no exchange of experts"
        costs = "nothing can be hidden: recomputation would be exposed, only copies to the host overlap"
        todo = "compare with a plan without --tp-comm-overlap" if userbuffers else "stock recomputation does as well here"
        yield Finding("windows", "defeats", state, costs, todo)
    if pipeline > 1:
        yield _messages(reading)
    yield _checked_results(reading)
    if (unknown := unknown_in_words(reading)) is not None:
        yield Finding("unknown flags", "note", unknown, "if Megatron's own, they are mistyped, and it stops")
    for problem in reading.problems:
        yield Finding("launch", "note", str(problem), "no plan can be made of this launch as it stands")
    for flag, instead in reading.priced_as:
        yield Finding(flag, "note", "given", f"plans count it as {instead}")


def _messages(reading: Reading) -> Finding:
    """Messages between stages: plain schedules end every exchange in a device-wide wait that no flag disables."""
    given, chunked = reading.given, reading.is_chunked
    if chunked and given["overlap_p2p_comm"] is not False:
        return Finding("messages between stages", "good", "interleaved schedule: waited for later than issued")
    costs = "every message ends in torch.cuda.synchronize(): recomputation still overlaps, the host has nothing queued after it"
    costs += ", and copies to the host that were asked for before it are waited for (plans: beside_messages: avoid)"
    if chunked:
        todo = "drop it: overlapped messages need no sync"
        return Finding("batch_p2p_sync", "slows", given.origin("overlap_p2p_comm"), costs, todo)
    todo = "set config.batch_p2p_sync to False in the training script (no flag does), or use virtual stages"
    return Finding("batch_p2p_sync", "slows", "on, Megatron's default without virtual stages", costs, todo)


def _checked_results(reading: Reading) -> Finding:
    """Megatron checks for NaN: `loss_func` of pretrain_gpt.py reads the loss twice, `check_grads` each bucket's norm."""
    given, topic = reading.given, "check for NaN"
    if not given["check_for_nan_in_loss_and_grad"]:
        return Finding(topic, "good", given.origin("check_for_nan_in_loss_and_grad"))
    if given["fp16"] and not given["loss_scale"]:
        return Finding(topic, "good", "off: Megatron leaves it to the dynamic loss scale")
    costs = (
        "the last stage's host reads each micro-batch's loss twice, every rank the norm of each bucket of gradients before it is "
        "reduced: Python's lead is gone there, and the GPU waits until the backward's first kernels are issued"
    )
    todo = (
        "--no-check-for-nan-in-loss-and-grad; what is lost: the run no longer stops at a rank's first NaN or Inf, "
        "and does not run the step again to find a faulty GPU; the log still counts steps with a NaN"
    )
    return Finding(topic, "note", f"on, {given.origin('check_for_nan_in_loss_and_grad')}", costs, todo)


RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec\b")
LINK = re.compile(r"Link \d+: (\d+(?:\.\d+)?) GB/s\s*")
OFF = 0.1
"""Relative difference to the assumed rate that changes predictions noticeably."""


class Links(NamedTuple):
    nic_gbit: tuple[float, ...] = ()
    nvlink_gb_s: float | None = None
    """One direction of all links of the GPU with fewest; None without any."""

    @classmethod
    def of_machine(cls, root: Path = Path("/")) -> Links:
        return cls(nics(root), nvlink_of(nvidia_smi("nvlink", "--status")))

    @property
    def usual_gbit(self) -> float | None:
        """Rate of most ports, the larger one of two as frequent: a port for storage is often slower."""
        return max(self.nic_gbit, key=lambda rate: (self.nic_gbit.count(rate), rate), default=None)

    @property
    def in_words(self) -> str:
        rates = sorted(set(self.nic_gbit))
        nic = ", ".join(f"{self.nic_gbit.count(rate)} NICs of {rate:g} Gbit/s" for rate in rates) or "no active NIC found"
        return f"{nic}; {'no NVLink found' if self.nvlink_gb_s is None else f'NVLink {self.nvlink_gb_s:g} GB/s'}"

    def options(self, cluster: Cluster | None) -> Iterator[str]:
        nic, nvlink = (None, None) if cluster is None else (cluster.nic, cluster.nvlink)
        if self.usual_gbit is not None and not (nic and _alike(self.usual_gbit, 8 * nic.gb_per_s)):
            yield f"--nic-gbit {self.usual_gbit:g}"
        if self.nvlink_gb_s is not None and not (nvlink and _alike(self.nvlink_gb_s, nvlink.gb_per_s)):
            yield f"--nvlink-gb-s {self.nvlink_gb_s:g}"


def links(cluster: Cluster | None, found: Links) -> Iterator[Finding]:
    """`cluster`: the one that seconds assume, if it is named."""
    options = " ".join(found.options(cluster))
    if not options:
        yield Finding("links", "good" if found.nic_gbit or found.nvlink_gb_s else "note", found.in_words)
        return
    costs = "" if cluster is None else f"seconds are for other links, those of {cluster.name}"
    yield Finding("links", "note", found.in_words, costs, f"give {options}")


def nics(root: Path) -> tuple[float, ...]:
    rates = []
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        try:
            state, rate = ((port / name).read_text(errors="replace") for name in ("state", "rate"))
        except OSError:
            continue
        if "ACTIVE" in state and (read := RATE.match(rate.strip())) and float(read[1]) > 0:
            rates.append(float(read[1]))
    return tuple(rates)


def nvlink_of(status: str) -> float | None:
    """Return the GB/s of the GPU with the slowest links in the output of `nvidia-smi nvlink --status`; None without any."""
    totals: list[float] = []
    for line in status.splitlines():
        if line.startswith("GPU "):
            totals.append(0.0)
        elif totals and (read := LINK.fullmatch(line.strip())):
            totals[-1] += float(read[1])
    return round(min(totals)) or None if totals else None


def _alike(found: float, assumed: float) -> bool:
    return abs(found / assumed - 1) <= OFF
