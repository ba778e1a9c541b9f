"""Reads what `megatron-lynx simulate --json` printed: passes over time, without their halves.

{"step_s": ..., "stages": [{"stage": 0, "actions": [{"action": "3F0", "start_s": ..., "end_s": ...}, ...], ...}]}
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.report.island import Cell
from megatron_lynx.simulator.timeline import Span, SpanKind, Timeline

ACTION = re.compile(r"(\d+)([FBR])(\d+)")
KINDS: dict[str, SpanKind] = {"F": "forward", "B": "backward", "R": "replay"}
TODO = "give the file into which `megatron-lynx simulate PLAN --json` was written"


@dataclass(frozen=True)
class ReadSimulation:
    """A simulated step, pass by pass. `figures`: of each stage, by their names in the file."""

    step_s: float
    timeline: Timeline
    figures: tuple[Mapping[str, Cell], ...]


def read_simulation(data: Mapping[str, Any], where: str) -> ReadSimulation:
    """Raises ConfigError where the file says something else."""
    try:
        rows = {int(stage["stage"]): tuple(_spans(stage["actions"])) for stage in data["stages"]}
        figures = tuple({key: value for key, value in stage.items() if key != "actions"} for stage in data["stages"])
        return ReadSimulation(float(data["step_s"]), Timeline(rows), figures)
    except (KeyError, TypeError, ValueError) as error:
        problem = Problem(where, f"{error!r}", "the figures of a simulated step", TODO)
        raise ConfigError(f"{where} is no simulation that can be drawn", [problem]) from error


def _spans(actions: list[Mapping[str, Any]]) -> Iterator[Span]:
    for each in actions:
        parts = ACTION.fullmatch(each["action"])
        if parts is None:
            raise ValueError(f"{each['action']!r} is no action")
        micro_batch, kind, chunk = parts.groups()
        window = "pipe.recv_backward" if kind == "R" else None
        name = f"{KINDS[kind]} of micro-batch {micro_batch}" + (f", chunk {chunk}" if chunk != "0" else "")
        yield Span(KINDS[kind], float(each["start_s"]), float(each["end_s"]), None, None, int(micro_batch), window, name)
