"""Time of a forward overlapped with a backward in Megatron's combined schedule (`--overlap-moe-expert-parallel-comm`).

A layer has four nodes in a forward and four in a backward, issued in this order:

    exchanges   combine B │ dispatch F   dispatch B │ combine F             F: attention, norm, router, shared experts = before
    computing   before F  │ experts B   [weights]   experts F │ before B [weights]

With `--delay-wgrad-compute` weight gradients are nodes of their own, else part of their backward. Layers without experts have two
nodes. Unpaired layers of the longer chunk run alone.

Source: `combined_1f1b.py`, `model_chunk_schedule_plan.py` and `fine_grained_callables.py` of megatron-core 0.16.1 to 0.19.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple

from megatron_lynx.anatomy import LayerKind
from megatron_lynx.cost.stage import HalfSeconds, half_seconds
from megatron_lynx.kinds.experts.section import COMBINE, DISPATCH
from megatron_lynx.profiler.profile import HalfProfile, Profile


class Beside(NamedTuple):
    """Relative rates of two streams that run at once."""

    exchange: float = 1.0
    computing: float = 1.0


UNDISTURBED = Beside()
MEASURED = Beside(exchange=0.69, computing=100 / 132)
"""H100: exchange kernels take 32 of 132 multiprocessors. The exchange's share is fitted to published rows."""


def shared_rates(profile: Profile, kernels_leave: float = 1.0) -> Beside:
    """Return the rates for stock and plans. `kernels_leave`: share of multiprocessors that a fused dispatcher's kernels leave to
    compute (`FusedDispatch.computing_kept`)."""
    return MEASURED._replace(computing=min(MEASURED.computing, 1 / profile.interference, kernels_leave))


class Nodes(NamedTuple):
    """Seconds of each node of one layer and micro-batch. `back`: compute on the exchange stream, after `combine` in forward and
    before it in backward. `weights`: the part that is weight gradients."""

    before_f: float
    before_b: float
    before_weights: float
    experts_f: float
    experts_b: float
    experts_weights: float
    exchange: float = 0.0
    back_f: float = 0.0
    back_b: float = 0.0


LayerSeconds = tuple[HalfSeconds, ...]


def keeping_all(profile: Profile, kind: LayerKind) -> LayerSeconds:
    return tuple(half_seconds(profile, section) for section in kind)


def nodes_of(profile: Profile, layer: LayerSeconds, kind: LayerKind) -> Nodes:
    """Split a layer into nodes. Recomputation is part of its half's backward node."""
    first, second = map(profile.of, kind)
    attention, mlp = layer
    before_f, before_b = attention.forward_s, attention.backward_s + attention.again_s
    inside_f, inside_b = mlp.forward_s, mlp.backward_s + mlp.again_s
    if not kind[1].exchanges or profile.experts is None:
        return Nodes(before_f, before_b, _weights_s(first), inside_f, inside_b, _weights_s(second))
    half, names = profile.experts, kind[1].names
    apart = _moved_outside(profile)
    front = dict.fromkeys(names[: names.index(DISPATCH)], 1.0) | {DISPATCH: apart}
    back = {COMBINE: apart} | dict.fromkeys(names[names.index(COMBINE) + 1 :], 1.0)
    (front_f, front_b), (back_f, back_b) = _both_s(half, front), _both_s(half, back)
    front_f, front_b = (seconds + 2 * half.collective_s for seconds in (front_f, front_b))
    shared_s = _weights_s(half, front)
    return Nodes(
        before_f + front_f,
        before_b + front_b,
        _weights_s(first) + shared_s,
        inside_f - front_f - back_f - 2 * half.exchange_s,
        inside_b - front_b - back_b - 2 * half.exchange_s,
        _weights_s(half) - shared_s,
        half.exchange_s,
        back_f,
        back_b,
    )


def _moved_outside(profile: Profile) -> float:
    """Return the share of row copies done on the source ranks: all, or one of two copies if a rank has several experts. Flex
    dispatchers fuse these copies."""
    experts = profile.shape.experts
    if experts is None or experts.dispatcher != "alltoall":
        return 0.0
    return 0.5 if experts.count > profile.shape.expert else 1.0


