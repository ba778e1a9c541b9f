"""Solves every stage of a job: tensors kept, recomputed and offloaded by its layers, and seconds of the stage.

    fraction r to the host   of N chunks in flight, N - (N - 4)r remain on the device (Yuan et al.). Small blocks and what
                             Megatron holds stay there: a larger r moves everything that can be moved
       0, 1/20 ... 1  ──solve within the stage's budget──> exposed recomputation of each micro-batch   ┐ the least
                      ──copies overlapped with passes────> exposed copies of the whole step            ┘ sum wins

Alternatively, a fraction is offloaded within its own micro-batch (`solver.offload`), whatever N is, and overlaps with the two
passes of that micro-batch only. The faster way is taken.

Ties go to the smaller fraction, so nothing is offloaded if the run fits and hides its recomputation without. A fraction is
excluded if all devices of a node together would offload more than its host memory holds. Copies and messages take turns
(`cost.step`). Devices that share a link to the host share its rate, which the profile's `host` link includes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import ceil, floor

from megatron_lynx.config.job import Job
from megatron_lynx.cost.budget import bounded_by_device, layers_budget_bytes, most_beside_layers
from megatron_lynx.cost.host_optimizer import host_shortage
from megatron_lynx.cost.stage import chunks_in_flight, stage_seconds
from megatron_lynx.cost.stage_memory import CHUNKS_NOT_OFFLOADED
from megatron_lynx.cost.step import exposed_copies_s
from megatron_lynx.errors import Infeasible, Problem
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.schedule.counts import sets_on_host
from megatron_lynx.solver import baselines
from megatron_lynx.solver.answer import NOTHING_FITS, Remembering, Share, Solved, SolvedChunks, StageAnswer, infeasible
from megatron_lynx.solver.chunks import Chunks
from megatron_lynx.solver.offload import Leaver, bytes_copied_in, host_of_stage, may_go_within
from megatron_lynx.solver.options import StageProblems
from megatron_lynx.solver.problem import StageProblem
from megatron_lynx.solver.programme import Programme
from megatron_lynx.timeline import Passes
from megatron_lynx.units import SECOND_DIGITS, format_bytes

NOTHING = Share(0.0)

STEPS = 20
"""Fractions are multiples of a twentieth."""

WAIT_S = 1e-9
"""Seconds of a half that hides recomputation, where waits are left to weight gradients: less than any recomputation takes."""


@dataclass(frozen=True)
class Worked:
    """Results for all stages of a job that do not depend on excluded fractions."""

    chunks: Chunks
    programme: Programme
    solver: Remembering
    """The programme, which remembers its answers."""
    answers: dict[object, StageAnswer | Infeasible] = field(default_factory=dict)
    """By stage, fraction, budget, and whether it is paced."""
    leavers: dict[int, Leaver] = field(default_factory=dict)
    kept_bytes: dict[int, int] = field(default_factory=dict)
    stock: dict[int, Passes] = field(default_factory=dict)
    """Seconds of each stage without recomputation."""


@dataclass(frozen=True)
class Stages:
    """Stages of a job. What several stages need is priced once."""

    job: Job
    profile: Profile
    excluded: frozenset[tuple[int, Share]] = field(default_factory=frozenset)
    """Stages and fractions that are not to be offloaded."""
    paced: frozenset[int] = frozenset()
    """Stages that offload no more of a chunk than is copied during its forward, because copies lag otherwise."""
    lagging_bytes: Mapping[tuple[int, Share], int] = field(default_factory=dict)
    """By such a pair, reduction of the budget because copies lag."""
    before: Worked | None = None
    """Results for the same stages with other exclusions."""

    def answer(self, stage: int) -> StageAnswer:
        """Return the fastest answer that fits (cached). Raises `Infeasible` if none fits."""
        if stage not in self._answers:
            self._answers[stage] = self._best(stage)
        return self._answers[stage]

    def least(self, stage: int) -> StageAnswer:
        """Return the answer with the least peak, regardless of the budget."""
        solver = partial(Chunks.solved, solver=self.worked.programme.least if self.job.policy == "planned" else self._solved)
        largest_shares = dict.fromkeys([NOTHING, *(shares[-1] for shares in self._shares(stage) if shares)])
        answers = [self._offloading(stage, share, None, solver) for share in largest_shares]
        return min(answers, key=lambda answer: answer.peak_bytes)

    def beginning_ahead(self, answer: StageAnswer) -> StageAnswer:
        """Return the answer in which as many of the lowest checkpointed layers as fit begin their communication ahead. Less is
        held when backward reaches them."""
        budget_bytes = self._budget_bytes(answer.stage)
        if budget_bytes is None:
            return answer
        for number, chunk in enumerate(answer.chunks):
            before, behind = answer.chunks[:number], answer.chunks[number + 1 :]
            ways = [
                replace(answer, chunks=SolvedChunks((*before, begun, *behind)))
                for begun in self._chunks.begun_anyway(answer.stage, number, chunk)
            ]
            fit = bisect_left(ways, True, key=lambda way: way.peak_bytes > budget_bytes)
            answer = ways[fit - 1] if fit else answer
        return answer

    @property
    def leaving_waits(self) -> Stages:
        """The same stages; of equally fast answers, those that leave the most waits to weight gradients."""
        programme = Programme(WAIT_S)
        return replace(self, before=replace(self.worked, programme=programme, solver=Remembering(programme), answers={}))

    def keeping_all(self, stage: int) -> StageAnswer:
        """Return the stage without recomputation and offload, regardless of the budget."""
        return self._offloading(stage, NOTHING, None, partial(Chunks.solved, solver=baselines.keep_all))

    def fits(self, answer: StageAnswer) -> bool:
        budget_bytes = self._budget_bytes(answer.stage)
        return budget_bytes is None or answer.peak_bytes <= budget_bytes

    def _best(self, stage: int) -> StageAnswer:
        budget_bytes = self._budget_bytes(stage)
        best: StageAnswer | None = None
        problems: Callable[[], list[Problem]] = partial(_lagging, stage)
        for shares in self._shares(stage):
            for share in shares:
                lagging_bytes = self.lagging_bytes.get((stage, share), 0)
                try:
                    candidate = self._known(stage, share, budget_bytes and budget_bytes - lagging_bytes)
                except Infeasible as error:
                    lags = lagging_bytes or stage in self.paced
                    problems = partial(_lagging, stage) if lags else partial(self._shortage, stage, error)
                    continue
                if too_small := self._host_shortage(candidate):
                    problems = partial(list, (too_small,))
                    continue
                if best is None or self._late_s(candidate) < self._late_s(best):
                    best = candidate
                if candidate.exposed_copies_s >= self._late_s(best):  # a larger fraction copies more
                    break
        if best is None:
            raise Infeasible(NOTHING_FITS, problems())
        return best

    def _budget_bytes(self, stage: int) -> int | None:
        return layers_budget_bytes(self.job, stage)

    def _shares(self, stage: int) -> Iterator[list[Share]]:
        """Yield the fractions to try: between passes, and within micro-batches."""
        asked = self.job.offload_ratio
        within = asked != 0 and may_go_within(self.job) and (asked == "auto" or self.job.parallel.pipeline == 1)
        between = asked != 0 and chunks_in_flight(self.job, stage) > CHUNKS_NOT_OFFLOADED
        ratios = [step / STEPS for step in range(STEPS + 1)] if asked == "auto" else [float(asked)]
        if between or not within:
            yield self._allowed(stage, map(Share, ratios if between else [0.0]))
        if within:
            if asked == "auto":  # exposed copies save no memory, because they are waited for at the end
                hidden = self._leaver(stage).hidden_bytes() / max(1, self._kept_bytes(stage))
                ratios = [floor(1000 * ratio * min(1.0, hidden)) / 1000 for ratio in ratios]
            yield self._allowed(stage, (Share(ratio, within=ratio > 0) for ratio in ratios if ratio or not between))

    def _allowed(self, stage: int, shares: Iterable[Share]) -> list[Share]:
        return [share for share in shares if (stage, share) not in self.excluded]

    def _known(self, stage: int, share: Share, budget_bytes: int | None) -> StageAnswer:
        """Return the answer for a fraction, which is solved once for all exclusions. Raises `Infeasible`."""
        key = stage, share, budget_bytes, stage in self.paced
        if key not in self.worked.answers:
            try:
                self.worked.answers[key] = self._offloading(stage, share, budget_bytes)
            except Infeasible as error:
                self.worked.answers[key] = error
        if isinstance(answer := self.worked.answers[key], Infeasible):
            raise answer
        return answer

    def _offloading(
        self, stage: int, share: Share, budget_bytes: int | None, solver: Callable[..., SolvedChunks] | None = None
    ) -> StageAnswer:
        if share.within:
            return self._within(stage, share, budget_bytes, solver)
        paced = partial(self._paced, share) if stage in self.paced and share.ratio else self._solved
        solver = solver or partial(Chunks.solved, solver=paced)
        solved = partial(solver, self._chunks, stage, budget_bytes=budget_bytes)
        answer = self._leaving(stage, share, share.ratio, solved)
        while answer.movable_share < answer.offloaded_share:
            answer = self._leaving(stage, share, answer.movable_share, solved)
        if not share.ratio:
            return answer
        layout = self.job.parallel.pipeline, stage, self.job.microbatches, self.job.chunks, self.job.microbatch_group
        return replace(answer, exposed_copies_s=self._exposed_copies_s(answer), host_sets=sets_on_host(*layout))

    def _solved(self, problem: StageProblem) -> Solved:
        """Return a policy's answer. Policies of stock Megatron recompute on demand."""
        if self.job.policy == "planned":
            return self.worked.solver(problem)
        answer = baselines.of_policy(problem, self.job.policy)
        if problem.budget_bytes is not None and answer.peak_bytes > problem.budget_bytes:
            raise infeasible(problem, answer)
        return answer

    def _paced(self, share: Share, problem: StageProblem) -> Solved:
        """Return an answer of which this fraction can be copied to the host during a forward of the layers."""
        most_bytes = bytes_copied_in(self.profile, problem.forward_s) / share.ratio
        solved = self._solved(problem)
        while solved.resident_bytes > most_bytes:
            spared_bytes = ceil((solved.resident_bytes - most_bytes) * problem.in_flight)
            problem = replace(problem, budget_bytes=solved.peak_bytes - spared_bytes)
            solved = self._solved(problem)
        return solved

    def _leaving(self, stage: int, asked: Share, share: float, solved: Callable[[float], SolvedChunks]) -> StageAnswer:
        """Return the answer that offloads `share` where `asked` was requested. `solved`: solves the chunks for a number in
        flight."""
        count = chunks_in_flight(self.job, stage)
        chunks = solved(count - (count - CHUNKS_NOT_OFFLOADED) * share if share else count)
        received_bytes = self._shape.input_bytes
        host = host_of_stage(self.job, self.profile, stage, chunks, offloads=share > 0)
        return StageAnswer(
            stage, chunks, count, asked, self._stock(stage), 0.0, received_bytes=received_bytes, offloaded_share=share, host=host
        )

    def _within(
        self, stage: int, share: Share, budget_bytes: int | None, solver: Callable[..., SolvedChunks] | None
    ) -> StageAnswer:
        """Return the answer of a stage that offloads, within micro-batches, a fraction of its bytes without recomputation.

        Layers that hold most are lowest, because they leave first. If that does not fit, the answer with the least peak.
        """
        if solver is not None:
            return self._leaving_within(stage, share, budget_bytes, solver)
        leaving = partial(Chunks.solved, solver=lambda problem: self._solved(replace(problem, leaving=True)))
        try:
            return self._leaving_within(stage, share, budget_bytes, leaving)
        except Infeasible:
            least = self._leaving_within(stage, share, None, partial(Chunks.solved, solver=self._solved))
            if budget_bytes is None or least.peak_bytes > budget_bytes:
                raise
            return least

    def _leaving_within(
        self, stage: int, share: Share, budget_bytes: int | None, solver: Callable[..., SolvedChunks]
    ) -> StageAnswer:
        leaver = self._leaver(stage)
        asked_bytes = int(share.ratio * self._kept_bytes(stage))
        count = leaver.in_flight
        solved = partial(solver, self._chunks, stage, count)
        chunks, within = leaver.leaving(asked_bytes, budget_bytes, lambda budget: solved(budget_bytes=budget))
        answer = StageAnswer(
            stage, chunks, count, share, self._stock(stage), 0.0, received_bytes=self._shape.input_bytes, within=within
        )
        exposed_s = self.job.microbatches * leaver.exposed_s(chunks, within)
        return replace(answer, exposed_copies_s=exposed_s, host=leaver.host_s(chunks, within), host_sets=leaver.host_sets)

    def _leaver(self, stage: int) -> Leaver:
        if stage not in self.worked.leavers:
            self.worked.leavers[stage] = Leaver(self.job, self.profile, stage)
        return self.worked.leavers[stage]

    def _kept_bytes(self, stage: int) -> int:
        """Return the bytes that the stage keeps of one micro-batch without recomputation."""
        known = self.worked.kept_bytes
        if stage not in known:
            known[stage] = self._chunks.solved(stage, 1, None, baselines.keep_all).most_resident_bytes
        return known[stage]

    def _stock(self, stage: int) -> Passes:
        """Return the seconds of the stage without recomputation."""
        if stage not in self.worked.stock:
            self.worked.stock[stage] = stage_seconds(self.job, self.profile, stage)
        return self.worked.stock[stage]

    def _exposed_copies_s(self, answer: StageAnswer) -> float:
        copy_s = self.profile.link_s("host", ceil(answer.offloaded_share * answer.chunk_bytes))
        if copy_s == 0:
            return 0.0
        passes = Passes(answer.stock.forward_s, answer.stock.backward_s + answer.longer_s)
        return exposed_copies_s(self.job, passes, answer.stage, copy_s, self.profile.link_s("p2p", self._shape.input_bytes))

    def _late_s(self, answer: StageAnswer) -> float:
        late_s = answer.longer_s + answer.host_late_s
        return round(self.job.microbatches * late_s + answer.exposed_copies_s, SECOND_DIGITS)

    def _host_shortage(self, answer: StageAnswer) -> Problem | None:
        return host_shortage(self.job, answer.host_bytes, answer.stage)

    def _shortage(self, stage: int, error: Infeasible) -> list[Problem]:
        """Return the shortage of device memory if that binds, and otherwise the solver's problems."""
        beside, budget_bytes = most_beside_layers(self.job, stage), self.job.memory_budget_bytes
        least = self.least(stage)
        missing = beside.total + least.peak_bytes - budget_bytes
        if not bounded_by_device(self.job) or missing <= 0:
            return list(error.problems)
        layers = f"its layers {format_bytes(least.peak_bytes)} with {_least_in_words(self.job, least)}"
        parts = sorted(((size, name) for name, size in beside.named.items() if size and name != "total"), reverse=True)
        parts_in_words = ", ".join(f"{name} {format_bytes(size)}" for size, name in parts)
        demand = f"at least {format_bytes(beside.total + least.peak_bytes)}: {layers}, {parts_in_words}"
        return [
            Problem(
                f"memory of a device, stage {stage}",
                demand,
                f"at most {format_bytes(budget_bytes)}",
                f"{format_bytes(missing)} are missing",
            )
        ]

    @cached_property
    def _answers(self) -> dict[int, StageAnswer]:
        return {}

    @cached_property
    def worked(self) -> Worked:
        problems, programme = StageProblems(self.job, self.profile), Programme()
        return self.before or Worked(Chunks(problems), programme, Remembering(programme))

    @property
    def _chunks(self) -> Chunks:
        return self.worked.chunks

    @cached_property
    def _shape(self) -> LayerShape:
        return LayerShape.of(self.job)


def _least_in_words(job: Job, least: StageAnswer) -> str:
    recomputed = "everything recomputable recomputed" if job.policy == "planned" else f"policy {job.policy}"
    offloaded = f", {least.offload_ratio:.0%} offloaded" if least.offload_ratio else ""
    return f"{recomputed}{offloaded}, {least.in_flight} in flight"


def _lagging(stage: int) -> list[Problem]:
    todo = "make the passes longer than the copies: a larger micro-batch, or more layers on the stage"
    cause = "copies that lag behind, so that what they copy is held longer than fits"
    return [Problem(f"offload_ratio, stage {stage}", cause, "", todo)]
