"""Fixed costs of an update, at any batch size: kernel launches, small all-reduces, host synchronisations.

    clear grads ... last backward | check, reduce | norms, shared embedding | norm, sync
    clip, Adam, copy | gather | success sync, largest norm sync | loss sync

Python between these kernels is not counted.

Source: megatron-core 0.16.1 (`param_and_grad_buffer.py`, `finalize_model_grads.py`, `distrib_optimizer.py`, `clip_grads.py`) and
Megatron-LM's `train_step`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from megatron_lynx.config.job import Job
from megatron_lynx.cost.parameters import Parameters, bytes_each, parameter_tensors
from megatron_lynx.profiler.roofline import link_among

BLOCKS, BLOCK_ELEMENTS = 320, 65_536
"""Limits of one multi-tensor launch (Apex's and Transformer Engine's `multi_tensor_apply`)."""
TENSORS = {"norm": 110, "clip": 64, "copy": 64, "adam": 36}
"""Maximum tensors of one launch; fewer with more lists (`depth_to_max_tensors`)."""
CHECK_KERNELS = 4
"""Kernels that check one bucket: norm, isnan, abs, isinf."""
NORM_KERNELS = 3
"""Kernels beside the launches of the norm: clear a flag, add partial sums, square."""
CHECK_WAITS, RESTART_S = 2, 20e-6
"""Host synchronisations per checked bucket, and seconds from a host call to its kernel's start on an idle device: NVIDIA's guide
to the overheads in Nsight Systems (element-wise kernel, V100), quoted by groundy.com, "Every CUDA Kernel Pays a Launch Tax".
"""


@dataclass(frozen=True)
class Fixed:
    """Counts of one update on one stage."""

    kernels: int
    waits: int
    collectives_s: float
    """Latencies of collectives, and the whole exchange of a shared embedding's gradient."""

    def seconds(self, kernel_s: float, wait_s: float) -> float:
        return self.kernels * kernel_s + self.waits * wait_s + self.collectives_s


def fixed_s(job: Job, stage: int, parameters: Parameters, buckets: int) -> float:
    """Return the fixed seconds of an update with this number of gradient buckets; 0 if the cluster's figures are missing."""
    cluster = job.cluster
    if cluster.hbm is None or cluster.pcie is None or cluster.nic is None or cluster.node is None:
        return 0.0
    fixed = fixed_of(job, stage, parameters, buckets)
    return fixed.seconds(1e-6 * cluster.hbm.latency_us, 1e-6 * cluster.pcie.latency_us + RESTART_S)


def fixed_of(job: Job, stage: int, parameters: Parameters, buckets: int) -> Fixed:
    alone = job.parallel.pipeline == 1
    optimizers = 2 if parameters.experts else 1  # experts have their own
    checks, norms = CHECK_WAITS * buckets, optimizers
    return Fixed(
        kernels=_kernels(job, stage, parameters, buckets),
        waits=checks + norms + 2 + alone,
        collectives_s=_reduced_s(job, optimizers) + _numbers_s(job, optimizers) + shared_embedding_s(job),
    )


def _kernels(job: Job, stage: int, parameters: Parameters, buckets: int) -> int:
    layout, each = job.parallel, bytes_each(job)
    sharers = layout.context * job.replicas
    owners = job.optimizer_sharers if layout.distributed_optimizer else 1
    tensors = parameter_tensors(job, stage)
    owned = min(tensors.total, tensors.total // owners + 1)

    def launches(over: str) -> int:
        return max(ceil(parameters.total / owners / BLOCKS / BLOCK_ELEMENTS), ceil(owned / TENSORS[over]))

    cleared = job.chunks
    checked = buckets * (CHECK_KERNELS + (sharers > 1))  # and averaged in place, if shared
    gathered = 1 + tensors.vectors if _shares_norms(job) else 0
    copied = owned if each.gradient_copy else 0
    written = owned if layout.distributed_optimizer else launches("copy")
    if job.optimizer.precision_aware:
        written = 0  # written by Adam
    stepped = NORM_KERNELS + launches("norm") + launches("clip") + launches("adam")
    return cleared + checked + gathered + copied + stepped + written


def _shares_norms(job: Job) -> bool:
    return job.parallel.sequence_parallel and job.parallel.tensor > 1


def _reduced_s(job: Job, optimizers: int) -> float:
    """Return the latencies of gradient reductions and parameter gathers. Overlapped ones expose one bucket's."""
    layout = job.parallel
    stage_ranks, buffers = layout.tensor * layout.context * job.replicas, job.chunks * optimizers
    begin_s = _begin_s(job, stage_ranks) if layout.context * job.replicas > 1 else 0.0
    reductions = (1 if job.overlap.gradients else buffers) * (1 + (layout.optimizer_instances > 1))
    gathers = 0
    if layout.distributed_optimizer:
        gathers = 1 if job.overlap.parameters else buffers
    return (reductions + gathers) * begin_s + _begin_s(job, layout.tensor) * _shares_norms(job)


def _numbers_s(job: Job, optimizers: int) -> float:
    """Return the all-reduces of single numbers: norms, success, largest norm, loss. With pipelining the loss overlaps the next
    step.
    """
    layout = job.parallel
    model_ranks = layout.tensor if layout.pipeline == 1 else job.gpus  # whose stages are on other nodes
    norm_s = _begin_s(job, job.gpus if layout.distributed_optimizer else model_ranks)
    loss_s = _begin_s(job, layout.context * job.replicas * layout.tensor) if layout.pipeline == 1 else 0.0
    return optimizers * norm_s + 2 * _begin_s(job, model_ranks) + loss_s


def shared_embedding_s(job: Job) -> float:
    """Return the all-reduce of a shared embedding's gradient between first and last stage (tied embeddings or MTP).

    It is exposed, because the first stage finishes its backward last.
    """
    if not (job.model.tied_embeddings or job.model.mtp) or job.parallel.pipeline == 1:
        return 0.0
    words = job.model.vocab * job.model.hidden // job.parallel.tensor
    return link_among(job.cluster, job.gpus).seconds(words * bytes_each(job).gradient)


def _begin_s(job: Job, ranks: int) -> float:
    """Return the latency of a collective among `ranks` ranks."""
    return 0.0 if ranks == 1 else link_among(job.cluster, ranks).seconds(0)
