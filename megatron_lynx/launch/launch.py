"""One launch: what our hooks on Megatron's training (`hosts`) call."""

from __future__ import annotations

import faulthandler
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from operator import attrgetter
from typing import Any

from megatron_lynx.apply import hook
from megatron_lynx.apply.hook import Claim
from megatron_lynx.apply.installation import install
from megatron_lynx.apply.live_run import live_run, of_all_ranks
from megatron_lynx.apply.refusals import launch_mismatches
from megatron_lynx.apply.releases import installed_version
from megatron_lynx.errors import ConfigError, HookRefused, LynxError, Problem
from megatron_lynx.figures import Figures
from megatron_lynx.launch.check import Check
from megatron_lynx.launch.ending import agree, concluded, on_rank_0
from megatron_lynx.launch.frames import FrameCheck
from megatron_lynx.launch.hosts import Host, host_named
from megatron_lynx.launch.out_of_memory import MemoryWatch
from megatron_lynx.launch.reporter import DevicePeak, Metrics, Reporter, path_of
from megatron_lynx.launch.script import Flags
from megatron_lynx.limits import ARGUMENTS, Limit, refused
from megatron_lynx.plan import Plan, load_plan
from megatron_lynx.runtime.device import device_for
from megatron_lynx.units import format_bytes
from megatron_lynx.version import __version__
from megatron_lynx.whole_file import against_file


