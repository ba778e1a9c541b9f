"""Finds settings of this machine, or of a launch, that keep recomputation from overlapping with communication.

machine       versions, fingerprints, GPUs, NUMA, host memory, NICs and NVLink
environment   variables: waits, the allocator, hardware queues, kernels that compete with NCCL's in windows
launch        flags that remove windows; host-bound passes
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_lynx.config.cluster import HostTime
from megatron_lynx.config.loader import load_cluster
from megatron_lynx.doctor.environment import (
    Finding,
    beside_collectives,
    environment,
    gpus,
    hardware_queues,
    machine,
    software,
)
from megatron_lynx.doctor.launch import Unmeasured, host_time, launch
from megatron_lynx.doctor.links import Links, links
from megatron_lynx.environment import version_of
from megatron_lynx.launch_arguments import read_launch
from megatron_lynx.plan import load_plan

__all__ = ["Finding", "Unmeasured", "findings"]


def findings(
    words: Sequence[str] = (),
    *,
    measured: HostTime | Unmeasured | None = None,
    cluster: str | None = None,
    changes: Mapping[str, Any] | None = None,
    plan_file: str | os.PathLike[str] | None = None,
) -> Iterator[Finding]:
    """All findings about this machine and, if given, a launch. Raises `ConfigError` for words that are no launch, or a bad plan
    file.

    `measured`: this machine's host time. `cluster`: of the launch, judged instead of a machine without GPUs. `changes`: of its
    job. `plan_file`: its plan.
    """
    reading = read_launch(words) if words else None
    plan = None if plan_file is None else load_plan(plan_file)
    variables = {**os.environ, **dict(reading.command.environment if reading else ())}
    yield from software()
    elsewhere = None if cluster is None or gpus() else load_cluster(cluster, "--cluster")
    elsewhere = None if elsewhere is None or elsewhere.node is None else elsewhere
    devices = gpus() if elsewhere is None else [elsewhere.name]
    yield from machine(reading.command.launcher if reading else (), elsewhere=elsewhere)
    if gpus():
        yield from links(None if cluster is None else load_cluster(cluster, "--cluster"), Links.of_machine())
    yield from hardware_queues(variables, reading.given if reading else None, devices)
    installed = {"torch": version_of("torch") or "", "megatron_core": version_of("megatron-core", "megatron_core") or ""}
    nccl_ub = reading is not None and bool(reading.given["nccl_ub"])
    yield from environment(variables, gpus(), **installed, nccl_ub=nccl_ub)
    if reading is not None:
        yield from launch(reading, variables)
    yield from beside_collectives(reading, variables, plan)
    if measured is not None:
        yield from host_time(measured, words, cluster, plan, changes)
