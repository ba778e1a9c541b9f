"""The figures of a step: their names, and how those of several steps or ranks become one.

A name ends in its unit, seconds (`_s`) or bytes (`_bytes`); the others are counts and ratios. An unknown figure is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field

from megatron_lynx.units import format_bytes, format_seconds
from megatron_lynx.validation import Part, formerly

if TYPE_CHECKING:
    from torch import Tensor


class Figure(NamedTuple):
    """Annotation of a field: how it is joined over steps, and its name in logs."""

    over_steps: Callable[[Iterable[Any]], Any]
    logged: str = ""
    """In TensorBoard and W&B; empty: not logged."""


SUM, MOST = Figure(sum), Figure(max)


def unit_of(name: str) -> Literal["bytes", "s", "count"]:
    return "bytes" if name.endswith("_bytes") else "s" if name.endswith("_s") else "count"


def in_words(name: str, value: float) -> str:
    """`in_words("step_s", 0.25)` is "250 ms"."""
    unit = unit_of(name)
    return str(value) if unit == "count" else format_seconds(value) if unit == "s" else format_bytes(value)


class Figures(Part):
    """Figures of one rank's engine over one step or several."""

    model_config = ConfigDict(frozen=False)
    if not TYPE_CHECKING:  # engines count in every half: as fast as a plain object (both are one slot of the type)
        __setattr__, __delattr__ = object.__setattr__, object.__delattr__

    recorded: Annotated[int, SUM] = 0
    """Halves that dropped activations."""
    let_go_bytes: Annotated[int, SUM] = 0
    """Dropped tensors. Those that share memory count each."""
    in_windows: Annotated[int, Figure(sum, "recomputations_hidden"), formerly("in_windows", "hidden_replays")] = 0
    """Recomputations that ran in windows."""
    on_demand: Annotated[int, Figure(sum, "recomputations_on_demand"), formerly("on_demand", "on_demand_replays")] = 0
    """Recomputations that backward waited for."""
    in_windows_s: Annotated[float | None, Figure(sum, "recompute_in_windows_s")] = None
    on_demand_s: Annotated[float | None, Figure(sum, "recompute_on_demand_s")] = None
    """Seconds of these; None if they were not timed."""
    ahead: Annotated[int, SUM] = 0
    """Recomputations that began ahead, with their communication in flight."""
    gathered: Annotated[int, SUM] = 0
    """Inputs gathered once for the recomputation and the weight gradient."""
    fell_back: Annotated[int, SUM] = 0
    """Halves of experts that fell back to checkpoints because of their load."""
    deferred: Annotated[int, SUM] = 0
    filled: Annotated[int, Figure(sum, "weight_gradients_in_waits"), formerly("filled", "filled_weight_gradients")] = 0
    """Delayed weight gradients that ran in a wait."""
    flushed: Annotated[int, Figure(sum, "weight_gradients_flushed"), formerly("flushed", "flushed_weight_gradients")] = 0
    """Delayed weight gradients that ran in no wait: they were due, or memory was short."""
    deferred_bytes: Annotated[int, Figure(max, "deferred_bytes")] = 0
    """Peak of the operands of delayed weight gradients."""
    offloaded_bytes: Annotated[int, Figure(sum, "copied_to_host_bytes")] = 0
    reloaded_bytes: Annotated[int, Figure(sum, "copied_back_bytes")] = 0
    host_bytes: Annotated[int, Figure(max, "host_bytes")] = 0
    """Host memory of offloaded activations."""
    exposed_copy_s: Annotated[float, Figure(sum, "exposed_copy_s")] = 0.0
    """Seconds for which compute waited for copies in either direction."""
    expert_load: Annotated[float, MOST] = 0.0
    """Most rows of one micro-batch for one layer's experts, over a balanced share. 0: no experts."""

    @property
    def recomputed(self) -> int:
        return self.in_windows + self.on_demand

    def __add__(self, later: Figures) -> Figures:
        return Figures(**_joined((self, later), lambda name, figure: figure.over_steps))


@dataclass
class InputSeen:
    """Sizes of the micro-batches of some steps on one rank. Plans are made for full ones."""

    microbatches: int = 0
    tokens: int = 0
    """Rows of the first attention half on this rank, padding included: they are computed."""
    squares: float | Tensor = 0
    """Sum over whole sequences, of which this rank may have a part; a device tensor if sequences are packed."""

    def add(self, tokens: int, squares: float | Tensor) -> None:
        self.microbatches, self.tokens, self.squares = self.microbatches + 1, self.tokens + tokens, self.squares + squares


class Learned(Part):
    """Factors and offsets from predicted to measured figures, as jobs, plans and outcome files state them.

    learned: {seconds: 1.04, attention: 1.1, mlp: 0.98, beside_bytes: [92000000, -31000000], device_bytes: 80000000000}
    """

    seconds: float = Field(default=1.0, gt=0)
    """Factor of all passes: layers, head and embedding, collectives, messages between stages. The others multiply with it."""
    attention: float = Field(default=1.0, gt=0)
    mlp: float = Field(default=1.0, gt=0)
    experts: float = Field(default=1.0, gt=0)
    """Factors of the computation of halves."""
    collectives: float = Field(default=1.0, gt=0)
    """Factor of the tensor-parallel group's collectives."""
    exchanges: float = Field(default=1.0, gt=0)
    beside_bytes: tuple[int, ...] = ()
    """By stage: measured minus predicted bytes of a device."""
    device_bytes: int | None = None
    """Memory of a device without its use outside PyTorch and without reserved, unallocated memory."""

    def beside(self, stage: int) -> int:
        """Offset of one stage; 0 for a stage that no run has had."""
        return self.beside_bytes[stage] if stage < len(self.beside_bytes) else 0


@cache
def figures_of(kind: type[Part]) -> dict[str, Figure]:
    return {name: said for name, field in kind.model_fields.items() for said in field.metadata if isinstance(said, Figure)}


def logged(part: Part) -> dict[str, float | None]:
    """The logged figures by their names in logs; None: unknown."""
    return {figure.logged: getattr(part, name) for name, figure in figures_of(type(part)).items() if figure.logged}


def of_slowest(ranks: Sequence[Figures]) -> dict[str, Any]:
    """The largest of each figure: a step waits for its slowest rank, and a plan has to fit on the fullest."""
    return _joined(ranks, lambda name, figure: max)


def of_all(ranks: Sequence[Figures]) -> dict[str, Any]:
    """The sums of counts, and the largest seconds, bytes and loads."""
    return _joined(ranks, lambda name, figure: sum if unit_of(name) == "count" and figure.over_steps is sum else max)


def _joined(figures: Sequence[Figures], join: Callable[[str, Figure], Callable[[Iterable[Any]], Any]]) -> dict[str, Any]:
    """Joins the known values of each figure; None if all are unknown."""
    joined = {}
    for name, figure in figures_of(type(figures[0])).items():
        known = [value for row in figures if (value := getattr(row, name)) is not None]
        joined[name] = join(name, figure)(known) if known else None
    return joined
