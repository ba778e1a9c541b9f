"""What a report is to be made from: files of every kind that this package writes, each recognised by its contents.

plan.yaml, profile.yaml, jobs/demo          keys of YAML
trace.json, measurement.json, ...           keys of JSON
a folder                                    all of these that lie in it; others are passed over
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_lynx.config.job import Job
from megatron_lynx.config.loader import job_path, load_job
from megatron_lynx.errors import ConfigError, LynxError, Problem
from megatron_lynx.measure.run_outcome import RunOutcome, load_outcome
from megatron_lynx.plan.plan import Plan
from megatron_lynx.plan.plan_file import load_plan
from megatron_lynx.profiler.profile import Profile, load_profile
from megatron_lynx.report.trace_file import ABOUT_TRACES, ReadSimulation, ReadTrace, read_simulation, read_trace
from megatron_lynx.units import GIB
from megatron_lynx.whole_file import json_in
from megatron_lynx.yaml_file import read_yaml

if TYPE_CHECKING:
    from megatron_lynx.measure.measurement import Measurement

FileKind = Literal["plan", "profile", "job", "trace", "simulation", "measurement", "outcome"]

KEYS: dict[FileKind, frozenset[str]] = {
    "plan": frozenset(("stages", "provenance")),
    "profile": frozenset(("source", "shape", "links")),
    "job": frozenset(("model", "cluster")),
    "trace": frozenset(("traceEvents",)),
    "simulation": frozenset(("passes_s", "stages")),
    "measurement": frozenset(("subject", "settings", "machine")),
    "outcome": frozenset(("plan_digest", "reports")),
}
"""Keys by which a file is recognised: it has all of them."""

NEEDED = (
    "a plan, a job, a profile, a trace, a measurement, lynx_outcome.json, what `simulate --json` printed, or a folder of these"
)

MOST_TRACED_BYTES = GIB
"""Largest JSON file: the trace of a step of a hundred thousand kernels has some 50 MiB."""


@dataclass
class Given:
    """What was found. `names`: as they were asked for; `sources`: the file of each kind."""

    names: tuple[str, ...]
    sources: dict[FileKind, str]
    plan: Plan | None = None
    profile: Profile | None = None
    job: Job | None = None
    trace: ReadTrace | None = None
    simulation: ReadSimulation | None = None
    measurement: Measurement | None = None
    outcome: RunOutcome | None = None


def given_in(names: Iterable[str]) -> Given:
    """Reads everything that is named. Raises ConfigError with all that cannot be read, or is there twice."""
    names = tuple(names)
    given = Given(names, {})
    problems: list[Problem] = []
    for name in names:
        path = Path(name)
        for file in _files_in(path) if path.is_dir() else [name]:
            try:
                _add(given, file, required=not path.is_dir())
            except LynxError as error:
                problems += error.problems
        if path.is_dir() and not any(Path(source).parent == path for source in given.sources.values()) and not problems:
            problems.append(Problem(name, "a folder with nothing to draw", NEEDED))
    if problems:
        raise ConfigError("there is nothing that could be reported", problems)
    return given


def _files_in(folder: Path) -> list[str]:
    return sorted(os.fspath(file) for file in folder.iterdir() if file.suffix in (".json", ".yaml", ".yml") and file.is_file())


def _add(given: Given, file: str, *, required: bool) -> None:
    if file.endswith(".json"):
        data: Mapping[str, Any] = json_in(file, NEEDED, todo=ABOUT_TRACES, most_bytes=MOST_TRACED_BYTES)
    else:
        data = read_yaml(file if Path(file).is_file() else job_path(file))
    kind = next((kind for kind, keys in KEYS.items() if keys <= data.keys()), None)
    if kind is None:
        if required:
            raise ConfigError(f"{file} cannot be used", [Problem(file, f"keys {', '.join(list(data)[:6]) or 'none'}", NEEDED)])
        return
    if kind in given.sources:
        raise ConfigError("one of each", [Problem(file, f"a second {kind}, beside {given.sources[kind]}", "one")])
    given.sources[kind] = file
    assert kind in {each.name for each in fields(Given)}
    setattr(given, kind, _read(kind, file, data))


def _read(kind: FileKind, file: str, data: Mapping[str, Any]) -> object:
    if kind == "trace":
        return read_trace(data, file)
    if kind == "simulation":
        return read_simulation(data, file)
    if kind == "measurement":
        from megatron_lynx.measure.measurement import load_measurement  # needs torch, which the rest does not

        return load_measurement(file)
    return {"plan": load_plan, "profile": load_profile, "job": load_job, "outcome": load_outcome}[kind](file)
