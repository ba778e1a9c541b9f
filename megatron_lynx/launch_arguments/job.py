"""Makes a job of a launch and a cluster, or says everything that prevents it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lynx.config import Job
from megatron_lynx.config.loader import load_cluster
from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.launch_arguments.command_line import HEADLINE
from megatron_lynx.launch_arguments.fact import Fact, as_job_data
from megatron_lynx.launch_arguments.head_facts import refused_in_pieces
from megatron_lynx.launch_arguments.reading import Reading
from megatron_lynx.launch_arguments.today import against_megatron
from megatron_lynx.validation import validated


def job_of(reading: Reading, cluster: str, changes: Mapping[str, Any] | None = None) -> Job:
    """The job of a launch on a cluster (its name, or its file). `changes`: values of the job that no flag says, by
    their place in it (`{"budget.memory_gib": 70}`).

    Raises `ConfigError` with all problems: of the launch, of the cluster's name, of a job that does not add up.
    """
    problems: list[Problem] = list(reading.problems)
    if any(place.startswith("head.") for place in changes or {}):
        problems += refused_in_pieces(reading.given)
    try:
        machine = load_cluster(cluster, "--cluster").model_dump(mode="json")
    except ConfigError as error:
        raise ConfigError(HEADLINE, [*problems, *error.problems]) from None
    try:
        data = as_job_data([*reading.facts, *(Fact(place, value, "asked for") for place, value in (changes or {}).items())])
        job = validated(Job, {**data, "cluster": machine}, "launch")
    except ConfigError as error:
        # What a missing or misread flag leaves out of the job has been said already, by the flag's name.
        problems += [] if problems else error.problems
    else:
        problems += against_megatron(reading.given, reading.today, job)
    if problems:
        raise ConfigError(HEADLINE, problems)
    return job
