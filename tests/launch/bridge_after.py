"""Several launches in one process: Megatron-LM's, then Megatron-Bridge's, and that once more, under a plan each.

    bridge_after.py PLAN PLAN PLAN WORD...     the words are Megatron-LM's; what Bridge's runs saw is written as in `bridge_tiny`

Says what of a launch is there behind it: hooks on modules of torch or Megatron, and objects of ours.
"""

import gc
import os
import sys
from pathlib import Path
from types import FunctionType

import torch.distributed as dist
from megatron.bridge.training.initialize import destroy_global_state
from megatron.training.global_vars import destroy_global_vars

from megatron_lynx.apply.hook import MARK
from megatron_lynx.launch.script import read, run_script

HERE = Path(__file__).parent
OURS = ("Frame", "Launch", "Installation", "Engine")


def left():
    """What a launch has left."""
    gc.collect()
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] in ("torch", "megatron")]
    hooks = [
        name
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, FunctionType) and MARK in vars(value)
    ]
    return hooks + [type(thing).__name__ for thing in gc.get_objects() if type(thing).__name__ in OURS]


def begin_anew():
    """The store of the ranks before still has their port."""
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)


def main():
    first, second, third, *words = sys.argv[1:]
    run_script(*read([str(HERE / "pretrain_tiny.py"), *words, "--lynx-plan", first, "--lynx-check", "2"]))
    print("left behind Megatron-LM:", left())
    destroy_global_state()
    destroy_global_vars()
    dist.destroy_process_group()
    begin_anew()
    sys.path.insert(0, str(HERE))
    import bridge_tiny

    for name, plan in (("second", second), ("third", third)):
        sys.argv = ["bridge_tiny.py", "local", "model.tensor_model_parallel_size=2"]
        os.environ.update(NAME=name, UNDER=plan)
        bridge_tiny.main()
        print(f"left behind the {name}:", left())
        begin_anew()


if __name__ == "__main__":
    main()
