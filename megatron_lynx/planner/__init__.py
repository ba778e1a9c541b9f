"""From a job and a profile to a plan.

decision.py      make_plan: the whole planning pipeline on one screen
partitioning.py  layers of each stage, where the job leaves them open
nearest.py       what to change in a job that does not fit
writing.py       answers as a plan;  uniform.py: plans nobody solved for
checks.py        what a plan cannot do, and profiles of something else
"""

from megatron_lynx.planner.checks import check_plannable, check_profile
from megatron_lynx.planner.decision import Decision, decide, least_memory, make_plan
from megatron_lynx.planner.partitioning import partitioned_as
from megatron_lynx.planner.uniform import REPLAYABLE, uniform_plan

__all__ = [
    "REPLAYABLE",
    "Decision",
    "check_plannable",
    "check_profile",
    "decide",
    "least_memory",
    "make_plan",
    "partitioned_as",
    "uniform_plan",
]
