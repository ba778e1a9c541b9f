"""Interface of a kind of section for planning: sizes, seconds, saved tensors, parameters, backward transients.

Code that walks over layers calls `kinds.planning.planning_of(section)` and knows no kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from megatron_lynx.config.job import Job
from megatron_lynx.config.model import Model
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.errors import Problem
from megatron_lynx.kinds.core_attention import AttentionBytes, core_s
from megatron_lynx.kinds.section import GATHERING, Collective, Item, Section
from megatron_lynx.profiler.profile import HalfProfile, ItemProfile, Profile, SavedTensor, Shape, own_tensors
from megatron_lynx.profiler.roofline import Kernels, Roofline, collective_s, kernels_s, norm_kernels, residual_kernels
from megatron_lynx.profiler.shape import FP32_BYTES, MASK_BYTES, LayerShape, cast_bytes
from megatron_lynx.timeline import Passes


class Linear(NamedTuple):
    """A linear of one rank, or several equal ones of an item of experts."""

    rows: int
    taken: int
    """Columns of its input on this rank; `made`: of its output."""
    made: int
    times: int = 1

    @property
    def one_flops(self) -> int:
        """Forward FLOPs of one GEMM: 2mnk."""
        return 2 * self.rows * self.taken * self.made


@dataclass(frozen=True)
class HalfParameters:
    cut: int
    """Weights split over tensor-parallel ranks, summed over all of them."""
    passed: int
    """Weights that one token is multiplied with, over all ranks."""
    vectors: int
    """Elements of biases and norms on one rank."""
    weights: int
    """Weight tensors of one rank."""
    biased: int
    """Bias tensors of one rank, if the model has biases; `norms`: its norms, each with a weight, LayerNorm also a bias."""
    norms: int = 1
    whole: int = 0
    """Weights replicated on every tensor-parallel rank."""
    apart: int = 0
    """Expert parameters of one rank, which have a data-parallel group of their own."""
    router: int = 0
    """Part of `whole` that is a router's: no linear of Transformer Engine and no FP8."""


class Step(NamedTuple):
    item: str
    """Item whose saved tensors are freed afterwards; may be empty."""
    made: int
    """Bytes of gradients and temporaries that it allocates."""
    let_go: int
    """Bytes of these and of earlier gradients freed after it."""


