"""How long the compute stream waits at each collective of a layer half: the windows.

    without sequence parallelism                        with it
    fwd.X.0   all-reduce                                fwd.X.0   all-gather
    bwd.X.0   all-reduce, less the wgrad GEMM           fwd.X.1   reduce-scatter
                                                        bwd.X.0   all-gather of the gradient
                                                        bwd.X.1   all-gather of the input, less the dgrad GEMM
                                                        bwd.X.2   reduce-scatter, less the wgrad GEMM

In FP8 bytes are gathered, after their cast; of a gradient with block scales those by rows and by columns: as much as in bf16.

Stock Megatron hides the last ones behind the GEMMs of the column-parallel linear; what is longer than its GEMM is a window.
"""

from __future__ import annotations

from typing import Literal

from megatron_lynx.anatomy import DENSE, Half
from megatron_lynx.profiler.profile import BlockProfile, LinkKind, Profile
from megatron_lynx.profiler.quantized import BF16_BYTES, FP8_BYTES, PER_TENSOR

SCATTER_AND_GATHER: tuple[LinkKind, LinkKind] = ("reduce_scatter", "all_gather")


def window_lengths_s(profile: Profile, passing: Literal["fwd", "bwd"], half: Half, message_bytes: int) -> tuple[float, ...]:
    """Seconds of the windows of one half in one pass, by ordinal. `message_bytes`: the gathered tensor (see `LayerShape`).

    Empty without tensor parallelism.
    """
    if profile.shape.tensor == 1:
        return ()
    linear = profile.half(half).items[DENSE[half].column_parallel]
    if not profile.shape.sequence_parallel:
        reduce = profile.link_s("all_reduce", message_bytes)
        return (reduce,) if passing == "fwd" else (max(0.0, reduce - linear.wgrad_s),)
    gather = profile.link_s("all_gather", gathered_input_bytes(profile, message_bytes))
    scatter = profile.link_s("reduce_scatter", message_bytes)
    if passing == "fwd":
        return gather, scatter
    gradient = gather if profile.shape.fp8 in (None, *PER_TENSOR) else profile.link_s("all_gather", message_bytes)
    return gradient, max(0.0, gather - linear.dgrad_s), max(0.0, scatter - linear.wgrad_s)


def gathered_input_bytes(profile: Profile, message_bytes: int) -> int:
    """What the gather of a column-parallel linear's input moves."""
    return message_bytes if profile.shape.fp8 is None else message_bytes * FP8_BYTES // BF16_BYTES


def embedding_of(profile: Profile, message_bytes: int) -> BlockProfile:
    """The embedding with its own collectives: every rank looks up its part of the vocabulary, then they are summed up.

    Under sequence parallelism the sum is scattered (learned positions reduce it whole; that is not told apart), and the gradient
    is gathered.
    """
    if not profile.shape.sequence_parallel:
        return _longer(profile.embedding, profile.link_s("all_reduce", message_bytes), 0.0)
    forward_s, backward_s = (profile.link_s(kind, message_bytes) for kind in SCATTER_AND_GATHER)
    return _longer(profile.embedding, forward_s, backward_s)


def head_of(profile: Profile, message_bytes: int) -> BlockProfile:
    """The head with its own collectives, those of a column-parallel linear: the gradient's reduction runs behind the wgrad GEMM,
    which is taken to be a third of the head's backward. The loss's are a few bytes a row, and not counted."""
    behind_s = profile.head.backward_s / 3
    if not profile.shape.sequence_parallel:
        return _longer(profile.head, 0.0, max(0.0, profile.link_s("all_reduce", message_bytes) - behind_s))
    scatter_s, gather_s = (profile.link_s(kind, message_bytes) for kind in SCATTER_AND_GATHER)
    return _longer(profile.head, gather_s, max(0.0, gather_s - behind_s) + max(0.0, scatter_s - behind_s))


def _longer(block: BlockProfile, forward_s: float, backward_s: float) -> BlockProfile:
    if not forward_s and not backward_s:
        return block
    return block.model_copy(update={"forward_s": block.forward_s + forward_s, "backward_s": block.backward_s + backward_s})


def gather_once_s(profile: Profile, half: Half, behind: Half | None, message_bytes: int) -> float:
    """Seconds that are lost by gathering the input of a half's column-parallel linear once, for its replay and its backward.

    It starts behind the first backward collective of the half `behind`; the row-parallel linear's backward and what precedes
    it run before the replay needs it. None: on demand, nothing runs. In exchange the half's own backward gathers nothing,
    which stock Megatron hides behind the dgrad GEMM as far as that goes.
    """
    gather = profile.link_s("all_gather", gathered_input_bytes(profile, message_bytes))
    saved = max(0.0, gather - profile.half(half).items[DENSE[half].column_parallel].dgrad_s)
    return max(0.0, gather - _compute_after_first_s(profile, behind) - saved)


def _compute_after_first_s(profile: Profile, half: Half | None) -> float:
    """Backward seconds of a half between its first collective and its column-parallel linear."""
    if half is None:
        return 0.0
    items = profile.half(half).items
    inner = ("linear_proj", "core_attention", "rotary") if half == "attention" else ("linear_fc2", "activation")
    return sum(items[item].backward_s for item in inner)
