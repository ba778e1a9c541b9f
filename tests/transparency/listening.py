"""Forward hooks on a model, under a plan and without one, on one rank."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.modules import module as everywhere

from megatron_lynx.config.job import Job
from megatron_lynx.errors import LynxError
from megatron_lynx.nest import all_in
from megatron_lynx.plan.plan import Plan

from ..apply.on_ranks import one_step, trained

Heard = tuple[str, str, tuple[int, ...]]
"""Which module, which hook, and the bits of the tensors that it was shown."""


def bits(value: Any) -> tuple[int, ...]:
    tensors = [tensor.detach().contiguous() for tensor in all_in(torch.Tensor, value) if tensor.numel()]
    return tuple(zlib.crc32(tensor.flatten().view(torch.uint8).numpy().tobytes()) for tensor in tensors)


def heard(rank: int, job: Job, plans: list[Plan | None]) -> list[list[Heard]]:
    """What hooks on every module of every layer, and hooks for all modules, heard in two steps."""
    return [_heard(job, plan) for plan in plans]


def _heard(job: Job, plan: Plan | None) -> list[Heard]:
    from megatron_lynx.apply.installation import install

    training, calls = trained(job), list[Heard]()
    names = {module: name for name, module in training.chunks[0].decoder.layers.named_modules()}

    def tell(kind: str, module: torch.nn.Module, *given: Any) -> Any:
        if module in names:
            calls.append((names[module], kind, bits(given)))
        return given[-1] if kind == "hands on" else None

    with ExitStack() as undo:
        if plan is not None:
            undo.enter_context(install(training.chunks, plan))
        undo.callback(everywhere.register_module_forward_pre_hook(partial(tell, "before any")).remove)
        undo.callback(everywhere.register_module_forward_hook(partial(tell, "behind any")).remove)
        one_step(training)
        for module in names:  # between steps, as Megatron's recorders do it
            module.register_forward_pre_hook(partial(tell, "before"), with_kwargs=True)
            module.register_forward_hook(partial(tell, "behind"), with_kwargs=True)
            module.register_forward_hook(partial(tell, "hands on"), always_call=True)
        one_step(training, 1)
    return calls


def more(module: Any, given: Any, output: Any) -> Any:
    return (output[0] * 2, *output[1:]) if isinstance(output, tuple) else output * 2


def more_in_place(module: Any, given: Any, output: Any) -> None:
    with torch.no_grad():
        (output[0] if isinstance(output, tuple) else output).mul_(2)


def other_inputs(module: Any, given: tuple[Any, ...]) -> Any:
    return (given[0] + 1, *given[1:])


def fails(module: Any, given: Any, output: Any) -> None:
    raise KeyError("a hook of a user's")


def step_with(rank: int, job: Job, plan: Plan, place: str, kind: str, hook: Callable[..., Any]) -> tuple[Any, list[str]]:
    """How a step ends under a plan with a hook at a place of the second layer, and what is not as before afterwards."""
    from megatron_lynx.apply.installation import install

    training, ended = trained(job), None
    one_step(training)
    module = training.chunks[0].decoder.layers[1].get_submodule(place)
    getattr(module, f"register_{kind}")(hook)
    before = _attributes(training)
    with suppress(LynxError, KeyError):
        try:
            with install(training.chunks, plan):
                one_step(training)
        except (LynxError, KeyError) as error:
            ended = error
            raise
    tables = [list(table.values()) for table in (module._forward_hooks, module._forward_pre_hooks)]
    left = [name for name in before.changed() if not name.endswith(".current_microbatch")]  # Megatron's own
    return ended, [*left, *([] if [hook] in tables else ["the hook"])]


def _attributes(training: Any) -> Any:
    from ..apply.on_ranks import Attributes

    return Attributes(torch.nn.ModuleList(training.chunks))


def once(rank: int, job: Job, plan: Plan) -> int:
    """How often a hook is called that removes itself in its first call."""
    from megatron_lynx.apply.installation import install

    training, calls = trained(job), []

    def hook(*given: Any) -> None:
        calls.append(1)
        handle.remove()

    handle = training.chunks[0].decoder.layers[0].mlp.linear_fc1.register_forward_hook(hook)
    with install(training.chunks, plan):
        one_step(training)
    return len(calls)


def traced_routes(rank: int, job: Job, plans: list[Plan | None], folder: Path) -> list[int]:
    """How often Megatron's own tracer of routers is asked for a record in a step. What it makes of memory that nobody has written
    is chance: a record, or none."""
    from megatron.core.transformer.moe.router_trace import RouterTracer

    from megatron_lynx.apply.installation import install

    records = []
    for number, plan in enumerate(plans):
        training = trained(job)
        with ExitStack() as undo:
            undo.enter_context(patch.object(torch.cuda, "is_current_stream_capturing", lambda: False))
            tracer = RouterTracer(str(folder / str(number)), 10, rank, training_mode=True)
            calls = list[int]()
            tracer._record = lambda *given, calls=calls: calls.append(1)
            tracer.register_hooks(training.chunks)
            if plan is not None:
                undo.enter_context(install(training.chunks, plan))
            one_step(training)
            records.append(len(calls))
    return records
