"""What runs when on a pipeline stage under a plan: which part of a replay, which gather, which weight gradient in which wait."""

from megatron_lynx.timetable.events import HalfPass, Linear, Pass, Replay, Wait
from megatron_lynx.timetable.planned import ON_DEMAND_PLACE, Layout, Place, PlannedHalf, ahead_to, may_gather_ahead
from megatron_lynx.timetable.timetable import Timetable

__all__ = [
    "HalfPass",
    "Layout",
    "Linear",
    "ON_DEMAND_PLACE",
    "Pass",
    "Place",
    "PlannedHalf",
    "Replay",
    "Timetable",
    "Wait",
    "ahead_to",
    "may_gather_ahead",
]
