"""Makes the plan of a job from a profile: partitions the layers, solves every stage, rehearses the answers and writes them down.

decision.py      make_plan, which runs all of it
partitioning.py  layers of each stage, where the job leaves them open
nearest.py       what would fit: changes of a job that does not, the load of experts with which a plan does
evaluation.py    seconds and bytes of a plan, which all commands print, at every moment, against the budget
summary.py       a plan for programs
filling.py       weight gradients in what waits a plan leaves: rooms.py what is left of them, packing.py how to fill them
                 (in turns with many linears), slack.py for which there is memory
writing.py       answers as a plan;  uniform.py: plans that treat all layers alike and need no solver
userbuffers.py   whether a launch with them is expected to be faster than one without
checks.py        refuses what a plan cannot do, and profiles of another job; whether a job may defer weight gradients
left_open.py     what a job leaves open beside its layers: the share of its optimizer on the host, pieces of its head
"""

from megatron_lynx.anatomy import REPLAYABLE
from megatron_lynx.planner.checks import check_plannable, check_profile
from megatron_lynx.planner.decision import Decision, decide, fitting, least_memory, make_plan
from megatron_lynx.planner.evaluation import PlanFigures, figures_of
from megatron_lynx.planner.left_open import as_planned
from megatron_lynx.planner.uniform import uniform_plan

__all__ = [
    "REPLAYABLE",
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
