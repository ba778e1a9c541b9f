"""The threads that issue a step's work, and the processor time that they have taken.

    on a CPU      the calling thread issues forwards and backwards
    on a GPU      the calling thread issues forwards, a thread of autograd's issues backwards: one for each device, which lives as
                  long as the process

What other threads of the process take (communication's, the driver's, one that looks whether collectives are late) holds up
nobody, and is in no figure.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

Clock = Callable[[], float]
"""Seconds since some moment."""


def issuing_clock(device: torch.device) -> Clock:
    """Processor seconds of the threads that issue work to a device. Called in the one that issues forwards."""
    threads = {threading.get_ident()}
    some = torch.zeros(1, device=device, requires_grad=True) * 1
    some.register_hook(lambda _: threads.add(threading.get_ident()))
    some.backward()
    clocks = [time.pthread_getcpuclockid(thread) for thread in threads]
    return lambda: sum(map(time.clock_gettime, clocks))
