"""Plans a job from a profile: partitions layers, solves each stage, simulates the plan and writes it."""

from megatron_lynx.planner.checks import check_plannable, check_profile
from megatron_lynx.planner.decision import Decision, fitting, leanest
from megatron_lynx.planner.evaluation import PlanFigures, figures_of
from megatron_lynx.planner.left_open import as_planned
from megatron_lynx.planner.nearest import decide, make_plan
from megatron_lynx.planner.uniform import uniform_plan

__all__ = [
    "Decision",
    "PlanFigures",
    "as_planned",
    "check_plannable",
    "check_profile",
    "decide",
    "figures_of",
    "fitting",
    "leanest",
    "make_plan",
    "uniform_plan",
]
