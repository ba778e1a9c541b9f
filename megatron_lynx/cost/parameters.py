"""Parameters of a rank by kind, and their bytes.

                                   weight   gradient   optimizer
    fp32                              4         4       8    two moments
    bf16, gradients in fp32           2         4      12    main parameter, two moments
    bf16, gradients in bf16           2         2      12    the same; and in updates 4 for the gradient in fp32
    stored in FP8 (--fp8-param-gather)  1       as above     linear weights; bytes by columns are added
    precision-aware                   2    4 or 2      10    the half of the main parameter missing in a bf16 weight, two moments;
                                                             less with smaller types
    other optimizers                  2    4 or 2      4, and 4 per number of state (`optimizer.states`)
    on the host, whole or in part     2    4 or 2      12 for the part on the device, and 4 more for gradients in 16 bits
                                                       (`cost.host_optimizer`)
    states on the host between updates                 the part on the device; in updates all main parameters, and two chunks of
                                                       moments

The distributed optimizer shares the last column among the context x data parallel ranks (of one instance). fp16 counts as bf16,
its loss scale as nothing.

Gradient buffers are cut into buckets, and padded:

    one buffer    [ last layer's parameters ... | ... | ... embedding ]    in the order in which backward makes gradients
    one bucket    whole parameters, padded to a multiple that the data-parallel ranks share evenly

Only the buffer of the first stage's first chunk is cut, and only if reductions overlap passes. The alignment of each parameter
to 64 numbers is not counted (`DistributedDataParallel`, `_ParamAndGradBuffer` of megatron-core 0.16.1).

Source: `validate_args` (bf16 implies fp32 gradients unless --grad-reduce-in-bf16 or --main-grads-dtype; fp16 implies fp16 unless
--accumulate-allreduce-grads-in-fp32), `DistributedOptimizer._copy_model_grads_to_main_grads` (the fp32 copy, none if
precision-aware), Transformer Engine's `FusedAdam` (`store_param_remainders`). Megatron's documentation of the distributed
optimizer has the first three rows, but counts the gradient's copy as permanent: `zero_grad` frees it before the next forward.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import ceil, lcm
from typing import Literal, NamedTuple

from megatron_lynx.anatomy import LayerKind, Section
from megatron_lynx.config.job import Job
from megatron_lynx.config.model import Model
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.cost.ends import NORMS, projection_weights
from megatron_lynx.cost.moments import walked
from megatron_lynx.fp8_recipes import STORED
from megatron_lynx.kinds.experts.planning import expert_sharers
from megatron_lynx.kinds.face import HalfParameters, Linear, adapter_parameters
from megatron_lynx.kinds.planning import planning_of
from megatron_lynx.profiler.shape import BF16_BYTES, LayerShape, buffer_bytes, weight_bytes
from megatron_lynx.units import MIB

TYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "remainder": 2}
FP32_BYTES, MOMENTS_BYTES = 4, 8


@dataclass(frozen=True)
class BytesEach:
    weight: int
    gradient: int
    main_parameter: int
    moments: int
    gradient_copy: int
    state_copies: int = 0
    """fp32 copies of states in smaller types, made by the update."""
    lasting_copy: int = 0
    """fp32 copy of the gradient that is never freed."""
    stays: float = 1.0

    @property
    def optimizer(self) -> float:
        return self.stays * (self.main_parameter + self.moments + self.lasting_copy)

    @property
    def update_copies(self) -> int:
        return self.gradient_copy + self.state_copies


def bytes_each(job: Job) -> BytesEach:
    asked, half = job.optimizer, job.model.dtype != "fp32"
    moments = FP32_BYTES * asked.states
    gradient = TYPE_BYTES[asked.gradients]
    main, copy, copied = (4 if half else 0), (0 if gradient == 4 else 4), list[str]()
    if asked.offloaded:
        stays = 1 - asked.offloaded
        return BytesEach(job.model.element_bytes, gradient, FP32_BYTES, MOMENTS_BYTES, 0, lasting_copy=copy, stays=stays)
    if asked.precision_aware:
        moments = TYPE_BYTES[asked.first_moment] + TYPE_BYTES[asked.second_moment]
        copied = [asked.first_moment, asked.second_moment]
        if job.model.fp8_recipe in (None, "delayed") or asked.main_parameters == "fp16":
            main, copy = TYPE_BYTES[asked.main_parameters], 0
            copied.append(asked.main_parameters)
        # Else main parameters and gradient copies are Megatron's, in fp32 (`OptimizerConfig.__post_init__`).
    state_copies = FP32_BYTES * sum(state_type not in ("fp32", "remainder") for state_type in copied)
    return BytesEach(job.model.element_bytes, gradient, main, moments, copy, state_copies, stays=1 - asked.states_on_host)


@dataclass(frozen=True)
class Parameters:
    matrices: int
    vectors: int
    """Biases and norms, the final norm included."""
    embedding: int
    """Word and learned position embeddings."""
    head: int
    """Output projection, unless it is the embedding on the same stage."""
    experts: int = 0
    """Experts with a data-parallel group of their own."""
    routers: int = 0
    """Part of `matrices` that is routers, which have no FP8."""
    largest: int = 0
    frozen: int = 0
    """Parameters beside adapters, not counted above: they have bytes of weights alone."""

    @property
    def linears(self) -> int:
        return self.matrices - self.routers

    @property
    def without_experts(self) -> int:
        return self.matrices + self.vectors + self.embedding + self.head

    @property
    def total(self) -> int:
        return self.without_experts + self.experts


def stage_parameters(job: Job, stage: int) -> Parameters:
    """Count the parameters of a stage. Tied embeddings are on both ends of a pipeline. With adapters, theirs are trained."""
    if job.model.adapters is None:
        return _all_parameters(job, stage)
    parts = 1 if job.model.adapters.whole else job.parallel.tensor
    sizes = [
        (count * adapter_parameters(section.of_name[name], linear, job.model.adapters.rank, parts), linear)
        for section, count in sections_on(job, stage).items()
        for name, linear in planning_of(section).linears(LayerShape.of(job)).items()
        if name in job.model.adapted
    ]
    largest = job.model.adapters.rank * max((max(linear.taken, linear.made) for _, linear in sizes), default=0)
    trained, frozen = sum(size for size, _ in sizes), _all_parameters(job, stage).total
    return Parameters(matrices=trained, vectors=0, embedding=0, head=0, largest=largest, frozen=frozen)


def _all_parameters(job: Job, stage: int) -> Parameters:
    model, tensor, halves = job.model, job.parallel.tensor, halves_on(job, stage)
    last, embeds = stage == job.parallel.pipeline - 1, embeds_on(job, stage)
    words = model.vocab * model.hidden // tensor
    positions = model.seq * model.hidden if model.position == "learned" else 0
    linears = (linear for section in walked(model) for linear in planning_of(section).linears(LayerShape.of(job)).values())
    return Parameters(
        matrices=sum(count * half.cut for half, count in halves) // tensor
        + sum(count * half.whole for half, count in halves)
        + last * model.mtp * projection_weights(model) // tensor,
        vectors=sum(count * half.vectors for half, count in halves) + last * (1 + NORMS * model.mtp) * model.norm_parameters(),
        embedding=embeds * (words + positions),
        head=last * (0 if stage == 0 and model.tied_embeddings else words),
        experts=sum(count * half.apart for half, count in halves),
        routers=sum(count * half.router for half, count in halves),
        largest=max(words * (embeds or last), *(linear.taken * linear.made for linear in linears)),
    )


def embeds_on(job: Job, stage: int) -> bool:
    return stage == 0 or (job.model.mtp > 0 and stage == job.parallel.pipeline - 1)


def halves_on(job: Job, stage: int) -> list[tuple[HalfParameters, int]]:
    counted = sections_on(job, stage)
    return [(planning_of(section).parameters(job.model, job.parallel), count) for section, count in counted.items()]


def sections_on(job: Job, stage: int) -> Counter[Section]:
    counts = job.halves_on(stage)
    if job.model.mtp and stage == job.parallel.pipeline - 1:
        counts.update(dict.fromkeys(job.model.sections(job.model.layers), job.model.mtp))
    return counts


def passed_weights(model: Model, kind: LayerKind | None = None) -> int:
    """Return the weights of one layer that one token is multiplied with, over all tensor-parallel ranks: (2 + 2g/a)h² + 3hH with
    SwiGLU, else 2hH; of experts, the routed ones. `kind`: default a layer without experts."""
    sections = kind or model.kind_sections(experts=False)
    return sum(planning_of(section).parameters(model, Parallel()).passed for section in sections)


def fp8_copies_bytes(job: Job, stage: int) -> int:
    """Return the FP8 copies of a stage's linear weights, made in each step's first micro-batch: of weights stored in FP8 their
    bytes by columns, and scales; of layers that stay in bf16 the extra bytes."""
    model, recipe = job.model, job.model.fp8_recipe
    if recipe is None:
        return 0
    shape, transposes = LayerShape.of(job), job.cluster.transposes_fp8
    ends = {*model.first_in_bf16, *model.last_in_bf16}.intersection(
        layer for chunk in range(job.chunks) for layer in job.layers_of(stage, chunk)
    )
    plain = Counter(section for layer in ends for section in model.sections(layer))

    def of_layer(section: Section, linear: Linear) -> int:
        copies = weight_bytes(recipe, linear.made, linear.taken, transposes=transposes, held=model.fp8_parameters)
        cast, count = sections[section] - plain[section], linear.made * linear.taken
        other = BF16_BYTES * count - buffer_bytes(recipe, count) if model.fp8_parameters and _in_buffer(job) else 0
        return linear.times * (cast * copies + plain[section] * other)

    sections = sections_on(job, stage)
    return sum(of_layer(section, linear) for section in sections for linear in planning_of(section).linears(shape).values())


def held_in_fp8(job: Job, parameters: Parameters) -> tuple[int, int]:
    """Return (linear weights, experts) that are stored and gathered in FP8."""
    return (parameters.linears, parameters.experts) if job.model.fp8_parameters else (0, 0)


def parameter_bytes(job: Job, count: int, in_fp8: int = 0) -> int:
    """`in_fp8`: of `count`, stored in FP8 without bytes by columns."""
    recipe = job.model.fp8_recipe
    held = buffer_bytes(recipe, in_fp8) if recipe is not None and _in_buffer(job) else 0
    return (count - in_fp8) * bytes_each(job).weight + held


def gathered_bytes(job: Job, count: int, in_fp8: int = 0) -> int:
    return parameter_bytes(job, count, in_fp8 if _in_buffer(job) else 0)


def _in_buffer(job: Job) -> bool:
    recipe = job.model.fp8_recipe
    return recipe is not None and STORED[recipe].held_in_buffer


def gradient_bytes(job: Job, count: int) -> int:
    return count * bytes_each(job).gradient


def optimizer_bytes(job: Job, count: int, experts: int = 0) -> int:
    """Return this rank's share, rounded up. `experts`: part of `count`."""
    return _shared(job, count, experts, bytes_each(job).optimizer)


