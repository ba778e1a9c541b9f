"""What a plan does, stage by stage, in the form in which the page shows it: every item of every half, kept or replayed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_lynx.anatomy import HALVES, Half
from megatron_lynx.cost.moments import StageMemory
from megatron_lynx.plan.plan import Plan, Rule, Stage
from megatron_lynx.plan.stage import ALWAYS
from megatron_lynx.report.island import PointStage, Treatment
from megatron_lynx.simulator.simulation import Simulation


def stages_of(
    plan: Plan,
    simulation: Simulation | None = None,
    memory: Mapping[int, StageMemory] | None = None,
    measured_bytes: Mapping[int, int] | None = None,
) -> list[PointStage]:
    """The entries of a plan, by stage and chunk. Seconds are the simulation's where there is one, else as the plan says.

    `memory`: of each stage at its fullest; without, as far as the plan says it.
    """
    held = dict(_planned(plan)) if memory is None else {stage: (each.moment, used_kinds(each)) for stage, each in memory.items()}
    entries = sorted(plan.stages, key=lambda entry: (entry.stage, entry.chunk))
    return [_entry(plan, entry, simulation, held, measured_bytes or {}) for entry in entries]


def _planned(plan: Plan) -> Iterator[tuple[int, tuple[str, dict[str, int]]]]:
    """Of each stage whose memory the plan states the fullest moment, and its kinds."""
    for entry in plan.stages:
        stated = entry.predicted.memory
        moments = {moment: entry.predicted.held_at(moment) or {} for moment in stated if moment != ALWAYS}
        if moments:
            fullest = max(moments, key=lambda moment: sum(moments[moment].values()))
            yield entry.stage, (fullest, {kind: size for kind, size in moments[fullest].items() if size})


def _entry(
    plan: Plan,
    entry: Stage,
    simulation: Simulation | None,
    held: Mapping[int, tuple[str, dict[str, int]]],
    measured_bytes: Mapping[int, int],
) -> PointStage:
    hidden_s, exposed_s = entry.predicted.hidden_replay_s, entry.predicted.exposed_replay_s
    if simulation is not None:
        hidden_s, exposed_s = simulation.replays_of(entry.stage, entry.chunk)
    moment, kinds = held.get(entry.stage, ("", {}))
    return PointStage(
        stage=entry.stage,
        chunk=entry.chunk,
        layers=str(entry.layers),
        treatments=[_treatment(plan, entry, rule, half) for rule in entry.rules for half in HALVES],
        offloaded_bytes=0 if entry.offload is None else entry.offload.bytes,
        deferred_bytes=0 if entry.weight_gradients is None else entry.weight_gradients.bytes,
        hidden_replay_s=hidden_s,
        exposed_replay_s=exposed_s,
        memory_bytes=kinds,
        moment=moment.replace("_", " "),
        measured_bytes=measured_bytes.get(entry.stage),
    )


def used_kinds(memory: StageMemory) -> dict[str, int]:
    """The kinds of bytes of which there are any, what is there all the time first."""
    return {name: size for name, size in memory.kinds.items() if size}


def _treatment(plan: Plan, entry: Stage, rule: Rule, half: Half) -> Treatment:
    section = rule.filling(half)
    replayed = rule.replays(half)
    if rule.checkpoints(half):  # it names no items
        section = plan.model.sections_of(rule.layers.last)[HALVES.index(half)]
        replayed = section.run_again(whole=rule.feeds(rule.layers.first, half))
    return Treatment(
        layers=str(rule.layers),
        half=half,
        items=[(item, "replay" if item in replayed else "keep") for item in section.names],
        window=_place(plan, entry, rule, half) if replayed else "",
        deferred=[
            f"{linear}: {', '.join(rule.weight_gradients[linear])}"
            for linear in section.linears
            if linear in rule.weight_gradients
        ],
        gather=" / ".join(_by_phase(rule.gather.of(half, "steady"), rule.gather.of(half, "cooldown"))),
    )


def _place(plan: Plan, entry: Stage, rule: Rule, half: Half) -> str:
    """Where a half is replayed."""
    if rule.checkpoints(half):
        rest = f", then {wait}" if (wait := rule.goes_on_in(half)) else ""
        return f"{rule.checkpoint_said}{rule.ahead_in_words}{rest}: keeps {plan.kept_input(entry, rule, half)}"
    return " / ".join(_by_phase(rule.windows.of(half, "steady"), rule.windows.of(half, "cooldown")))


def _by_phase(steady: str | None, cooldown: str | None) -> Iterator[str]:
    """A place, or the two of a half that is replayed elsewhere in cool-down."""
    if steady:
        yield steady
    if cooldown and cooldown != steady:
        yield f"in cool-down {cooldown}"
