"""Made-up problems of the solver."""

from __future__ import annotations

from hypothesis import strategies as st

from megatron_lynx.cost.memory import HalfMemory
from megatron_lynx.solver.problem import ON_DEMAND_SEAT, Choices, Option, Seat, StageProblem

REPLAYABLE = ("input_layernorm", "linear_qkv", "rotary", "core_attention")
INPUT = 10
WINDOWS = {"ahead": "bwd.mlp.0+1", "early": "fwd.mlp.0"}


def option(count: int, saved: int, regenerated: int, replay_s: float, window_s: float, kind: str = "ahead") -> Option:
    """A choice that replays the first `count` items."""
    seated = count and window_s
    seat = Seat(WINDOWS[kind], WINDOWS[kind], window_s, window_s) if seated else ON_DEMAND_SEAT
    there = {kind: regenerated} if seated else {}
    return Option(
        replay=REPLAYABLE[:count],
        memory=HalfMemory(INPUT + saved, regenerated, INPUT, **there),
        seat=seat,
        replay_s=replay_s,
        exposed_s=seat.exposed_s(replay_s, 1.0),
        flops=count,
    )


def options(parts: list[tuple[int, float]], window_s: float, forward_s: float = 0.0) -> Choices:
    """Items of (bytes, seconds): option k replays the first k of them and keeps the rest, on demand or in a window."""
    total = sum(size for size, _ in parts)
    offered = []
    for count in range(len(parts) + 1):
        regenerated = sum(size for size, _ in parts[:count])
        replay_s = sum(seconds for _, seconds in parts[:count])
        seats = [
            (0.0, "ahead"),
            *((length, kind) for length, kind in ((window_s, "ahead"), (forward_s, "early")) if count and length),
        ]
        offered += [option(count, total - regenerated, regenerated, replay_s, *seat) for seat in seats]
    return Choices(offered)


parts = st.lists(st.tuples(st.integers(1, 100), st.sampled_from([0.25, 0.5, 1.0, 3.0])), min_size=1, max_size=4)
windows_s = st.sampled_from([0.0, 0.5, 1.0, 2.0, 20.0])


@st.composite
def problems(draw, max_layers=4, window_s=windows_s, most_parts=4):
    attention, mlp = draw(parts)[:most_parts], draw(parts)[:most_parts]
    return StageProblem(
        stage=0,
        layers=draw(st.integers(1, max_layers)),
        attention=options(attention, draw(window_s), draw(window_s)),
        mlp=options(mlp, draw(window_s), draw(window_s)),
        last_mlp=options(mlp, 0.0, draw(window_s)),
        in_flight=draw(st.sampled_from([1, 2, 3, 2.5])),
    )
