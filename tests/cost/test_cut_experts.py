"""Parameters of experts that are cut over other ranks than the rest of the model (`--expert-tensor-parallel-size`), and how many
of them a rank's optimizer steps: against real models and Megatron's distributed optimizer, of 0.19. Releases before it reduce the
gradients of experts that are not shared out as if they were cut as the rest is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from megatron_lynx.cost.parameters import buckets, filled_numbers, owned_parameters, stage_parameters
from megatron_lynx.testbed.ranks import RankPool
from tests.cost.buckets_on_ranks import buffers
from tests.cost.on_ranks import parameters_of_experts
from tests.cost.test_buckets import SIZE
from tests.te_releases import folder_of, python_path
from tests.tiny_jobs import tiny_job

EXPERTS = {"count": 4, "per_token": 2, "ffn": 96}
SP2 = {"tensor": 2, "sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "cut as the rest is": SP2,
    "shared out, whole": {**SP2, "expert": 2, "expert_tensor": 1},
    "on both ranks, whole": {**SP2, "expert_tensor": 1},
    "cut, the rest whole": {"replicas": 2, "expert_tensor": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cut_experts_are_counted_as_a_real_model_has_them(pool: RankPool, layout: str) -> None:
    """Counted whole, experts that TP4 cuts made 169 GiB of Mixtral's 51; shared by TP instead of ETP, 32 of its optimizer's 8."""
    job = tiny_job("llama", **SIZE, experts=EXPERTS, distributed_optimizer=True, **LAYOUTS[layout])
    ranks = pool.run(parameters_of_experts, job)
    parameters = stage_parameters(job, 0)
    assert [each[:2] for each in ranks] == 2 * [(parameters.total, parameters.experts)]
    assert sum(stepped for *_, stepped in ranks) == pytest.approx(2 * owned_parameters(job, parameters), abs=2)
    for [found] in pool.run(buffers, [job]):
        assert sum(numbers - own for own, numbers, _ in found) == filled_numbers(job, 0, parameters)
        assert len(found) == buckets(job, 0, parameters)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, env={"PYTHONPATH": python_path(folder_of("MEGATRON_CORE", "0.19", "megatron/core"))}) as ranks:
        yield ranks
