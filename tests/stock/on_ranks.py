"""What the tests of stock's settings run on ranks. Megatron is imported inside, after the rank's stand-in is in place."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

from megatron_lynx.config.job import Job

SIZE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2}


def accepts(rank: int, fields: list[dict[str, Any]]) -> list[str | None]:
    """Why TransformerConfig refuses these fields; None where it accepts them."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    found: list[str | None] = []
    for each in fields:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                TransformerConfig(**{**SIZE, **each})
        except (AssertionError, ValueError, TypeError) as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append(None)
    return found


def hold(rank: int, jobs: list[Job], fields: list[dict[str, Any]], model: dict[str, Any] | None = None) -> list[list[int]]:
    """What the forward of the last micro-batch leaves behind, by job and setting. Gradients are stock none's in every bit.

    A dispatcher of experts holds on to the probabilities of its last pass, and so to the graph behind them, in which a checkpoint
    of `moe` has its input and that input's gradient. A forward lets go of them; one without a graph runs before what is counted.

    `model`: fields that all settings have."""
    import torch

    from megatron_lynx.measure.memory import remember_blocks
    from megatron_lynx.testbed.candidates import Candidate
    from megatron_lynx.testbed.comparison import Subject, same_bits
    from tests.instruments.groups import initialise
    from tests.instruments.stock_offloading import stock_offloads
    from tests.instruments.training import evaluated

    initialise(jobs[0])
    remember_blocks()
    counted = []
    for job in jobs:
        none = Subject(job, Candidate("none", model or {}))
        reference = none.repeatable_step()
        counted.append([])
        for each in fields:
            offloads = "offload_modules" in each
            with stock_offloads() if offloads else nullcontext():
                subject = Subject(job, Candidate("one", (model or {}) | each), none)
                for _ in range(2 if offloads else 1):
                    assert same_bits(subject.repeatable_step(), reference), each
                if job.model.experts is not None:
                    with torch.no_grad():
                        evaluated(subject.chunks, subject.job, subject.batches)
                counted[-1].append(subject.counted_step().marks[-1].bytes)
    return counted


def copies(rank: int, job: Job, fields: dict[str, Any]) -> str:
    """What stock Megatron copies in one step, in order: o out; b back ahead of its use; d back on demand."""
    from unittest.mock import patch

    from megatron.core.pipeline_parallel.fine_grained_activation_offload import ChunkOffloadHandler

    from megatron_lynx.testbed.candidates import Candidate
    from megatron_lynx.testbed.comparison import Subject
    from tests.instruments.groups import initialise
    from tests.instruments.stock_offloading import stock_offloads

    seen: list[str] = []
    ahead: list[bool] = []

    def noted(method: Any, letter: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            seen.append(letter())
            return method(*args, **named)

        return call

    def bulk(method: Any) -> Any:
        def call(*args: Any) -> Any:
            ahead.append(True)
            method(*args)
            ahead.pop()

        return call

    handler = ChunkOffloadHandler
    initialise(job)
    with (
        patch.object(handler, "offload", noted(handler.offload, lambda: "o")),
        patch.object(handler, "reload", noted(handler.reload, lambda: "b" if ahead else "d")),
        patch.object(handler, "bulk_reload_group", bulk(handler.bulk_reload_group)),
        stock_offloads(),
    ):
        subject = Subject(job, Candidate("one", fields))
        subject.step()
        seen.clear()
        subject.step()
    return "".join(seen)
