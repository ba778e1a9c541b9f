"""How long a forward and a backward take side by side, in Megatron's combined schedule (`--overlap-moe-expert-parallel-comm`).

A layer is four nodes in a forward, the same in a backward. Those of an exchange run on a stream of their own. Layers of one
micro-batch's forward are paired with those of another one's backward, and issued in this order (`TransformerLayerSchedulePlan`):

    exchanges   combine B │ dispatch F   dispatch B │ combine F             F: attention, norm, router, shared experts = before
    computing   before F  │ experts B   [weights]   experts F │ before B [weights]

 [1] a node waits for the node before it in its own micro-batch, and for what was issued before it on its own stream
 [2] with `--delay-wgrad-compute` the weights' gradients are nodes of their own; else a part of their backward
 [3] where both streams have work, an exchange and what computes proceed at the rates of `Beside`
 [4] rows are put back in place, and the residual added, behind the exchange that brings them, on its stream: two computing nodes
     share the device

Without experts a layer has two nodes. What a chunk has more layers than the other one runs alone. Read in `combined_1f1b.py`,
`model_chunk_schedule_plan.py` and `fine_grained_callables.py` of megatron-core 0.16.1 to 0.19.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, zip_longest
from typing import NamedTuple

from megatron_lynx.anatomy import PASSES, LayerKind, Section
from megatron_lynx.cost.communication import window_lengths_s
from megatron_lynx.kinds.experts.section import COMBINE, DISPATCH
from megatron_lynx.profiler.profile import HalfProfile, Profile


class Beside(NamedTuple):
    """The share of its rate that each keeps while both are under way."""

    exchange: float = 1.0
    computing: float = 1.0


UNDISTURBED = Beside()
"""Neither slows the other down."""
MEASURED = Beside(exchange=0.7, computing=100 / 132)
"""As measured on H100 (`published.overlapped`): an exchange's kernels take 32 of 132 multiprocessors, as one launch says.
What an exchange keeps was chosen by its rows."""


def shared_rates(profile: Profile, kernels_leave: float = 1.0) -> Beside:
    """The rates at which stock and plans are priced. `kernels_leave`: the share of a device's multiprocessors that a fused
    dispatcher's kernels leave to compute (`FusedDispatch.computing_kept`)."""
    return MEASURED._replace(computing=min(MEASURED.computing, 1 / profile.interference, kernels_leave))


class Nodes(NamedTuple):
    """One layer, one micro-batch: seconds of each node. `back`: what computes behind the exchange `combine` on its stream, before
    it in a backward. `weights`: gradients of weights, a part of what is named before them."""

    before_f: float
    before_b: float
    before_weights: float
    experts_f: float
    experts_b: float
    experts_weights: float
    exchange: float = 0.0
    back_f: float = 0.0
    back_b: float = 0.0


@dataclass(frozen=True)
class HalfSeconds:
    """One micro-batch in one half."""

    forward_s: float
    backward_s: float
    again_s: float = 0.0

    @property
    def recomputed_whole(self) -> HalfSeconds:
        """The same where all of it runs again."""
        return replace(self, again_s=self.forward_s)


LayerSeconds = tuple[HalfSeconds, ...]
"""By half, in the order of a forward."""


def keeping_all(profile: Profile, kind: LayerKind) -> LayerSeconds:
    """A layer of this kind in which nothing is recomputed."""
    return tuple(half_seconds(profile, section) for section in kind)


def half_seconds(profile: Profile, section: Section) -> HalfSeconds:
    """A half in which nothing is recomputed, with its exposed tensor-parallel collectives. A profile's figures of experts
    include theirs."""
    half = profile.of(section)
    if section.opaque or section.in_some_layers:
        return HalfSeconds(half.forward_s, half.backward_s)
    forward_s, backward_s = (sum(window_lengths_s(profile, way, section, profile.message_bytes)) for way in PASSES)
    return HalfSeconds(half.forward_s + forward_s, half.backward_s + backward_s)


