"""The command chat on one rank: rank 0 reads messages and announces what to do; all ranks answer together."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

from .. import comm
from ..comm.wire import share, share_check
from ..files import NotWritten, whole_file
from ..generation.conversation import Answer, Conversation
from ..generation.sampling import SamplingParams
from .arguments import sampling_params
from .report import progress_bar
from .start import Started, start
from .terminal import Lines, NoInput, open_input
from .transcript import Transcript

HEARTBEAT_S = 10.0  # between heartbeats of rank 0 while it waits for input
SHORT = 256  # up to this many new tokens no progress is shown
COMMANDS = "/file PATH, /save PATH, /reset, /quit"


def run(args: Namespace) -> None:
    """Chat until the end of the input; collective over all ranks."""
    params = sampling_params(args)
    ready = start(args, lambda tokenizer, config: Transcript(tokenizer, (), args.system))
    with comm.monitored("the chat"):
        _run(args, params, ready)


def _run(args: Namespace, params: SamplingParams, ready: Started) -> None:
    conversation = ready.conversation()
    if ready.rank != 0:
        try:
            share_check(None, ready.ranks)  # the input is open
        except ValueError as error:
            raise NoInput(str(error)) from None
        follow(conversation, params, ready.ranks)
        return
    lines: list[Lines] = []
    share_check(lambda: lines.append(open_input(args.input)), ready.ranks)
    try:
        transcript = Transcript(ready.tokenizer, ready.end_tokens, args.system)
        Chat(conversation, transcript, params, lines[0], lambda plan: share(plan, ready.ranks)).run()
    finally:
        lines[0].close()


def follow(conversation: Conversation, params: SamplingParams, ranks: comm.Ranks) -> None:
    """The other ranks: do what rank 0 announces, until it quits."""
    while True:
        match share(None, ranks):
            case ["answer", prompt, max_tokens]:
                conversation.answer(prompt, params.with_options({"max_tokens": max_tokens}))
            case ["reset"]:
                conversation.forget()
            case ["quit"]:
                return


class Chat:
    """Rank 0's side. announce(plan): tells the other ranks what to do next, see `follow`."""

    def __init__(
        self,
        conversation: Conversation,
        transcript: Transcript,
        params: SamplingParams,
        lines: Lines,
        announce,
    ):
        self._conversation, self._transcript, self._params = conversation, transcript, params
        self._lines, self._announce = lines, announce
        self._files: list[str] = []

    def run(self) -> None:
        """Read and answer until /quit or the end of the input."""
        print(f"commands: {COMMANDS}; Ctrl-C stops an answer", flush=True)
        while (line := self._next_line()) is not None and self._obey(line.strip()):
            pass
        self._announce(["quit"])

    def _next_line(self) -> str | None:
        """None at the end."""
        print(self._lines.prompt, end="", flush=True)
        try:
            while (line := self._lines.read(HEARTBEAT_S)) is None:
                self._announce(["wait"])
        except EOFError:
            return None
        if not self._lines.prompt and line.strip():
            print(f"\n> {line}", flush=True)
        return line

    def _obey(self, line: str) -> bool:
        """Carry out one line; False ends the chat."""
        command, _, path = line.partition(" ")
        try:
            match command:
                case "":
                    pass
                case "/quit":
                    return False
                case "/reset":
                    self._announce(["reset"])
                    self._conversation.forget()
                    self._transcript.reset()
                    self._files = []
                    print("a new conversation", flush=True)
                case "/save":
                    self._save(path.strip())
                case "/file":
                    self._take_file(path.strip())
                case _ if command.startswith("/"):
                    _complain(f"{command} is not a command: use {COMMANDS}")
                case _:
                    self._say(line)
        except NotWritten as error:
            _complain(str(error))
        except OSError as error:
            if error.filename is None:
                raise
            _complain(f"{command} {error.filename}: {error.strerror}")
        return True

    def _save(self, path: str) -> None:
        if not path:
            return _complain("/save needs the path of a file")
        with whole_file(Path(path)) as part:
            part.write_text(json.dumps(self._transcript.messages, indent=1, ensure_ascii=False) + "\n")
        print(f"{len(self._transcript.messages)} messages are in {path}", flush=True)

    def _take_file(self, path: str) -> None:
        if not path:
            return _complain("/file needs the path of a file")
        text = Path(path).read_text(errors="replace")
        self._files.append(f"{path}:\n\n{text.rstrip()}\n\n")
        print(f"{path}: {len(text):,} characters will precede the next message", flush=True)

    def _say(self, message: str) -> None:
        """Answer a message, and add both to the conversation."""
        prompt = self._transcript.ask("".join(self._files) + message)
        limit, params = self._conversation.runner.max_positions, self._params
        room = params.max_tokens if limit is None else min(params.max_tokens, limit - len(prompt))
        if room < 1:
            self._files = []
            return _complain(
                f"the conversation would be {len(prompt):,} tokens long, the model has {limit:,} positions: the "
                "message was dropped; send a shorter one, or start again with /reset"
            )
        self._announce(["answer", prompt, room])
        answer = self._conversation.answer(
            prompt,
            params.with_options({"max_tokens": room}),
            on_text=lambda text: print(text, end="", flush=True),
            progress=progress_bar("prefill") if len(prompt) - len(self._conversation.held) > SHORT else None,
            cancelled=self._lines.interrupted,
        )
        self._files = []
        self._transcript.answered(answer.text, answer.tokens)
        print(_footer(answer), flush=True)


def _complain(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _footer(answer: Answer) -> str:
    """What an answer took, in a line."""
    ended = {"stop": "", "length": ", cut at its length", "cancelled": ", stopped"}[answer.finish_reason]
    text = f"{answer.new_tokens:,} of {answer.prompt_tokens:,} tokens prefilled in {answer.prefill_s:.1f} s"
    if answer.step_s:
        text += f"; {len(answer.tokens)} new, {len(answer.step_s) / sum(answer.step_s):.1f} tokens/s"
    return f"\n[{text}{ended}]"
