"""`@emulated` marks tests that need an emulated cluster; where there can be none they are skipped, with the reason."""

import pytest

from megatron_tree.tools.emulate import Unavailable
from megatron_tree.tools.emulate.network import build_switch, require


def _why_unavailable():
    try:
        require()
        build_switch()
    except Unavailable as error:
        return str(error)


_why = _why_unavailable()
emulated = pytest.mark.skipif(_why is not None, reason=str(_why))
