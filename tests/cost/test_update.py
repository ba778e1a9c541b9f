"""Seconds of an update: reductions and gathers alone by hand, and what passes hide of them."""

from __future__ import annotations

from math import ceil

import pytest
from pydantic import ValidationError

from megatron_lynx.cost.parameters import optimizer_bytes, stage_parameters
from megatron_lynx.cost.stage import stage_seconds
from megatron_lynx.cost.update import RESTART_S, UpdateSeconds, reduction_s, update_s
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.timeline import Passes
from tests.config.jobs import catalogued_job

REPLICATED = {"tensor": 2, "sequence_parallel": True, "distributed_optimizer": True}


def job_with(cluster="h100-80g", gpus=64, parallel=REPLICATED, **overlap):
    return catalogued_job("llama-7b", cluster, gpus=gpus, batch=gpus, parallel=parallel, overlap=overlap)


def updated(job):
    return update_s(job, analytic_profile(job))


def test_a_pass_that_lasts_hides_all_but_one_bucket():
    """A tenth of the bytes is a bucket; H100 GEMMs lose nothing beside a collective."""
    update, behind = UpdateSeconds(1.0, 0.25, 0.5, bucket_share=0.1), Passes(forward_s=2.0, backward_s=4.0)
    assert update.exposed_s(job_with(), behind) == 1.75
    assert update.exposed_s(job_with(gradients=True), behind) == pytest.approx(0.1 + 0.25 + 0.5)
    assert update.exposed_s(job_with(gradients=True, parameters=True), behind) == pytest.approx(0.1 + 0.25 + 0.05)


def test_what_does_not_fit_behind_a_pass_is_exposed():
    update, behind = UpdateSeconds(1.0, 0.25, 0.5, bucket_share=0.1), Passes(forward_s=0.125, backward_s=0.25)
    both = job_with(gradients=True, parameters=True)
    assert update.exposed_s(both, behind) == pytest.approx(0.75 + 0.25 + 0.375)


def test_without_a_distributed_optimizer_the_whole_all_reduce_runs_behind_the_backward():
    update = UpdateSeconds(1.0, 0.25, 1.0, bucket_share=0.1)
    job = job_with(parallel={**REPLICATED, "distributed_optimizer": False}, gradients=True)
    assert update.exposed_s(job, Passes(9.0, 1.5)) == pytest.approx(0.1 + 0.25 + 0.5)


def test_what_is_hidden_slows_the_gemms_that_hide_it():
    update, behind = UpdateSeconds(1.0, 0.0, 0.0, bucket_share=0.1), Passes(9.0, 9.0)
    lost = job_with("a100-80g").cluster.matmul.beside_collective
    assert update.exposed_s(job_with("a100-80g", gradients=True), behind) == pytest.approx(0.1 + lost * 0.9)


def test_what_other_parameters_leave_of_the_passes_hides_experts():
    """A story: reductions of experts that four ranks share were never hidden, 0.31 s of a step of 3.16 s of Qwen3-30B."""
    others, behind = UpdateSeconds(1.0, 0.25, 0.5, bucket_share=0.1), Passes(forward_s=0.75, backward_s=4.0)
    job = job_with(gradients=True, parameters=True)
    assert others.passes_left(job, behind) == Passes(0.25, 3.0)
    reduced_whole = job_with(gradients=True, parallel={"tensor": 2})
    assert others.passes_left(reduced_whole, behind).backward_s == 2.5
    assert others.passes_left(reduced_whole, Passes(0.0, 1.0)).backward_s == 0.0


def test_a_job_hides_reductions_of_its_experts():
    """As many bytes are reduced, and all of them would be exposed after the step."""
    layout = {"expert": 4, "distributed_optimizer": True}
    plain, hiding = (
        catalogued_job("qwen3-30b-a3b", "h100-80g", gpus=32, batch=128, parallel=layout, overlap={"gradients": overlapped})
        for overlapped in (False, True)
    )
    spared_s, reduced_s = updated(plain) - updated(hiding), reduction_s(plain)
    backward_s = stage_seconds(hiding, analytic_profile(hiding), 0).backward_s
    assert backward_s < reduced_s
    assert 0.9 * backward_s < spared_s <= backward_s, "what cutting and checking buckets takes comes off"


