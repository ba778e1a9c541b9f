"""Measures a run under a plan, and reports figures of each stage next to the plan's predictions.

    step of this run    1           2           3        4           5 ...          the loop ends
    measured            timed,      timed,      traced   timed       (8, 16, ...)
                        counted     counted
    reported            a table     a table                                         a table

Every step is timed by events, without waiting. Recomputations are timed in the steps marked "timed", memory on a CPU is counted
in those marked "counted". The third step, or that of `--lynx-trace`, is traced for its `Parts`. Traced and checked steps are left
out of the medians.

Predicted seconds are scaled to the run's micro-batches:

    passes          x  (m + f) / (M + f)  x  [(1 - a) t + a q]   m, M   micro-batches, planned ones
    recomputations  x   m / M             x  [(1 - a) t + a q]   f      the filling of the pipeline, in micro-batches
                                                                 t      tokens of one, over those of a full one
                                                                 q      squares of its lengths, over the planned ones
                                                                 a      core attention's share of the passes; 0 if unknown
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _get_current_dispatch_mode

from megatron_lynx.anatomy.address import ON_DEMAND
from megatron_lynx.apply.releases import installed_version
from megatron_lynx.environment import records_operands
from megatron_lynx.errors import ConfigError, LynxError
from megatron_lynx.figures import Figures, InputSeen, logged
from megatron_lynx.launch.ending import gathered_on_rank_0, on_rank_0
from megatron_lynx.measure.memory import CpuMeter, remember_blocks
from megatron_lynx.measure.run_outcome import (
    FILE_NAME,
    PlannedReserve,
    Report,
    RunOutcome,
    StageMeasured,
    StagePredicted,
    StageRow,
    StepInput,
    lines,
    parts_of,
    save_outcome,
    stage_of,
)
from megatron_lynx.plan import Plan
from megatron_lynx.runtime.device import Clock, Device, Trace
from megatron_lynx.runtime.engine import Engine
from megatron_lynx.timeline import Span, timeline_of, write_trace
from megatron_lynx.version import __version__


def rows(plan: Plan, ranks: Iterable[tuple[int, StageMeasured]]) -> tuple[StageRow, ...]:
    stages: dict[int, list[StageMeasured]] = defaultdict(list)
    for stage, measured in ranks:
        stages[stage].append(measured)
    return tuple(
        StageRow(stage=stage, predicted=predicted_of(plan, stage), measured=stage_of(measured))
        for stage, measured in sorted(stages.items())
    )


def predicted_of(plan: Plan, stage: int) -> StagePredicted | None:
    chunks = [entry.predicted for entry in plan.chunks_of(stage)]
    first = chunks[0]
    if first.step_s is None and not first.memory_bytes:
        return None
    rehearsed = first.step_s is not None
    return StagePredicted(
        passes_s=first.step_s,
        memory_bytes=first.memory_bytes or None,
        hidden_recompute_s=sum(chunk.hidden_recompute_s for chunk in chunks) if rehearsed else None,
        exposed_recompute_s=sum(chunk.exposed_recompute_s for chunk in chunks) if rehearsed else None,
        exposed_copy_s=first.exposed_copy_s if rehearsed else None,
    )


def reserve_of(plan: Plan) -> PlannedReserve | None:
    device = plan.device
    if device is None or device.outside_bytes is None or device.slack_bytes is None:
        return None
    return PlannedReserve(outside_bytes=device.outside_bytes, slack_bytes=device.slack_bytes)


def step_input(plan: Plan, seen: InputSeen, steps: int, shards: int) -> StepInput | None:
    """The input of one rank over `steps`; None without attention. Waits for the device if lengths are on it."""
    if not seen.microbatches or not steps:
        return None
    full, packed = plan.model.seq * plan.batch.micro, plan.batch.packed
    microbatches, planned = seen.microbatches / steps, plan.batch.microbatches
    tokens = seen.tokens * shards / (seen.microbatches * full)
    per_token = plan.model.seq if packed is None else packed.squares_per_token
    squares = float(seen.squares) / (seen.microbatches * full * per_token)
    core = 0.0 if packed is None else packed.core_share
    of_full = (1 - core) * tokens + core * squares
    return StepInput(
        microbatches=microbatches,
        planned_microbatches=planned,
        tokens=tokens,
        squares=squares,
        by_squares=packed is not None,
        passes=of_full * plan.passes(microbatches) / plan.passes(planned),
        recomputations=of_full * microbatches / planned,
    )


def largest_input(inputs: Iterable[StepInput | None]) -> StepInput | None:
    """The input of the rank with most work, which determines the step; None if it was as planned, or is unknown."""
    fullest = max((met for met in inputs if met is not None), key=lambda met: met.passes, default=None)
    return None if fullest is None or fullest.as_planned else fullest


class StepSeconds(NamedTuple):
    passes_s: float
    """Megatron's schedule, including the reduction of gradients."""
    step_s: float


