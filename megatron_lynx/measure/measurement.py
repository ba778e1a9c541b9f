"""The measurement file: samples, bytes and counts of one training step under several settings, on one machine, in one run."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from megatron_lynx.environment import version_of
from megatron_lynx.figures import MOST, Figures, of_all
from megatron_lynx.validation import Part, validated
from megatron_lynx.whole_file import json_in, write_whole

LinkKind = Literal["none", "loopback", "shaped", "device"]


class Links(Part):
    """The links between the ranks. shaped: emulated hosts of one rank each on one machine, with links of limited rate."""

    kind: LinkKind
    mbit_per_s: float | None = Field(default=None, gt=0)

    def __str__(self) -> str:
        rate = "" if self.mbit_per_s is None else f" at {self.mbit_per_s:g} Mbit/s"
        return {
            "none": "one rank, no links",
            "loopback": "loopback of one host, not shaped: communication takes next to no time, so windows hide next to nothing",
            "shaped": f"emulated hosts of one rank each on one machine, shaped links{rate}",
            "device": "real links between devices",
        }[self.kind]


class Machine(Part):
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
    device = torch.device(device)
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        python=platform.python_version(),
        torch=str(torch.__version__),
        megatron_core=version_of("megatron-core"),
        links=links,
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


Step = Callable[[], object]


@dataclass(frozen=True)
class Summary:
    """Median and quartiles of samples, in seconds. A single sample is its own quartiles."""

    median_s: float
    lower_s: float
    upper_s: float


def summarise(samples_s: Sequence[float]) -> Summary:
    """Their median and quartiles. Raises ValueError without samples."""
    if not samples_s:
        raise ValueError("no samples to summarise")
    if len(samples_s) == 1:
        return Summary(samples_s[0], samples_s[0], samples_s[0])
    lower, _, upper = quantiles(samples_s, n=4, method="inclusive")
    return Summary(median(samples_s), lower, upper)


def time_alternating(
    steps: Mapping[str, Step],
    *,
    rounds: int,
    warmups: int = 1,
    prepare: Callable[[str], object] = lambda setting: None,
    barrier: Step = lambda: None,
    device: torch.device | str = "cpu",
) -> dict[str, tuple[float, ...]]:
    """This rank's samples in seconds, by setting, one per round. Settings take turns: a machine that slows down slows them all.

    `prepare` puts a setting in force before each of its turns. Then ranks wait for each other and, on CUDA, for the device; a
    sample lasts from there until this rank's step is done. Every rank must call this with equal settings, in the same order.
    """
    device = torch.device(device)
    wait: Step = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    samples: dict[str, list[float]] = {setting: [] for setting in steps}
    for number in range(warmups + rounds):
        for setting, step in steps.items():
            prepare(setting)
            wait()
            barrier()
            start = time.perf_counter()
            step()
            wait()
            if number >= warmups:
                samples[setting].append(time.perf_counter() - start)
    return {setting: tuple(taken) for setting, taken in samples.items()}


class Counted(Figures):
    resident_bytes: Annotated[int, MOST]
    """Activations held between forward and backward: the most that was live at the end of any forward pass."""
    peak_bytes: Annotated[int, MOST]
    """The most that was live at any moment of the step. Both are above the level at the step's start."""


class RankResult(Counted):
    rank: int = Field(ge=0)
    step_s: tuple[float, ...] = Field(min_length=1)
    """Seconds of every timed step, in the order of the rounds."""
    gradients_equal: bool | None = None
    """Whether every parameter's gradient equals stock none's in every bit; None if it was not compared."""


class Setting(Part):
    name: str
    ours: bool
    ranks: tuple[RankResult, ...] = Field(min_length=1)

    @property
    def step_samples_s(self) -> tuple[float, ...]:
        """A step takes as long as its slowest rank: one sample per round."""
        return tuple(max(times) for times in zip(*(rank.step_s for rank in self.ranks), strict=True))

    @property
    def step(self) -> Summary:
        return summarise(self.step_samples_s)

    @property
    def figures(self) -> Counted:
        """Counts of all ranks together; bytes and seconds of the rank that has most."""
        return Counted(**of_all(self.ranks))

    @property
    def gradients_equal(self) -> bool | None:
        """Whether gradients equal stock's on every rank: False if one differs, else None if some were not compared."""
        answers = {rank.gradients_equal for rank in self.ranks}
        return False if False in answers else None if None in answers else True


class Skipped(Part):
    name: str
    reason: str


class Measurement(Part):
    """Everything of one comparison. The first setting is the one that ratios refer to: stock none."""

    version: Literal[1] = 1
    subject: str
    machine: Machine
    device: Literal["cpu", "cuda"]
    """Bytes are counted in another way on each (see `memory`)."""
    warmups: int = Field(ge=0)
    settings: tuple[Setting, ...] = Field(min_length=1)
    skipped: tuple[Skipped, ...] = ()
    counter_check: Any = Field(default=None, exclude=True)
    """In older files; ignored."""

    @property
    def reference(self) -> Setting:
        return self.settings[0]

    @property
    def rounds(self) -> int:
        return len(self.reference.step_samples_s)

    def exposed_s(self, setting: Setting) -> float:
        return setting.step.median_s - self.reference.step.median_s

    def ratio_to_none(self, setting: Setting) -> float:
        return setting.step.median_s / self.reference.step.median_s


def save_measurement(measurement: Measurement, path: str | os.PathLike[str]) -> None:
    write_whole(path, measurement.model_dump_json(indent=2) + "\n")


def load_measurement(path: str | os.PathLike[str]) -> Measurement:
    return validated(Measurement, json_in(path, "a measurement file (JSON)"), os.fspath(path))
