"""Ctrl-C while MLX computes: a word at once, unless it stops at once."""

import os
import signal
import time

import pytest

from mlx_snapkv.cli.reading import noticing


@pytest.mark.parametrize("seconds, words", [(0.6, ["heard"]), (0, [])])
def test_ctrl_c_is_answered_unless_it_ends_at_once(seconds, words):
    said, pressed = [], []
    before = signal.signal(
        signal.SIGINT, lambda *_: pressed.append(True)
    )  # as if busy: no exception
    try:
        with noticing(lambda: said.append("heard")):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(seconds)
    finally:
        signal.signal(signal.SIGINT, before)
    assert said == words and pressed and signal.set_wakeup_fd(-1) == -1
