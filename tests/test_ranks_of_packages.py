"""Who may import whom. Imports inside functions count, type checking does not. The map is in docs/architecture.md."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_lynx"

FOUNDATION = {
    "anatomy",
    "beside",
    "kinds.captured",
    "kinds.dense.section",
    "kinds.experts.section",
    "kinds.latent.section",
    "kinds.mamba.section",
    "kinds.opaque.section",
    "kinds.section",
    "kinds.sections",
    "bridge_settings",
    "environment",
    "errors",
    "figures",
    "fp8_recipes",
    "free_memory",
    "limits",
    "units",
    "nest",
    "pace",
    "prediction",
    "tables",
    "once",
    "timeline",
    "validation",
    "whole_file",
    "yaml_file",
    "version",
}
KINDS_PLANNING = {
    *("kinds.core_attention", "kinds.face", "kinds.mamba.planning", "kinds.planning", "kinds.saved"),
    *("kinds.dense.planning", "kinds.experts.planning", "kinds.latent.planning"),
}
PLANNING = {
    *("config", "profiler", "cost", "simulator", "solver", "search", "rehearsal", "planner", "stock", "advise", "from_run"),
    *KINDS_PLANNING,
}
RUNNING = {"runtime", "apply", "measure", "double_buffered"}
MAY_IMPORT = {
    "config": {"schedule.flushes"},
    "schedule": set(),
    "timetable": {"schedule"},
    "plan": {"schedule", "timetable"},
    "profiler": {"config"},
    "profiler.analytic": {"config", "profiler", *KINDS_PLANNING},
    "kinds": set(),
    **{face: {"config", "profiler", *KINDS_PLANNING} for face in KINDS_PLANNING},
    "cost": {"config", "profiler", "schedule.flushes"},
    "simulator": {"schedule", "timetable", "cost"},
    "solver": {"config", "schedule", "timetable", "profiler", "cost"},
    "rehearsal": {"config", "schedule", "timetable", "plan", "profiler", "cost", "simulator"},
    "planner": {
        *("config", "schedule", "timetable", "plan", "profiler", "cost", "simulator", "solver", "rehearsal"),
        *("stock.legality", "stock.price", "stock.setting"),
    },
    "launch_arguments": {"config", "launch.script", "stock.setting", "stock.legality"},
    "doctor": {"config", "plan", "profiler", "cost", "rehearsal", "estimate", "launch_arguments", "apply"},
    "search": {"config", "schedule", "plan", "profiler", "cost", "simulator", "solver", "rehearsal", "planner", "stock"},
    "stock": {"config", "schedule", "profiler", "cost", "simulator"},
    "estimate": {"config", "profiler", "cost", "solver", "planner", "rehearsal", "simulator", "stock"},
    "advise": {"config", "plan", "profiler", "cost", "launch_arguments", "planner", "search", "stock"},
    "from_run": {"config", "plan", "profiler", "cost", "rehearsal", "measure.run_outcome"},
    "published": {"config", "launch_arguments", "plan", "profiler", "cost", "solver", "stock", "planner", "rehearsal"},
    "runtime": {"schedule.schedule", "timetable"},
    "apply": {"plan", "runtime", "schedule", "timetable"},
    "double_buffered": {"plan", "runtime", "schedule", "apply.hook", "apply.releases"},
    "measure": set(),
    "compare": {"plan", "measure"},
    "report": {
        *("config", "plan", "profiler", "cost", "simulator", "planner", "rehearsal", "stock"),
        *("measure.measurement", "measure.run_outcome", "compare"),
        *("launch_arguments", "advise.today"),
    },
}
ANYTHING = {"__main__", "cli", "launch", "bridge", "testbed"}

TORCH = {
    *("runtime", "apply", "double_buffered", "measure", "testbed", "launch"),
    *("profiler.measured", "profiler.timing"),
}
MEGATRON = {
    *("apply.hooks", "apply.releases", "apply.live_run", "apply.refusals", "testbed", "launch"),
    "profiler.measured",
    *("double_buffered.interpreter", "double_buffered.pipeline"),
}
"""Where the two heavy libraries may be imported; everything else must work without them."""

OPTIONAL = {"transformer_engine", "apex", "fused_layer_norm_cuda", "fused_weight_gradient_mlp_cuda"}
"""Used where they are installed."""


@cache
def modules() -> tuple[str, ...]:
    """Every module of the package, without the package's name: `plan.plan_file`."""
    files = sorted(PACKAGE.rglob("*.py"))
    names = [file.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".").removesuffix("__init__") for file in files]
    return tuple(name.removesuffix(".") for name in names if name)


@cache
def imports_of(module: str) -> tuple[str, ...]:
    """The full names that a module imports anywhere but under TYPE_CHECKING."""
    return tuple(_imports_of(module))


