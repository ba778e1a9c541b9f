"""What real megatron-core runs, recorded on ranks. Megatron is imported inside, after the rank's stand-in is in place."""

from __future__ import annotations

from typing import Any

from megatron_lynx.config.job import Job


def recorded_order(rank: int, job: Job) -> tuple[int, str]:
    """(stage, the order in which one step ran forwards and backwards, as text)."""
    from megatron.core import parallel_state

    from megatron_lynx.testbed.training import synthetic_batches
    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    initialise(job)
    training = Training(job, build_model(job), optimizer=None)
    with Recorder() as recorder:
        training.step(synthetic_batches(job))
    return parallel_state.get_pipeline_model_parallel_rank(), recorder.text


class Recorder:
    """Wraps the two functions that every one of Megatron's schedules calls, and notes what they are called with.

    A backward is told neither micro-batch nor chunk: its output tensor says which forward it belongs to.
    """

    def __enter__(self) -> Recorder:
        from megatron.core.pipeline_parallel import schedules

        self._schedules = schedules
        self._originals = schedules.forward_step, schedules.backward_step
        self._models: list[Any] = []
        self._counts: list[int] = []
        self._outputs: list[tuple[Any, str]] = []
        self._actions: list[str] = []
        schedules.forward_step, schedules.backward_step = self._forward, self._backward
        return self

    def __exit__(self, *_: object) -> None:
        self._schedules.forward_step, self._schedules.backward_step = self._originals

    @property
    def text(self) -> str:
        return " ".join(self._actions)

    def _forward(self, forward_step_func: Any, batches: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        micro_batch, chunk = kwargs["current_microbatch"], model.vp_stage or 0
        result = self._originals[0](forward_step_func, batches, model, *args, **kwargs)
        self._outputs.append((_tensor(result[0]), f"{micro_batch}B{chunk}"))
        self._actions.append(f"{micro_batch}F{chunk}")
        return result

    def _backward(self, input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        own = _tensor(output_tensor)
        self._actions.append(next(text for output, text in self._outputs if output is own))
        return self._originals[1](input_tensor, output_tensor, *args, **kwargs)


def _tensor(output: Any) -> Any:
    return output[0] if isinstance(output, list) else output
