"""Chat with a language model in the terminal, with the KV cache spread over all ranks and kept between turns.

    bash launch/deepspeed_local.sh -n 4 launch/chat.py

Every rank runs this file. `--help` lists the options; docs/inference.md explains them.
"""

from __future__ import annotations

import sys


def main(argv: list[str]) -> int:
    from megatron_tree.launching import run_script
    from megatron_tree.serving.arguments import build_chat_parser, check_chat_arguments

    def load():
        from megatron_tree.serving.chat import run
        from megatron_tree.serving.start import StartError
        from megatron_tree.serving.terminal import NoInput

        return run, (NoInput, StartError)

    return run_script("chat.py", argv, build_chat_parser, check_chat_arguments, load, choices=False)


if __name__ == "__main__":
    from megatron_tree.launching import explain_missing, leave

    with explain_missing("chat.py"):
        leave(main(sys.argv[1:]))
