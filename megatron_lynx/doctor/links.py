"""NICs and NVLink of this machine, from /sys/class/infiniband and `nvidia-smi nvlink --status`.

/sys/class/infiniband/mlx5_0/ports/1/{state,rate}      4: ACTIVE          400 Gb/sec (4X NDR)
nvidia-smi nvlink --status                             GPU 0: ...         Link 0: 26.562 GB/s       one direction of one link
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megatron_lynx.config.cluster import Cluster
from megatron_lynx.doctor.environment import Finding, nvidia_smi

RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec\b")
LINK = re.compile(r"Link \d+: (\d+(?:\.\d+)?) GB/s\s*")
OFF = 0.1
"""Relative difference to the assumed rate that changes predictions noticeably."""


class Links(NamedTuple):
    nic_gbit: tuple[float, ...] = ()
    """Rate of each active port."""
    nvlink_gb_s: float | None = None
    """One direction of all links of the GPU with fewest; None without any."""

    @classmethod
    def of_machine(cls, root: Path = Path("/")) -> Links:
        return cls(nics(root), nvlink_of(nvidia_smi("nvlink", "--status")))

    @property
    def usual_gbit(self) -> float | None:
        """Rate of most ports, the larger one of two as frequent: a port for storage is often slower."""
        return max(self.nic_gbit, key=lambda rate: (self.nic_gbit.count(rate), rate), default=None)

    @property
    def in_words(self) -> str:
        rates = sorted(set(self.nic_gbit))
        nic = ", ".join(f"{self.nic_gbit.count(rate)} NICs of {rate:g} Gbit/s" for rate in rates) or "no active NIC found"
        return f"{nic}; {'no NVLink found' if self.nvlink_gb_s is None else f'NVLink {self.nvlink_gb_s:g} GB/s'}"

    def options(self, cluster: Cluster | None) -> Iterator[str]:
        """Yield the options that make seconds assume these links, where they differ from the cluster's."""
        nic, nvlink = (None, None) if cluster is None else (cluster.nic, cluster.nvlink)
        if self.usual_gbit is not None and not (nic and _alike(self.usual_gbit, 8 * nic.gb_per_s)):
            yield f"--nic-gbit {self.usual_gbit:g}"
        if self.nvlink_gb_s is not None and not (nvlink and _alike(self.nvlink_gb_s, nvlink.gb_per_s)):
            yield f"--nvlink-gb-s {self.nvlink_gb_s:g}"


def links(cluster: Cluster | None, found: Links) -> Iterator[Finding]:
    """Yield whether these links are those of `cluster`, which seconds assume; None: no cluster is named."""
    options = " ".join(found.options(cluster))
    if not options:
        yield Finding("links", "good" if found.nic_gbit or found.nvlink_gb_s else "note", found.in_words)
        return
    costs = "" if cluster is None else f"seconds are for other links, those of {cluster.name}"
    yield Finding("links", "note", found.in_words, costs, f"give {options}")


def nics(root: Path) -> tuple[float, ...]:
    """Return the Gbit/s of each active port, except of devices that cannot be read."""
    rates = []
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        try:
            state, rate = ((port / name).read_text(errors="replace") for name in ("state", "rate"))
        except OSError:
            continue
        if "ACTIVE" in state and (read := RATE.match(rate.strip())) and float(read[1]) > 0:
            rates.append(float(read[1]))
    return tuple(rates)


def nvlink_of(status: str) -> float | None:
    """Return the GB/s of the GPU with the slowest links in the output of `nvidia-smi nvlink --status`; None without any."""
    totals: list[float] = []
    for line in status.splitlines():
        if line.startswith("GPU "):
            totals.append(0.0)
        elif totals and (read := LINK.fullmatch(line.strip())):
            totals[-1] += float(read[1])
    return round(min(totals)) or None if totals else None


def _alike(found: float, assumed: float) -> bool:
    return abs(found / assumed - 1) <= OFF
