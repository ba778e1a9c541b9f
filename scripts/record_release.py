"""Draft what reads otherwise in a release than in the one before it, as a statement for the file that records releases.

    PYTHONPATH=CHECKOUT python scripts/record_release.py                    for megatron_lynx/apply/releases/core.py
    PYTHONPATH=CHECKOUT python scripts/record_release.py double_buffered    for megatron_lynx/double_buffered/releases.py
    PYTHONPATH=TE python scripts/record_release.py transformer_engine       for megatron_lynx/apply/transformer_engine/releases.py

CHECKOUT is a checkout of megatron-core or an unpacked wheel; TE is an unpacked wheel of Transformer Engine. Some classes of
megatron-core can be read only where both are on the path.

The draft holds fingerprints only. Before it is committed somebody reads what changed since the release before (`git diff` of the
two, for the functions named), checks where a `LayerNormLinear` keeps what its norm made, and runs the tests against the release.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from megatron_lynx.apply.releases import KNOWN, Release, fingerprint, installed_version, minor_of, number_of
from megatron_lynx.apply.releases.core import LANGUAGE
from megatron_lynx.apply.releases.release import GONE
from megatron_lynx.apply.transformer_engine import KNOWN as KNOWN_TE
from megatron_lynx.apply.transformer_engine import installed_te
from megatron_lynx.apply.transformer_engine.release import ATTENTION
from megatron_lynx.double_buffered.releases import KNOWN as KNOWN_WITHOUT_FLUSHES
from megatron_lynx.errors import HookRefused
from megatron_lynx.testbed.cpu_device import stand_in_for_cuda
from megatron_lynx.testbed.missing_modules import stand_in_for_missing_modules

LONG = {"ATTENTION": ATTENTION, "LANGUAGE": LANGUAGE}
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


def core_draft() -> str:
    """What differs in the megatron-core that can be imported."""
    tables: dict[str, Sequence[str]] = {
        "fingerprints": COMING,
        "te": (),
        "experts": (),
        "latent": (),
        "head": (),
        "hybrid": (),
        "overlapped": (),
    }
    unread = []
    try:
        installed_te()
    except HookRefused:
        del tables["te"]
        unread = ["    # te: not read, because Transformer Engine cannot be imported"]
    return draft("CORE", installed_version(), KNOWN, tables, unread)


def te_draft() -> str:
    """What differs in the Transformer Engine that can be imported."""
    return draft("TE", installed_te(), KNOWN_TE, {"fingerprints": (), "fp8": (), "grouped": (), "fp4": ()})


def double_buffered_draft() -> str:
    """What differs in the megatron-core that can be imported, for training without flushes."""
    return draft("CORE", installed_version(), KNOWN_WITHOUT_FLUSHES, {"fingerprints": ()})


def draft(
    name: str, version: str, known: Mapping[str, Release], tables: Mapping[str, Sequence[str]], unread: Sequence[str] = ()
) -> str:
    """A statement of Python: what differs in this version from the newest known release that is older.

    `tables`: by the name of a table, functions to look for in addition to those that any known release has in it.
    """
    older = [release for release in known.values() if number_of(release.version) < number_of(version)]
    if not older:
        raise SystemExit(f"no release before {version} is known; needed: one after {next(iter(known))}")
    before = older[-1]
    lines = [f"{constant(name, version)} = {constant(name, before.version)}.then(  # recorded from {version}"]
    lines += [f'    "{minor_of(version)}",', *unread]
    for table, coming in tables.items():
        ever = dict.fromkeys(function for release in known.values() for function in recorded(release, table))
        lines += written(table, difference(recorded(before, table), [*ever, *coming]))
    return "\n".join([*lines, ")", ""])


def recorded(release: Release, table: str) -> Mapping[str, str]:
    """One table of a release: that of all runs, or of those that have something."""
    return release.fingerprints if table == "fingerprints" else release.only_with.get(table, {})


def constant(name: str, version: str) -> str:
    return f"{name}_{minor_of(version).replace('.', '_')}"


def difference(before: Mapping[str, str], functions: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each function that reads otherwise than before, came, or is gone, with what is to be recorded of it."""
    for function in functions:
        try:
            found = fingerprint(function)
        except (ImportError, AttributeError):
            found = GONE
        if found != before.get(function, GONE):
            yield function, found


def written(table: str, differing: Iterable[tuple[str, str]]) -> list[str]:
    """One table of the statement, or nothing if it is empty."""
    rows = [f"        {quoted(function)}: {'GONE' if found == GONE else quoted(found)}," for function, found in differing]
    return [f"    {table}={{", *rows, "    },"] if rows else []


def quoted(text: str) -> str:
    """Text as a literal. Some modules have names that are too long for a line."""
    long = next((name for name, module in LONG.items() if text.startswith(module)), None)
    return f'"{text}"' if long is None else f'f"{{{long}}}{text.removeprefix(LONG[long])}"'


DRAFTS = {"": core_draft, "transformer_engine": te_draft, "double_buffered": double_buffered_draft}

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # before a checkout of Megatron, which has `tests`, too
    from tests import instruments

    instruments.offer()
    stand_in_for_cuda()
    stand_in_for_missing_modules()  # where there is no GPU
    print(DRAFTS["".join(sys.argv[1:])](), end="")
