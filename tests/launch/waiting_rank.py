"""One rank of a torchrun job: `torchrun -m tests.launch.waiting_rank FOLDER SPEAKERS FAILURE`.

SPEAKERS (`1,0`) fail in a step, one after the other; the other ranks are in a call that would not notice. FAILURE: `error`,
one of ours; `memory`, no more device memory; `kill`, by a signal. Each rank writes its process into FOLDER.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_lynx.errors import LynxError, Problem
from megatron_lynx.launch.out_of_memory import MemoryWatch
from megatron_lynx.launch.script import stop
from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan


def fail(failure: str) -> None:
    if failure == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if failure == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    raise LynxError("this cannot go on", [Problem("memory", "none", "some")])


def main(folder: Path, speakers: list[str], failure: str) -> None:
    dist.init_process_group("gloo")
    rank = str(dist.get_rank())
    (folder / rank).write_text(str(os.getpid()))
    watch = MemoryWatch(lambda: "in step 1")
    watch.under(uniform_plan(tiny_job("gpt")), "plan.yaml")
    dist.barrier()
    with watch.watching(), watch.step():
        if rank in speakers:
            time.sleep(0.05 * speakers.index(rank))
            fail(failure)
        if rank == "2":
            dist.barrier()  # it fails when another rank is gone
        threading.Event().wait(90)
        print(f"rank {rank} was left waiting")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3])
    except LynxError as error:
        stop(error)
