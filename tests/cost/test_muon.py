"""Muon: which parameters are whose, against Megatron's own layer-wise optimizer; bytes and seconds by hand."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from megatron_lynx.config.job import Job
from megatron_lynx.config.parallel import Optimizer
from megatron_lynx.cost.muon import filled_numbers, fullest, matrices, newton_schulz_s
from megatron_lynx.cost.parameters import stage_parameters
from megatron_lynx.cost.update import update_s
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.testbed.ranks import RankPool
from tests.config.jobs import catalogued_job
from tests.cost.on_ranks import matrices_of_muon
from tests.stock.parts import stage_parts
from tests.te_releases import folder_of, python_path
from tests.tiny_jobs import tiny_job

SHARERS = [1, 2, 4, 64]


def with_muon(job: Job, **fields: Any) -> Job:
    return job.model_copy(update={"optimizer": Optimizer(muon_steps=5, **fields)})


def llama(steps: int = 5, *, distributed: bool = True, **optimizer: Any) -> Job:
    layout = {"tensor": 2, "sequence_parallel": True, "distributed_optimizer": distributed}
    fields = {"muon_steps": steps, **optimizer}
    return catalogued_job("llama3-8b", "h100-80g", gpus=8, batch=8, parallel=layout, optimizer=fields)


@pytest.mark.parametrize("like", ["gpt", "llama"])
def test_matrices_are_those_of_megatrons_layer_wise_optimizer(like: Any) -> None:
    """Of 0.19: it gives whole matrices to ranks, and every rank's part of a buffer is as large as the fullest one's, filled up to
    64 numbers. Where there are fewer matrices than ranks, that is the largest matrix. GPT's learned positions are one, which does
    not divide evenly."""
    with RankPool(1, env={"PYTHONPATH": python_path(folder_of("MEGATRON_CORE", "0.19", "megatron/core"))}) as pool:
        [(numbers, layouts)] = pool.run(matrices_of_muon, tiny_job(like), SHARERS)
    for ranks, (most, buffer) in zip(SHARERS, layouts, strict=True):
        job = with_muon(tiny_job(like, replicas=ranks, distributed_optimizer=True))
        found = list(matrices(job, 0, split=False))
        assert sum(each.times * each.numbers for each in found) == numbers
        uneven = job.model.seq * job.model.hidden if like == "gpt" else 0
        assert 0 <= most - fullest(job, found, lambda each: each.numbers) <= uneven
        assert 0 <= buffer - numbers - filled_numbers(job, 0) <= (64 + uneven) * ranks


def test_matrices_remember_a_number_less() -> None:
    """Llama 3 8B on two ranks of four replicas."""
    adam, muon, adaptive = (stage_parts(each, 0) for each in (llama(0), llama(), llama(matrix_states=2)))
    parameters = stage_parameters(llama(), 0)
    assert adam.states.optimizer - muon.states.optimizer == pytest.approx(4 * parameters.matrices / 4, abs=8)
    assert adaptive.states == adam.states
    alone = stage_parts(llama(distributed=False), 0)
    assert alone.states.optimizer == 12 * parameters.total - 4 * parameters.matrices


def test_an_update_takes_the_products_of_newton_and_schulz() -> None:
    """Of each rank a quarter of the matrices, halved by tensor parallelism; alone it has them all."""
    shapes = [(2048, 4096), (512, 4096), (512, 4096), (2048, 4096), (4096, 14336), (4096, 7168)]
    matmul = llama().cluster.matmul
    assert matmul is not None
    one_s = sum(2 * matmul.gemm_s(2 * small**2 * large, "bf16") + matmul.gemm_s(2 * small**3, "bf16") for small, large in shapes)
    assert newton_schulz_s(llama(), 0) == pytest.approx(5 * 32 * one_s / 4)
    assert newton_schulz_s(llama(10, distributed=False), 0) == pytest.approx(10 * 32 * one_s)
    profile = analytic_profile(llama())
    assert update_s(llama(), profile) - update_s(llama(0), profile) == pytest.approx(5 * 32 * one_s / 4)


def test_muon_beside_a_precision_aware_adam_is_refused() -> None:
    with pytest.raises(ValidationError, match="needs muon_steps 0, found 5"):
        llama(precision_aware=True)
