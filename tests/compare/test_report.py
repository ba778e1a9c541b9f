from __future__ import annotations

import io
import json

from rich.console import Console

from megatron_lynx.compare import markdown, notes, print_report, write_report
from megatron_lynx.measure.measurement import load_measurement
from tests.measure.samples import MIB, measurement, setting

GOLDEN = """\
# tiny-gpt, TP 2, 2 micro-batches

| setting | step | quartiles | ratio to none | resident | peak | exposed | recomputations hidden / on demand | gradients equal \
|
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| stock none | 1.1 s | 1.05 s - 1.55 s | 1.000 | 100.00 MiB | 120.00 MiB | - | - | reference |
| stock full | 1.54 s | 1.47 s - 2.17 s | 1.400 | 10.00 MiB | 40.00 MiB | +440 ms | - | yes |
| stock block-2 | 1.32 s | 1.26 s - 1.86 s | 1.200 | 50.00 MiB | 60.00 MiB | +220 ms | - | yes |
| **ours on demand** | 1.38 s | 1.31 s - 1.94 s | 1.250 | 18.00 MiB | 70.00 MiB | +275 ms | 0 / 32 | yes |
| **ours in windows** | 1.11 s | 1.06 s - 1.57 s | 1.010 | 18.00 MiB | 70.00 MiB | +11 ms | 28 / 4 | yes |

**ours in windows (1.11 s, 18.00 MiB) is 1.39 times as fast as stock full (1.54 s, 10.00 MiB), the fastest stock \
setting of no more activation bytes.**

**ours in windows (1.11 s, 70.00 MiB) is 1.19 times as fast as stock block-2 (1.32 s, 60.00 MiB), the fastest stock \
setting of no more peak bytes.**

[One step on every rank](report.html)

How this was counted:

* Machine: Example CPU (2 cores), Python 3.11.9, torch 2.13.0, megatron-core 0.16.1; links: two emulated hosts on one \
machine, shaped link at 400 Mbit/s.
* Times: settings took turns, 3 timed rounds after 1 of warm-up; a sample is the slowest rank's step; step is their \
median.
* Bytes: what PyTorch's CPU allocator reports through the profiler, exact to the byte, above the level at the step's \
start, in a step that was not timed, the same for all settings; resident is the most at the end of a forward pass, peak \
the most at any moment; the rank that needs most.
* Exposed: step - step(stock none), medians; recomputations: of all ranks in one step.
* ours on demand: 250 ms of one step's trace are recomputations on demand.
* ours in windows: 20 ms of one step's trace are recomputations on demand.
* Not run: stock mlp: recurses without end in this release.
"""


def test_markdown():
    assert markdown(measurement(), page="report.html") == GOLDEN


def test_the_terminal_shows_every_setting_and_every_note():
    whole, text = measurement(), io.StringIO()
    print_report(whole, Console(file=text, width=300))
    for wanted in [*(each.name for each in whole.settings), *notes(whole), "1.010", "28 / 4"]:
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
    assert "| NO |" in markdown(measurement(settings=(settings[0], wrong)))


def test_files_of_a_report(tmp_path):
    whole = measurement()
    document, table, source = write_report(whole, tmp_path / "build" / "compare")
    assert document.read_text() == markdown(whole)
    assert [row["setting"] for row in json.loads(table.read_text())["rows"]] == [setting.name for setting in whole.settings]
    assert load_measurement(source) == whole
