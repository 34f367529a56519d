"""What setup.cfg requires and constraints.txt pins."""

import configparser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).resolve().parents[2]


def setup_cfg():
    parser = configparser.ConfigParser()
    parser.read(REPO / "setup.cfg")
    return parser


def requirements():
    parser = setup_cfg()
    lines = parser["options"]["install_requires"].splitlines()
    for extra in parser["options.extras_require"].values():
        lines += extra.splitlines()
    return [Requirement(line) for line in lines if line.strip()]


def pinned():
    lines = [line.split("#")[0].strip() for line in (REPO / "constraints.txt").read_text().splitlines()]
    return {canonicalize_name(r.name): str(r.specifier) for line in lines if line for r in [Requirement(line)]}
