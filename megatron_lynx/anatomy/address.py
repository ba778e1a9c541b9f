"""Addresses of windows, their names in plan files, and which precede the first use of a recomputed tensor.

A window is a stretch in which the compute stream would wait for communication.

    text                   names
    bwd.mlp.0              the first collective that the backward of the *same* layer's MLP half waits for
    bwd.attention.0+1      the first one of the attention half of the layer above (layer l+1)
    fwd.mlp.0              for weight gradients only: the first one of the same layer's MLP half in the next forward; with several
                           chunks on a stage that may be another chunk's: then of the layer with the same index in it
    pipe.recv_backward     receiving the gradient of this micro-batch from the next stage
    pipe.send_backward     for weight gradients only: sending the gradient of this chunk's input, when its backward is over
    on_demand              no window: recomputed, exposed, when backward needs the first tensor
    bwd.mlp.0-1            for weight gradients only: the layer below, whose backward is later

The collectives of a half are numbered in the order of issue. A half whose input is gathered once for recomputation has no
backward window 1. A name is relative to the layer of the recomputed half, so that equal layers have equal entries in a plan.

A recomputation may be cut into stretches, each in one window:

    bwd.mlp.0                                              all of it in that window
    bwd.mlp.0 until rotary then bwd.mlp.2                  the part before the code `rotary` in the first one, then the rest
    bwd.mlp.0 until rotary then on_demand                  the rest when backward needs it

It stops between two items after sites only (`Section.stops`), so that no code runs twice.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache
from typing import Literal, NamedTuple

from megatron_lynx.fp8_recipes import Recipe, reduces_amaxes
from megatron_lynx.kinds.dense.section import DENSE
from megatron_lynx.kinds.section import HALVES, PASSES, Half, Pass, Section

FrameKey = tuple[int, Half]

ON_DEMAND: Literal["on_demand"] = "on_demand"
RECV_BACKWARD: Literal["pipe.recv_backward"] = "pipe.recv_backward"
SEND_BACKWARD: Literal["pipe.send_backward"] = "pipe.send_backward"

_HALF = f"({'|'.join(HALVES)})"
PATTERN = rf"({ON_DEMAND}|{re.escape(RECV_BACKWARD)}|bwd\.{_HALF}\.\d\d?(\+\d+)?)"
"""Regular expression of a window's name (also used by the plan's JSON schema)."""
WAIT_PATTERN = rf"({re.escape(RECV_BACKWARD)}|{re.escape(SEND_BACKWARD)}|({'|'.join(PASSES)})\.{_HALF}\.\d\d?([+-]\d+)?)"
"""The same for waits of delayed weight gradients: of any layer of the stage."""
GATHER_PATTERN = rf"({ON_DEMAND}|bwd\.{_HALF}\.\d\d?(\+\d+)?)"
"""The same for the collective after which an input is gathered."""
_COLLECTIVE = re.compile(rf"({'|'.join(PASSES)})\.{_HALF}\.(\d\d?)([+-]\d+)?")


class WindowAddress(NamedTuple):
    """One collective of one half: its pass, layer (from 1), half, and index there (from 0)."""

    passing: Pass
    layer: int
    half: Half
    ordinal: int

    def __str__(self) -> str:
        return f"{self.passing}.{self.half}.{self.ordinal}@{self.layer}"

    @property
    def frame(self) -> FrameKey:
        return self.layer, self.half


Window = WindowAddress | Literal["pipe.recv_backward", "pipe.send_backward", "on_demand"]


def window_name(passing: Pass, half: Half, ordinal: int, above: int = 0) -> str:
    """A plan's name for a collective of a half `above` layers above its own (or below, if negative)."""
    return f"{passing}.{half}.{ordinal}{f'{above:+}' if above else ''}"


@lru_cache(maxsize=8192)
def window_at(text: str, layer: int) -> Window:
    """The window named `text`, seen from `layer` (its number from 1). ValueError if there is none of that name."""
    if text in (ON_DEMAND, RECV_BACKWARD, SEND_BACKWARD):
        return text
    match = _COLLECTIVE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} names no window")
    passing, half, ordinal, above = match.groups()
    return WindowAddress(passing, layer + int(above or 0), half, int(ordinal))  # type: ignore[arg-type]


def is_forward(window: str) -> bool:
    return window.startswith("fwd.")


def examples(passing: Pass) -> tuple[str, ...]:
    counts = {half: len(DENSE[half].collectives(passing, sequence_parallel=True)) for half in HALVES}
    above = (0, 1) if passing == "bwd" else (0,)
    places = ((ordinal, half) for ordinal in range(max(counts.values())) for half in HALVES if ordinal < counts[half])
    return tuple(window_name(passing, half, ordinal, up) for ordinal, half in places for up in above)


UNTIL, THEN = " until ", " then "

PLACE_PATTERN = rf"((?!{ON_DEMAND}){PATTERN}{UNTIL}[a-z_0-9]+{THEN})*{PATTERN}"
"""Regular expression of one half's text (also used by the plan's JSON schema)."""


class Stretch(NamedTuple):
    """The part of a recomputation in one window: all the rest, or up to an item."""

    window: str
    until: str | None = None

    def __str__(self) -> str:
        return self.window if self.until is None else f"{self.window}{UNTIL}{self.until}"


@lru_cache(maxsize=1024)
def stretches_in(text: str) -> tuple[Stretch, ...]:
    parts = (part.partition(UNTIL) for part in text.split(THEN))
    return tuple(Stretch(window, until or None) for window, _, until in parts)


def in_words(stretches: tuple[Stretch, ...]) -> str:
    return THEN.join(map(str, stretches)) or ON_DEMAND


def half_before(half: Half) -> tuple[Half, int]:
    return ("mlp", 0) if half == "attention" else ("attention", 1)


def own_waits_in_time(section: Section, recompute: Collection[str], *, exchanged: bool, sequence_parallel: bool, te: bool) -> int:
    """Return the number of waits of the half's backward before it needs a tensor that these items recompute. Later ones than its
    first are too late.

    A first exchange of tokens (`exchanged`) is in time, and so is window 0 with sequence parallelism, which gathers the gradient
    before any GEMM's saved tensor is read. Exceptions: the dropout mask of the residual addition, which backward reads first; and
    the row-parallel linear's input in Transformer Engine's layers, whose linears read their saved tensors before they gather.
    """
    if section.residual in recompute:
        return 0
    if section.exchanges:
        return int(exchanged)
    return int(section.has_windows and sequence_parallel and not (te and section.before_row_parallel in recompute))


def own_window(half: Half) -> str:
    return window_name("bwd", half, 0)


def amax_reducing(
    section: Section, recompute: Collection[str], recipe: Recipe | None, *, sequence_parallel: bool
) -> tuple[str, ...]:
    """The recomputed items that reduce an amax in every call, so that they run on demand and in no window (rule R2): with
    sequence parallelism each rank has a part of a linear's gathered input, and current scaling needs one scale for all parts."""
    return section.cast_together(recompute) if sequence_parallel and reduces_amaxes(recipe) else ()


def resumes_in_wait(section: Section, recipe: Recipe | None, *, exchanges: bool, gathers: bool, userbuffers: bool) -> bool:
    """Whether a checkpoint's rest may run in the first wait of its backward. `exchanges`: tokens of the section are exchanged in
    windows. `gathers`: tensor-parallel ranks gather its gradient; in FP8 backward does not begin with that."""
    if userbuffers or section.exchanges:
        return exchanges and not userbuffers
    return section.last_communicating is not None and gathers and recipe is None
