"""The chunks of one stage, solved so that together they keep the budget.

   last stage of 2, v = 2      0F0 1F0 | 0F1 0B1   1F1 1B1   2F0 0B0   3F0 1B0 ...
                                                             └ 2, 1 and 0 of chunk 0 are there, and none of chunk 1

[1] chunks with as many layers, and experts in the same ones, are treated alike: they are offered the windows that all of them
    have, and are counted as if every chunk in flight were one of them
[2] of chunks with fewer layers more may be kept, so much that one with more layers no longer fits: what is too much is taken from
    the budget of those that hold most, until all keep theirs
[3] chunks without layers, which have the embedding or the loss alone, decide nothing
[4] the backward of the model's last chunk follows its own forward: beside the others there is one of it at most, so it may use
    what they leave. A byte kept of that chunk costs one byte, and one of the others as many as there are in flight: so the others
    leave it more than they have to where both together then expose less
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

from megatron_lynx.errors import Infeasible
from megatron_lynx.schedule.interleaved import goes_back_at_once
from megatron_lynx.solver.answer import Solved, Solver, infeasible
from megatron_lynx.solver.baselines import keep_all
from megatron_lynx.solver.options import StageProblems
from megatron_lynx.solver.problem import StageProblem
from megatron_lynx.solver.receive import with_shared_receive
from megatron_lynx.solver.stage_answer import SolvedChunks
from megatron_lynx.units import SECOND_DIGITS

RESERVES = 16
"""How many parts of what the model's last chunk needs to keep everything are tried as room that the others leave it. [4]"""


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

    def _shared_out(self, stage: int, in_flight: float, budget_bytes: int | None, solver: Solver) -> _SharedOut:
        """What takes least of several ways to share the budget out between the model's last chunk and the others. [4]"""
        last = self._problem(stage, (self.problems.job.chunks - 1,))
        if budget_bytes is None or not last.layers:
            return self._with_last(stage, in_flight, budget_bytes, solver)
        most_bytes, found, error = keep_all(last).peak_bytes, list[_SharedOut](), None
        for part in range(RESERVES + 1):
            try:
                found.append(self._with_last(stage, in_flight, budget_bytes, solver, part * most_bytes // RESERVES))
            except Infeasible as too_little:
                error = error or too_little
                if part:  # the others have not so much to leave
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
        chunks = range(self.problems.job.chunks - self._goes_back_at_once(stage))
        kinds = {chunk: self._kind(stage, chunk) for chunk in chunks}
        alike = [tuple(chunk for chunk in chunks if kinds[chunk] == kind) for kind in sorted(set(kinds.values()))]
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
        return SolvedChunks(self.problems.in_chunk(common[chunk], stage, chunk) for chunk in chunks)

    def _kind(self, stage: int, chunk: int) -> tuple[int, tuple[bool, ...]]:
        """What alike chunks have in common: how many layers, and which of them have experts."""
        job = self.problems.job
        layers = job.layers_of(stage, chunk)
        return len(layers), tuple(layer in job.model.expert_layers for layer in layers) if job.model.experts is not None else ()

    def _goes_back_at_once(self, stage: int) -> bool:
        """Whether the backward of the last of several chunks follows its own forward. [4]"""
        job, last = self.problems.job, self.problems.job.chunks - 1
        layout = job.parallel.pipeline, stage, job.microbatches, last, job.chunks, job.microbatch_group
        return last > 0 and goes_back_at_once(*layout)

    def _problem(self, stage: int, chunks: tuple[int, ...]) -> StageProblem:
        """The problem of chunks that are treated alike. It is the same for all offloaded shares."""
        if (stage, chunks) not in self._known:
            self._known[stage, chunks] = self.problems.of(stage, self.problems.job.chunk_layers(stage)[chunks[0]], chunks)
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
