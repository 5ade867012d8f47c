"""Command lines that several tests give."""

import sys

MODULE = [sys.executable, "-m", "mlx_snapkv"]
LEAD = "The access code of the amber falcon is 482913. It was cold. The access code of the amber falcon is"
RAW = ["generate", "--model", "demo", "--ignore-chat-template", "-m", "6"]
PLAIN = [*RAW, "--prompt", LEAD]  # answered 482913
