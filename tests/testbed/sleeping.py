"""A rank that stays, for a parent that need not import torch."""

import os
import time


def say_pid_and_sleep(rank: int, folder: str) -> None:
    with open(os.path.join(folder, str(rank)), "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
