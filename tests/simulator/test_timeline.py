from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_lynx.simulator.timeline import Span, timeline_of


def test_objects_and_mappings_become_spans_from_a_common_zero():
    replay = SimpleNamespace(kind="replay", layer=3, half="mlp", micro_batch=0, window="bwd.mlp.0@4", start_s=12.0, end_s=12.5)
    exposed = {"kind": "replay", "layer": 2, "half": "mlp", "window": "on_demand", "start_s": 11.0, "end_s": 11.25, "name": "n"}
    receive = {"kind": "recv", "window": "pipe.recv_backward", "start_s": 10.0, "end_s": 13.0}
    timeline = timeline_of({1: [receive], 0: [replay, exposed]})
    assert list(timeline.ranks) == [0, 1]
    assert timeline.ranks[0][1] == Span("replay", 2.0, 2.5, 3, "mlp", 0, "bwd.mlp.0@4", "replay mlp(3)")
    assert [span.name for span in timeline.ranks[0]] == ["n", "replay mlp(3)"]
    assert timeline.ranks[1][0].name == "recv pipe.recv_backward"
    assert (timeline.seconds, timeline.on_demand_s(0), timeline.on_demand_replays(0), timeline.hidden_replays(0)) == (
        3.0,
        0.25,
        1,
        1,
    )


def test_an_outer_span_comes_before_what_begins_with_it():
    inner = {"kind": "replay", "window": "bwd.mlp.0@1", "start_s": 0.0, "end_s": 1.0}
    outer = {"kind": "window", "window": "bwd.mlp.0@1", "start_s": 0.0, "end_s": 2.0}
    assert [span.kind for span in timeline_of({0: [inner, outer]}).ranks[0]] == ["window", "replay"]


@pytest.mark.parametrize(
    ("event", "words"),
    [({"kind": "nap", "start_s": 0, "end_s": 1}, "'nap'"), ({"kind": "recv", "start_s": 1, "end_s": 0}, "before it begins")],
)
def test_what_is_no_event_is_refused(event, words):
    with pytest.raises(ValueError, match=words):
        timeline_of({0: [event]})


def test_no_events_are_an_empty_timeline():
    assert timeline_of({0: []}).seconds == 0.0
