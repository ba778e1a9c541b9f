from __future__ import annotations

from megatron_lynx.report.drawing import kind_of
from megatron_lynx.timeline import Span, timeline_of


def test_spans_of_all_ranks_have_a_common_zero():
    recompute = Span("recompute", 12.0, 12.5, 3, "mlp", 0, "bwd.mlp.0@4")
    exposed = Span("recompute", 11.0, 11.25, 2, "mlp", window="on_demand")
    receive = Span("recv", 10.0, 13.0, window="pipe.recv_backward")
    timeline = timeline_of({1: [receive], 0: [recompute, exposed]})
    assert list(timeline.ranks) == [0, 1]
    assert timeline.ranks[0] == (exposed._replace(start_s=1.0, end_s=1.25), recompute._replace(start_s=2.0, end_s=2.5))
    assert timeline.seconds == 3.0
    assert [(span.on_demand, kind_of(span) == "hidden") for span in timeline.ranks[0]] == [(True, False), (False, True)]


def test_an_outer_span_comes_before_what_begins_with_it():
    inner, outer = (Span(kind, 0.0, end_s, window="bwd.mlp.0@1") for kind, end_s in (("recompute", 1.0), ("window", 2.0)))
    assert [span.kind for span in timeline_of({0: [inner, outer]}).ranks[0]] == ["window", "recompute"]


def test_no_spans_are_an_empty_timeline():
    assert timeline_of({0: []}).seconds == 0.0
