"""Solves the chunks of one stage so that together they keep the budget.

   last stage of 2, v = 2      0F0 1F0 | 0F1 0B1   1F1 1B1   2F0 0B0   3F0 1B0 ...
                                                             └ 2, 1 and 0 of chunk 0 are held, and none of chunk 1

[1] Chunks with equal numbers of layers and experts in the same layers are treated alike, and counted as if every chunk in flight
    were one of them.
[2] Chunks with fewer layers may keep so much more that one with more layers no longer fits. The excess is then taken from the
    budget of those that hold most, until all fit.
[3] Chunks without layers, which have only the embedding or the loss, have no choices. The others leave memory to the loss.
[4] The backward of the model's last chunk follows its own forward, so at most one of it is held beside the others, and it may
    use the rest. A byte of that chunk costs one byte; a byte of the others costs as many as are in flight. The others leave it
    more than they must if both together then expose less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from megatron_lynx.cost.recompute import Checkpoint
from megatron_lynx.errors import Infeasible
from megatron_lynx.once import once
from megatron_lynx.schedule.flushes import goes_back_at_once
from megatron_lynx.solver.answer import LayerChoice, Solved, SolvedChunks, Solver, infeasible
from megatron_lynx.solver.baselines import keep_all
from megatron_lynx.solver.options import LAYER, StageProblems
from megatron_lynx.solver.problem import StageProblem
from megatron_lynx.solver.programme import least_memory
from megatron_lynx.units import SECOND_DIGITS

RESERVES = 16
"""Into how many parts the bytes are divided with which the model's last chunk keeps everything; each multiple is tried as memory
that the others leave it, and so is the least that it needs. [4]"""


MAY_BEGIN = (tuple(LAYER.values()), (None, Checkpoint()))
"""Checkpoints of a layer that may begin ahead and do not: whole checkpoints, or an MLP half's."""


