"""Stock Megatron's settings against activation memory: which are legal, their costs, and the fastest one."""

from megatron_lynx.stock.price import Priced, priced
from megatron_lynx.stock.rival import fastest, rivals
from megatron_lynx.stock.setting import FULL, NONE, OF_POLICY, SELECTIVE, StockSetting

__all__ = ["FULL", "NONE", "OF_POLICY", "SELECTIVE", "Priced", "StockSetting", "fastest", "priced", "rivals"]
