"""The arguments of a Megatron launch, understood: nobody describes a model twice."""

from megatron_lynx.launch_arguments.fact import Fact
from megatron_lynx.launch_arguments.job import job_of
from megatron_lynx.launch_arguments.reading import Reading, read_launch

__all__ = ["Fact", "Reading", "job_of", "read_launch"]
