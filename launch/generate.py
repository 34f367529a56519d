"""Ask a language model about a long text, or answer a file of prompts, with the KV cache spread over all ranks.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 deepspeed --num_gpus 4 --no_local_rank launch/generate.py --check

Every rank runs this file. `--help` lists the options; docs/inference.md explains them.
"""

from __future__ import annotations

import sys


def main(argv: list[str]) -> int:
    from megatron_tree.launching import run_script
    from megatron_tree.serving.arguments import build_parser, check_arguments

    def load():
        from megatron_tree.serving.generate import BatchError, CheckError, run
        from megatron_tree.serving.start import StartError

        return run, (BatchError, CheckError, StartError)

    return run_script("generate.py", argv, build_parser, check_arguments, load)


if __name__ == "__main__":
    from megatron_tree.launching import explain_missing, leave

    with explain_missing("generate.py"):
        leave(main(sys.argv[1:]))
