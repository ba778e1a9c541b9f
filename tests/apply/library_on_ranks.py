"""The loop of docs/launching.md, on ranks: without plans and with them."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan

from ..transparency.lengths import batch_of
from .on_ranks import Attributes

PAGE = Path(__file__).parents[2] / "docs" / "launching.md"
PHASES = (((16,), (8,), (12,)), ((4,), (16,)), ((12,), (8,), (8,), (4,)))


def both(rank: int, job: Job, plans: tuple[Plan, Plan]) -> dict[str, Any]:
    """What differs between the loop under plans and without, and what is left of the plans behind it."""
    from tests.instruments.groups import initialise

    initialise(job)
    gc.collect()
    stock, _ = _run(job, (None, None))
    planned, left = _run(job, plans)
    assert stock.keys() == planned.keys()
    return {"differing": [name for name in stock if not torch.equal(stock[name], planned[name])], **left}


def _run(job: Job, plans: tuple[Plan | None, Plan | None]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    from megatron_lynx.testbed.groups import seed_random_numbers
    from megatron_lynx.testbed.training import mean_loss
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    page = block_of(PAGE, 0)
    fields = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
    models = [Training(job, build_model(job, seed=seed, **fields)) for seed in (1, 2)]
    seed_random_numbers(7)

    def forward_step(waiting: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        return model(**next(waiting), attention_mask=None), mean_loss

    phases = [[batch_of(job, of, 10 * at + i, packed=False) for i, of in enumerate(phase)] for at, phase in enumerate(PHASES)]
    page["train"](*(each.chunks for each in models), _optimizers(models), phases[:1], (None, None), forward_step, job.model.seq)
    before = Attributes(torch.nn.ModuleList([chunk for each in models for chunk in each.chunks]))
    losses = page["train"](*(each.chunks for each in models), _optimizers(models), phases, plans, forward_step, job.model.seq)
    gc.collect()
    left = {
        "changed": [name for name in before.changed() if not name.endswith(".current_microbatch")],  # Megatron counts there
        "frames": sum(type(thing).__name__ in ("Frame", "OffloadedStorage", "Lease") for thing in gc.get_objects()),
    }
    seen = {f"loss {at}": loss for at, loss in enumerate(losses)}
    for number, each in enumerate(models):
        seen |= {f"model {number}: {name}": parameter.detach().clone() for name, parameter in each.parameters().items()}
    return seen, left


def _optimizers(models: list[Any]) -> list[Any]:
    return [each.optimizer for each in models]


def as_slime_calls(rank: int, job: Job, path: str) -> list[str]:
    """Two steps, the hook called before each with slime's arguments, behind a pass without gradients: what differs from stock."""
    page = block_of(PAGE, 1)
    return _differing(job, path, lambda training, number: page["before_train_step"](None, 0, number, training.chunks, None, None))


def as_verl_calls(rank: int, job: Job, path: str) -> list[str]:
    """The same through an engine that is called as verl's is."""
    page = block_of(PAGE, 2)

    class Engine:
        def __init__(self, training: Any) -> None:
            self.module = training.chunks

        def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> None:
            """Where verl's engine runs its schedule; the test's step does that right behind."""

    page["under_a_plan"](Engine)
    engines: dict[int, Engine] = {}

    def before(training: Any, number: int) -> None:
        engine = engines.setdefault(id(training), Engine(training))
        engine.forward_backward_batch(None, None, forward_only=True)
        assert number or not hasattr(engine, "lynx"), "log-probabilities install nothing"
        engine.forward_backward_batch(None, None)
        assert engine.lynx.hooks

    return _differing(job, path, before)


