"""What stock Megatron offers against activation memory: its settings as data, which are legal, what each costs, the best one.

setting.py          one setting: modules or whole layers recomputed, modules offloaded; its fields and flags
recompute.py        `--recompute-modules` as data;  offload.py: `--offload-modules`
legality.py         what each release's own validation refuses, and what cannot train although it is accepted
offered.py          the settings that make a difference to a job, in families of growing thrift
bytes.py            what one half keeps, makes again and sends to the host; expert_bytes.py: the same of experts
seconds.py          what runs again
copying.py          the copies of one stage, layer by layer, as Megatron asks for them
price.py            a setting priced: memory as the maximum over moments, the simulated step
rival.py            the fastest setting within given bytes
"""

from megatron_lynx.stock.price import Priced, priced
from megatron_lynx.stock.rival import best_rival
from megatron_lynx.stock.setting import FULL, NONE, SELECTIVE, StockSetting

__all__ = ["FULL", "NONE", "SELECTIVE", "Priced", "StockSetting", "best_rival", "priced"]