class Planning(ABC):
    """Planning view of one section. `shape`: one layer of one rank; seconds: of one micro-batch."""

    def __init__(self, section: Section) -> None:
        self.section = section

    @abstractmethod
    def linears(self, shape: LayerShape) -> Mapping[str, Linear]: ...

    @abstractmethod
    def kernels(self, shape: LayerShape, item: Item) -> Kernels:
        """Return the kernels of an item other than a linear, core attention, norm or residual."""

    @abstractmethod
    def saved(self, shape: LayerShape) -> Iterator[SavedTensor]:
        """Yield every tensor that its backward reads, except its input; zero-byte tensors are allowed."""

    @abstractmethod
    def parameters(self, model: Model, layout: Parallel) -> HalfParameters: ...

    @abstractmethod
    def backward(self, shape: LayerShape) -> Iterator[Step]:
        """Yield the operators of its backward, from its output's gradient to its input's (`kinds.saved`)."""

    def attention(self, shape: LayerShape) -> AttentionBytes:
        raise NotImplementedError(f"{self.section.name} has no core attention")

    def core_flops(self, shape: LayerShape) -> int:
        """Return the forward FLOPs of the core attention's two batched GEMMs, without savings of a causal mask."""
        raise NotImplementedError(f"{self.section.name} has no core attention")

    def core_arguments_bytes(self, shape: LayerShape) -> int:
        return 0

    def refusals(self, job: Job) -> Iterator[Problem]:
        """Yield settings that can be estimated but not planned."""
        yield from ()

    def tensors(self, shape: LayerShape) -> tuple[SavedTensor, ...]:
        blocks = self.saved(shape) if shape.model.adapters is None else self._beside_frozen(shape)
        return tuple(block for block in blocks if block.bytes)

    def _beside_frozen(self, shape: LayerShape) -> Iterator[SavedTensor]:
        """Yield the saved tensors where weights are frozen: linears read no input, but their adapters do, unless dropout copies
        it, and norms fused into these linears return it."""
        copied = shape.model.adapters is not None and shape.model.adapters.dropout > 0
        for block in self.saved(shape):
            maker = self.section.of_name.get(block.made_by)
            readers = tuple(
                name
                for name in block.saved_by
                if name not in self.section.linears
                or (name in shape.model.adapted and not copied)
                or (shape.model.uses_te and maker is not None and maker.role == "norm" and name in shape.model.adapted)
            )
            if not readers and block.saved_by and maker is not None and maker.role == "core" and not shape.eager:
                readers = (block.made_by,)  # fused kernels read their output
            yield block.model_copy(update={"saved_by": readers})
        for name, linear in self.linears(shape).items():
            if name in shape.model.adapted:
                yield from own_tensors(name, *adapter_blocks(shape, self.section.of_name[name], linear))

    def flops(self, shape: LayerShape) -> dict[str, int]:
        flops = dict.fromkeys(self.section.names, 0)
        flops |= {name: linear.times * linear.one_flops for name, linear in self.linears(shape).items()}
        return flops | {item.name: self.core_flops(shape) for item in self.section.items if item.role == "core"}

    def output_bytes(self, shape: LayerShape, item: Item) -> int:
        """Return the bytes that a submodule returns; a row-parallel linear's output is reduced, and scattered."""
        if not item.is_site:
            return 0
        if item.role == "core":
            return self.attention(shape).result
        linear = self.linears(shape).get(item.name)
        if linear is None or item.role == "row_parallel":
            return shape.input_bytes
        return linear.rows * linear.made * shape.model.element_bytes

    def half(self, job: Job, shape: LayerShape, roof: Roofline) -> HalfProfile:
        items = self.items(shape, roof)
        for name, linear in self.linears(shape).items() if job.model.adapters is not None else ():
            more, item = adapter_s(job, shape, self.section.of_name[name], linear, roof), items[name]
            backward_s = item.backward_s - item.wgrad_s + more.backward_s
            seconds = {"backward_s": backward_s, "dgrad_s": item.dgrad_s + more.backward_s, "wgrad_s": 0.0}
            items[name] = item.model_copy(update={"forward_s": item.forward_s + more.forward_s, **seconds})
        return HalfProfile(input_bytes=shape.input_bytes, items=items, tensors=self.tensors(shape))

    def listed(self) -> Iterable[Item]:
        return self.section.items

    def items(self, shape: LayerShape, roof: Roofline) -> dict[str, ItemProfile]:
        saved = dict.fromkeys(self.section.names, 0)
        for block in self.tensors(shape):
            if block.saved_by:
                saved[block.saved_by[0]] += block.bytes
        linears, priced = self.linears(shape), dict[str, ItemProfile]()
        for item in self.listed():
            figures: dict[str, Any] = {"saved_bytes": saved[item.name], "output_bytes": self.output_bytes(shape, item)}
            if item.name in linears:
                figures |= self._linear(shape, item, linears[item.name], roof)
            else:
                figures |= asdict(self.seconds(shape, item, roof))
                figures["flops"] = self.core_flops(shape) if item.role == "core" else 0
            priced[item.name] = ItemProfile(**figures)
        return priced

    def seconds(self, shape: LayerShape, item: Item, roof: Roofline) -> Passes:
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

    def _linear(self, shape: LayerShape, item: Item, linear: Linear, roof: Roofline) -> dict[str, float]:
        """Return the seconds and FLOPs of a linear. The weight's gradient is added to a buffer: read and written, beside the
        products of a linear of all rows, after those of an expert, which has few rows."""
        element, flops, weight = shape.model.element_bytes, linear.one_flops, linear.taken * linear.made
        taken, made, recipe = linear.rows * linear.taken, linear.rows * linear.made, shape.model.fp8_recipe

        def read(count: int) -> int:
            return element * count if recipe is None else cast_bytes(recipe, count)

        forward_s = linear.times * roof.linear_s(flops, read(taken + weight) + element * made)
        dgrad_s = linear.times * roof.linear_s(flops, read(made + weight) + element * taken)
        if linear.times > 1:
            added_s = 2 * roof.gradient_bytes * weight / roof.hbm.byte_per_s
            wgrad_s = linear.times * (roof.linear_s(flops, read(taken + made)) + added_s)
        else:
            wgrad_s = roof.linear_s(flops, read(taken + made) + 2 * FP32_BYTES * weight)
        if self.section.collectives_of and item.role in GATHERING:  # overlapped with collectives
            dgrad_s, wgrad_s = (roof.slowed_s(*times_s) for times_s in zip((dgrad_s, wgrad_s), roof.beside_s, strict=True))
        cast_forward_s, cast_backward_s = self._casts_s(shape, item, linear, roof)
        return {
            "forward_s": forward_s + cast_forward_s,
            "backward_s": dgrad_s + wgrad_s + cast_backward_s,
            "flops": linear.times * flops,
            "dgrad_s": dgrad_s,
            "wgrad_s": wgrad_s,
        }

    def _casts_s(self, shape: LayerShape, item: Item, linear: Linear, roof: Roofline) -> tuple[float, float]:
        """Return forward and backward seconds of a linear's FP8 casts: its input, unless a norm makes it, and its output's
        gradient. The rows of each expert are cast apart. Sequence parallelism gathers FP8 bytes, and copies by columns later."""
        casts, sliced = roof.casts, shape.parallel.sequence_parallel
        if casts is None:
            return 0.0, 0.0
        taken, made = (linear.rows * columns for columns in (linear.taken, linear.made))
        gathers, scatters = sliced and item.role in GATHERING, sliced and item.role == "row_parallel"
        forward_s = backward_s = 0.0
        if not self.norm_casts(shape, item):
            forward_s = roof.cast_s(casts.of(taken // (shape.parallel.tensor if gathers else 1), columnwise=not gathers))
        if gathers:
            backward_s += roof.cast_s(casts.transposed(taken))
        if scatters:
            backward_s += roof.cast_s(casts.transposed(made))
        gradient_numbers = made // (shape.parallel.tensor if scatters else 1)
        backward_s += roof.cast_s(casts.of(gradient_numbers, columnwise=not scatters))
        return linear.times * forward_s, linear.times * backward_s

    def norm_casts(self, shape: LayerShape, item: Item) -> bool:
        return item.role == "column_parallel" and self.section.fuses_norm

    def input_width(self, sizes: Shape, linear: str) -> int:
        """Return the columns of a linear's input, over all ranks."""
        return sizes.hidden

    def carried_width(self, sizes: Shape, collective: Collective) -> int:
        """Return the columns that a collective of a named linear carries, over all ranks."""
        return self.input_width(sizes, collective.of)

    def operands_bytes(self, profile: Profile, linear: str) -> tuple[int, int]:
        """Return (input, output gradient) bytes of a linear's weight gradient, each on all rows, in FP8 after the cast."""
        half, message_bytes = profile.of(self.section), profile.message_bytes
        if linear == self.section.column_parallel:
            return profile.gathered_input(message_bytes), made_bytes(half, linear)
        return kept_of_argument(half, linear), message_bytes


def adapter_blocks(shape: LayerShape, item: Item, linear: Linear) -> tuple[int, ...]:
    """Return the blocks that an adapter saves: its first weight's output; its gathered or copied input; dropout's mask."""
    adapters, element = shape.model.adapters, shape.model.element_bytes
    assert adapters is not None, "callers look"
    taken = linear.rows * linear.taken
    gathers = shape.parallel.sequence_parallel and item.role in GATHERING
    copied = (gathers or adapters.dropout > 0) * element * taken
    mask = (adapters.dropout > 0) * (element if shape.device == "cpu" else MASK_BYTES) * taken
    return element * linear.rows * adapters.rank, copied, mask


def adapter_s(job: Job, shape: LayerShape, item: Item, linear: Linear, roof: Roofline) -> Passes:
    """Return the seconds of a linear's adapter; 0 without one. Forward: two GEMMs, scale, sum, dropout. Backward: four GEMMs,
    scale, dropout, sum of both inputs' gradients. Tensor-parallel ranks gather the output of a row-parallel linear's adapter,
    whose weight is cut by columns. Source: Megatron-Bridge's `ParallelLinearAdapter` and `LoRALinear`."""
    adapters, element, tensor = shape.model.adapters, shape.model.element_bytes, shape.parallel.tensor
    if adapters is None or item.name not in adapters.targets:
        return Passes(0.0, 0.0)
    rows, rank, row = linear.rows, adapters.rank, item.role == "row_parallel"
    cut, made = (1, linear.made // tensor) if row else (tensor, linear.made)
    gemms = [(linear.taken, rank // cut or 1), (rank, made)]
    given_bytes, made_bytes = element * rows * linear.taken, element * rows * linear.made

    def gemms_s(times: int) -> float:
        moved = [element * (rows * wide + rows * narrow + wide * narrow) for wide, narrow in gemms]
        flops = [2 * rows * wide * narrow for wide, narrow in gemms]
        return times * sum(map(roof.seconds, flops, moved))

    dropped = (2 * given_bytes + MASK_BYTES * rows * linear.taken,) if adapters.dropout else ()
    kernels = Kernels((2 * made_bytes, 3 * made_bytes, *dropped), (2 * made_bytes, 3 * given_bytes, *dropped))
    seconds = Passes(gemms_s(1), gemms_s(2)) + kernels_s(kernels, roof)
    whole_s = collective_s(job.cluster, tensor, shape.gathered_bytes * (tensor - 1) / tensor)
    if row:
        return seconds + Passes(whole_s, whole_s if shape.parallel.sequence_parallel else 0.0)
    return seconds + Passes(0.0, 0.0 if shape.parallel.sequence_parallel else 2 * whole_s)


def adapter_parameters(item: Item, linear: Linear, rank: int, parts: int) -> int:
    """Return the weights of a linear's adapter on one rank. One weight is cut like the linear; the other is cut into `parts`."""
    taken, made = (linear.taken, linear.made // parts) if item.role == "row_parallel" else (linear.taken // parts, linear.made)
    return rank * (taken + made)


def longer(half: HalfProfile, name: str, waits: Passes) -> HalfProfile:
    item = half.items[name]
    seconds = {"forward_s": item.forward_s + waits.forward_s, "backward_s": item.backward_s + waits.backward_s}
    return half.model_copy(update={"items": {**half.items, name: item.model_copy(update=seconds)}})


def made_bytes(half: HalfProfile, linear: str) -> int:
    made = (tensor.bytes for tensor in half.tensors if tensor.made_by == linear and tensor.output)
    return next(made, half.items[linear].output_bytes)


def kept_of_argument(half: HalfProfile, linear: str) -> int:
    return sum(tensor.bytes for tensor in half.tensors if linear in tensor.saved_by)


def normed_cast(shape: LayerShape, count: int, roof: Roofline) -> Passes:
    if roof.casts is None:
        return Passes(0.0, 0.0)
    return Passes(roof.cast_s(roof.casts.of_norm(count, columnwise=not shape.parallel.sequence_parallel)), 0.0)