def update_copies_bytes(job: Job, parameters: Parameters) -> int:
    """Return the fp32 copies of this rank's update, and states that it restores from the host."""
    copies = _shared(job, parameters.total, parameters.experts, bytes_each(job).update_copies)
    return copies + sum(restored_bytes(job, parameters))


def restored_bytes(job: Job, parameters: Parameters) -> tuple[int, int]:
    """Return (main parameters, moments) that an update brings to the device from states on the host. All main parameters are
    restored first, moments by chunks; one parameter's moments are in one chunk (`ChunkedOptimizerStateOffloader` of Megatron's
    dev branch)."""
    asked, sizes, owned = job.optimizer, bytes_each(job), owned_parameters(job, parameters)
    moments, largest = asked.states_on_host * sizes.moments * owned, sizes.moments * min(parameters.largest, owned)
    window = 2 * max(asked.chunk_mib * MIB, largest) if asked.chunk_mib else moments
    return ceil(asked.states_on_host * sizes.main_parameter * owned), ceil(min(moments, window))


def update_in_hand_bytes(job: Job, parameters: Parameters) -> int:
    """Return an upper bound on an update's transients: copies to and from the host convert on the device, one parameter at a
    time. On a CPU, PyTorch's AdamW has two fp32 roots of one parameter's second moment, and that of the previous one."""
    owned = owned_parameters(job, parameters)
    if job.cluster.device != "cpu":
        ways = 0 if not job.optimizer.offloaded else 1 + (job.optimizer.gradients != "fp32")  # back, and out
        return ways * FP32_BYTES * min(parameters.largest, owned)
    return 3 * 4 * min(parameters.largest, owned)


