"""An optimizer on the host (`--optimizer-cpu-offload`): device bytes, host bytes, seconds.

Megatron's `HybridDeviceOptimizer` steps a share f of a rank's parameters on the CPU, whole tensors at a time:

    bytes per parameter           device                              host
      that stays (1 - f)          main 4, moments 8; gradients in     -
                                  16 bits have a copy in fp32, 4
      that is offloaded (f)       -                                   main 4, moments 8; gradient 4, pinned

    an update     gradients ── 4 B, pinned ──> host ── fused AdamW, all in fp32 ──> 4 B, pageable ──> weights
    not overlapped     | out | step | back |
    overlapped         | out ...                each tensor is stepped when its own gradient has arrived; copies back are
                         | step back step back  pageable, so the host waits for them between steps

The types of a precision-aware optimizer (`exp_avg_dtype`, `main_params_dtype`) do not apply: stepped tensors have fp32 copies.
The fp32 copy of a 16-bit gradient is never freed; the next one replaces it.

With `--chunked-optimizer-state-offload` (formerly `--offload-optimizer-states`; Megatron's dev branch, pull requests 2760, 6244
and 6544) the update runs on the device, and the host holds states between updates:

    gradients reduced | update                          | forward
    main, chunk 1 in  | chunk 2 in   chunk 3 in   ...   | main, last chunk out
                        chunk 1      chunk 2 ...          (not waited for)
                                     chunk 1 out  ...

The optimizer on the host is built twice: first from whole parameters, where those that stay get an fp32 copy on the device, then
from the rank's own. Copies between types convert on the device if non-blocking (PyTorch, `Copy.cu`), so both directions move four
bytes. Source: megatron-core 0.16.1 and 0.19.0 (`hybrid_optimizer.py`, `distrib_optimizer.py`, `get_megatron_optimizer`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megatron_lynx.config.cluster import HostAdam
from megatron_lynx.config.job import Job
from megatron_lynx.cost.parameters import (
    FP32_BYTES,
    MOMENTS_BYTES,
    Parameters,
    bytes_each,
    owned_parameters,
    restored_bytes,
    stage_parameters,
)
from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.units import GIB, format_bytes, format_seconds

PINNED_ROUNDING = 2
"""PyTorch rounds pinned blocks up to powers of two (`CachingHostAllocator`): at most twice the size."""
PAGEABLE = 4.5
"""Slowdown of copies from pageable memory: pinning made such copies 4 to 5 times as fast on nodes of eight GPUs, 6 times on one
(deepspeedai/DeepSpeed, pull request 5301)."""


@dataclass(frozen=True)
class HostUpdate:
    """One rank's update on the host, while the node's other ranks run theirs."""

    out_s: float
    step_s: float
    back_s: float
    overlapped: bool

    @property
    def total_s(self) -> float:
        in_line_s = self.step_s + self.back_s
        return max(self.out_s, in_line_s) if self.overlapped else self.out_s + in_line_s


@dataclass(frozen=True)
class OnHost:
    share: float
    rank_bytes: int
    seconds: HostUpdate | None
    """Unknown without the cluster's rates; None if updates run on the device."""
    states: bool = False
    """Whether only states are on the host, and updates run on the device."""
    cpus: str = ""

    @classmethod
    def of(cls, job: Job, adam: HostAdam | None, *, priced: bool) -> OnHost | None:
        """Return None if the optimizer is on the device. `priced`: whether to compute seconds."""
        if not job.optimizer.on_host:
            return None
        stages = range(job.parallel.pipeline)
        rank_bytes = max(optimizer_host_bytes(job, stage) for stage in stages)
        if share := job.optimizer.states_on_host:
            return cls(share, rank_bytes, None, states=True)
        most_parameters = max((stage_parameters(job, stage) for stage in stages), key=lambda parameters: parameters.total)
        seconds = host_seconds(job, owned_parameters(job, most_parameters), adam) if priced else None
        node = job.cluster.node
        return cls(job.optimizer.offloaded, rank_bytes, seconds, cpus="unknown CPUs" if node is None else node.cpus_in_words)

    @property
    def as_json(self) -> dict[str, Any]:
        seconds = None if self.seconds is None else {**asdict(self.seconds), "total_s": self.seconds.total_s}
        return {"share": self.share, "rank_bytes": self.rank_bytes, "seconds": seconds, "states": self.states}

    @property
    def in_words(self) -> str:
        what = "optimizer's states on the host between updates" if self.states else "optimizer on the host"
        held = f"{what}: {self.share:g} of it, {format_bytes(self.rank_bytes)} of each rank"
        if self.seconds is None:
            return held
        spent = (("gradients out", self.seconds.out_s), ("AdamW", self.seconds.step_s), ("parameters back", self.seconds.back_s))
        how = "overlapped" if self.seconds.overlapped else "one after the other"
        parts = ", ".join(f"{name} {format_seconds(value)}" for name, value in spent)
        return f"{held}; {format_seconds(self.seconds.total_s)} a step ({parts}, {how}; {self.cpus})"


