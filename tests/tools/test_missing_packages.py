"""Without an optional package every program says in one sentence what to install."""

import configparser
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_tree.launching import EXTRAS, explain_missing, missing_package

REPO = Path(__file__).resolve().parents[2]
# A module that is None in sys.modules can neither be found nor imported.
WITHOUT = """
import runpy, sys
name, sys.argv = sys.argv[1], sys.argv[2:]
sys.modules[name] = None
if sys.argv[0].endswith(".py"):
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
TRAINING = ("--config", "configs/train/quickstart.yaml")
SLOW = pytest.mark.slow  # they import deepspeed or transformers first
PROGRAMS = [  # module, extra, program and options
    ("tqdm", "launch", "megatron_tree", "bench", "decode", "--ranks", "2", "--seq-len", "1k"),
    ("transformers", "hf", "megatron_tree", "bench", "generate"),
    ("megatron", "megatron", "megatron_tree", "convert", "to-megatron", "a", "b"),
    ("fastapi", "serve", "megatron_tree", "serve", SLOW),
    ("deepspeed", "deepspeed", "megatron_tree", "generate", SLOW),
    ("transformers", "hf", "megatron_tree", "chat"),
    ("megatron", "megatron", "megatron_tree", "train", *TRAINING),
    ("deepspeed", "deepspeed", "launch/train_hf.py"),
    ("accelerate", "hf", "launch/train_trainer.py", SLOW),
    ("megatron", "megatron", "launch/megatron_lm.py", "launch/gpu.py", SLOW),
    ("matplotlib", "launch", "launch/convergence.py"),
]


def run_without(module, *command):
    env = os.environ | {"PYTHONPATH": str(REPO), "CUDA_VISIBLE_DEVICES": "", "RANK": "0", "WORLD_SIZE": "1"}
    env |= {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    call = [sys.executable, "-c", WITHOUT, module, *command]
    return subprocess.run(call, cwd=REPO, env=env, capture_output=True, text=True, timeout=120)


def case(module, extra, *command):
    marks = [part for part in command if part is SLOW]
    command = [part for part in command if part is not SLOW]
    return pytest.param(module, extra, command, marks=marks, id=f"{command[0]} without {module}")


@pytest.mark.parametrize(("module", "extra", "command"), [case(*row) for row in PROGRAMS])
def test_one_sentence_names_the_extra(module, extra, command):
    done = run_without(module, *command)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    *_, said = done.stderr.splitlines()
    assert module in said and f"megatron_tree[{extra}]" in said


def test_the_doctor_without_megatron_core_reports_all_the_rest():
    done = run_without("megatron", "megatron_tree", "doctor")
    assert done.returncode == 1 and not done.stderr
    assert "!  megatron-core" in done.stdout and "pip install 'megatron_tree[megatron]'" in done.stdout
    assert "\nattention kernels\n" in done.stdout and "\nplan\n" in done.stdout


def test_other_import_errors_keep_their_traceback():
    with pytest.raises(ImportError, match="no_such_part"), explain_missing("x.py"):
        import numpy.no_such_part  # noqa: F401
    for error in (ImportError("x", name="tqdm"), ModuleNotFoundError("x", name="numpy"), ImportError()):
        assert missing_package(error) is None


def test_every_optional_package_has_its_extra():
    """Distributions of setup.cfg by the modules that they install."""
    setup = configparser.ConfigParser()
    setup.read(REPO / "setup.cfg")
    modules = {"megatron-core": "megatron"}
    for extra, known in EXTRAS.items():
        names = [line.split(">")[0] for line in setup["options.extras_require"][extra].split()]
        assert {modules.get(name, name) for name in names} <= set(known), extra