def test_a_job_hides_what_it_says():
    """Two tensor ranks: four members and NICs in a node. Each bucket more is checked: five kernels, two waits."""
    plain, gradients, both = (
        updated(job_with(**said)) for said in ({}, {"gradients": True}, {"gradients": True, "parameters": True})
    )
    job = job_with()
    count = stage_parameters(job, 0).total
    moved, nic = 31 / 32 * count, job.cluster.nic.byte_per_s
    assert plain > gradients > both > 0
    more_buckets = ceil(count / 40e6) - 1
    checked_s = more_buckets * (5 * 4e-6 + 2 * (10e-6 + RESTART_S))
    hidden_s = (1 - 40e6 / count) * 4 * moved / (4 * nic)
    assert plain - gradients == pytest.approx(hidden_s - checked_s)


def test_instances_reduce_within_and_then_between():
    """Of eight replicas each, on 16 GPUs: four members of a ring in a node. Between the four of them a ring has one in each node,
    and passes on what one rank owns, twice. All of the optimizer is there four times."""
    one, four = job_with(), job_with(parallel={**REPLICATED, "optimizer_instances": 4})
    count, nic = stage_parameters(one, 0).total, one.cluster.nic.byte_per_s
    assert reduction_s(one) == pytest.approx(4 * count * 31 / 32 / (4 * nic))
    assert reduction_s(four) == pytest.approx(4 * count * (7 / 8 / (4 * nic) + 2 * 3 / 4 / 8 / nic))
    assert optimizer_bytes(four, count) == pytest.approx(4 * optimizer_bytes(one, count), abs=4)
    with pytest.raises(ValidationError, match=r"parallel.context x replicas \(32\) must be a multiple of .* \(5\)"):
        job_with(parallel={**REPLICATED, "optimizer_instances": 5})
    with pytest.raises(ValidationError, match=r"optimizer_instances \(2\) needs distributed_optimizer: true"):
        job_with(parallel={"tensor": 2, "optimizer_instances": 2})


def test_smaller_buckets_leave_less_of_a_reduction_exposed_and_more_to_check():
    """What no pass hides is one bucket. Each one more is checked for what is no number: five kernels, two waits."""
    usual, smaller = (updated(job_with(gradients=True, bucket_parameters=size)) for size in (None, 20_000_000))
    job = job_with()
    count, nic = stage_parameters(job, 0).total, job.cluster.nic.byte_per_s
    more_buckets = ceil(count / 20e6) - ceil(count / 40e6)
    hidden_s = 20e6 * 4 * 31 / 32 / (4 * nic)
    assert usual - smaller == pytest.approx(hidden_s - more_buckets * (5 * 4e-6 + 2 * (10e-6 + RESTART_S)))
    assert updated(job_with(gradients=True, bucket_parameters=40_000_000)) == usual


def test_so_many_buckets_are_as_many_parameters_each():
    count = stage_parameters(job_with(), 0).total
    assert updated(job_with(gradients=True, buckets=8)) == updated(job_with(gradients=True, bucket_parameters=count // 8))
    with pytest.raises(ValidationError, match="needed one of them, found 8 and 1000"):
        job_with(gradients=True, buckets=8, bucket_parameters=1000)


def test_a_bucket_has_at_least_one_parameter_and_none_is_cut_where_nothing_overlaps():
    assert updated(job_with(gradients=True, bucket_parameters=1)) == updated(job_with(gradients=True, bucket_parameters=1000))
    assert updated(job_with(bucket_parameters=1)) == updated(job_with())


def test_the_longer_one_micro_batch_takes_the_more_it_hides():
    """The same update of a large model behind one sequence of 128 tokens, and of 2048."""
    short, long = (
        catalogued_job("gpt-22b", "a100-80g", seq=seq, gpus=64, batch=64, overlap={"gradients": True}) for seq in (128, 2048)
    )
    behind = [stage_seconds(job, analytic_profile(job), 0).backward_s for job in (short, long)]
    assert behind == sorted(behind)
    assert updated(short) > updated(long)
