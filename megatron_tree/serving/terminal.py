"""Input of a chat: a terminal, which can also stop an answer, a file, or a pipe.

A launcher is between the terminal and the ranks. deepspeed passes its standard input on and kills all ranks at Ctrl-C;
launch/deepspeed_local.sh runs them in the background, without standard input. So rank 0 opens the terminal itself,
makes its process group the foreground, and receives Ctrl-C as a character, not as a signal, until it closes it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios

CTRL_C, CTRL_D = "\x03", "\x04"


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
    """The terminal that this process was started from."""

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
    if not os.isatty(0) and not os.path.samestat(os.fstat(0), os.stat(os.devnull)):
        return Lines(os.dup(0))
    sys.stdout.flush()
    return Terminal()
