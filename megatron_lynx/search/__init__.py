"""Finds the layouts, micro-batch sizes and policies with which a job is fastest on a number of devices."""

from megatron_lynx.search.best_first import Candidate
from megatron_lynx.search.search import POLICIES, Ranking, search

__all__ = ["POLICIES", "Candidate", "Ranking", "search"]
