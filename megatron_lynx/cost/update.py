"""Seconds of the update on the stage with most parameters: gradient reduction, optimizer, parameter gather.

    nothing overlapped   ... B | reduce | Adam | gather | F ...
    gradients            ... B             Adam | gather | F ...     by bucket, during the last micro-batch's backward; the last
                         reduce ... last                             bucket is exposed
    parameters           ... B | reduce | Adam | first | F ...       by bucket, during the first forward; the first bucket is
                                               gather ......         exposed

With several instances of the distributed optimizer gradients are reduced within each, then each rank's share between them;
parameters are gathered within. Overlap slows GEMMs (`matmul.beside_collective`). The overlapped pass is taken without
recomputation, for all policies alike.

Fixed costs, at any batch size: kernel launches, small all-reduces, host synchronisations. Python between these kernels is not
counted.

Source: megatron-core 0.16.1 (`param_and_grad_buffer.py`, `finalize_model_grads.py`, `distrib_optimizer.py`, `clip_grads.py`) and
Megatron-LM's `train_step`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf

from megatron_lynx.config.job import Job
from megatron_lynx.cost import parameters
from megatron_lynx.cost.host_optimizer import host_seconds, states_s
from megatron_lynx.cost.muon import newton_schulz_s
from megatron_lynx.cost.parameters import Parameters
from megatron_lynx.cost.stage import of_every_stage, stage_seconds
from megatron_lynx.kinds.experts.planning import expert_sharers
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.roofline import collective_s, fewest_in_a_node, link_among
from megatron_lynx.profiler.shape import Casts
from megatron_lynx.timeline import Passes


@dataclass(frozen=True)
class UpdateSeconds:
    """Update of parameters shared by one group of ranks, each part without overlap."""

    reduce_s: float
    adam_s: float
    gather_s: float
    bucket_share: float
    """Share of one bucket in reductions and gathers."""

    def exposed_s(self, job: Job, behind: Passes) -> float:
        reduce_s, gather_s = self.reduce_s, self.gather_s
        if job.overlap.gradients:
            reduce_s = self._left_s(job, reduce_s, behind.backward_s)
            if not job.parallel.distributed_optimizer:  # an all-reduce; the gather is its second half
                gather_s = self._left_s(job, gather_s, max(0.0, behind.backward_s - self.reduce_s))
        if job.overlap.parameters:
            gather_s = self._left_s(job, gather_s, behind.forward_s)
        return reduce_s + self.adam_s + gather_s

    def passes_left(self, job: Job, behind: Passes) -> Passes:
        """Return the parts of the passes left to hide another group's communication: links are shared."""
        reduced_s = self.reduce_s if job.parallel.distributed_optimizer else self.reduce_s + self.gather_s
        return Passes(max(0.0, behind.forward_s - self.gather_s), max(0.0, behind.backward_s - reduced_s))

    def _left_s(self, job: Job, seconds: float, behind_s: float) -> float:
        left_s = max(seconds * self.bucket_share, seconds - behind_s)
        lost = 0.0 if job.cluster.matmul is None else job.cluster.matmul.beside_collective
        return left_s + lost * (seconds - left_s)


def update_s(job: Job, profile: Profile) -> float:
    """Return the seconds that an update adds to a step, under any policy. Experts have their own buckets and groups."""
    stages = of_every_stage(job, lambda stage: parameters.stage_parameters(job, stage))
    stage = max(range(job.parallel.pipeline), key=lambda stage: stages[stage].total)
    most_parameters, behind = stages[stage], Passes(0.0, 0.0)
    if job.overlap.gradients or job.overlap.parameters:
        behind = stage_seconds(job, profile, stage)
    seconds, adam_s = host_seconds(job, parameters.owned_parameters(job, most_parameters), profile.host_adam).total_s, 0.0
    for group in _groups(job, stages):
        updated = _updated(job, group, parameters.bucket_parameters(job, stage, most_parameters, group.sharers))
        seconds, adam_s = seconds + updated.exposed_s(job, behind), adam_s + updated.adam_s
        behind = updated.passes_left(job, behind)
    seconds += newton_schulz_s(job, stage)
    seconds += states_s(job, most_parameters, adam_s, reduction_s(job))
    return seconds + fixed_s(job, stage, most_parameters, parameters.buckets(job, stage, most_parameters))


def reduction_s(job: Job) -> float:
    return 0.0 if job.overlap.gradients else _reduction_s(job)


def _reduction_s(job: Job) -> float:
    groups = _groups(job, of_every_stage(job, lambda stage: parameters.stage_parameters(job, stage)))
    return sum(_updated(job, group, group.count).reduce_s for group in groups)


def late_reduction_s(job: Job, idle_at_end_s: Sequence[float]) -> float:
    """Return the seconds by which overlapped reductions of stages after the first end after the step (--align-grad-reduce).
    `idle_at_end_s`: from a stage's last weight gradient to the step's end. `update_s` does not count it."""
    if not job.overlap.gradients:
        return 0.0
    return max(0.0, _reduction_s(job) / job.chunks - min(idle_at_end_s[1:], default=inf))


