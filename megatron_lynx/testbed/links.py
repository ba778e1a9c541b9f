"""Two hosts on one machine: network namespaces, joined by a cable of a chosen rate.

    host 0 (namespace)                       host 1 (namespace)            rank r runs on host r mod 2
      lynx0 198.18.0.1/30 ═══ veth pair ═══ lynx1 198.18.0.2/30            loopback inside a host stays fast
      tc tbf rate R                          tc tbf rate R                 each end shapes what it sends

A collective over the cable then really takes time in which a pinned core idles, which is what a window is.

A namespace has no name: it is held by an open file of this process and by the ranks in it, and is gone, with its ends
of the cable, when they are, however they end. The cable is made inside host 0, so this machine's own network never sees
it, and its addresses (RFC 2544's, for benchmarks) cannot clash with anything.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from abc import ABC, abstractmethod
from contextlib import suppress
from types import TracebackType

ADDRESSES = ("198.18.0.1", "198.18.0.2")
INTERFACES = ("lynx0", "lynx1")
TOOLS = ("unshare", "nsenter", "ip", "tc")


class Links(ABC):
    """The hosts that ranks run on and what joins them."""

    shaped: bool
    """Whether a link of limited rate lies between neighbouring ranks."""
    description: str
    """One sentence for people: what the network is, and why, if it is not what was asked for."""

    @abstractmethod
    def command_prefix(self, rank: int) -> list[str]:
        """What starts a command on the rank's host; it replaces itself by the command, so the process id stays."""

    @abstractmethod
    def environment(self, rank: int) -> dict[str, str]:
        """Where the rank finds the others (MASTER_ADDR, GLOO_SOCKET_IFNAME)."""

    @abstractmethod
    def set_rate(self, rate_mbit: float) -> None:
        """Shape both directions anew, in Mbit/s, also while ranks are running. Without a shaped link nothing changes."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the hosts. They end with their last rank."""

    def __enter__(self) -> Links:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Loopback(Links):
    """All ranks on this machine, on its loopback interface, as fast as it is."""

    shaped = False

    def __init__(self, reason: str = "") -> None:
        self.description = "ranks talk over this machine's loopback, unshaped" + (f": {reason}" if reason else "")

    def command_prefix(self, rank: int) -> list[str]:
        return []

    def environment(self, rank: int) -> dict[str, str]:
        return {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}

    def set_rate(self, rate_mbit: float) -> None:
        """Nothing to shape: `shaped` and `description` say so."""

    def close(self) -> None:
        """Loopback belongs to the machine."""


class ShapedHosts(Links):
    """Two namespaces and a cable. Made by `shaped_hosts`.

    Raises:
        OSError, subprocess.SubprocessError: this machine does not let us.
    """

    shaped = True

    def __init__(self, rate_mbit: float) -> None:
        self._namespaces: list[int] = []
        try:
            self._namespaces += [new_namespace(), new_namespace()]
            far_end = self._path(1)
            self._on(0, "ip", "link", "add", INTERFACES[0], "type", "veth", "peer", "name", INTERFACES[1], "netns", far_end)
            for host, (name, address) in enumerate(zip(INTERFACES, ADDRESSES, strict=True)):
                self._on(host, "ip", "address", "add", f"{address}/30", "dev", name)
                self._on(host, "ip", "link", "set", "lo", "up")
                self._on(host, "ip", "link", "set", name, "up")
            self.set_rate(rate_mbit)
        except BaseException:
            self.close()
            raise

    def set_rate(self, rate_mbit: float) -> None:
        """Shape both directions anew.

        A queue longer than any TCP window drops nothing; the burst holds two of the kernel's 64 KiB segments.
        """
        check_rate(rate_mbit)
        shape = ["rate", f"{round(rate_mbit * 1e6)}bit", "burst", "128kb", "limit", "64mb"]
        for host, name in enumerate(INTERFACES):
            self._on(host, "tc", "qdisc", "replace", "dev", name, "root", "tbf", *shape)
        self.description = f"two hosts (network namespaces) joined by a link of {rate_mbit:g} Mbit/s each way"

    def command_prefix(self, rank: int) -> list[str]:
        return ["nsenter", f"--net={self._path(rank % 2)}", "--"]

    def environment(self, rank: int) -> dict[str, str]:
        # Torch warns that these hosts have no names.
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        return {"MASTER_ADDR": ADDRESSES[0], "GLOO_SOCKET_IFNAME": INTERFACES[rank % 2], **quiet}

    def close(self) -> None:
        while self._namespaces:
            os.close(self._namespaces.pop())

    def _path(self, host: int) -> str:
        return f"/proc/{os.getpid()}/fd/{self._namespaces[host]}"

    def _on(self, host: int, *command: str) -> None:
        subprocess.run([*self.command_prefix(host), *command], check=True, capture_output=True, text=True)


def shaped_hosts(rate_mbit: float) -> Links:
    """Two hosts joined by a link of `rate_mbit` Mbit/s each way, or loopback with the reason in its description.

    Needs root (or its network capabilities) and the tools `unshare nsenter ip tc`.
    """
    check_rate(rate_mbit)
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return Loopback(f"shaping a link needs {', '.join(missing)}, not found on this machine")
    try:
        return ShapedHosts(rate_mbit)
    except subprocess.CalledProcessError as error:
        return Loopback(f"`{' '.join(error.cmd)}` failed ({error.stderr.strip()}); shaping a link needs root")
    except OSError as error:
        return Loopback(f"network namespaces are not to be had here ({error}); shaping a link needs root")


def check_rate(rate_mbit: float) -> None:
    if not rate_mbit > 0:
        raise ValueError(f"rate_mbit must be positive, found {rate_mbit}")


def new_namespace() -> int:
    """A file descriptor that holds a new network namespace. `unshare` lives only until it is opened."""
    with subprocess.Popen(
        ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    ) as maker:
        assert maker.stdin is not None
        assert maker.stdout is not None
        assert maker.stderr is not None
        with suppress(BrokenPipeError):
            maker.stdin.write(b"ready\n")  # unbuffered: what nobody takes would be tried again when the file is closed
        if not maker.stdout.readline():
            raise PermissionError(maker.stderr.read().decode().strip())
        return os.open(f"/proc/{maker.pid}/ns/net", os.O_RDONLY)
