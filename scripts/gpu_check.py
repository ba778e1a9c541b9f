"""What one GPU can show; run it by `scripts/gpu_check.sh`.

exact      bf16, deterministic kernels: does stock equal stock?  then: does every plan equal stock, over several steps?
memory     one rank: none, selective, full, ours with every replay on demand: bytes and seconds of a step
offload    copies to the host and back: the link, what a Llama-65B-shaped layer hides at 4096 and 8192, order, Megatron's own
emulated   one rank of TP=8, a delay in place of every collective: the same, and ours with its replays in the windows

Writes exact.json, offload.json and, for each of memory and emulated, a measurement, its table and its report. A run without a GPU
says so everywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

from megatron_lynx.apply import install
from megatron_lynx.compare.report import markdown, write_report
from megatron_lynx.config.job import Job
from megatron_lynx.measure.machine import Links
from megatron_lynx.measure.measurement import Measurement
from megatron_lynx.plan.plan import Plan
from megatron_lynx.testbed.cpu_device import stand_in_for_cuda
from megatron_lynx.testbed.subject import same_bits
from megatron_lynx.testbed.tiny_jobs import tiny_job
from scripts import gpu_offload
from scripts.emulated_links import DeviceLink, HostLink, emulated, join_alone
from tests.transparency.plans import plan_for, replayable

NOT_A_GPU = "DRY RUN ON A CPU, tiny sizes: this shows that the script runs. It is no measurement of a GPU."
SIZES = {  # of what runs on a GPU; a dry run has those of `tiny_job`
    "exact": {"layers": 4, "hidden": 1024, "ffn": 4096, "heads": 16, "vocab": 32_000, "seq": 512},
    "memory": {"layers": 4, "hidden": 4096, "ffn": 16_384, "heads": 32, "kv_groups": 32, "vocab": 32_000, "seq": 2048},
    "offload": {"layers": 1, "hidden": 8192, "ffn": 22_016, "heads": 64, "kv_groups": 64, "vocab": 32_000, "micro": 1},
    "emulated": {"layers": 4, "hidden": 8192, "ffn": 32_768, "heads": 64, "kv_groups": 64, "vocab": 32_000, "seq": 2048},
}
STEPS = 3


@dataclass(frozen=True)
class Check:
    """One run of this script."""

    dry: bool
    rounds: int
    bytes_per_s: float
    latency_s: float
    out: Path

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    def job(self, part: str, like: Any = "gpt", **more: Any) -> Job:
        """Llama-like models have half as many key/value heads."""
        sizes: dict[str, Any] = {"layers": 2, "heads": 8, "kv_groups": 8} if self.dry else dict(SIZES[part])
        if part == "exact":
            sizes["kv_groups"] = sizes["heads"] // (2 if like == "llama" else 1)
        return tiny_job(like, dtype="bf16", microbatches=1, **sizes, **more)

    @property
    def note(self) -> str:
        return NOT_A_GPU if self.dry else f"On {torch.cuda.get_device_name()}."


# --- exactness -----------------------------------------------------------------------------------------------------------


def exactness(check: Check) -> dict[str, dict[str, bool]]:
    """Whether each plan's losses and gradients equal stock's in every bit, over all steps; by model and plan."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return {like: _exactness(check.job("exact", like)) for like in ("gpt", "llama")}
    finally:
        torch.use_deterministic_algorithms(False)


def _exactness(job: Job) -> dict[str, bool]:
    draw, everything = random.Random(7), replayable(job)
    plans = {
        "stock again": None,
        "keep all": plan_for(job, lambda _: ()),
        "replay all": plan_for(job, lambda _: everything, windows=False),
        "random mix": plan_for(job, lambda _: [item for item in everything if draw.random() < 0.5], windows=False),
    }
    stock = _trained(job, None)
    return {name: same_bits(stock, _trained(job, plan)) for name, plan in plans.items()}


def _trained(job: Job, plan: Plan | None) -> dict[str, torch.Tensor]:
    from megatron_lynx.testbed.batches import synthetic_batches
    from megatron_lynx.testbed.groups import initialise, seed_random_numbers
    from megatron_lynx.testbed.tiny_models import build_model
    from megatron_lynx.testbed.training import Training

    initialise(job)
    training = Training(job, build_model(job))
    seed_random_numbers(7)
    seen: dict[str, torch.Tensor] = {}
    with nullcontext() if plan is None else install(training.chunks, plan):
        for step in range(STEPS):
            losses = training.step(synthetic_batches(job, step))
            seen |= {f"step {step}: loss {index}": loss.detach().clone() for index, loss in enumerate(losses)}
            seen |= {f"step {step}: {name}": gradient for name, gradient in training.gradients().items()}
    return seen


# --- memory and seconds --------------------------------------------------------------------------------------------------


@dataclass
class ThisProcess:
    """A `testbed.hosts.Hosts` whose only rank is this process."""

    device: str
    links: Links
    ranks: int = field(default=1, init=False)

    def run(self, function: Any, *args: Any, **_: Any) -> list[Any]:
        return [function(0, *args)]


