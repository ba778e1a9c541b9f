"""Mamba-2 layers are priced from their sizes, and planned item by item."""

from __future__ import annotations

import pytest

from megatron_lynx.config.experts import Opaque
from megatron_lynx.config.job import Budget, Job
from megatron_lynx.errors import ConfigError
from megatron_lynx.kinds.mamba.section import MAMBA_IN_PROJ, MAMBA_NORM, SCAN, MambaSizes
from megatron_lynx.planner import make_plan
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.rehearsal import rehearse
from tests.config.jobs import catalogued_job
from tests.uniform import uniform_plan

SIZES = MambaSizes(heads=128, size=64, groups=8, state=128)


def job_of(sizes: MambaSizes = SIZES) -> Job:
    """Llama 3 8B with four layers, three of them Mamba layers before an MLP."""
    layout = {"tensor": 2, "sequence_parallel": True}
    job = catalogued_job("llama3-8b", "h100-80g", gpus=2, batch=8, parallel=layout, policy="planned")
    opaque = Opaque(kind="mamba", layers=(1, "3-4"), mamba=sizes)
    model = job.model.model_copy(update={"layers": 4, "opaque": (opaque,)})
    return Job.model_validate({**job.model_dump(by_alias=True), "model": model.model_dump()})


def test_tighter_budgets_recompute_more_of_it() -> None:
    job = job_of()
    profile = analytic_profile(job)
    items, kept = profile.opaque["mamba"].items, rehearse(uniform_plan(job, "none"), profile)
    assert items[MAMBA_IN_PROJ].forward_s > items[SCAN].forward_s > items[MAMBA_NORM].forward_s > 0
    recomputed = []
    for share in (0.8, 0.4):
        tight = job.model_copy(update={"budget": Budget(activation_mib=share * kept.memory(0).peak_bytes / 2**20)})
        plan = make_plan(tight, profile)
        assert rehearse(plan, profile).memory(0).peak_bytes <= share * kept.memory(0).peak_bytes
        recomputed.append([item for rule in plan.stages[0].rules for item in rule.recompute if item.startswith("mamba")])
    assert set(recomputed[0]) <= {MAMBA_NORM, SCAN}
    assert len(recomputed[0]) < len(recomputed[1])


def test_a_scan_takes_as_long_as_its_published_kernels() -> None:
    """Triton's kernels, as in mamba_ssm, on an H100: 12.92 million tokens a second of 16,384, without convolution and gate (vLLM,
    pull request 27299: 128 heads of 64, one group, states of 128)."""
    sizes = SIZES.model_copy(update={"groups": 1})
    layout = {"tensor": 1, "sequence_parallel": False}
    job = catalogued_job("llama3-8b", "h100-80g", gpus=1, seq=16384, batch=1, parallel=layout, policy="planned")
    opaque = Opaque(kind="mamba", layers=(1,), mamba=sizes)
    model = job.model.model_copy(update={"layers": 2, "opaque": (opaque,)})
    scan = analytic_profile(Job.model_validate({**job.model_dump(by_alias=True), "model": model.model_dump()})).opaque["mamba"]
    hbm, columns = job.cluster.hbm, 2 * sizes.convolved + 2 * sizes.inner
    others_s = 2 * 16384 * columns / hbm.byte_per_s
    assert scan.items[SCAN].forward_s == pytest.approx(16384 / 12.92e6 + others_s, rel=0.15)


def test_what_it_cannot_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mamba: groups: found 1, needed a multiple of parallel\.tensor \(2\)"):
        uniform_plan(job_of(SIZES.model_copy(update={"groups": 1})))
    with pytest.raises(ValueError, match="mamba is given with kind mamba, and only with it"):
        Opaque(kind="mamba")
