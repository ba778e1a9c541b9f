"""An answer for programs, as `advise --json` and `plan --json` print it."""

from __future__ import annotations

from typing import Any

from megatron_lynx.advise.answer import Answer
from megatron_lynx.advise.verdict import verdict


def as_json(answer: Answer) -> dict[str, Any]:
    """Seconds are of a whole step, the optimizer's update included; bytes of the fullest device."""
    near = [{**each.row.as_json, "flags": answer.changed(each), "launch": answer.command(each)} for each in answer.near]
    return {
        "launch": answer.launch.as_json,
        "plan": None if answer.plan is None else answer.plan.as_json,
        "plan_in_todays_bytes": None if answer.in_todays_bytes is None else answer.in_todays_bytes.as_json,
        **({"neighbours": near} if answer.asked_near else {}),
        **({"no_plan": [str(problem) for problem in answer.problems]} if answer.problems else {}),
        **({"would_fit": list(answer.would_fit)} if answer.would_fit else {}),
        "budget_bytes": answer.job.memory_budget_bytes,
        "verdict": verdict(answer),
    }
