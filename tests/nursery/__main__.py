"""The nursery's own process: `python -m tests.nursery FILE`, where FILE is the number of the socket that it is asked at."""

from __future__ import annotations

import fcntl
import gc
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from importlib import import_module

from megatron_lynx.testbed import rank_process
from tests.nursery.request import RANK, ROOM, Request, send_number

ROOM_S = 20.0
"""A room without ranks that is not asked for one ends after so many seconds."""

OUT_OF_THE_WAY = 200
"""Number of the first file that is moved, so that it can be given the number that it has at the parent."""


def import_ahead() -> None:
    """What takes long and looks at nothing that a process may have of its own."""
    for module in ("torch._dynamo", "torch.distributed.run", "megatron_lynx.testbed.__main__", "tests.apply.on_ranks"):
        import_module(module)
    assert not {"megatron", "transformer_engine", "apex"} & sys.modules.keys(), "a process has releases of its own"
    gc.collect()
    gc.freeze()


def furnish() -> None:
    """What ranks need before all else: the stand-ins, and Megatron. What cannot be imported here, a rank may not need."""
    rank_process.get_ready()
    with suppress(Exception):
        for module in ("subject", "schedules", "profiling"):
            import_module(f"megatron_lynx.testbed.{module}")
    gc.collect()
    gc.freeze()


class Rooms:
    """Processes from which ranks are forked, by their environment."""

    def __init__(self, name: bytes) -> None:
        self._name = name
        """Of the nursery's socket; theirs have a number more."""
        self._rooms: dict[str, tuple[int, int]] = {}
        """Number and process."""
        self._made = 0

    def room(self, request: Request) -> tuple[int, int] | socket.socket:
        """Its number and process, or, in the process of a new room, what it is asked at."""
        key = json.dumps([request.environment, request.folder], sort_keys=True)
        if key not in self._rooms:
            self._made += 1
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(self._name + b"-%d" % self._made)
            listener.listen(64)
            if (pid := os.fork()) == 0:
                return listener
            listener.close()
            os.setpgid(pid, pid)
            self._rooms[key] = self._made, pid
        return self._rooms[key]

    def forget(self, ended: int) -> None:
        self._rooms = {key: room for key, room in self._rooms.items() if room[1] != ended}


def serve(listener: socket.socket, longest_s: float | None = None) -> Request | None:
    """Fork whatever is asked for. Returns in the processes alone; and None when nothing is there or asked for so long."""
    rooms = Rooms(listener.getsockname())
    ended, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(tell)
    running: dict[int, socket.socket] = {}
    while True:
        ready = select.select([listener, ended, *running.values()], [], [], None if running else longest_s)[0]
        if not ready:
            return None
        if ended in ready:
            os.read(ended, 4096)
            for pid in bury(running):
                rooms.forget(pid)
        for pid in [pid for pid, connection in running.items() if connection in ready]:  # nobody waits for it any more
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            running.pop(pid).close()
        if listener in ready:
            connection, _ = listener.accept()
            request, files = Request.receive(connection)
            if list(request.arguments) == [ROOM]:
                found = rooms.room(request)
                if isinstance(found, socket.socket):
                    for inherited in (listener, connection, *running.values()):
                        inherited.detach()
                    return live_in_room(request, found)
                with connection:
                    send_number(connection, found[0])
                    send_number(connection, found[1])
                continue
            if (pid := os.fork()) == 0:
                for inherited in (listener, connection, *running.values()):
                    inherited.detach()  # `become` closes them by number, and gives the numbers away
                become(request, files)
                return request
            os.setpgid(pid, pid)
            for file in files:
                os.close(file)
            send_number(connection, pid)
            running[pid] = connection


def live_in_room(request: Request, listener: socket.socket) -> Request | None:
    """Serve ranks of this environment. Returns in their processes; and None in the room's, when nobody needs it any more."""
    nursery = os.getppid()
    become(replace(request, files=[0, 1, 2, 3]), [os.open(os.devnull, os.O_RDONLY), 1, 2, listener.detach()])
    os.environ["LYNX_PARENT"] = str(nursery)
    rank_process.die_with_parent()
    before = dict(os.environ)
    furnish()
    changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
    gone = before.keys() - os.environ.keys()
    rank = serve(socket.socket(fileno=3), ROOM_S)
    if rank is not None:  # what the stand-ins have changed in the environment is changed in a rank's
        os.environ.update(changed)
        for name in gone:
            os.environ.pop(name, None)
    return rank


def bury(running: dict[int, socket.socket]) -> Iterator[int]:
    """Hand out the exit statuses of all that ended, which are told; those that a signal ended have a negative one."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found[0]
            if (connection := running.pop(found[0], None)) is not None:
                with suppress(OSError):
                    send_number(connection, os.waitstatus_to_exitcode(found[1]))
                connection.close()


def become(request: Request, files: list[int]) -> None:
    """Nothing of the nursery's is left in this process but its modules."""
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, OUT_OF_THE_WAY) for file in files]
    os.closerange(0, OUT_OF_THE_WAY)
    for file, number in zip(moved, request.files, strict=True):
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(number, "w", closefd=False), write_through=True) for number in (1, 2))
    of_nursery = {os.getcwd(), *python_path()}
    of_python = [entry for entry in sys.path if entry not in of_nursery]
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    sys.path[:] = [request.folder, *python_path(), *of_python]
    sys.argv[:] = [request.module, *request.arguments]


def python_path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def main() -> None:
    rank_process.die_with_parent()
    import_ahead()
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None and request.module == RANK:
        rank_process.main()
    elif request is not None:
        run_anew(request.module)


def run_anew(module: str) -> None:
    """As `python -m MODULE` does, though it may have been imported."""
    for name in (f"{module}.__main__", module):
        if name in sys.modules and not hasattr(sys.modules[name], "__path__"):
            del sys.modules[name]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
