"""What stock Megatron offers against activation memory: its settings as data, which are legal, what each costs, the best one.

setting.py          one setting: modules or whole layers recomputed, modules offloaded; its fields and flags
recompute.py        `--recompute-modules` as data;  offload.py: `--offload-modules`
legality.py         what each release's own validation refuses, and what cannot train although it is accepted
offered.py          the settings that make a difference to a job, in families of growing thrift
held.py             what one half keeps, makes again and sends to the host: dense_bytes.py, and expert_bytes.py of experts
layer_bytes.py      a layer's halves;  layers.py: the layers of one chunk;  stage.py: one stage's passes and moments
seconds.py          what runs again
price.py            a setting priced: memory as the maximum over moments, the simulated step
rival.py            the fastest setting within given bytes;  side_by_side.py: a plan beside the strongest ones
"""

from megatron_lynx.stock.price import Priced, priced
from megatron_lynx.stock.rival import best_rival
from megatron_lynx.stock.setting import FULL, NONE, OF_POLICY, SELECTIVE, StockSetting

__all__ = ["FULL", "NONE", "OF_POLICY", "SELECTIVE", "Priced", "StockSetting", "best_rival", "priced"]
