"""Without an optional package every program says in one sentence what to install."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_tree.launching import EXTRAS, explain_missing, missing_package
from support.pins import setup_cfg

REPO = Path(__file__).resolve().parents[2]
# A module that is None in sys.modules can neither be found nor imported.
WITHOUT = """
import runpy, sys
name, program, sys.argv = sys.argv[1], sys.argv[2], sys.argv[2:]
sys.modules[name] = None
run = runpy.run_path if program.endswith(".py") else runpy.run_module
run(program, run_name="__main__")
"""
COMMAND = "megatron_tree"
BENCH = (COMMAND, "bench", "decode", "--ranks", "2", "--seq-len", "1k")


def run_without(module, *command):
    env = os.environ | {"PYTHONPATH": str(REPO), "CUDA_VISIBLE_DEVICES": "", "RANK": "0", "WORLD_SIZE": "1"}
    env |= {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    call = [sys.executable, "-c", WITHOUT, module, *command]
    return subprocess.run(call, cwd=REPO, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("module", "extra", "command"),
    [
        ("transformers", "hf", [COMMAND, "chat"]),
        pytest.param("tqdm", "figures", BENCH, marks=pytest.mark.slow),
        pytest.param("deepspeed", "deepspeed", ["launch/train_hf.py"], marks=pytest.mark.slow),
        pytest.param("megatron", "megatron", ["launch/megatron_lm.py", "launch/gpu.py"], marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_one_sentence_names_the_extra(module, extra, command):
    done = run_without(module, *command)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    *_, said = done.stderr.splitlines()
    assert module in said and f"pip install '.[{extra}]'" in said


def test_other_import_errors_keep_their_traceback():
    with pytest.raises(ImportError, match="no_such_part"), explain_missing("x.py"):
        import numpy.no_such_part  # noqa: F401
    for error in (ImportError("x", name="tqdm"), ModuleNotFoundError("x", name="numpy"), ImportError()):
        assert missing_package(error) is None


def test_every_optional_package_has_its_extra():
    """Distributions of setup.cfg by the modules that they install."""
    for extra, known in EXTRAS.items():
        lines = setup_cfg()["options.extras_require"][extra].split()
        names = {line.split(">")[0].replace("megatron-core", "megatron") for line in lines}
        assert names == set(known), extra