class Launch:
    """The launch of one process. Without a plan it changes nothing."""

    def __init__(self, flags: Flags, host: Host) -> None:
        self.flags = flags
        self.host = host
        self._plan: Plan | None = None
        self._installation: Any = None
        self._check: Check | FrameCheck | None = None
        self._args: Any = None
        self._metrics: Metrics | None = None
        self._peak: DevicePeak | None = None
        self._reporter: Reporter | None = None
        self._steps = 0
        self._in_step = False
        self.memory = MemoryWatch(lambda: f"in step {self._steps} of this run" if self._in_step else f"after {self._steps} steps")

    def prepare(self, args: Any) -> None:
        """Read and check all that can be checked before a model is built. All ranks continue, or none.

        Our flags are set on `args`, so that checkpoints record them.
        """
        self._args = args
        for name, value in vars(self.flags).items():
            setattr(args, name, value)
        if self.flags.lynx_plan is None and not self.flags.without_flushes:
            return
        error: LynxError | None = None
        try:
            headline = "this launch cannot train without flushes"
            problems = [*against_two_versions(args)] if self.flags.without_flushes else []
            if self.flags.lynx_plan is not None:
                self._plan = load_plan(self.flags.lynx_plan)
                if mismatches := [*arguments_against(self._plan, args), *self.host.refused(args), *self._unwritable()]:
                    headline, problems = "this launch and its plan do not fit", [*problems, *mismatches]
            if problems:
                raise ConfigError(headline, problems)
        except LynxError as found:
            error = self._spoken(found)
        if self._plan is not None:
            self.memory.under(self._plan, str(self.flags.lynx_plan))
            self._peak = DevicePeak()
        agree(error, same=None if self._plan is None else self._plan.digest, what=f"--lynx-plan {self.flags.lynx_plan}")

    @contextmanager
    def training(self, model: Any, optimizer: Any) -> Iterator[None]:
        self.memory.trains(model, optimizer)
        with ExitStack() as inside:
            pipeline = None
            if self.flags.without_flushes:
                from megatron_lynx.launch.schedule import without_flushes  # it imports Megatron

                pipeline = inside.enter_context(without_flushes(model, optimizer, self._plan))
            if self._plan is not None:
                inside.enter_context(self._planned(model, self._plan, pipeline))
            yield

    @contextmanager
    def _planned(self, model: Any, plan: Plan, pipeline: Any) -> Iterator[None]:
        error: LynxError | None = None
        try:
            self._installation = install(model, plan, without_flushes=pipeline)
        except LynxError as found:
            error = self._spoken(found)
        agree(error)
        with self._installation:
            self._say_begun(plan)
            self._check = self._new_check(plan)
            self._metrics = metrics = Metrics(self._args, *self.host.writers())
            self._reporter = reporter = self._new_reporter(model, plan)

            def conclude() -> None:
                self._say_checked()
                reporter.ends()
                metrics.write()
                self._say_done(metrics.total)

            with concluded(conclude, lambda: not self._in_step):
                yield

    @contextmanager
    def step(self, arguments: dict[str, Any]) -> Iterator[None]:
        self._steps += 1
        self._in_step = True
        with self.memory.step():
            yield from self._step(arguments)
        self._in_step = False

    def _step(self, arguments: dict[str, Any]) -> Iterator[None]:
        if self._reporter is None or self._metrics is None:
            yield
            return
        if self._check is not None:
            schedule, optimizer = arguments["forward_backward_func"], arguments["optimizer"]
            arguments["forward_backward_func"] = self._check.around(schedule, optimizer, self._installation)
        engine = self._installation.engine
        with self._reporter.step(arguments, checked=self._check is not None):
            yield
        counts = self._metrics.step_ends(engine, self._reporter.logged)
        self._reporter.step_ends(counts)
        if self._check is not None and self._check.over:
            self._say_checked()

    def _spoken(self, error: LynxError) -> LynxError:
        spoken = tuple(self.host.spoken(problem) for problem in error.problems)
        return error if spoken == error.problems else type(error)(error.headline, spoken)

    def _unwritable(self) -> Iterator[Problem]:
        """Yield output files that rank 0 could not write. Creates their folders."""
        paths = {"--lynx-trace": self.flags.trace, "--lynx-outcome": self.flags.outcome}
        for flag, path in paths.items():
            if path is not None and self._args.rank == 0 and (reason := against_file(path)) is not None:
                yield Problem(flag, f"{path} ({reason})", "a file that can be written")

    def _new_reporter(self, model: Any, plan: Plan) -> Reporter:
        assert self._peak is not None
        run: Any = live_run(model)  # the plan is installed for it
        path = path_of(self.flags.outcome, self.flags.trace, getattr(self._args, "tensorboard_dir", None))
        device = device_for(next(run.chunks[0].parameters()).device)
        given = (self._installation.engine, device, self._peak, plan, run.stage, str(self.flags.lynx_plan), path)
        trace = self.flags.trace, self.flags.lynx_trace_step
        return Reporter(*given, shards=run.shards_of(plan.parallel.sequence_parallel), trace=trace)

    def _new_check(self, plan: Plan) -> Check | FrameCheck | None:
        if self.flags.lynx_check is None:
            return None
        if self.flags.checks_frames:
            seed, lag = int(getattr(self._args, "seed", None) or 0), int(self.flags.without_flushes)
            return FrameCheck(self.flags.checked_steps, plan, seed=seed, lag=lag)
        return Check(self.flags.checked_steps, self.flags.lynx_check_against, head_in_pieces=plan.head is not None)

    def _say_checked(self) -> None:
        check, self._check = self._check, None
        if check is not None and (summary := check.summary()) is not None:
            on_rank_0(f"megatron-lynx: {summary}")

    def _say_begun(self, plan: Plan) -> None:
        held, locked = f"{len(self._installation.hooks)} hooks on rank 0", self._locked()  # a collective
        on_rank_0(
            f"megatron-lynx {__version__}: training under {self.flags.lynx_plan} ({plan.digest[:12]}), "
            f"megatron-core {installed_version()}, {held}{locked}"
        )
        if checkpointed := plan.checkpointed:
            on_rank_0(f"megatron-lynx: checkpointed layers: {checkpointed}; all inside runs again, with what it communicates")
        if plan.head is not None:
            on_rank_0(
                f"megatron-lynx: inexact: the head runs in {plan.head.pieces} pieces, and the gradient of its weight is "
                "summed in another order than stock's; all else is stock's"
            )

    def _locked(self) -> str:
        sizes, seconds = zip(*of_all_ranks(self._installation.engine.offloader.locked), strict=True)
        held, longest_s = sum(sizes), max(seconds)
        return f"; {format_bytes(held)} of host memory page-locked in {longest_s:.1f} s" if held else ""

    def _say_done(self, counts: Figures) -> None:
        done = f"recomputed {counts.recomputed} layer halves: {counts.in_windows} inside windows, {counts.on_demand} on demand"
        if counts.offloaded_bytes:
            done += f"; {format_bytes(counts.offloaded_bytes)} copied to the host, {format_bytes(counts.reloaded_bytes)} back"
        if counts.deferred:
            done += f"; deferred {counts.deferred} weight gradients: {counts.filled} ran in waits, {counts.flushed} were flushed"
        on_rank_0(f"megatron-lynx: rank 0 {done}")


