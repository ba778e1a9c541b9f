"""How long the compute stream waits at each collective of a layer half: the windows.

    without sequence parallelism                        with it
    fwd.X.0   all-reduce                                fwd.X.0   all-gather
    bwd.X.0   all-reduce, less the wgrad GEMM           fwd.X.1   reduce-scatter
                                                        bwd.X.0   all-gather of the gradient
                                                        bwd.X.1   all-gather of the input, less the dgrad GEMM
                                                        bwd.X.2   reduce-scatter, less the wgrad GEMM

Stock Megatron hides the last ones behind the GEMMs of the column-parallel linear; what is longer than its GEMM is a window.
"""

from __future__ import annotations

from megatron_lynx.items import COLUMN_PARALLEL, ROW_PARALLEL, Half
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.schedule.windows import Pass


def window_lengths_s(profile: Profile, passing: Pass, half: Half, message_bytes: int) -> tuple[float, ...]:
    """Seconds of the windows of one half in one pass, by ordinal. `message_bytes`: the gathered tensor (see `LayerShape`).

    Empty without tensor parallelism.
    """
    if profile.shape.tensor == 1:
        return ()
    linear = profile.half(half).items[COLUMN_PARALLEL[half]]
    if not profile.shape.sequence_parallel:
        reduce = profile.link_s("all_reduce", message_bytes)
        return (reduce,) if passing == "fwd" else (max(0.0, reduce - linear.wgrad_s),)
    gather, scatter = profile.link_s("all_gather", message_bytes), profile.link_s("reduce_scatter", message_bytes)
    if passing == "fwd":
        return gather, scatter
    return gather, max(0.0, gather - linear.dgrad_s), max(0.0, scatter - linear.wgrad_s)


def exposed_gather_s(profile: Profile, behind: Half | None, message_bytes: int) -> float:
    """What an input gathered once costs: the gather, less the compute that runs between its start and its use.

    It starts behind the first backward collective of the half `behind`, and the replay that needs it runs at a later
    collective of that half: the row-parallel linear's backward and what precedes it lie in between. None: on demand.
    """
    gather = profile.link_s("all_gather", message_bytes)
    if behind is None:
        return gather
    items = profile.half(behind).items
    row = next(item for item in items if item in ROW_PARALLEL)
    inner = "core_attention" if behind == "attention" else "activation"
    return max(0.0, gather - items[row].backward_s - items[inner].backward_s)
