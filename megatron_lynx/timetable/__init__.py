"""Tables from moments of a stage's passes to the tasks that a plan puts there."""

from megatron_lynx.timetable.events import (
    ON_DEMAND_PLACE,
    HalfPass,
    Layout,
    Linear,
    Moment,
    Pass,
    Place,
    PlannedHalf,
    Task,
    Wait,
    ahead_to,
    may_gather_ahead,
)
from megatron_lynx.timetable.timetable import Timetable

__all__ = [
    "HalfPass",
    "Layout",
    "Linear",
    "Moment",
    "ON_DEMAND_PLACE",
    "Pass",
    "Place",
    "PlannedHalf",
    "Task",
    "Timetable",
    "Wait",
    "ahead_to",
    "may_gather_ahead",
]
