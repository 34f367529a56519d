"""Files that are whole or not there."""

import pytest

from megatron_tree.files import whole_file


def _fail_half_way(path):
    with whole_file(path) as part:
        part.write_text("hal")
        raise RuntimeError("half way")


def test_a_file_keeps_its_text_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="half way"):
        _fail_half_way(path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with whole_file(path) as part:
        part.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]
