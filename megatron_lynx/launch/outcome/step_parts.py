"""What the seconds of one step went to, by kind of half and by wait: from the spans of a step that was traced for it.

    spans of a rank, nested     backward mlp(3) ┬ window bwd.mlp.0@3 ┬ replay attention(3)       in the wait
                                                │                    └ (the rest of the wait)
                                                └ replay mlp(3)                                  on demand
    a half computes             its forward and its backward, less everything inside, and the weight gradients it left for later
    a wait                      from where it is waited for to its end. How long the communication is, a wait says that goes on
                                behind its tasks; one that its tasks outlast says only that it is not longer than these

Receives between stages are left out: how long these take is up to the other stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import TypeVar

from megatron_lynx.anatomy import EXPERTS
from megatron_lynx.measure.run_outcome import HalfSeconds, StepParts, WaitSeconds
from megatron_lynx.runtime.trace import Span

PartT = TypeVar("PartT", HalfSeconds, WaitSeconds)

ON_COPY_STREAMS = ("offload", "reload")
COMPUTING = ("forward", "backward")

OVER = 0.02
"""A wait of whose seconds this part or less is left behind its tasks was over before them."""


def parts_of(spans: Sequence[Span], has_experts: Callable[[int], bool]) -> StepParts:
    """Of the spans of one rank's step. `has_experts`: of a layer, by its number."""
    halves: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    waits: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for span, inside in _nested(span for span in spans if span.kind not in ON_COPY_STREAMS):
        own_s = span.end_s - span.start_s - sum(each.end_s - each.start_s for each in inside)
        if span.kind in COMPUTING or span.kind == "weight_gradient":
            halves[_kind(span.half, span.layer, has_experts)][span.kind].append(own_s)
        elif span.kind == "window":
            name, _, layer = str(span.window).partition("@")
            passing, half, ordinal = name.split(".")
            place = f"{passing}.{_kind(half, int(layer), has_experts)}.{ordinal}"
            replays_s = sum(each.end_s - each.start_s for each in inside if each.kind == "replay")
            waits[place].append((span.end_s - span.start_s, own_s, replays_s))
    return StepParts(
        halves={kind: _half(found) for kind, found in sorted(halves.items())},
        waits={place: _waits(found) for place, found in sorted(waits.items())},
    )


def together(parts: Iterable[StepParts | None]) -> StepParts | None:
    """Of several ranks, added up; None where none was traced."""
    found = [each for each in parts if each is not None]
    if not found:
        return None
    kinds = sorted({kind for each in found for kind in each.halves})
    places = sorted({place for each in found for place in each.waits})
    return StepParts(
        halves={kind: _sum(HalfSeconds, (each.halves[kind] for each in found if kind in each.halves)) for kind in kinds},
        waits={place: _sum(WaitSeconds, (each.waits[place] for each in found if place in each.waits)) for place in places},
    )


def _sum(kind: type[PartT], parts: Iterable[PartT]) -> PartT:
    found = list(parts)
    return kind(**{name: sum(getattr(each, name) for each in found) for name in kind.model_fields})


def _half(found: Mapping[str, Sequence[float]]) -> HalfSeconds:
    """Of one kind, by kind of span. A pass counts as the usual one: in one step somebody else's work may fall into some."""
    seconds = sum(len(found[passing]) * median(found[passing]) for passing in COMPUTING if found[passing])
    return HalfSeconds(calls=len(found["forward"]), seconds=seconds + sum(found["weight_gradient"]))


def _waits(found: Sequence[tuple[float, float, float]]) -> WaitSeconds:
    """Of one place: seconds of each wait, those of them behind its tasks, and those of recomputations in it."""
    longer = [(whole_s, replays_s) for whole_s, rest_s, replays_s in found if rest_s > OVER * whole_s]
    shorter = [(whole_s, replays_s) for whole_s, rest_s, replays_s in found if rest_s <= OVER * whole_s]
    return WaitSeconds(
        longer=len(longer),
        longer_s=sum(whole_s for whole_s, _ in longer),
        longer_replays_s=sum(replays_s for _, replays_s in longer),
        shorter=len(shorter),
        shorter_replays_s=sum(replays_s for _, replays_s in shorter),
    )


def _kind(half: str | None, layer: int | None, has_experts: Callable[[int], bool]) -> str:
    """The part of a profile that a half is priced with."""
    return "experts" if half == EXPERTS.half and layer is not None and has_experts(layer) else str(half)


def _nested(spans: Iterable[Span]) -> Iterator[tuple[Span, list[Span]]]:
    """Each span with those directly inside it."""
    around: list[tuple[Span, list[Span]]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        while around and around[-1][0].end_s < span.end_s:
            yield around.pop()
        if around:
            around[-1][1].append(span)
        around.append((span, []))
    yield from reversed(around)
