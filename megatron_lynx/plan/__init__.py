"""The plan file, the interface of planning and training: which activations each layer keeps, and when it recomputes others."""

from megatron_lynx.plan.plan import Plan
from megatron_lynx.plan.plan_file import dump_plan, load_plan, plan_schema, save_plan

__all__ = ["Plan", "dump_plan", "load_plan", "plan_schema", "save_plan"]
