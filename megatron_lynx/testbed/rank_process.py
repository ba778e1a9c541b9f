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
    store: list[Any] = []
    answer(pipe, partial(prepare, store))
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


def prepare(store: list[Any]) -> int:
    """Pin the process, import torch, and emulate CUDA if there is no GPU.

    Rank 0 opens the job's rendezvous store, appends it to `store` and returns its port; the others return 0.
    """
    if core := os.environ.pop("LYNX_CORE", ""):
        os.sched_setaffinity(0, {int(core)})
    stand_in()
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # Makes `env://` join rank 0's store as a client, instead of opening one on a guessed port.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if os.environ["RANK"] != "0":
        return 0
    store.append(TCPStore(os.environ["MASTER_ADDR"], 0, is_master=True, wait_for_workers=False))
    port: int = store[0].port
    return port


def stand_in() -> None:
    import torch

    from megatron_lynx.testbed.cpu_device import stand_in_for_cuda, stand_in_for_missing_modules

    # Megatron warns on every rank about missing Apex and Transformer Engine and about deprecated torch functions.
    warnings.filterwarnings("ignore", module=r"megatron\.core|torch\.distributed|transformer_engine")
    logging.getLogger("megatron.core").setLevel(logging.ERROR)  # it repeats launch advice for every model
    torch.set_num_threads(1)
    if backend := os.environ.pop("LYNX_COMPILER", ""):
        from megatron_lynx.testbed.fusions import stand_in_for_compiler

        stand_in_for_compiler(backend)  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        stand_in_for_cuda()
        stand_in_for_missing_modules()


def obey(message: bytes) -> Any:
    port, run, function, args = pickle.loads(message)
    os.environ["MASTER_PORT"] = str(port)
    # Each run has its own prefix in the store, without keys of earlier runs.
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(run)
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
