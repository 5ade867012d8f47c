"""Build a Content-Security-Policy that restricts an HTML page to its own script and style."""

import re
from base64 import b64encode
from hashlib import sha256

ALLOW_NONE = {"default-src": "'none'", "base-uri": "'none'", "form-action": "'none'"}


def content_policy(html: str, **more: str) -> str:
    """Return a Content-Security-Policy that allows a page's own script and style by hash.

    Args:
        html: the page, with at most one plain `<script>` and one plain `<style>` element. Elements with attributes are
            ignored.
        **more: additional directives, such as `connect_src="'self'"`.
    """
    rules = ALLOW_NONE | {name.replace("_", "-"): value for name, value in more.items()}
    for tag, text in re.findall(r"<(script|style)>(.*?)</\1>", html, re.S):
        digest = sha256(text.encode()).digest()
        rules[f"{tag}-src"] = f"'sha256-{b64encode(digest).decode()}'"
    return "; ".join(f"{name} {value}" for name, value in rules.items())
