"""Hybrid models on the ranks of a test: a job's GPT as Megatron's HybridModel has it, two layers for each of the GPT's."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from tests.transparency.trials import Outcome, Trial, compare_with_stock


def pattern_of(job: Job) -> str:
    """One symbol a layer, stage by stage."""
    return "|".join("*-" * layers for layers in job.partition)


def build_hybrid(job: Job, *, seed: int = 1234, pattern: str | None = None, **overrides: Any) -> list[torch.nn.Module]:
    """What `testbed.tiny_models.build_model` makes of a job, as a hybrid model."""
    from megatron.core import parallel_state
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from megatron_lynx.testbed.tiny_models import transformer_config
    from megatron_lynx.testbed.weights import draw_weights

    pattern = pattern or pattern_of(job)
    config = transformer_config(job, **{"num_layers": len(pattern.replace("|", "")), **overrides})
    chunks = []
    for stage in range(job.chunks):
        at = {"ignore_virtual": False, "vp_stage": stage if job.chunks > 1 else None}
        chunk = HybridModel(
            config=config,
            hybrid_stack_spec=hybrid_stack_spec,
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


def refused(rank: int, job: Job, plan: Plan, pattern: str) -> str:
    """What installing says of a stack with this pattern."""
    from megatron_lynx.apply import install
    from megatron_lynx.errors import LynxError
    from megatron_lynx.testbed.groups import initialise

    initialise(job)
    try:
        install(build_hybrid(job, pattern=pattern), plan)
    except LynxError as error:
        return str(error)
    return "installed"
