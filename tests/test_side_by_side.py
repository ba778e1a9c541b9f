"""Ranks at once on one GPU, as far as that can be tried without one: MPS is started and ended, and a profile is read.

In place of the driver's control program there is a shell script that notes how it is called.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scripts.gpu_check import mps
from scripts.gpu_check.beside import ANNOTATION, Beside, beside
from scripts.gpu_check.side_by_side import differing, in_words, unseen

CONTROL = """#!/bin/sh
if [ "$1" = -d ]; then
    echo "start $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY ${CUDA_VISIBLE_DEVICES-all}" >>"$CALLS"
    if [ -n "$STAYS" ]; then
        sleep 60 &
        echo $! >"$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid"
    fi
    echo "something before"; echo "$SAYS"; exit "${STATUS:-0}"
fi
read -r asked
echo "$asked" >>"$CALLS"
if [ "$asked" = get_server_list ]; then echo "$SERVERS"; fi
"""
UNDER_MPS = """
import time
from scripts.gpu_check import mps
mps.PROBE = "pass"
with mps.mps():
    print("up", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the control program's calls are noted. It starts, and a server is there."""
    program = tmp_path / mps.CONTROL
    program.write_text(CONTROL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("SERVERS", "4711")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(mps, "PROBE", "pass")
    return tmp_path / "calls"


def test_mps_has_folders_of_its_own_and_quits(calls: Path) -> None:
    with mps.mps() as environment:
        pipe, log = environment["CUDA_MPS_PIPE_DIRECTORY"], environment["CUDA_MPS_LOG_DIRECTORY"]
        assert calls.read_text().splitlines() == [f"start {pipe} {log} all", "get_server_list"]
        assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "45"
        assert Path(pipe).is_dir()
    assert calls.read_text().splitlines()[-1] == "quit"
    assert not Path(pipe).exists()


def test_a_daemon_that_does_not_quit_is_ended(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAYS", "yes")
    monkeypatch.setattr(mps, "QUIT_S", 1)
    with mps.mps() as environment:
        daemon = int(Path(environment["CUDA_MPS_PIPE_DIRECTORY"], f"{mps.CONTROL}.pid").read_text())
        os.kill(daemon, 0)
    assert calls.read_text().splitlines()[-1] == "quit"
    patience = 200
    while state_of(daemon) not in ("gone", "Z") and patience:  # a busy machine delivers a signal late
        time.sleep(0.05)
        patience -= 1
    assert state_of(daemon) in ("gone", "Z")


def state_of(process: int) -> str:
    """As Linux has it; Z: it has ended, and nobody asked how."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def test_mps_quits_where_something_raises(calls: Path) -> None:
    with pytest.raises(ZeroDivisionError), mps.mps():
        _ = 1 / 0
    assert calls.read_text().splitlines()[-1] == "quit"


def test_mps_quits_where_its_run_is_killed(calls: Path) -> None:
    run = subprocess.Popen([sys.executable, "-c", UNDER_MPS], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline() == "up\n"
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()
    deadline_s = time.monotonic() + 20
    while "quit" not in calls.read_text() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert calls.read_text().splitlines()[-1] == "quit"


@pytest.mark.parametrize(
    ("variables", "probe", "reason", "quits"),
    [
        ({"PATH": "/nowhere"}, "pass", "MPS: nvidia-cuda-mps-control is not on the PATH", False),
        (
            {"STATUS": "1", "SAYS": "Cannot find MPS control daemon"},
            "pass",
            "MPS: nvidia-cuda-mps-control -d does not start: Cannot find MPS control daemon",
            False,
        ),
        (
            {},
            "raise SystemExit('CUDA error: MPS client failed to connect')",
            "MPS: a process that uses the GPU under it ends with 1: CUDA error: MPS client failed to connect",
            True,
        ),
        ({"SERVERS": ""}, "pass", "MPS: its daemon runs, but no process came to it: it wrote no log", True),
    ],
    ids=["no program", "no start", "no client", "no server"],
)
def test_what_refuses_mps_is_named(
    calls: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], probe: str, reason: str, quits: bool
) -> None:
    """Without a server CUDA would say nothing, and ranks would take turns as before."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(mps, "PROBE", probe)
    with pytest.raises(mps.Refused) as refused, mps.mps():
        pytest.fail("it serves nobody")
    assert str(refused.value) == reason
    assert (calls.exists() and "quit" in calls.read_text()) is quits


def event(cat: str, name: str, ts: float, dur: float, tid: int, correlation: int | None = None) -> dict[str, Any]:
    args = {} if correlation is None else {"args": {"correlation": correlation}}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, **args}


TRACE = [
    {"ph": "M", "name": "process_name"},
    event("user_annotation", ANNOTATION, 100, 50, 1),
    event("gpu_user_annotation", ANNOTATION, 300, 100, 7),
    event("cuda_runtime", "cudaLaunchKernel", 110, 5, 1, correlation=17),
    event("cuda_driver", "cuLaunchKernelEx", 120, 5, 1, correlation=18),
    event("cuda_runtime", "cudaLaunchKernel", 120, 5, 2, correlation=19),  # another thread
    event("cuda_runtime", "cudaLaunchKernel", 160, 5, 1, correlation=20),  # behind it
    event("kernel", "gemm", 1000, 100, 7, correlation=17),
    event("kernel", "norm", 1100, 100, 7, correlation=18),
    event("kernel", "another", 1300, 100, 7, correlation=19),
    event("kernel", "backward", 1500, 100, 7, correlation=20),
    event("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 1150, 100, 20, correlation=21),
    event("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 1300, 300, 20, correlation=22),
]


def test_which_of_nccls_kernels_ran_beside_recomputation() -> None:
    """Kernels belong to a recomputation if they were launched in one, on its thread."""
    found = beside({"traceEvents": TRACE})
    assert [(round(begin, 9), round(end, 9)) for begin, end in found.recomputations] == [(0.001, 0.0011), (0.0011, 0.0012)]
    assert (len(found.collectives), found.accompanied, found.share) == (2, 1, 0.5)
    assert found.hidden_share == pytest.approx(0.25)


def test_a_trace_without_kernels_shows_nothing() -> None:
    found = beside({"traceEvents": TRACE[:3]})
    assert (found.collectives, found.recomputations, found.share, found.hidden_share) == ((), (), 0.0, 0.0)


class Given:
    """In a setting's place: a model whose steps have these gradients, the last one again and again."""

    def __init__(self, name: str, *gradients: float) -> None:
        self.candidate = SimpleNamespace(name=name)
        self._gradients = list(gradients)

    def in_force(self) -> AbstractContextManager[None]:
        return nullcontext()

    def repeatable_step(self) -> dict[str, torch.Tensor]:
        gradient = self._gradients.pop(0) if len(self._gradients) > 1 else self._gradients[0]
        return {"gradient": torch.tensor([0.0, gradient])}


DIFFERS = (
    "1 of 1 losses and gradients are not equal in every bit, first gradient: 1 of 2 elements, by 0.5 at most (the largest is 1)"
)


def test_a_setting_with_another_gradient_is_named() -> None:
    given = {"none": Given("none", 1.0), "full": Given("full", 1.0), "ours": Given("ours", 1.5)}
    assert differing(given) == ([f"ours: {DIFFERS}"], [])


def test_the_first_step_of_a_setting_chooses_kernels_and_is_not_judged() -> None:
    assert differing({"none": Given("none", 7.0, 1.0), "ours": Given("ours", 2.0, 1.0)}) == ([], [])


def test_where_stock_does_not_repeat_its_bits_nothing_is_judged_and_the_note_says_so() -> None:
    wrong, notes = differing({"none": Given("none", 1.0, 1.0, 1.5), "ours": Given("ours", 1.5)})
    assert wrong == []
    assert notes == [f"bits are not judged: none differs from itself: {DIFFERS}", f"ours: {DIFFERS}"]


HERE, THERE = ((0.0, 1.0),), ((2.0, 3.0),)


@pytest.mark.parametrize(
    ("on_demand", "ours", "says"),
    [
        (Beside(HERE, THERE), Beside(HERE, HERE), []),
        (Beside(HERE, THERE), Beside(HERE, THERE), ["ours: recomputation ran beside none of NCCL's kernels"]),
        (Beside((), THERE), Beside(HERE, HERE), ["ours, on demand: the profile has no kernel of NCCL"]),
        (Beside(HERE, THERE), Beside(HERE, ()), ["ours: the profile has no kernel that recomputes"]),
    ],
)
def test_what_profiles_must_show(on_demand: Beside, ours: Beside, says: list[str]) -> None:
    assert list(unseen({"ours, on demand": on_demand, "ours": ours})) == says


def test_what_was_measured_in_words() -> None:
    profiled = {"ours, on demand": Beside(HERE, THERE), "ours": Beside((*HERE, *THERE), HERE)}
    assert list(in_words({"stock none": 2.0, "stock full": 3.0, "ours": 2.1}, profiled)) == [
        "steps by stock none's: stock full 1.50, ours 1.05",
        "NCCL kernels beside which recomputation ran: 0 of 1 (ours, on demand), 1 of 2 (ours)",
    ]
