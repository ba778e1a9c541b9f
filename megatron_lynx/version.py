"""The version, used by setup.py, `megatron-lynx --version` and every plan's provenance."""

__version__ = "0.2.0"
