"""Plans that offload: a plan of `plans.plan_for`, with bytes for every chunk."""

from __future__ import annotations

from megatron_lynx.plan.plan import Plan


def offloading(
    plan: Plan, size_bytes: int, *, smallest: int = 1, prefetch: int = 1, beside: str = "allow", experts: bool = False
) -> Plan:
    """The same plan with that many bytes of every micro-batch of every chunk on the host (0: none). `experts`: what experts keep
    goes as well."""
    raw = plan.model_dump(mode="json")
    for stage in raw["stages"]:
        chosen = {"bytes": size_bytes, "smallest_tensor_bytes": smallest, "prefetch": prefetch, "beside_messages": beside}
        chosen["experts"] = experts
        stage["offload"] = chosen if size_bytes else None
    return Plan.model_validate(raw)