@dataclass(frozen=True)
class _Group:
    count: int
    """Parameters of each rank; `sharers`: ranks with the same ones, `stride` ranks apart."""
    sharers: int
    stride: int
    cast: int
    """Weights that FP8 casts, on the stage with most."""
    in_fp8: int


def _groups(job: Job, stages: Sequence[Parameters]) -> Iterator[_Group]:
    most_parameters, layout = max(stages, key=lambda stage: stage.total), job.parallel
    linears, experts = parameters.held_in_fp8(job, most_parameters)
    cast = max(stage.linears for stage in stages)
    yield _Group(most_parameters.without_experts, layout.context * job.replicas, layout.tensor, cast, linears)
    if most_parameters.experts:
        stride, cast = layout.expert_tensor_size * layout.expert, max(stage.experts for stage in stages)
        yield _Group(most_parameters.experts, expert_sharers(job), stride, cast, experts)


def _updated(job: Job, group: _Group, bucket: int) -> UpdateSeconds:
    count, sharers, stride = group.count, group.sharers, group.stride
    instances = job.parallel.optimizer_instances
    instance_ranks = sharers // instances
    owned, sizes = count / instance_ranks if job.parallel.distributed_optimizer else count, parameters.bytes_each(job)
    hbm = job.cluster.hbm
    streamed = owned * _stepped_bytes(job) + count * (4 if sharers > 1 else 2) * sizes.gradient
    streamed += _cast_bytes(job, group.cast, instance_ranks)
    if job.schedule == "double_buffered":  # the newest version is first copied over the retired one
        streamed += 2 * count * sizes.weight
    moved, byte_per_s = (instance_ranks - 1) / instance_ranks * count, _replica_byte_per_s(job, instance_ranks, stride, instances)
    between = 2 * (instances - 1) / instances * count / instance_ranks  # an all-reduce of the own share
    gathered = moved / count * parameters.gathered_bytes(job, count, group.in_fp8) if count else 0.0
    return UpdateSeconds(
        reduce_s=sizes.gradient * (moved / byte_per_s + between / _replica_byte_per_s(job, instances, stride * instance_ranks)),
        adam_s=0.0 if hbm is None else streamed / hbm.byte_per_s,
        gather_s=(moved * sizes.gradient if not job.parallel.distributed_optimizer else gathered) / byte_per_s,
        bucket_share=min(1.0, bucket / count),
    )


def _cast_bytes(job: Job, linears: int, sharers: int) -> float:
    """Return the bytes read and written to cast weights to FP8 in a step's first micro-batch. Weights stored in FP8 are cast by
    the rank that stepped them, and copied by columns after the gather."""
    if job.model.fp8_recipe is None:
        return 0
    casts = Casts(job.model.fp8_recipe, transposes=job.cluster.transposes_fp8)
    if job.model.fp8_parameters:
        return casts.of(linears, columnwise=False)[0] / sharers + casts.gathered(linears)
    return casts.of(linears, columnwise=True)[0]


def _stepped_bytes(job: Job) -> float:
    """Return the bytes read and written per stepped parameter: gradient (norm 1, clipping 2, Adam 1; first copied, if needed),
    Adam's state twice, and the parameter, from the main parameter in place or (precision-aware) joined with its remainder.
    `_updated` adds clearing, checking and averaging."""
    sizes = parameters.bytes_each(job)
    if job.optimizer.offloaded:  # norm and clipping of all gradients; the rest is stepped in fp32
        stepped = 2 * (sizes.main_parameter + sizes.moments) + parameters.FP32_BYTES + sizes.weight
        return 3 * sizes.gradient + sizes.stays * (2 * sizes.lasting_copy + sizes.gradient + stepped)
    gradient = 5 * sizes.gradient_copy + sizes.gradient if sizes.gradient_copy else 4 * sizes.gradient
    parameter = 2 * sizes.weight if job.optimizer.precision_aware else 4 + sizes.weight
    return gradient + 2 * (sizes.main_parameter + sizes.moments) + parameter


def _replica_byte_per_s(job: Job, sharers: int, stride: int, groups: int = 1) -> float:
    """Return the rate of a ring over one stage's ranks with the same parameters, for the stage most split across nodes.

        t = 2, 6 sharers, nodes of 8     node 0  0 2 4 6 | node 1  8 10    stage 0: 4 and 2 members
                                         node 1  12 14   | node 2  16 18 20 22    stage 1: 2 and 4

    Megatron numbers tensor ranks first, then context, data and pipeline ranks. Members in one node pool their NICs; the node with
    fewest is slowest. `groups`: rings per stage.
    """
    node, nic, nvlink = job.cluster.node, job.cluster.nic, job.cluster.nvlink
    if node is None or nic is None or sharers == 1:
        return float("inf")
    inside = nvlink.byte_per_s if nvlink is not None else nic.byte_per_s
    starts = {stage * stride * sharers % node.gpus for stage in range(groups * job.parallel.pipeline)}
    together = min(fewest_in_a_node(start, stride, sharers, node.gpus) for start in starts)
    if together == sharers:
        return inside
    return min(inside, together * nic.per_node / node.gpus * nic.byte_per_s)


