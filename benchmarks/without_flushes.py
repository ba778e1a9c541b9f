"""What the flush costs, and what is left of that without it: batches of a pipeline whose stages sleep instead of computing.

    python -m benchmarks.without_flushes --pipeline 4 --microbatches 4

Everything is real but the time of a micro-batch: Megatron's functions, messages between processes, gradients, clipping, updates.
A forward sleeps `--forward-s`, a backward twice as long, besides the tiny model's own time; so as many stages as one likes can
share a core, and a machine that does other work too gives the same answer. A time is that of one batch, on the first stage, in
the middle of `--batches`: the pipeline is neither filling nor draining. Expected is what the order says: sleep only.

    flush               (m + p - 1) (F + B)
    updates at once     m (F + B) + (p - 1) B     Megatron's optimizer takes the gradient's norm over all stages, clipping or not:
                                                  a barrier, which the last stage reaches (p - 1) B before the first
    updates deferred    m (F + B) + 2 F at most   a second gradient buffer: all stages reach it together, but for rounding
    no barrier          m (F + B)                 torch's SGD, embeddings not tied
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks.sleeping_stages import BACKWARD, batch_times
from megatron_lynx.testbed.ranks import run_ranks
from tests.tiny_jobs import tiny_job


def expected(pipeline: int, microbatches: int) -> dict[str, float]:
    """Length in forwards; see the module's docstring."""
    steady, edge = microbatches * (1 + BACKWARD), pipeline - 1
    return {
        "flush": steady + edge * (1 + BACKWARD),
        "updates at once": steady + edge * BACKWARD,
        "updates deferred": steady + min(edge, 2),
        "no barrier": steady,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--batches", type=int, default=8, help="of which all but the first two and the last are timed")
    parser.add_argument("--forward-s", type=float, default=0.2)
    given = parser.parse_args()
    job = tiny_job("llama", pipeline=given.pipeline, microbatches=given.microbatches, layers=given.pipeline)
    first = run_ranks(batch_times, job.gpus, job, given.batches, given.forward_s, pin=False, timeout_s=1200)[0]
    hoped = expected(given.pipeline, given.microbatches)
    print(f"p = {given.pipeline}, m = {given.microbatches}, a forward sleeps {given.forward_s} s\n")
    print("| setting | s per batch (lowest, highest) | over flush | expected |\n|---|--:|--:|--:|")
    flush = statistics.median(first["flush"])
    for name, seconds in first.items():
        middle = statistics.median(seconds)
        span = f"{middle:.2f} ({min(seconds):.2f}, {max(seconds):.2f})"
        print(f"| {name} | {span} | {middle / flush:.2f} | {hoped[name] / hoped['flush']:.2f} |")


if __name__ == "__main__":
    main()