def compared(check: Check, job: Job, plan: Plan, links: Links) -> Measurement:
    from megatron_lynx.testbed.comparison import compare

    hosts: Any = ThisProcess(check.device, links)

    def announce(text: str) -> Any:
        return nullcontext(print(f"  {text}"))

    measured = compare(job, plan, hosts, announce, rounds=check.rounds, module_sets=False).measurement
    return measured.model_copy(update={"subject": f"{measured.subject}. {check.note}"})


def memory(check: Check) -> Measurement:
    """Without collectives there are no windows: both settings of ours replay on demand."""
    from megatron_lynx.testbed.groups import initialise

    job = check.job("memory")
    initialise(job)
    return compared(check, job, plan_for(job, lambda _: replayable(job), windows=False), Links(kind="none"))


def emulated_interconnect(check: Check) -> Measurement:
    from megatron.core import parallel_state

    from megatron_lynx.testbed.groups import initialise, shut_down

    shut_down()
    job = check.job("emulated", tensor=8)
    join_alone(job.gpus)
    initialise(job)
    link = HostLink() if check.dry else DeviceLink()
    with emulated(parallel_state.get_tensor_model_parallel_group(), link, check.bytes_per_s, check.latency_s):
        links = Links(kind="emulated", mbit_per_s=check.bytes_per_s * 8 / 1e6)
        return compared(check, job, plan_for(job, lambda _: replayable(job)), links)


# --- copies to the host --------------------------------------------------------------------------------------------------


def offload(check: Check) -> dict[str, Any]:
    """What `scripts.gpu_offload` finds; a dry run copies little, and between the same memory."""
    device = torch.device(check.device)
    found: dict[str, Any] = {"link, GB/s": gpu_offload.link(2**20 if check.dry else 2**30, device)}
    for seq in (64, 128) if check.dry else (4096, 8192):
        job = check.job("offload", "llama", seq=seq)
        found[f"one layer, sequence {seq}"] = gpu_offload.hidden(job, _training(job), device)
    return {**found, "order": gpu_offload.order(device), "Megatron's own": gpu_offload.stock_offload(job, device)}


def _training(job: Job) -> Any:
    from megatron_lynx.testbed.groups import initialise
    from megatron_lynx.testbed.tiny_models import build_model
    from megatron_lynx.testbed.training import Training

    initialise(job)
    return Training(job, build_model(job), optimizer=None)


# --- the whole -----------------------------------------------------------------------------------------------------------


def main() -> int:
    """0, or 1 where a plan's bits differ from stock's although stock's own do not."""
    check = arguments()
    if check.dry:
        stand_in_for_cuda()
    elif not torch.cuda.is_available():
        print("found no GPU that torch can use; with --dry-run this script runs on the CPU", file=sys.stderr)
        return 2
    print(check.note)
    join_alone(1)
    check.out.mkdir(parents=True, exist_ok=True)
    exact = exactness(check)
    (check.out / "exact.json").write_text(json.dumps({"note": check.note, "equal to stock in every bit": exact}, indent=2) + "\n")
    print(json.dumps(exact, indent=2))
    offloaded = offload(check)
    (check.out / "offload.json").write_text(json.dumps({"note": check.note, **offloaded}, indent=2) + "\n")
    print(json.dumps(offloaded, indent=2))
    measured = {"memory": memory(check), "emulated interconnect": emulated_interconnect(check)}
    for part, measurement in measured.items():
        write_report(measurement, check.out / part.replace(" ", "-"))
    text = "\n\n".join(f"# {part}\n\n{markdown(measurement)}" for part, measurement in measured.items())
    (check.out / "report.md").write_text(text + "\n")
    print(text, f"\nwritten to {check.out}")
    broken = [name for plans in exact.values() for name, equal in plans.items() if plans["stock again"] and not equal]
    differing = [s.name for each in measured.values() for s in each.settings if check.dry and s.ours and not s.gradients_equal]
    return 1 if broken or differing else 0


def arguments() -> Check:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU; measures nothing")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of every setting")
    parser.add_argument("--link-gb-per-s", type=float, default=100.0, help="of the emulated interconnect, each way")
    parser.add_argument("--latency-us", type=float, default=20.0, help="of each emulated collective")
    parser.add_argument("--out", type=Path, help="default: $OUT, else a folder of benchmarks/results")
    given = parser.parse_args()
    usual = os.environ.get("OUT") or f"build/gpu-dry-run-{date.today()}"
    if not given.dry_run and torch.cuda.is_available() and "OUT" not in os.environ:
        usual = f"benchmarks/results/gpu-{torch.cuda.get_device_name().replace(' ', '-').lower()}-{date.today()}"
    return Check(given.dry_run, given.rounds, given.link_gb_per_s * 1e9, given.latency_us / 1e6, given.out or Path(usual))


if __name__ == "__main__":
    sys.exit(main())
