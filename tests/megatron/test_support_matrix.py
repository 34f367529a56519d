"""The support tables in docs/ are what the marks on the tests say."""

import pytest

import support_matrix
from support_matrix import page_with, tables


def test_the_pages_are_up_to_date(request):
    collected, pages = request.config.stash[support_matrix.COLLECTED], support_matrix.marked_files()
    if not {file for files in pages.values() for file in files} <= {test.path for test in collected} or any(
        "::" in argument for argument in request.config.args
    ):
        pytest.skip("only some of the tests were collected; python tests/support_matrix.py")
    for page, files in pages.items():
        text = page.read_text()
        assert page_with(text, tables(test for test in collected if test.path in files)) == text, (
            "run python tests/support_matrix.py"
        )
