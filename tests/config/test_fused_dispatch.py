"""What DeepEP's and HybridEP's kernels take, by figures worked out from their sources."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lynx.config.job import Job
from megatron_lynx.cost.combined import MEASURED, shared_rates
from megatron_lynx.errors import ConfigError
from megatron_lynx.planner.checks import check_plannable
from megatron_lynx.profiler.analytic import analytic_profile
from tests.config.jobs import catalogued_job


def job_of(dispatcher: str, ranks: int, **experts: Any) -> Job:
    """DeepSeek-V3's widths: 7168 columns, 256 experts; 4096 tokens."""
    layout = {"pipeline": 1, "expert": ranks, "expert_tensor": 1}
    job = catalogued_job("deepseek-v3", "h100-80g", gpus=max(64, ranks), micro=1, batch=max(64, ranks), parallel=layout)
    mixture = job.model.experts.model_copy(update={"dispatcher": dispatcher, **experts})
    return job.model_copy(update={"model": job.model.model_copy(update={"experts": mixture})})


TOKEN = 2 * 7168
SENT = TOKEN + 8 + 128 * 8 + 128 * 4 + 128 * 4
"""With its source, and room for 128 experts, their probabilities, and 128 scales."""


@pytest.mark.parametrize(
    ("dispatcher", "ranks", "expected"),
    [
        ("alltoall", 8, 0),
        ("deepep", 1, 0),
        ("deepep", 8, 10 * 8 * 256 * SENT + 2**25),
        ("deepep", 64, 10 * 8 * 288 * SENT + 10 * 8 * 128 * 2 * (SENT + 16) + 2**25),
        ("hybridep", 8, 8 * 4096 * (TOKEN + 56 * 4 + 4 * 32 * 8) + 8 * 4096 * 256),
        (
            "hybridep",
            64,
            64 * 4096 * (TOKEN + 56 * 4 + 4 * 4 * 8)
            + 64 * 4096 * 256
            + 4096 * (TOKEN + 56 * 4 + 4 * 256)
            + 7 * 4096 * (3 * (TOKEN + 4 * 4 * 8) + 56 * 4),
        ),
    ],
)
def test_buffers_are_as_large_as_their_sources_make_them(dispatcher: str, ranks: int, expected: int) -> None:
    job = job_of(dispatcher, ranks)
    assert job.fused_dispatch.buffers_bytes == expected
    without = job_of("alltoall", ranks)
    exchange = without.device_reserve.parts["nccl"] - job.device_reserve.parts["nccl"]
    assert without.device_reserve.left_bytes - job.device_reserve.left_bytes + exchange == expected
    assert job.device_reserve.parts.get("dispatch", 0) == expected


def test_a_ring_is_as_wide_as_the_launch_says() -> None:
    """Two multiprocessors a channel; HybridEP's buffers do not depend on them."""
    deep = [job.fused_dispatch.buffers_bytes - 2**25 for job in (job_of("deepep", 8, multiprocessors=n) for n in (12, 24))]
    assert deep[1] == 2 * deep[0]
    hybrid = [job.fused_dispatch.buffers_bytes for job in (job_of("hybridep", 8, multiprocessors=n) for n in (12, 24))]
    assert hybrid[0] == hybrid[1]


def test_what_runs_beside_exchanges_has_the_other_multiprocessors() -> None:
    assert analytic_profile(job_of("alltoall", 8)).interference == 1
    assert analytic_profile(job_of("deepep", 8)).interference == pytest.approx(132 / 112)
    assert analytic_profile(job_of("deepep", 8, multiprocessors=24)).interference == pytest.approx(132 / 108)
    assert analytic_profile(job_of("deepep", 1)).interference == 1, "nothing travels"
    hybrid = job_of("hybridep", 8)
    assert hybrid.fused_dispatch.computing_kept == pytest.approx(116 / 132)
    assert analytic_profile(hybrid).interference == 1, "its kernels run alone"
    many = job_of("hybridep", 8, multiprocessors=64)
    rates = [shared_rates(analytic_profile(job), job.fused_dispatch.computing_kept) for job in (hybrid, many)]
    assert [each.computing for each in rates] == pytest.approx([MEASURED.computing, 68 / 132])


@pytest.mark.parametrize(
    ("dispatcher", "ranks", "micro", "found"),
    [
        ("deepep", 8, 8, None),
        ("deepep", 128, 1, None),
        (
            "deepep",
            256,
            1,
            "found deepep over 256 ranks, needed 2, 4, 8, 16, .*, 160, for which DeepEP has conf",
        ),
        ("hybridep", 64, 5, None),
        ("hybridep", 8, 6, None),
        ("hybridep", 64, 6, "found hybridep with 24576 tokens, needed at most 21844 on each rank between nodes"),
        ("alltoall", 256, 6, None),
    ],
)
def test_what_its_kernels_would_stop_at_is_told_before_anything_runs(
    dispatcher: str, ranks: int, micro: int, found: str | None
) -> None:
    job = job_of(dispatcher, ranks)
    sizes = {"micro": micro, "global_": micro * job.batch.global_}
    job = job.model_copy(update={"batch": job.batch.model_copy(update=sizes)})
    if found is None:
        check_plannable(job)
    else:
        with pytest.raises(ConfigError, match=found):
            check_plannable(job)
