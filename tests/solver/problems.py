"""Made-up problems of the solver."""

from __future__ import annotations

from hypothesis import strategies as st

from megatron_lynx.cost.memory import HalfMemory
from megatron_lynx.solver.problem import ON_DEMAND_SEAT, Option, Seat, StageProblem

REPLAYABLE = ("input_layernorm", "linear_qkv", "rotary", "core_attention")
INPUT = 10
WINDOW = "bwd.mlp.0"


def option(count: int, saved: int, regenerated: int, replay_s: float, window_s: float) -> Option:
    """A choice that replays the first `count` items."""
    seat = Seat(WINDOW, WINDOW, window_s, window_s) if count and window_s else ON_DEMAND_SEAT
    return Option(
        replay=REPLAYABLE[:count],
        memory=HalfMemory(INPUT + saved, regenerated, INPUT, ahead=regenerated if window_s else 0),
        seat=seat,
        replay_s=replay_s,
        exposed_s=seat.exposed_s(replay_s, 1.0),
        flops=count,
    )


def options(parts: list[tuple[int, float]], window_s: float) -> tuple[Option, ...]:
    """Items of (bytes, seconds): option k replays the first k of them and keeps the rest."""
    total = sum(size for size, _ in parts)
    return tuple(
        option(
            count,
            saved=total - sum(size for size, _ in parts[:count]),
            regenerated=sum(size for size, _ in parts[:count]),
            replay_s=sum(seconds for _, seconds in parts[:count]),
            window_s=window_s,
        )
        for count in range(len(parts) + 1)
    )


parts = st.lists(st.tuples(st.integers(1, 100), st.sampled_from([0.25, 0.5, 1.0, 3.0])), min_size=1, max_size=4)


windows_s = st.sampled_from([0.0, 0.5, 1.0, 2.0, 20.0])


@st.composite
def problems(draw, max_layers=4, window_s=windows_s):
    attention, mlp = draw(parts), draw(parts)
    return StageProblem(
        stage=0,
        layers=draw(st.integers(1, max_layers)),
        attention=options(attention, draw(window_s)),
        mlp=options(mlp, draw(window_s)),
        last_mlp=options(mlp, 0.0),
        in_flight=draw(st.integers(1, 3)),
    )
