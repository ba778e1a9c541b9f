"""Hybrid models on the ranks of a test: a job's layers as Megatron's HybridModel has them, a layer for each half.

The kernels of Mamba's mixer need a GPU, so Megatron's Mamba layer has another mixer here: linears of Transformer Engine around a
sum over all tokens before, and dropout, so that a hook inside would show.
"""

from __future__ import annotations

from contextlib import ExitStack
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import torch

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from tests.transparency.trials import Outcome, Trial, compare_with_stock

SYMBOLS = {"attention": "*", "mamba": "M", "mlp": "-", "experts": "E", "no_attention": "", "no_mlp": ""}


def pattern_of(job: Job) -> str:
    """One symbol a half that is there, stage by stage."""
    places = ((stage, chunk) for chunk in range(job.chunks) for stage in range(job.parallel.pipeline))
    segments = ([job.model.sections(layer) for layer in job.layers_of(*place)] for place in places)
    return "|".join("".join(SYMBOLS[half.name] for kind in segment for half in kind) for segment in segments)


def mixing(spec: Any, job: Job) -> Any:
    """A stack's specification with the mixer below in Mamba layers, and experts one by one."""
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TERowParallelLinear
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer.spec_utils import ModuleSpec

    class Mixer(torch.nn.Module):
        def __init__(self, config: Any, d_model: int, pg_collection: Any, **_: Any) -> None:
            super().__init__()
            both = {"config": config, "bias": False, "is_expert": False, "tp_group": pg_collection.tp}
            init = config.init_method
            self.in_proj = TELayerNormColumnParallelLinear(
                d_model, 2 * d_model, gather_output=False, skip_bias_add=False, init_method=init, **both
            )
            self.out_proj = TERowParallelLinear(
                d_model, d_model, input_is_parallel=True, skip_bias_add=True, init_method=init, **both
            )

        def forward(self, hidden_states: torch.Tensor, **_: Any) -> Any:
            value, gate = self.in_proj(hidden_states)[0].chunk(2, dim=-1)
            mixed = torch.cumsum(value * torch.sigmoid(gate), dim=0)
            with get_cuda_rng_tracker().fork():
                mixed = torch.nn.functional.dropout(mixed, 0.1, training=self.training)
            return self.out_proj(mixed)

    spec = deepcopy(spec)
    spec.submodules.mamba_layer.submodules.mixer = ModuleSpec(module=Mixer)
    if job.model.experts is not None:
        experts = get_moe_module_spec(use_te=True, num_experts=job.model.experts.count, moe_grouped_gemm=False)
        spec.submodules.moe_layer.submodules.mlp = experts
    return spec


def build_hybrid(job: Job, *, seed: int = 1234, pattern: str | None = None, **overrides: Any) -> list[torch.nn.Module]:
    """What `testbed.tiny_models.build_model` makes of a job, as a hybrid model."""
    from megatron.core import parallel_state
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from megatron_lynx.testbed.tiny_models import draw_weights, transformer_config

    pattern = pattern or pattern_of(job)
    symbols = pattern.replace("|", "")
    having = {"moe_layer_freq": [int(each == "E") for each in symbols]} if "E" in symbols else {}
    config = transformer_config(job, **{"num_layers": len(symbols), **having, **overrides})
    chunks = []
    for stage in range(job.chunks):
        at = {"ignore_virtual": False, "vp_stage": stage if job.chunks > 1 else None}
        chunk = HybridModel(
            config=config,
            hybrid_stack_spec=mixing(hybrid_stack_spec, job),
            vocab_size=job.model.vocab,
            max_sequence_length=job.model.seq,
            hybrid_layer_pattern=pattern,
            pre_process=parallel_state.is_pipeline_first_stage(**at),
            post_process=parallel_state.is_pipeline_last_stage(**at),
            share_embeddings_and_output_weights=job.model.tied_embeddings,
            position_embedding_type="rope" if job.model.position == "rope" else "learned_absolute",
            vp_stage=at["vp_stage"],
        )
        draw_weights(chunk, seed)
        chunks.append(chunk)
    return chunks


def compare_hybrid(rank: int, job: Job, plans: list[Plan], trial: Trial) -> list[Outcome]:
    """As `trials.compare_with_stock`, with hybrid models."""
    import megatron_lynx.testbed.tiny_models as tiny_models

    with patch.object(tiny_models, "build_model", build_hybrid):
        return compare_with_stock(rank, job, plans, trial)


def refused(rank: int, job: Job, plan: Plan, pattern: str, spoil: Any = None) -> str:
    """What installing says of a stack with this pattern, in a run that `spoil` has changed."""
    from megatron_lynx.apply.installation import install
    from megatron_lynx.errors import LynxError
    from megatron_lynx.testbed.groups import initialise

    initialise(job)
    with ExitStack() as undo:
        if spoil is not None:
            spoil(None, undo)
        try:
            install(build_hybrid(job, pattern=pattern), plan)
        except LynxError as error:
            return str(error)
    return "installed"
