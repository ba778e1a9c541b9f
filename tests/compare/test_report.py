from __future__ import annotations

import io

from rich.console import Console

from megatron_lynx.compare import notes, print_report
from tests.measure.samples import MIB, measurement, setting


def test_the_terminal_shows_every_setting_and_every_note():
    whole, text = measurement(), io.StringIO()
    print_report(whole, Console(file=text, width=300))
    figures = (
        "1.010",
        "28 / 4",
        "1.05 s - 1.55 s",
        "+11 ms",
        "100.00 MiB",
        "ours in windows (1.11 s, 70.00 MiB) is 1.19 times as fast",
    )
    for wanted in [*(each.name for each in whole.settings), *notes(whole), *figures]:
        assert wanted in text.getvalue()


def test_what_went_to_the_host_is_a_note():
    copied = {"offloaded_bytes": 3 * MIB, "host_bytes": 2 * MIB, "exposed_copy_s": 0.004}
    offloading = measurement(settings=(setting("stock none", 1.0, 5, 5), setting("ours", 1.0, 5, 5, ours=True, **copied)))
    assert [note for note in notes(offloading) if "host" in note and note.startswith("ours")] == [
        "ours: 3.00 MiB to the host and back in one step, through 2.00 MiB of host memory; compute waited 4 ms for copies; the "
        "rank that needs most of each."
    ]


def test_deferred_weight_gradients_are_a_note():
    deferred = {"filled": 30, "flushed": 2, "deferred_bytes": 3 * MIB}
    deferring = measurement(settings=(setting("stock none", 1.0, 5, 5), setting("ours", 1.0, 5, 5, ours=True, **deferred)))
    assert [note for note in notes(deferring) if "deferred" in note] == [
        "ours: 64 weight gradients deferred in one step on all ranks, 60 of them into waits; "
        "their operands held at most 3.00 MiB."
    ]


def test_different_gradients_are_shouted():
    settings = measurement().settings
    wrong = settings[1].model_copy(
        update={"ranks": tuple(rank.model_copy(update={"gradients_equal": rank.rank == 0}) for rank in settings[1].ranks)}
    )
    text = io.StringIO()
    print_report(measurement(settings=(settings[0], wrong)), Console(file=text, width=300))
    assert " NO" in text.getvalue()
