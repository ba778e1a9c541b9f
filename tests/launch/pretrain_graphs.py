"""A training script, SCRIPT, whose captured graphs run again on a CPU, on the memory of their capture (tests/instruments/graphs).

At its end rank 0 says how many graphs there were, and how often they ran.
"""

import os
import runpy
import sys

from tests.instruments import graphs

if __name__ == "__main__":
    made = []
    construct = graphs.Graph.__init__

    def remembered(self, *args, **kwargs):
        construct(self, *args, **kwargs)
        made.append(self)

    graphs.Graph.__init__ = remembered
    sys.argv[0] = os.environ["SCRIPT"]
    with graphs.stand_in_for_captures():
        runpy.run_path(sys.argv[0], run_name="__main__")
    if os.environ["RANK"] == "0":
        print(f"\n{len(made)} graphs ran {sum(graph.replays for graph in made)} times", flush=True)
