"""Makes parts of one size: jobs, plans for them, and what of a machine they need."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from benchmarks.schedules import Way
from megatron_lynx.anatomy import DENSE
from megatron_lynx.apply.releases import KNOWN_TE, minor_of
from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from megatron_lynx.testbed.fusions import NAME
from scripts.gpu_check.machine import Machine
from scripts.gpu_check.meeting import meeting
from scripts.gpu_check.mps import mps
from scripts.gpu_check.part import Part
from scripts.gpu_check.side_by_side import SideBySide, side_by_side
from scripts.gpu_check.trial import Setting, trial
from scripts.gpu_check.without_flushes import two_versions
from tests.deferring import deferring
from tests.tiny_jobs import tiny_job
from tests.transparency.offloaded import offloading
from tests.transparency.plans import plan_for, recomputable
from tests.uniform import uniform_plan

SIZE = {"hidden": 1024, "ffn": 4096, "heads": 16, "vocab": 32_000, "seq": 512}
LARGE = {"hidden": 8192, "ffn": 32_768, "heads": 64, "kv_groups": 64, "vocab": 32_000, "seq": 2048, "micro": 1}
"""Of what runs on GPUs. A dry run has the sizes of `tiny_job`."""
SIDE = {"hidden": 4096, "ffn": 16_384, "heads": 32, "kv_groups": 32, "vocab": 32_000, "seq": 2048, "micro": 1}
"""Of two ranks at once on one GPU, where nobody has measured yet: an all-reduce of 16 MiB through sockets beside each
recomputation."""
DELAY_S = {"trial": 0.003, "large": 0.02, "dry": 0.002}
"""Of a collective: longer than a recomputation of such a layer takes."""
MEETING_S = 60.0
"""Until ranks that do not meet are ended. To begin to use CUDA takes some of it; NCCL's connections take a second or two."""
LATENT = {
    False: {"q_rank": 512, "kv_rank": 256, "head_size": 128, "rope_size": 64, "value_head_size": 128},
    True: {"q_rank": 12, "kv_rank": 8, "head_size": 8, "rope_size": 4, "value_head_size": 6},
}
"""Sizes of latent attention; by whether this is a dry run."""
NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
HOST_BYTES = {False: 2**28, True: 10**6}
"""What a chunk may send to the host, of each micro-batch; by whether this is a dry run."""


