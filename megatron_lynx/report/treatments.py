"""What a plan does, stage by stage, in the form in which the page shows it: every item of every half, kept or replayed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_lynx.anatomy import DENSE, HALVES, Half
from megatron_lynx.cost.moments import StageMemory
from megatron_lynx.plan.plan import Plan, Rule, Stage
from megatron_lynx.report.island import PointStage, Treatment
from megatron_lynx.simulator.simulation import Simulation


def stages_of(
    plan: Plan, simulation: Simulation | None = None, memory: Mapping[int, StageMemory] | None = None
) -> list[PointStage]:
    """The entries of a plan, by stage and chunk. Seconds are the simulation's where there is one, else as the plan says."""
    entries = sorted(plan.stages, key=lambda entry: (entry.stage, entry.chunk))
    return [_entry(entry, simulation, (memory or {}).get(entry.stage)) for entry in entries]


def _entry(entry: Stage, simulation: Simulation | None, memory: StageMemory | None) -> PointStage:
    hidden_s, exposed_s = entry.predicted.hidden_replay_s, entry.predicted.exposed_replay_s
    if simulation is not None:
        hidden_s, exposed_s = simulation.replays_of(entry.stage, entry.chunk)
    return PointStage(
        stage=entry.stage,
        chunk=entry.chunk,
        layers=str(entry.layers),
        treatments=[_treatment(rule, half) for rule in entry.rules for half in HALVES],
        offloaded_bytes=0 if entry.offload is None else entry.offload.bytes,
        hidden_replay_s=hidden_s,
        exposed_replay_s=exposed_s,
        memory_bytes=used_kinds(memory),
        moment="" if memory is None else memory.moment.replace("_", " "),
    )


def used_kinds(memory: StageMemory | None) -> dict[str, int]:
    """The kinds of bytes of which there are any, what is there all the time first."""
    if memory is None:
        return {}
    return {name: size for name, size in memory.kinds.items() if size}


def _treatment(rule: Rule, half: Half) -> Treatment:
    replayed = rule.replays(half)
    return Treatment(
        layers=str(rule.layers),
        half=half,
        items=[(item, "replay" if item in replayed else "keep") for item in DENSE[half].names],
        window=" / ".join(_by_phase(rule.windows.of(half, "steady"), rule.windows.of(half, "cooldown"))) if replayed else "",
        gather=" / ".join(_by_phase(rule.gather.of(half, "steady"), rule.gather.of(half, "cooldown"))),
    )


def _by_phase(steady: str | None, cooldown: str | None) -> Iterator[str]:
    """A place, or the two of a half that is replayed elsewhere in cool-down."""
    if steady:
        yield steady
    if cooldown and cooldown != steady:
        yield f"in cool-down {cooldown}"