def _imports_of(module: str) -> Iterator[str]:
    path = PACKAGE / module.replace(".", "/")
    is_package = path.is_dir()
    package = ["megatron_lynx", *module.split(".")] if is_package else ["megatron_lynx", *module.split(".")[:-1]]
    tree = ast.parse((path / "__init__.py" if is_package else path.with_suffix(".py")).read_text())
    for node in runtime_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from runtime_nodes(node)


def within(name: str, places: set[str]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


def allowed_in(module: str) -> set[str]:
    """What a module may import: of its own package all, but for a slice's two faces, which are of two halves of the package."""
    top = module.split(".")[0]
    row = next((name for name in (module, top) if name in MAY_IMPORT), None)
    allowed = FOUNDATION | ({top} if top != "kinds" else set()) | (MAY_IMPORT[row] if row is not None else set())
    return allowed | (KINDS_PLANNING if "cost" in allowed else set())


def test_every_module_has_a_rank() -> None:
    known = FOUNDATION | MAY_IMPORT.keys() | ANYTHING
    assert [module for module in modules() if module.split(".")[0] not in known] == []


@pytest.mark.parametrize("module", modules())
def test_imports_follow_the_table(module: str) -> None:
    ours = [name.removeprefix("megatron_lynx.") for name in imports_of(module) if name.startswith("megatron_lynx.")]
    if not within(module, ANYTHING):
        allowed = allowed_in(module)
        assert [name for name in ours if not within(name, allowed)] == [], f"{module} may import {sorted(allowed)}"
    if within(module, RUNNING):
        assert [name for name in ours if within(name, PLANNING)] == []
    heavy = {name.split(".")[0]: name for name in imports_of(module)}
    assert "torch" not in heavy or within(module, TORCH), f"{module} imports {heavy['torch']}"
    assert "megatron" not in heavy or within(module, MEGATRON), f"{module} imports {heavy['megatron']}"


def test_only_commands_reach_the_testbed() -> None:
    """A launch on GPUs loads none of it."""
    tops = {
        module.split(".")[0]
        for module in modules()
        if any(within(name, {"megatron_lynx.testbed"}) for name in imports_of(module))
    }
    assert tops == {"cli", "testbed"}


def test_the_wheel_needs_nothing_else_of_the_checkout() -> None:
    """Instruments live with the tests; who wants them names them (`testbed.cpu_device.STAND_INS`)."""
    others = {"tests", "scripts", "benchmarks"}
    assert [(module, name) for module in modules() for name in imports_of(module) if within(name, others)] == []


def test_planning_needs_neither_torch_nor_megatron() -> None:
    """A laptop without torch imports all of it; only what measures is imported when used."""
    tops = FOUNDATION | PLANNING | {"schedule", "plan", "cli"}
    names = [f"megatron_lynx.{module}" for module in modules() if within(module, tops) and not within(module, TORCH)]
    run_python(
        f"import sys, importlib\nsys.modules.update(torch=None, megatron=None)\nfor n in {names}: importlib.import_module(n)"
    )


@pytest.mark.slow
def test_running_never_loads_planning() -> None:
    """Not even through a third module."""
    names = [f"megatron_lynx.{module}" for module in modules() if within(module, RUNNING)]
    loaded = run_python(f"import sys, importlib\nfor n in {names}: importlib.import_module(n)\nprint(*sys.modules)").split()
    assert [name for name in loaded if within(name, {f"megatron_lynx.{part}" for part in PLANNING})] == []


def test_import_changes_nothing() -> None:
    """`import megatron_lynx` loads nothing heavy and touches neither the environment nor warnings."""
    run_python(
        "import os, sys, warnings\n"
        "before = dict(os.environ), list(warnings.filters), list(sys.path)\n"
        "import megatron_lynx\n"
        "assert (dict(os.environ), list(warnings.filters), list(sys.path)) == before\n"
        "heavy = {'torch', 'megatron', 'pydantic', 'yaml', 'matplotlib', 'scipy', 'numpy'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )


def test_help_loads_only_the_command_line() -> None:
    run_python(
        "import sys\nimport megatron_lynx.cli\n"
        "heavy = {'torch', 'megatron', 'pydantic', 'matplotlib', 'scipy', 'numpy'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )


def test_what_is_imported_is_required() -> None:
    """Every library that the package imports is named in setup.py, and not only for tests."""
    distribution = {"yaml": "pyyaml", "megatron": "megatron-core", "pydantic_core": "pydantic"}
    declared = (ROOT / "setup.py").read_text().split("extras_require")[0]
    used = {name.split(".")[0] for module in modules() for name in imports_of(module)} - sys.stdlib_module_names - OPTIONAL
    names = sorted(distribution.get(name, name) for name in used - {"megatron_lynx"})
    missing = [name for name in names if not re.search(rf'"{name}\b', declared)]
    assert missing == []


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
