"""The command chat on one rank: rank 0 reads messages from a terminal, which can also stop an answer, from a file or a
pipe, and announces what to do; all ranks answer together."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import termios
from argparse import Namespace
from pathlib import Path

from ...core import comm
from ...core.comm.wire import share, share_check
from ...core.files import NotWritten, whole_file
from ..generation.conversation import Answer, Conversation
from ..generation.sampling import SamplingParams
from .arguments import sampling_params
from .generate import progress_bar
from .start import Worker, start

HEARTBEAT_S = 10.0  # between heartbeats of rank 0 while it waits for input
SHORT = 256  # up to this many new tokens no progress is shown
COMMANDS = "/file PATH, /save PATH, /reset, /quit"
CTRL_C, CTRL_D = "\x03", "\x04"


def run(args: Namespace) -> None:
    """Chat until the end of the input; collective over all ranks."""
    params = sampling_params(args)
    ready = start(args, lambda tokenizer, config: Transcript(tokenizer, (), args.system))
    with comm.monitored("the chat"):
        _run(args, params, ready)


def _run(args: Namespace, params: SamplingParams, ready: Worker) -> None:
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


class NoInput(ValueError):
    """There is no input to read from."""


class Lines:
    """Lines of an open file descriptor, read without blocking for long."""

    prompt = ""

    def __init__(self, fd: int):
        self._fd, self._rest, self._ended = fd, b"", False

    def read(self, wait_s: float) -> str | None:
        """The next line, without its end; None when none has come after wait_s seconds. EOFError at the end."""
        while b"\n" not in self._rest and not self._ended:
            if not select.select([self._fd], [], [], wait_s)[0]:
                return None
            data = os.read(self._fd, 1 << 16)
            self._rest, self._ended = self._rest + data, not data
        line, end, self._rest = self._rest.partition(b"\n")
        if not end and not line:
            raise EOFError
        return line.decode(errors="replace").rstrip("\r")

    def interrupted(self) -> bool:
        """Whether the user wants to stop the answer."""
        return False

    def close(self) -> None:
        os.close(self._fd)


class Terminal(Lines):
    """The terminal that this process was started from.

    A launcher is between the two. deepspeed passes its standard input on and kills all ranks at Ctrl-C;
    launch/deepspeed_local.sh runs them in the background, without standard input. So rank 0 opens the terminal itself,
    makes its process group the foreground, and receives Ctrl-C as a character, not as a signal, until it closes it.
    """

    prompt = "\n> "

    def __init__(self):
        try:
            super().__init__(os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            raise NoInput(
                f"there is no terminal to chat in ({error.strerror}), and standard input is empty: pass --input FILE "
                "with a message a line, or start it from a terminal"
            ) from None
        self._background = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a background group may take the front then
        self._front, self._modes = os.tcgetpgrp(self._fd), termios.tcgetattr(self._fd)
        os.tcsetpgrp(self._fd, os.getpgrp())
        self._set(lines=True)

    def _set(self, *, lines: bool) -> None:
        """Whole lines with echo, which Ctrl-C ends, too; or single characters without."""
        modes = termios.tcgetattr(self._fd)
        modes[3] &= ~termios.ISIG
        modes[3] = modes[3] | termios.ICANON | termios.ECHO if lines else modes[3] & ~(termios.ICANON | termios.ECHO)
        modes[6] = list(modes[6])
        if lines:
            modes[6][termios.VEOL] = CTRL_C.encode()
        else:
            modes[6][termios.VMIN], modes[6][termios.VTIME] = 1, 0
        termios.tcsetattr(self._fd, termios.TCSANOW, modes)

    def read(self, wait_s: float) -> str | None:
        """As `Lines.read`; what Ctrl-C ends is an empty line."""
        self._set(lines=True)
        if not select.select([self._fd], [], [], wait_s)[0]:
            return None
        line = os.read(self._fd, 1 << 16).decode(errors="replace")
        if not line:
            raise EOFError
        return "" if CTRL_C in line else line.rstrip("\r\n")

    def interrupted(self) -> bool:
        """Whether Ctrl-C was pressed since; other keys are dropped."""
        self._set(lines=False)
        keys = ""
        while select.select([self._fd], [], [], 0)[0]:
            data = os.read(self._fd, 1 << 16).decode(errors="replace")
            if not data:
                break
            keys += data
        return CTRL_C in keys

    def close(self) -> None:
        """Restore the terminal."""
        with contextlib.suppress(OSError, termios.error):
            termios.tcsetattr(self._fd, termios.TCSANOW, self._modes)
            os.tcsetpgrp(self._fd, self._front)
        signal.signal(signal.SIGTTOU, self._background)
        super().close()


def open_input(path: str | None) -> Lines:
    """What to read messages from: a file, or else a pipe on standard input, or else the terminal.

    Raises: `NoInput`. OSError for a file that can't be read.
    """
    if path is not None:
        return Lines(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    if sys.stdin is not None and not os.isatty(0) and not os.path.samestat(os.fstat(0), os.stat(os.devnull)):
        return Lines(os.dup(0))
    sys.stdout.flush()
    return Terminal()


class Transcript:
    """Messages, and the tokens of the whole conversation so far.

    An answer keeps the tokens that the model generated; only what the chat template appends is tokenized. If the
    template changes earlier turns, the whole conversation is tokenized again.

    end_tokens: the model's. system: a message before all others.
    Raises: ValueError for a tokenizer without a chat template.
    """

    def __init__(self, tokenizer, end_tokens, system: str | None = None):
        if not tokenizer.chat_template:
            raise ValueError("the model's tokenizer has no chat template: ask it through megatron-tree generate")
        self._tokenizer, self._end_tokens = tokenizer, frozenset(end_tokens)
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def reset(self) -> None:
        self.messages: list[dict[str, str]] = list(self._system)
        self._tokens: list[int] = []  # of the conversation, the last answer included
        self._text = ""  # the same as the template writes it, as far as it is in the tokens

    def ask(self, message: str) -> list[int]:
        """The tokens of the conversation with this message, up to where its answer begins; see `answered`."""
        messages = [*self.messages, {"role": "user", "content": message}]
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        if self._text and text.startswith(self._text):
            tokens = self._tokens + self._encode(text[len(self._text) :])
        else:
            tokens = self._encode(text)
        self._asked = messages, text, tokens
        return tokens

    def answered(self, answer: str, tokens: list[int]) -> None:
        """Note the answer to the last message: its text and the tokens that the model wrote."""
        messages, text, prompt = self._asked
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        self._tokens, self._text = prompt + tokens, text + answer
        if tokens and tokens[-1] in self._end_tokens:
            self._text += self._tokenizer.decode(tokens[-1:], skip_special_tokens=False)

    def _encode(self, text: str) -> list[int]:
        """The template writes special tokens itself."""
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)
