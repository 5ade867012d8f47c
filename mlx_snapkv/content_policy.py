"""What a page of ours may do: run and show what is in it, by hashes, and nothing else."""

import re
from base64 import b64encode
from hashlib import sha256

ALLOW_NONE = {"default-src": "'none'", "base-uri": "'none'", "form-action": "'none'"}


def content_policy(html: str, **more: str) -> str:
    """A Content-Security-Policy: the page's own script and style, and what `more` allows (`connect_src="'self'"`)."""
    rules = ALLOW_NONE | {name.replace("_", "-"): value for name, value in more.items()}
    for tag, text in re.findall(r"<(script|style)>(.*?)</\1>", html, re.S):
        rules[f"{tag}-src"] = f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
    return "; ".join(f"{name} {value}" for name, value in rules.items())
