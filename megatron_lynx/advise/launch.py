"""A launch that advice is asked about: also one that no plan goes with, if what it does today can be priced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lynx.config.job import Job
from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.launch_arguments import Reading, job_of, read_launch


@dataclass(frozen=True)
class Asked:
    """A launch, and its job. `refused`: what no plan goes with; the job is then that of an estimate."""

    job: Job
    reading: Reading
    refused: tuple[Problem, ...] = ()


def asked_launch(
    words: Sequence[str],
    cluster: str,
    gpus: int | None = None,
    changes: Mapping[str, Any] | None = None,
    *,
    strict: bool = False,
) -> Asked:
    """Raises `ConfigError` with all problems where the launch cannot even be priced."""
    reading = read_launch(words, gpus=gpus, strict=strict)
    if not reading.problems:
        return Asked(job_of(reading, cluster, changes), reading)
    as_it_is = read_launch(words, gpus=gpus, planning=False, strict=strict)
    try:
        return Asked(job_of(as_it_is, cluster, changes), as_it_is, reading.problems)
    except ConfigError:
        job_of(reading, cluster, changes)
        raise
