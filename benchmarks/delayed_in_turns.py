"""What weight gradients in pieces, and gradients sent before weight gradients, gain on the testbed: ours against ours without.

python -m benchmarks.delayed_in_turns [--rounds 9]     two ranks joined by a slow link, for each of both

Pieces run on two tensor-parallel ranks, whose waits are shorter than the longest weight gradients; gradients are sent first on
two pipeline stages. Both plans are planned for the profile that is measured right before, with memory to spare, and differ in
this alone. Settings take turns; a figure is the median over rounds of the ratio to ours without it in the same round.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

from benchmarks.mechanisms import IN_PIECES, MECHANISMS, SENT_FIRST
from megatron_lynx.config.job import Job
from megatron_lynx.cost import section
from megatron_lynx.planner import decide
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.testbed.candidates import NONE, Candidate
from megatron_lynx.testbed.comparison import race
from megatron_lynx.testbed.profiling import measure_profile
from megatron_lynx.testbed.ranks import hosts_for

COPIED_FLOPS = 1
"""FLOPs of a GEMM in the time in which a core copies a byte of its gradient, in place of a GPU's 800."""

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "TP2": (IN_PIECES, {"parallel": {"tensor": 2, "sequence_parallel": True}, "batch": {"micro": 1, "global": 3}}),
    "PP2": (SENT_FIRST, {"parallel": {"pipeline": 2}, "batch": {"micro": 1, "global": 3}}),
}


def job_of(layout: dict[str, Any], link_mbit_per_s: float) -> Job:
    """Its first linear of an MLP takes twice as long as the second one, and four times as long as a wait."""
    model = {"layers": 4, "hidden": 512, "ffn": 2816, "heads": 8, "kv_groups": 8, "vocab": 1024, "seq": 512}
    kind = {"activation": "swiglu", "norm": "rmsnorm", "position": "rope", "bias": False, "attention": "unfused", "dtype": "fp32"}
    cluster = {"name": "two hosts", "device": "cpu", "memory_gib": 8, "link_mbit_per_s": link_mbit_per_s}
    how = {"overlap": {"weight_gradients": "deferred"}, "budget": {"memory_gib": 8}, "policy": "planned", "gpus": 2}
    return Job.model_validate({"model": model | kind, "cluster": cluster, **how, **layout})


def candidates(job: Job, profile: Profile, name: str) -> Iterator[Candidate]:
    (mechanism,) = (each for each in MECHANISMS if each.name == name)
    yield NONE
    with mechanism.switched_off():
        yield Candidate("without", plan=decide(job, profile).plan)
    yield Candidate("with", plan=decide(job, profile).plan)


def rows(layout: str, rounds: int, link_mbit_per_s: float) -> Iterator[str]:
    """One for each setting: seconds, and ratios round by round."""
    mechanism, fields = LAYOUTS[layout]
    job = job_of(fields, link_mbit_per_s)
    hosts = hosts_for(job)
    profile = measure_profile(job, hosts, lambda what: nullcontext())
    settings = list(candidates(job, profile, mechanism))
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    laps = hosts.run(race, job, settings, rounds, 1)
    yield f"{layout}, {mechanism}: {hosts.description}; {link_mbit_per_s:.0f} Mbit/s; {load} to {os.getloadavg()[0]:.1f}"
    steps_s = {each.name: [max(lap[each.name].step_s[at] for lap in laps) for at in range(rounds)] for each in settings}
    simulated_s = {each.name: rehearse(each.plan, profile).step_s for each in settings if each.plan is not None}
    yield "| setting | step | of ours without | simulated |\n|---|--:|--:|--:|"
    for name, seconds in steps_s.items():
        ratios = [own / other for own, other in zip(seconds, steps_s["without"], strict=True)]
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        simulated = f"{simulated_s[name] / simulated_s['without']:.3f}" if name in simulated_s else ""
        yield f"| {name} | {statistics.median(seconds):.2f} s | {spread} | {simulated} |"
    if settings[-1].plan == settings[-2].plan:
        yield "Both plans are the same."


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--link-mbit-per-s", type=float, default=200.0)
    parser.add_argument("--only", choices=LAYOUTS)
    asked = parser.parse_args()
    with patch.object(section, "COPIED_FLOPS", COPIED_FLOPS):
        for layout in LAYOUTS if asked.only is None else [asked.only]:
            print(*rows(layout, asked.rounds, asked.link_mbit_per_s), sep="\n", flush=True)


if __name__ == "__main__":
    main()
