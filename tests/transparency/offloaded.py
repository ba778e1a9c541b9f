"""Plans that offload: a plan of `plans.plan_for`, with bytes for every chunk."""

from __future__ import annotations

from megatron_lynx.plan.plan import Plan


def offloading(
    plan: Plan,
    size_bytes: int,
    *,
    smallest: int = 1,
    beside: str = "allow",
    experts: bool = False,
    pace: int | None = None,
    every: bool = False,
) -> Plan:
    """The same plan with that many bytes of every micro-batch of every chunk on the host (0: none). `experts`: what experts keep
    goes as well. `pace`: bytes beside one half's forward, where a micro-batch's own backward follows at once; `every`: of every
    one."""
    raw, chosen = plan.model_dump(mode="json"), dict[str, object]()
    for stage in raw["stages"]:
        chosen = {"bytes": size_bytes, "smallest_tensor_bytes": smallest, "beside_messages": beside}
        chosen |= {"experts": experts, "pace_bytes": pace, "half_by_half": "all" if every else "at_once"}
        stage["offload"] = chosen if size_bytes else None
    return Plan.model_validate(raw)
