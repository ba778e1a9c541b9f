"""Plans a job from a profile: partitions layers, solves each stage, simulates the plan and writes it.

decision.py      decide, which runs the whole pipeline
partitioning.py  layers of each stage, if the job leaves them open
nearest.py       changes after which an infeasible job fits; the load of experts at which a plan fits
evaluation.py    seconds and bytes of a plan at every moment, and the check against the budget
summary.py       a plan as JSON
filling.py      weight gradients in the waits that a plan leaves: rooms.py (waits), packing.py (choice), slack.py (memory)
writing.py       solver answers as a plan
uniform.py       plans that treat all layers alike, without a solver
variants.py      plans with other launch flags
checks.py        jobs that no plan can express, and profiles of another job
left_open.py     choices that a job leaves open: optimizer share on the host, pieces of the head, copies in FP8
"""

from megatron_lynx.anatomy import RECOMPUTABLE
from megatron_lynx.planner.checks import check_plannable, check_profile
from megatron_lynx.planner.decision import Decision, decide, fitting, least_memory, make_plan
from megatron_lynx.planner.evaluation import PlanFigures, figures_of
from megatron_lynx.planner.left_open import as_planned
from megatron_lynx.planner.uniform import uniform_plan

__all__ = [
    "RECOMPUTABLE",
    "Decision",
    "PlanFigures",
    "as_planned",
    "check_plannable",
    "check_profile",
    "decide",
    "figures_of",
    "fitting",
    "least_memory",
    "make_plan",
    "uniform_plan",
]
