"""Reads a report's inputs, recognized by their keys: files that this package writes, alone or in a folder.

A Perfetto trace of a run (`--lynx-trace`), of `compare` or of `simulate --trace` becomes a timeline:

{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0"}}   ─> the row: a rank, or a simulated stage
{"ph": "X", "cat": "recompute", "pid": 0, "ts": 12.5, "dur": 3.0, "args": ...}  ─> a span, microseconds
{"ph": "C", "pid": 0, "ts": 12.5, "args": {"held": 1024}}                    ─> bytes from then on

Megatron counts ranks with the stage outermost: stage = rank // (ranks // pipeline).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Literal, cast

from megatron_lynx.config.experts import as_spans
from megatron_lynx.config.job import Job
from megatron_lynx.config.loader import job_path, load_job
from megatron_lynx.errors import ConfigError, LynxError, PlanMismatch, Problem
from megatron_lynx.measure.run_outcome import RunOutcome, load_outcome
from megatron_lynx.plan.plan import Plan
from megatron_lynx.plan.plan_file import load_plan
from megatron_lynx.profiler.profile import Profile, load_profile
from megatron_lynx.timeline import MemoryCurve, Span, SpanKind, Timeline, nested
from megatron_lynx.units import GIB
from megatron_lynx.whole_file import json_in
from megatron_lynx.yaml_file import read_yaml

if TYPE_CHECKING:
    from megatron_lynx.measure.measurement import Measurement

MICRO = 1e6
ABOUT_TRACES = "give the file that --lynx-trace, compare or simulate --trace wrote; if it broke off, trace a step again"


@dataclass(frozen=True)
class ReadTrace:
    timeline: Timeline
    memory: Mapping[int, MemoryCurve]
    simulated: bool


def read_trace(data: Mapping[str, Any], where: str) -> ReadTrace:
    """Return the timeline of a trace. Raises ConfigError with the first event that cannot be read."""
    events = data["traceEvents"]
    if not isinstance(events, list):
        raise _unreadable(Problem(f"{where}: traceEvents", type(events).__name__, "a list of events", ABOUT_TRACES))
    rows: defaultdict[int, list[Span]] = defaultdict(list)
    held: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
    names = set()
    for number, event in enumerate(events):
        try:
            kind = event["ph"]
            if kind == "X":
                rows[int(event["pid"])].append(_span(event))
            elif kind == "C":
                held[int(event["pid"])].append((float(event["ts"]) / MICRO, int(event["args"]["held"])))
            elif event["name"] == "process_name":
                names.add(str(event["args"]["name"]).partition(" ")[0])
        except (KeyError, TypeError, ValueError) as error:
            found = f"{shorten(repr(event), 120)} ({error!r})"
            raise _unreadable(Problem(f"{where}: traceEvents.{number}", found, "an event of a trace", ABOUT_TRACES)) from None
    if not rows:
        raise _unreadable(Problem(where, "no event with a duration", "a traced step", ABOUT_TRACES))
    timeline = Timeline({row: tuple(nested(rows[row])) for row in sorted(rows)})
    memory = {row: MemoryCurve(*zip(*points, strict=True)) for row, points in held.items()}
    return ReadTrace(timeline, memory, names == {"stage"})


def _span(event: Mapping[str, Any]) -> Span:
    start_s, seconds = float(event["ts"]) / MICRO, float(event["dur"]) / MICRO
    if not (isfinite(start_s) and isfinite(seconds) and seconds >= 0):
        raise ValueError(f"it begins at {event['ts']} and lasts {event['dur']}")
    about = event.get("args", {})
    layer, half, micro_batch, window = (about.get(key) for key in ("layer", "half", "micro_batch", "window"))
    kind = cast(SpanKind, str(event["cat"]).replace("replay", "recompute"))  # 0.1's name; a later release may have more kinds
    return Span(kind, start_s, start_s + seconds, layer, half, micro_batch, window, str(event["name"]))


def _unreadable(problem: Problem) -> ConfigError:
    return ConfigError("this is no trace that can be drawn", [problem])


def stages_of_rows(trace: ReadTrace, plan: Plan | None, where: str) -> dict[int, int]:
    """Return the stage of each row of a trace. Raises `PlanMismatch` if the trace is of another job than the plan."""
    rows = list(trace.timeline.ranks)
    group = 1 if plan is None or trace.simulated else max(1, len(rows) // plan.parallel.pipeline)
    stages = {row: row // group for row in rows}
    if plan is None:
        return stages
    if problems := list(_wrong_layers(trace, stages, plan, where)):
        raise PlanMismatch("the trace is of another job than the plan", problems)
    return stages


ABOUT_RUNS = "give the trace of a run under this plan, or the plan of that run"


def _wrong_layers(trace: ReadTrace, stages: dict[int, int], plan: Plan, where: str) -> Iterator[Problem]:
    for row, spans in trace.timeline.ranks.items():
        owned = {layer for entry in plan.stages if entry.stage == stages[row] for layer in entry.layers}
        traced = {span.layer for span in spans if span.layer is not None}
        if not traced <= owned:
            said, needed = (", ".join(map(str, as_spans(layers))) or "none" for layers in (traced, owned))
            needed = f"layers {needed}, which stage {stages[row]} owns"
            yield Problem(f"{where}: rank {row}", f"layers {said}", needed, ABOUT_RUNS)


FileKind = Literal["plan", "profile", "job", "trace", "measurement", "outcome"]
KEYS: dict[FileKind, frozenset[str]] = {
    "plan": frozenset(("stages", "provenance")),
    "profile": frozenset(("source", "shape", "links")),
    "job": frozenset(("model", "cluster")),
    "trace": frozenset(("traceEvents",)),
    "measurement": frozenset(("subject", "settings", "machine")),
    "outcome": frozenset(("plan_digest", "reports")),
}

NEEDED = "a plan, a job, a profile, a trace, a measurement, lynx_outcome.json, or a folder of these"
MOST_TRACED_BYTES = GIB
"""Size limit of a JSON file. The trace of a step with a hundred thousand kernels has some 50 MiB."""


@dataclass
class Given:
    """Inputs. `names`: words of the command line; `sources`: the file of each kind."""

    names: tuple[str, ...]
    sources: dict[FileKind, str]
    plan: Plan | None = None
    profile: Profile | None = None
    job: Job | None = None
    trace: ReadTrace | None = None
    measurement: Measurement | None = None
    outcome: RunOutcome | None = None


def given_in(names: Iterable[str]) -> Given:
    """Read all named inputs. Raises ConfigError with every unreadable or repeated one."""
    names = tuple(names)
    given = Given(names, {})
    problems: list[Problem] = []
    for name in names:
        path = Path(name)
        inside = sorted(path.iterdir()) if path.is_dir() else ()
        files = [os.fspath(file) for file in inside if file.suffix in (".json", ".yaml", ".yml") and file.is_file()]
        for file in files if path.is_dir() else [name]:
            try:
                _add(given, file, required=not path.is_dir())
            except LynxError as error:
                problems += error.problems
        if path.is_dir() and not any(Path(source).parent == path for source in given.sources.values()) and not problems:
            problems.append(Problem(name, "a folder with nothing to draw", NEEDED))
    if problems:
        raise ConfigError("there is nothing that could be reported", problems)
    return given


def _add(given: Given, file: str, *, required: bool) -> None:
    if file.endswith(".json"):
        data: Mapping[str, Any] = json_in(file, NEEDED, todo=ABOUT_TRACES, most_bytes=MOST_TRACED_BYTES)
    else:
        data = read_yaml(file if Path(file).is_file() else job_path(file), NEEDED)
    kind = next((kind for kind, keys in KEYS.items() if keys <= data.keys()), None)
    if kind is None:
        if required:
            raise ConfigError(f"{file} cannot be used", [Problem(file, f"keys {', '.join(list(data)[:6]) or 'none'}", NEEDED)])
        return
    if kind in given.sources:
        raise ConfigError("one of each", [Problem(file, f"a second {kind}, beside {given.sources[kind]}", "one")])
    given.sources[kind] = file
    assert kind in {field.name for field in fields(Given)}
    setattr(given, kind, _read(kind, file, data))


def _read(kind: FileKind, file: str, data: Mapping[str, Any]) -> object:
    if kind == "trace":
        return read_trace(data, file)
    if kind == "measurement":
        from megatron_lynx.measure.measurement import load_measurement  # imports torch, which the rest does not

        return load_measurement(file)
    return {"plan": load_plan, "profile": load_profile, "job": load_job, "outcome": load_outcome}[kind](file)
