"""Hybrid models on the ranks of a test: a job's layers as Megatron's HybridModel has them, a layer for each half.

Their ranks have `tests.instruments.mamba`: kernels of Mamba's mixer need a GPU.
"""

from __future__ import annotations

from contextlib import ExitStack
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import torch

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from megatron_lynx.profiler.profile import SavedTensor
from tests.transparency.opaque_layers import delta_kernels, with_delta_nets
from tests.transparency.trials import Outcome, Trial, compare_with_stock

SYMBOLS = {"attention": "*", "mamba": "M", "gated_delta_net": "G", "mlp": "-", "experts": "E", "no_attention": "", "no_mlp": ""}


def pattern_of(job: Job) -> str:
    """One symbol a half that is there, stage by stage."""
    places = ((stage, chunk) for chunk in range(job.chunks) for stage in range(job.parallel.pipeline))
    segments = ([job.model.sections(layer) for layer in job.layers_of(*place)] for place in places)
    return "|".join("".join(SYMBOLS[half.name] for kind in segment for half in kind) for segment in segments)


def one_by_one(spec: Any, job: Job) -> Any:
    """A stack's specification with experts one by one."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    spec = deepcopy(spec)
    if job.model.experts is not None:
        experts = get_moe_module_spec(use_te=True, num_experts=job.model.experts.count, moe_grouped_gemm=False)
        spec.submodules.moe_layer.submodules.mlp = experts
    return spec


def build_hybrid(job: Job, *, seed: int = 1234, pattern: str | None = None, **overrides: Any) -> list[torch.nn.Module]:
    """What `tiny_models.build_model` makes of a job, as a hybrid model."""
    from megatron.core import parallel_state
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from megatron_lynx.testbed.tiny_models import transformer_config
    from tests.instruments.tiny_models import draw_weights

    pattern = pattern or pattern_of(job)
    symbols = pattern.replace("|", "")
    having = {"moe_layer_freq": [int(each == "E") for each in symbols]} if "E" in symbols else {}
    sizes = next((dict(opaque.mamba) for opaque in job.model.opaque if opaque.mamba is not None), {})
    flags = {"heads": "num_heads", "size": "head_dim", "groups": "num_groups", "state": "state_dim"}
    mamba = {f"mamba_{flags[name]}": value for name, value in sizes.items()}
    config = transformer_config(job, **{"num_layers": len(symbols), **having, **mamba, **overrides})
    with_delta_nets(config, job)
    chunks = []
    for stage in range(job.chunks):
        at = {"ignore_virtual": False, "vp_stage": stage if job.chunks > 1 else None}
        chunk = HybridModel(
            config=config,
            hybrid_stack_spec=one_by_one(hybrid_stack_spec, job),
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
    from tests.instruments import tiny_models

    with patch.object(tiny_models, "build_model", build_hybrid), delta_kernels():
        return compare_with_stock(rank, job, plans, trial)


def mamba_half(rank: int, job: Job) -> tuple[tuple[SavedTensor, ...], tuple[int, int]]:
    """The blocks that the first layer keeps, and the model's parameters: numbers, and tensors."""
    from megatron_lynx.apply.hooks.sites import places_of
    from megatron_lynx.profiler.measured import blocks_of
    from megatron_lynx.profiler.timing import HalfRun
    from megatron_lynx.testbed.profiling import inner_norms
    from tests.instruments.groups import initialise

    initialise(job)
    [chunk] = build_hybrid(job)
    [layer] = chunk.decoder.layers  # type: ignore[union-attr]
    hidden = torch.randn(job.model.seq, job.batch.micro, job.model.hidden)
    section = job.model.sections(1)[0]
    places = places_of(section, layer, te=True)
    run = HalfRun(section, layer.forward, {}, hidden, places, inner_norms(layer, section))
    sizes = [parameter.numel() for parameter in chunk.parameters()]
    return blocks_of(run)[0], (sum(sizes), len(sizes))


def refused(rank: int, job: Job, plan: Plan, pattern: str, spoil: Any = None) -> str:
    """What installing says of a stack with this pattern, in a run that `spoil` has changed."""
    from megatron_lynx.apply.installation import install
    from megatron_lynx.errors import LynxError
    from tests.instruments.groups import initialise

    initialise(job)
    with ExitStack() as undo:
        if spoil is not None:
            spoil(None, undo)
        try:
            install(build_hybrid(job, pattern=pattern), plan)
        except LynxError as error:
            return str(error)
    return "installed"
