"""torchrun, as it is, but for its ranks: they come from the nursery, with torch imported.

And but for a name in its record of events: torchrun asks `inspect` for the source of every frame above it, which looks
through all modules that the nursery has imported.
"""

from __future__ import annotations

import os

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.run import main

from tests.nursery.process import OF_LAUNCHES, Process, start


def from_nursery(handler: SubprocessHandler, command: tuple[str, ...], environment: dict[str, str]) -> Process:
    """`command` is `python -u -m MODULE ARGUMENTS`."""
    _, _, _, module, *arguments = command
    nursery = f"\0{environment[OF_LAUNCHES]}" if module == "tests.instruments" and OF_LAUNCHES in environment else None
    return start(module, arguments, environment, nursery=nursery)


if __name__ == "__main__":
    SubprocessHandler._popen = from_nursery
    dynamic_rendezvous.get_method_name = lambda depth=2: "rendezvous"
    main()
    os._exit(0)  # Python takes half a second to drop all that the nursery has imported
