"""A step of many micro-batches, extended from one of few, against the step with all of them simulated."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lynx.planner import decide
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.schedule.flushes import with_flushes
from megatron_lynx.simulator.simulate import simulate
from megatron_lynx.simulator.simulation import Simulation, in_steady_state
from tests.config.jobs import catalogued_job
from tests.simulator.plain import plain_passes

pytestmark = pytest.mark.slow

LAYOUTS: list[dict[str, Any]] = [
    {"batch": 37, "chunk": None, "budget": {"memory_gib": 20}},
    {"batch": 44, "chunk": 2, "budget": {"memory_gib": 21}},
    {"batch": 44, "chunk": 2, "budget": {"memory_gib": 19.5}, "offload_ratio": "auto"},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["1F1B", "chunks", "copies"])
def test_an_extended_step_is_the_step_with_all_micro_batches(layout: dict[str, Any]) -> None:
    fields = dict(layout)
    parallel = {"tensor": 2, "pipeline": 4, "layers_per_chunk": fields.pop("chunk"), "sequence_parallel": True}
    job = catalogued_job("llama-7b", "a800-80g", gpus=8, seq=4096, policy="planned", parallel=parallel, **fields)
    profile = analytic_profile(job)
    decision = decide(job, profile)
    extended = rehearse(decision.plan, profile, job=decision.job)
    full = rehearse(decision.plan, profile, job=decision.job, whole=True)
    assert extended.repeated is not None
    assert full.repeated is None
    for stage in range(4):
        assert figures(extended, stage) == pytest.approx(figures(full, stage), rel=1e-9)
        assert extended.memory(stage).peak_bytes == full.memory(stage).peak_bytes


SECONDS = st.floats(0.01, 10.0)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4), st.integers(2, 3), st.sampled_from([1, 1.5, 2, 3]), st.data())
def test_messages_that_queue_on_a_link_do_not_end_a_steady_state_later(
    pipeline: int, chunks: int, groups: float, data: st.DataObject
) -> None:
    """A message takes about as long as a forward and a backward, so that a link may fall behind a little in each group."""
    group = int(groups * pipeline)
    seconds = [[(data.draw(SECONDS), data.draw(SECONDS)) for _ in range(chunks)] for _ in range(pipeline)]
    slowest_s = max(sum(map(sum, stage)) for stage in seconds) / chunks
    p2p_s = slowest_s * data.draw(st.sampled_from([0.5, 0.99, 0.999, 1.0, 1.0005, 1.001, 1.005, 1.02, 1.2]))
    passes = [[plain_passes(*both_s) for both_s in stage] for stage in seconds]

    def simulated(microbatches: int) -> Simulation:
        return simulate(with_flushes(pipeline, microbatches, chunks, group), passes, p2p_s)

    extended = in_steady_state(group, 24 * group, simulated)
    assert extended.step_s == pytest.approx(simulated(24 * group).step_s, rel=1e-9)


def figures(simulation: Simulation, stage: int) -> list[float]:
    sums = (simulation.busy_s(stage), simulation.bubble_s(stage), simulation.exposed_copy_s(stage))
    names = ("hidden_s", "exposed_s", "filled_s", "unfilled_s", "host_s", "host_late_s")
    return [simulation.step_s, *sums, *(simulation.total(stage, name, chunk) for name in names for chunk in (None, 0))]
