"""Which layout, micro-batch size and policy make a job fastest on a number of devices."""

from megatron_lynx.search.candidate import Candidate
from megatron_lynx.search.losers import Lost
from megatron_lynx.search.ranking import Ranking
from megatron_lynx.search.search import POLICIES, search

__all__ = ["POLICIES", "Candidate", "Lost", "Ranking", "search"]
