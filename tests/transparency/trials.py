"""What one rank does in a transparency test: train stock, train under a plan, compare every bit. Runs inside `RankPool`."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan


@dataclass
class Trial:
    """How a trial is run; everything has the usual value."""

    steps: int = 2
    training: dict[str, Any] = field(default_factory=dict)
    """Arguments of `testbed.training.Training`."""
    model: dict[str, Any] = field(default_factory=dict)
    """Fields of TransformerConfig."""
    traced: bool = False


@dataclass
class Outcome:
    """What a rank saw."""

    differing: list[str]
    """Losses, gradients and weights that are not equal in every bit, by name and step."""
    counts: list[Any]
    """Per step, `engine.Counts` of the planned run."""
    events: list[dict[str, Any]]
    frames_left: int
    """Frames alive after the last step."""


def compare_with_stock(rank: int, job: Job, plans: list[Plan], trial: Trial) -> list[Outcome]:
    """One outcome per plan."""
    from megatron_lynx.testbed.training import initialise

    initialise(job)
    stock = _train(job, None, trial)
    return [_outcome(stock, _train(job, plan, trial)) for plan in plans]


def _train(job: Job, plan: Plan | None, trial: Trial) -> dict[str, Any]:
    from megatron_lynx.apply import install
    from megatron_lynx.runtime.frame import Frame
    from megatron_lynx.testbed.fused_gradient import stand_in_for_fused_gradient
    from megatron_lynx.testbed.tiny_models import build_model
    from megatron_lynx.testbed.training import Training, seed_random_numbers, synthetic_batches

    with stand_in_for_fused_gradient():
        chunks = build_model(job, **trial.model)
        training = Training(job, chunks, **trial.training)
        seed_random_numbers(7)
        installation = install(training.chunks, plan) if plan is not None else None
        seen: dict[str, torch.Tensor] = {}
        counts, events = [], []
        for step in range(trial.steps):
            if installation is not None and trial.traced:
                installation.engine.trace.start()
            losses = training.step(synthetic_batches(job, step))
            seen.update({f"step {step}: loss {i}": loss.detach().clone() for i, loss in enumerate(losses)})
            seen.update({f"step {step}: {name}": grad for name, grad in training.gradients().items()})
            if installation is not None:
                counts.append(installation.engine.take_counts())
                events = [event.as_dict() for event in installation.engine.trace.stop()]
        seen.update({f"weight {name}": parameter.detach().clone() for name, parameter in training.parameters().items()})
        if installation is not None:
            installation.remove()
    alive = sum(isinstance(thing, Frame) for thing in gc.get_objects())
    return {"seen": seen, "counts": counts, "events": events, "alive": alive}


def _outcome(stock: dict[str, Any], planned: dict[str, Any]) -> Outcome:
    names = stock["seen"].keys() | planned["seen"].keys()
    differing = [name for name in sorted(names) if not _same(stock["seen"].get(name), planned["seen"].get(name))]
    return Outcome(differing, planned["counts"], planned["events"], planned["alive"])


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)
