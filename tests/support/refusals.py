"""What is said of a call that is refused."""

import re

import pytest


def refused_with(*parts):
    """In this context a ValueError is raised whose text holds all these parts, to the letter."""
    return pytest.raises(ValueError, match="(?s)" + "".join(f"(?=.*{re.escape(part)})" for part in parts))
