"""Options of megatron-tree generate: what is refused before any rank communicates, and those of files."""

from pathlib import Path

import pytest

from megatron_tree.inference.serving.arguments import build_parser, check_arguments
from megatron_tree.launching import parse_with_config

REPO = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-new-tokens", "0"], "--max-new-tokens 0 must be"),
        (["--tensor-model-parallel-size", "3"], "must divide the number of ranks, 4"),
        (["--weights", "sharded", "--tensor-model-parallel-size", "2"], "splits weights and cache over all 4"),
        (["--model", "no/such/model"], "neither 'smollm2' nor a folder"),
        (["--prompt-file", "no/such/file"], "--prompt-file 'no/such/file' can't be read"),
        (["--num-speculative-tokens", "17"], "--num-speculative-tokens 17 must be from 0 .none. to 16"),
        (["--temperature", "-1"], "--temperature -1.0 must be greater than or equal to 0"),
        (["--check", "--temperature", "1"], "plain greedy decoding, which has no --temperature"),
        (["--output", "x"], "--output needs --prompts"),
        (["--prompts", __file__], "--prompts needs --output"),
        (["--prompts", __file__, "--output", "x"], "test_generate_options.py can't be run:\nline 1: not valid JSON"),
        (["--prompts", __file__, "--output", "x", "--check"], "--check can't be combined with --prompts"),
    ],
)
def test_options_are_checked_before_anything_is_sent(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_arguments(build_parser().parse_args(arguments), 4)


def test_the_configs_name_existing_options():
    paths = list((REPO / "configs" / "generate").glob("*.yaml"))
    assert paths
    for path in paths:
        args = parse_with_config(build_parser(), ["--config", str(path), "--max-new-tokens", "5"])
        assert args.max_new_tokens == 5  # the command line wins
