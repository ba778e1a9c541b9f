"""Every answer in seconds states the links and the CPU that it assumes, and options change them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from megatron_lynx.config import load_job
from megatron_lynx.config.loader import bundled_configs
from tests.test_cli import lynx
from tests.test_inputs import LAUNCH

pytestmark = pytest.mark.slow

OF_A_LAUNCH = ["--cluster", "h800-80g", "--", *shlex.split(LAUNCH)]
STATED = "seconds assume 8 NICs of 100 Gbit/s, NVLink 200 GB/s, CPU Intel Xeon Processor"
FASTER = ["--nic-gbit", "400", "--nvlink-gb-s", "450", "--host-cpu", "amd-epyc"]
CHANGED = "seconds assume 8 NICs of 400 Gbit/s, NVLink 450 GB/s, CPU AMD EPYC"
JOB = "jobs/llama-65b-h800-80g"


@pytest.mark.parametrize(
    "command",
    [
        ["estimate", *OF_A_LAUNCH],
        ["estimate", JOB],
        ["estimate", "--cluster", "h800-80g", "--gpus", "64", "--model", "llama3-8b"],
        ["advise", *OF_A_LAUNCH],
        ["plan", "-o", "OUT", *OF_A_LAUNCH],
        ["compare", "--simulate", "-o", "OUT", *OF_A_LAUNCH],
        ["search", "--gpus", "8", "--top", "1", "--policies", "none", JOB],
    ],
    ids=lambda command: " ".join(command[:3]),
)
@pytest.mark.parametrize(("options", "line"), [([], STATED), (FASTER, CHANGED)], ids=["the cluster's", "given"])
def test_the_links_that_seconds_assume_are_in_one_line(command: list[str], options: list[str], line: str, tmp_path: Path) -> None:
    name, *others = [str(tmp_path / "out") if word == "OUT" else word for word in command]
    shown = lynx(name, *options, *others)
    assert shown.stderr.count("seconds assume") == 1
    assert line in shown.stderr
    assert len(line) <= 80


def test_a_faster_nic_and_nvlink_make_a_step_shorter() -> None:
    steps = [
        json.loads(lynx("estimate", "--json", *options, JOB).stdout)["step_s"] for options in ([], ["--nic-gbit", "400"], FASTER)
    ]
    assert steps[0] > steps[1] > steps[2]


def test_a_rate_beyond_what_a_link_can_have_is_refused_in_one_message() -> None:
    for option in ("--nic-gbit", "--nvlink-gb-s"):
        shown = lynx("estimate", option, "0", *OF_A_LAUNCH)
        assert shown.exit_code == 2
        assert "found 0.0, needed a number above 0" in shown.stderr


def test_a_rate_of_a_link_that_the_cluster_lacks_is_refused() -> None:
    asked = [
        ["--cluster", "a100-80g-pcie", "--gpus", "8", "--model", "llama3-8b"],
        ["--cluster", "a100-80g-pcie", "--", *shlex.split(LAUNCH)],
    ]
    for words in asked:
        shown = lynx("estimate", "--nvlink-gb-s", "300", *words)
        assert "--nvlink-gb-s: found 300, and no nvlink in cluster a100-80g-pcie, needed a cluster with this link" in shown.stderr
    assert "no nic in cluster" in lynx("estimate", "--nic-gbit", "300", "jobs/demo").stderr


def test_an_unknown_cpu_is_refused_with_those_that_are_known() -> None:
    shown = lynx("estimate", "--host-cpu", "pentium", *OF_A_LAUNCH)
    assert "--host-cpu: found no file 'pentium', needed a path, or one of amd-epyc, intel-xeon-h100" in shown.stderr


def test_a_cluster_file_without_a_link_is_one_message(tmp_path: Path) -> None:
    whole = (bundled_configs() / "clusters/a100-80g.yaml").read_text().splitlines()
    start = whole.index("nic:")
    (tmp_path / "own.yaml").write_text("\n".join([*whole[:start], *whole[start + 5 :]]))
    shown = lynx("estimate", "--cluster", tmp_path / "own.yaml", "--", *shlex.split(LAUNCH))
    assert "cluster a100-80g: nic: found nothing, needed this part's figures" in shown.stderr


def test_a_plan_remembers_the_links_it_was_made_for(tmp_path: Path) -> None:
    output = tmp_path / "plan.yaml"
    lynx("plan", "-o", output, *FASTER, *OF_A_LAUNCH)
    shown = lynx("simulate", output)
    assert CHANGED in shown.stderr
    assert "another job now" not in shown.stderr


def test_a_job_without_figures_assumes_no_links() -> None:
    assert load_job("jobs/demo").cluster.links_in_words is None
