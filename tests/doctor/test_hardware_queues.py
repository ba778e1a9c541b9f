"""What the doctor says of hardware queues, beside what Megatron's own `validate_args` asserts of them, release by release.

Of its source those statements are run that ask for CUDA_DEVICE_MAX_CONNECTIONS, and nothing else.
"""

from __future__ import annotations

import ast
import os
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_lynx.doctor.environment import TOPIC, hardware_queues
from megatron_lynx.launch_arguments import read_launch
from tests.te_releases import folder_of

ARGUMENTS = Path("megatron/training/arguments.py")
GPUS = {9: "NVIDIA H100", 10: "NVIDIA B200"}
"""By the major version of their architecture."""
FSDP, OVERLAP = "--use-megatron-fsdp", "--overlap-moe-expert-parallel-comm"


@pytest.fixture(params=["0.17", "0.18", "0.19", "the checkout in MEGATRON_LM_DIR"])
def statements(request: pytest.FixtureRequest) -> list[ast.stmt]:
    if request.param[0] == "0":
        folder = folder_of("MEGATRON_CORE", request.param, "megatron/training")
    elif not (folder := Path(os.environ.get("MEGATRON_LM_DIR", ""))).joinpath(ARGUMENTS).is_file():
        pytest.skip("no Megatron-LM in MEGATRON_LM_DIR")
    tree = ast.parse((folder / ARGUMENTS).read_text())
    [validate] = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "validate_args")
    found = [node for node in ast.walk(validate) if isinstance(node, ast.Assert) and TOPIC in ast.unparse(node.test)]
    [split] = (
        node for node in validate.body if isinstance(node, ast.If) and "get_device_arch_version() < 10" in ast.unparse(node.test)
    )
    return [split, *(node for node in found if node not in list(ast.walk(split)))]


def megatron_stops(statements: list[ast.stmt], value: str | None, flags: str, architecture: int) -> bool:
    """`statements`: the one on split layers, then those on sharded parameters."""
    given = read_launch(flags.split()).given
    names = ("tensor_model_parallel_size", "context_parallel_size", "use_torch_fsdp2", "use_megatron_fsdp")
    args = SimpleNamespace(rank=0, **{name: given[name] for name in (*names, "overlap_moe_expert_parallel_comm")})
    run = statements if FSDP in flags else statements[:1]
    known = {
        "args": args,
        "os": SimpleNamespace(environ={} if value is None else {TOPIC: value}),
        "get_device_arch_version": lambda: architecture,
        "warn_rank_0": lambda *said: None,
    }
    try:
        exec(compile(ast.Module(run, []), "validate_args", "exec"), known)
    except AssertionError:
        return True
    return False


def test_the_doctor_says_that_megatron_stops_where_it_does(statements: list[ast.stmt]) -> None:
    sizes = [f"--num-layers 8 --tensor-model-parallel-size {t} --context-parallel-size {c}" for t, c in product((1, 2), (1, 2))]
    for size, more, value, architecture in product(sizes, ("", FSDP, OVERLAP), (None, "1", "32"), GPUS):
        flags, variables = f"{size} {more}", {} if value is None else {TOPIC: value}
        [found] = hardware_queues(variables, read_launch(flags.split()).given, [GPUS[architecture]])
        stops = megatron_stops(statements, value, flags, architecture)
        assert (found.level == "defeats") == stops == ("Megatron stops" in found.costs), (flags, value, architecture)
