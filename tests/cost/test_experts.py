"""Parameters and bytes of models with experts."""

from __future__ import annotations

import pytest

from megatron_lynx.cost.parameters import flops_per_token, optimizer_bytes, stage_parameters
from megatron_lynx.cost.stage import stage_seconds
from megatron_lynx.profiler.analytic import analytic_profile
from tests.profiler.test_experts import mixtral
from tests.stock.parts import memory_of_stages


def test_mixtral_has_its_published_parameters() -> None:
    """46.7e9, of which a token passes 12.9e9 (Jiang et al., 2401.04088)."""
    job = mixtral(pipeline=1, expert=1)
    assert stage_parameters(job, 0).total == pytest.approx(46.7e9, rel=1e-3)
    active = (flops_per_token(job.model) - 6 * 32 * 4096 * 4096) / 6 + 32000 * 4096
    assert active == pytest.approx(12.9e9, rel=3e-3)


def test_experts_are_shared_out_and_their_state_among_those_with_the_same() -> None:
    """64 GPUs, 4 stages, 8 ranks for the experts: two of every 16 ranks of a stage hold the same ones."""
    parameters = stage_parameters(mixtral(), 1)
    assert parameters.experts == 8 * 3 * 4096 * 14336
    others = 8 * (4096 * (4096 + 2 * 1024 + 4096) + 4096 * 8 + 2 * 4096)
    assert parameters.without_experts == others
    assert optimizer_bytes(mixtral(), parameters.total, parameters.experts) == 12 * parameters.experts // 2 + 12 * others // 16


def test_a_stage_of_both_kinds_is_the_sum_of_its_layers() -> None:
    job = mixtral()
    some = job.model.model_copy(update={"experts": job.model.experts.model_copy(update={"layers": ("9-12",)})})
    mixed, none = (job.model_copy(update={"model": model}) for model in (some, some.model_copy(update={"experts": None})))
    kept = [memory_of_stages(each)[1].activations for each in (none, mixed, job)]
    assert kept[1] == (kept[0] + kept[2]) // 2
    profile = analytic_profile(job)
    seconds = [stage_seconds(each, profile, 1).both_s for each in (none, mixed, job)]
    assert seconds[1] == pytest.approx((seconds[0] + seconds[2]) / 2)