@dataclass(frozen=True)
class Chunks:
    """Chunks of every stage of a job."""

    problems: StageProblems

    def solved(self, stage: int, in_flight: float, budget_bytes: int | None, solver: Solver) -> SolvedChunks:
        """All chunks of a stage, `in_flight` of them at once."""
        deciding = partial(_decided, solver)
        if self._goes_back_at_once(stage):
            return self._shared_out(stage, in_flight, budget_bytes, deciding)
        return self._beside_each_other(stage, in_flight, budget_bytes, deciding)

    def begun_anyway(self, stage: int, chunk: int, solved: Solved) -> Iterator[Solved]:
        """Yield answers for a chunk in which the lowest checkpointed layer, the lowest two, and so on begin communication ahead,
        whatever memory that takes. Only layers like the one above them do."""
        layers = [*solved.layers]
        kinds = list(map(self.problems.job.model.sections, self.problems.job.layers_of(stage, chunk)))
        for number, (kind, above) in enumerate(pairwise(kinds)):
            attention, mlp = halves = layers[number].halves
            checkpoints = attention.checkpoint, mlp.checkpoint
            if kind != above or (checkpoints[0], checkpoints[1] and checkpoints[1]._replace(rest_in_wait=False)) not in MAY_BEGIN:
                continue
            begun = self.problems.begun_anyway(kind, checkpoints)
            if any(begun):
                layers[number] = LayerChoice(*(option or half for option, half in zip(begun, halves, strict=True)))
                yield replace(solved, layers=tuple(layers))

    def _shared_out(self, stage: int, in_flight: float, budget_bytes: int | None, solver: Solver) -> SolvedChunks:
        """Return the fastest of several ways to divide the budget between the model's last chunk and the others. [4]"""
        last = self.problems.of(stage, (self.problems.job.chunks - 1,))
        if budget_bytes is None:
            return self._with_last(stage, in_flight, budget_bytes, solver)
        enough_bytes = most_bytes = last.loss_bytes
        if last.layers:
            least, most_bytes = self._leanest(stage), keep_all(last).peak_bytes
            enough_bytes = least.peak_bytes - least.resident_bytes  # one of the others is counted that is not held then
        reserves = {enough_bytes, *(part * most_bytes // RESERVES for part in range(RESERVES + 1))}
        divisions, error = list[SolvedChunks](), None
        for reserved_bytes in sorted(reserves):
            try:
                divisions.append(self._with_last(stage, in_flight, budget_bytes, solver, reserved_bytes))
            except Infeasible as too_little:
                error = error or too_little
                if divisions and reserved_bytes:  # the others cannot leave that much
                    break
            if divisions and divisions[0][-1].longer_s <= 0:
                break
        if error is not None and not divisions:
            raise error
        return min(divisions, key=lambda chunks: round(sum(chunk.longer_s for chunk in chunks), SECOND_DIGITS))

    def _with_last(
        self, stage: int, in_flight: float, budget_bytes: int | None, solver: Solver, reserved_bytes: int = 0
    ) -> SolvedChunks:
        """Return the answers of chunks beside each other that leave this many bytes, and of the last chunk in the rest."""
        beside = self._beside_each_other(stage, in_flight, budget_bytes, solver, reserved_bytes)
        room_bytes = (beside.peak_bytes if budget_bytes is None else budget_bytes) - beside.beside_bytes
        problem = replace(self.problems.of(stage, (len(beside),)), in_flight=1, budget_bytes=room_bytes)
        return SolvedChunks((*beside, _solved_or_least(problem, solver, least=budget_bytes is None)))

    def _beside_each_other(
        self, stage: int, in_flight: float, budget_bytes: int | None, solver: Solver, reserved_bytes: int = 0
    ) -> SolvedChunks:
        """Return the answers of all chunks but the last. [1] [2] The solver counts reserved bytes as bytes of the loss."""
        alike = self._alike(stage)
        problems = [replace(self.problems.of(stage, some), in_flight=in_flight, budget_bytes=budget_bytes) for some in alike]
        while True:
            solved = SolvedChunks(_reserving(solver, problem, reserved_bytes) for problem in problems)
            too_much = 0 if budget_bytes is None else solved.peak_bytes - budget_bytes
            if too_much <= 0:
                break
            most_bytes = solved.most_resident_bytes
            problems = [
                replace(problem, budget_bytes=(problem.budget_bytes or 0) - too_much * (answer.resident_bytes == most_bytes))
                for problem, answer in zip(problems, solved, strict=True)
            ]
        by_chunk = {chunk: answer for some, answer in zip(alike, solved, strict=True) for chunk in some}
        return SolvedChunks(by_chunk[chunk] for chunk in sorted(by_chunk))

    @once
    def _alike(self, stage: int) -> list[tuple[int, ...]]:
        """Return the chunks beside each other, grouped by those treated alike."""
        chunks = range(self.problems.job.chunks - self._goes_back_at_once(stage))
        kinds = {chunk: self._kind(stage, chunk) for chunk in chunks}
        return [tuple(chunk for chunk in chunks if kinds[chunk] == kind) for kind in sorted(set(kinds.values()))]

    @once
    def _leanest(self, stage: int) -> Solved:
        """Return the answer with the least peak of the model's last chunk alone."""
        return least_memory(replace(self.problems.of(stage, (self.problems.job.chunks - 1,)), in_flight=1))

    def _kind(self, stage: int, chunk: int) -> tuple[int, tuple[bool, ...], tuple[str, ...]]:
        """Return what chunks treated alike have in common: number of layers, which have experts, and other sections."""
        kinds = list(map(self.problems.job.model.sections, self.problems.job.layers_of(stage, chunk)))
        return (
            len(kinds),
            tuple(second.exchanges for _, second in kinds),
            tuple(section.name for kind in kinds for section in kind),
        )

    def _goes_back_at_once(self, stage: int) -> bool:
        """Whether the backward of the last of several chunks follows its own forward. [4]"""
        job, last = self.problems.job, self.problems.job.chunks - 1
        layout = job.parallel.pipeline, stage, job.microbatches, last, job.chunks, job.microbatch_group
        return last > 0 and goes_back_at_once(*layout)


def _reserving(solver: Solver, problem: StageProblem, reserved_bytes: int) -> Solved:
    """Return the answer that leaves these bytes of the budget before its backward begins."""
    if not reserved_bytes:
        return solver(problem)
    solved = solver(replace(problem, loss_bytes=problem.loss_bytes + reserved_bytes))
    return replace(solved, loss_bytes=problem.loss_bytes)


def _decided(solver: Solver, problem: StageProblem) -> Solved:
    """Return the solver's answer, or an empty one for chunks without layers. [3]"""
    if problem.layers:
        return solver(problem)
    nothing = Solved((), problem.in_flight, loss_bytes=problem.loss_bytes)
    if problem.budget_bytes is not None and nothing.peak_bytes > problem.budget_bytes:
        raise infeasible(problem, nothing)
    return nothing


def _solved_or_least(problem: StageProblem, solver: Solver, *, least: bool) -> Solved:
    """Return the solver's answer; if `least` and none fits, the one with the least memory."""
    try:
        return solver(problem)
    except Infeasible:
        if not least:
            raise
    return solver(replace(problem, budget_bytes=None))