def nodes_of(profile: Profile, layer: LayerSeconds, kind: LayerKind) -> Nodes:
    """`layer`: its halves under a setting, or a plan, which is of this kind. What runs again is a part of its half's
    node of a backward."""
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
    """The share of the copying of rows that is done on the ranks they come from: all, or where a rank has several experts one of
    two copies. A flex dispatcher's kernels take rows from where they are."""
    experts = profile.shape.experts
    if experts is None or experts.dispatcher != "alltoall":
        return 0.0
    return 0.5 if experts.count > profile.shape.expert else 1.0


def _both_s(half: HalfProfile, shares: dict[str, float]) -> tuple[float, float]:
    """Seconds of these shares of items, forward and backward."""
    own = [(half.items[name], share) for name, share in shares.items()]
    return sum(share * item.forward_s for item, share in own), sum(share * item.backward_s for item, share in own)


def _weights_s(half: HalfProfile, names: Iterable[str] | None = None) -> float:
    return sum(half.items[name].wgrad_s for name in (half.items if names is None else names))


class Task(NamedTuple):
    """What is issued: on which stream, for which micro-batch, and whether it is an exchange."""

    stream: int
    micro_batch: int
    seconds: float
    exchange: bool = False


COMPUTING, EXCHANGING = 0, 1
FORWARD, BACKWARD, WEIGHTS = 0, 1, 2
"""Weights' gradients wait for what was issued before them on their stream alone."""


def paired_s(
    forward: Sequence[Nodes], backward: Sequence[Nodes], beside: Beside = UNDISTURBED, *, delayed: bool = False
) -> float:
    """Seconds of one micro-batch's forward through some layers beside another one's backward through others, the last one first.
    One of the two may be empty: then nothing hides its exchanges. `delayed`: weights' gradients are nodes of their own."""
    return _pairs_s(tuple(zip_longest(forward, reversed(backward))), beside, delayed)


Pair = tuple[Nodes | None, Nodes | None]
WALKED_PAIRS = 6
"""Of pairs of layers that are alike so many are walked through: by then each takes as long as the one before."""


@lru_cache(maxsize=4096)
def _pairs_s(pairs: tuple[Pair, ...], beside: Beside, delayed: bool) -> float:
    runs = [tuple(run) for _, run in groupby(pairs)]
    longest = max(range(len(runs)), key=lambda at: len(runs[at]), default=None)
    if longest is None or len(runs[longest]) <= WALKED_PAIRS:
        tasks = [task for pair in pairs for task in _issued(*pair, delayed)]
        return _walked_s([task for task in tasks if task.seconds > 0], beside)
    fewer = len(runs[longest]) - WALKED_PAIRS
    few_s, less_s = (_pairs_s(_without(runs, longest, fewer + one), beside, delayed) for one in (0, 1))
    return few_s + fewer * (few_s - less_s)


def _without(runs: Sequence[tuple[Pair, ...]], at: int, count: int) -> tuple[Pair, ...]:
    """All pairs but so many of one run."""
    return tuple(pair for number, run in enumerate(runs) for pair in (run[count:] if number == at else run))


def _issued(f: Nodes | None, b: Nodes | None, delayed: bool) -> Iterator[Task]:
    """The nodes of one pair of layers, in order."""
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
    """Seconds until all are over."""
    queues = [[at for at, task in enumerate(tasks) if task.stream == stream] for stream in (COMPUTING, EXCHANGING)]
    before, last = [], dict[int, int]()
    for at, task in enumerate(tasks):  # [1]
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
    """At which part of their rate tasks proceed that run at once."""
    if len(exchanges) == 1:
        return (1.0,)
    if not any(exchanges):  # [4]
        return (0.5, 0.5)
    return tuple(beside.exchange if exchange else beside.computing for exchange in exchanges)  # [3]
