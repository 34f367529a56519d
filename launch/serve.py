"""Serve a language model over HTTP with OpenAI's API, with the KV cache spread over all ranks.

    bash launch/deepspeed_local.sh -n 2 launch/serve.py

Every rank runs this file. `--help` lists the options; docs/serving.md explains them.
"""

from __future__ import annotations

import sys


def main(argv: list[str]) -> int:
    from megatron_tree.launching import run_script
    from megatron_tree.serving.http.arguments import build_parser, check_arguments

    def load():
        from megatron_tree.serving.http.run import run
        from megatron_tree.serving.start import StartError

        return run, (StartError,)

    return run_script("serve.py", argv, build_parser, check_arguments, load)


if __name__ == "__main__":
    from megatron_tree.launching import explain_missing, leave

    with explain_missing("serve.py"):
        leave(main(sys.argv[1:]))
