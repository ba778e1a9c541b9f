"""One of three ranks: `waiting_rank.py RANK FOLDER`. Ranks 1 and 2 cannot go on; rank 0 is in a call that would not notice."""

import os
import sys
import threading
from datetime import timedelta

import torch.distributed as dist

from megatron_lynx.errors import LynxError, Problem
from megatron_lynx.launch.alarm import ending_together

if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), sys.argv[2]
    rendezvous = f"file://{os.path.join(folder, 'store')}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=3, timeout=timedelta(seconds=90))
    with ending_together():
        if rank > 0:
            raise LynxError("this cannot go on", [Problem("memory", "none", "some")])
        threading.Event().wait(90)
        print("rank 0 was left waiting")
