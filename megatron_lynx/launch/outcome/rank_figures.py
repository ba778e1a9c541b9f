"""What one rank measured, and the ranks of one stage together: of each figure the largest, as a step waits for its slowest rank
and a plan has to fit on the fullest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lynx.launch.outcome.device_peak import Peak
from megatron_lynx.launch.outcome.step_clock import StepSeconds
from megatron_lynx.launch.outcome.step_parts import together
from megatron_lynx.measure.run_outcome import PlannedReserve, StageMeasured, StagePredicted, StageRow, StepMet, StepParts
from megatron_lynx.plan import Plan
from megatron_lynx.runtime.progress import Counts
from megatron_lynx.runtime.trace import ReplaySeconds


@dataclass(frozen=True)
class RankFigures:
    """Of one rank; sent to rank 0."""

    stage: int
    step: StepSeconds | None
    """None: the step was not like others (checked, say)."""
    peak: Peak
    replays: ReplaySeconds | None
    counts: Counts
    """Of one step."""
    parts: StepParts | None = None
    """Of the step that was traced for it."""
    met: StepMet | None = None
    """What came; None: not counted."""


def rows(plan: Plan, ranks: Sequence[RankFigures]) -> tuple[StageRow, ...]:
    """A row for each stage, in order."""
    stages: dict[int, list[RankFigures]] = {}
    for each in sorted(ranks, key=lambda rank: rank.stage):
        stages.setdefault(each.stage, []).append(each)
    return tuple(
        StageRow(stage=stage, predicted=predicted_of(plan, stage), measured=_measured(own)) for stage, own in stages.items()
    )


def predicted_of(plan: Plan, stage: int) -> StagePredicted | None:
    """What the plan says of a stage; of what it does not say, nothing."""
    chunks = [entry.predicted for entry in plan.chunks_of(stage)]
    first = chunks[0]
    if first.step_s is None and not first.memory_bytes:
        return None
    rehearsed = first.step_s is not None
    return StagePredicted(
        passes_s=first.step_s,
        memory_bytes=first.memory_bytes or None,
        hidden_replay_s=sum(chunk.hidden_replay_s for chunk in chunks) if rehearsed else None,
        exposed_replay_s=sum(chunk.exposed_replay_s for chunk in chunks) if rehearsed else None,
        exposed_copy_s=first.exposed_copy_s if rehearsed else None,
    )


def reserve_of(plan: Plan) -> PlannedReserve | None:
    """What the plan left alone on each device; None where it does not say of what that consists."""
    device = plan.device
    if device is None or device.outside_bytes is None or device.slack_bytes is None:
        return None
    return PlannedReserve(outside_bytes=device.outside_bytes, slack_bytes=device.slack_bytes)


def _measured(ranks: Sequence[RankFigures]) -> StageMeasured:
    steps = [each.step for each in ranks if each.step is not None]
    replays = [each.replays for each in ranks if each.replays is not None]
    return StageMeasured(
        ranks=len(ranks),
        passes_s=_most(step.passes_s for step in steps),
        step_s=_most(step.step_s for step in steps),
        allocated_bytes=_most(each.peak.allocated_bytes for each in ranks),
        reserved_bytes=_most(each.peak.reserved_bytes for each in ranks),
        outside_bytes=_most(each.peak.outside_bytes for each in ranks),
        slack_bytes=_most(_slack_bytes(each.peak) for each in ranks),
        in_windows_s=_most(seconds.in_windows_s for seconds in replays),
        on_demand_s=_most(seconds.on_demand_s for seconds in replays),
        in_windows=max(each.counts.hidden for each in ranks),
        on_demand=max(each.counts.on_demand for each in ranks),
        exposed_copy_s=max(each.counts.exposed_copy_s for each in ranks),
        host_bytes=max(each.counts.host_bytes for each in ranks),
        expert_load=max(each.counts.expert_load for each in ranks),
        fell_back=max(each.counts.fell_back for each in ranks),
        parts=together(each.parts for each in ranks),
    )


def _slack_bytes(peak: Peak) -> int | None:
    if peak.allocated_bytes is None or peak.reserved_bytes is None:
        return None
    return peak.reserved_bytes - peak.allocated_bytes


def _most(figures: Iterable[Any]) -> Any:
    """The largest of those that are known."""
    return max((figure for figure in figures if figure is not None), default=None)
