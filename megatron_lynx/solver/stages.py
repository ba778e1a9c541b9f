"""Solves every stage of a job: tensors kept, recomputed and offloaded by its layers, and seconds of the stage.

    fraction r to the host   of N chunks in flight, N - (N - 4)r remain on the device (Yuan et al.). Small blocks and what
                             Megatron holds stay there: a larger r moves everything that can be moved
       0, 1/10 ... 1  ──solve within the stage's budget──> exposed recomputation of each micro-batch   ┐ the least
                      ──copies overlapped with passes────> exposed copies of the whole step            ┘ sum wins

Alternatively, a fraction is offloaded within its own micro-batch (`solver.offload`), whatever N is, and overlaps with the two
passes of that micro-batch only. The faster way is taken.

Ties go to the smaller fraction, so nothing is offloaded if the run fits and hides its recomputation without. A fraction is
excluded if all devices of a node together would offload more than its host memory holds. Copies and messages take turns
(`cost.step`). Devices that share a link to the host share its rate, which the profile's `host` link includes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import ceil, floor

from megatron_lynx.config.job import Job
from megatron_lynx.cost.budget import bounded_by_device, layers_budget_bytes, most_beside_layers
from megatron_lynx.cost.host_optimizer import host_shortage
from megatron_lynx.cost.section import Prices
from megatron_lynx.cost.stage import chunks_in_flight, stage_seconds
from megatron_lynx.cost.step import exposed_copies_s
from megatron_lynx.errors import Infeasible, Problem
from megatron_lynx.once import once
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.schedule.flushes import goes_back_at_once, sets_on_host
from megatron_lynx.solver.answer import NOTHING_FITS, Share, Solved, SolvedChunks, Solver, StageAnswer
from megatron_lynx.solver.offload import Leaver, bytes_copied_in, host_s, may_go_within
from megatron_lynx.solver.options import HalfOptions, StageProblems
from megatron_lynx.solver.problem import StageProblem
from megatron_lynx.solver.programme import Programme, keep_all
from megatron_lynx.timeline import Passes
from megatron_lynx.units import SECOND_DIGITS, format_bytes

RESERVES = 16
"""Into how many parts the bytes are divided with which the model's last chunk keeps everything; each multiple is tried as memory
that the others leave it, and so is the least that it needs [4]. With that alone, 32 rows with chunks take 0.49 % longer in the
mean and 4.8 % at worst."""


@dataclass(frozen=True)
class Chunks:
    """Solves the chunks of one stage so that together they keep the budget.

       last stage of 2, v = 2      0F0 1F0 | 0F1 0B1   1F1 1B1   2F0 0B0   3F0 1B0 ...
                                                                 └ 2, 1 and 0 of chunk 0 are held, and none of chunk 1

    [1] Chunks with equal numbers of layers and experts in the same layers are treated alike, and counted as if every chunk in
        flight were one of them.
    [2] Chunks with fewer layers may keep so much more that one with more layers no longer fits. The excess is then taken from the
        budget of those that hold most, until all fit.
    [3] Chunks without layers, which have only the embedding or the loss, have no choices. The others leave memory to the loss.
    [4] The backward of the model's last chunk follows its own forward, so at most one of it is held beside the others, and it may
        use the rest. The others leave it more than they must if both together then expose less.
    """

    problems: StageProblems

    def solved(self, stage: int, in_flight: float, budget_bytes: int | None, solver: Solver) -> SolvedChunks:
        """All chunks of a stage, `in_flight` of them at once."""
        if self._goes_back_at_once(stage):
            return self._shared_out(stage, in_flight, budget_bytes, solver)
        return self._beside_each_other(stage, in_flight, budget_bytes, solver)

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
        """Chunks beside each other that leave these bytes, and the last chunk in the rest."""
        beside = self._beside_each_other(stage, in_flight, budget_bytes, solver, reserved_bytes)
        room_bytes = (beside.peak_bytes if budget_bytes is None else budget_bytes) - beside.beside_bytes
        problem = replace(self.problems.of(stage, (len(beside),)), in_flight=1, budget_bytes=room_bytes)
        try:
            return SolvedChunks((*beside, solver(problem)))
        except Infeasible:
            if budget_bytes is not None:
                raise
        return SolvedChunks((*beside, solver(replace(problem, budget_bytes=None))))

    def _beside_each_other(
        self, stage: int, in_flight: float, budget_bytes: int | None, solver: Solver, reserved_bytes: int = 0
    ) -> SolvedChunks:
        """Return the answers of all chunks but the last. [1] [2] The solver counts reserved bytes as bytes of the loss."""
        alike = self._alike(stage)
        problems = [replace(self.problems.of(stage, some), in_flight=in_flight, budget_bytes=budget_bytes) for some in alike]
        while True:
            reserving = (solver(replace(problem, loss_bytes=problem.loss_bytes + reserved_bytes)) for problem in problems)
            pairs = zip(reserving, problems, strict=True)
            solved = SolvedChunks(replace(answer, loss_bytes=problem.loss_bytes) for answer, problem in pairs)
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
        job, model = self.problems.job, self.problems.job.model
        chunks = range(job.chunks - self._goes_back_at_once(stage))
        kinds = {chunk: tuple(map(model.sections, job.layers_of(stage, chunk))) for chunk in chunks}
        return [tuple(chunk for chunk in chunks if kinds[chunk] == kind) for kind in dict.fromkeys(kinds.values())]

    @once
    def _leanest(self, stage: int) -> Solved:
        """The model's last chunk alone."""
        return Programme().least(replace(self.problems.of(stage, (self.problems.job.chunks - 1,)), in_flight=1))

    def _goes_back_at_once(self, stage: int) -> bool:
        """Whether the backward of the last of several chunks follows its own forward. [4]"""
        job, last = self.problems.job, self.problems.job.chunks - 1
        layout = job.parallel.pipeline, stage, job.microbatches, last, job.chunks, job.microbatch_group
        return last > 0 and goes_back_at_once(*layout)


