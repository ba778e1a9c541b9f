"""A launch in a file, one word a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_lynx.errors import ConfigError
from megatron_lynx.launch_arguments.command_line import LaunchFile, read_launch_file


def written(folder: Path, text: str) -> Path:
    path = folder / "a launch.args"
    path.write_text(text)
    return path


def test_words_comments_and_the_cluster(tmp_path: Path) -> None:
    text = (
        "# mine: 8 x H100\n#\n# cluster: h100-80g\ntorchrun\n\npretrain_gpt.py\n--data-path\n1.0 /a b\n#no-comment\n# uses: x\n"
    )
    assert read_launch_file(written(tmp_path, text)) == LaunchFile(
        ("torchrun", "pretrain_gpt.py", "--data-path", "1.0 /a b", "#no-comment"), "h100-80g"
    )
    assert read_launch_file(written(tmp_path, "train.py\n")).cluster is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "an empty file"),
        ("# cluster: h100-80g\n", "no words"),
        ("torchrun --nproc-per-node 8 train.py\n", "a line of several words"),
        ("torchrun \\\ntrain.py\n", "a line of several words"),
    ],
)
def test_other_files_are_told_apart(text: str, found: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_launch_file(written(tmp_path, text))
    assert found in str(caught.value)
    assert "one word a line" in str(caught.value)


def test_no_file_is_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_launch_file(tmp_path / "none.args")
