"""What frames hold after each task of a window, counted on a rank by their storages; and what is there more when something has
begun ahead, counted by the allocator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan

Held = tuple[int, str, str, int]
"""(layer, half, the item before which its recomputation stopped, at which it stopped ahead, "gather" or "", bytes that were not
there before)."""


def held_after_tasks(rank: int, job: Job, plan: Plan) -> list[Held]:
    """In the order in which the tasks of one step ran."""
    from megatron_lynx.apply.installation import install
    from megatron_lynx.testbed.groups import seed_random_numbers
    from megatron_lynx.testbed.training import synthetic_batches
    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    initialise(job)
    seed_random_numbers(7)
    training = Training(job, build_model(job))
    held: list[Held] = []
    with install(training.chunks, plan), _counting(held):
        training.step(synthetic_batches(job, 0))
    return held


def bytes_begun(rank: int, job: Job, plan: Plan, model: dict[str, Any]) -> list[int]:
    """What every beginning ahead of the second step adds to the bytes that are there, in the order of the step. The first two
    experts get all tokens."""
    from megatron_lynx.apply.installation import install
    from megatron_lynx.testbed.groups import seed_random_numbers
    from megatron_lynx.testbed.training import synthetic_batches
    from tests.instruments.cpu_total import CpuTotal
    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training
    from tests.transparency.trials import starve

    initialise(job)
    seed_random_numbers(7)
    total, added = CpuTotal(), list[int]()
    training = Training(job, build_model(job, **model), optimizer=None)
    starve(training.chunks)
    batches = synthetic_batches(job)
    with install(training.chunks, plan) as installation:
        training.step(batches)
        engine = installation.engine
        engine.reach = _measuring(engine.reach, added, total)  # type: ignore[method-assign]
        training.step(batches)
    return added


def _measuring(reach: Callable[..., Any], added: list[int], total: Any) -> Callable[..., Any]:
    from megatron_lynx.measure.memory import wait_for_other_threads

    def measured(through: Any, reached: Any, *of: Any) -> None:
        tasks = through.at(reached.at, reached.place)
        if not any(task.do == "begin" and task.half != reached.place for task in tasks):
            reach(through, reached, *of)
            return
        wait_for_other_threads()
        before = total.bytes
        reach(through, reached, *of)
        wait_for_other_threads()
        added.append(total.bytes - before)

    return measured


@contextmanager
def _counting(held: list[Held]) -> Iterator[None]:
    from megatron_lynx.runtime.engine import Engine
    from megatron_lynx.runtime.recompute import Recomputations

    before: dict[int, tuple[Any, set[int]]] = {}

    def was_there(frame: Any) -> set[int]:
        return before.setdefault(id(frame), (frame, _storages(frame).keys() | _of(frame.inputs).keys()))[1]

    def note(frame: Any, half: Any, stopped: str) -> None:
        held.append((*half, stopped, sum(size for at, size in _storages(frame).items() if at not in was_there(frame))))

    def counting(run: Callable[..., Any]) -> Callable[..., Any]:
        def counted(self: Any, frame: Any, task: Any, reached: Any) -> None:
            was_there(frame)
            run(self, frame, task, reached)
            if reached.at != "enter":
                note(frame, task.half, "gather" if task.do == "gather" else task.item or "")

        return counted

    begin = Recomputations.begin

    def begun(self: Any, frame: Any, item: str) -> None:
        was_there(frame)
        begin(self, frame, item)
        note(frame, frame.key, item)

    names = "_recompute", "_gather"
    recompute, gather = (mock.patch.object(Engine, name, counting(getattr(Engine, name))) for name in names)
    with recompute, gather, mock.patch.object(Recomputations, "begin", begun):
        yield
    before.clear()


def _storages(frame: Any) -> dict[int, int]:
    """All that it holds beside its inputs."""
    gathering = frame.gathering[0] if frame.gathering is not None else None
    return _of((list(frame.results.values()), [memo.outputs for memo in frame.memos.values()], gathering))


def _of(nest: Any) -> dict[int, int]:
    import torch

    from megatron_lynx.runtime.saved import tensors_in

    tensors = (tensor for tensor in tensors_in(nest) if not isinstance(tensor, torch.nn.Parameter))
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
