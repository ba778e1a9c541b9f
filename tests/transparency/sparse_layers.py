"""On the ranks of a test: layers with Megatron's own sparse attention, in its torch code without fused kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from tests.transparency.trials import Outcome, Trial, compare_with_stock, train


@contextmanager
def sparse_attention(job: Job) -> Iterator[None]:
    """The testbed's models have it, with the sizes of the job."""
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as theirs

    from megatron_lynx.testbed import tiny_models

    usual, spec = tiny_models.latent_fields, theirs.get_transformer_block_with_experimental_attention_variant_spec
    tracker().clear()
    with (
        patch.object(tiny_models, "latent_fields", lambda job: usual(job) | sparse_fields(job)),
        patch.object(tiny_models, "block_spec", lambda config, vp_stage, te: spec(config, vp_stage)),
    ):
        yield


def sparse_fields(job: Job) -> dict[str, Any]:
    assert job.model.latent is not None
    sparse = job.model.latent.sparse
    assert sparse is not None
    return {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": sparse.heads,
        "dsa_indexer_head_dim": sparse.head_size,
        "dsa_indexer_topk": sparse.keys,
        "dsa_indexer_loss_coeff": 0.0 if sparse.loss == "none" else 0.5,
        "dsa_indexer_use_sparse_loss": sparse.loss == "selected",
        "dsa_indexer_rotate_activation": False,  # needs a compiled library
        "dsa_indexer_topk_freq": 2 if sparse.shared else 1,
        "moe_grouped_gemm": False,
        "cp_comm_type": "allgather",
    }


def tracker() -> dict[str, Any]:
    """Where Megatron sums up what it logs of indexers, sized by the first model that does."""
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper

    summed: dict[str, Any] = DSAIndexerLossLoggingHelper.tracker
    return summed


def logged_losses(rank: int, job: Job, plans: list[Plan]) -> list[list[float]]:
    """The logged losses of indexers by layer, of stock and under each plan."""
    from tests.instruments.groups import initialise

    initialise(job)
    logged = []
    with sparse_attention(job):
        for plan in (None, *plans):
            tracker().clear()
            train(job, plan, Trial())
            logged.append(tracker()["values"].tolist())
    return logged


def compare(rank: int, job: Job, plans: list[Plan], trial: Trial) -> list[Outcome]:
    """As `trials.compare_with_stock`, with sparse attention."""
    with sparse_attention(job):
        return compare_with_stock(rank, job, plans, trial)
