"""A Transformer Engine without its compiled part: somebody stands in for it, or Megatron goes without it."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from megatron_lynx.testbed.cpu_device import STAND_INS, TRANSFORMER_ENGINE, named_stand_in, transformer_engine_can_run


@pytest.fixture
def only_python(tmp_path, monkeypatch):
    """A Transformer Engine on the import path, as pip's pure wheel brings it: its import would look for libraries."""
    (tmp_path / TRANSFORMER_ENGINE).mkdir()
    (tmp_path / TRANSFORMER_ENGINE / "__init__.py").write_text("raise OSError('libcudnn is not there')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(STAND_INS, raising=False)
    return tmp_path


def test_without_a_stand_in_it_is_hidden_and_found_again_afterwards(only_python):
    assert not transformer_engine_can_run()
    with named_stand_in():
        assert importlib.util.find_spec(TRANSFORMER_ENGINE) is None
        with pytest.raises(ImportError):
            importlib.import_module(TRANSFORMER_ENGINE)
    assert TRANSFORMER_ENGINE not in sys.modules
    assert importlib.util.find_spec(TRANSFORMER_ENGINE) is not None


def test_a_module_that_the_environment_names_stands_in(only_python, monkeypatch):
    monkeypatch.setenv(STAND_INS, "kernels_of_somebody")
    (only_python / "kernels_of_somebody.py").write_text(
        "from contextlib import ExitStack\nfrom tests.instruments.replacing import replace_entry\nasked = {}\n"
        "def stand_in():\n    undo = ExitStack()\n    replace_entry(undo, asked, 'answers', True)\n    return undo\n"
    )
    assert transformer_engine_can_run()
    with named_stand_in():
        assert sys.modules["kernels_of_somebody"].asked == {"answers": True}
    assert sys.modules["kernels_of_somebody"].asked == {}


def test_with_its_compiled_part_nothing_is_hidden(only_python):
    (only_python / "transformer_engine_torch.cpython-311-x86_64-linux-gnu.so").touch()
    assert transformer_engine_can_run()
    with named_stand_in():
        assert importlib.util.find_spec(TRANSFORMER_ENGINE) is not None
