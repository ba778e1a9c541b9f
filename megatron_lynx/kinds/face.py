"""What planning asks of a kind of section: sizes, seconds, saved tensors, parameters, gradients on their way through backward.

    a kind says                         what follows for every kind alike
    linears      rows and columns       FLOPs, seconds of the GEMMs, weights, bytes that they return
    core         what attention reads   its seconds, with the exchange of context-parallel ranks
    kernels      bytes they move        seconds of what is no GEMM
    saved        memory blocks          bytes by item, and what a replay regenerates (`cost.replay`)
    parameters   how many               bytes of weights, gradients and optimizer (`cost.parameters`)
    backward     its operators          what is in hand beside what is kept (`cost.in_hand`)
    refusals     what it cannot have    jobs that are refused before anything is planned (`planner.checks`)

Whoever walks over layers asks `kinds.planning.planning_of(section)` and knows no kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron_lynx.config.job import Job
from megatron_lynx.config.model import Model
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.errors import Problem
from megatron_lynx.kinds.core_attention import AttentionBytes, core_s
from megatron_lynx.kinds.section import Collective, Item, Section
from megatron_lynx.profiler.element_wise import Kernels, norm_kernels, residual_kernels
from megatron_lynx.profiler.profile import HalfProfile, ItemProfile, Profile, SavedTensor, Shape
from megatron_lynx.profiler.quantized import cast_bytes
from megatron_lynx.profiler.roofline import Passes, Roofline, kernels_s
from megatron_lynx.profiler.shape import FP32_BYTES, LayerShape

BESIDE_COLLECTIVES = ("column_parallel", "up_projection", "query_projection")
"""Roles of linears in whose backward stock Megatron runs collectives beside the GEMMs."""


GATHERING = ("column_parallel", "up_projection", "query_projection")
"""Roles of linears that gather what they read, under sequence parallelism."""


class Linear(NamedTuple):
    """A linear of one rank, or as many alike as an item of experts stands for."""

    rows: int
    """Rows of each."""
    taken: int
    """Columns of what it takes."""
    made: int
    """Columns of what it makes."""
    times: int = 1
    """How many there are, one after another."""

    @property
    def one_flops(self) -> int:
        """FLOPs of one GEMM in a forward: 2mnk."""
        return 2 * self.rows * self.taken * self.made


@dataclass(frozen=True)
class HalfParameters:
    """The parameters of one half of one layer."""

    cut: int
    """Weights that are cut over tensor-parallel ranks, counted over all of them."""
    passed: int
    """Weights that one token is multiplied with, over all ranks."""
    vectors: int
    """Numbers in biases and norms on one rank."""
    weights: int
    """Weights of one rank, as tensors."""
    biased: int
    """How many of these have a bias, if the model has biases."""
    norms: int = 1
    """Norms, as modules."""
    largest: int = 0
    """The largest weight, over all tensor-parallel ranks."""
    whole: int = 0
    """Weights that every tensor-parallel rank has whole."""
    apart: int = 0
    """Parameters of one rank that have a data-parallel group of their own: experts."""
    router: int = 0
    """Of the whole weights those of a router, which is no linear of Transformer Engine's and in no FP8."""


class Step(NamedTuple):
    """The backward of one operator."""

    item: str
    """Whose saved tensors are let go afterwards; empty for none."""
    made: int
    """Bytes that are allocated while it runs."""
    let_go: int
    """Of these and of the gradients made before, what is freed when it has run."""


