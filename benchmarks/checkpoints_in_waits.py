"""What checkpoints gain on the testbed by beginning ahead, and by going on in the wait for their own gradient.

python -m benchmarks.checkpoints_in_waits [--rounds 7]     two ranks joined by a slow link, as `make demo` has them

Every layer is a checkpoint in every plan, so all hold what stock full holds: a dense model under sequence parallelism, and one
with experts over both ranks. Settings take turns; a figure is the median over rounds of the ratio to stock full in the same
round.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

from megatron_lynx.anatomy import HALVES
from megatron_lynx.anatomy.address import own_window
from megatron_lynx.config.job import Job
from megatron_lynx.config.loader import job_path, load_job
from megatron_lynx.plan.plan import Plan
from megatron_lynx.plan.rule import Ahead, Rule, Windows
from megatron_lynx.planner import uniform_plan
from megatron_lynx.testbed.candidates import FULL, NONE, Candidate
from megatron_lynx.testbed.comparison import race
from megatron_lynx.testbed.ranks import hosts_for

MLP = HALVES[-1]
EXPERTS: dict[str, Any] = {
    "model": {"experts": {"count": 4, "per_token": 2, "ffn": 704}},
    "parallel": {"tensor": 1, "expert": 2},
    "batch": {"micro": 1, "global": 2},
    "overlap": {},
}


def jobs() -> dict[str, Job]:
    """The demo's model, cut along sequences; and the same width with experts shared out over both ranks."""
    demo = load_job(job_path("jobs/demo"))
    sliced = demo.parallel.model_copy(update={"sequence_parallel": True})
    data = demo.model_dump(mode="json", by_alias=True)
    spread = Job.model_validate({**data, **EXPERTS, "model": data["model"] | EXPERTS["model"]})
    return {"TP2 + SP": demo.model_copy(update={"parallel": sliced}), "EP2": spread}


def candidates(job: Job) -> Iterator[Candidate]:
    """All with a checkpoint around each layer."""
    begins: Ahead = "gather" if job.parallel.sequence_parallel else True
    yield from (NONE, FULL)
    yield Candidate("on demand", plan=plan_of(job, ahead=False, rest_in_wait=False))
    yield Candidate("goes on", plan=plan_of(job, ahead=False, rest_in_wait=True))
    yield Candidate("ahead", plan=plan_of(job, ahead=begins, rest_in_wait=False))
    yield Candidate("ahead, goes on", plan=plan_of(job, ahead=begins, rest_in_wait=True))


def plan_of(job: Job, *, ahead: Ahead, rest_in_wait: bool) -> Plan:
    plan = uniform_plan(job, "none")
    windows = Windows(mlp=own_window(MLP)) if rest_in_wait else Windows()
    layout = plan.parallel.model_copy(update={"expert": job.parallel.expert})
    stages = [
        stage.model_copy(
            update={
                "ahead_depth": int(rest_in_wait),
                "rules": (Rule(layers=stage.layers, checkpoint="layer", ahead=ahead, windows=windows),),
            }
        )
        for stage in plan.stages
    ]
    return Plan.model_validate(plan.model_copy(update={"parallel": layout, "stages": tuple(stages)}).model_dump())


def rows(name: str, job: Job, rounds: int) -> Iterator[str]:
    """One for each setting: seconds, and ratios to stock full round by round."""
    settings = list(candidates(job))
    hosts = hosts_for(job)
    yield f"{name}: {hosts.description}"
    laps = hosts.run(race, job, settings, rounds, 1)
    of_round = {each.name: [max(lap[each.name].step_s[at] for lap in laps) for at in range(rounds)] for each in settings}
    for setting, seconds in of_round.items():
        ratios = [own / full for own, full in zip(seconds, of_round[FULL.name], strict=True)]
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        yield f"| {setting} | {statistics.median(seconds):.2f} s | {spread} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    for name, job in jobs().items():
        print(*rows(name, job, rounds), sep="\n", flush=True)


if __name__ == "__main__":
    main()
