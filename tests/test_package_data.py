"""An installed package has the files that its modules read, not only its modules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
