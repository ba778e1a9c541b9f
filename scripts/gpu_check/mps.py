"""CUDA's Multi-Process Service (MPS) while some ranks live: kernels of several processes then run side by side on one GPU.

    guardian   a shell: starts `nvidia-cuda-mps-control -d`, says so, reads until our end of its pipe is closed, says `quit`, and
               ends the daemon if that did not
    probe      a process that uses the GPU. Without a server of ours CUDA would say nothing, and contexts would take turns

The daemon is a program of the driver's that changes no setting of the device. Its pipes and logs are in a folder of its own, so
it serves nobody else. However this process ends, its pipe is closed then, and the guardian lets the daemon quit.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
SHARE = "45"
"""Percent of the multiprocessors that each of two ranks may use: together less than all, so that neither waits for the other."""

GUARDIAN = f"""
{CONTROL} -d </dev/null >"$CUDA_MPS_LOG_DIRECTORY/start" 2>&1 || exit 1
echo started
read -r _
daemon=$(cat "$CUDA_MPS_PIPE_DIRECTORY/{CONTROL}.pid" 2>/dev/null)
echo quit | {CONTROL} >"$CUDA_MPS_LOG_DIRECTORY/quit" 2>&1 &
[ -n "$daemon" ] || wait
for second in $(seq "$1"); do
    kill -0 "$daemon" 2>/dev/null || exit 0
    sleep 1
done
kill "$daemon" 2>/dev/null
"""
PROBE = "import torch; torch.zeros(1, device='cuda').item()"
PROBE_S = 120.0
QUIT_S = 20
"""Until a daemon that does not quit is ended. Its clients are gone by then."""


class Refused(Exception):
    """Why there is no MPS here."""


@contextmanager
def mps() -> Iterator[Mapping[str, str]]:
    """The environment of processes that are to be its clients. Raises `Refused` where it does not serve them."""
    if shutil.which(CONTROL) is None:
        raise Refused(f"MPS: {CONTROL} is not on the PATH")
    with tempfile.TemporaryDirectory(prefix="lynx-mps-", ignore_cleanup_errors=True) as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for place in places.values():
            Path(place).mkdir()
        own = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}  # it would count devices anew
        with _daemon(Path(folder), {**own, **places}):
            clients = {**places, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": SHARE}
            _probe(Path(folder), {**os.environ, **clients})
            yield clients


@contextmanager
def _daemon(folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    guardian = subprocess.Popen(
        ["sh", "-c", GUARDIAN, "sh", str(QUIT_S)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # an interrupt of the run is not for it
    )
    assert guardian.stdin is not None
    assert guardian.stdout is not None
    try:
        if guardian.stdout.readline().strip() != "started":
            raise Refused(f"MPS: {CONTROL} -d does not start: {_last_line(folder / 'log/start')}")
        yield
    finally:
        with suppress(OSError):
            guardian.stdin.close()
        guardian.wait()
        guardian.stdout.close()


def _probe(folder: Path, environment: Mapping[str, str]) -> None:
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=False, timeout=PROBE_S
        )
        asked = subprocess.run(
            [CONTROL], env=environment, input="get_server_list\n", capture_output=True, text=True, check=False, timeout=PROBE_S
        )
    except subprocess.TimeoutExpired as late:
        raise Refused(f"MPS: no answer within {late.timeout:.0f} s from {' '.join(late.cmd[:1])}") from late
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise Refused(f"MPS: a process that uses the GPU under it ends with {done.returncode}: {said}")
    if not any(line.strip().isdecimal() for line in asked.stdout.splitlines()):
        raise Refused(f"MPS: its daemon runs, but no process came to it: {_last_line(folder / 'log/control.log')}")


def _last_line(file: Path) -> str:
    """What a log ends with, in words for a reason."""
    try:
        lines = file.read_text(errors="replace").strip().splitlines()
    except OSError:
        return "it wrote no log"
    return lines[-1] if lines else "its log is empty"