class Planning(ABC):
    """One section of a kind, as planning sees it. `shape`: one layer of one rank; seconds are of one micro-batch."""

    def __init__(self, section: Section) -> None:
        self.section = section

    @abstractmethod
    def linears(self, shape: LayerShape) -> Mapping[str, Linear]:
        """Its linears, by item."""

    @abstractmethod
    def kernels(self, shape: LayerShape, item: Item) -> Kernels:
        """What an item runs that is neither a linear nor the core attention, and neither begins nor ends the half."""

    @abstractmethod
    def saved(self, shape: LayerShape) -> Iterator[SavedTensor]:
        """Every memory block that its backward reads, beside its input; blocks of no bytes may be among them."""

    @abstractmethod
    def parameters(self, model: Model, layout: Parallel) -> HalfParameters:
        """What it has of parameters."""

    @abstractmethod
    def backward(self, shape: LayerShape) -> Iterator[Step]:
        """The operators of its backward, from the gradient of what it made to that of its input (`kinds.backward`)."""

    def attention(self, shape: LayerShape) -> AttentionBytes:
        """What the core attention reads and writes, where it has one."""
        raise NotImplementedError(f"{self.section.name} has no core attention")

    def core_flops(self, shape: LayerShape) -> int:
        """FLOPs of the core attention's two batched GEMMs in a forward, over the whole square: a causal mask saves none."""
        raise NotImplementedError(f"{self.section.name} has no core attention")

    def core_arguments_bytes(self, shape: LayerShape) -> int:
        """What a checkpoint of the core attention is given, and nobody else keeps."""
        return 0

    def refusals(self, job: Job) -> Iterator[Problem]:
        """What a job may state beside it, so that it can be estimated, but no plan can have."""
        yield from ()

    def tensors(self, shape: LayerShape) -> tuple[SavedTensor, ...]:
        """The memory blocks of the half, beside its input."""
        return tuple(block for block in self.saved(shape) if block.bytes)

    def flops(self, shape: LayerShape) -> dict[str, int]:
        """FLOPs of the GEMMs in one forward of each item, as torch's FlopCounterMode counts them."""
        flops = dict.fromkeys(self.section.names, 0)
        flops |= {name: linear.times * linear.one_flops for name, linear in self.linears(shape).items()}
        return flops | {item.name: self.core_flops(shape) for item in self.section.items if item.role == "core"}

    def output_bytes(self, shape: LayerShape, item: Item) -> int:
        """What an item returns, as far as it is a submodule. A row-parallel linear's is reduced, and scattered."""
        if not item.is_site:
            return 0
        if item.role == "core":
            return self.attention(shape).result
        linear = self.linears(shape).get(item.name)
        if linear is None or item.role == "row_parallel":
            return shape.input_bytes
        return linear.rows * linear.made * shape.model.element_bytes

    def half(self, job: Job, shape: LayerShape, roof: Roofline) -> HalfProfile:
        """The figures of the half."""
        return HalfProfile(input_bytes=shape.input_bytes, items=self.items(shape, roof), tensors=self.tensors(shape))

    def listed(self) -> Iterable[Item]:
        """Its items in the order in which profiles list them."""
        return self.section.items

    def items(self, shape: LayerShape, roof: Roofline) -> dict[str, ItemProfile]:
        """The figures of every item."""
        priced, saved = {item.name: self._item(shape, item, roof) for item in self.listed()}, dict.fromkeys(self.section.names, 0)
        for block in self.tensors(shape):
            if block.saved_by:
                saved[block.saved_by[0]] += block.bytes
        return {name: item.model_copy(update={"saved_bytes": saved[name]}) for name, item in priced.items()}

    def _item(self, shape: LayerShape, item: Item, roof: Roofline) -> ItemProfile:
        linear, output = self.linears(shape).get(item.name), self.output_bytes(shape, item)
        if linear is not None:
            return self._linear(shape, item, linear, roof).model_copy(update={"output_bytes": output})
        seconds, flops = self.seconds(shape, item, roof), self.core_flops(shape) if item.role == "core" else 0
        return ItemProfile(
            forward_s=seconds.forward_s, backward_s=seconds.backward_s, saved_bytes=0, output_bytes=output, flops=flops
        )

    def seconds(self, shape: LayerShape, item: Item, roof: Roofline) -> Passes:
        """Of an item that is no linear."""
        if item.role == "core":
            return core_s(shape, self.core_flops(shape), self.attention(shape), roof)
        if item.role == "residual":
            return kernels_s(residual_kernels(shape), roof)
        if item.role != "norm":
            return kernels_s(self.kernels(shape, item), roof)
        alone = kernels_s(norm_kernels(shape), roof)
        if roof.casts is None or not self.section.fuses_norm:
            return alone
        return alone + normed_cast(shape, shape.own_tokens * shape.model.hidden, roof)

    def _linear(self, shape: LayerShape, item: Item, linear: Linear, roof: Roofline) -> ItemProfile:
        """One GEMM after another. The weight's gradient is added to an fp32 buffer: read and written."""
        element, flops, weight = shape.model.element_bytes, linear.one_flops, linear.taken * linear.made
        taken, made, recipe = linear.rows * linear.taken, linear.rows * linear.made, shape.model.fp8_recipe

        def read(count: int) -> int:
            return element * count if recipe is None else cast_bytes(recipe, count)

        forward_s = linear.times * roof.linear_s(flops, read(taken + weight) + element * made)
        dgrad_s = linear.times * roof.linear_s(flops, read(made + weight) + element * taken)
        wgrad_s = linear.times * roof.linear_s(flops, read(taken + made) + 2 * FP32_BYTES * weight)
        if self.section.collectives_of and item.role in BESIDE_COLLECTIVES:
            dgrad_s, wgrad_s = (roof.slowed_s(*both) for both in zip((dgrad_s, wgrad_s), roof.beside_s, strict=True))
        cast_forward_s, cast_backward_s = self._casts_s(shape, item, linear, roof)
        return ItemProfile(
            forward_s=forward_s + cast_forward_s,
            backward_s=dgrad_s + wgrad_s + cast_backward_s,
            saved_bytes=0,
            output_bytes=0,
            flops=linear.times * flops,
            dgrad_s=dgrad_s,
            wgrad_s=wgrad_s,
        )

    def _casts_s(self, shape: LayerShape, item: Item, linear: Linear, roof: Roofline) -> tuple[float, float]:
        """Forward and backward seconds of a linear's casts: of its input, where no norm makes it, and of its output's gradient.

        Under sequence parallelism what is gathered is gathered in FP8, and by columns only afterwards.
        """
        casts, sliced = roof.casts, shape.parallel.sequence_parallel
        if casts is None:
            return 0.0, 0.0
        taken, made = (linear.times * linear.rows * columns for columns in (linear.taken, linear.made))
        gathers, scatters = sliced and item.role in GATHERING, sliced and item.role == "row_parallel"
        forward_s = backward_s = 0.0
        if not self.norm_casts(shape, item):
            forward_s = roof.cast_s(casts.of(taken // (shape.parallel.tensor if gathers else 1), both=not gathers))
        if gathers:
            backward_s += roof.cast_s(casts.transposed(taken))
        if scatters:
            backward_s += roof.cast_s(casts.transposed(made))
        own = made // (shape.parallel.tensor if scatters else 1)
        return forward_s, roof.cast_s(casts.of(own, both=not scatters)) + backward_s

    def norm_casts(self, shape: LayerShape, item: Item) -> bool:
        """Whether the norm inside a linear makes its input in FP8."""
        return item.role == "column_parallel" and self.section.fuses_norm

    def input_width(self, sizes: Shape, linear: str) -> int:
        """Columns of what one of its linears reads, over all ranks; the residual stream's, unless a kind says otherwise."""
        return sizes.hidden

    def carried_width(self, sizes: Shape, collective: Collective) -> int:
        """Columns of what a collective carries that names its linear, over all rows and ranks."""
        return self.input_width(sizes, collective.of)

    def operands_bytes(self, profile: Profile, linear: str) -> tuple[int, int]:
        """What a linear's weight gradient is computed with: what the linear was given, and the gradient of what it made, each on
        all rows. What it was given is what it keeps of that, by the profile; in FP8 the cast one."""
        half, message_bytes = profile.of(self.section), profile.message_bytes
        if linear == self.section.column_parallel:
            return profile.gathered_input(message_bytes), made_bytes(half, linear)
        return kept_of_argument(half, linear), message_bytes


def made_bytes(half: HalfProfile, linear: str) -> int:
    """What a linear returned, by its profile."""
    made = (tensor.bytes for tensor in half.tensors if tensor.made_by == linear and tensor.output)
    return next(made, half.items[linear].output_bytes)


def kept_of_argument(half: HalfProfile, linear: str) -> int:
    """What a linear keeps of its input, by its profile."""
    return sum(tensor.bytes for tensor in half.tensors if linear in tensor.saved_by)


def normed_cast(shape: LayerShape, count: int, roof: Roofline) -> Passes:
    """What it takes to cast so many numbers that a norm inside a linear makes."""
    if roof.casts is None:
        return Passes(0.0, 0.0)
    return Passes(roof.cast_s(roof.casts.of_norm(count, both=not shape.parallel.sequence_parallel)), 0.0)
