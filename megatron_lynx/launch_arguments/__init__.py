"""Reads the command line of a Megatron launch into a job, so that nobody has to describe a model twice."""

from megatron_lynx.launch_arguments.fact import Fact
from megatron_lynx.launch_arguments.job import job_of
from megatron_lynx.launch_arguments.reading import Reading, read_launch

__all__ = ["Fact", "Reading", "job_of", "read_launch"]
