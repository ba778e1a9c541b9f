"""What one rank does where micro-batches differ in length and number: stock, and the same under a plan."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from tests.transparency.trials import live_bytes


@dataclass(frozen=True)
class Step:
    """The micro-batches of one step, by the lengths of their sequences: `((16,), (5, 3))` is two, the second packs two."""

    lengths: tuple[tuple[int, ...], ...]
    packed: bool = False


@dataclass
class Seen:
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: list[Any] = field(default_factory=list)
    met: list[tuple[int, int, float]] = field(default_factory=list)
    """Of each step: micro-batches, rows of this rank, squares of lengths."""
    live_bytes: list[int] = field(default_factory=list)
    graphs: int = 0
    """The most recorded graphs of one half."""
    frames_left: int = 0
    said: list[str] = field(default_factory=list)


def changing_lengths(rank: int, job: Job, plan: Plan, steps: Sequence[Step], model: dict[str, Any]) -> tuple[list[str], Seen]:
    """What differs from stock, and what the planned training showed."""
    from tests.instruments.groups import initialise

    initialise(job)
    gc.collect()
    stock, planned = (_train(job, each, steps, model) for each in (None, plan))
    assert stock.tensors.keys() == planned.tensors.keys()
    differing = [name for name, tensor in stock.tensors.items() if not torch.equal(tensor, planned.tensors[name])]
    return differing, replace(planned, tensors={})


def _train(job: Job, plan: Plan | None, steps: Sequence[Step], model: dict[str, Any]) -> Seen:
    from contextlib import ExitStack

    from megatron_lynx.apply.installation import install
    from megatron_lynx.figures import InputSeen
    from megatron_lynx.testbed.groups import seed_random_numbers
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    seen = Seen()
    seed_random_numbers(7)
    training = Training(job, build_model(job, variable_seq_lengths=True, moe_token_dispatcher_type="alltoall", **model))
    seed_random_numbers(7)
    with ExitStack() as stack:
        said = stack.enter_context(_listening())
        installation = None if plan is None else stack.enter_context(install(training.chunks, plan))
        for number, step in enumerate(steps):
            if installation is not None:
                installation.engine.met = InputSeen()
            losses = _step(training, job, step, number)
            seen.tensors.update({f"step {number}: loss {i}": loss.detach().clone() for i, loss in enumerate(losses)})
            seen.tensors.update({f"step {number}: {name}": grad for name, grad in training.gradients().items()})
            del losses
            if installation is not None:
                seen.counts.append(installation.engine.take_counts())
                met = installation.engine.met
                seen.met.append((met.microbatches, met.tokens, float(met.squares)))
                seen.graphs = installation.engine._graphs.cache_info().currsize // (2 * job.model.layers // job.parallel.pipeline)
            seen.live_bytes.append(live_bytes() - sum(tensor.nbytes for tensor in seen.tensors.values()))
    seen.said = said
    seen.frames_left = sum(type(thing).__name__ in ("Frame", "OffloadedStorage", "Lease") for thing in gc.get_objects())
    return seen


def _listening() -> Any:
    import logging
    from contextlib import contextmanager

    @contextmanager
    def listening() -> Iterator[list[str]]:
        said: list[str] = []

        class Kept(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                said.append(record.getMessage())

        logger, kept = logging.getLogger("megatron_lynx"), Kept(logging.WARNING)
        logger.addHandler(kept)
        try:
            yield said
        finally:
            logger.removeHandler(kept)

    return listening()


def _step(training: Any, job: Job, step: Step, number: int) -> list[torch.Tensor]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_lynx.testbed.training import mean_loss

    for chunk in training.chunks:
        chunk.zero_grad(set_to_none=True)
    batches = [batch_of(job, lengths, number * 100 + at, packed=step.packed) for at, lengths in enumerate(step.lengths)]

    def forward_step(waiting: Iterator[dict[str, Any]], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        return model(**next(waiting), attention_mask=None), mean_loss

    losses: list[torch.Tensor] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in training.chunks] if len(training.chunks) > 1 else iter(batches),
        model=list(training.chunks),
        num_microbatches=len(batches),
        seq_length=job.model.seq,
        micro_batch_size=1 if step.packed else job.batch.micro,
        forward_only=False,
    )
    training.optimizer.step()
    return losses


def batch_of(job: Job, lengths: tuple[int, ...], seed: int, *, packed: bool) -> dict[str, Any]:
    """Arguments of a GPTModel: random text of these lengths, packed or as one sequence of their sum; of each sequence what this
    rank has."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    shape = (1 if packed else job.batch.micro, sum(lengths) + 1)
    text = torch.randint(job.model.vocab, shape, generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(shape[0], -1)
    whole = {"input_ids": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous(), "position_ids": positions}
    if (ranks := job.parallel.context) > 1:
        mine, cuts = parallel_state.get_context_parallel_rank(), list(lengths) if packed else [sum(lengths)]
        slices = {name: [each.chunk(2 * ranks, 1) for each in given.split(cuts, 1)] for name, given in whole.items()}
        whole = {
            name: torch.cat([each[at] for each in of_each for at in (mine, 2 * ranks - 1 - mine)], 1)
            for name, of_each in slices.items()
        }
    if not packed:
        return whole
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    kinds = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": max(lengths), "max_seqlen_kv": max(lengths)}
    return {**whole, "packed_seq_params": PackedSeqParams(qkv_format="thd", **kinds)}
