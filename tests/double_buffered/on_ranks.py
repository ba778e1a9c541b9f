"""What runs on the ranks. Megatron is imported inside, after the rank's stand-in is in place."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_lynx.config.job import Job

from ..testbed.on_ranks import Run, same


def stock_and_interpreted(rank: int, job: Job, how: dict[str, Any], setting: dict[str, Any]) -> tuple[Run, Run]:
    """Two steps of Megatron's 1F1B, and two of the interpreter given 1F1B's order; everything else equal.

    `how`: arguments of Training, and `align`: only the first stage starts reducing gradients during backward.
    """
    from tests.instruments.groups import initialise

    initialise(job)
    return one_f_one_b(job, how, setting, interpreted=False), one_f_one_b(job, how, setting, interpreted=True)


def one_f_one_b(job: Job, how: dict[str, Any], setting: dict[str, Any], interpreted: bool) -> Run:
    from megatron.core import parallel_state
    from megatron.core.utils import get_model_config

    from megatron_lynx.double_buffered.interpreter import Interpreter
    from megatron_lynx.schedule.flushes import order
    from megatron_lynx.testbed.groups import seed_random_numbers
    from megatron_lynx.testbed.training import forward_step, synthetic_batches
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    training = Training(job, build_model(job, **setting), **{key: value for key, value in how.items() if key != "align"})
    if how.get("align"):
        get_model_config(training.chunks[0]).grad_sync_func = training.chunks[0].start_grad_sync
    interpreter = Interpreter(
        training.chunks[0], microbatches=job.microbatches, seq_length=job.model.seq, micro_batch_size=job.batch.micro
    )
    actions = order(job.parallel.pipeline, parallel_state.get_pipeline_model_parallel_rank(), job.microbatches)
    seed_random_numbers(7)
    run = Run()
    for step in range(2):
        batches = synthetic_batches(job, step)
        if interpreted:
            clear_gradients(training)
            run.losses += interpreter.run(actions, forward_step, iter(batches))
            assert interpreter.in_flight == ()
            training.optimizer.step()
        else:
            run.losses += training.step(batches)
        run.gradients.append(training.gradients())
        run.parameters.append(weights(training))
    return run


def clear_gradients(training: Any) -> None:
    """As Megatron's training does before each step."""
    for chunk in training.chunks:
        if hasattr(chunk, "zero_grad_buffer"):
            chunk.zero_grad_buffer()
        chunk.zero_grad(set_to_none=True)


def weights(training: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in training.parameters().items()}


@dataclass
class Trained(Run):
    """A run, and what the optimizer's step returned."""

    steps: list[Any] = field(default_factory=list)


def trained_twice(rank: int, job: Job, how: dict[str, Any], batches: int = 4) -> tuple[Trained, Trained]:
    """Some batches under the independent reference, and without flushes.

    `how`: arguments of Training; `optimizer_config`: fields of Megatron's; `spoilt`: batches whose loss is infinite;
    `defer_updates`: with a second gradient buffer; `model`: fields of TransformerConfig.
    """
    from megatron_lynx.testbed.groups import seed_random_numbers
    from tests.instruments.groups import initialise

    initialise(job)
    runs = Trained(), Trained()
    with fused_gradients(how):
        for train, run in zip((reference, double_buffered), runs, strict=True):
            training = build(job, how)
            seed_random_numbers(7)
            train(job, how, training, range(batches), run)
    return runs


def fused_gradients(how: dict[str, Any]) -> AbstractContextManager[Any]:
    """The stand-in for the extension that adds weight gradients up where they lie, if the model wants it."""
    from megatron_lynx.testbed.fusions import stand_in_for_fused_gradient

    return stand_in_for_fused_gradient() if "gradient_accumulation_fusion" in how.get("model", {}) else nullcontext()