class StepClock:
    def __init__(self, device: Device) -> None:
        self._clock = Clock(device)
        self._passes_s = 0.0
        self._steps: deque[StepSeconds] = deque(maxlen=1000)

    @contextmanager
    def step(self, arguments: dict[str, Any], *, counts: bool) -> Iterator[None]:
        self._clock.runs = counts
        arguments["forward_backward_func"] = self._around(arguments["forward_backward_func"])
        begin = self._clock.begin()
        yield
        self._clock.end("step", begin)
        self.steps(exact=False)

    def _around(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(schedule)
        def forward_backward(*args: Any, **kwargs: Any) -> Any:
            begin = self._clock.begin()
            result = schedule(*args, **kwargs)
            self._clock.end("passes", begin)
            return result

        return forward_backward

    def steps(self, *, exact: bool) -> deque[StepSeconds]:
        """The steps that the device has finished. `exact` waits for it."""
        for what, seconds in self._clock.take(exact=exact):
            if what == "passes":
                self._passes_s += seconds
            else:
                self._steps.append(StepSeconds(self._passes_s, seconds))
                self._passes_s = 0.0
        return self._steps


class DevicePeak:
    """Peaks of one rank since the run began. Must be created before the model: on a CPU, older tensors are not counted.

    On a CPU they are those of the first two steps, without host memory for offloading.
    """

    def __init__(self) -> None:
        where = torch.empty(0, device="cuda").device  # the CPU, if it stands in for CUDA in tests
        self._on_cuda = where.type == "cuda"
        self._counts = False
        if not self._on_cuda:
            with suppress(LynxError):  # this build of PyTorch hides it; the table says that memory is not measured
                remember_blocks()
                self._counts = True
        self._most_bytes: int | None = None

    @contextmanager
    def counting(self) -> Iterator[None]:
        busy = torch.autograd._profiler_enabled() or _get_current_dispatch_mode() is not None  # type: ignore[attr-defined]
        if not self._counts or busy:
            yield
            return
        with CpuMeter() as meter:
            yield
        self._most_bytes = max(self._most_bytes or 0, meter.use.level_bytes + meter.use.peak_bytes)

    def figures(self, *, outside: bool = False) -> dict[str, int | None]:
        """By their names in `StageMeasured`. `outside`: with bytes outside PyTorch's allocator, which are slow to read."""
        if not self._on_cuda:
            return {"allocated_bytes": getattr(_get_current_dispatch_mode(), "most_bytes", self._most_bytes)}
        allocated_bytes, reserved_bytes = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        figures: dict[str, int | None] = {"allocated_bytes": allocated_bytes, "reserved_bytes": reserved_bytes}
        if outside:
            free_bytes, all_bytes = torch.cuda.mem_get_info()
            figures["outside_bytes"] = all_bytes - free_bytes - torch.cuda.memory_reserved()
            figures["slack_bytes"] = reserved_bytes - allocated_bytes
        return figures


FIRST = 2


@contextmanager
def traced_step(trace: Trace, path: Path | None, step: int) -> Iterator[list[Span]]:
    """Trace a step: the list has this rank's spans after it. Those of all ranks are written to the path, if there is one.

    A traced step also has windows without work in them; before torch 2.8 these may hold memory.
    """
    if path is not None and dist.is_initialized():
        dist.barrier()  # so that the ranks' clocks start together
    spans: list[Span] = []
    trace.start()
    yield spans
    spans += trace.stop()
    if path is None or not (of_ranks := gathered_on_rank_0(spans)):
        return
    try:
        write_trace(timeline_of(dict(enumerate(of_ranks))), path)
    except ConfigError as error:  # the disk is full, say: no reason to stop training
        on_rank_0(f"megatron-lynx: no trace: {error}")
    else:
        on_rank_0(f"megatron-lynx: step {step} of this run is traced in {path}")


def path_of(stated: Path | None, trace: Path | None, logs: str | None) -> Path | None:
    folder = trace.parent if trace is not None else Path(logs) if logs else None
    return stated or (folder / FILE_NAME if folder is not None else None)


class Reporter:
    """`path`: of the outcome file, if any. `shards`: ranks that share a sequence. `trace`: path of a trace, if any, and the step
    of this run that is traced."""

    def __init__(
        self,
        engine: Engine,
        device: Device,
        peak: DevicePeak,
        plan: Plan,
        stage: int,
        plan_path: str,
        path: Path | None,
        *,
        shards: int = 1,
        trace: tuple[Path | None, int] = (None, FIRST + 1),
    ) -> None:
        self._engine, self._clock, self._peak = engine, StepClock(device), peak
        self._plan, self._stage, self._plan_path, self._path = plan, stage, plan_path, path
        self._checked, self._shards = False, shards
        self._trace_path, self._trace_step = trace
        self._usual = True
        """Whether the present step is neither checked nor traced."""
        self._step = self._measured = 0
        self._known: dict[str, Any] = {}
        """Latest figures of this rank, by name; `expert_load` and `fell_back` are maxima over all steps."""
        self._seen, self._steps_seen = InputSeen(), 0
        self._input: StepInput | None = None
        self._reports: list[Report] = []

    @contextmanager
    def step(self, arguments: dict[str, Any], *, checked: bool) -> Iterator[None]:
        """Measure one step. `arguments`: those of Megatron's `train_step`. `checked`: compared with stock."""
        self._step += 1
        self._checked |= checked
        harmless = self._trace_path is not None or not (checked or records_operands(torch.__version__, os.environ))
        traced = self._step == self._trace_step and harmless
        self._usual = usual = not (checked or traced)
        self._measured += usual
        self._engine.clock.runs = timed = usual and self._measured & (self._measured - 1) == 0  # 1, 2, 4, 8, ...
        self._engine.met = self._seen if usual else None
        counted = self._peak.counting() if usual and self._measured <= FIRST else nullcontext()
        tracing: AbstractContextManager[list[Span]] = nullcontext([])
        if traced:
            tracing = traced_step(self._engine.trace, self._trace_path, self._step)
        with self._clock.step(arguments, counts=usual), counted, tracing as spans:
            yield
        if traced:
            self._known["parts"] = parts_of(spans, self._plan.model.has_experts)
        self._engine.met = None
        self._steps_seen += usual
        if timed:
            self._known |= {"in_windows_s": 0.0, "on_demand_s": 0.0}
            for window, seconds in self._engine.clock.take():
                self._known["on_demand_s" if window == ON_DEMAND else "in_windows_s"] += seconds
        self._engine.clock.runs = False

    def step_ends(self, counts: Figures) -> None:
        largest = {name: max(self._known.get(name, 0), getattr(counts, name)) for name in ("expert_load", "fell_back")}
        self._known |= (_known(counts) if self._usual else {}) | largest
        if self._usual and self._measured <= FIRST:
            self._report("step")

    def ends(self) -> None:
        if self._measured:
            self._report("end")

    def logged(self, counts: Figures) -> dict[str, float | None]:
        """Figures of the step with these counts, by their names in logs. Does not wait for the device."""
        predicted = predicted_of(self._plan, self._stage) or StagePredicted()
        steps = self._clock.steps(exact=False)
        latest = steps[-1]._asdict() if steps else {}
        return logged(self._figures(_known(counts) | self._peak.figures() | latest)) | logged(predicted)

    def _figures(self, more: Mapping[str, Any]) -> StageMeasured:
        return StageMeasured(ranks=1, **self._known | dict(more))

    def _report(self, when: Literal["step", "end"]) -> None:
        """Report the steps since the last report: a single one, or the medians of all others at the end."""
        if steps := self._clock.steps(exact=True):
            self._known |= StepSeconds(*map(median, zip(*steps, strict=True)))._asdict()
            steps.clear()
        if self._steps_seen:
            self._input = step_input(self._plan, self._seen, self._steps_seen, self._shards)
            self._seen, self._steps_seen = InputSeen(), 0
        figures = self._figures(self._peak.figures(outside=True))
        if not (ranks := gathered_on_rank_0((self._stage, figures, self._input))):
            return
        load = self._plan.model.moe_load if self._plan.model.moe_layers else None
        report = Report(
            when=when,
            step=self._step,
            stages=rows(self._plan, [(stage, measured) for stage, measured, _ in ranks]),
            planned_load=load,
            reserve=reserve_of(self._plan),
            met=largest_input(step_input for _, _, step_input in ranks),
        )
        self._reports.append(report)
        on_rank_0("megatron-lynx: " + "\n".join(lines(report)))
        if self._path is not None:
            self._write(self._path, finished=when == "end", ranks=len(ranks))

    def _write(self, path: Path, finished: bool, ranks: int) -> None:
        origin = self._plan.provenance
        outcome = RunOutcome(
            made_by=f"megatron-lynx {__version__}",
            megatron_core=installed_version(),
            plan=self._plan_path,
            plan_digest=self._plan.digest,
            job_digest=origin.job,
            profile_digest=origin.profile,
            asked=origin.asked,
            learned=origin.learned,
            checked=self._checked,
            ranks=ranks,
            finished=finished,
            reports=tuple(self._reports),
        )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_outcome(outcome, path)
        except (ConfigError, OSError) as error:  # the disk is full, say: no reason to stop training
            on_rank_0(f"megatron-lynx: the outcome is not written: {error}")


def _known(figures: Figures) -> dict[str, Any]:
    return {name: value for name, value in vars(figures).items() if value is not None}


PREFIX = "lynx/"
NOTHING = -1.0
"""Stands for an unknown figure in the reduction: less than any figure, so the maximum ignores it."""


class Metrics:
    """Writes the figures of each step into TensorBoard and W&B, which are None on ranks that do not log.

    Megatron logs on its last rank, a stage that offloads nothing in plain 1F1B, so the maximum of all ranks' figures is reduced
    to it, asynchronously: the figures of one logged step are written at the next one, or at the end. Seconds whose events are not
    done when a step ends count in the next step.
    """

    def __init__(self, args: Any, tensorboard: Any = None, wandb: Any = None) -> None:
        self.total = Figures()
        self._args = args
        self._tensorboard, self._wandb = tensorboard, wandb
        self._wanted = bool(getattr(args, "tensorboard_dir", None) or getattr(args, "wandb_project", None))
        self._pending: tuple[int, list[str], torch.Tensor, Any] | None = None
        """A step, the names of its figures, and the reduction of their values."""

    def step_ends(self, engine: Engine, named: Callable[[Figures], Mapping[str, float | None]] = logged) -> Figures:
        """Take, log and return the engine's counts of this step. `named` returns the logged figures, the same on all ranks."""
        counts = engine.take_counts(exact=False)
        self.total = self.total + counts
        step = self._args.curr_iteration + 1
        if not self._wanted or step % self._args.tensorboard_log_interval:
            return counts
        self.write()
        figures = {name: NOTHING if value is None else value for name, value in named(counts).items()}
        values, work = torch.tensor(list(figures.values()), dtype=torch.float64, device="cpu"), None
        if dist.is_initialized() and dist.get_world_size() > 1:
            if dist.get_backend() != "gloo":
                values = values.pin_memory().to("cuda", non_blocking=True)
            work = dist.reduce(values, dst=dist.get_world_size() - 1, op=dist.ReduceOp.MAX, async_op=True)
        self._pending = (step, list(figures), values, work)
        return counts

    def write(self) -> None:
        """Write the figures of the latest logged step. A run of W&B that Megatron has finished, before its loop exits, lacks
        them."""
        if self._pending is None:
            return
        (step, names, values, work), self._pending = self._pending, None
        if work is not None:
            work.wait()
        if self._tensorboard is None and self._wandb is None:
            return
        named = {f"{PREFIX}{name}": value for name, value in zip(names, values.tolist(), strict=True) if value != NOTHING}
        if self._tensorboard is not None:
            for name, value in named.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None and getattr(self._wandb, "run", self) is not None:
            self._wandb.log(named, step)
