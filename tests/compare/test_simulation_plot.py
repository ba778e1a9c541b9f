"""What is drawn of a simulated step is read from the figure's artists, not from its pixels."""

from __future__ import annotations

import pytest

from megatron_lynx.compare.timeline_plot import Shown, plot_simulation, simulation_figure
from megatron_lynx.planner import uniform_plan
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.simulator.figures import note
from megatron_lynx.testbed.tiny_jobs import tiny_job
from megatron_lynx.units import MIB
from tests.profiler.made_up import made_up_profile


@pytest.fixture(scope="module")
def simulation():
    job = tiny_job("llama", tensor=2, pipeline=2, microbatches=3)
    return rehearse(uniform_plan(job), made_up_profile(job))


def shown(simulation, budget_bytes=None):
    stages = range(len(simulation.executed))
    memory = {stage: simulation.memory(stage) for stage in stages}
    return Shown(simulation.timeline(), memory, {stage: note(simulation, stage) for stage in stages}, budget_bytes)


def test_stages_lie_above_their_memory_on_one_clock(simulation):
    above, below = simulation_figure(shown(simulation, budget_bytes=2 * MIB), "one step").axes
    assert above.get_shared_x_axes().joined(above, below)
    assert above.get_xlim() == pytest.approx((0, simulation.step_s))
    assert [label.get_text().splitlines()[0] for label in above.get_yticklabels()] == ["stage 0", "stage 1"]
    assert "bubble" in above.get_yticklabels()[0].get_text()
    lines = {line.get_gid(): line for line in below.lines}
    assert lines.keys() == {"memory/0", "memory/1", "memory/budget"}
    for stage in (0, 1):
        assert max(lines[f"memory/{stage}"].get_ydata()) * MIB == pytest.approx(simulation.memory(stage).peak_bytes)
    assert below.get_ylim()[1] > 2


def test_the_legend_names_peaks_and_the_budget(simulation):
    below = simulation_figure(shown(simulation, budget_bytes=3 * MIB), "one step").axes[1]
    texts = [text.get_text() for text in below.get_legend().get_texts()]
    assert texts[2] == "budget, 3.00 MiB"
    assert texts[0].startswith("stage 0, at most ")


def test_a_png_is_written(simulation, tmp_path):
    plot_simulation(shown(simulation), tmp_path / "step.png", "one step")
    assert (tmp_path / "step.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
