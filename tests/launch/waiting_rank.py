"""One rank: `python -m tests.launch.waiting_rank RANK RANKS RENDEZVOUS SPEAKERS LATE_S`.

SPEAKERS (`1,0`) cannot go on, one behind the other; the others are in a call that would not notice, the last rank LATE_S behind
the rest.
"""

import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from megatron_lynx.errors import LynxError, Problem
from megatron_lynx.launch.alarm import ending_together


class Stuck(LynxError):
    exit_status = 2


if __name__ == "__main__":
    rank, ranks, rendezvous, speakers = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4].split(",")
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks, timeout=timedelta(seconds=90))
    dist.barrier()
    if rank == ranks - 1:
        time.sleep(float(sys.argv[5]))
    with ending_together():
        if str(rank) in speakers:
            time.sleep(0.05 * speakers.index(str(rank)))
            raise Stuck("this cannot go on", [Problem("memory", "none", "some")])
        threading.Event().wait(90)
        print(f"rank {rank} was left waiting")