def owned_parameters(job: Job, parameters: Parameters) -> int:
    return _shared(job, parameters.total, parameters.experts, 1)


def _shared(job: Job, count: int, experts: int, parameter_bytes: float) -> int:
    sharded = job.parallel.distributed_optimizer
    sharers = job.optimizer_sharers if sharded else 1
    of_experts = 0
    if experts:
        of_experts = ceil(experts * parameter_bytes / (expert_sharers(job) // job.parallel.optimizer_instances if sharded else 1))
    return ceil((count - experts) * parameter_bytes / sharers) + of_experts


class ParameterTensors(NamedTuple):
    weights: int
    vectors: int

    @property
    def total(self) -> int:
        return self.weights + self.vectors


def parameter_tensors(job: Job, stage: int) -> ParameterTensors:
    model, halves = job.model, halves_on(job, stage)
    if model.adapters is not None:
        return ParameterTensors(weights=2 * len(model.adapted) * job.layers_on(stage), vectors=0)
    last, embeds = stage == job.parallel.pipeline - 1, embeds_on(job, stage)
    norms = last * (1 + NORMS * model.mtp) + sum(count * half.norms for half, count in halves)
    ends = embeds * (2 if model.position == "learned" else 1) + last * (not (stage == 0 and model.tied_embeddings))
    ends += last * model.mtp  # projections
    biases = sum(count * half.biased for half, count in halves) if model.bias else 0
    weights = ends + sum(count * half.weights for half, count in halves)
    return ParameterTensors(weights=weights, vectors=norms * (2 if model.norm == "layernorm" else 1) + biases)


BUCKET_PARAMETERS, BUCKET_PARAMETERS_EACH = 40_000_000, 1_000_000
"""Default bucket size: the larger of a constant and a number per sharing rank (`DistributedDataParallel`)."""
ALIGNED, ALIGNED_FOR_BANDWIDTH = 128, 2**16


def bucket_parameters(job: Job, stage: int, parameters: Parameters, sharers: int) -> int:
    """Return the number of parameters per bucket. A bucket is at least as large as the mean parameter, which is not split."""
    asked = job.overlap.bucket_parameters
    if job.overlap.buckets is not None:
        asked = parameters.total // job.overlap.buckets
    least = max(1, parameters.total // max(1, parameter_tensors(job, stage).total))
    return max(BUCKET_PARAMETERS, BUCKET_PARAMETERS_EACH * sharers) if asked is None else max(asked, least)


def buckets(job: Job, stage: int, parameters: Parameters) -> int:
    return sum(_buckets(job, stage, parameters, count, sharers) for count, sharers in _buffers(job, parameters))


def filled_numbers(job: Job, stage: int, parameters: Parameters) -> int:
    """Return the padding of all buffers, in numbers: exact for a buffer of one bucket, else an upper bound."""
    if not job.parallel.distributed_optimizer:
        return 0
    filled = 0
    for count, sharers in _buffers(job, parameters):
        multiple = lcm(
            sharers // job.parallel.optimizer_instances, ALIGNED, ALIGNED_FOR_BANDWIDTH if job.overlap.padded_buckets else 1
        )
        number, chunk_numbers = _buckets(job, stage, parameters, count, sharers), count // job.chunks
        cut = number - (job.chunks - 1)  # in the first chunk's buffer
        filled += (job.chunks - 1) * (-chunk_numbers % multiple) + (
            -chunk_numbers % multiple if cut == 1 else cut * (multiple - 1)
        )
    return filled


def _buffers(job: Job, parameters: Parameters) -> list[tuple[int, int]]:
    """Return (parameters, sharing ranks) of each buffer. Experts with their own data-parallel group have their own buffer
    (`use_expert_pgs` of 0.19; earlier, expert-parallel ones), and so have weights stored in FP8."""
    sharers, (linears, experts) = job.parallel.context * job.replicas, held_in_fp8(job, parameters)
    layout = job.parallel
    if not parameters.experts or (layout.expert, layout.expert_tensor_size) == (1, layout.tensor):
        in_fp8 = linears + experts
        return [*([(in_fp8, sharers)] if in_fp8 else []), (parameters.total - in_fp8, sharers)]
    held = [(linears, sharers)] if linears else []
    return [*held, (parameters.without_experts - linears, sharers), (parameters.experts, expert_sharers(job))]


def _buckets(job: Job, stage: int, parameters: Parameters, count: int, sharers: int) -> int:
    if not job.overlap.gradients or stage > 0:
        return job.chunks
    return job.chunks - 1 + max(1, ceil(count / job.chunks / bucket_parameters(job, stage, parameters, sharers)))


Convention = Literal["causal", "whole"]


def flops_per_token(model: Model, convention: Convention = "causal") -> int:
    """Return forward and backward FLOPs of the whole model: 6 per weight of a matrix, plus attention.

    causal    attention counted half, for the causal mask (Yuan et al., ATC '24): 6(L((2 + 2g/a)h² + 3hH) + hV) + 6Lhs
    whole     attention counted whole (Korthikanti et al.): 72Lh²(1 + s/(6h) + V/(12hL)) for a GPT

    Recomputation does not count; frozen weights count 4, as they have no gradient. Compare published MFUs only within one
    convention.
    """
    kinds, last = model.kinds_of(range(1, model.layers + 1)), model.sections(model.layers)
    matrices = sum(layers * passed_weights(model, kind) for kind, layers in kinds.items()) + model.hidden * model.vocab
    matrices += model.mtp * (passed_weights(model, last) + projection_weights(model) + model.hidden * model.vocab)
    kinds[last] += model.mtp
    attending = sum(layers for (first, _), layers in kinds.items() if first.core)
    attention = (6 if convention == "causal" else 12) * attending * model.query_width * model.seq
    return (6 if model.adapters is None else 4) * matrices + round(attention * model.seen)


def mfu(model: Model, tokens_per_s: float, peak_flop_per_s: float, convention: Convention = "causal") -> float:
    """Return the model FLOPs utilisation; `tokens_per_s` and `peak_flop_per_s` of the same number of devices."""
    return tokens_per_s * flops_per_token(model, convention) / peak_flop_per_s


def throughput(job: Job, step_s: float) -> dict[str, float | None]:
    """Return tokens per second, and the MFU of the model's dtype, also with FP8; the MFU is None on an undescribed cluster."""
    tokens_per_s, matmul = job.batch.global_ * job.model.seq / step_s, job.cluster.matmul
    peak_flop_per_s = None if matmul is None else job.gpus * matmul.peak_flop_per_s(job.model.dtype)
    return {
        "tokens_per_s": tokens_per_s,
        "mfu": None if peak_flop_per_s is None else mfu(job.model, tokens_per_s, peak_flop_per_s),
    }
