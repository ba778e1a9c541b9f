"""The nursery's own process: `python -m tests.nursery FILE [WHAT]`; it is asked at the socket that has this number.

With WHAT it is a process of another nursery, and imports what ranks (`megatron`), or launches (`training`), with its environment
import, too.
"""

from __future__ import annotations

import fcntl
import gc
import inspect
import io
import os
import runpy
import select
import signal
import socket
import sys
from argparse import ArgumentParser
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module

from tests.nursery.request import Request, send_number

OUT_OF_THE_WAY = 200
"""Number of the first file that is moved, so that it can be given the number that it has at the parent."""


def import_ahead() -> None:
    """What takes long and looks at nothing that a process may have of its own."""
    for module in ("torch._dynamo", "torch.distributed.run", "tests.instruments.__main__", "tests.apply.on_ranks"):
        import_module(module)
    assert not {"megatron", "transformer_engine", "apex"} & sys.modules.keys(), "a process has releases of its own"
    gc.collect()
    gc.freeze()


def import_megatron(what: str) -> None:
    """That of this process's import path, as ranks or launches have it. One that cannot be imported is for them to tell."""
    if what == "megatron":
        from megatron_lynx.testbed.rank_process import stand_in
    else:
        from tests.instruments.script_device import stand_in_for_gpu_machine as stand_in

    stand_in()
    with suppress(Exception):
        for module in MODULES[what]:
            import_module(module)
        if what == "training":
            remember_sources()
    assert len(os.listdir("/proc/self/task")) == 1, "a process that is forked has no other threads"
    gc.collect()
    gc.freeze()


def remember_sources() -> None:
    """Whenever Megatron parses arguments it reads the source of 28 classes for their help, a quarter of a small launch's time."""
    from megatron.training.arguments import add_megatron_arguments

    inspect.getsource = cache(inspect.getsource)
    add_megatron_arguments(ArgumentParser())


MODULES = {
    "megatron": (
        *("tests.instruments.groups", "tests.instruments.tiny_models", "tests.instruments.training"),
        *("megatron_lynx.apply", "tests.transparency.trials"),
    ),
    "training": ("megatron.training.training", "megatron_lynx.launch.script", "megatron_lynx.apply"),
}
"""What ranks import, and what launches do."""


def serve(listener: socket.socket, stood_in: Mapping[str, str]) -> Request:
    """Fork whatever is asked for, for ever. Returns in the processes alone. `stood_in`: variables that stand-ins have set."""
    ended, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(tell)
    running: dict[int, socket.socket] = {}
    while True:
        ready = select.select([listener, ended, *running.values()], [], [])[0]
        if ended in ready:
            os.read(ended, 4096)
            bury(running)
        for pid in [pid for pid, connection in running.items() if connection in ready]:  # nobody waits for it any more
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            running.pop(pid).close()
        if listener in ready:
            connection, _ = listener.accept()
            request, files = Request.receive(connection)
            if (pid := os.fork()) == 0:
                for inherited in (listener, connection, *running.values()):
                    inherited.detach()  # `become` closes them by number, and gives the numbers away
                become(request, files, stood_in)
                return request
            os.setpgid(pid, pid)
            for file in files:
                os.close(file)
            send_number(connection, pid)
            running[pid] = connection


def bury(running: dict[int, socket.socket]) -> None:
    """Hand out the exit statuses of all that ended; those that a signal ended have a negative one."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if (connection := running.pop(found[0], None)) is not None:
                with suppress(OSError):
                    send_number(connection, os.waitstatus_to_exitcode(found[1]))
                connection.close()


def become(request: Request, files: list[int], stood_in: Mapping[str, str]) -> None:
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
    os.environ.update({**request.environment, **stood_in})
    sys.path[:] = [request.folder, *python_path(), *of_python]
    sys.argv[:] = [request.module, *request.arguments]


def python_path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def main() -> None:
    from megatron_lynx.testbed.rank_process import die_with_parent

    die_with_parent()
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    before, stood_in = dict(os.environ), dict[str, str]()
    if what := sys.argv[2:]:
        import_megatron(*what)
        stood_in = dict(os.environ.items() - before.items())
    else:
        import_ahead()
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        request = serve(listener, stood_in)
    run_anew(request.module)


def run_anew(module: str) -> None:
    """As `python -m MODULE` does, though it may have been imported."""
    for name in (f"{module}.__main__", module):
        if name in sys.modules and not hasattr(sys.modules[name], "__path__"):
            del sys.modules[name]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
