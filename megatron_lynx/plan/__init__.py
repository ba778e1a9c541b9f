"""The plan: the one file in which the planning half and the running half meet."""

from megatron_lynx.plan.plan import Plan
from megatron_lynx.plan.plan_file import dump_plan, load_plan, plan_schema, save_plan

__all__ = ["Plan", "dump_plan", "load_plan", "plan_schema", "save_plan"]
