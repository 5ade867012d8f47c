"""A command in a pseudo-terminal."""

import contextlib
import os
import pty
import select

import fork_helpers
from command_lines import MODULE


class Terminal:
    def __init__(self, *args, start=fork_helpers.Popen, cwd=None, **variables):
        self.fd, its = pty.openpty()
        self.process = start(
            [*MODULE, *args], stdin=its, stdout=its, stderr=its,
            start_new_session=True, env=os.environ | {"TERM": "xterm", **variables}, cwd=cwd,
        )  # fmt: skip
        os.close(its)
        self.seen = self.all = ""

    def _read(self):
        came = os.read(self.fd, 1 << 16).decode(errors="replace")
        self.seen, self.all = self.seen + came, self.all + came
        return came

    def wait_for(self, text, seconds=fork_helpers.AT_MOST):
        while text not in self.seen:
            ready, _, _ = select.select([self.fd], [], [], seconds)
            assert ready, f"{text!r} never came: {self.seen!r}"
            self._read()
            if "\x1b[6n" in self.seen:  # prompt_toolkit asks where the cursor is
                self.seen = self.seen.replace("\x1b[6n", "")
                os.write(self.fd, b"\x1b[1;1R")
        self.seen = self.seen.partition(text)[2]

    def drive(self, *steps):
        """Type one text after the other, and wait for what comes of each."""
        for typed, wanted in steps:
            os.write(self.fd, typed.encode())
            self.wait_for(wanted)

    def leave(self, typed="/quit\r"):
        """Type this, and wait for the end; all that the command has said."""
        os.write(self.fd, typed.encode())
        with contextlib.suppress(OSError):  # the other end is closed
            while self._read():
                pass
        assert self.process.wait() == 0, self.all
        return self.all

    def close(self):
        self.process.kill()
        os.close(self.fd)
