"""One layout on its ranks: stock Megatron, and the same under a plan.

[1] stock twice, then the plan, all with collectives that are long, and wrong until they are over: losses, gradients and weights
    must be equal in every bit
[2] beside it frames are checked as `--lynx-check frames` checks them: that judges where stock differs from itself
[3] the last step is traced: what the plan puts behind collectives must have run behind them
[4] stock and the plan once more, with collectives as they are: seconds and bytes of a step, and every bit again
"""

from __future__ import annotations

import gc
import io
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from megatron_lynx.runtime.device import device_for
from scripts.gpu_check.late import Late
from scripts.gpu_check.overlap import ENOUGH, Interval, hidden_share, recomputations_behind_collectives
from scripts.gpu_check.part import Answer
from tests.transparency.fp8_state import reset_fp8

STEPS = 3 if torch.cuda.is_available() else 2
"""Of a training: kernels may be chosen in the first, the others are timed. Without a GPU seconds say nothing."""
SEED = 7


@dataclass(frozen=True)
class Setting:
    """What is trained, and how."""

    job: Job
    plan: Plan
    delay_s: float
    """What each collective of the tensor-parallel group takes at least, in [1]."""
    training: dict[str, Any] = field(default_factory=dict)
    """Arguments of `tests.instruments.training.Training`."""
    model: dict[str, Any] = field(default_factory=dict)
    """Fields of Megatron's TransformerConfig."""
    compared: str = "everything"
    """Or `weights`: with the distributed optimizer a rank's own shard of gradients is reduced, the rest is not."""
    synchronised: bool = False
    """Whether ranks wait for their devices and for each other behind each step, as Megatron does when it logs every step."""
    alone: bool = False
    """Whether this rank is the only one of its job that exists; collectives are emulated."""
    shared: bool = False
    """Whether ranks share a GPU. Their contexts take turns, so what ran behind what is noted, and not judged."""


