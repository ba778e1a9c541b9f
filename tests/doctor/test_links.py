"""Links that doctor reads from a machine, from stored contents of /sys and outputs of nvidia-smi."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_lynx.config.loader import load_cluster
from megatron_lynx.doctor import Links, links, nics, nvlink_of

EIGHTEEN = "".join(f"\t Link {number}: 26.562 GB/s\n" for number in range(18))
STATUS = f"GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\n{EIGHTEEN}GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2)\n{EIGHTEEN}"


def port(root: Path, device: str, state: str, rate: str | bytes) -> None:
    folder = root / "sys/class/infiniband" / device / "ports/1"
    folder.mkdir(parents=True)
    (folder / "state").write_text(state)
    (folder / "rate").write_bytes(rate if isinstance(rate, bytes) else rate.encode())


def test_active_ports_are_counted_by_rate(tmp_path: Path) -> None:
    for number in range(8):
        port(tmp_path, f"mlx5_{number}", "4: ACTIVE\n", "400 Gb/sec (4X NDR)\n")
    port(tmp_path, "mlx5_8", "1: DOWN\n", "10 Gb/sec (4X SDR)\n")
    port(tmp_path, "mlx5_9", "4: ACTIVE\n", "2.5 Gb/sec (1X SDR)\n")
    assert nics(tmp_path) == (*[400.0] * 8, 2.5)
    assert Links(nics(tmp_path)).in_words == "1 NICs of 2.5 Gbit/s, 8 NICs of 400 Gbit/s; no NVLink found"


@pytest.mark.parametrize("rate", ["", "unknown", "0 Gb/sec (1X SDR)", "-5 Gb/sec", b"\xff\xfe", "400Gb/sec"])
def test_a_rate_that_says_nothing_is_left_out(tmp_path: Path, rate: str | bytes) -> None:
    port(tmp_path, "mlx5_0", "4: ACTIVE\n", rate)
    (tmp_path / "sys/class/infiniband/mlx5_1/ports/1").mkdir(parents=True)  # nothing can be read
    assert nics(tmp_path) == ()


def test_nvlink_is_that_of_the_gpu_with_fewest_links() -> None:
    assert nvlink_of(STATUS) == 478
    assert nvlink_of(STATUS + "GPU 2: NVIDIA H100\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n") == 27


@pytest.mark.parametrize(
    "status", ["", "GPU 0: NVIDIA L4 (UUID: GPU-1)\n", "\t Link 0: 25 GB/s\n", "NVML: Driver/library mismatch\n"]
)
def test_without_links_there_is_no_nvlink(status: str) -> None:
    assert nvlink_of(status) is None


def test_links_that_differ_from_the_cluster_name_the_options() -> None:
    cluster = load_cluster("h800-80g-400g", "a test")
    (alike,) = links(cluster, Links((400.0,) * 8, 200))
    assert (alike.level, alike.todo) == ("good", "")
    (other,) = links(cluster, Links((100.0,) * 8, 450))
    assert other.todo == "give --nic-gbit 100 --nvlink-gb-s 450"
    assert "h800-80g-400g" in other.costs
    (unnamed,) = links(None, Links((100.0,) * 8))
    assert (unnamed.todo, unnamed.costs) == ("give --nic-gbit 100", "")
    (storage,) = links(cluster, Links((*[400.0] * 8, 100.0)))
    assert storage.todo == ""
    (nothing,) = links(None, Links())
    assert (nothing.level, nothing.todo) == ("note", "")
