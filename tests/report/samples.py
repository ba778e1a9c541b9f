"""A small job with everything that a report can be made from: plan, profile, and a run's files, as if it had been trained."""

from __future__ import annotations

from pathlib import Path

from megatron_lynx.measure.measurement import save_measurement
from megatron_lynx.plan import save_plan
from megatron_lynx.planner import uniform_plan
from megatron_lynx.profiler.profile import save_profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.testbed.tiny_jobs import tiny_job
from megatron_lynx.timeline import Span, Timeline, write_trace
from tests.measure.samples import measurement
from tests.profiler.made_up import made_up_profile

JOB = tiny_job("llama", tensor=2, pipeline=2, microbatches=3)
PLAN, PROFILE = uniform_plan(JOB), made_up_profile(JOB)


def simulated() -> Simulation:
    return rehearse(PLAN, PROFILE)


def as_if_run(slower: float = 1.25) -> Timeline:
    """Both ranks of every stage do what the simulation says, some slower, with micro-batches of the third step."""

    def later(span: Span) -> Span:
        micro_batch = None if span.micro_batch is None else span.micro_batch + 2 * JOB.microbatches
        return span._replace(start_s=slower * span.start_s, end_s=slower * span.end_s, micro_batch=micro_batch)

    stages = simulated().timeline().ranks
    return Timeline({2 * stage + rank: tuple(map(later, spans)) for stage, spans in stages.items() for rank in (0, 1)})


def run_folder(folder: Path) -> Path:
    """What `compare` leaves behind."""
    folder.mkdir(parents=True, exist_ok=True)
    save_plan(PLAN, folder / "plan.yaml")
    save_profile(PROFILE, folder / "profile.yaml")
    save_measurement(measurement(), folder / "measurement.json")
    write_trace(as_if_run(), folder / "trace.json")
    return folder
