"""What an update costs however small the batch, beside the bytes that it moves: kernels, small all-reduces, waits of the host.

    cleared [1] ... last backward | checked [2], reduced [3] | norms, shared embedding [4] | norm [5] wait
    clip, Adam, copy [1] | gather [3] | success wait, largest norm wait [5] | loss wait [6]

 [1] kernels over many tensors at once, each of which begins and ends; copies of the distributed optimizer are one a tensor
 [2] every bucket's norm, which the host waits for twice (--no-check-for-nan-in-loss-and-grad would leave that out)
 [3] begun once for every buffer; where it overlaps passes, once for the one bucket that they do not hide (`cost.update`)
 [4] norms' gradients among tensor-parallel ranks with sequence parallelism; a shared embedding's between the model's two ends
 [5] one number over all ranks that share the update. The host waits for it, and then for two more, of the model-parallel ranks
 [6] averaged and printed, by the last stage. With several stages it does that while the first one begins the next step

What Python takes between these kernels is not counted, because nobody has measured it: the host waits for the norm, so that it
has no lead when it issues Adam. As read in megatron-core 0.16.1 (`param_and_grad_buffer.py`, `finalize_model_grads.py`,
`distrib_optimizer.py`, `clip_grads.py`) and in Megatron-LM's `train_step`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from megatron_lynx.config.job import Job
from megatron_lynx.cost.parameters import Parameters, bytes_each, parameter_tensors
from megatron_lynx.profiler.roofline import link_among

BLOCKS, BLOCK_ELEMENTS = 320, 65_536
"""Of one launch over many tensors (Apex's and Transformer Engine's `multi_tensor_apply`)."""
TENSORS = {"norm": 110, "clip": 64, "copy": 64, "adam": 36}
"""The most tensors of one launch: fewer the more lists there are (`depth_to_max_tensors`)."""
CHECK_KERNELS = 4
"""Of one bucket: its norm, is it a number, its absolute value, is that infinite."""
NORM_KERNELS = 3
"""Beside the launches of the norm: a flag cleared, partial sums added, squared."""
CHECK_WAITS, RESTART_S = 2, 20e-6
"""Seconds from a host's call until PyTorch's kernel runs on an idle device: NVIDIA's example in its guide to the overheads that
Nsight Systems shows (an element-wise kernel, V100), as groundy.com quotes it in "Every CUDA Kernel Pays a Launch Tax"."""


@dataclass(frozen=True)
class Fixed:
    """How often what happens in one update of one stage."""

    kernels: int
    waits: int
    collectives_s: float
    """Beginnings of collectives, and those that are nothing but one; the exchange of a shared embedding's gradient whole."""

    def seconds(self, kernel_s: float, wait_s: float) -> float:
        return self.kernels * kernel_s + self.waits * wait_s + self.collectives_s


def fixed_s(job: Job, stage: int, parameters: Parameters, buckets: int) -> float:
    """Seconds on a stage with these parameters, whose gradients are reduced in so many buckets; 0 where figures are missing."""
    cluster = job.cluster
    if cluster.hbm is None or cluster.pcie is None or cluster.nic is None or cluster.node is None:
        return 0.0
    fixed = fixed_of(job, stage, parameters, buckets)
    return fixed.seconds(1e-6 * cluster.hbm.latency_us, 1e-6 * cluster.pcie.latency_us + RESTART_S)


def fixed_of(job: Job, stage: int, parameters: Parameters, buckets: int) -> Fixed:
    """The counts of one update."""
    alone = job.parallel.pipeline == 1
    optimizers = 2 if parameters.experts else 1  # experts have one of their own
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
        written = 0  # by Adam
    stepped = NORM_KERNELS + launches("norm") + launches("clip") + launches("adam")
    return cleared + checked + gathered + copied + stepped + written


def _shares_norms(job: Job) -> bool:
    return job.parallel.sequence_parallel and job.parallel.tensor > 1


def _reduced_s(job: Job, optimizers: int) -> float:
    """Beginnings of what moves gradients and parameters."""
    layout = job.parallel
    stage_ranks, buffers = layout.tensor * layout.context * job.replicas, job.chunks * optimizers
    begin_s = _begin_s(job, stage_ranks) if layout.context * job.replicas > 1 else 0.0
    reductions = (1 if job.overlap.gradients else buffers) * (1 + (layout.optimizer_instances > 1))
    gathers = 0
    if layout.distributed_optimizer:
        gathers = 1 if job.overlap.parameters else buffers
    return (reductions + gathers) * begin_s + _begin_s(job, layout.tensor) * _shares_norms(job)


def _numbers_s(job: Job, optimizers: int) -> float:
    """All-reduces of one number: norms, success, the largest norm, the loss."""
    layout = job.parallel
    model_ranks = layout.tensor if layout.pipeline == 1 else job.gpus  # whose stages lie apart
    norm_s = _begin_s(job, job.gpus if layout.distributed_optimizer else model_ranks)
    loss_s = _begin_s(job, layout.context * job.replicas * layout.tensor) if layout.pipeline == 1 else 0.0
    return optimizers * norm_s + 2 * _begin_s(job, model_ranks) + loss_s


def shared_embedding_s(job: Job) -> float:
    """The all-reduce of a shared embedding's gradient between first and last stage, whose head it is tied to, or which predicts
    more tokens with it: of two ranks each sends as much as it has.

    The first stage is the last to end its backward, so nothing hides it.
    """
    if not (job.model.tied_embeddings or job.model.mtp) or job.parallel.pipeline == 1:
        return 0.0
    words = job.model.vocab * job.model.hidden // job.parallel.tensor
    return link_among(job.cluster, job.gpus).seconds(words * bytes_each(job).gradient)


def _begin_s(job: Job, ranks: int) -> float:
    """One collective of nothing among so many ranks. Alone, a rank has nothing to wait for."""
    return 0.0 if ranks == 1 else link_among(job.cluster, ranks).seconds(0)
