"""Frameworks in one process, each under a launch of its own."""

from __future__ import annotations

from types import SimpleNamespace

from megatron_lynx.launch.hosts import Bridge, Settings
from megatron_lynx.launch.launch import arguments_against
from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan

from .hosts_on_ranks import one_after_the_other
from .launched import saved

PLAN = uniform_plan(tiny_job())


def test_what_bridge_does_and_no_plan_goes_with():
    """All of it at once, when all ranks can talk."""
    dist = SimpleNamespace(use_decentralized_pg=True, use_megatron_fsdp=True)
    parts = {"dist": dist, "ddp": SimpleNamespace(use_megatron_fsdp=True), "peft": SimpleNamespace()}
    settings = Settings(SimpleNamespace(**parts, inprocess_restart=SimpleNamespace(enabled=True)))
    settings.lynx_schedule = "double-buffered"
    found = [(problem.where, problem.finding) for problem in Bridge().refused(settings)]
    assert found == [
        ("cfg.dist.use_decentralized_pg", "True"),
        ("cfg.inprocess_restart.enabled", "True"),
        ("cfg.peft", "SimpleNamespace"),
        ("cfg.dist.use_megatron_fsdp", "True"),
        ("--lynx-schedule", "double-buffered"),
    ]
    [sharded] = [problem for problem in arguments_against(PLAN, settings) if problem.where == "--use-megatron-fsdp"]
    assert settings.say(sharded.where) == "cfg.ddp.use_megatron_fsdp"
    usual = {"dist": SimpleNamespace(use_decentralized_pg=False), "peft": None}
    settings = Settings(SimpleNamespace(**usual, inprocess_restart=SimpleNamespace(enabled=False)))
    settings.lynx_schedule = "flush"
    assert not [*Bridge().refused(settings)]


def test_one_after_the_other(pool_of, tmp_path):
    """Megatron-LM's launch, then Megatron-Bridge under another plan and under the first one: every bit is stock's, each says what
    it did, and nothing of one is there when the next begins."""
    job = tiny_job(tensor=2, layers=2, sequence_parallel=True, attention_dropout=0.1, hidden_dropout=0.1)
    plans = [uniform_plan(job, gather="once"), uniform_plan(job, ("activation",))]
    paths = [str(saved(plan, tmp_path / f"{number}.yaml")) for number, plan in enumerate(plans)]
    for rank, launches in enumerate(pool_of(2).run(one_after_the_other, job, paths, str(tmp_path))):
        for plan, seen in zip((0, 1, 0), launches, strict=True):
            assert (seen["differing"], seen["changed"], seen["left"]) == ([], [], 0)
            if rank == 0:
                assert f"training under {paths[plan]}" in seen["said"]
                assert seen["said"].count("rank 0 recomputed ") == 1
