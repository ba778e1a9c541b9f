"""How megatron-lynx is installed.

The checkout keeps `configs/` at its top, where people look for it. A wheel carries the same files as
`megatron_lynx/configs`; `megatron_lynx.config.loader.bundled_configs` finds either.
"""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
README = HERE / "README.md"

MEGATRON = "megatron-core>=0.15,<0.20"  # the releases in megatron_lynx/apply/releases.json

setup(
    name="megatron-lynx",
    version=runpy.run_path(str(HERE / "megatron_lynx" / "version.py"))["__version__"],
    description="Overlapped recomputation for Megatron-LM: activation memory made cheap, gradients equal in every bit",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=[*find_packages(include=["megatron_lynx", "megatron_lynx.*"]), "megatron_lynx.configs"],
    package_dir={"megatron_lynx": "megatron_lynx", "megatron_lynx.configs": "configs"},
    package_data={
        "megatron_lynx": ["py.typed", "**/*.json", "report/page.css"],
        "megatron_lynx.configs": ["*.json", "**/*.yaml"],
    },
    install_requires=[
        "torch",
        MEGATRON,
        "numpy",  # the arrays that go into scipy's solvers; torch alone does not bring it
        "scipy",
        "pydantic>=2",
        "pyyaml",
        "typer",
        "rich",
    ],
    extras_require={
        "te": ["transformer-engine[pytorch]"],
        "apex": ["apex"],
        "test": [
            "matplotlib",  # benchmarks/delayed_gradients.py
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "psutil",
            "einops",
            "ruff",
            "mypy",
            "types-PyYAML",
        ],
    },
    entry_points={"console_scripts": ["megatron-lynx=megatron_lynx.cli:main"]},
)
