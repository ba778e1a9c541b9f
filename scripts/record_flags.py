"""Records which flags Megatron's launch scripts take, release by release: what `plan -- ...` and `doctor -- ...` read them with.

checkout ─ its own parser, built in a process of its own ─> names, arity, type, default, choices, group: facts, no text
four checkouts ─> megatron_lynx/launch_arguments/flags.json: one row for each form that a flag has had

What is written by hand in that file stays: what each flag means for a plan (`kind`, `why`), which of Megatron's headings matter
as a whole to neither activations nor seconds (`groups`), and fields without a flag. Flags that nobody has judged are printed.

    python scripts/record_flags.py 0.16=~/Megatron-0.16 0.17=... [-o megatron_lynx/launch_arguments/flags.json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[1] / "megatron_lynx" / "launch_arguments" / "flags.json"
OPTIONAL = ("six", "regex")
"""Libraries of Megatron's tokenizers, which its parser imports and does not need."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", metavar="RELEASE=FOLDER", help="oldest first")
    parser.add_argument("-o", "--output", type=Path, default=TABLE)
    asked = parser.parse_args()
    pairs = [text.split("=", 1) for text in asked.checkouts]
    recorded = merged({release: flags_of(Path(folder).expanduser()) for release, folder in pairs})
    table = with_judgements(recorded, json.loads(TABLE.read_text(encoding="utf-8")))
    asked.output.write_text(as_text(table), encoding="utf-8")
    print(f"wrote {len(table['flags'])} rows of {', '.join(table['releases'])}: {asked.output}")
    if names := not_judged(table):
        print(f"not judged yet (kind, why): {' '.join(names)}")
    return 0


JUDGED = ("kind", "why")
"""The columns that are written by hand."""


def with_judgements(recorded: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """A new table, with everything that was written by hand into the one before."""
    judged = {row["sets"]: {key: row[key] for key in JUDGED if key in row} for row in before["flags"]}
    return {**before, **recorded, "flags": [{**row, **judged.get(row["sets"], {})} for row in recorded["flags"]]}


def not_judged(table: dict[str, Any]) -> list[str]:
    """The names of which nothing says what they mean for a plan."""
    from megatron_lynx.launch_arguments.given import REFUSED

    rows = (row for row in table["flags"] if "kind" not in row and row["group"] not in table["groups"])
    return sorted({row["sets"] for row in rows} - REFUSED.keys())


def flags_of(checkout: Path) -> list[dict[str, Any]]:
    """A row for each flag of a checkout's parser, which is asked in a process of its own."""
    code = "import sys; sys.path[:0] = sys.argv[1:]; import record_flags; record_flags.print_flags()"
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(checkout)]  # a checkout has `tests` of its own
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code, *paths], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{checkout}: its parser cannot be built\n{done.stderr}")
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def print_flags() -> None:
    """Print the flags of the Megatron that is on the import path."""
    from tests.instruments.script_device import stand_in_for_gpu_machine

    stand_in_for_gpu_machine()
    for name in OPTIONAL:
        sys.modules.setdefault(name, types.ModuleType(name))
    from megatron.post_training.arguments import add_modelopt_args
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_modelopt_args(add_megatron_arguments(parser))
    print(json.dumps([row for group in parser._action_groups for row in rows_of(group)]))


def rows_of(group: Any) -> Iterator[dict[str, Any]]:
    for action in group._group_actions:
        boolean = isinstance(action, argparse.BooleanOptionalAction)
        takes = 0 if boolean else {None: 1}.get(action.nargs, action.nargs)
        row = {"options": list(action.option_strings), "sets": action.dest, "takes": takes, "group": group.title}
        if takes == 0 and not boolean:
            row["to"] = action.const
        if takes != 0:
            row["type"] = {int: "int", float: "float"}.get(action.type, "text")
        if action.choices is not None and takes != 0:
            row["choices"] = [plain(choice) for choice in action.choices]
        row["default"] = plain(action.default)
        yield row


def plain(value: Any) -> Any:
    """A value as JSON has it; an enumeration's by its name."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return getattr(value, "name", str(value))


def merged(flags: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """All releases' rows; a row that several releases have alike is there once."""
    forms: dict[str, dict[str, Any]] = {}
    for release, rows in flags.items():
        for row in rows:
            form = forms.setdefault(json.dumps(row, sort_keys=True), {**row, "releases": []})
            form["releases"].append(release)
    return {"releases": list(flags), "flags": sorted(forms.values(), key=lambda row: (row["options"][0], row["releases"]))}


def as_text(table: dict[str, Any]) -> str:
    """One flag to a line, so that a difference can be read."""
    rows = ",\n".join(json.dumps(row) for row in table["flags"])
    others = json.dumps({key: value for key, value in table.items() if key != "flags"}, indent=1)
    return others.removesuffix("\n}") + f',\n "flags": [\n{rows}\n ]\n}}\n'


if __name__ == "__main__":
    sys.exit(main())