NOTHING = Share(0.0)

CHUNKS_NOT_OFFLOADED = 4
"""One chunk in flight runs, one is copied, and the offloaded parts of two return meanwhile (Yuan et al., ATC '24)."""

STEPS = 10
"""Fractions are multiples of a tenth; of a twentieth where none of those fits. With twentieths always, plans of 22 bundled jobs
take 0.01 % longer in the mean, 0.27 % less at best, and a quarter more time to make."""

Lag = tuple[Share, int]
"""A share whose copies lagged in a rehearsal, and the bytes by which the budget was then exceeded."""


@dataclass(frozen=True)
class Stages:
    """What several stages need is priced once."""

    job: Job
    profile: Profile
    like: Stages | None = None
    """Stages of the same job with other layers, whose options and columns serve these, too."""

    @once
    def answer(self, stage: int, lags: tuple[Lag, ...] = ()) -> StageAnswer:
        """Return the fastest answer that fits. Raises `Infeasible` if none fits.

        After the first lag between passes, the stage offloads no more of a chunk than is copied during its forward. After another
        one the same share gets that much less memory, and then it is excluded.
        """
        if self.job.whole_microbatches != 0:
            return self._keeping_some(stage, lags)
        if self.job.offload_ratio == "auto":
            with suppress(Infeasible):
                return self._fastest(stage, lags, STEPS)
        return self._fastest(stage, lags, 2 * STEPS)

    def _fastest(self, stage: int, lags: tuple[Lag, ...], steps: int) -> StageAnswer:
        pacing = [at for at, (share, _) in enumerate(lags) if not share.within and self.job.policy == "planned"][:1]
        counted = [lag for at, lag in enumerate(lags) if at not in pacing]
        budget_bytes = layers_budget_bytes(self.job, stage)
        best: StageAnswer | None = None
        problems: Callable[[], list[Problem]] = partial(_lagging, stage)
        for shares in self._shares(stage, steps):
            if best is not None and not self._may_gain(stage, shares[-1:], budget_bytes, best):
                continue
            for share in shares:
                lagging_bytes = [size for lagging, size in counted if lagging == share]
                if lagging_bytes[1:]:
                    continue
                less_bytes = sum(lagging_bytes)
                try:
                    candidate = self._known(stage, share, budget_bytes and budget_bytes - less_bytes, bool(pacing))
                except Infeasible as error:
                    problems = partial(_lagging, stage) if less_bytes or pacing else partial(self._shortage, stage, error)
                    continue
                if too_small := host_shortage(self.job, candidate.host_bytes, stage):
                    problems = partial(list, (too_small,))
                    continue
                if best is None or self._late_s(candidate) < self._late_s(best):
                    best = candidate
                if candidate.exposed_copies_s >= self._late_s(best):  # a larger fraction copies more
                    break
        if best is None:
            raise Infeasible(NOTHING_FITS, problems())
        return best

    def _may_gain(self, stage: int, largest: list[Share], budget_bytes: int | None, best: StageAnswer) -> bool:
        """Whether the largest of the shares within micro-batches, which leaves most memory, is faster than the best answer."""
        with suppress(Infeasible):
            return any(self._late_s(self._known(stage, share, budget_bytes, False)) < self._late_s(best) for share in largest)
        return False

    def _keeping_some(self, stage: int, lags: tuple[Lag, ...]) -> StageAnswer:
        """Return the answer with as many whole micro-batches as the job asks for; all in flight if they are fewer. Raises
        `Infeasible`."""
        asked, count = self.job.whole_microbatches, chunks_in_flight(self.job, stage)
        most, less_bytes = count if asked == "auto" else min(asked, count), sum(size for _, size in lags)
        answers = (self._with_whole(stage, whole, less_bytes) for whole in range(most, 0, -1))
        found = next((answer for answer in answers if answer is not None), None)
        whole = 0 if found is None else found.whole
        if asked != "auto" and whole < most:
            place, needed = f"whole_microbatches, stage {stage}", f"at most {whole} of {count} in flight"
            raise Infeasible(NOTHING_FITS, [Problem(place, str(asked), needed, "lower it, or set it to auto")])
        if found is None:
            return Stages(self.job.model_copy(update={"whole_microbatches": 0}), self.profile).answer(stage, lags)
        return found

    def _with_whole(self, stage: int, whole: int, less_bytes: int) -> StageAnswer | None:
        """Return the answer for the other micro-batches in flight, in the memory that these leave without `less_bytes`; None if
        they do not fit."""
        budget_bytes = layers_budget_bytes(self.job, stage)
        if whole == chunks_in_flight(self.job, stage):
            answer = replace(self.keeping_all(stage), whole=whole)
            return answer if budget_bytes is None or answer.peak_bytes <= budget_bytes - less_bytes else None
        with suppress(Infeasible):
            left_bytes = budget_bytes and budget_bytes - less_bytes - whole * self._kept_bytes(stage)
            return self._offloading(stage, NOTHING, left_bytes, self._programme, whole)
        return None

    @once
    def least(self, stage: int) -> StageAnswer:
        """Return the answer with the least peak, regardless of the budget."""
        largest_shares = dict.fromkeys([NOTHING, *(shares[-1] for shares in self._shares(stage, STEPS) if shares)])
        answers = [self._offloading(stage, share, None, self._programme.least) for share in largest_shares]
        return min(answers, key=lambda answer: answer.peak_bytes)

    def least_fits(self, stage: int) -> bool:
        """Found much faster than that no answer fits, and rarely wrong: an answer that offloads may need less than the least."""
        budget_bytes = layers_budget_bytes(self.job, stage)
        return budget_bytes is None or self.least(stage).peak_bytes <= budget_bytes

    def keeping_all(self, stage: int) -> StageAnswer:
        """Regardless of the budget."""
        return self._offloading(stage, NOTHING, None, keep_all)

    def _shares(self, stage: int, steps: int) -> Iterator[list[Share]]:
        """The fractions to try: between passes, and within micro-batches."""
        asked = self.job.offload_ratio
        within = asked != 0 and may_go_within(self.job) and (asked == "auto" or self.job.parallel.pipeline == 1)
        between = asked != 0 and chunks_in_flight(self.job, stage) > CHUNKS_NOT_OFFLOADED
        ratios = [step / steps for step in range(steps + 1)] if asked == "auto" else [float(asked)]
        if between or not within:
            yield [*map(Share, ratios if between else [0.0])]
        if within:
            if asked == "auto":  # exposed copies save no memory, because they are waited for at the end
                hidden = self._leaver(stage).hidden_bytes() / max(1, self._kept_bytes(stage))
                ratios = [floor(1000 * ratio * min(1.0, hidden)) / 1000 for ratio in ratios]
            yield [Share(ratio, within=ratio > 0) for ratio in ratios if ratio or not between]

    @once
    def _known(self, stage: int, share: Share, budget_bytes: int | None, paced: bool) -> StageAnswer:
        """Raises `Infeasible`."""
        if not share.within:
            paces = paced and share.ratio
            return self._offloading(stage, share, budget_bytes, partial(self._paced, share) if paces else self._programme)
        # layers that hold most are lowest, because they leave first
        return self._offloading(stage, share, budget_bytes, lambda problem: self._programme(replace(problem, leaving=True)))

    def _paced(self, share: Share, problem: StageProblem) -> Solved:
        """Return an answer of which this fraction can be copied to the host during a forward of the layers."""
        most_bytes = bytes_copied_in(self.profile, problem.forward_s) / share.ratio
        solved = self._programme(problem)
        while solved.resident_bytes > most_bytes:
            spared_bytes = ceil((solved.resident_bytes - most_bytes) * problem.in_flight)
            problem = replace(problem, budget_bytes=solved.peak_bytes - spared_bytes)
            solved = self._programme(problem)
        return solved

    def _offloading(self, stage: int, share: Share, budget_bytes: int | None, solver: Solver, whole: int = 0) -> StageAnswer:
        """`whole`: micro-batches in flight that keep everything, for which the budget has no room."""
        count, received_bytes, stock = chunks_in_flight(self.job, stage), self._shape.input_bytes, self._stock(stage)
        made = partial(
            StageAnswer, stage=stage, in_flight=count, asked=share, stock=stock, received_bytes=received_bytes, whole=whole
        )
        if share.within:
            leaver, asked_bytes = self._leaver(stage), int(share.ratio * self._kept_bytes(stage))
            solved = partial(self._chunks.solved, stage, count, solver=solver)
            chunks, within = leaver.leaving(asked_bytes, budget_bytes, lambda budget: solved(budget_bytes=budget))
            host = host_s(self.profile, chunks, leaver.sections_leaving(chunks, within))
            return made(chunks=chunks, within=within, host=host, host_sets=leaver.host_sets)
        answer, moved = None, share.ratio
        while answer is None or answer.movable_share < answer.offloaded_share:
            moved = moved if answer is None else answer.movable_share
            in_flight = count - (count - CHUNKS_NOT_OFFLOADED) * moved if moved else count - whole
            chunks = self._chunks.solved(stage, in_flight, budget_bytes, solver)
            host = host_s(self.profile, chunks, self.job.halves_on(stage).elements() if moved else ())
            answer = made(chunks=chunks, offloaded_share=moved, host=host)
        if not share.ratio:
            return answer
        layout = self.job.parallel.pipeline, stage, self.job.microbatches, self.job.chunks, self.job.microbatch_group
        return replace(answer, exposed_copies_s=self._exposed_copies_s(answer), host_sets=sets_on_host(*layout))

    @once
    def _leaver(self, stage: int) -> Leaver:
        return Leaver(self.job, self.profile, stage)

    @once
    def _kept_bytes(self, stage: int) -> int:
        return self._chunks.solved(stage, 1, None, keep_all).most_resident_bytes

    @once
    def _stock(self, stage: int) -> Passes:
        return stage_seconds(self.job, self.profile, stage)

    def _exposed_copies_s(self, answer: StageAnswer) -> float:
        copy_s = self.profile.link_s("host", ceil(answer.offloaded_share * answer.chunk_bytes))
        if copy_s == 0:
            return 0.0
        passes = Passes(answer.stock.forward_s, answer.stock.backward_s + answer.longer_s)
        return exposed_copies_s(self.job, passes, answer.stage, copy_s, self.profile.link_s("p2p", self._shape.input_bytes))

    def _late_s(self, answer: StageAnswer) -> float:
        late_s = answer.longer_s + answer.host_late_s
        return round(self.job.microbatches * late_s + answer.exposed_copies_s, SECOND_DIGITS)

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
    def _programme(self) -> Programme:
        return Programme() if self.like is None else self.like._programme

    @cached_property
    def _chunks(self) -> Chunks:
        return Chunks(StageProblems(self.job, self._options))

    @property
    def prices(self) -> Prices:
        return self._options.prices

    @cached_property
    def _options(self) -> HalfOptions:
        return HalfOptions(self.job, self.profile) if self.like is None else self.like._options

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
