"""Reads the command line of a Megatron launch into a job."""

from megatron_lynx.launch_arguments.given import Fact
from megatron_lynx.launch_arguments.reading import Reading, job_of, read_launch

__all__ = ["Fact", "Reading", "job_of", "read_launch"]
