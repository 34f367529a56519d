"""No log line stands inside a streamed answer; warnings do not wait."""

import io
import logging

import pytest

from megatron_tree.launching import hold_log
from megatron_tree.log import logger


@pytest.fixture
def log(monkeypatch):
    """What the package's logger prints."""
    stream = io.StringIO()
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(stream)])
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.manager._clear_cache()
    yield stream
    logger.manager._clear_cache()


def test_log_lines_wait_for_the_end_of_an_answer(log):
    with hold_log():
        logger.warning("a rank is gone")
        assert log.getvalue() == "a rank is gone\n"
        logger.info("a schedule")
        log.write("the answer\n")
    logger.info("afterwards")
    assert log.getvalue() == "a rank is gone\nthe answer\na schedule\nafterwards\n"
