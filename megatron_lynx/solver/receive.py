"""Lets replays of several halves share the wait for the gradient in cool-down, which is about a forward long.

    last stage      F B F B F B                     the stages behind still run a forward between two backwards,
    stage before        B   B   B                   so this one waits, and may hold what a micro-batch less leaves free
                      ...RRR RRR                    R: replays of the next backward, as many as fit, in the order of need

The solvers give every window one half to hide. Here halves whose replay is still exposed in cool-down are moved into the
receive, as long as it is long enough and the budget has room for what is then regenerated before backward: in the order in which
backward needs them, or those first that gain most for each second of the receive, whichever exposes less. The steady phase stays
as it was, so no answer becomes slower or holds more there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from megatron_lynx.anatomy.address import RECV_BACKWARD
from megatron_lynx.cost.memory import HalfMemory, peak_bytes
from megatron_lynx.solver.answer import Solved, layers_of
from megatron_lynx.solver.placement import Placement
from megatron_lynx.solver.problem import Option, Receive, StageProblem, received_memory


def with_shared_receive(problem: StageProblem, answer: Solved) -> Solved:
    """The same answer with more replays hidden in cool-down; itself without a budget, or with whole micro-batches."""
    receive, budget_bytes = problem.receive, problem.budget_bytes
    if receive is None or receive.share == 0 or budget_bytes is None or answer.whole is not None:
        return answer
    backward = [*answer.halves[::-1]]
    in_need = range(len(backward))
    by_gain = sorted(in_need, key=lambda number: _gain(backward[number], receive), reverse=True)
    found = (_moved_in_turn(order, backward, receive, budget_bytes) for order in (in_need, by_gain))
    backward = min(found, key=lambda halves: sum(option.longer_s for option in halves))
    layers = layers_of(backward[::-1])
    if layers == answer.layers:
        return answer
    return replace(answer, layers=layers, gap=None, cooldown_peak_bytes=_peak_bytes(backward, receive))


def _moved_in_turn(order: Iterable[int], backward: list[Option], receive: Receive, budget_bytes: int) -> list[Option]:
    """The halves of a backward, of which those that come first in this order have moved, as many as fit."""
    left_s = receive.seconds / receive.interference - sum(
        option.replay_s for option in backward if option.seat.cooldown.in_receive
    )
    for number in order:
        option = backward[number]
        if not _may_move(option) or option.replay_s > left_s:
            continue
        moved = [*backward[:number], _moved(option, receive), *backward[number + 1 :]]
        if moved[number].exposed_s < option.exposed_s and _peak_bytes(moved, receive) <= budget_bytes:
            backward, left_s = moved, left_s - option.replay_s
    return backward


def _gain(option: Option, receive: Receive) -> float:
    """What a replay no longer exposes in the receive, for each second that it takes."""
    if not _may_move(option) or not option.replay_s:
        return 0.0
    return (option.exposed_s - _moved(option, receive).exposed_s) / option.replay_s


def _may_move(option: Option) -> bool:
    """A replay whose input has to be gathered cannot run before that."""
    return bool(option.replay) and option.seat.gather is None and not option.seat.cooldown.in_receive


def _moved(option: Option, receive: Receive) -> Option:
    """The same replay in the receive, where nothing of it is exposed in cool-down."""
    needed_s = option.replay_s * receive.interference
    cooldown = Placement.in_window(RECV_BACKWARD, needed_s)
    seat = replace(option.seat, cooldown=cooldown, steady_share=1 - receive.share)
    exposed_s = seat.exposed_s(option.replay_s, receive.interference)
    return replace(option, seat=seat, exposed_s=exposed_s, cooldown_memory=received_memory(option))


def _peak_bytes(backward: Sequence[Option], receive: Receive) -> int:
    return peak_bytes(list(_in_cooldown(backward)), receive.in_flight)


def _in_cooldown(backward: Sequence[Option]) -> Iterator[HalfMemory]:
    """What the halves hold where their cool-down seat is another than their steady one."""
    for option in backward:
        yield option.cooldown_memory or option.memory
