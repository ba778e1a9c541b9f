"""Recipes for FP8: how the scales are found with which Transformer Engine stores a tensor in eight bits a number.

delayed      one scale a tensor, from the largest magnitudes of earlier steps        Hopper, Blackwell
tensorwise   one scale a tensor, from the tensor itself                              Hopper, Blackwell
blockwise    one for 128 numbers of an activation, for 128 x 128 of a weight         Hopper
mxfp8        one for 32 numbers                                                      Blackwell

Jobs and plans may name any of them. A run can follow plans for some of them only, and the planner must refuse the others, too.
"""

from __future__ import annotations

from typing import Literal

Recipe = Literal["delayed", "tensorwise", "mxfp8", "blockwise"]

RUN_BY_PLANS: tuple[Recipe, ...] = ("delayed", "tensorwise")
"""The recipes whose replays have been shown to leave scales and amax histories as they were."""
