"""A rule of a plan: kept and recomputed items of its layers, the windows of recomputation, and the gathers of inputs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from megatron_lynx.anatomy import DENSE, HALVES, Half, Section, address, filling, names_in
from megatron_lynx.anatomy.address import RECV_BACKWARD, SEND_BACKWARD, Stretch
from megatron_lynx.kinds.section import WHY_KEPT
from megatron_lynx.kinds.sections import ItemName, spelled_out
from megatron_lynx.plan.facts import LayerRange, Layers
from megatron_lynx.validation import Part, formerly

__all__ = ["GatherName", "ItemName", "PlaceName", "WaitName"]
LAST_READ = "which megatron-lynx 0.2.0 was the last to read: make the plan again with `megatron-lynx plan`"


def _matching(pattern: str, examples: tuple[str, ...]) -> AfterValidator:
    expected = ", ".join(repr(name) for name in examples)

    def check(text: str) -> str:
        if pattern != address.WAIT_PATTERN and address.is_forward(text):
            raise ValueError(f"{text} recomputes in a forward, {LAST_READ}")
        if re.fullmatch(pattern, text) is None:
            raise PydanticCustomError("literal_error", "no such name", {"expected": expected})
        return text

    return AfterValidator(check)


def _of_all_phases(place: object) -> object:
    """Return the steady phase's place if an older plan names one for each phase: others in cool-down gained 0.03 % of a step."""
    by_phase = isinstance(place, Mapping) and place.keys() <= {"steady", "cooldown"}
    return place.get("steady", address.ON_DEMAND) if by_phase else place  # type: ignore[attr-defined]


PlaceName = Annotated[
    str,
    BeforeValidator(_of_all_phases),
    _matching(address.PLACE_PATTERN, (address.ON_DEMAND, RECV_BACKWARD, *address.examples("bwd"))),
    WithJsonSchema({"type": "string", "pattern": f"^{address.PLACE_PATTERN}$"}),
]
GatherName = Annotated[
    str,
    BeforeValidator(_of_all_phases),
    _matching(address.GATHER_PATTERN, (address.ON_DEMAND, *address.examples("bwd"))),
    WithJsonSchema({"type": "string", "pattern": f"^{address.GATHER_PATTERN}$"}),
]
WaitName = Annotated[
    str,
    _matching(address.WAIT_PATTERN, (RECV_BACKWARD, SEND_BACKWARD, *address.examples("bwd"), *address.examples("fwd"))),
    WithJsonSchema({"type": "string", "pattern": f"^{address.WAIT_PATTERN}$"}),
]


def _spelled_out(items: object) -> object:
    names = isinstance(items, list | tuple) and all(isinstance(item, str) for item in items)
    return tuple(spelled_out(items)) if names else items  # type: ignore[arg-type]


class Windows(Part):
    """Where the two halves of a layer are recomputed: in one window, or stretch by stretch in several (`anatomy.address`). A half
    without recomputation has none. A checkpointed half may have the first wait of its backward, in which the part after all its
    communication is recomputed."""

    attention: PlaceName | None = None
    mlp: PlaceName | None = None

    def of(self, half: Half) -> str:
        place: PlaceName | None = getattr(self, half)
        return address.ON_DEMAND if place is None else place

    def stretches(self, half: Half) -> tuple[Stretch, ...]:
        return address.stretches_in(self.of(half))


class Gather(Part):
    """The collective after which the input of a recomputed `linear_qkv` / `linear_fc1` is gathered, with sequence parallelism.
    The recomputation and then the weight gradient use it, for which stock Megatron would gather it anyway."""

    attention: GatherName | None = None
    mlp: GatherName | None = None

    def of(self, half: Half) -> str | None:
        gather: GatherName | None = getattr(self, half)
        return gather


CheckpointName = Literal["layer", "halves", Half]
"""layer: both halves together. halves: each half by itself. Else one half."""

