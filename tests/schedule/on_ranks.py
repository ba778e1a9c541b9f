"""What real megatron-core runs, recorded on ranks. Megatron is imported inside, after the rank's stand-in is in place."""

from __future__ import annotations

from typing import Any

from megatron_lynx.config.job import Job


def recorded_order(rank: int, job: Job, chunks: int = 1, group_size: int | None = None) -> tuple[int, str]:
    """(stage, the order in which one step ran forwards and backwards, as text)."""
    from megatron.core import parallel_state

    from megatron_lynx.testbed.training import Training, initialise, seed_random_numbers, synthetic_batches

    initialise(job)
    if chunks == 1:
        from megatron_lynx.testbed.tiny_models import build_model

        training = Training(job, build_model(job), optimizer=None)
        with Recorder() as recorder:
            training.step(synthetic_batches(job))
        return parallel_state.get_pipeline_model_parallel_rank(), recorder.text
    parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks)
    try:
        seed_random_numbers(7)
        models = virtual_stages(job, chunks, group_size)
        with Recorder() as recorder:
            run_interleaved(job, models)
        return parallel_state.get_pipeline_model_parallel_rank(), recorder.text
    finally:
        parallel_state.set_virtual_pipeline_model_parallel_world_size(None)


def virtual_stages(job: Job, chunks: int, group_size: int | None) -> list[Any]:
    """Megatron's GPT model cut into virtual stages. Outputs are not freed: gloo would still be sending them."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megatron_lynx.testbed.tiny_models import transformer_config

    config = transformer_config(
        job,
        virtual_pipeline_model_parallel_size=chunks,
        microbatch_group_size_per_vp_stage=group_size or job.parallel.pipeline,
        overlap_p2p_comm=True,
        batch_p2p_comm=False,
        deallocate_pipeline_outputs=False,
    )
    return [
        GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=job.model.vocab,
            max_sequence_length=job.model.seq,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
            share_embeddings_and_output_weights=False,
            vp_stage=chunk,
        )
        for chunk in range(chunks)
    ]


def run_interleaved(job: Job, models: list[Any]) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_lynx.testbed.training import forward_step, synthetic_batches

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(synthetic_batches(job)) for _ in models],
        model=models,
        num_microbatches=job.microbatches,
        seq_length=job.model.seq,
        micro_batch_size=job.batch.micro,
    )


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
