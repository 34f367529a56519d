"""Run a script of a Megatron-LM checkout, unmodified, with tree attention. This is one rank.

usage: python launch/megatron_lm.py SCRIPT [OPTION ...]

SCRIPT is a file of the checkout, OPTION Megatron-LM's own. `launch/megatron_lm.sh` starts it on the ranks of a machine,
`launch/deepspeed_hostfile.sh` and `launch/slurm_train.sh` on those of several; see docs/megatron-lm.md.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0 if argv else 2
    script = Path(argv[0]).resolve()
    if not script.is_file():
        print(f"error: no such script: {script}", file=sys.stderr)
        return 2
    # As `python SCRIPT` does. It also settles which megatron.core is imported: the one that the script was written for.
    sys.path[0] = str(script.parent)
    from megatron_tree.launching import explain_missing

    with explain_missing("megatron_lm.py"):
        from megatron_tree.integrations.megatron.megatron_lm import run_script

    run_script(script, argv[1:])
    return 0


if __name__ == "__main__":
    from megatron_tree.launching import leave, quiet

    quiet()
    leave(main(sys.argv[1:]))
