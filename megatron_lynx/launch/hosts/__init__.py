"""The frameworks that a launch can run: Megatron-LM and Megatron-Bridge."""

from __future__ import annotations

from megatron_lynx.launch.flags import BRIDGE
from megatron_lynx.launch.hosts.host import Host


def host_named(name: str) -> Host:
    """The host that `--lynx-host` names."""
    if name == BRIDGE:
        from megatron_lynx.launch.hosts.bridge import Bridge

        return Bridge()
    from megatron_lynx.launch.hosts.megatron_lm import MegatronLM

    return MegatronLM()
