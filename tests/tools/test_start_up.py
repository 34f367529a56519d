"""Help, the version and plans come before torch is imported, and so at once."""

import subprocess
import sys

import pytest

from megatron_tree import __version__
from megatron_tree.__main__ import COMMANDS
from megatron_tree.tools.bench import options

SLOW = {"torch", "transformers", "deepspeed", "megatron"}
SCRIPT = f"""
import sys
from megatron_tree.__main__ import main
try:
    main()
except SystemExit as end:
    status = end.code
print(*{SLOW} & sys.modules.keys(), file=sys.stderr)
sys.exit(status)
"""
PLAN = "plan --topology ethernet --nodes 2 --ranks-per-node 2 --seq-len 4k --documents 3x1k --pass forward"
BENCH = [f"bench {name} --help" for name in options.COMMANDS]
WORDS = ["--help", "--version", *(f"{name} --help" for name in COMMANDS), *BENCH, PLAN]


@pytest.mark.parametrize("words", WORDS)
def test_no_framework_is_imported(words):
    done = subprocess.run([sys.executable, "-c", SCRIPT, *words.split()], capture_output=True, text=True, check=True)
    assert not done.stderr.strip() and done.stdout
    assert "launch/" not in done.stdout  # a wheel has no such folder
    if words == "--version":
        assert done.stdout == f"megatron_tree {__version__}\n"


def test_requests_are_read_without_torch():
    script = "import sys, megatron_tree.inference.serving.http.protocol; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
