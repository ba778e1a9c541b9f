"""One rank process, started by `ranks.RankPool` as `python -m megatron_lynx.testbed.rank_process`."""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

PR_SET_PDEATHSIG = 1


def main() -> None:
    die_with_parent()
    pipe = Connection(int(os.environ.pop("LYNX_PIPE")))
    if core := os.environ.pop("LYNX_CORE", ""):
        os.sched_setaffinity(0, {int(core)})
    answer(pipe, stand_in)
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        answer(pipe, partial(obey, message))


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ.pop("LYNX_PARENT")):
        sys.exit("the parent of this rank is gone")


def stand_in() -> None:
    """Import torch, and emulate CUDA if there is no GPU."""
    import torch

    from megatron_lynx.testbed.cpu_device import named_stand_in

    # Megatron warns on every rank about missing Apex and Transformer Engine and about deprecated torch functions.
    warnings.filterwarnings("ignore", module=r"megatron\.core|torch\.distributed|transformer_engine")
    logging.getLogger("megatron.core").setLevel(logging.ERROR)  # it repeats launch advice for every model
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        named_stand_in()


def obey(message: bytes) -> Any:
    port, run, function, args = pickle.loads(message)
    # `env://` joins the parent's store as a client. Each run has its own prefix there, without keys of earlier runs.
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(run)}
    return function(int(os.environ["RANK"]), *args)


def answer(pipe: Connection, function: Callable[[], Any]) -> None:
    """Call, and send (result, error, traceback text); an error that cannot be pickled is sent as text only."""
    try:
        packed = pickle.dumps((function(), None, None))
    except BaseException as error:  # noqa: BLE001 (the parent raises it)
        text = "".join(traceback.format_exception(error))
        try:
            packed = pickle.dumps((None, error, text))
            pickle.loads(packed)
        except Exception:  # noqa: BLE001 (whatever its pickling raises)
            packed = pickle.dumps((None, None, text))
    pipe.send_bytes(packed)


if __name__ == "__main__":
    main()
