"""A training script in which something goes wrong that `--lynx-check` is there for. FAULT says what.

recompute   recomputations of layer 3 feed its core attention other numbers than its forward did
oom      stock without recomputation runs out of memory, on rank RANK_OF_FAULT
stock    stock differs from itself from one run to the next
signal   rank RANK_OF_FAULT is asked to stop, by SIGTERM, during its first step
abort    behind the last evaluation, rank RANK_OF_FAULT aborts, as a library's thread would
none     nothing; weight gradients are added up where they lie, as on GPUs, by a stand-in for the extension that does it

SCRIPT: another than `pretrain_tiny.py`.
"""

import os
import runpy
import signal
import sys
from functools import wraps
from pathlib import Path

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_lynx.runtime.recompute import Recomputer
from megatron_lynx.runtime.site import SiteCall
from megatron_lynx.testbed.fusions import stand_in_for_fused_gradient


def under_a_plan(layer):
    return "_forward_mlp" in vars(layer)


def other_numbers(given):
    """Masks stay."""
    return given * 1.001 if torch.is_tensor(given) and given.is_floating_point() else given


def perturb_recomputations():
    site = Recomputer.site

    def perturbed(self, call):
        if (self.frame.policy.layer, call.site.name) == (3, "core_attention"):
            call = SiteCall(call.site, tuple(map(other_numbers, call.args)), call.kwargs)
        return site(self, call)

    Recomputer.site = perturbed


def run_out_of_memory():
    forward = TransformerLayer.forward

    @wraps(forward)
    def failing(self, *args, **kwargs):
        stock = not under_a_plan(self) and self.config.recompute_granularity is None
        if stock and self.layer_number == 3 and os.environ["RANK"] == os.environ["RANK_OF_FAULT"]:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.05 GiB is "
                "free. Including non-PyTorch memory, this process has 78.06 GiB memory in use."
            )
        return forward(self, *args, **kwargs)

    TransformerLayer.forward = failing


def differ_from_run_to_run():
    forward = TransformerLayer.forward
    runs = iter(range(1, 1_000_000))

    @wraps(forward)
    def restless(self, hidden_states, *args, **kwargs):
        if not under_a_plan(self) and self.layer_number == 2:
            hidden_states = hidden_states * (1 + next(runs) / 1000)
        return forward(self, hidden_states, *args, **kwargs)

    TransformerLayer.forward = restless


def be_asked_to_stop():
    forward = TransformerLayer.forward

    @wraps(forward)
    def signalled(self, *args, **kwargs):
        TransformerLayer.forward = forward
        if os.environ["RANK"] == os.environ["RANK_OF_FAULT"]:
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(self, *args, **kwargs)

    TransformerLayer.forward = signalled


if __name__ == "__main__":
    faults = {
        "recompute": perturb_recomputations,
        "oom": run_out_of_memory,
        "stock": differ_from_run_to_run,
        "signal": be_asked_to_stop,
        "none": stand_in_for_fused_gradient,
    }
    if os.environ["FAULT"] != "abort":
        faults[os.environ["FAULT"]]()
    sys.argv[0] = os.environ.get("SCRIPT", str(Path(__file__).with_name("pretrain_tiny.py")))
    runpy.run_path(sys.argv[0], run_name="__main__")
    if os.environ["FAULT"] == "abort" and os.environ["RANK"] == os.environ["RANK_OF_FAULT"]:
        os.abort()
