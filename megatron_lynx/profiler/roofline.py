"""Roofline of one device: kernel time from FLOPs and bytes moved.

    seconds of a kernel  =  start and end  +  max( FLOPs / achieved matrix rate ,  bytes moved / achieved memory rate )
                                              the rate grows with the size of a GEMM: `config.cluster.Matmul`

A GEMM slows down during a collective, so stock's overlap with linears is not free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_lynx.config.cluster import AttentionKernel, Cluster, Link, Matmul
from megatron_lynx.config.job import Job
from megatron_lynx.config.model import Model
from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.profiler.profile import hiding_of
from megatron_lynx.profiler.shape import FP32_BYTES, MASK_BYTES, Casts, LayerShape
from megatron_lynx.timeline import Passes

KERNEL_KEYS = range(17, 4097)
"""Sequence lengths that Megatron's softmax kernel supports (`FusedScaleMaskSoftmax.is_kernel_available`)."""
KERNEL_BATCHES = 4
"""Required divisor of heads x sequences for that kernel."""


class Kernels(NamedTuple):
    """Bytes moved by the kernels of an operation between GEMMs: one fused kernel, or several.

        fused      arguments ──> [ one kernel ] ──> result                     every tensor is read or written once
        unfused    arguments ──> [ + bias ] ──> [ SiLU ] ──> [ x ] ──> result  intermediates are also written and read

    The launch sets Megatron's fusions (`model.fusions`). A kernel costs its bytes and its start and end (`roofline`).
    Recomputations run the same kernels as forward.

        O: output bytes of the activation; I: its input; R: residual stream; S: scores; T: queries or keys with rotary positions
                                         fused                  unfused
        activation, GELU           fwd   I + O                  gelu 2 O                        with a bias: + 2 I
                                   bwd   I + O + I              3 O
        activation, SwiGLU         fwd   I + O                  SiLU 2 O, offset 2 O, product 3 O
                                   bwd   I + O + I              two products 6 O, SiLU 3 O, concatenation of both halves 4 O
        bias, dropout, residual    fwd   3 R, mask              bias 2 R, dropout 2 R, mask, sum 3 R
        softmax of masked scores   fwd   2 S                    mask 2 S, softmax 2 S
                                   bwd   3 S                    product 3 S, softmax 3 S, copy 2 S, mask 2 S
        rotary positions           fwd   2 T                    12 T, and sine and cosine, which every layer recomputes
                                   bwd   2 T                    14 T

    In both cases the gradient of the residual connection is added to the half's. Bias gradients (sums over rows) are the same in
    both and left out, as with linears. A norm counts as one kernel with `--no-persist-layer-norm` too: its second read hits a
    cache. Fused losses are in `analytic.LOSS_BYTES`.

    Read in megatron-core 0.16.1 (`fused_bias_dropout.py`, `fused_bias_swiglu.py`, `mlp.py`, `rope_utils.py`, `fused_softmax.py`);
    tests count its operators. The split into CUDA kernels is from a profile of an H100.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]

    def __add__(self, other: tuple[object, ...]) -> Kernels:
        assert isinstance(other, Kernels), "kernels are added to kernels"
        return Kernels(self.forward + other.forward, self.backward + other.backward)


def one_kernel(forward: int, backward: int) -> Kernels:
    return Kernels(tuple(moved for moved in (forward,) if moved), tuple(moved for moved in (backward,) if moved))


def norm_kernels(shape: LayerShape) -> Kernels:
    return one_kernel(2 * shape.input_bytes, 3 * shape.input_bytes)


def activation_kernels(model: Model, rows: int, width: int) -> Kernels:
    made, given = (model.element_bytes * rows * columns for columns in (width, _given_width(model, width)))
    vector = model.element_bytes * _given_width(model, width) if model.bias else 0
    if model.fuses_activation:
        return one_kernel(given + made, 2 * given + made)
    return one_kernel(2 * given + vector if model.bias else 0, 0) + _apart(model, made, given)


def weighted_kernels(model: Model, rows: int, width: int) -> Kernels:
    """Return the kernels of the experts' activation, multiplied by each row's probability: fused for SwiGLU, and for squared ReLU
    if the launch enables it."""
    if model.fuses_activation and (model.gated or (model.experts is not None and model.experts.weighted_relu)):
        return clamped_kernels(model, rows, width) + activation_kernels(model, rows, width)
    made, probabilities = model.element_bytes * rows * width, model.element_bytes * rows
    alone = model.model_copy(update={"fusions": ()}) if model.activation == "gelu" else model
    weighted = Kernels((2 * made + probabilities,), (2 * made + probabilities, 3 * made, made + probabilities))
    return activation_kernels(alone, rows, width) + weighted


def clamped_kernels(model: Model, rows: int, width: int) -> Kernels:
    """Return the kernels that clamp both halves and join them again before a fused activation
    (`weighted_bias_quick_geglu_impl`); none without a clamp."""
    if not model.activation_clamped:
        return Kernels((), ())
    elements, half = rows * width, model.element_bytes * rows * width
    compared, chosen = half + MASK_BYTES * elements, 2 * half + MASK_BYTES * elements  # one half has two limits
    return Kernels((2 * half, 2 * half, 4 * half), (*3 * (compared,), 3 * MASK_BYTES * elements, chosen, chosen, 4 * half))


def _given_width(model: Model, width: int) -> int:
    return 2 * width if model.gated else width


def _apart(model: Model, made: int, given: int) -> Kernels:
    if not model.gated:
        return one_kernel(given + made, 2 * given + made)
    more = (2 * made,) * (model.glu_offset + 2 * model.activation_clamped)  # both halves are clamped
    clamped = (3 * made,) * (2 * model.activation_clamped)
    return Kernels((2 * made, *more, 3 * made), (3 * made, 3 * made, 3 * made, *clamped, 2 * given))


def residual_kernels(shape: LayerShape) -> Kernels:
    model, count = shape.model, shape.own_tokens * shape.model.hidden
    whole, vector = model.element_bytes * count, model.element_bytes * model.hidden if model.bias else 0
    mask = MASK_BYTES * count if model.hidden_dropout else 0
    dropped = 2 * whole + mask if model.hidden_dropout else 0
    if model.fuses("bias_dropout"):
        return one_kernel(3 * whole + mask, dropped + 3 * whole)
    added = one_kernel(2 * whole + vector if model.bias else 0, 0)
    return added + one_kernel(dropped, dropped) + one_kernel(3 * whole, 3 * whole)


def softmax_kernels(shape: LayerShape) -> Kernels:
    """Return the kernels of unfused attention's masked softmax. Transformer Engine always uses its own kernel."""
    whole = shape.model.element_bytes * shape.scores
    batches = shape.micro * shape.model.heads // shape.parallel.tensor
    has_kernel = shape.model.element_bytes == 2 and shape.model.seq in KERNEL_KEYS and batches % KERNEL_BATCHES == 0
    if shape.model.uses_te or (shape.model.fuses("masked_softmax") and has_kernel):
        return one_kernel(2 * whole, 3 * whole)
    masked = 2 * whole + MASK_BYTES * shape.micro * shape.model.seq * (shape.model.seq // shape.parallel.context)
    return Kernels((masked, 2 * whole), (3 * whole, 3 * whole, 2 * whole, masked))


def turned_kernels(shape: LayerShape, width: int, rotary_size: int, *, interleaved: bool = False) -> Kernels:
    """Return the kernels of RoPE on `width` columns per row, with tables of `rotary_size` columns. `interleaved`: latent
    attention's, which first moves even columns before odd ones, and is never fused under a plan."""
    whole = shape.model.element_bytes * shape.tokens * width
    if shape.model.fuses("rope") and not interleaved:
        return one_kernel(2 * whole, 2 * whole)
    entries = shape.model.seq // shape.parallel.context * rotary_size
    table, exact = shape.model.element_bytes * entries, FP32_BYTES * entries
    cast = (exact + table,) if table != exact else ()
    tables = 2 * (2 * exact, 2 * exact, *cast)  # cosine, then sine: made, scaled, cast
    turned = (2 * whole + table, whole, 2 * whole, 2 * whole + table, 3 * whole)
    sorted_, unsorted = ((2 * whole,), (*4 * (whole,), 3 * whole)) if interleaved else ((), ())
    return Kernels((*sorted_, *tables, *turned, 2 * whole), (*turned, *unsorted, whole, 3 * whole))


@dataclass(frozen=True)
class Roofline:
    matmul: Matmul
    hbm: Link
    dtype: Literal["fp32", "bf16"]
    ring: Link
    """Link between context-parallel ranks, or between groups of them."""
    traders: Link
    """Link between context-parallel ranks of an all-to-all."""
    casts: Casts | None
    fp8_speed: float
    """Speedup of linears' GEMMs over the model's type. FP4 reaches the same share of its peak as FP8."""
    beside_s: tuple[float, float]
    """Seconds of the collectives that stock overlaps with a column-parallel linear's dgrad and wgrad."""
    counts_s: float = 0.0
    """Seconds in which a device waits for the host in each pass of experts."""
    gradient_bytes: int = FP32_BYTES

    @classmethod
    def of(cls, job: Job) -> Roofline:
        matmul, hbm = job.cluster.matmul, job.cluster.hbm
        missing = [name for name in ("matmul", "hbm", "pcie", "nic", "node") if getattr(job.cluster, name) is None]
        if matmul is None or hbm is None or missing:
            problems = [Problem(f"cluster {job.cluster.name}: {name}", "nothing", "this part's figures") for name in missing]
            raise ConfigError("seconds cannot be estimated for this cluster", problems)
        ring = link_among(job.cluster, job.parallel.tensor * job.parallel.context)
        traders = link_among(job.cluster, job.parallel.tensor * job.parallel.context_groups[0])
        units, recipe = job.cluster.fp8, job.model.fp8_recipe
        casts, speed = None, 1.0
        counts_s = 0.0 if job.cluster.host_time is None else 1e-6 * job.cluster.host_time.counts_us
        gradient_bytes = FP32_BYTES if job.optimizer.gradients == "fp32" else job.model.element_bytes
        if recipe is not None and units is not None:
            achieved = units.peak_of(recipe) * (units.efficiency or matmul.efficiency)
            casts, speed = Casts(recipe, units.transposes), achieved / (matmul.bf16_tflop_per_s * matmul.efficiency)
        return cls(matmul, hbm, job.model.dtype, ring, traders, casts, speed, _beside_s(job), counts_s, gradient_bytes)

    def seconds(self, flops: float, moved_bytes: float) -> float:
        return self._seconds(self.matmul.gemm_s(flops, self.dtype), moved_bytes)

    def linear_s(self, flops: float, moved_bytes: float) -> float:
        return self._seconds(self.matmul.gemm_s(flops, self.dtype) / self.fp8_speed, moved_bytes)

    def cast_s(self, cast: tuple[int, int]) -> float:
        moved, kernels = cast
        return kernels * self.hbm.latency_us * 1e-6 + moved / self.hbm.byte_per_s

    def attention_s(self, flops: float, moved_bytes: float, kernel: AttentionKernel) -> float:
        return self._seconds(self.matmul.attention_s(flops, self.dtype, kernel), moved_bytes)

    def batched_s(self, count: int, flops: float, moved_bytes: float) -> float:
        """Return the seconds of `count` GEMMs of one shape in one kernel, each as efficient as its size allows. FLOPs and bytes
        are totals."""
        return self._seconds(count * self.matmul.gemm_s(flops / count, self.dtype), moved_bytes)

    def slowed_s(self, alone_s: float, collective_s: float) -> float:
        lost = self.matmul.beside_collective
        return min(alone_s + lost * collective_s, alone_s / (1 - lost))

    def _seconds(self, compute_s: float, moved_bytes: float) -> float:
        return self.hbm.latency_us * 1e-6 + max(compute_s, moved_bytes / self.hbm.byte_per_s)


def kernels_s(kernels: Kernels, roof: Roofline) -> Passes:
    forward_s, backward_s = (sum(roof.seconds(0, moved) for moved in pass_kernels) for pass_kernels in kernels)
    return Passes(forward_s, backward_s)


def _beside_s(job: Job) -> tuple[float, float]:
    """Return the seconds of the input's all-gather during dgrad (sequence parallelism), and of its gradient's reduction during
    wgrad."""
    tensor = job.parallel.tensor
    if tensor == 1 or hiding_of(job) == "nothing":
        return 0.0, 0.0
    link, share, shape = link_among(job.cluster, tensor), (tensor - 1) / tensor, LayerShape.of(job)
    sent = share * shape.gathered_bytes
    if not job.parallel.sequence_parallel:
        return 0.0, link.seconds(2 * sent)
    return link.seconds(share * shape.gathered_input_bytes), link.seconds(sent)


def collective_s(cluster: Cluster, ranks: int, sent_bytes: float) -> float:
    """Return a collective in which each of `ranks` ranks sends `sent_bytes`; 0 for one rank."""
    return 0.0 if ranks == 1 else link_among(cluster, ranks).seconds(sent_bytes)


def link_among(cluster: Cluster, ranks: int) -> Link:
    assert cluster.pcie is not None, "checked by Roofline.of"
    assert cluster.nic is not None, "checked by Roofline.of"
    assert cluster.node is not None, "checked by Roofline.of"
    if ranks > cluster.node.gpus:
        return cluster.nic
    if cluster.nvlink is not None:
        return cluster.nvlink
    return cluster.pcie.model_copy(update={"gb_per_s": cluster.pcie.gb_per_s / cluster.pcie.gpus_per_link})


def fewest_in_a_node(first: int, stride: int, members: int, node_gpus: int) -> int:
    """Return the minimum number of members in one node, of a group `first`, `first + stride`, ... Counts repeat after `stride`
    nodes."""
    if stride >= node_gpus:
        return 1
    begin, end = (rank // node_gpus for rank in (first, first + stride * (members - 1)))
    nodes = {begin, end, *range(begin + 1, min(end, begin + 1 + stride))}
    return min(
        _members_below(node + 1, first, stride, members, node_gpus) - _members_below(node, first, stride, members, node_gpus)
        for node in nodes
    )


def _members_below(node: int, first: int, stride: int, members: int, node_gpus: int) -> int:
    return min(members, max(0, -((first - node * node_gpus) // stride)))
