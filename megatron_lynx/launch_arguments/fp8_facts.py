"""FP8 of a launch: `--fp8-format` switches it on, the other flags say how. What of them is not modelled is refused by name.

--fp8-margin, --fp8-interval, --fp8-amax-history-len, --fp8-amax-compute-algo     numbers alone: neither bytes nor seconds
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.errors import Problem
from megatron_lynx.fp8_recipes import RUN_BY_PLANS
from megatron_lynx.launch_arguments.fact import Fact
from megatron_lynx.launch_arguments.given import Given

NOT_MODELLED = {
    "fp8_param_gather": (False, "weights that are kept in FP8 are not held"),
    "fp8_wgrad": (True, "inputs would be saved in both types"),
    "first_last_layers_bf16": (False, "layers that differ are not modelled"),
    "fp8_output_proj": (False, "an output projection in FP8 is not modelled"),
    "fp8_quantizer_factory": (None, "what another quantizer saves is not known"),
}
"""What these must be beside `--fp8-format`, and why."""


def fp8_facts(given: Given, problems: list[Problem], *, planning: bool) -> Iterator[Fact]:
    """Nothing where it is not on. `planning`: for a plan, which not all recipes can have."""
    if not (found := given["fp8"]):
        return
    flag, recipe = given.origin("fp8"), given["fp8_recipe"]
    yield Fact("model.fp8.format", found, flag)
    if recipe == "custom":
        problems.append(Problem(given.origin("fp8_recipe"), recipe, "delayed, tensorwise, mxfp8 or blockwise"))
    else:
        yield Fact("model.fp8.recipe", recipe, given.origin("fp8_recipe"))
    if given["transformer_impl"] == "local":
        problems.append(Problem(flag, found, "--transformer-impl transformer_engine beside it"))
    if not given["bf16"]:
        problems.append(Problem(flag, found, "--bf16 beside it"))
    for name, (needed, why) in NOT_MODELLED.items():
        if name in given.values and given[name] != needed:
            problems.append(Problem(given.origin(name), "given", f"a launch without it, or without {flag}", why))
    if planning and recipe not in (*RUN_BY_PLANS, "custom"):
        todo = "plans for it cannot be run yet; megatron-lynx estimate can price it"
        problems.append(Problem(given.origin("fp8_recipe"), str(recipe), " or ".join(RUN_BY_PLANS), todo))