def launch_of(flags: Flags) -> Launch:
    logging.getLogger("megatron_lynx").setLevel(flags.lynx_log.upper())
    return Launch(flags, host_named(flags.lynx_host))


def held(launch: Launch) -> Sequence[Claim]:
    """Place the hooks of a launch. Raises `HookRefused` for a host without the functions that they replace."""
    claims = [*launch.host.claims(launch)]
    if problems := hook.verify(claims):
        raise HookRefused(f"this {launch.host.name} cannot be launched under a plan", problems)
    return hook.put_in_place(claims)


@contextmanager
def in_force(launch: Launch) -> Iterator[None]:
    hooks = held(launch)
    try:
        with suppress(AttributeError, OSError, RuntimeError, ValueError):  # standard error may be no file
            faulthandler.enable()  # until the process ends: an abort may come after Python code has finished
        with launch.memory.watching():
            yield
    finally:
        hook.give_back(hooks)


def arguments_against(plan: Plan, args: Any) -> Iterator[Problem]:
    yield from launch_mismatches(plan, args)
    if plan.schedule == "double_buffered" and isinstance(getattr(args, "lynx_check", None), int):
        reason = "a plan without flushes, whose gradients are not complete when a step ends"
        todo = "check frames, or a plan for --lynx-schedule flush"
        yield Problem("--lynx-check", reason, "--lynx-check frames, or a plan that flushes", todo)
    schedule, planned = getattr(args, "lynx_schedule", "flush"), plan.schedule.replace("_", "-")
    if schedule != planned:
        todo = "launch with the plan's, or make a plan for this one"
        yield Problem("--lynx-schedule", str(schedule), f"{planned}, as the plan has it", todo)
    yield from refused(args, ["plan"], attrgetter("option"), ARGUMENTS)


def against_two_versions(args: Any) -> Iterator[Problem]:
    flag, stages = "--lynx-schedule double-buffered", args.pipeline_model_parallel_size
    chunks = getattr(args, "virtual_pipeline_model_parallel_size", None) or 1
    if stages == 1:
        yield Problem("--pipeline-model-parallel-size", "1", f"at least 2 with {flag}", f"one stage has no flush, or drop {flag}")
    if chunks > 1:
        todo = f"drop the flags of interleaving, or drop {flag}"
        yield Problem("model chunks of each stage", str(chunks), f"1 with {flag}", todo)
    microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    if microbatches < stages:
        sizes = f"--global-batch-size {args.global_batch_size} / {args.micro_batch_size} / {args.data_parallel_size}"
        needed = f"at least {stages}, one for each stage, with {flag}"
        todo = f"enlarge --global-batch-size, or drop {flag}"
        yield Problem("micro-batches per update", f"{microbatches} ({sizes})", needed, todo)

    def name(limit: Limit) -> str:  # Megatron resolves an argument into the setting of another name
        return limit.setting if limit.argument and hasattr(args, limit.setting) else limit.argument

    yield from refused(args, ["two versions"], attrgetter("option"), ARGUMENTS, name=name)
