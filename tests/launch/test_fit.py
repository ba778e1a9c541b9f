"""What of Megatron's arguments does not go with a plan, before a model is built."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from megatron_lynx.launch.fit import arguments_against
from megatron_lynx.planner.uniform import uniform_plan
from megatron_lynx.testbed.tiny_jobs import tiny_job

BACKEND = "--moe-flex-dispatcher-backend"


@pytest.mark.parametrize(
    ("installed", "missing"), [((), {"deepep", "hybridep"}), (("Buffer",), {"hybridep"}), (("Buffer", "HybridEPBuffer"), set())]
)
def test_a_backend_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, installed: tuple[str, ...], missing: set[str]) -> None:
    """Megatron would stop on this rank when it builds the model, while others go on to where they wait for it."""
    package = ModuleType("deep_ep")
    for name in installed:
        setattr(package, name, object)
    monkeypatch.setitem(sys.modules, "deep_ep", package if installed else None)
    plan = uniform_plan(tiny_job("llama"))

    def found(dispatcher: str, backend: str) -> list[str]:
        args = SimpleNamespace(moe_token_dispatcher_type=dispatcher, moe_flex_dispatcher_backend=backend)
        return [problem.needed for problem in arguments_against(plan, args) if problem.where == BACKEND]

    assert {backend for backend in ("deepep", "hybridep") if found("flex", backend)} == missing
    assert all("not installed on this rank" in said for backend in missing for said in found("flex", backend))
    assert found("alltoall", "deepep") == []
