"""Which machine, software and links a measurement ran on: what a reader needs to judge its figures."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

LinkKind = Literal["none", "loopback", "shaped", "device"]


class Links(BaseModel):
    """What the ranks' communication went over.

    none: one rank. loopback: processes of one host, unshaped. shaped: processes of one host, as two emulated hosts; communication
    between these takes the time of a link of limited rate. device: real links between devices or hosts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: LinkKind
    mbit_per_s: float | None = Field(default=None, gt=0)
    """Rate of a shaped link."""

    def __str__(self) -> str:
        rate = "" if self.mbit_per_s is None else f" at {self.mbit_per_s:g} Mbit/s"
        return {
            "none": "one rank, no links",
            "loopback": "loopback of one host, not shaped: communication takes next to no time, so windows hide next to nothing",
            "shaped": f"two emulated hosts on one machine, shaped link{rate}",
            "device": "real links between devices",
        }[self.kind]


class Machine(BaseModel):
    """The machine and the software that a measurement ran on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu: str
    cores: int = Field(ge=1)
    """Cores that this process may run on."""
    gpu: str | None = None
    python: str
    torch: str
    megatron_core: str | None = None
    links: Links

    def __str__(self) -> str:
        device = f"{self.gpu}, {self.cpu}" if self.gpu else self.cpu
        megatron = f", megatron-core {self.megatron_core}" if self.megatron_core else ""
        return f"{device} ({self.cores} cores), Python {self.python}, torch {self.torch}{megatron}; links: {self.links}"


def this_machine(links: Links, device: torch.device | str = "cpu") -> Machine:
    """The facts of the machine this runs on. `device` decides whether a GPU is named."""
    device = torch.device(device)
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        python=platform.python_version(),
        torch=str(torch.__version__),
        megatron_core=_version("megatron-core"),
        links=links,
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
