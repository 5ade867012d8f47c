"""Commands that answer line by line into a file, and are stopped."""

import signal
import time


def wait_for(process, output, n):
    """Wait for the first `n` lines."""
    while not (output.exists() and output.read_bytes().count(b"\n") >= n):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


def interrupt(process, output):
    """Ctrl-C, of which the command makes no more than a word on how to go on."""
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130 and "Traceback" not in err
    assert f"What was answered is in {output}; the same command goes on from there." in err