@dataclass
class _Run:
    """What a training showed."""

    keep: Callable[[torch.Tensor], torch.Tensor]
    """Copies what is to be compared: to the host, where the bytes of the device are counted."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    step_s: list[float] = field(default_factory=list)
    bytes: int | None = None
    hidden: int = 0
    """Recomputations that ran inside windows."""
    filled: int = 0
    """Deferred weight gradients that ran in waits."""
    offloaded_bytes: int = 0
    recomputations: list[Interval] = field(default_factory=list)
    collectives: list[Interval] = field(default_factory=list)
    frames: str = ""
    """What is wrong with frames."""
    checked: str = ""
    """What was checked of them, where nothing is wrong."""


def trial(rank: int, setting: Setting) -> Answer:
    """Runs inside `RankPool`."""
    from megatron_lynx.testbed.groups import join_alone
    from tests.instruments.groups import initialise

    if setting.alone:
        join_alone(setting.job.gpus)
    initialise(setting.job)
    with repeatable():
        stock, again = _trained(setting, None, late=True), _trained(setting, None, late=True)
        ours = _trained(setting, setting.plan, late=True)
        restless, differing = _differing(stock, again), _differing(stock, ours)
        for run in (stock, again, ours):
            run.tensors.clear()  # or they would count as memory of what is timed
    with repeatable(timed=True):
        timed = _trained(setting, None, late=False), _trained(setting, setting.plan, late=False)
    share = hidden_share(ours.recomputations, ours.collectives)
    noted = setting.shared and setting.job.parallel.tensor > 1
    behind = f"of the recomputations in windows {share:.0%} ran behind their collectives" if noted else ""
    notes = [note for note in (ours.checked, behind) if note]
    if restless:
        notes.append(f"stock differs from itself ({restless[0]} and {len(restless) - 1} more), so only frames are judged")
    return Answer(
        wrong=(
            *_wrong_bits(differing, restless),
            *_wrong_bits([] if setting.alone else _differing(*timed), restless, " with collectives as they are"),
            *filter(None, [ours.frames]),
            *_wrong_windows(setting, ours, share),
        ),
        notes=tuple(notes),
        stock_s=min(timed[0].step_s[1:]),
        ours_s=min(timed[1].step_s[1:]),
        stock_bytes=timed[0].bytes,
        ours_bytes=timed[1].bytes,
        figures={
            "recomputations in windows": ours.hidden,
            "share hidden": share,
            "weight gradients in waits": ours.filled,
            "bytes offloaded": ours.offloaded_bytes,
        },
    )


def _wrong_bits(differing: list[str], restless: list[str], where: str = "") -> Iterator[str]:
    if differing and not restless:
        yield f"{len(differing)} values are not stock's in every bit{where}, the first of them {differing[0]}"


def _wrong_windows(setting: Setting, ours: _Run, share: float) -> Iterator[str]:
    if any(entry.offload for entry in setting.plan.stages) and not _most_of_all_ranks(ours.offloaded_bytes, setting):
        yield "nothing was copied to the host on any rank"
    if any(entry.defers for entry in setting.plan.stages) and not _most_of_all_ranks(ours.filled, setting):
        yield "no weight gradient ran in a wait on any rank"
    if setting.plan.parallel.expert > 1 and not _most_of_all_ranks(ours.hidden, setting):
        yield "no recomputation ran while tokens travelled, on any rank"
    if setting.job.parallel.tensor == 1:
        return
    if not ours.recomputations:
        yield "no recomputation ran in a window of a collective"
    elif share < ENOUGH and not setting.shared:
        yield f"of recomputations in windows {share:.0%} ran behind their collectives, needed {ENOUGH:.0%}: overlap is missing"


def _most_of_all_ranks(figure: int, setting: Setting) -> int:
    if setting.alone:
        return figure
    most = torch.tensor([figure], dtype=torch.int64, device="cuda")
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most.item())


def _trained(setting: Setting, plan: Plan | None, *, late: bool) -> _Run:
    """A training from the same weights and seeds, under a plan or without."""
    from megatron.core import parallel_state

    from megatron_lynx.apply.installation import install
    from megatron_lynx.testbed.fusions import stand_in_for_fused_gradient
    from megatron_lynx.testbed.groups import seed_random_numbers
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    gc.collect()  # the training before leaves it its model, which would count as memory of this one
    run = _Run(torch.clone if late else _on_the_host)
    with ExitStack() as stack:
        stack.enter_context(stand_in_for_fused_gradient())
        reset_fp8()
        seed_random_numbers(SEED)
        training = Training(setting.job, build_model(setting.job, **setting.model), **setting.training)
        seed_random_numbers(SEED)
        device = device_for(next(training.chunks[0].parameters()).device)
        slow = Late(parallel_state.get_tensor_model_parallel_group(), device, setting.delay_s)
        if late and setting.job.parallel.tensor > 1:
            stack.enter_context(slow.in_force())
        installation = stack.enter_context(install(training.chunks, plan)) if plan is not None else None
        check = _frame_check(setting) if plan is not None and late and not setting.alone else None
        try:
            for number in range(STEPS):
                _step(setting, training, installation, number, run, check, slow)
        except _Differs as differs:
            run.frames = str(differs)
        else:
            run.checked = (check.summary() or "") if check is not None else ""
    run.tensors |= {f"weight {name}": run.keep(value.detach()) for name, value in training.parameters().items()}
    return run


def _on_the_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True)


class _Differs(Exception):
    """What a check of frames said."""


def _frame_check(setting: Setting) -> Any:
    from megatron_lynx.launch.frames import FrameCheck

    return FrameCheck(STEPS, setting.plan, seed=SEED)


def _step(setting: Setting, training: Any, installation: Any, number: int, run: _Run, check: Any, slow: Late) -> None:
    from megatron_lynx.testbed.training import synthetic_batches

    batches = synthetic_batches(setting.job, number)
    last = number == STEPS - 1
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    _wait(setting.alone)
    if last:
        slow.start()
    if installation is not None and last:
        installation.engine.trace.start()
    begin_s = time.perf_counter()
    losses = _checked(training, batches, check, installation) if check is not None else training.step(batches)
    _wait(setting.alone, everybody=setting.synchronised)
    run.step_s.append(time.perf_counter() - begin_s)
    if torch.cuda.is_available():
        run.bytes = max(run.bytes or 0, torch.cuda.max_memory_allocated())
    if installation is not None:
        counts = installation.engine.take_counts()
        run.hidden, run.filled = run.hidden + counts.in_windows, run.filled + counts.filled
        run.offloaded_bytes += counts.offloaded_bytes
        if last:
            run.recomputations, run.collectives = (
                recomputations_behind_collectives(installation.engine.trace.stop()),
                slow.intervals(),
            )
    if setting.compared == "everything":
        run.tensors |= {f"step {number}: loss {index}": run.keep(loss.detach()) for index, loss in enumerate(losses)}
        run.tensors |= {f"step {number}: gradient of {name}": run.keep(value) for name, value in training.gradients().items()}


def _checked(training: Any, batches: Any, check: Any, installation: Any) -> Any:
    """A step whose frames are checked. Where one differs all ranks get here, and end the training."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            step = check.around(lambda *, model: training.step(batches), training.optimizer, installation)
            return step(model=training.chunks)
    except SystemExit:
        raise _Differs(" ".join(said.getvalue().split()) or "a frame differs, as rank 0 says") from None


def _wait(alone: bool, everybody: bool = True) -> None:
    """As Megatron's timers wait: for the other ranks, for the device, for the other ranks."""
    if everybody and not alone:
        dist.barrier()
    torch.cuda.synchronize()
    if everybody and not alone:
        dist.barrier()


@contextmanager
def repeatable(timed: bool = False) -> Iterator[None]:
    """Kernels that compute the same bits twice, where there are such. Memory that nobody has written holds NaN, unless that
    would count in what is timed."""
    from torch.utils import deterministic

    before = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = not timed  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        deterministic.fill_uninitialized_memory = before  # type: ignore[attr-defined]


def _differing(one: _Run, other: _Run) -> list[str]:
    names = one.tensors.keys() | other.tensors.keys()
    return [name for name in sorted(names) if not _same(one.tensors.get(name), other.tensors.get(name))]


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)
