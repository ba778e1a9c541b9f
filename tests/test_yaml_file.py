"""YAML as people write it, and the traps in it."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from megatron_lynx.errors import ConfigError
from megatron_lynx.units import MIB
from megatron_lynx.validation import validated
from megatron_lynx.whole_file import write_whole
from megatron_lynx.yaml_file import read_yaml, write_yaml

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
DATA = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)


def read(tmp_path: Path, text: str | bytes) -> dict[str, Any]:
    path = tmp_path / "file.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_yaml(path)


def refusals(tmp_path: Path, text: str | bytes) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    return [str(problem).replace(f"{tmp_path}/", "") for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e9", 1_000_000_000),
        ("1.5e-3", 0.0015),
        ("1e-3", 0.001),
        (".5", 0.5),
        ("-7", -7),
        ("yes", "yes"),
        ("off", "off"),
        ("true", True),
        ("~", None),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("0x10", "0x10"),
        ("2026-11-20", "2026-11-20"),
        ("'010'", "010"),
        ("3-8", "3-8"),
        ("0.16.1", "0.16.1"),
    ],
)
def test_scalars(tmp_path: Path, written: str, value: object) -> None:
    found = read(tmp_path, f"key: {written}")["key"]
    assert (found, type(found)) == (value, type(value))


def test_keys_are_text(tmp_path: Path) -> None:
    """`0.10:` was once read as 0.1, so that a table for release 0.10 answered for 0.1."""
    assert list(read(tmp_path, "0.10: a\n0.1: b\non: c\n010: d\n")) == ["0.10", "0.1", "on", "010"]


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        ("", ["file.yaml: found an empty file"]),
        ("# only a comment\n", ["file.yaml: found an empty file"]),
        ("- 1\n", ["file.yaml: found a list at the top"]),
        ("word\n", ["file.yaml: found a single value at the top"]),
        ("a: 1\nb: {a: 1, a: 2}\na: 3\n", ["file.yaml:2: found 'a' a second time", "file.yaml:3: found 'a' a second time"]),
        ("a: 1\n'a': 2\n", ["file.yaml:2: found 'a' a second time (first on line 1)"]),
        ("a: 010\nb: -007\n", ["file.yaml:1: found 010", "file.yaml:2: found -007"]),
        ("a: [1,\n", ["file.yaml:2: did not find expected node content"]),
        (
            "a: 1\nb: 'text\n",
            ["file.yaml:3: found unexpected end of stream (while scanning a quoted scalar"],
        ),
        ("a: 1\n  b: 2\n", ["file.yaml:2: mapping values are not allowed in this context"]),
        ("a: 1\n\tb: 2\n", ["file.yaml:2: "]),
        ("a: &x [1]\nb: *x\n", ["file.yaml:1: nothing can be shared by name here (x)"]),
        ("a: &x [*x]\n", ["file.yaml:1: nothing can be shared"]),
        ("a: !!python/object:os.system x\n", ["file.yaml:1: could not determine a constructor"]),
        ("a: 1\n---\na: 2\n", ["file.yaml:2: but found another document"]),
        ("? [1, 2]\n: 3\n", ["file.yaml:1: a key that is a list or a mapping"]),
        ("a: " + "[" * 3000, ["file.yaml:1: exceeded maximum nesting depth"]),
        (b"a: 1\nb: \xff\n", ["file.yaml:2: found a byte that is no text (0xff), needed UTF-8"]),
        (b"a: \x00\n", ["file.yaml: unacceptable character"]),
        ("#" * 16 * MIB + "\n", ["file.yaml: found more than 16.00 MiB"]),
    ],
)
def test_refused(tmp_path: Path, text: str | bytes, answers: list[str]) -> None:
    found = refusals(tmp_path, text)
    assert len(found) == len(answers), found
    assert all(line.startswith(answer) for line, answer in zip(found, answers, strict=True)), found


def test_unreadable(tmp_path: Path) -> None:
    for path, found in ((tmp_path / "none.yaml", "no such file"), (tmp_path, "a folder")):
        with pytest.raises(ConfigError, match=found):
            read_yaml(path)


@settings(deadline=None, max_examples=40)
@given(st.dictionaries(st.text(), DATA, min_size=1))
@example({"note": "one\x85line\u2028two"})
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, data: dict[str, Any]) -> None:
    """Whatever looks like a number, a boolean or a date to some YAML comes back as the text it was."""
    path = tmp_path_factory.mktemp("yaml") / "file.yaml"
    write_whole(path, write_yaml(data))
    assert read_yaml(path) == data
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(yaml, "__with_libyaml__", False)
        assert read_yaml(path) == data, "PyYAML may be built without it"


class Engine(BaseModel):
    model_config = ConfigDict(extra="forbid")
    cylinders: int
    fuel: str = "diesel"


class Car(BaseModel):
    model_config = ConfigDict(extra="forbid")
    engine: Engine | str
    seats: tuple[int, ...] = ()
    weight_kg: float


def test_unions_answer_for_the_arm_that_was_meant() -> None:
    with pytest.raises(ConfigError) as caught:
        validated(Car, {"engine": {"cylinders": "4", "feul": "petrol"}, "weight_kg": 1, "seats": [1, 2.5]}, "car.yaml")
    assert [str(problem) for problem in caught.value.problems] == [
        "car.yaml: engine.cylinders: found '4', needed a whole number",
        "car.yaml: engine.feul: found an unknown key, needed one of cylinders, fuel; did you mean fuel?",
        "car.yaml: seats.1: found 2.5, needed a whole number",
    ]
    with pytest.raises(ConfigError) as caught:
        validated(Car, {"engine": 3}, "car.yaml")
    assert [str(problem) for problem in caught.value.problems] == [
        "car.yaml: engine: found 3, needed a mapping or text",
        "car.yaml: weight_kg: found nothing, needed this key",
    ]


def test_writing_keeps_permissions_and_follows_links(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    write_whole(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_devices_are_written_through(tmp_path: Path) -> None:
    """`-o /dev/null` as root once would have replaced the device by a file."""
    read_end, write_end = os.pipe()
    write_whole(f"/dev/fd/{write_end}", "text")
    assert os.read(read_end, 10) == b"text"
    os.close(read_end), os.close(write_end)


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "file", tmp_path):
        with pytest.raises(ConfigError, match="cannot be written"):
            write_whole(path, "text")
    assert list(tmp_path.iterdir()) == []
