"""What an answer only assumes of a launch is said, with the option that states it: loads of experts, the host, its own count."""

from __future__ import annotations

import json
import shlex

import pytest

from tests.test_cli import lynx

EXPERTS = shlex.split(
    "torchrun --nproc-per-node 8 pretrain_gpt.py --transformer-impl transformer_engine --num-layers 8 --hidden-size 2048 "
    "--ffn-hidden-size 6144 --num-attention-heads 16 --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 "
    "--global-batch-size 32 --bf16 --swiglu --disable-bias-linear --vocab-size 32000 --use-distributed-optimizer --lr 1e-4 "
    "--num-experts 64 --moe-router-topk 8 --moe-ffn-hidden-size 1024 --moe-grouped-gemm --expert-model-parallel-size 8 "
    "--moe-token-dispatcher-type alltoall --untie-embeddings-and-output-weights"
)
DENSE = EXPERTS[: EXPERTS.index("--num-experts")]
BALANCED, CAPACITY = "--moe-router-force-load-balancing", ["--moe-expert-capacity-factor", "1.0"]
PADDED = "--moe-pad-expert-input-to-capacity"


def estimated(*options: object, launch=EXPERTS, cluster: str = "h100-80g"):
    return lynx("estimate", "--cluster", cluster, "--json", *options, "--", *launch)


def most_bytes(result) -> int:
    return max(stage["memory_bytes"]["total"] for stage in json.loads(result.stdout)["stages"])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "no --moe-router-force-load-balancing"),
        ([BALANCED], None),
        (CAPACITY, "tokens beyond 1 times a balanced share are dropped"),
        ([*CAPACITY, PADDED], None),
    ],
)
def test_natural_routing_was_priced_as_balanced_without_a_word(more: list[str], said: str | None) -> None:
    result = estimated(launch=[*EXPERTS, *more])
    assert ("warning: " in result.stderr) is (said is not None)
    assert said is None or (said in result.stderr and "--experts-load" in result.stderr)


def test_every_command_that_prices_takes_a_load_of_experts() -> None:
    """Only `plan --experts-hold` did. A load makes both bytes and seconds, `--experts-hold` bytes alone."""
    plain, loaded, held = (estimated(*options) for options in ((), ("--experts-load", 2), ("--experts-hold", 2)))
    steps = [json.loads(result.stdout)["step_s"] for result in (plain, loaded, held)]
    assert most_bytes(plain) < most_bytes(loaded) == most_bytes(held)
    assert steps[0] == steps[2] < steps[1]
    for command in ("advise", "plan", "search", "compare"):
        assert "--experts-load" in lynx(command, "--help").stdout.replace("\n", "")


def test_fewer_tokens_than_a_balanced_share_are_left_where_some_are_dropped() -> None:
    """A launch with a capacity factor of 1 ran on 80 GB that holds 79 GiB by a balanced count."""
    dropping = [*EXPERTS, *CAPACITY]
    assert most_bytes(estimated("--experts-load", 0.5, launch=dropping)) < most_bytes(estimated(launch=dropping))
    refused = estimated("--experts-load", 0.5)
    assert refused.exit_code == 2
    assert "must be at least 1 where no token is dropped" in refused.stderr


def test_a_load_without_experts_is_refused_by_the_name_of_its_option() -> None:
    for result in (estimated("--experts-load", 2, launch=DENSE), lynx("estimate", "jobs/demo", "--experts-load", 2)):
        assert result.exit_code == 2
        assert "--experts-load: found 2, and no experts" in result.stderr


def test_a_host_that_is_too_small_is_named_with_what_states_its_size() -> None:
    """The verdict was '54.11 GiB: does not fit in 74.25 GiB', and the host was short of 0 B."""
    on_host = ["--use-precision-aware-optimizer", "--optimizer-cpu-offload", "--optimizer-offload-fraction", "1"]
    launch = ["--cluster", "a800-80g", "--host-memory-gib", "8"]
    short = lynx("estimate", *launch, "--", *DENSE, *on_host)
    assert short.exit_code == 1
    assert "host memory is short, the device fits" in short.stdout
    assert "at most 8 GiB, which a800-80g is taken to have (node.host_memory_gib, --host-memory-gib)" in short.stderr
    assert lynx("estimate", "--cluster", "a800-80g", "--", *DENSE, *on_host).exit_code == 0


def test_a_launch_that_exceeds_the_count_is_told_what_to_state() -> None:
    large = ["--num-layers", "200"]
    result = lynx("estimate", "--cluster", "h100-80g", "--", *DENSE, *large)
    assert result.exit_code == 1
    needed = int(result.stderr.rpartition("--memory-gib ")[2].rstrip(".\n"))
    assert lynx("estimate", "--cluster", "h100-80g", "--memory-gib", needed, "--", *DENSE, *large).exit_code == 0
    assert lynx("estimate", "--cluster", "h100-80g", "--memory-gib", needed - 1, "--", *DENSE, *large).exit_code == 1


def test_a_loss_of_a_trainers_own_is_counted_or_named() -> None:
    """Two public launches of reinforcement learning ran out of memory where the count fitted, or nearly did."""
    slime = [*DENSE, "--rollout-batch-size", "16", "--n-samples-per-prompt", "8"]
    counted = [most_bytes(estimated(launch=[*slime, *more])) for more in ([], ["--entropy-coef", "0.01"])]
    assert most_bytes(estimated(launch=DENSE)) < counted[0] < counted[1]
    assert "loss of this trainer" not in estimated(launch=slime).stderr
