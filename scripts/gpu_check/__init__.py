"""The acceptance run: what one, two, four or eight GPUs can show of this package. `scripts/gpu_check.sh` runs it.

    machine    what is here, and why the run cannot begin: too few GPUs, no NCCL, devices of two kinds
    parts      what these GPUs allow: a list of parts, each a function for some ranks, and what it is given
      maker    makes them: jobs, and plans for these
    running    each part with a time limit: one that hangs is ended, and named. Parts share processes until one fails
      places   the GPU of each rank; ranks that share one
      meeting  whether ranks reach each other at all
      trial      a training beside stock's: bits, frames, windows, seconds
        late       collectives that are wrong until they are over
        overlap    which part of the recomputations lay behind them
      without_flushes   the same for the double-buffered schedule
      copies     copies to the host and back
    page       one page of results, as JSON and as Markdown, for an issue

Everything runs on CPU ranks, too (`--dry-run`): with gloo, and with a stand-in for the CUDA calls that Megatron makes. That shows
that the script works, and nothing of a GPU.
"""