class Maker:
    """Makes parts for one machine."""

    def __init__(self, machine: Machine) -> None:
        self._dry = machine.dry
        self._shared_by = machine.shared_by

    def job(self, like: Any, **fields: Any) -> Job:
        groups = {} if self._dry else {"kv_groups": SIZE["heads"] // (2 if like == "llama" else 1)}
        size = {} if self._dry else SIZE
        return tiny_job(like, **{"dtype": "bf16", **size, **groups, **fields})

    def te_job(self, **layout: Any) -> Job:
        attention = "unfused" if self._dry else "flash"
        return self.job("llama", **layout, implementation="transformer_engine", attention=attention)

    def expert_job(self, **layout: Any) -> Job:
        size = {"count": 4, "per_token": 2, "ffn": 32} if self._dry else {"count": 8, "per_token": 2, "ffn": 1024}
        return self.job("gpt", **{"bias": False, "experts": {**size, "layers": "all"}, **layout})

    def latent_job(self, **layout: Any) -> Job:
        attention = "unfused" if self._dry or "implementation" not in layout else "flash"
        like = {"qk_norm": True, "norm": "rmsnorm", "bias": False, "attention": attention}
        return self.job("gpt", latent=LATENT[self._dry], **like, **NO_DROPOUT, **layout)

    def part_of(self, name: str, shows: str, job: Job, **options: Any) -> Part:
        ranks, env, lacking = options.pop("ranks", job.gpus), options.pop("env", {}), options.pop("lacking", _nothing)
        apart = options.pop("apart", False)
        plan = options.pop("plan", None) or plan_of(job)
        if options.pop("offloads", False):
            pace = HOST_BYTES[self._dry] // 8 if job.parallel.pipeline == 1 else None
            plan = offloading(plan_of(job, share=0.5), HOST_BYTES[self._dry], pace=pace)
        if options.pop("defers", False):
            plan = deferring(plan)
        delay = options.pop("delay", "trial")
        setting = Setting(job, plan, DELAY_S["dry" if self._dry else delay], shared=self._shared_by(ranks), **options)
        return Part(name, shows, ranks, trial, (setting,), env, lacking, apart)

    def ranks_meet(self, ranks: int) -> Part:
        given = (self.job("gpt", tensor=ranks, heads=8, kv_groups=8),)
        shows = "each collective that Megatron uses, right"
        return Part(f"{ranks} ranks meet", shows, ranks, meeting, given, opens=True, limit_s=MEETING_S)

    def side_by_side(self, layout: str, job: Job, plan: Plan) -> Part:
        """A dry run has no GPU to share, and no MPS."""
        given = (SideBySide(job, plan, rounds=1 if self._dry else 7),)
        shows = "two ranks at once on one GPU, under MPS: four settings take turns"
        beside = None if self._dry else mps
        return Part(f"side by side, {layout}", shows, 2, side_by_side, given, beside=beside, one_gpu=not self._dry)

    def part_of_te(self, name: str, shows: str, job: Job, **options: Any) -> Part:
        return self.part_of(name, shows, job, **{"lacking": no_te, **options})

    def without_flushes(self, stages: int) -> Iterator[Part]:
        for defers in (True, False):
            job = self.job("gpt", pipeline=stages, layers=max(4, stages), microbatches=2 * stages)
            job = job.model_copy(update={"schedule": "double_buffered", "defer_updates": defers})
            name = f"PP{stages}, double-buffered, updates {'deferred' if defers else 'at once'}"
            given = (job, Way("ours", defers=defers, plan=uniform_plan(job)))
            yield Part(name, "weights of the version rule, ranks wait behind each update", stages, two_versions, given)


def plan_of(job: Job, share: float = 1.0) -> Plan:
    """Everything that can be recomputed is, in windows; or a share of it, drawn layer by layer. With a linear of Transformer
    Engine comes the norm that it makes."""
    draw, everything = random.Random(7), recomputable(job, gather=True)
    norms = {section.norm: section.gathered for section in DENSE.values()} if job.model.uses_te else {}

    def drawn(layer: int) -> list[str]:
        some = [item for item in everything if draw.random() < share]
        return [item for item in everything if item in some or norms.get(item) in some]

    return plan_for(job, drawn)


def behind_exchanges(job: Job) -> Plan:
    """The same, but for what the gradient of experts' result comes through: experts' recomputations then lie behind their
    exchanges."""
    return uniform_plan(job, [item for item in recomputable(job) if item != "mlp_bda"])


def received_apart(job: Job) -> Plan:
    """Everything that no gather comes before is recomputed, in steady phases, too, while gradients are received: interleaved
    schedules then receive them in other groups than Megatron's own."""
    return plan_for(job, lambda _: recomputable(job))


def no_te(machine: Machine) -> str | None:
    if machine.te is None:
        return "Transformer Engine is not installed"
    if minor_of(machine.te) not in KNOWN_TE:
        return f"Transformer Engine {machine.te} is not known; {', '.join(KNOWN_TE)} are"
    return None


def no_fp8(machine: Machine) -> str | None:
    capability = machine.facts.get("compute capability", "9.0")  # a dry run has none, and a stand-in for the kernels
    if tuple(map(int, capability.split("."))) < (8, 9):
        return f"compute capability {capability}, FP8 needs 8.9"
    return no_te(machine)


def no_fused_gradients(machine: Machine) -> str | None:
    return None if find_spec(NAME) else f"apex's {NAME} is not installed"


def no_sanitizer(machine: Machine) -> str | None:
    if machine.dry:
        return "needs a GPU"
    return None if shutil.which("compute-sanitizer") else "compute-sanitizer is not installed"


def _nothing(machine: Machine) -> str | None:
    return None
