"""What is drawn is read from the figure's artists, not from its pixels."""

from __future__ import annotations

import struct

import pytest

from megatron_lynx.compare.timeline_plot import plot_timeline, timeline_figure
from megatron_lynx.errors import ConfigError
from megatron_lynx.simulator.timeline import timeline_of


def span(kind, start_s, end_s, layer=1, half="mlp", window=None, micro_batch=0):
    where = {"layer": layer, "half": half, "micro_batch": micro_batch, "window": window}
    return {"kind": kind, "start_s": start_s, "end_s": end_s, **where}


STEP = [
    span("forward", 0.0, 1.0),
    span("window", 0.5, 1.0, window="fwd.mlp.0@1"),
    span("backward", 1.0, 3.0),
    span("window", 1.5, 2.5, window="bwd.mlp.0@1"),
    span("replay", 1.5, 2.0, half="attention", window="bwd.mlp.0@1"),
    span("replay", 3.0, 3.5, half="attention", window="on_demand"),
    span("recv", 3.5, 4.0, layer=None, half=None, window="pipe.recv_backward"),
]


def extents(figure):
    """Begin and end in seconds of all bars, by `rank/lane/style`."""
    found = {}
    for collection in figure.axes[0].collections:
        if collection.get_gid():
            boxes = [path.get_extents() for path in collection.get_paths()]
            found[collection.get_gid()] = [(box.x0, box.x1) for box in boxes]
    return found


def test_every_span_is_a_bar_in_its_lane():
    figure = timeline_figure(timeline_of({0: STEP, 1: STEP[:1]}), "one step")
    assert extents(figure) == {
        "0/compute/forward half": [(0.0, 1.0)],
        "0/compute/backward half": [(1.0, 3.0)],
        "0/compute/replay in a window": [(1.5, 2.0)],
        "0/compute/replay on demand (exposed)": [(3.0, 3.5)],
        "0/compute/waiting": [(0.5, 1.0), (1.5, 2.5), (3.5, 4.0)],
        "0/communication/window: tensor-parallel communication": [(0.5, 1.0), (1.5, 2.5)],
        "0/communication/window: pipeline receive": [(3.5, 4.0)],
        "1/compute/forward half": [(0.0, 1.0)],
    }


def test_copies_are_bars_beside_the_communication():
    copies = [span("offload", 0.0, 2.0, layer=None, half=None), span("reload", 1.0, 3.0, layer=None, half=None)]
    assert extents(timeline_figure(timeline_of({0: copies}), "one step")) == {
        "0/communication/copy to the host": [(0.0, 2.0)],
        "0/communication/copy back from the host": [(1.0, 3.0)],
    }


def test_replays_lie_over_the_waits_they_fill_and_waits_over_the_halves():
    figure = timeline_figure(timeline_of({0: STEP}), "one step")
    order = {collection.get_gid(): collection.get_zorder() for collection in figure.axes[0].collections}
    assert order["0/compute/replay in a window"] > order["0/compute/waiting"] > order["0/compute/backward half"]


def test_it_says_what_it_shows():
    figure = timeline_figure(timeline_of({0: STEP, 1: STEP[:1]}), "one step")
    axes = figure.axes[0]
    assert axes.get_xlabel() == "seconds"
    assert axes.get_title(loc="left") == "one step"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0\n1 replays in windows\n1 on demand", "rank 1"]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "replay on demand (exposed)" in legend
    assert "gathered input" not in legend, "the legend explains only what is there"
    written = [text.get_text() for text in axes.texts]
    assert {"M1", "A1", "forward 0", "backward 0"} <= set(written)


def test_micro_batches_are_counted_from_the_pictures_first():
    """A trace counts over the whole run, so the step that is drawn may begin anywhere."""
    step = [
        span("forward", 0.0, 1.0, micro_batch=14),
        span("backward", 1.0, 2.0, micro_batch=14),
        span("forward", 2.0, 3.0, micro_batch=15),
    ]
    written = [text.get_text() for text in timeline_figure(timeline_of({0: step}), "later").axes[0].texts]
    assert {"forward 0", "backward 0", "forward 1"} <= set(written)


def test_bars_that_are_too_narrow_for_a_name_have_none():
    steps = [span("forward", 0.01 * i, 0.01 * (i + 1), layer=i + 1) for i in range(200)]
    written = [text.get_text() for text in timeline_figure(timeline_of({0: steps}), "deep").axes[0].texts]
    assert "M100" not in written
    assert "forward 0" in written


@pytest.mark.parametrize("events", [{0: STEP, 1: STEP}, {0: []}, {}], ids=["two ranks", "no events", "no ranks"])
def test_a_png_is_written(tmp_path, events):
    path = tmp_path / "timeline.png"
    plot_timeline(timeline_of(events), path, "one step")
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert width > 2 * height > 500
    assert len(content) > 10_000


def test_a_path_that_cannot_be_written_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        plot_timeline(timeline_of({0: STEP}), tmp_path / "missing" / "timeline.png", "one step")