def _both_s(half: HalfProfile, shares: dict[str, float]) -> tuple[float, float]:
    item_shares = [(half.items[name], share) for name, share in shares.items()]
    return sum(share * item.forward_s for item, share in item_shares), sum(share * item.backward_s for item, share in item_shares)


def _weights_s(half: HalfProfile, names: Iterable[str] | None = None) -> float:
    return sum(half.items[name].wgrad_s for name in (half.items if names is None else names))


class Task(NamedTuple):
    stream: int
    micro_batch: int
    seconds: float
    exchange: bool = False


COMPUTING, EXCHANGING = 0, 1
FORWARD, BACKWARD, WEIGHTS = 0, 1, 2
"""Tags of tasks. `WEIGHTS` tasks wait only for their stream."""


@lru_cache(maxsize=4096)
def paired_s(
    forward: tuple[Nodes, ...], backward: tuple[Nodes, ...], beside: Beside = UNDISTURBED, *, delayed: bool = False
) -> float:
    """Return the seconds of one micro-batch's forward overlapped with another's backward, which starts with its last layer. If
    one of them is empty, exchanges are exposed. `delayed`: weight gradients are nodes of their own."""
    pairs = zip_longest(forward, reversed(backward))
    return _walked_s([task for pair in pairs for task in _issued(*pair, delayed) if task.seconds > 0], beside)


def _issued(f: Nodes | None, b: Nodes | None, delayed: bool) -> Iterator[Task]:
    if b is not None:
        yield Task(EXCHANGING, BACKWARD, b.back_b)
        yield Task(EXCHANGING, BACKWARD, b.exchange, exchange=True)
    if f is not None:
        yield Task(COMPUTING, FORWARD, f.before_f)
    if b is not None:
        yield Task(COMPUTING, BACKWARD, b.experts_b - b.experts_weights if delayed else b.experts_b)
    if f is not None:
        yield Task(EXCHANGING, FORWARD, f.exchange, exchange=True)
    if b is not None:
        yield Task(COMPUTING, WEIGHTS, b.experts_weights if delayed else 0.0)
        yield Task(EXCHANGING, BACKWARD, b.exchange, exchange=True)
    if f is not None:
        yield Task(COMPUTING, FORWARD, f.experts_f)
        yield Task(EXCHANGING, FORWARD, f.exchange, exchange=True)
        yield Task(EXCHANGING, FORWARD, f.back_f)
    if b is not None:
        yield Task(COMPUTING, BACKWARD, b.before_b - b.before_weights if delayed else b.before_b)
        yield Task(COMPUTING, WEIGHTS, b.before_weights if delayed else 0.0)


def _walked_s(tasks: Sequence[Task], beside: Beside) -> float:
    queues = [[at for at, task in enumerate(tasks) if task.stream == stream] for stream in (COMPUTING, EXCHANGING)]
    before, last = [], dict[int, int]()
    for at, task in enumerate(tasks):  # a node waits for its predecessor in its micro-batch and in its stream
        before.append(last.get(task.micro_batch, -1) if task.micro_batch != WEIGHTS else -1)
        last[task.micro_batch] = at
    heads, left, over, now_s = [0, 0], [task.seconds for task in tasks], [False] * len(tasks), 0.0
    while True:
        first = [queue[head] for queue, head in zip(queues, heads, strict=True) if head < len(queue)]
        if not first:
            return now_s
        running = [at for at in first if before[at] < 0 or over[before[at]]]
        rates = _rates([tasks[at].exchange for at in running], beside)
        step_s = min(left[at] / rate for at, rate in zip(running, rates, strict=True))
        now_s += step_s
        for at, rate in zip(running, rates, strict=True):
            left[at] -= rate * step_s
            if left[at] <= 1e-12:
                over[at] = True
                heads[tasks[at].stream] += 1


def _rates(exchanges: Sequence[bool], beside: Beside) -> tuple[float, ...]:
    if len(exchanges) == 1:
        return (1.0,)
    if not any(exchanges):  # row copies on the exchange stream share the device with compute
        return (0.5, 0.5)
    return tuple(beside.exchange if exchange else beside.computing for exchange in exchanges)
