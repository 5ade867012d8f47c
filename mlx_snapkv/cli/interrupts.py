"""Ctrl-C while the program starts: there is nothing to lose yet, and libraries may not be left half imported."""

import os
import signal
from typing import Any


def stop_at_once() -> None:
    """Let Ctrl-C end the process, until `listen`; where it was ignored, it still is."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def listen() -> None:
    """Let Ctrl-C be a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop(*_: Any) -> None:
    os.write(2, b"\nmlx-snapkv: stopped\n")
    os._exit(130)
