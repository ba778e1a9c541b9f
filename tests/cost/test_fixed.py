"""What an update costs however few parameters there are: counted by hand."""

from __future__ import annotations

import pytest

from megatron_lynx.cost.parameters import ParameterTensors, parameter_tensors, stage_parameters
from megatron_lynx.cost.update import Fixed, fixed_of, fixed_s, shared_embedding_s, update_s
from megatron_lynx.profiler.analytic import analytic_profile
from tests.config.jobs import catalogued_job
from tests.tiny_jobs import tiny_job

ALONE = {"tensor": 1, "pipeline": 1}
SHARDED = {"tensor": 2, "sequence_parallel": True, "distributed_optimizer": True}


def counted(job):
    return fixed_of(job, 0, stage_parameters(job, 0), buckets=1)


def test_a_single_rank_runs_kernels_and_waits_six_times():
    """Llama 7B on one GPU: 6.7e9 parameters are 322 launches of 21e6, of the norm, of clipping, of Adam and of the copy."""
    job = catalogued_job("llama-7b", "h100-80g", gpus=1, batch=1, parallel=ALONE)
    launches = -(-stage_parameters(job, 0).total // (320 * 65_536))
    assert counted(job) == Fixed(kernels=1 + 4 + 3 + 4 * launches, waits=2 + 3 + 1, collectives_s=0.0)


def test_a_shard_is_stepped_in_fewer_launches_and_copied_tensor_by_tensor():
    """64 GPUs: 32 ranks share 3.4e9 parameters; each owns a 32nd of 4 x 32 + 2 matrices and 65 norms."""
    job = catalogued_job("llama-7b", "h100-80g", gpus=64, batch=64, parallel=SHARDED)
    assert parameter_tensors(job, 0) == ParameterTensors(weights=130, vectors=65)
    owned, launches = 195 // 32 + 1, -(-stage_parameters(job, 0).total // 32 // (320 * 65_536))
    reduced, gathered, norms, numbers = 20e-6, 20e-6, 20e-6, (20 + 20 + 20 + 20) * 1e-6
    fixed = counted(job)
    assert fixed.kernels == 1 + 5 + (1 + 65) + 3 + 3 * launches + owned
    assert fixed.collectives_s == pytest.approx(reduced + gathered + norms + numbers)


def test_sixteen_bit_gradients_are_copied_first():
    parallel = {"tensor": 1, "distributed_optimizer": True}
    jobs = [
        catalogued_job("llama-7b", "h100-80g", gpus=8, batch=8, parallel=parallel, optimizer={"gradients": gradients})
        for gradients in ("fp32", "bf16")
    ]
    plain, copied = (counted(job).kernels for job in jobs)
    assert copied - plain == 195 // 8 + 1


def test_a_shared_embedding_is_exchanged_between_the_ends():
    """A 22B GPT at t = 8: 51,200 x 6,144 / 8 gradients of 4 bytes over one NIC."""
    parallel = {"tensor": 8, "pipeline": 2}
    job = catalogued_job("gpt-22b", "a100-80g", gpus=16, batch=16, parallel=parallel)
    shared, own = (
        job.model_copy(update={"model": job.model.model_copy(update={"tied_embeddings": tied})}) for tied in (True, False)
    )
    words = job.model.vocab * job.model.hidden // 8
    nic = job.cluster.nic
    assert shared_embedding_s(shared) == pytest.approx(20e-6 + 4 * words / nic.byte_per_s)
    assert shared_embedding_s(own) == 0
    alone = shared.model_copy(update={"gpus": 8, "parallel": shared.parallel.model_copy(update={"pipeline": 1})})
    assert shared_embedding_s(alone) == 0


def test_a_step_has_these_seconds_and_the_testbed_none():
    job = catalogued_job("llama-7b", "h100-80g", gpus=1, batch=1, parallel=ALONE)
    parameters = stage_parameters(job, 0)
    hbm = job.cluster.hbm.model_copy(update={"latency_us": 1e6})
    slow = job.model_copy(update={"cluster": job.cluster.model_copy(update={"hbm": hbm})})
    profile = analytic_profile(job)
    kernels = counted(job).kernels
    assert update_s(slow, profile) - update_s(job, profile) == pytest.approx(kernels * (1 - 4e-6))
    assert fixed_s(job, 0, parameters, buckets=2) > fixed_s(job, 0, parameters, buckets=1) > 0
    tiny = tiny_job()
    assert fixed_s(tiny, 0, stage_parameters(tiny, 0), buckets=1) == 0
