"""Stock Megatron's settings against activation memory: which are legal, their costs, and the fastest one.

setting.py      one setting: its fields and flags
modules.py      `--recompute-modules` and `--offload-modules` as data
legality.py     settings that a release refuses, and settings that it accepts but cannot train with
layer_bytes.py  bytes that a layer's halves keep, recompute and offload
seconds.py      seconds of a layer, and copies of a stage
stage.py        one stage's passes and bytes by moment
price.py        a setting's memory and simulated step
rival.py        the fastest setting within given bytes
side_by_side.py a plan compared with the strongest settings
"""

from megatron_lynx.stock.price import Priced, priced
from megatron_lynx.stock.rival import fastest, rivals
from megatron_lynx.stock.setting import FULL, NONE, OF_POLICY, SELECTIVE, StockSetting

__all__ = ["FULL", "NONE", "OF_POLICY", "SELECTIVE", "Priced", "StockSetting", "fastest", "priced", "rivals"]
