"""What the run finds on this machine, and why it cannot begin."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_lynx.apply.releases import KNOWN, minor_of
from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.version import __version__
from scripts.gpu_check.places import sockets

CANNOT_BEGIN = "the acceptance run cannot begin"

COUNTS = (1, 2, 4, 8)
"""Numbers of GPUs that there are parts for."""


@dataclass(frozen=True)
class Machine:
    """What was found. A dry run has as many ranks as it asks for."""

    dry: bool
    gpus: int
    """How many are used."""
    devices: tuple[str, ...]
    """Names of the GPUs that torch can use."""
    nccl: str | None
    """NCCL's version; None where torch has none."""
    te: str | None = None
    """Transformer Engine's version, if it is installed."""
    facts: dict[str, str] = field(default_factory=dict)
    """Versions and settings that whoever reads the results wants to know."""
    asked: int | None = None
    """The ranks that were asked for; None: one for each GPU."""

    @property
    def ranks(self) -> int:
        return self.gpus if self.asked is None else self.asked

    def shared_by(self, ranks: int) -> bool:
        """Whether so many ranks share GPUs."""
        return ranks > self.gpus


def found(*, dry: bool, gpus: int | None, ranks: int | None = None) -> Machine:
    """This machine, for so many GPUs and ranks; by default for all that there are parts for, and a rank for each.

    Raises `ConfigError` where that cannot be.
    """
    devices = () if dry else tuple(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if devices and dist.is_nccl_available() else None
    most = 2 if dry else max((count for count in COUNTS if count <= len(devices)), default=1)
    if gpus is None:
        gpus = most if ranks not in COUNTS else min(most, ranks)
    facts = _facts(dry)
    if ranks is not None and ranks > gpus:
        facts["NCCL where ranks share"] = ", ".join(f"{name}={value}" for name, value in sockets().items())
    machine = Machine(dry, gpus, devices, nccl, _version("transformer-engine"), facts, ranks)
    if wrong := [*problems(machine)]:
        raise ConfigError(CANNOT_BEGIN, wrong)
    return machine


def problems(machine: Machine) -> Iterator[Problem]:
    """Why the run cannot begin on such a machine."""
    if machine.gpus not in COUNTS:
        yield Problem("--gpus", str(machine.gpus), "1, 2, 4 or 8", "there are parts for these numbers")
        return
    if machine.ranks not in COUNTS:
        yield Problem("--ranks", str(machine.ranks), "1, 2, 4 or 8", "there are parts for these numbers")
        return
    if machine.ranks < machine.gpus:
        yield Problem(
            "--ranks", f"{machine.ranks} for {machine.gpus} GPUs", "a rank for each GPU at least", "ask for fewer --gpus"
        )
    core = machine.facts.get("megatron-core")
    if core == "none" or (core is not None and minor_of(core) not in KNOWN):
        yield Problem(
            "megatron-core", core.replace("none", "none installed"), f"one of {', '.join(KNOWN)}", "install one of these"
        )
    if machine.dry:
        return
    if not machine.devices:
        built = "without CUDA" if machine.facts.get("CUDA") == "None" else f"for CUDA {machine.facts.get('CUDA')}"
        todo = f"with --dry-run this runs on CPU ranks; torch is built {built}"
        yield Problem("GPUs", "none that torch can use", "one at least", todo)
        return
    if machine.gpus > len(machine.devices):
        there = f"{machine.gpus}, and {len(machine.devices)} on this machine"
        fitting = max(count for count in COUNTS if count <= len(machine.devices))
        beside = f"; with --ranks {machine.gpus} beside it, ranks share it" if fitting == 1 else ""
        yield Problem("--gpus", there, "no more than there are", f"ask for {fitting}{beside}")
    kinds = {name: number for number, name in reversed(list(enumerate(machine.devices[: machine.gpus])))}
    if len(kinds) > 1:
        listed = ", ".join(f"device {number} is {name}" for name, number in sorted(kinds.items(), key=lambda kind: kind[1]))
        todo = "choose devices of one kind with CUDA_VISIBLE_DEVICES: ratios of two kinds mean nothing"
        yield Problem("GPUs", listed, "one kind", todo)
    if machine.nccl is None:
        yield Problem("torch", f"{torch.__version__} without NCCL", "one with NCCL", "ranks on GPUs talk through it")


def _facts(dry: bool) -> dict[str, str]:
    facts = {
        "megatron-lynx": f"{__version__} {_commit()}".strip(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "CUDA": str(torch.version.cuda),
        "megatron-core": _version("megatron-core") or "none",
        "Transformer Engine": _version("transformer-engine") or "none",
        "system": f"{platform.system()} {platform.release()}, {os.cpu_count()} processors",
    }
    if not dry and torch.cuda.is_available():
        facts["driver"] = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        facts["compute capability"] = ".".join(map(str, torch.cuda.get_device_capability(0)))
        facts["memory"] = f"{torch.cuda.get_device_properties(0).total_memory / 2**30:.0f} GiB"
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"):
        facts[name] = os.environ.get(name, "not set")
    return facts


def _commit() -> str:
    return _said("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")


def _said(*command: str) -> str:
    """The first line that a command prints; nothing where there is none."""
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return text.partition("\n")[0].strip()


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
