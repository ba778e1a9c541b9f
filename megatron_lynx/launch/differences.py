"""Losses and gradients of one pass over a step, and the first difference between two.

Values are compared on every rank, by bits: NaN equals the same NaN, and 0 is not -0. Differences are in the order of the pass:
losses by micro-batch, then gradients from the last layer to the first, since later ones mostly follow from the first. A gradient
with a tolerance need only be near.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_lynx.anatomy import ITEMS
from megatron_lynx.nest import map_nest
from megatron_lynx.runtime.saved import tensors_in

_AT_ONCE = 1 << 24

Gradients = Mapping[str, Tensor | None]
Position = tuple[int, ...]


@dataclass(frozen=True, order=True)
class Difference:
    """One value of one rank that differs. Ordered by the pass over the step."""

    position: Position
    rank: int
    stage: int
    name: str
    values: str

    @property
    def place(self) -> str:
        return f"{self.name} on stage {self.stage} (rank {self.rank})"


@dataclass(frozen=True)
class Outcome:
    losses: tuple[Any, ...]
    """Values of the loss function, by micro-batch; empty on ranks without a loss."""
    gradients: Gradients
    positions: Mapping[str, Position]

    @classmethod
    def of(cls, losses: Any, chunks: Sequence[Module]) -> Outcome:
        """Read the latest pass. Gradients are views of Megatron's buffers, valid until these are zeroed."""
        parameters = list(named_parameters(chunks))
        return cls(
            tuple(losses or ()),
            {name: gradient_of(parameter) for name, parameter in parameters},
            {name: backward_position(name, parameter) for name, parameter in parameters},
        )

    def on_host(self) -> Outcome:
        losses = map_nest(Tensor, _to_host, self.losses)
        gradients = {name: None if value is None else _to_host(value) for name, value in self.gradients.items()}
        return Outcome(losses, gradients, self.positions)

    @property
    def size_bytes(self) -> int:
        return sum(gradient.nbytes for gradient in self.gradients.values() if gradient is not None)


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def gradient_of(parameter: Parameter) -> Tensor | None:
    """The gradient that Megatron's DDP accumulates, or autograd's."""
    gradient = getattr(parameter, "main_grad", None)
    return parameter.grad if gradient is None else gradient


def named_parameters(chunks: Sequence[Module]) -> Iterator[tuple[str, Parameter]]:
    """Yield parameters by their names in the whole model: layers are numbered from 0 over all stages, as in checkpoints."""
    for chunk in chunks:
        layers: Any = chunk.decoder.layers  # type: ignore[union-attr]
        global_ = {f"decoder.layers.{local}.": f"decoder.layers.{layer.layer_number - 1}." for local, layer in enumerate(layers)}
        for name, parameter in chunk.named_parameters():
            prefix = next((prefix for prefix in global_ if name.startswith(prefix)), None)
            yield (name if prefix is None else global_[prefix] + name.removeprefix(prefix)), parameter


def differences(
    one: Outcome,
    other: Outcome,
    *,
    rank: int,
    stage: int,
    names: tuple[str, str],
    tolerances: Mapping[str, float] = MappingProxyType({}),
) -> list[Difference]:
    """Return all values that differ, earliest first. `tolerances`: fractions of the largest value, by names of gradients."""
    all_differences = [
        Difference((0, index), rank, stage, f"the loss of micro-batch {index}", what)
        for index, pair in enumerate(_paired(one.losses, other.losses))
        if (what := _loss_difference(*pair, names))
    ]
    all_differences += [
        Difference(one.positions[name], rank, stage, name, what)
        for name, mine in one.gradients.items()
        if not _near(mine, other.gradients[name], tolerances.get(name))
        and (what := _difference(mine, other.gradients[name], names))
    ]
    return sorted(all_differences)


def _paired(one: Sequence[Any], other: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    for index in range(max(len(one), len(other))):
        yield (one[index] if index < len(one) else None), (other[index] if index < len(other) else None)


def _loss_difference(one: Any, other: Any, names: tuple[str, str]) -> str:
    mine, yours = tensors_in(one), tensors_in(other)
    if len(mine) != len(yours):
        return f"{len(mine)} values in {names[0]}, {len(yours)} in {names[1]}"
    return next((what for a, b in zip(mine, yours, strict=True) if (what := _difference(a, b, names))), "")


def _difference(one: Tensor | None, other: Tensor | None, names: tuple[str, str]) -> str:
    if one is None or other is None:
        present, absent = (names[1], names[0]) if one is None else names
        return "" if one is other else f"a value in {present}, none in {absent}"
    if what := unlike(one, other, names):
        return what
    one = one.to(other.device)
    differing = (bits(one) != bits(other)).flatten()
    if not differing.any():
        return ""
    mine, yours = one.flatten()[differing].double(), other.flatten()[differing].double()
    worst = int(torch.nan_to_num((mine - yours).abs(), nan=torch.inf).argmax())
    worst_values = f"{mine[worst]:.9g} in {names[0]} and {yours[worst]:.9g} in {names[1]}"
    return f"{len(mine)} of {one.numel()} values that differ, most {worst_values}"


def _near(one: Tensor | None, other: Tensor | None, tolerance: float | None) -> bool:
    """Whether two gradients differ by at most `tolerance` times the largest value of the first. Compares in pieces."""
    if tolerance is None or one is None or other is None or one.shape != other.shape:
        return False
    largest_difference = largest = 0.0
    for mine, yours in zip(one.flatten().split(_AT_ONCE), other.flatten().split(_AT_ONCE), strict=True):
        mine = mine.to(yours.device).double()
        difference = float((mine - yours.double()).abs().max())
        if math.isnan(difference):
            return False
        largest_difference, largest = max(largest_difference, difference), max(largest, float(mine.abs().max()))
    return largest_difference <= tolerance * largest


def backward_position(name: str, parameter: Parameter) -> Position:
    parts = name.split(".")
    if parts[0] == "embedding" or getattr(
        parameter, "shared_embedding", False
    ):  # the first and the last stage add up their gradients
        return 3, 0
    if parts[:2] != ["decoder", "layers"]:
        return 1, 0  # after all layers
    item = next((ITEMS.index(part) for part in reversed(parts) if part in ITEMS), len(ITEMS))
    return 2, -int(parts[2]), -item


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """The same bits as integers of the same size."""
    return tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])


def unlike(one: Tensor, other: Tensor, names: tuple[str, str]) -> str:
    if (one.shape, one.dtype) == (other.shape, other.dtype):
        return ""
    return f"{tuple(one.shape)} {one.dtype} in {names[0]}, {tuple(other.shape)} {other.dtype} in {names[1]}"
