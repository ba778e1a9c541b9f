"""Where ranks of this run are: which GPU each uses, how NCCL joins them, and where it writes what it warns of.

    a GPU for each rank      NCCL joins them as it likes
    ranks share GPUs         rank r uses GPU r mod their number; each is a host of its own to NCCL, and sockets join them

NCCL refuses two ranks of one host that use one device ("Duplicate GPU detected"). It tells hosts apart by `NCCL_HOSTID`, where
that is set; from 2.30 on `NCCL_MULTI_RANK_GPU_ENABLE` allows it, too. The processes' contexts take turns on the device, and a
kernel of NCCL that waits for another rank spins for its whole turn: right, and slow.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from megatron_lynx.testbed.links import Links

MOST_LINES = 20
"""Of what NCCL wrote for one rank."""

SOCKETS: Mapping[str, str] = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_NET_PLUGIN": "none",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
}
"""NCCL's settings where ranks share a GPU. One that the caller's environment sets stays as it is there."""


class Places(Links):
    """The places of one pool of ranks.

    Args:
        folder: where NCCL writes, a file for each rank.
        gpus: how many GPUs there are.
        shared: whether there are more ranks than GPUs.
    """

    def __init__(self, folder: Path, gpus: int, shared: bool) -> None:
        super().__init__()
        self._folder = folder
        self._gpus = gpus
        self._shared = shared

    def environment(self, rank: int) -> dict[str, str]:
        said = {"NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"), "NCCL_DEBUG_FILE": str(self._folder / f"nccl-{rank}")}
        return {**super().environment(rank), **said, **(self._sharing(rank) if self._shared else {})}

    def _sharing(self, rank: int) -> dict[str, str]:
        return {"LOCAL_RANK": str(rank % self._gpus), "NCCL_HOSTID": f"rank-{rank}", **sockets()}

    def nccl_said(self) -> str:
        """The end of what NCCL wrote for each rank that it warned; nothing where it did not."""
        said = {file.name: file.read_text(errors="replace") for file in sorted(self._folder.glob("nccl-*"))}
        last = {name: text.strip().splitlines()[-MOST_LINES:] for name, text in said.items() if "WARN" in text}
        return "\n".join("\n".join([f"{name} said", *lines]) for name, lines in last.items())


def sockets() -> dict[str, str]:
    """`SOCKETS`, as they are for ranks started from here."""
    return {name: os.environ.get(name, value) for name, value in SOCKETS.items()}
