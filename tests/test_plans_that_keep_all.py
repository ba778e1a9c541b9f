"""A plan that keeps everything takes stock's seconds: for ready jobs and launches, for public ones, and for drawn jobs, with
exchanges of experts overlapped and without.

The host is left out: hooks add to its time, which stock's price rightly has none of.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from megatron_lynx.advise.today import as_stock, asked_launch
from megatron_lynx.config import Job
from megatron_lynx.config.experts import Opaque
from megatron_lynx.config.loader import bundled_configs, job_path, load_job
from megatron_lynx.errors import ConfigError
from megatron_lynx.kinds.opaque.section import IN_NODES, OpaqueName
from megatron_lynx.launch_arguments.command_line import read_launch_file
from megatron_lynx.planner.partitioning import partitioned
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.stock import StockSetting, priced
from scripts.make_plans import LAUNCHES, MEMORY_GIB, launch_words
from tests.launch_arguments.test_public_launches import FOLDER, READ
from tests.test_never_less_than_stock import jobs
from tests.test_plans_are_accepted import job_of
from tests.uniform import uniform_plan

JOBS = sorted(path.stem for path in (bundled_configs() / "jobs").glob("*-*0g.yaml"))


def overlapping(job: Job, **overlap: bool) -> Job:
    """The job without graphs; where it has experts, with their exchanges as given."""
    experts = job.model.experts
    changes = {"captured": (), "experts": experts and experts.model_copy(update={"delayed": False, **overlap})}
    return job.model_copy(update={"model": job.model.model_copy(update=changes), "policy": "planned", "head": None})


def takes_stocks_seconds(job: Job) -> bool:
    """Whether a plan goes with the job at all. Asserts that it then takes as long as stock."""
    costs = analytic_profile(job).model_copy(update={"host_time": None})
    try:
        plan = uniform_plan(job, "none")
    except ConfigError:
        return False
    setting = StockSetting(overlap=job.model.moe_overlapped, delayed=job.model.moe_delayed)
    stock_s = priced(as_stock(job), costs, setting).step.most_s
    assert rehearse(plan, costs, job=job).step_s == pytest.approx(stock_s, rel=1e-6), setting.name
    return True


def with_and_without_overlap(job: Job) -> None:
    job = partitioned(job, analytic_profile(job))[0].job
    assert job.schedule == "double_buffered" or takes_stocks_seconds(overlapping(job, overlapped=False))
    if job.model.experts is not None:
        takes_stocks_seconds(overlapping(job, overlapped=True))
        takes_stocks_seconds(overlapping(job, overlapped=True, delayed=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_ready_jobs(name: str) -> None:
    with_and_without_overlap(load_job(job_path(f"jobs/{name}")))


@pytest.mark.parametrize("cluster", MEMORY_GIB)
@pytest.mark.parametrize("name", LAUNCHES)
def test_ready_launches(name: str, cluster: str) -> None:
    with_and_without_overlap(asked_launch(launch_words(name, cluster, "none"), cluster).job)


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_public_launches(name: str) -> None:
    if not FOLDER.is_dir():
        pytest.skip("needs the folder of public launches, in LAUNCHES_DIR")
    file = read_launch_file(FOLDER / f"{name}.args")
    try:
        asked = asked_launch(file.words, file.cluster or "h100-80g")
    except ConfigError:
        return
    with_and_without_overlap(asked.job)


def test_dense_halves_wait_for_their_collectives_beside_overlapped_exchanges() -> None:
    """A story: they did under stock alone, so that Qwen3-235B's plan seemed 1.8 % faster than it is."""
    layout = {"tensor": 4, "expert": 4, "expert_tensor": 1, "sequence_parallel": True}
    job = job_of("deepseek-v2-lite", "h100-80g", experts={"overlapped": True}, parallel=layout)
    assert takes_stocks_seconds(overlapping(job, overlapped=True))


@pytest.mark.parametrize("kind", IN_NODES)
def test_opaque_attention_beside_overlapped_exchanges(kind: OpaqueName) -> None:
    """A story: no plan could go with them, and Qwen3-Next's was slower than stock's best, which overlapped them."""
    figures: dict[str, Any] = {"kept_bytes": 95_232, "in_hand_bytes": 73_728, "flops": 71_000_000, "parameters": 33_554_432}
    sizes = {"key_heads": 16, "key_size": 128, "value_heads": 32, "value_size": 128, "convolved": 4}
    opaque = Opaque(kind=kind, layers=(1, 3), **({"delta": sizes} if kind == "gated_delta_net" else figures))
    layout = {"tensor": 2, "expert": 4, "expert_tensor": 1, "sequence_parallel": True}
    job = job_of("qwen3-30b-a3b", "h100-80g", experts={"overlapped": True}, parallel=layout)
    job = job.model_copy(update={"model": job.model.model_copy(update={"opaque": (opaque,)})})
    assert takes_stocks_seconds(overlapping(job, overlapped=True))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(jobs())
def test_drawn_jobs(job: Job) -> None:
    with_and_without_overlap(job)