def differing(rank: int, job: Job, how: dict[str, Any], batches: int = 4) -> list[str]:
    """What is not equal between the two. (Tensors of other releases do not travel: they are pickled in a way of their own.)"""
    expected, run = trained_twice(rank, job, how, batches)
    assert len(run.parameters) == batches
    assert not same(run.parameters[-1], run.parameters[-2])
    return [name for name in ("losses", "parameters") if not same(vars(expected)[name], vars(run)[name])]


def sent_too_early(rank: int, job: Job, how: dict[str, Any]) -> tuple[int, list[str]]:
    """How many messages were sent, and those that were sent while an earlier one of the same direction was under way."""
    from tests.instruments.posted import WorkListener, listening_to_works

    class Sent(WorkListener):
        def __init__(self) -> None:
            self.count, self.early = 0, list[str]()
            self.under_way: dict[Any, Any] = {}

        def posted(self, work: Any, posted: Any, args: Any) -> None:
            if posted.operation == "send":
                self.early += [f"{posted} behind {other}" for other in self.under_way.values() if other.pair == posted.pair]
                self.under_way[work] = posted
                self.count += 1

        def waits(self, work: Any) -> None:
            self.under_way.pop(work, None)

    sent = Sent()
    with listening_to_works(sent):
        trained_twice(rank, job, how, batches=3)
    return sent.count, [*sent.early, *map(str, sent.under_way.values())]


def reference(job: Job, how: dict[str, Any], training: Any, batches: range, run: Trained) -> None:
    """Megatron's own schedule, a flush per batch: batch j runs on W(j-1), put there by hand, and its update is made to W(j)."""
    from megatron_lynx.testbed.training import run_schedule, synthetic_batches

    versions = [weights(training)]
    for index, batch in enumerate(batches):
        load(training, versions[max(index - 1, 0)])
        clear_gradients(training)
        text = synthetic_batches(job, batch)
        run.losses += run_schedule(training.chunks, job, text, forward_step_func=forward_step_of(how, job))
        run.gradients.append(training.gradients())
        load(training, versions[index])
        run.steps.append(training.optimizer.step())
        versions.append(weights(training))
    run.parameters += versions[1:]


def double_buffered(job: Job, how: dict[str, Any], training: Any, batches: range, run: Trained, pipeline: Any = None) -> None:
    from megatron_lynx.testbed.training import synthetic_batches

    pipeline = pipeline or without_flushes(job, training, how)
    text = (micro_batch for batch in batches for micro_batch in synthetic_batches(job, batch))
    for batch in batches:
        clear_gradients(training)
        run.losses += pipeline.forward_backward(forward_step_of(how, job), text, drains=batch == batches[-1])
        run.gradients.append(training.gradients())
        run.steps.append(pipeline.update())
        run.parameters.append(weights(training))
        for buffer in getattr(training.chunks[0], "bucket_groups", []) and training.chunks[0].buffers:
            buffer.grad_data.fill_(float("nan"))  # an update leaves nothing there that is still needed


