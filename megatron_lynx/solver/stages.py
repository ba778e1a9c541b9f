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

The chunks of a stage keep its budget together:

   last stage of 2, v = 2      0F0 1F0 | 0F1 0B1   1F1 1B1   2F0 0B0   3F0 1B0 ...
                                                             └ 2, 1 and 0 of chunk 0 are held, and none of chunk 1

[1] Chunks with equal numbers of layers and experts in the same layers are treated alike, and counted as if every chunk in
    flight were one of them.
[2] Chunks with fewer layers may keep so much more that one with more layers no longer fits. The excess is then taken from the
    budget until all fit.
[3] Chunks without layers, which have only the embedding or the loss, have no choices. The others leave memory to the loss.
[4] The backward of the model's last chunk follows its own forward, so at most one of it is held beside the others, and it may
    use the rest. The others leave it more than they must if both together then expose less.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
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
    """What several stages need is priced once. Solvers are of one chunk, and raise `Infeasible`."""

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
        if self.job.whole_microbatches != 0 and (found := self._keeping_some(stage, lags)) is not None:
            return found
        tenths = [*self._shares(stage, STEPS)]
        try:
            return self._fastest(stage, lags, tenths)
        except Infeasible as error:
            known = {*chain.from_iterable(tenths)}
            between = ([share for share in shares if share not in known] for shares in self._shares(stage, 2 * STEPS))
            with suppress(Infeasible):
                return self._fastest(stage, lags, between)
            raise error

    def _fastest(self, stage: int, lags: tuple[Lag, ...], tried: Iterable[Sequence[Share]]) -> StageAnswer:
        pacing = [at for at, (share, _) in enumerate(lags) if not share.within and self.job.policy == "planned"][:1]
        counted = [lag for at, lag in enumerate(lags) if at not in pacing]
        budget_bytes = layers_budget_bytes(self.job, stage)
        best, refused, too_small = None, None, None
        for shares in tried:
            for share in shares:
                lagging_bytes = [size for lagging, size in counted if lagging == share]
                if lagging_bytes[1:]:
                    continue
                less_bytes = sum(lagging_bytes)
                try:
                    candidate = self._known(stage, share, budget_bytes and budget_bytes - less_bytes, bool(pacing))
                except Infeasible as error:
                    refused = None if less_bytes or pacing else error
                    continue
                if short := host_shortage(self.job, candidate.host_bytes, stage):
                    too_small = short
                    continue
                if best is None or (self._late_s(candidate), share.ratio) < (self._late_s(best), best.asked.ratio):
                    best = candidate
                elif share.within or candidate.exposed_copies_s >= self._late_s(best):
                    break  # a smaller fraction within micro-batches leaves less memory, a larger one between passes copies more
        if best is not None:
            return best
        if too_small is not None:
            raise Infeasible(NOTHING_FITS, [too_small])
        raise Infeasible(NOTHING_FITS, _lagging(stage) if refused is None else self._shortage(stage, refused))

    def _keeping_some(self, stage: int, lags: tuple[Lag, ...]) -> StageAnswer | None:
        """Return the answer with as many whole micro-batches as the job asks for, all in flight if they are fewer; with `auto`,
        with as many as fit, if any. Raises `Infeasible`."""
        asked, count = self.job.whole_microbatches, chunks_in_flight(self.job, stage)
        most, budget_bytes = count if asked == "auto" else min(asked, count), layers_budget_bytes(self.job, stage)
        room_bytes = budget_bytes and budget_bytes - sum(size for _, size in lags)
        answers = (self._with_whole(stage, whole, room_bytes) for whole in range(most, 0, -1))
        found = next((answer for answer in answers if answer is not None), None)
        whole = 0 if found is None else found.whole
        if asked != "auto" and whole < most:
            place, needed = f"whole_microbatches, stage {stage}", f"at most {whole} of {count} in flight"
            raise Infeasible(NOTHING_FITS, [Problem(place, str(asked), needed, "lower it, or set it to auto")])
        return found

    def _with_whole(self, stage: int, whole: int, room_bytes: int | None) -> StageAnswer | None:
        """Return the answer for the other micro-batches in flight, in the memory that these leave; None if they do not fit."""
        if whole == chunks_in_flight(self.job, stage):
            answer = replace(self.keeping_all(stage), whole=whole)
            return answer if room_bytes is None or answer.peak_bytes <= room_bytes else None
        with suppress(Infeasible):
            left_bytes = room_bytes and room_bytes - whole * self._kept_bytes(stage)
            return self._offloading(stage, NOTHING, left_bytes, self._programme, whole)
        return None

    @once
    def least(self, stage: int) -> StageAnswer:
        """Return the answer with the least peak, regardless of the budget."""
        largest_shares = dict.fromkeys([NOTHING, *(max(shares) for shares in self._shares(stage, STEPS) if shares)])
        answers = [self._offloading(stage, share, None, self._programme.least) for share in largest_shares]
        return min(answers, key=lambda answer: answer.peak_bytes)

    def least_fits(self, stage: int) -> bool:
        """Found much faster than that no answer fits, and rarely wrong: an answer that offloads may need less than the least."""
        budget_bytes = layers_budget_bytes(self.job, stage)
        with suppress(Infeasible):
            return bool(self._known(stage, NOTHING, budget_bytes, False))
        return budget_bytes is None or self.least(stage).peak_bytes <= budget_bytes

    def keeping_all(self, stage: int) -> StageAnswer:
        """Regardless of the budget."""
        return self._offloading(stage, NOTHING, None, keep_all)

    def _shares(self, stage: int, steps: int) -> Iterator[list[Share]]:
        """The fractions to try: between passes from the smallest on, and within micro-batches from the largest on."""
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
            yield [Share(ratio, within=ratio > 0) for ratio in reversed(ratios) if ratio or not between]

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
            solved = partial(self._chunks, stage, count, solver=solver)
            chunks, leaving, spared_bytes = leaver.leaving(asked_bytes, budget_bytes, lambda budget: solved(budget_bytes=budget))
            host = host_s(self.profile, chunks, chain.from_iterable(chunk.sections for chunk in leaving))
            return made(chunks=chunks, leaving=leaving, spared_bytes=spared_bytes, host=host, host_sets=leaver.host_sets)
        answer, moved = None, share.ratio
        while answer is None or answer.movable_share < answer.offloaded_share:
            moved = moved if answer is None else answer.movable_share
            in_flight = count - (count - CHUNKS_NOT_OFFLOADED) * moved if moved else count - whole
            chunks = self._chunks(stage, in_flight, budget_bytes, solver)
            host = host_s(self.profile, chunks, self.job.halves_on(stage).elements() if moved else ())
            answer = made(chunks=chunks, offloaded_share=moved, host=host)
        if not share.ratio:
            return answer
        layout = self.job.parallel.pipeline, stage, self.job.microbatches, self.job.chunks, self.job.microbatch_group
        return replace(answer, exposed_copies_s=self._exposed_copies_s(answer), host_sets=sets_on_host(*layout))

    def _chunks(self, stage: int, in_flight: float, budget_bytes: int | None, solver: Solver) -> SolvedChunks:
        """Return the answers of all chunks of a stage, `in_flight` of them at once: those of the fastest division of the budget
        between the model's last chunk and the others. [4]"""
        divided = partial(self._divided, stage, in_flight, budget_bytes, solver)
        if budget_bytes is None or not self._goes_back_at_once(stage):
            return divided(0)
        divisions, refused = list[SolvedChunks](), None
        for reserved_bytes in self._reserves(stage):
            try:
                divisions.append(divided(reserved_bytes))
            except Infeasible as error:
                refused = refused or error
            if divisions and (refused is not None or divisions[0][-1].longer_s <= 0):
                break
        if not divisions:
            assert refused is not None
            raise refused
        return min(divisions, key=lambda chunks: round(sum(chunk.longer_s for chunk in chunks), SECOND_DIGITS))

    @once
    def _reserves(self, stage: int) -> list[int]:
        """Return the bytes that may be left to the model's last chunk."""
        last = replace(self._problems.of(stage, (self.job.chunks - 1,)), in_flight=1)
        enough_bytes = most_bytes = last.loss_bytes
        if last.layers:
            least, most_bytes = self._programme.least(last), keep_all(last).peak_bytes
            enough_bytes = least.peak_bytes - least.resident_bytes  # one of the others is counted that is not held then
        return sorted({enough_bytes, *(part * most_bytes // RESERVES for part in range(RESERVES + 1))})

    def _divided(
        self, stage: int, in_flight: float, budget_bytes: int | None, solver: Solver, reserved_bytes: int
    ) -> SolvedChunks:
        """Return the answers where chunks beside each other leave these bytes, as if they were the loss's, to the model's last
        chunk. [1] [2]"""
        alike, most_bytes = self._alike(stage), budget_bytes
        while True:
            answers = dict[int, Solved]()
            for chunks in alike:
                problem = self._problems.of(stage, chunks)
                loss_bytes = problem.loss_bytes + reserved_bytes
                problem = replace(problem, in_flight=in_flight, budget_bytes=most_bytes, loss_bytes=loss_bytes)
                answers |= dict.fromkeys(chunks, solver(problem))
            beside = SolvedChunks(answers[chunk] for chunk in sorted(answers))
            if budget_bytes is None or most_bytes is None or beside.peak_bytes <= budget_bytes:
                break
            most_bytes -= beside.peak_bytes - budget_bytes
        if not self._goes_back_at_once(stage):
            return beside
        room_bytes = budget_bytes and budget_bytes - beside.beside_bytes
        last = replace(self._problems.of(stage, (len(beside),)), in_flight=1, budget_bytes=room_bytes)
        return SolvedChunks((*beside, solver(last)))

    @once
    def _alike(self, stage: int) -> list[tuple[int, ...]]:
        """Return the chunks beside each other, grouped by those treated alike."""
        chunks = range(self.job.chunks - self._goes_back_at_once(stage))
        kinds = {chunk: tuple(self.job.model.each_kind(self.job.layers_of(stage, chunk))) for chunk in chunks}
        return [tuple(chunk for chunk in chunks if kinds[chunk] == kind) for kind in dict.fromkeys(kinds.values())]

    def _goes_back_at_once(self, stage: int) -> bool:
        """Whether the backward of the last of several chunks follows its own forward. [4]"""
        job, last = self.job, self.job.chunks - 1
        return last > 0 and goes_back_at_once(
            job.parallel.pipeline, stage, job.microbatches, last, job.chunks, job.microbatch_group
        )

    @once
    def _leaver(self, stage: int) -> Leaver:
        return Leaver(self.job, self.profile, stage)

    @once
    def _kept_bytes(self, stage: int) -> int:
        return self._chunks(stage, 1, None, keep_all).most_resident_bytes

    @once
    def _stock(self, stage: int) -> Passes:
        return stage_seconds(self.job, self.profile, stage)

    def _exposed_copies_s(self, answer: StageAnswer) -> float:
        copy_s = self.profile.link_s("host", ceil(answer.offloaded_share * answer.chunks.most_resident_bytes))
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
    def _problems(self) -> StageProblems:
        return StageProblems(self.job, self._options)

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
    offloaded = f", {least.asked.ratio:.0%} offloaded" if least.asked.ratio else ""
    return f"{recomputed}{offloaded}, {least.in_flight} in flight"


def _lagging(stage: int) -> list[Problem]:
    todo = "make the passes longer than the copies: a larger micro-batch, or more layers on the stage"
    cause = "copies that lag behind, so that what they copy is held longer than fits"
    return [Problem(f"offload_ratio, stage {stage}", cause, "", todo)]