BLOCKS, BLOCK_ELEMENTS = 320, 65_536
TENSORS = {"norm": 110, "clip": 64, "copy": 64, "adam": 36}
"""Maximum tensors of one launch; fewer with more lists (`depth_to_max_tensors`)."""
CHECK_KERNELS = 4
NORM_KERNELS = 3
CHECK_WAITS, RESTART_S = 2, 20e-6
"""Host synchronisations per checked bucket, and seconds from a host call to its kernel's start on an idle device: NVIDIA's guide
to the overheads in Nsight Systems (element-wise kernel, V100), quoted by groundy.com, "Every CUDA Kernel Pays a Launch Tax"."""


@dataclass(frozen=True)
class Fixed:
    kernels: int
    waits: int
    collectives_s: float


def fixed_s(job: Job, stage: int, counted: Parameters, buckets: int) -> float:
    """Return the fixed seconds of an update with this number of gradient buckets; 0 if the cluster's figures are missing."""
    cluster = job.cluster
    if cluster.hbm is None or cluster.pcie is None or cluster.nic is None or cluster.node is None:
        return 0.0
    fixed = fixed_of(job, stage, counted, buckets)
    wait_s = 1e-6 * cluster.pcie.latency_us + RESTART_S
    return fixed.kernels * 1e-6 * cluster.hbm.latency_us + fixed.waits * wait_s + fixed.collectives_s


def fixed_of(job: Job, stage: int, counted: Parameters, buckets: int) -> Fixed:
    optimizers = 2 if counted.experts else 1  # experts have their own
    return Fixed(
        kernels=_kernels(job, stage, counted, buckets),
        waits=CHECK_WAITS * buckets + optimizers + 2 + (job.parallel.pipeline == 1),
        collectives_s=_reduced_s(job, optimizers) + _numbers_s(job, optimizers) + shared_embedding_s(job),
    )


def _kernels(job: Job, stage: int, counted: Parameters, buckets: int) -> int:
    layout, sizes = job.parallel, parameters.bytes_each(job)
    sharers = layout.context * job.replicas
    owners = job.optimizer_sharers if layout.distributed_optimizer else 1
    tensors = parameters.parameter_tensors(job, stage)
    owned = min(tensors.total, tensors.total // owners + 1)

    def launches(over: str) -> int:
        return max(ceil(counted.total / owners / BLOCKS / BLOCK_ELEMENTS), ceil(owned / TENSORS[over]))

    cleared = job.chunks
    checked = buckets * (CHECK_KERNELS + (sharers > 1))  # and averaged in place, if shared
    gathered = 1 + tensors.vectors if job.parallel.sequence_parallel else 0
    copied = owned if sizes.gradient_copy else 0
    written = owned if layout.distributed_optimizer else launches("copy")
    if job.optimizer.precision_aware:
        written = 0  # written by Adam
    stepped = NORM_KERNELS + launches("norm") + launches("clip") + launches("adam")
    return cleared + checked + gathered + copied + stepped + written


def _reduced_s(job: Job, optimizers: int) -> float:
    layout = job.parallel
    stage_ranks, buffers = layout.tensor * layout.context * job.replicas, job.chunks * optimizers
    begin_s = collective_s(job.cluster, stage_ranks, 0) if layout.context * job.replicas > 1 else 0.0
    reductions = (1 if job.overlap.gradients else buffers) * (1 + (layout.optimizer_instances > 1))
    gathers = 0
    if layout.distributed_optimizer:
        gathers = 1 if job.overlap.parameters else buffers
    return (reductions + gathers) * begin_s + collective_s(job.cluster, layout.tensor, 0) * job.parallel.sequence_parallel


def _numbers_s(job: Job, optimizers: int) -> float:
    """Return the all-reduces of single numbers: norms, success, largest norm, loss. With pipelining the loss overlaps the next
    step."""
    layout = job.parallel
    model_ranks = layout.tensor if layout.pipeline == 1 else job.gpus  # whose stages are on other nodes
    norm_s = collective_s(job.cluster, job.gpus if layout.distributed_optimizer else model_ranks, 0)
    loss_s = collective_s(job.cluster, layout.context * job.replicas * layout.tensor, 0) if layout.pipeline == 1 else 0.0
    return optimizers * norm_s + 2 * collective_s(job.cluster, model_ranks, 0) + loss_s


def shared_embedding_s(job: Job) -> float:
    """Return the exposed all-reduce of a shared embedding's gradient between first and last stage (tied embeddings or MTP)."""
    tied = (job.model.tied_embeddings or job.model.mtp) and job.model.adapters is None
    if not tied or job.parallel.pipeline == 1:
        return 0.0
    words = job.model.vocab * job.model.hidden // job.parallel.tensor
    return link_among(job.cluster, job.gpus).seconds(words * parameters.bytes_each(job).gradient)
