"""One rank, as `ranks.RankPool` starts it: `python -m megatron_lynx.testbed.rank_process`. The parent's side says more."""

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
    """Get ready, then answer the parent's messages until it closes its end of the pipe."""
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
    """Be killed when the parent is; it may be gone already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ.pop("LYNX_PARENT")):
        sys.exit("the parent of this rank is gone")


def prepare(store: list[Any]) -> int:
    """Pin, import torch, and install the stand-in if there is no GPU.

    Rank 0 opens the store that the job's ranks meet in, keeps it in `store` and returns its port; the others return 0.
    """
    if core := os.environ.pop("LYNX_CORE", ""):
        os.sched_setaffinity(0, {int(core)})
    stand_in()
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # `env://` then joins rank 0's store as a client, instead of opening one on a port that must be guessed.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if os.environ["RANK"] != "0":
        return 0
    store.append(TCPStore(os.environ["MASTER_ADDR"], 0, is_master=True, wait_for_workers=False))
    port: int = store[0].port
    return port


def stand_in() -> None:
    """What has to be as ranks have it before Megatron is imported. A second time it changes nothing."""
    import torch

    from megatron_lynx.testbed.cpu_device import stand_in_for_cuda, stand_in_for_missing_modules

    # That Apex and Transformer Engine are missing, and which of torch's names are old, is Megatron's to know, once per rank.
    warnings.filterwarnings("ignore", module=r"megatron\.core|torch\.distributed|transformer_engine")
    logging.getLogger("megatron.core").setLevel(logging.ERROR)  # it advises whoever wrote a launch, once for every model
    torch.set_num_threads(1)
    if backend := os.environ.pop("LYNX_COMPILER", ""):
        from megatron_lynx.testbed.fusions import stand_in_for_compiler

        stand_in_for_compiler(backend)  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        stand_in_for_cuda()
        stand_in_for_missing_modules()


def obey(message: bytes) -> Any:
    """Call the function that the parent sent: (port, number of the run, function, arguments)."""
    port, run, function, args = pickle.loads(message)
    os.environ["MASTER_PORT"] = str(port)
    # Each run meets under a prefix of its own in the store, where nothing of an earlier one is found.
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(run)
    return function(int(os.environ["RANK"]), *args)


def answer(pipe: Connection, function: Callable[[], Any]) -> None:
    """Call, and send (result, error, traceback as text); an error that cannot be pickled is sent as text alone."""
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
