"""Writes the entry of an installed release into a file of fingerprints: what differs from the release before.

    PYTHONPATH=CHECKOUT:TE python scripts/record_release.py core         writes apply/releases.json, in megatron_lynx/
    PYTHONPATH=CHECKOUT python scripts/record_release.py double_buffered   writes double_buffered/releases.json
    PYTHONPATH=TE python scripts/record_release.py transformer_engine      writes apply/transformer_engine.json

CHECKOUT is a checkout of megatron-core or an unpacked wheel; TE is an unpacked wheel of Transformer Engine, which some modules of
megatron-core import. `-o FILE` writes another file. A release that is recorded already is recorded again; its `also` stays.

Before the file is committed somebody reads what changed since the release before (`git diff` of the two, for the functions
named), checks where a `LayerNormLinear` saves what its norm made (`apply/transformer_engine.py`), and runs the tests.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lynx.apply import releases
from megatron_lynx.apply.releases import GONE, Release, fingerprint, installed_te, installed_version, minor_of, number_of
from megatron_lynx.double_buffered import releases as without_flushes
from megatron_lynx.errors import HookRefused

LAYER = "megatron.core.transformer.transformer_layer:TransformerLayer"
COMING = (
    f"{LAYER}._run_input_layernorm",
    f"{LAYER}._apply_self_attn_bda_step",
    f"{LAYER}._pre_mlp_layernorm_and_residual",
    f"{LAYER}._run_mlp",
    f"{LAYER}._apply_mlp_bda_step",
    "megatron.core.tensor_parallel.layers:_linear_forward",
)
"""The functions that will matter in megatron-core 0.20, and that no release before it has."""


@dataclass(frozen=True)
class Recorded:
    """One file of fingerprints."""

    file: Path
    known: Mapping[str, Release]
    installed: Callable[[], str]
    needs_te: bool = False
    """Whether some of its functions can be imported only beside Transformer Engine."""
    coming: tuple[str, ...] = ()
    """Functions that matter in every run of the next release, and that no known release has."""


PACKAGE = Path(__file__).parents[1] / "megatron_lynx"
FILES = {
    "core": Recorded(PACKAGE / "apply/releases.json", releases.KNOWN, installed_version, True, COMING),
    "transformer_engine": Recorded(PACKAGE / "apply/transformer_engine.json", releases.KNOWN_TE, installed_te),
    "double_buffered": Recorded(PACKAGE / "double_buffered/releases.json", without_flushes.KNOWN, installed_version),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=FILES)
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    recorded = FILES[asked.what]
    try:
        version = recorded.installed()
        if recorded.needs_te:
            installed_te()
    except HookRefused as refused:
        raise SystemExit(str(refused)) from None
    entries = json.loads(recorded.file.read_text(encoding="utf-8"))
    minor = minor_of(version)
    entries[minor] = {**entries.get(minor, {}), **entry_of(version, recorded)}
    in_order = {each: entries[each] for each in sorted(entries, key=number_of)}
    output = asked.output or recorded.file
    output.write_text(json.dumps(in_order, indent=1) + "\n", encoding="utf-8")
    print(f"recorded {minor} from {version}: {output}")


def entry_of(version: str, recorded: Recorded) -> dict[str, Any]:
    """What differs in the installed version from the newest known release before it."""
    known = recorded.known.values()
    earlier = [release for release in known if number_of(release.version) < number_of(version)]
    before = earlier[-1] if earlier else Release("", {})
    ever = dict.fromkeys(function for release in known for function in release.fingerprints)
    entry: dict[str, Any] = {"recorded_from": version}
    if found := difference(before.fingerprints, [*ever, *recorded.coming]):
        entry["fingerprints"] = found
    only_with = {}
    for what in dict.fromkeys(what for release in known for what in release.only_with):
        ever = dict.fromkeys(function for release in known for function in release.only_with.get(what, {}))
        if found := difference(before.only_with.get(what, {}), list(ever)):
            only_with[what] = found
    return {**entry, "only_with": only_with} if only_with else entry


def difference(before: Mapping[str, str], functions: list[str]) -> dict[str, str]:
    """The fingerprint of each function that changed, came, or is gone."""
    found = {function: found_of(function) for function in functions}
    return {function: hashed for function, hashed in found.items() if hashed != before.get(function, GONE)}


def found_of(function: str) -> str:
    try:
        return fingerprint(function)
    except (ImportError, AttributeError):
        return GONE


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # before a checkout of Megatron, which has `tests`, too
    from tests import instruments

    instruments.offer()
    instruments.stand_in()  # where there is no GPU
    main()
