"""The chunks of one stage, solved so that together they keep the budget.

   last stage of 2, v = 2      0F0 1F0 | 0F1 0B1   1F1 1B1   2F0 0B0   3F0 1B0 ...
                                                             └ 2, 1 and 0 of chunk 0 are there, and none of chunk 1

[1] chunks with as many layers, and experts in the same ones, are treated alike: they are offered the windows that all of them
    have, and are counted as if every chunk in flight were one of them
[2] of chunks with fewer layers more may be kept, so much that one with more layers no longer fits: what is too much is taken from
    the budget of those that hold most, until all keep theirs
[3] chunks without layers, which have the embedding or the loss alone, decide nothing; the others leave the loss its room
[4] the backward of the model's last chunk follows its own forward: beside the others there is one of it at most, so it may use
    what they leave. A byte kept of that chunk costs one byte, and one of the others as many as there are in flight: so the others
    leave it more than they have to where both together then expose less

Behind that, replays of several halves can share the wait for the gradient in cool-down, which is about a forward long:

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
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

from megatron_lynx.anatomy.address import RECV_BACKWARD
from megatron_lynx.cost.memory import HalfMemory, peak_bytes
from megatron_lynx.cost.replay import Checkpoint
from megatron_lynx.errors import Infeasible
from megatron_lynx.schedule.interleaved import goes_back_at_once
from megatron_lynx.solver.answer import LayerChoice, Solved, SolvedChunks, Solver, infeasible, layers_of
from megatron_lynx.solver.baselines import keep_all
from megatron_lynx.solver.options import LAYER, StageProblems
from megatron_lynx.solver.placement import Placement
from megatron_lynx.solver.problem import Option, Receive, StageProblem, received_memory
from megatron_lynx.solver.sweep import least_memory
from megatron_lynx.units import SECOND_DIGITS

RESERVES = 16
"""How many parts of what the model's last chunk needs to keep everything are tried as room that the others leave it, beside the
least with which it can do. [4]"""


MAY_BEGIN = (tuple(LAYER.values()), (None, Checkpoint()))
"""What layers are that may begin ahead and do not: whole checkpoints, or such an MLP half."""


class _SharedOut(NamedTuple):
    """The answers of all chunks, where those before the last one left it so many bytes, or more."""

    chunks: SolvedChunks
    reserved_bytes: int

    @property
    def longer_s(self) -> float:
        return round(sum(chunk.longer_s for chunk in self.chunks), SECOND_DIGITS)


@dataclass(frozen=True)
class Chunks:
    """The chunks of every stage of a job."""

    problems: StageProblems
    in_backward: bool = False
    """Whether nothing is replayed before its own backward begins."""

    def solved(
        self, stage: int, in_flight: float, budget_bytes: int | None, solver: Solver, quick: Solver | None = None
    ) -> SolvedChunks:
        """All chunks of a stage, `in_flight` of them at once. `quick`: finds what the last one is left, if `solver` is slow."""
        deciding = partial(_decided, solver)
        if not self._goes_back_at_once(stage):
            return self._beside_each_other(stage, in_flight, budget_bytes, deciding)
        found = self._shared_out(stage, in_flight, budget_bytes, partial(_decided, quick or solver))
        if quick is None:
            return found.chunks
        try:
            return self._with_last(stage, in_flight, budget_bytes, deciding, found.reserved_bytes).chunks
        except Infeasible:  # the others' answer is faster, and leaves the last one too little
            return found.chunks

    def sharing(self, stage: int, budget_bytes: int | None, chunks: SolvedChunks) -> SolvedChunks:
        """The same answers, with replays of cool-down moved into the receive of the gradient."""
        if len({self._kind(stage, chunk) for chunk in range(len(chunks))}) > 1 or not chunks[0].layers:
            return chunks
        problems = [replace(self._problem(stage, (chunk,)), budget_bytes=budget_bytes) for chunk in range(len(chunks))]
        return SolvedChunks(map(with_shared_receive, problems, chunks))

    def begun_anyway(self, stage: int, chunk: int, solved: Solved) -> Iterator[Solved]:
        """The answer for a chunk, of which the lowest checkpointed layer, the lowest two, and so on begin ahead what they
        communicate, whatever memory that takes. Those do that are like the layer above them."""
        layers = [*solved.layers]
        kinds = list(map(self.problems.job.model.sections, self.problems.job.layers_of(stage, chunk)))
        for number, (kind, above) in enumerate(pairwise(kinds)):
            attention, mlp = halves = layers[number].halves
            late = attention.checkpoint, mlp.checkpoint
            if kind != above or (late[0], late[1] and late[1]._replace(goes_on=False)) not in MAY_BEGIN:
                continue
            begun = self.problems.begun_anyway(kind, late)
            if any(begun):
                layers[number] = LayerChoice(*(one or late for one, late in zip(begun, halves, strict=True)))
                yield replace(solved, layers=tuple(layers), gap=None)

    def _shared_out(self, stage: int, in_flight: float, budget_bytes: int | None, solver: Solver) -> _SharedOut:
        """What takes least of several ways to share the budget out between the model's last chunk and the others. [4]"""
        last = self._problem(stage, (self.problems.job.chunks - 1,))
        if budget_bytes is None:
            return self._with_last(stage, in_flight, budget_bytes, solver)
        enough_bytes = most_bytes = last.loss_bytes
        if last.layers:
            least, most_bytes = self._leanest(stage, last), keep_all(last).peak_bytes
            enough_bytes = least.peak_bytes - least.resident_bytes  # one of the others is counted that is not beside it
        reserves = {enough_bytes, *(part * most_bytes // RESERVES for part in range(RESERVES + 1))}
        found, error = list[_SharedOut](), None
        for reserved_bytes in sorted(reserves):
            try:
                found.append(self._with_last(stage, in_flight, budget_bytes, solver, reserved_bytes))
            except Infeasible as too_little:
                error = error or too_little
                if found and reserved_bytes:  # the others have not so much to leave
                    break
            if found and found[0].chunks[-1].longer_s <= 0:
                break
        if error is not None and not found:
            raise error
        return min(found, key=lambda each: each.longer_s)

    def _with_last(
        self, stage: int, in_flight: float, budget_bytes: int | None, solver: Solver, reserved_bytes: int = 0
    ) -> _SharedOut:
        """The answers of chunks beside each other that leave so many bytes, and that of the last chunk in all that they leave."""
        beside = self._beside_each_other(stage, in_flight, budget_bytes, solver, reserved_bytes)
        room_bytes = (beside.peak_bytes if budget_bytes is None else budget_bytes) - beside.beside_bytes
        problem = replace(self._problem(stage, (len(beside),)), in_flight=1, budget_bytes=room_bytes)
        last = _solved_or_least(problem, solver, least=budget_bytes is None)
        return _SharedOut(SolvedChunks((*beside, last)), reserved_bytes)

    def _beside_each_other(
        self, stage: int, in_flight: float, budget_bytes: int | None, solver: Solver, reserved_bytes: int = 0
    ) -> SolvedChunks:
        """The answers of all chunks but that one. [1] [2] To a solver what is reserved is one more thing that the loss holds."""
        alike = self._alike(stage)
        problems = [replace(self._problem(stage, some), in_flight=in_flight, budget_bytes=budget_bytes) for some in alike]
        while True:
            solved = SolvedChunks(_reserving(solver, problem, reserved_bytes) for problem in problems)
            too_much = 0 if budget_bytes is None else solved.peak_bytes - budget_bytes
            if too_much <= 0:
                break
            most = solved.most_resident_bytes
            problems = [
                replace(problem, budget_bytes=(problem.budget_bytes or 0) - too_much * (each.resident_bytes == most))
                for problem, each in zip(problems, solved, strict=True)
            ]
        common = {chunk: each for some, each in zip(alike, solved, strict=True) for chunk in some}
        return SolvedChunks(self.problems.in_chunk(common[chunk], stage, chunk) for chunk in sorted(common))

    def _alike(self, stage: int) -> list[tuple[int, ...]]:
        """The chunks beside each other, those that are treated alike together."""
        if stage not in self._known_alike:
            chunks = range(self.problems.job.chunks - self._goes_back_at_once(stage))
            kinds = {chunk: self._kind(stage, chunk) for chunk in chunks}
            self._known_alike[stage] = [
                tuple(chunk for chunk in chunks if kinds[chunk] == kind) for kind in sorted(set(kinds.values()))
            ]
        return self._known_alike[stage]

    @cached_property
    def _known_alike(self) -> dict[int, list[tuple[int, ...]]]:
        return {}

    def _leanest(self, stage: int, last: StageProblem) -> Solved:
        """The answer of the model's last chunk that holds least, alone. It is the same for all budgets."""
        if stage not in self._known_leanest:
            self._known_leanest[stage] = least_memory(replace(last, in_flight=1))
        return self._known_leanest[stage]

    @cached_property
    def _known_leanest(self) -> dict[int, Solved]:
        return {}

    def _kind(self, stage: int, chunk: int) -> tuple[int, tuple[bool, ...], tuple[str, ...]]:
        """What alike chunks have in common: how many layers, which of them have experts, and what else fills their halves."""
        kinds = list(map(self.problems.job.model.sections, self.problems.job.layers_of(stage, chunk)))
        return len(kinds), tuple(second.exchanges for _, second in kinds), tuple(each.name for kind in kinds for each in kind)

    def _goes_back_at_once(self, stage: int) -> bool:
        """Whether the backward of the last of several chunks follows its own forward. [4]"""
        job, last = self.problems.job, self.problems.job.chunks - 1
        layout = job.parallel.pipeline, stage, job.microbatches, last, job.chunks, job.microbatch_group
        return last > 0 and goes_back_at_once(*layout)

    def _problem(self, stage: int, chunks: tuple[int, ...]) -> StageProblem:
        """The problem of chunks that are treated alike. It is the same for all offloaded shares."""
        if (stage, chunks) not in self._known:
            problem = self.problems.of(stage, self.problems.job.chunk_layers(stage)[chunks[0]], chunks)
            self._known[stage, chunks] = problem.in_backward if self.in_backward else problem
        return self._known[stage, chunks]

    @cached_property
    def _known(self) -> dict[tuple[int, tuple[int, ...]], StageProblem]:
        return {}


def _reserving(solver: Solver, problem: StageProblem, reserved_bytes: int) -> Solved:
    """The answer that leaves so many bytes of the budget before its backward begins."""
    if not reserved_bytes:
        return solver(problem)
    solved = solver(replace(problem, loss_bytes=problem.loss_bytes + reserved_bytes))
    return replace(solved, loss_bytes=problem.loss_bytes, gap=None)


def _decided(solver: Solver, problem: StageProblem) -> Solved:
    """The answer of a solver; that of chunks without layers is nothing. [3]"""
    if problem.layers:
        return solver(problem)
    nothing = Solved((), problem.in_flight, gap=0.0, loss_bytes=problem.loss_bytes)
    if problem.budget_bytes is not None and nothing.peak_bytes > problem.budget_bytes:
        raise infeasible(problem, nothing)
    return nothing


def _solved_or_least(problem: StageProblem, solver: Solver, *, least: bool) -> Solved:
    """`least`: whether the answer with the least memory is taken where nothing fits."""
    try:
        return solver(problem)
    except Infeasible:
        if not least:
            raise
    return solver(replace(problem, budget_bytes=None))


def with_shared_receive(problem: StageProblem, answer: Solved) -> Solved:
    """The same answer with more replays hidden in cool-down; itself without a budget."""
    receive, budget_bytes = problem.receive, problem.budget_bytes
    if receive is None or receive.share == 0 or budget_bytes is None:
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
    """A replay whose input has to be gathered cannot run before that, nor does one that communicates run in a wait."""
    alone = option.checkpoint is None and option.seat.gather is None and not option.seat.stays
    return bool(option.replay) and alone and not option.seat.cooldown.in_receive


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
