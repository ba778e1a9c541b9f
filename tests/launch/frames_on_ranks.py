"""What tests of `--lynx-check frames` run on ranks: a training whose frames are checked, and in which something may go wrong."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan


@dataclass
class Trial:
    """One training."""

    plan: Plan
    steps: int = 3
    """Of those that are checked. There are more in the training."""
    fault: str = ""
    """`mask`, `reload`, `autocast` or `gather`: see below."""
    restless: bool = False
    """Whether backward gives other gradients each time."""


@dataclass
class Checked:
    """What one rank saw of it."""

    status: int | None = None
    said: str = ""
    summary: str | None = None
    draws: list[Any] = field(default_factory=list)
    """Kinds of frames that were drawn, of how many."""
    observer: Any = None
    """What is left at the engine."""
    kept: int = 0
    """Tensors that live behind the last step."""
    gradients: dict[str, Tensor] = field(default_factory=dict)


def check_frames(rank: int, job: Job, trials: list[Trial]) -> list[Checked]:
    from tests.instruments.groups import initialise

    initialise(job)
    return [_checked(job, trial) for trial in trials]


def _checked(job: Job, trial: Trial) -> Checked:
    import gc

    from megatron_lynx.apply.installation import install
    from megatron_lynx.errors import LynxError
    from megatron_lynx.launch.frames import FrameCheck
    from megatron_lynx.testbed.groups import seed_random_numbers
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    seed_random_numbers(7)
    training = Training(job, build_model(job), optimizer=None)
    seed_random_numbers(7)
    checked, said = Checked(), io.StringIO()
    check = FrameCheck(trial.steps, trial.plan, seed=3)
    with install(training.chunks, trial.plan) as installation, FAULTS[trial.fault](installation):
        try:
            with contextlib.redirect_stderr(said):
                for step in range(max(4, trial.steps + 1)):
                    _step(job, training, trial, step, check, installation)
        except SystemExit as end:
            checked.status = int(end.code or 0)
        except LynxError as error:  # of this rank alone, in the middle of a step: a launch says it, and ends the process
            checked.status = error.exit_status
            said.write(str(error))
        checked.observer = installation.engine.observer
        checked.draws.append(check._draw.kinds)
        checked.gradients = {} if trial.restless else training.gradients()
        if checked.status is None:
            checked.summary = check.summary()
    gc.collect()
    checked.kept = sum(type(thing).__name__ == "Drawn" for thing in gc.get_objects())
    checked.said = said.getvalue()
    return checked


def _step(job: Job, training: Any, trial: Trial, number: int, check: Any, installation: Any) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_lynx.testbed.training import forward_step, synthetic_batches

    def forward(batches: Any, model: Any) -> Any:
        output, loss = forward_step(batches, model)
        if trial.restless:
            output.register_hook(lambda gradient: gradient * (1 + torch.rand(1, generator=torch.Generator())))
        return output, loss

    for chunk in training.chunks:
        chunk.zero_grad(set_to_none=True)
    batches = list(synthetic_batches(job, number))
    schedule = check.around(get_forward_backward_func(), None, installation)
    schedule(
        forward_step_func=forward,
        data_iterator=[iter(batches) for _ in training.chunks] if job.chunks > 1 else iter(batches),
        model=list(training.chunks),
        num_microbatches=job.microbatches,
        seq_length=job.model.seq,
        micro_batch_size=job.batch.micro,
        forward_only=False,
    )


# --- faults, each in what a recomputation or a reload is promised ---------------------------------------------------------------


@contextmanager
def _nothing(installation: Any) -> Iterator[None]:
    yield


@contextmanager
def _another_mask(installation: Any) -> Iterator[None]:
    """Recomputations of layer 2 draw what comes next instead of what their forward drew."""
    from megatron_lynx.runtime.recompute import Recomputer

    run = Recomputer.run

    def running(self: Any) -> Any:
        if self.frame.policy.layer == 2 and self.frame.random is not None:
            self.frame.random = self._random.capture()
        return run(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Recomputer, "run", running)
        yield


@contextmanager
def _no_reload(installation: Any) -> Iterator[None]:
    """What is reloaded is used before it has arrived: the memory still holds what was there before."""
    from megatron_lynx.runtime.offload import OffloadedStorage

    fresh = OffloadedStorage._fresh
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(OffloadedStorage, "_fresh", lambda storage: fresh(storage).fill_(0x11))
        patched.setattr(installation.engine.offloader.back, "move", lambda target, source: None)
        yield


@contextmanager
def _autocast(installation: Any) -> Iterator[None]:
    """Recomputations run under an autocast that their forward did not run under."""
    from megatron_lynx.runtime.surroundings import Autocast

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Autocast, "as_captured", lambda self, captured: torch.autocast("cpu", dtype=torch.bfloat16))
        yield


@contextmanager
def _used_again(installation: Any) -> Iterator[None]:
    """Memory of gathered inputs of layer 2 is used again between the recomputation and the weight gradient."""
    from megatron_lynx.runtime.recompute import Recomputations

    recompute = Recomputations.recompute

    def recomputing(self: Any, frame: Any, *where: Any) -> None:
        recompute(self, frame, *where)
        if frame.gathering is not None and not frame.wanted and frame.policy.layer == 2:
            frame.gathering[1].wait()
            frame.gathering[0].zero_()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Recomputations, "recompute", recomputing)
        yield


FAULTS = {"": _nothing, "gather": _used_again, "mask": _another_mask, "reload": _no_reload, "autocast": _autocast}
