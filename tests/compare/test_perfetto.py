from __future__ import annotations

import json

from megatron_lynx.timeline import Span, name_of, timeline_of, write_trace


def span(kind, start_s, end_s, layer=1, half="mlp", window=None, micro_batch=0):
    return Span(kind, start_s, end_s, layer, half, micro_batch, window, name_of(kind, layer, half, window))


STEP = [
    span("forward", 0.0, 1.0),
    span("window", 0.5, 1.0, window="fwd.mlp.0@1"),
    span("backward", 1.0, 3.0),
    span("window", 1.5, 2.5, window="bwd.mlp.0@1"),
    span("recompute", 1.5, 2.0, half="attention", window="bwd.mlp.0@1"),
    span("recompute", 3.0, 3.5, half="attention", window="on_demand"),
    span("recv", 3.5, 4.0, layer=None, half=None, window="pipe.recv_backward"),
]


def test_trace_file(tmp_path):
    gather = span("gather", 2.0, 2.25, window="bwd.mlp.0@1")
    write_trace(timeline_of({0: STEP, 1: [gather, *STEP[:1]]}), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    threads = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    bars = [event for event in events if event["ph"] == "X"]
    assert names == {0: "rank 0", 1: "rank 1"}
    assert [bar["ts"] for bar in bars] == sorted(bar["ts"] for bar in bars)
    assert len(bars) == len(STEP) + 2

    exposed = next(bar for bar in bars if bar["args"].get("window") == "on_demand")
    assert (exposed["name"], exposed["ts"], exposed["dur"]) == ("recompute attention(1)", 3e6, 0.5e6)
    assert exposed["args"] == {"layer": 1, "half": "attention", "micro_batch": 0, "window": "on_demand"}
    assert {threads[bar["pid"], bar["tid"]] for bar in bars} == {"compute", "recompute", "communication", "gather"}


def test_copies_have_threads_of_their_own(tmp_path):
    copies = [span("offload", 0.0, 2.0, layer=None, half=None), span("reload", 1.0, 3.0, layer=None, half=None)]
    write_trace(timeline_of({0: [*STEP, *copies]}), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {event["cat"]: threads[event["tid"]] for event in events if event.get("cat") in ("offload", "reload")} == {
        "offload": "offload",
        "reload": "reload",
    }


def test_spans_of_one_thread_nest(tmp_path):
    """A trace viewer drops or moves bars of one thread that overlap without nesting."""
    write_trace(timeline_of({0: STEP}), tmp_path / "trace.json")
    bars = [event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if event["ph"] == "X"]
    for thread in {bar["tid"] for bar in bars}:
        open_until: list[float] = []
        for bar in (bar for bar in bars if bar["tid"] == thread):
            while open_until and open_until[-1] <= bar["ts"]:
                open_until.pop()
            assert not open_until or bar["ts"] + bar["dur"] <= open_until[-1]
            open_until.append(bar["ts"] + bar["dur"])