AHEAD: tuple[CheckpointName, ...] = ("layer", "halves", "mlp")
Ahead = bool | Literal["gather"]


class CheckpointGroups(Part):
    """Layers that are checkpointed several at a time, counted from the first of their rule; the last group may be smaller."""

    layers: int = Field(ge=2)


class Rule(Part):
    """Treatment of the activations of a range of layers.

    Every item of a dense layer is kept or recomputed. A rule with items of another section, such as experts, may leave out others
    of that half: these are kept. Items of a checkpointed half are not listed.
    """

    layers: Layers
    checkpoint: CheckpointName | CheckpointGroups | None = None
    """The unit that keeps only its input and is recomputed in backward, including its communication: a layer, both halves each by
    itself, one of them, or several layers together. Routers of experts decide once."""
    ahead: Ahead = False
    """Whether the communication of a checkpointed layer's recomputation begins when backward enters the attention half of the
    layer above, and overlaps with it: the dispatch of its tokens, or without experts the reduction after its attention. `gather`:
    with sequence parallelism the input of its attention is gathered there first."""
    keep: Annotated[tuple[ItemName, ...], BeforeValidator(_spelled_out)] = ()
    recompute: Annotated[tuple[ItemName, ...], formerly("recompute", "replay")] = ()
    windows: Windows = Windows()
    gather: Gather = Gather()
    weight_gradients: dict[str, tuple[WaitName, ...]] = Field(default_factory=dict)
    """Linears that delay their weight gradients, and the waits in which these may run; the first wait runs the oldest one."""
    weight_gradient_pieces: dict[str, Annotated[int, Field(ge=2, le=8)]] = Field(default_factory=dict)
    """Linears whose delayed weight gradients are cut into blocks of rows, or experts' into groups of experts. Each wait
    that is named runs one piece, as often as it is named."""

    def delayed_said(self, linear: str) -> str:
        pieces = self.weight_gradient_pieces.get(linear)
        return f"{linear}{f' in {pieces} pieces' if pieces else ''}: {', '.join(self.weight_gradients[linear])}"

    @property
    def treatment(self) -> object:
        """The rule without its layers. Window names are relative, so it is equal for layers with equal treatment."""
        recomputed = self.checkpoint, self.ahead, self.keep, self.recompute, self.windows, self.gather
        return *recomputed, self.weight_gradients, self.weight_gradient_pieces

    def checkpoints(self, half: Half) -> bool:
        return self.checkpoint is not None and self.checkpoint != HALVES[half == HALVES[0]]

    def feeds(self, layer: int, half: Half) -> bool:
        return self.fed_behind(layer, half) > 0

    def fed_behind(self, layer: int, half: Half) -> int:
        """Number of the next halves that keep no input: this half is recomputed when the last of them is."""
        if self.checkpoint != "layer" and not isinstance(self.checkpoint, CheckpointGroups):
            return 0
        group = next(part for part in self.parts if layer in part)
        return len(HALVES) * (group.last - layer) + len(HALVES) - 1 - HALVES.index(half)

    @property
    def parts(self) -> Iterator[LayerRange]:
        size = self.checkpoint.layers if isinstance(self.checkpoint, CheckpointGroups) else 1
        for first in range(self.layers.first, self.layers.last + 1, size):
            yield LayerRange(first=first, last=min(first + size - 1, self.layers.last))

    def recomputed(self, section: Section) -> tuple[str, ...]:
        return section.run_again() if self.checkpoints(section.half) else self.recomputed_in(section.half)

    def recomputed_in(self, half: Half) -> tuple[str, ...]:
        return _recomputed(half, self.keep, self.recompute)

    def filling(self, half: Half) -> Section:
        of_experts = (linear for section in filling(half) if section.in_some_layers for linear in section.linears)
        deferred = tuple(linear for linear in of_experts if linear in self.weight_gradients) if self.weight_gradients else ()
        if self.checkpoints(half):
            deferred = tuple(self.weight_gradients)  # no other item is named
        return _filling(half, self.keep + deferred, self.recompute)

    def _problems(self) -> Iterator[str]:
        yield from self._unlisted()
        yield from self._never_recomputed()
        if self.ahead and self.checkpoint not in AHEAD:
            finding = "there is no checkpoint" if self.checkpoint is None else self.checkpoint_said
            yield f"{self.ahead_said}, but {finding}: it needs checkpoint {', '.join(AHEAD[:-1])} or {AHEAD[-1]}"
        elif self.gathers_ahead and self.checkpoint != "layer":
            yield f"{self.ahead_said}, but {self.checkpoint_said}: it needs checkpoint layer"
        for half in HALVES:
            window, gather = getattr(self.windows, half), getattr(self.gather, half)
            if self.checkpoints(half):
                if gather is not None:
                    yield f"gather.{half} is given, but {self.checkpoint_said}: it gathers as its forward did"
                yield from self._rest_problems(half)
                continue
            if window is not None and not self.recomputed_in(half):
                yield f"windows.{half} is given, but the {half} half recomputes nothing"
            elif window is not None:
                yield from self._stops(half)
            gathered = self.filling(half).gathered
            if gather is not None and gathered not in self.recompute:
                kept = f"{gathered} is kept" if gathered else "the half's input is gathered for no single linear"
                yield f"gather.{half} is given, but {kept}"
        yield from self._deferred()

    @property
    def gathers_ahead(self) -> bool:
        return self.ahead == "gather"

    @property
    def rest_in_wait(self) -> bool:
        return any(map(self.wait_of_rest, HALVES))

    def wait_of_rest(self, half: Half) -> str | None:
        window = self.windows.of(half)
        return window if self.checkpoints(half) and window != address.ON_DEMAND else None

    @property
    def ahead_said(self) -> str:
        return f"ahead is {str(self.ahead).lower()}"

    @property
    def ahead_in_words(self) -> str:
        gathered = " from its gather on" if self.gathers_ahead else ""
        return f", ahead{gathered}" if self.ahead else ""

    @property
    def checkpoint_said(self) -> str:
        if isinstance(self.checkpoint, CheckpointGroups):
            return f"checkpoint is {{layers: {self.checkpoint.layers}}}"
        return f"checkpoint is {self.checkpoint}"

    def kept_input(self, half: Half) -> str:
        first = HALVES[0]
        if isinstance(self.checkpoint, CheckpointGroups):
            return f"the input of every {self.checkpoint.layers} layers" if half == first else f"nothing: {first} makes its input"
        if self.checkpoint == "layer":
            return "the layer's input" if half == first else f"nothing: {first} makes its input"
        return "its input"

    def _rest_problems(self, half: Half) -> Iterator[str]:
        window, half_window = getattr(self.windows, half), address.own_window(half)
        if window is not None and self.feeds(self.layers.last, half):
            yield f"windows.{half} is {window}, but {self.checkpoint_said}: the {half} half runs again whole, before the mlp half"
        elif window not in (None, half_window):
            again = f"it runs again where backward enters it, at most to {half_window}"
            yield f"windows.{half} is {window}, but {self.checkpoint_said}: {again}"

    def _unlisted(self) -> Iterator[str]:
        listed = self.keep + self.recompute
        for half in filter(self.checkpoints, HALVES):
            named = [item for item in names_in(half) if item in listed]
            if named:
                again = f"all of the {half} half runs again, so list none of it"
                yield f"{', '.join(named)}: listed, but {self.checkpoint_said}: {again}"
        yield from (f"{item} is listed twice" for item in dict.fromkeys(listed) if listed.count(item) > 1)
        for half in HALVES:
            section = self.filling(half)
            if section.in_some_layers or self.checkpoints(half):
                continue
            yield from (f"{item} is neither kept nor recomputed" for item in section.names if item not in listed)
            other_items = (item for item in names_in(half) if item in listed and item not in section.names)
            yield from (f"{item} is no item of a layer that has {section.names[1]}" for item in other_items)

    def _never_recomputed(self) -> Iterator[str]:
        roles = {item.name: item.role for half in HALVES for section in filling(half) for item in section.items}
        for item in dict.fromkeys(self.recompute):
            if (why := WHY_KEPT.get(roles[item])) is not None:
                yield f"{item} must be kept: {why}"

    def _deferred(self) -> Iterator[str]:
        filled = map(self.filling, HALVES)  # layers of experts may have dense ones among them
        sections = (one for section in filled for one in (*((DENSE[section.half],) if section.in_some_layers else ()), section))
        linears = [linear for section in sections for linear in section.linears]
        for linear, waits in self.weight_gradients.items():
            if linear not in linears:
                yield f"weight_gradients.{linear} is no linear of a layer: there are {', '.join(linears)}"
            elif not waits:
                yield f"weight_gradients.{linear} names no wait: leave it out, and it is computed where stock computes it"
            pieces = self.weight_gradient_pieces.get(linear, 1)
            for wait in dict.fromkeys(wait for wait in waits if waits.count(wait) > pieces):
                often = "twice" if pieces == 1 else f"{waits.count(wait)} times, but has {pieces} pieces"
                yield f"weight_gradients.{linear} names {wait} {often}"
        for linear, pieces in self.weight_gradient_pieces.items():
            if (named := len(self.weight_gradients.get(linear, ()))) < pieces:
                todo = f"name {pieces}, or one of them several times"
                yield f"weight_gradient_pieces.{linear} is {pieces}, but weight_gradients.{linear} names {named} waits: {todo}"

    def _stops(self, half: Half) -> Iterator[str]:
        section, text, begin = self.filling(half), self.windows.of(half), 0
        for stretch in self.windows.stretches(half):
            end = len(section.names) if stretch.until is None else -1
            if stretch.until in section.stops:
                end = section.index(str(stretch.until))
            if end < 0:
                stops = " or ".join(section.stops) or "nothing"
                yield f"windows.{half} is {text}: a recomputation stops before {stops}, not {stretch.until}"
                return
            if stretch.until == section.gathered and getattr(self.gather, half) is not None:
                yield f"windows.{half} is {text}: what comes before {stretch.until} runs where its input is gathered"
                return
            if not set(section.names[begin:end]) & set(self.recompute):
                yield f"windows.{half} is {text}: of what is recomputed, nothing is left to run in {stretch}"
                return
            begin = end


def joined(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    result: list[Rule] = []
    for rule in sorted(rules, key=lambda rule: rule.layers.first):
        last = result[-1] if result else None
        whole = last is None or not isinstance(last.checkpoint, CheckpointGroups) or not len(last.layers) % last.checkpoint.layers
        if last and whole and last.layers.last + 1 == rule.layers.first and last.treatment == rule.treatment:
            result[-1] = last.model_copy(update={"layers": LayerRange(first=last.layers.first, last=rule.layers.last)})
        else:
            result.append(rule)
    return tuple(result)


@lru_cache(maxsize=1024)
def _filling(half: Half, keep: tuple[str, ...], recompute: tuple[str, ...]) -> Section:  # called thousands of times per plan
    named, (dense, *other_sections) = {*keep, *recompute}, filling(half)
    candidates = [section for section in other_sections if named & set(section.names) - set(dense.names)]
    return max(candidates, key=lambda section: len(named & set(section.names)), default=dense)


@lru_cache(maxsize=1024)
def _recomputed(half: Half, keep: tuple[str, ...], recompute: tuple[str, ...]) -> tuple[str, ...]:
    known = dict.fromkeys((*_filling(half, keep, recompute).names, *names_in(half)))
    return tuple(item for item in known if item in recompute)
