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

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    backward = answer.halves[::-1]
    moved = {number: _moved(option, receive) for number, option in enumerate(backward) if _may_move(option)}
    gain = {
        number: (backward[number].exposed_s - each.exposed_s) / each.replay_s for number, each in moved.items() if each.replay_s
    }
    in_need = [number for number in gain if gain[number] > 0]
    by_gain = sorted(in_need, key=lambda number: gain[number], reverse=True)
    found = [_in_turn(in_need, moved, backward, receive, budget_bytes)]
    if by_gain != in_need and any(found[0][number] is backward[number] for number in in_need):
        found.append(_in_turn(by_gain, moved, backward, receive, budget_bytes))
    best = min(found, key=lambda halves: sum(option.longer_s for option in halves))
    layers = layers_of(best[::-1])
    if layers == answer.layers:
        return answer
    return replace(answer, layers=layers, gap=None, cooldown_peak_bytes=_peak_bytes(best, receive))


def _in_turn(
    order: Iterable[int], moved: Mapping[int, Option], backward: Sequence[Option], receive: Receive, budget_bytes: int
) -> list[Option]:
    """The halves of a backward, of which those that come first in this order have moved, as many as fit."""
    halves = [*backward]
    left_s = receive.seconds / receive.interference - sum(
        option.replay_s for option in backward if option.seat.cooldown.in_receive
    )
    for number in order:
        if backward[number].replay_s > left_s:
            continue
        halves[number] = moved[number]
        if _peak_bytes(halves, receive) <= budget_bytes:
            left_s -= backward[number].replay_s
        else:
            halves[number] = backward[number]
    return halves


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
