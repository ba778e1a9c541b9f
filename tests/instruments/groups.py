"""The testbed's groups, for ranks that train many models one after another."""

from __future__ import annotations

import importlib
import importlib.util

from megatron.core import parallel_state

from megatron_lynx.config.job import Job
from megatron_lynx.testbed import groups
from megatron_lynx.testbed.groups import SEED, seed_random_numbers


def initialise(job: Job) -> None:
    """As the testbed's. Groups of an equal layout stay, and nothing of the last model is left in Megatron's global tables."""
    if _has_layout_of(job):
        parallel_state.set_virtual_pipeline_model_parallel_world_size(job.chunks if job.chunks > 1 else None)
        seed_random_numbers(SEED)
    else:
        groups.initialise(job)
    _forget_what_routers_logged()


def _has_layout_of(job: Job) -> bool:
    if not parallel_state.is_initialized():
        return False
    sizes = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )
    layout = job.parallel
    sharers = parallel_state.get_data_parallel_world_size(with_context_parallel=True, partial_data_parallel=True)
    return (*sizes, sharers) == (
        *(layout.tensor, layout.pipeline, layout.context, layout.expert, layout.expert_tensor_size),
        job.optimizer_sharers,
    )


def _forget_what_routers_logged() -> None:
    """Clear Megatron's global tables of auxiliary and multi-token losses, whose size is that of the first model that logs."""
    if importlib.util.find_spec("megatron.core.transformer.moe.moe_logging") is not None:  # since 0.18
        importlib.import_module("megatron.core.transformer.moe.moe_logging").destroy_moe_metrics_tracker()
    else:
        importlib.import_module("megatron.core.transformer.moe.moe_utils").get_moe_layer_wise_logging_tracker().clear()
    importlib.import_module("megatron.core.transformer.multi_token_prediction").MTPLossLoggingHelper.tracker.clear()
