"""Layouts of tiny jobs that most of planning is tried on: arguments of `tiny_jobs.tiny_job`."""

from __future__ import annotations

from typing import Any

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tp": {"tensor": 2},
    "tp+sp": {"tensor": 2, "sequence_parallel": True},
    "pp": {"pipeline": 2, "microbatches": 4},
    "tp x pp": {"tensor": 2, "pipeline": 2, "microbatches": 4},
    "tp x pp+sp": {"tensor": 2, "pipeline": 2, "microbatches": 4, "sequence_parallel": True},
}
