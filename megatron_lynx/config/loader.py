"""Read job files, and the model and cluster files that they name.

jobs/demo.yaml                                       searched in this order
  model: models/tiny-llama                     ─>    next to the job file, then the bundled configs (with or without .yaml)
  model: {like: models/tiny-llama, seq: 512}   ─>    the same file, with these keys replaced
  cluster: {name: ...}                         ─>    no file: given in the job itself
    host_time: hosts/amd-epyc                  ─>    in a cluster: searched as above
  + overrides                                  ─>    single values by path: {"parallel.tensor": 4, "model.seq": 512}
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from megatron_lynx.config.cluster import Cluster, HostTime
from megatron_lynx.config.job import Job
from megatron_lynx.config.model import Model
from megatron_lynx.errors import ConfigError, Problem, suggestion
from megatron_lynx.validation import validated
from megatron_lynx.whole_file import text_in
from megatron_lynx.yaml_file import read_yaml

PARTS: dict[str, type[BaseModel]] = {"model": Model, "cluster": Cluster}
LIKE = "like"


def bundled_configs() -> Path:
    package = Path(__file__).parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def load_job(path: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None) -> Job:
    """`path` may also name a bundled one: `jobs/demo`. `overrides` replace single values, by path in the job (`batch.micro`).
    Raises `ConfigError` with every problem of the job and of the files it names."""
    file = job_path(path)
    return job_from(read_yaml(file), file, overrides or {})


def job_from(data: dict[str, Any], file: Path, overrides: Mapping[str, Any] = MappingProxyType({})) -> Job:
    """The job of a file's content, which is changed; otherwise as `load_job`."""
    problems: list[Problem] = []
    data.update({place: value for place, value in overrides.items() if "." not in place})  # before named files are read
    unread = []
    for key in [key for key in PARTS if key in data]:
        try:
            data[key] = _part(key, data[key], file)
        except ConfigError as error:
            problems += error.problems
            unread.append(f"{file}: {key}")
            del data[key]
    problems += override(data, {place: value for place, value in overrides.items() if "." in place})
    batch = data.get("batch")
    if isinstance(batch, dict) and isinstance(batch.get("lengths"), str):
        try:
            data["batch"] = {**batch, "lengths": lengths_in(file.parent / batch["lengths"])}
        except ConfigError as error:
            raise ConfigError(f"{file} is not a valid job", [*problems, *error.problems]) from None
    try:
        job = validated(Job, data, file)
    except ConfigError as error:
        problems += [_blamed(problem, file, overrides) for problem in error.problems if problem.where not in unread]
    if problems:
        raise ConfigError(f"{file} is not a valid job", problems)
    return job


def lengths_in(file: Path) -> dict[str, float]:
    needed = "lengths of sequences in tokens, whole numbers from 1, separated by blanks or lines"
    headline = "the lengths cannot be read"
    text = text_in(file, needed, headline=headline)
    try:
        lengths = [int(word) for word in text.split()]
    except ValueError as error:
        finding = str(error)
    else:
        if lengths and min(lengths) >= 1:
            return {"mean": fmean(lengths), "mean_square": fmean(length**2 for length in lengths)}
        finding = "no lengths" if not lengths else f"a length of {min(lengths)}"
    raise ConfigError(headline, [Problem(str(file), finding, needed)])


def job_path(name: str | os.PathLike[str]) -> Path:
    return _file_of(os.fspath(name), where=os.fspath(name), kind="jobs")


def load_cluster(name: str, where: str) -> Cluster:
    """Load a cluster by bundled name (`a100-80g`, `clusters/a100-80g`) or by path. `where`: place of the name, for errors."""
    file = _file_of(name, where, "clusters")
    return validated(Cluster, cluster_data(file), file)


def load_host_time(name: str, where: str) -> HostTime:
    file = _file_of(name, where, "hosts")
    return validated(HostTime, read_yaml(file), file)


def load_model(name: str, where: str) -> Model:
    file = _file_of(name, where, "models")
    return validated(Model, read_yaml(file), file)


def _file_of(name: str, where: str, kind: str, beside: Path = Path()) -> Path:
    """`name`: a path, or a bundled file's, also a unique prefix of its name, with or without its folder, in any case."""
    for folder in (beside, bundled_configs()):
        for candidate in (folder / name, folder / f"{name}.yaml"):
            if os.path.exists(candidate) and not os.path.isdir(candidate):
                return candidate
    bundled = {file.stem: file for file in sorted(bundled_configs().glob(f"{kind}/*.yaml"), key=lambda file: file.stem)}
    short = name.lower().removeprefix(f"{kind}/").removesuffix(".yaml")
    alike = [short] if short in bundled else [stem for stem in bundled if short and f"{stem}-".startswith(f"{short}-")]
    alike = alike or [stem for stem in bundled if short and stem.startswith(short)]
    if len(alike) == 1:
        return bundled[alike[0]]
    finding = f"{name!r}, with which {len(alike)} names begin" if alike else f"no file {name!r}"
    beginnings = [stem.partition("-")[0] for stem in bundled]
    needed, todo = f"a path, or one of {', '.join(alike or bundled)}", "" if alike else suggestion(short, [*bundled, *beginnings])
    raise ConfigError(f"{name} was not found", [Problem(where, finding, needed, todo)])


def cluster_data(file: Path) -> dict[str, Any]:
    return _with_host_time(read_yaml(file), file)


def _with_host_time(cluster: dict[str, Any], file: Path) -> dict[str, Any]:
    name = cluster.get("host_time")
    if not isinstance(name, str):
        return cluster
    named = _file_of(name, f"{file}: host_time", "hosts", file.parent)
    data = read_yaml(named)
    validated(HostTime, data, named)
    return {**cluster, "host_time": data}


def _part(key: str, value: Any, job_file: Path) -> Any:
    if isinstance(value, dict):
        changed = {name: given for name, given in value.items() if name != LIKE}
        changed = _with_host_time(changed, job_file) if key == "cluster" else changed
        like = _from_file(key, value[LIKE], job_file, where=f"{job_file}: {key}.{LIKE}") if LIKE in value else {}
        return {**like, **changed}
    return _from_file(key, value, job_file, where=f"{job_file}: {key}") if isinstance(value, str) else value


def _from_file(key: str, name: Any, job_file: Path, where: str) -> dict[str, Any]:
    if not isinstance(name, str):
        raise ConfigError(f"{where} names no file", [Problem(where, repr(name), f"a name, as {key}s/NAME, or a path")])
    file = _file_of(name, where, f"{key}s", job_file.parent)
    data = cluster_data(file) if key == "cluster" else read_yaml(file)
    validated(PARTS[key], data, file)
    return data


def override(data: dict[str, Any], overrides: Mapping[str, Any]) -> list[Problem]:
    """Set each value at its path and return the problems. The job's own validation finds misspelt last names."""
    problems = []
    for place, value in overrides.items():
        *path, last = place.split(".")
        target: Any = data
        for key in path:
            target = target.setdefault(key, {}) if isinstance(target, dict) else None
        if isinstance(target, dict):
            target[last] = value
        else:
            problems.append(Problem(f"override {place}", "a single value above it", f"a mapping at {'.'.join(path)}"))
    return problems


def _blamed(problem: Problem, file: Path, overrides: Mapping[str, Any]) -> Problem:
    key = problem.where.removeprefix(f"{file}: ")
    for place in overrides:
        if key == place or (problem.finding == "an unknown key" and place.startswith(f"{key}.")):
            return replace(problem, where=f"override {place}")
    return problem