def host_seconds(job: Job, owned: float, adam: HostAdam | None) -> HostUpdate:
    """Return the seconds of a rank that owns `owned` parameters. Raises `ConfigError` if the CPU's Adam rate is unknown."""
    count, cluster = job.optimizer.offloaded * owned, job.cluster
    if not count:
        return HostUpdate(0.0, 0.0, 0.0, overlapped=False)
    if adam is None:
        todo = "name a file that has it (host_time: hosts/intel-xeon-h100), or measure it: megatron-lynx profile"
        raise ConfigError(
            "an update on the host cannot be priced", [Problem("cluster: host_time.adam", "nothing", "parameters a second", todo)]
        )
    copied_s = 0.0 if cluster.pcie is None else cluster.pcie.shared_s(FP32_BYTES * count)
    step_s = count / adam.parameters_per_s(job.host_sharers, cluster.node)
    return HostUpdate(copied_s, step_s, PAGEABLE * copied_s, job.optimizer.overlap_copies)


def states_s(job: Job, parameters: Parameters, adam_s: float, reduction_s: float) -> float:
    """Return the time an update waits for states from the host. The first chunk overlaps the gradient reduction, the others the
    update. Copies in both directions overlap. 0 without a description of PCIe."""
    sizes, owned, pcie = bytes_each(job), owned_parameters(job, parameters), job.cluster.pcie
    if pcie is None or not job.optimizer.states_on_host:
        return 0.0
    main, window = restored_bytes(job, parameters)
    first = window / 2 if job.optimizer.chunk_mib else window
    other_chunks_bytes = max(0.0, job.optimizer.states_on_host * sizes.moments * owned - first)
    return max(0.0, pcie.shared_s(main + first) - reduction_s) + max(0.0, pcie.shared_s(other_chunks_bytes) - adam_s)


def optimizer_host_bytes(job: Job, stage: int) -> int:
    """Return the peak host memory of one rank's optimizer, pinned blocks included."""
    share, parameters = job.optimizer.offloaded, stage_parameters(job, stage)
    if states := job.optimizer.states_on_host:
        sizes = bytes_each(job)
        return round(PINNED_ROUNDING * states * (sizes.main_parameter + sizes.moments) * owned_parameters(job, parameters))
    if not share:
        return 0
    owned, element_bytes = owned_parameters(job, parameters), job.model.element_bytes
    stepped = (FP32_BYTES + MOMENTS_BYTES) * owned
    made = FP32_BYTES * (parameters.total + owned)  # in both builds, before moments exist
    pinned = element_bytes * parameters.total + (element_bytes + FP32_BYTES) * owned
    return round(share * (max(stepped, made) + PINNED_ROUNDING * pinned))


def made_bytes(job: Job, parameters: Parameters) -> int:
    """Return the device memory that building the optimizer needs beyond its state: copies of whole parameters."""
    if not job.optimizer.offloaded:
        return 0
    share = 1 - job.optimizer.offloaded
    return max(0, round(share * (FP32_BYTES * parameters.total - MOMENTS_BYTES * owned_parameters(job, parameters))))


def left_for_activations_bytes(job: Job, stage: int) -> float:
    """Return a node's host memory less its ranks' optimizers, all taken to be of this stage; infinite if not described."""
    if job.cluster.node is None:
        return float("inf")
    return job.cluster.node.host_memory_gib * GIB - job.host_sharers * optimizer_host_bytes(job, stage)


def least_left_bytes(job: Job) -> float:
    return min(left_for_activations_bytes(job, stage) for stage in range(job.parallel.pipeline))


def host_shortage(job: Job, rank_bytes: float, stage: int | None = None) -> Problem | None:
    """Return the problem if a node cannot hold `rank_bytes` of offloaded activations per rank, else None. All devices are taken
    to be of `stage`; by default, of the stage with the largest optimizer."""
    node, devices = job.cluster.node, job.host_sharers
    if node is None or (not rank_bytes and not job.optimizer.on_host):
        return None
    left = least_left_bytes(job) if stage is None else left_for_activations_bytes(job, stage)
    if (needed := devices * rank_bytes) <= left:
        return None
    optimizers = node.host_memory_gib * GIB - left
    parts = {"the optimizer's state and its copies": optimizers, "activations": needed}
    finding = ", ".join(f"{format_bytes(size)} of {name}" for name, size in parts.items() if size)
    return Problem(
        "host memory of a node" if stage is None else f"host memory of a node, stage {stage}",
        f"{finding} ({devices} devices)",
        f"at most {node.host_memory_gib:g} GiB, which {job.cluster.name} is taken to have "
        "(node.host_memory_gib, --host-memory-gib)",
        "state what the nodes have, or send less to the host",
    )
