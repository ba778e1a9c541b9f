"""What every stage of a real interleaved schedule with overlapped exchanges posts and waits for: Megatron's own function, stage
by stage, with passes that do nothing and a communicator that only notes. `run_through` plays the notes of all stages together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

Operation = Literal["send_next", "recv_prev", "send_prev", "recv_next"]


class Event(NamedTuple):
    """A pass, an exchange that is posted, or a wait for one of its messages."""

    kind: Literal["pass", "post", "wait"]
    exchange: int = -1
    operations: tuple[Operation, ...] = ()


class _Work(NamedTuple):
    notes: list[Event]
    event: Event

    def wait(self) -> None:
        self.notes.append(self.event)


class _Communicator:
    def __init__(self, stage: int, pipeline: int, chunks: int) -> None:
        self.pp_group = SimpleNamespace(rank=lambda: stage, size=lambda: pipeline)
        self.notes: list[Event] = []
        self.config: Any = None
        self.virtual_pipeline_model_parallel_size = chunks
        self._posted = 0

    def recv_forward(self, shape: Any, is_first_stage: bool) -> Any:
        return None if is_first_stage else self._exchange(["recv_prev"], overlap=False)[0]

    def recv_backward(self, shape: Any, is_last_stage: bool) -> Any:
        return None if is_last_stage else self._exchange(["recv_next"], overlap=False)[0]

    def send_forward_recv_forward(
        self, output_tensor: Any, recv_prev: bool, tensor_shape: Any, overlap_p2p_comm: bool = False
    ) -> Any:
        return self._both("send_next", output_tensor, "recv_prev", recv_prev, overlap_p2p_comm)

    def send_backward_recv_backward(
        self, input_tensor_grad: Any, recv_next: bool, tensor_shape: Any, overlap_p2p_comm: bool = False
    ) -> Any:
        return self._both("send_prev", input_tensor_grad, "recv_next", recv_next, overlap_p2p_comm)

    def _both(self, sends: Operation, sent: Any, receives: Operation, received: bool, overlap: bool) -> Any:
        operations = [*([sends] if sent is not None else []), *([receives] if received else [])]
        tensor, works = self._exchange(operations, overlap)
        return (tensor, works) if overlap else tensor

    def _exchange(self, operations: Sequence[Operation], overlap: bool) -> tuple[Any, dict[str, _Work]]:
        works: dict[str, _Work] = {}
        if operations:
            self.notes.append(Event("post", self._posted, tuple(operations)))
            works = {name: _Work(self.notes, Event("wait", self._posted, (name,))) for name in operations}
            self._posted += 1
        if not overlap:
            for work in works.values():
                work.wait()
        return ("a tensor" if any(name.startswith("recv") for name in operations) else None), works


def noted(rank: int, pipeline: int, chunks: int, microbatches: int, group: int) -> list[list[Event]]:
    """By stage. Runs inside `RankPool`, on one rank."""
    return [_noted(stage, pipeline, chunks, microbatches, group) for stage in range(pipeline)]


def _noted(stage: int, pipeline: int, chunks: int, microbatches: int, group: int) -> list[Event]:
    import torch
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.pipeline_parallel import schedules

    communicator = _Communicator(stage, pipeline, chunks)
    config = communicator.config = _config(ModelParallelConfig, pipeline, chunks, group)
    model = [torch.nn.Module() for _ in range(chunks)]
    alone = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    groups = SimpleNamespace(tp=alone, cp=alone, pp=communicator.pp_group, embd=None, pos_embd=None, dp_cp=None)

    def passing(result: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            communicator.notes.append(Event("pass"))
            return result

        return run

    with patch.multiple(
        schedules,
        forward_step=passing(("an output", torch.tensor(0))),
        backward_step=passing("a gradient"),
        is_pp_first_stage=lambda group: group.rank() == 0,
        is_pp_last_stage=lambda group: group.rank() == group.size() - 1,
        get_model_config=lambda chunk: config,
        get_model_type=lambda chunk: None,
        set_current_microbatch=lambda *args: None,
        deallocate_output_tensor=lambda *args: None,
    ):
        schedules.forward_backward_pipelining_with_interleaving(
            forward_step_func=None,
            data_iterator=[None] * chunks,
            model=model,
            num_microbatches=microbatches,
            seq_length=1,
            micro_batch_size=1,
            p2p_communicator=communicator,
            pg_collection=groups,
        )
    return communicator.notes


def _config(kind: Any, pipeline: int, chunks: int, group: int) -> Any:
    import torch

    made = kind(
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=chunks,
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=True,
        batch_p2p_comm=False,
        microbatch_group_size_per_vp_stage=group,
    )
    made.hidden_size = 1
    made.fine_grained_activation_offloading = False
    return made


def run_through(notes: Sequence[Sequence[Event]], in_turns: bool) -> bool:
    """Whether all stages come to their end. `in_turns`: an exchange is posted when the one before it is over."""
    pipeline, at, last = len(notes), [0] * len(notes), [Event("post")] * len(notes)
    waiting: dict[tuple[int, int, str], list[tuple[int, int, str]]] = defaultdict(list)
    over: set[tuple[int, int, str]] = set()
    moved = True
    while moved:
        moved = False
        for stage, events in enumerate(notes):
            while at[stage] < len(events):
                event = events[at[stage]]
                behind = last[stage] if event.kind == "post" and in_turns else event if event.kind == "wait" else Event("pass")
                if any((stage, behind.exchange, name) not in over for name in behind.operations):
                    break
                for name in event.operations if event.kind == "post" else ():
                    _post((stage, event.exchange, name), pipeline, waiting, over)
                last[stage] = event if event.kind == "post" else last[stage]
                at[stage], moved = at[stage] + 1, True
    return all(done == len(events) for done, events in zip(at, notes, strict=True))


def _post(
    message: tuple[int, int, str],
    pipeline: int,
    waiting: dict[tuple[int, int, str], list[tuple[int, int, str]]],
    over: set[tuple[int, int, str]],
) -> None:
    """Messages of one direction between two stages are matched in the order in which they are posted; both sides end then."""
    stage, _, name = message
    other = (stage + (1 if name.endswith("next") else -1)) % pipeline
    counterpart = {"send_next": "recv_prev", "recv_prev": "send_next", "send_prev": "recv_next", "recv_next": "send_prev"}[name]
    theirs = waiting[other, stage, counterpart]
    if theirs:
        over.update((theirs.pop(0), message))
    else:
        waiting[stage, other, name].append(message)