def as_swift_calls(rank: int, job: Job, path: str) -> list[str]:
    """The same through a callback of ms-swift, which sends between stages in the group of all ranks."""
    from unittest.mock import patch

    from megatron.core.pipeline_parallel import p2p_communication

    from megatron_lynx.apply.releases import fingerprint, present_release

    page, original = block_of(PAGE, 3), p2p_communication._batched_p2p_ops
    site = "megatron.core.pipeline_parallel.p2p_communication:_batched_p2p_ops"
    trainers: list[Any] = []

    class Callback:
        def __init__(self, trainer: Any) -> None:
            self.trainer = trainer

    def before(training: Any, number: int) -> None:
        if not trainers:
            trainers.append(page["under_a_plan"](Callback)(SimpleNamespace(wrapped_models=training.chunks)))
            trainers[0].on_train_begin()

    def in_the_group_of_all(**arguments: Any) -> Any:
        return original(**{**arguments, "group": None})

    known = patch.dict(present_release().also)
    with patch.object(p2p_communication, "_batched_p2p_ops", in_the_group_of_all), known as also:
        also[site] = fingerprint(site)  # as that of ms-swift's own is recorded
        return _differing(job, path, before)


def as_nemo_calls(rank: int, job: Job, path: str) -> list[str]:
    """The same through a worker of NeMo-RL, which trains in `train`."""
    page = block_of(PAGE, 4)
    workers: dict[int, Any] = {}

    class Worker:
        def __init__(self, model: Any) -> None:
            self.model = model

        def train(self, data: Any, loss_fn: Any, *, eval_mode: bool = False) -> str:
            return "trained"

    def before(training: Any, number: int) -> None:
        worker = workers.setdefault(0, page["under_a_plan"](Worker)(training.chunks))
        assert worker.train(None, None, eval_mode=False) == "trained"

    return _differing(job, path, before)


def _differing(job: Job, path: str, before_step: Any) -> list[str]:
    import os
    from unittest.mock import patch

    from megatron_lynx.apply.hook import MARK

    from .on_ranks import one_step, trained

    stock, planned = trained(job), None
    expected = [[*one_step(stock, number), *stock.gradients().values()] for number in range(2)]
    planned, found = trained(job), []
    with patch.dict(os.environ, LYNX_PLAN=path):
        for number in range(2):
            before_step(planned, number)
            found.append([*one_step(planned, number), *planned.gradients().values()])
    layer = planned.chunks[0].decoder.layers[0]
    held = [] if getattr(layer._forward_mlp, MARK, False) else ["nothing is installed"]
    _remove(layer)
    return held + [
        f"step {at}: {i}"
        for at, both in enumerate(zip(expected, found, strict=True))
        for i, (one, other) in enumerate(zip(*both, strict=True))
        if not torch.equal(one, other)
    ]


def _remove(layer: Any) -> None:
    """The page's hooks last as long as their process; these ranks live on."""
    from megatron_lynx.apply.installation import Installation

    for thing in gc.get_objects():
        if isinstance(thing, Installation) and thing.hooks:
            thing.remove()


def block_of(page: Path, number: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(compile(page.read_text().split("```python\n")[1 + number].split("```")[0], str(page), "exec"), found)
    return found


def twice(rank: int, job: Job, plan: Plan) -> list[str]:
    """What is said where one model is to have two plans, and where installations end in the order in which they began."""
    from megatron_lynx.apply.installation import install
    from megatron_lynx.errors import HookRefused

    from .on_ranks import trained

    first, second = trained(job), trained(job)
    said = []
    with install(first.chunks, plan) as outer:
        for action in (lambda: install(first.chunks, plan), lambda: _out_of_order(outer, second, plan)):
            try:
                action()
            except HookRefused as refused:
                said.append(str(refused))
    return said


def _out_of_order(outer: Any, second: Any, plan: Plan) -> None:
    from megatron_lynx.apply.installation import install

    with install(second.chunks, plan):
        outer.remove()


def beside_another(rank: int, job: Job, plan: Plan, **model: Any) -> list[list[bool]]:
    """Whether the engine of a model under a plan is busy in each forward of a step: of that model, and of one without a plan."""
    from megatron_lynx.apply.installation import install
    from megatron_lynx.apply.live_run import unwrapped

    from .on_ranks import one_step, trained

    first, second = trained(job, **model), trained(job, **model)
    busy: list[list[bool]] = []
    with install(first.chunks, plan) as installation:
        for training in (first, second):
            of_model: list[bool] = []
            busy.append(of_model)
            embedding = unwrapped(training.chunks[0])[1].embedding
            hook = embedding.register_forward_hook(lambda *_, of=of_model: of.append(installation.engine.busy))
            one_step(training)
            hook.remove()
    return busy
