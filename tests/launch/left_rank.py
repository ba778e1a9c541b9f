"""One rank whose peer closed its connection: `python -m tests.launch.left_rank [after another]`.

With an argument another rank has said before why it ended.
"""

import sys

import torch.distributed as dist

from megatron_lynx.launch.ending import ENDED
from megatron_lynx.launch.out_of_memory import MemoryWatch
from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan

if __name__ == "__main__":
    watch = MemoryWatch(lambda: "in step 1")
    watch.under(uniform_plan(tiny_job("gpt")), "plan.yaml")
    watch._first_failure._store = dist.HashStore()
    if sys.argv[1:]:
        watch._first_failure._store.add(ENDED, 1)
    with watch.watching():
        raise RuntimeError("Connection closed by peer")
