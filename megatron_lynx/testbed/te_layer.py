"""What the measured profiler needs to know of a Transformer Engine layer, and whether its kernels are really installed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

from megatron_lynx.anatomy import Section
from megatron_lynx.config.job import Job
from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.kinds.planning import flops_of
from megatron_lynx.profiler.measured import InnerNorm, TeLayer
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.runtime.saved import nodes_between
from megatron_lynx.testbed.compiled_parts import has_compiled_extension, transformer_engine_can_run


def check_measurable(job: Job) -> None:
    """Raises `ConfigError` for context parallelism and experts, whose exchanges are between more ranks than are measured, for
    FP8, and where a job wants Transformer Engine's layers and there is none. Ranks import from the same path."""
    todo = "plan for a described cluster: seconds and bytes then follow from shapes"
    if job.parallel.context > 1:
        problem = Problem("job: parallel.context", str(job.parallel.context), "1: a layer is measured without its exchange", todo)
        raise ConfigError("layers that exchange keys and values cannot be measured yet", [problem])
    if job.model.latent is not None and not job.model.uses_te:
        problem = Problem(
            "job: model.implementation", "local", "transformer_engine with latent attention, as Megatron has it", todo
        )
        raise ConfigError("these layers cannot be built", [problem])
    if job.model.experts is not None:
        problem = Problem("job: model.experts", f"{job.model.experts.count} experts", "none", todo)
        raise ConfigError("Layers of experts cannot be measured yet.", [problem])
    if job.model.fp8 is not None:
        problem = Problem("job: model.fp8", str(job.model.fp8_recipe), "none", todo)
        raise ConfigError("these layers cannot be measured item by item yet", [problem])
    if job.model.uses_te and not transformer_engine_can_run():
        todo = "install it with its compiled part; without a GPU docs/transformer_engine.md says what a checkout can do"
        problem = Problem("job: model.implementation", job.model.implementation, "Transformer Engine on the import path", todo)
        raise ConfigError("these layers cannot be built here", [problem])


def stood_in_for(job: Job) -> str | None:
    """The part of the job's layers that a stand-in computes on this machine, in words; None where all of it is real."""
    return "Transformer Engine's kernels" if job.model.uses_te and not has_compiled_extension() else None


def te_layer(job: Job, layer: Any) -> TeLayer | None:
    """What the profiler needs of a layer, a shard of `job`; None for local ones. Raises `HookRefused` for unknown releases."""
    if not job.model.uses_te:
        return None
    norms = {half: inner_norms(layer, section) for half, section in job.model.halves.items()}
    return TeLayer(norms, flops_of(LayerShape.of(job)), job.model.fp8 is not None)


def fp8_context(job: Job, layer: Any) -> AbstractContextManager[Any]:
    """The context in which Megatron's block runs its layers in FP8 or FP4."""
    if job.model.fp8 is None:
        return nullcontext()
    if job.model.fp8.recipe == "nvfp4":
        from megatron.core.fp4_utils import get_fp4_context

        return get_fp4_context(layer.config)  # type: ignore[no-any-return]
    from megatron.core.fp8_utils import get_fp8_context

    return get_fp8_context(layer.config)  # type: ignore[no-any-return]


def inner_norms(layer: Any, section: Section) -> dict[str, InnerNorm]:
    """The norms that linears of a half make inside of themselves, by linear."""
    linears = {item: attrgetter(item.path)(layer) for item in section.items if item.is_linear}
    normed = {item: linear for item, linear in linears.items() if hasattr(linear, "layer_norm_weight")}
    return {item.name: _inner_norm(layer.config, linear, item.norm_inside or section.norm) for item, linear in normed.items()}


def _inner_norm(config: Any, linear: Any, norm: str) -> InnerNorm:
    from megatron.core.extensions.transformer_engine import TENorm

    from megatron_lynx.apply.transformer_engine.norm import norm_inside

    inside = norm_inside(linear, norm)
    alone = TENorm(config, hidden_size=linear.layer_norm_weight.numel(), eps=config.layernorm_epsilon)
    return InnerNorm(norm, inside.run, lambda outputs, arguments: inside.saved(nodes_between(outputs, arguments)), alone)
