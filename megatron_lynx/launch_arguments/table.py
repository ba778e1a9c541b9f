"""Tables and lines that show how a launch was read.

job               value    from
model.layers      32       --num-layers
model.ffn         14336    --ffn-hidden-size
priced as bf16 ... ; no matter: learning rate (--lr --min-lr), ...
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_lynx.launch_arguments.expert_facts import DISPATCHER
from megatron_lynx.launch_arguments.given import mistyped
from megatron_lynx.launch_arguments.reading import Reading
from megatron_lynx.tables import WrappedTable
from megatron_lynx.units import format_bytes

MASK = "create_attention_mask_in_dataloader"


def understood(reading: Reading) -> WrappedTable:
    columns = ("job", "value", "from")
    table = WrappedTable(columns, words=columns)
    for fact in reading.facts:
        value = ("yes" if fact.value else "no") if isinstance(fact.value, bool) else str(fact.value)
        table.add(fact.place, value, fact.origin, style="dim" if fact.origin == "Megatron's default" else "")
    return table


def remarks(reading: Reading) -> Iterator[str]:
    """A line for each flag that is counted as something else, then one for those that do not matter."""
    releases = reading.given.releases
    if not reading.problems:
        yield f"Megatron {releases[0]}" + (f" to {releases[-1]}" if len(releases) > 1 else "") + " takes these flags"
    if reading.today.flags:
        yield f"today: {reading.today.name}, by {' '.join(reading.today.flags)}"
    for flag, instead in reading.priced_as:
        yield f"{flag}: counted as {instead}"
    subjects = [f"{subject} ({' '.join(flags)})" for subject, flags in reading.no_matter.items()]
    if subjects:
        yield f"no matter for activations and their seconds: {', '.join(subjects)}"


def unknown_in_words(reading: Reading) -> str | None:
    """A sentence on flags that Megatron does not have; None without any."""
    given = reading.given
    if not given.unknown:
        return None
    names = []
    for words in given.unknown:
        close = mistyped(words.split()[0], given.table)
        names.append(words if close is None else f"{words} (did you mean {close}?)")
    releases = f"{given.table.releases[0]} to {given.table.releases[-1]}"
    return (
        f"not known to Megatron {releases}, read as your script's own (up to the next flag) and not counted: {', '.join(names)}"
    )


LARGE_MASK_BYTES = 2**28


def unsaid(reading: Reading) -> Iterator[str]:
    """A line for each of Megatron's defaults that is costly in this launch and that a flag changes."""
    given, data = reading.given, reading.job_data
    model, batch = data.get("model", {}), data.get("batch", {})
    if model.get("dtype") == "fp32":
        yield f"{reading.said(['--bf16'])} is not given: weights, activations and GEMMs are in fp32"
    if DISPATCHER not in given.values and model.get("experts", {}).get("dispatcher") == "allgather":
        default = "Megatron's default, allgather, brings every token to all ranks of the group"
        yield f"--{DISPATCHER.replace('_', '-')} is not given: {default}; alltoall, to those of its experts"
    rows = model.get("seq", 0) // data.get("parallel", {}).get("context", 1)
    mask_bytes = batch.get("micro", 0) * rows * model.get("seq", 0)
    masks = Path(reading.command.script or "").name.startswith("pretrain_") and bool(given[MASK])
    if masks and not batch.get("packed") and mask_bytes >= LARGE_MASK_BYTES:
        where = "of a micro-batch on the first and the last stage, which is not counted"
        yield f"--no-{MASK.replace('_', '-')} is not given: a mask of {format_bytes(mask_bytes)} {where}"


def as_json(reading: Reading) -> dict[str, object]:
    return {
        "facts": [{"place": fact.place, "value": fact.value, "from": fact.origin} for fact in reading.facts],
        "today": {"setting": reading.today.name, "flags": list(reading.today.flags)},
        "unknown": list(reading.given.unknown),
        "unsaid": list(unsaid(reading)),
        "priced_as": dict(reading.priced_as),
        "no_matter": {subject: list(flags) for subject, flags in reading.no_matter.items()},
        "releases": list(reading.given.releases),
    }
