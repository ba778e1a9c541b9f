"""Continuous integration installs a browser where it may, and goes on where it may not."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "ci_browser.sh"
NEEDED = ("bash", "env", "timeout", "sleep")


@pytest.mark.parametrize(
    ("user", "apt_get", "says"),
    [
        ("0", "exit 100", "apt-get could not install one within 1 s"),
        ("0", "sleep 30", "apt-get could not install one within 1 s"),
        ("0", "exit 0", "apt-get could not install one within 1 s"),
        ("1000", "exit 0", "none is installed without root and apt-get"),
        ("0", None, "none is installed without root and apt-get"),
    ],
    ids=["refused", "too slow", "installs nothing", "no root", "no apt-get"],
)
def test_without_a_browser_it_goes_on_and_says_why(tmp_path, user, apt_get, says) -> None:
    for name in NEEDED:
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    command(tmp_path / "id", f"echo {user}")
    if apt_get is not None:
        command(tmp_path / "apt-get", apt_get)
    done = subprocess.run([SCRIPT], env={"PATH": os.fspath(tmp_path), "LIMIT_S": "1"}, capture_output=True, text=True, timeout=25)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"no browser, and {says}: tests in a browser are skipped\n"


def test_where_one_is_nothing_is_installed(tmp_path) -> None:
    for name in ("bash", "env"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    command(tmp_path / "google-chrome", "exit 0")
    done = subprocess.run([SCRIPT], env={"PATH": os.fspath(tmp_path)}, capture_output=True, text=True, timeout=25)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def command(file: Path, does: str) -> None:
    file.write_text(f"#!{shutil.which('bash')}\n{does}\n")
    file.chmod(0o755)