def build(job: Job, how: dict[str, Any]) -> Any:
    """A model being trained, by an optimizer of Megatron's that testbed's Training does not offer if `how` has one."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.utils import get_model_config

    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    settings = {key: how[key] for key in how.keys() - {"optimizer_config", "spoilt", "defer_updates", "model"}}
    training = Training(job, build_model(job, **how.get("model", {})), **settings)
    if fields := how.get("optimizer_config"):
        config = get_model_config(training.chunks[0])
        given = {"lr": 0.1, "bf16": job.model.dtype == "bf16", "params_dtype": config.params_dtype, **fields}
        sharded = job.parallel.distributed_optimizer
        training.optimizer = get_megatron_optimizer(OptimizerConfig(**given, use_distributed_optimizer=sharded), training.chunks)
        config.grad_scale_func = training.optimizer.scale_loss
    return training


def forward_step_of(how: dict[str, Any], job: Job) -> Callable[..., Any]:
    """Megatron's `forward_step_func`; the losses of the spoilt batches are infinite; or tokens are counted, some of each text."""
    from megatron_lynx.testbed.training import forward_step, mean_loss, synthetic_batches

    if how.get("model", {}).get("calculate_per_token_loss"):
        return counting_tokens
    if "spoilt" not in how:
        return forward_step
    spoilt = [micro_batch.tokens for batch in how["spoilt"] for micro_batch in synthetic_batches(job, batch)]

    def spoiling(batches: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        output = model(batch.tokens, batch.position_ids, None, labels=batch.labels)
        infinite = any(torch.equal(batch.tokens, tokens) for tokens in spoilt)
        return output, (lambda losses: mean_loss(losses * float("inf"))) if infinite else mean_loss

    return spoiling


def counting_tokens(batches: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    counted = batch.labels % 3 > 0

    def total_loss(losses: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = (losses.float() * counted).sum()
        return total, counted.sum().to(torch.int), total.detach().clone()

    return model(batch.tokens, batch.position_ids, None, labels=batch.labels), total_loss


def without_flushes(job: Job, training: Any, how: dict[str, Any]) -> Any:
    from megatron_lynx.double_buffered.pipeline import DoubleBuffered

    return DoubleBuffered(
        training.chunks,
        training.optimizer,
        microbatches=job.microbatches,
        seq_length=job.model.seq,
        micro_batch_size=job.batch.micro,
        defer_updates=how.get("defer_updates", False),
    )


def load(training: Any, weights: dict[str, torch.Tensor]) -> None:
    for name, parameter in training.parameters().items():
        parameter.data.copy_(weights[name])


def stopped_and_resumed(rank: int, job: Job, how: dict[str, Any]) -> list[Trained]:
    """Twice three batches with an evaluation between: the reference, without flushes, and the second half from what was saved."""
    from megatron_lynx.testbed.groups import seed_random_numbers
    from megatron_lynx.testbed.training import synthetic_batches
    from tests.instruments.groups import initialise

    initialise(job)
    runs = [Trained() for _ in range(3)]
    for run, train in zip(runs, (reference, double_buffered), strict=False):
        training = build(job, how)
        extra = {"pipeline": without_flushes(job, training, how)} if train is double_buffered else {}
        seed_random_numbers(7)
        train(job, how, training, range(3), run, **extra)
        run.evaluation = training.evaluate(synthetic_batches(job, 9))
        saved = deepcopy((training.chunks[0].state_dict(), training.optimizer.state_dict()))
        seed_random_numbers(8)
        train(job, how, training, range(3, 6), run, **extra)
    training = build(job, how)
    training.chunks[0].load_state_dict(saved[0])
    training.optimizer.load_state_dict(saved[1])
    seed_random_numbers(8)
    double_buffered(job, how, training, range(3, 6), runs[2])
    return runs


def hooked(rank: int, job: Job, how: dict[str, Any]) -> tuple[Trained, Trained, list[str]]:
    """The reference, and a loop written for Megatron's schedules under the hooks; what was refused on the way."""
    from megatron_lynx.apply.hook import give_back, put_in_place
    from megatron_lynx.double_buffered.pipeline import claims
    from megatron_lynx.errors import HookRefused
    from megatron_lynx.testbed import training as loop
    from megatron_lynx.testbed.groups import seed_random_numbers
    from megatron_lynx.testbed.training import synthetic_batches
    from tests.instruments.groups import initialise

    initialise(job)
    expected, run, refused = Trained(), Trained(), []
    training = build(job, how)
    seed_random_numbers(7)
    reference(job, how, training, range(3), expected)
    expected.evaluation = training.evaluate(synthetic_batches(job, 9))

    training = build(job, how)
    pipeline = without_flushes(job, training, how)
    original, batch = (loop.get_forward_backward_func, training.optimizer.step), 0
    hooks = put_in_place(list(claims(loop, pipeline, lambda: batch == 2)))
    seed_random_numbers(7)
    text = (micro_batch for batch in range(3) for micro_batch in synthetic_batches(job, batch))
    sizes = {"num_microbatches": job.microbatches, "seq_length": job.model.seq, "micro_batch_size": job.batch.micro}
    for batch in range(3):
        clear_gradients(training)
        run_batch = loop.get_forward_backward_func()
        given = {"forward_step_func": loop.forward_step, "data_iterator": text, "model": training.chunks, "forward_only": False}
        if batch == 1:
            for other in ({"num_microbatches": 1 + job.microbatches}, {"forward_only": True}):
                try:
                    run_batch(**{**given, **sizes, **other})
                except HookRefused as error:
                    refused.append(str(error))
        run.losses += run_batch(**given, **sizes)
        run.steps.append(training.optimizer.step())
        run.parameters.append(weights(training))
    run.evaluation = training.evaluate(synthetic_batches(job, 9))
    give_back(hooks)
    assert (loop.get_forward_backward_func, training.optimizer.step) == original
    return expected, run, refused


def retired(versions: Any) -> list[torch.Tensor]:
    """The bytes that the next update overwrites."""
    return versions.buffers.memory(versions._buffer(versions.newest + 1))


def spoilt_memory(rank: int, job: Job, how: dict[str, Any], too_early: bool = False) -> dict[str, Any]:
    """Three batches; the retired buffer is filled with NaN before it is filled again, or one backward `too_early`.

    Behind every update the process is searched for tensors that were left behind.
    """
    from megatron.core.pipeline_parallel import schedules

    from megatron_lynx.testbed.groups import seed_random_numbers
    from tests.instruments.groups import initialise

    initialise(job)
    run = Trained()
    training = build(job, how)
    pipeline = without_flushes(job, training, how)
    versions, backward_step, backwards, left_behind = pipeline.versions, schedules.backward_step, 0, 0

    def spoil() -> None:
        for memory in retired(versions):
            memory.view(torch.float32).fill_(float("nan"))

    def backward(*args: Any, **kwargs: Any) -> Any:
        nonlocal backwards
        backwards += 1
        if backwards == 2 * job.microbatches:
            spoil()
        return backward_step(*args, **kwargs)

    def update() -> Any:
        nonlocal left_behind
        result = updating()
        left_behind += looking_into(retired(versions))
        if pipeline.gradients is not None:
            left_behind += looking_into(pipeline.gradients.hidden())
        return result

    refill, updating, pipeline.update = versions.refill, pipeline.update, update
    versions.refill = lambda *buffers: (spoil(), refill(*buffers))
    schedules.backward_step = backward if too_early else backward_step
    try:
        seed_random_numbers(7)
        double_buffered(job, how, training, range(3), run, pipeline)
    finally:
        schedules.backward_step = backward_step
    parameters = training.parameters().values()
    return {
        "run": run,
        "left behind": left_behind,
        "parameters": sum(parameter.nbytes for parameter in parameters),
        "second version": versions.buffers.extra_bytes,
        "gradients": sum(parameter.main_grad.nbytes for parameter in parameters),
        "second gradient": pipeline.gradients.buffers.extra_bytes if pipeline.gradients else 0,
    }


def looking_into(buffer: list[torch.Tensor]) -> int:
    """Tensors anywhere in this process that share memory with `buffer`, besides itself."""
    memory = {tensor.untyped_storage().data_ptr() for tensor in buffer}
    own = {id(tensor) for tensor in buffer}
    found = (thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor) and id(thing) not in own)
    return sum(tensor.untyped_storage().data_ptr() in memory for tensor in found)


def refused(rank: int, job: Job, how: dict[str, Any], spoil: Callable[[Any], None]) -> tuple[type, str]:
    """How a run that `spoil` was let at is answered; it is not changed."""
    from megatron_lynx.errors import LynxError
    from tests.instruments.groups import initialise

    initialise(job)
    training = build(job, how)
    undo = spoil(training)
    before = [parameter.data_ptr() for parameter in training.parameters().values()]
    try:
        without_flushes(job, training, how)
    except LynxError as error:
        assert before == [parameter.data_ptr() for parameter in training.parameters().values()]
        return type(error), str(error)
    finally:
        if undo:
            undo()
    raise AssertionError("it was accepted")


def second_chunk(training: Any) -> None:
    training.chunks.append(training.chunks[0])


def overlapped_gather(training: Any) -> None:
    training.chunks[0].ddp_config.overlap_param_gather = True


def experts_and_fp8(training: Any) -> None:
    training.chunks[0].config.num_moe_experts = 4
    training.chunks[0].config.fp8 = "hybrid"


def unknown_optimizer(training: Any) -> None:
    training.optimizer = object()


@dataclass
class Planned:
    """A run without flushes under a plan, against the reference."""

    differing: list[str]
    counts: Any
    busy: bool


def planned(rank: int, job: Job, how: dict[str, Any], plans: list[Any], batches: int = 4) -> list[Planned]:
    """The reference, without a plan, and each plan. The retired buffer is NaN before it is filled again: recomputations read
    neither."""
    from megatron_lynx.apply.installation import install
    from megatron_lynx.testbed.groups import seed_random_numbers
    from tests.instruments.groups import initialise

    initialise(job)
    expected, outcomes = Trained(), []
    with fused_gradients(how):
        seed_random_numbers(7)
        training = build(job, how)
        seed_random_numbers(7)
        reference(job, how, training, range(batches), expected)
        for plan in plans:
            run, training = Trained(), build(job, how)
            pipeline = without_flushes(job, training, how)
            installation = install(training.chunks, plan, without_flushes=pipeline)
            spoil_retired(pipeline.versions)
            seed_random_numbers(7)
            double_buffered(job, how, training, range(batches), run, pipeline)
            differing = [name for name in ("losses", "parameters") if not same(vars(expected)[name], vars(run)[name])]
            outcomes.append(Planned(differing, installation.engine.take_counts(), installation.engine.busy))
            installation.remove()
    return outcomes


def spoil_retired(versions: Any) -> None:
    """Nobody may read it any more."""
    refill = versions.refill

    def spoiling(*buffers: int) -> None:
        for memory in retired(versions):
            memory.view(torch.float32).fill_(float("nan"))
        refill(*buffers)

    versions.refill = spoiling


def installed_differently(rank: int, job: Job, plans: dict[str, Any]) -> dict[str, str]:
    """How plans are refused: of another schedule, on either; while micro-batches are in flight."""
    from megatron_lynx.apply.installation import install
    from megatron_lynx.errors import LynxError
    from megatron_lynx.testbed.training import forward_step, synthetic_batches
    from tests.instruments.groups import initialise

    initialise(job)
    said = {}
    training = build(job, {})

    def attempt(name: str, plan: str, pipeline: Any) -> None:
        try:
            install(training.chunks, plans[plan], without_flushes=pipeline)
        except LynxError as error:
            said[name] = str(error)

    attempt("its plan, flushing", "ours", None)
    pipeline = without_flushes(job, training, {})
    attempt("stock's plan", "stock's", pipeline)
    text = (micro_batch for batch in range(2) for micro_batch in synthetic_batches(job, batch))
    for batch in range(2):
        clear_gradients(training)
        pipeline.forward_backward(forward_step, text, drains=batch == 1)
        pipeline.update()
        if batch == 0:
            attempt("in flight", "ours", pipeline)
    return said


def plan_installed(training: Any) -> Callable[[], None]:
    from megatron.core.pipeline_parallel import schedules

    from megatron_lynx.apply.hook import Claim, give_back, put_in_place

    hooks = put_in_place([Claim(schedules, "forward_step", lambda original: lambda *a, **k: original(*a, **k), "a test")])
    return lambda: give_back(hooks)


def plan_comes_later(rank: int, job: Job) -> str:
    """How the next batch is answered."""
    from megatron_lynx.errors import HookRefused
    from tests.instruments.groups import initialise

    initialise(job)
    training = build(job, {})
    pipeline = without_flushes(job, training, {})
    undo = plan_installed(training)
    try:
        pipeline.forward_backward(lambda *arguments: None, iter(()))
    except HookRefused as error:
        return str(error)
    finally:
        undo()
    raise AssertionError("it was accepted")


def nothing(training: Any) -> None:
    pass
