"""An installed package has the files that its modules read, not only its modules."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEFT_OUT = {".py", ".pyc"}


def test_what_is_built_has_every_file_of_the_package(tmp_path: Path) -> None:
    built = tmp_path / "lib"
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", tmp_path, "build_py", "-d", built]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert data_of(built) - {"configs"} >= data_of(ROOT)
    assert "apply/releases.json" in data_of(built)
    assert list((built / "megatron_lynx/configs").rglob("*.yaml"))


def data_of(root: Path) -> set[str]:
    package = root / "megatron_lynx"
    return {file.relative_to(package).as_posix() for file in package.rglob("*") if file.is_file() and file.suffix not in LEFT_OUT}


@pytest.mark.slow
def test_a_wheel_runs_in_a_fresh_environment(tmp_path: Path) -> None:
    """Its requirements are those installed here; the package itself is the wheel's, with its own configs."""
    source = tmp_path / "source"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        if name.startswith(("megatron_lynx/", "configs/")) or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    run([sys.executable, "setup.py", "-q", "bdist_wheel", "-d", tmp_path], source)
    (wheel,) = tmp_path.glob("megatron_lynx-*.whl")
    environment = tmp_path / "environment"
    venv.create(environment)
    python = environment / "bin/python"
    run([sys.executable, "-m", "pip", "-q", "--python", python, "install", "--no-index", "--no-deps", wheel], tmp_path)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "requirements.pth").write_text(sysconfig.get_path("purelib"))
    found = run([python, "-c", "import megatron_lynx; print(megatron_lynx.__file__)"], tmp_path)
    assert Path(found.strip()).is_relative_to(environment)
    planned = run([environment / "bin/megatron-lynx", "plan", "llama3-8b-h100-80g", "-o", "plan.yaml"], tmp_path)
    assert "plan.yaml" in planned


def run(command: list[str | Path], folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
