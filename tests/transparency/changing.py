"""A run whose model changes between steps, on one rank: under a plan, and without one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan


def evaluate(subject: Any) -> None:
    """A pass without gradients, with sequences of another length."""
    chunk = subject.chunks[0]
    tokens = torch.zeros(1, subject.job.model.seq // 2, dtype=torch.long)
    with torch.no_grad():
        chunk(tokens, torch.arange(tokens.size(1)).unsqueeze(0), None)


def drop_nothing(subject: Any) -> None:
    _dropout(subject, 0.0)


def drop_again(subject: Any) -> None:
    _dropout(subject, 0.2)


def drop_in_evaluation_mode(subject: Any) -> None:
    """Gradients on, and every dropout passed over."""
    for chunk in subject.chunks:
        chunk.eval()


def train_again(subject: Any) -> None:
    for chunk in subject.chunks:
        chunk.train()


def new_parameters(subject: Any) -> None:
    """Of the first layer: other objects, so that what a recipe remembered of the old ones would show."""
    first = subject.chunks[0].decoder.layers[0]
    for module in (first.mlp.linear_fc1, first.self_attention.linear_qkv, first.pre_mlp_layernorm):
        generator = torch.Generator().manual_seed(3)
        old = module.weight
        module.weight = torch.nn.Parameter(torch.randn(old.shape, generator=generator, dtype=old.dtype) * 0.1)
        for name, value in vars(old).items():
            setattr(module.weight, name, value)


CHANGES: tuple[Callable[[Any], None], ...] = (
    evaluate,
    drop_nothing,
    drop_again,
    drop_in_evaluation_mode,
    train_again,
    new_parameters,
)


def steps(rank: int, job: Job, plan: Plan | None) -> list[dict[str, torch.Tensor]]:
    """Losses and gradients of two steps before any change, and of two behind each."""
    from megatron_lynx.testbed.candidates import NONE, Candidate
    from megatron_lynx.testbed.comparison import Subject
    from tests.instruments.groups import initialise

    initialise(job)
    subject = Subject(job, NONE if plan is None else Candidate("ours", plan=plan))
    with ExitStack() as stack:
        stack.enter_context(subject.in_force())
        found = [subject.repeatable_step(), subject.repeatable_step()]
        for change in CHANGES:
            change(subject)
            found += [subject.repeatable_step(), subject.repeatable_step()]
    return found


def _dropout(subject: Any, probability: float) -> None:
    for chunk in subject.chunks:
        for layer in chunk.decoder.layers:
            layer.hidden_dropout = probability
            layer.self_attention.core_attention.attention_dropout.p = probability
