"""Job files: the model, cluster and layout to train, read from YAML and validated."""

from megatron_lynx.config.cluster import Cluster
from megatron_lynx.config.experts import Experts
from megatron_lynx.config.job import Batch, Budget, Job
from megatron_lynx.config.loader import load_job
from megatron_lynx.config.model import Model
from megatron_lynx.config.parallel import Optimizer, Parallel

__all__ = ["Batch", "Budget", "Cluster", "Experts", "Job", "Model", "Optimizer", "Parallel", "load_job"]
