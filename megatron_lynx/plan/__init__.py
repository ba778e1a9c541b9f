"""The plan file, in which planning and training meet: what each layer keeps and recomputes, and behind which wait."""

from megatron_lynx.plan.plan import Plan
from megatron_lynx.plan.plan_file import dump_plan, load_plan, plan_schema, save_plan

__all__ = ["Plan", "dump_plan", "load_plan", "plan_schema", "save_plan"]
