"""What the launch scripts print: no notices of other packages, and no log line inside a streamed answer."""

import io
import logging
import warnings

import pytest

from megatron_tree.launching import LOG_LINES, hold_log, quiet
from megatron_tree.log import logger

NOTICES = (
    "Transformer Engine and Apex are not installed. Falling back to Torch optimizers.",
    "Apex is not installed. Falling back to Torch Norm",
)


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
        logger.info("a schedule")
        assert log.getvalue() == ""
        log.write("the answer\n")
    logger.info("afterwards")
    assert log.getvalue() == "the answer\na schedule\nafterwards\n"


def test_log_lines_come_out_after_a_failure(log):
    def answer():
        with hold_log():
            logger.info("a schedule")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        answer()
    assert log.getvalue() == "a schedule\n"


def test_warnings_do_not_wait(log):
    with hold_log():
        logger.warning("a rank is gone")
        assert log.getvalue() == "a rank is gone\n"


def test_quiet_hides_notices_and_nothing_else():
    loggers = {logging.getLogger(name): text for name, text in LOG_LINES.items()}
    before = {one: one.filters[:] for one in loggers}
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            quiet()
            for text in (*NOTICES, "a warning of the user's own"):
                warnings.warn(text, stacklevel=2)
        assert [str(one.message) for one in seen] == ["a warning of the user's own"]
        for one, notice in loggers.items():
            texts = (f"{notice} RerunMode.DISABLED", "Need to rerun step")
            records = [logging.LogRecord(one.name, logging.WARNING, "", 0, text, None, None) for text in texts]
            assert [bool(one.filter(record)) for record in records] == [False, True]
    finally:
        for one, filters in before.items():
            one.filters = filters
