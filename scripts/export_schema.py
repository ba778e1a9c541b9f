"""Writes configs/plan.schema.json from the model of plans. Run it after changing a part of them; a test holds it current."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_lynx.plan import plan_schema
from megatron_lynx.whole_file import write_whole

SCHEMA = Path(__file__).parents[1] / "configs" / "plan.schema.json"


def schema_text() -> str:
    return json.dumps(plan_schema(), indent=2) + "\n"


if __name__ == "__main__":
    write_whole(SCHEMA, schema_text())
    print(f"wrote {SCHEMA}")
