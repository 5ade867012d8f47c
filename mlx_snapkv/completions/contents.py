"""What clients put where a text is wanted, as the text that a model reads."""

import base64
import binascii
import json
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from .checks import require

BREAK = "\n\n"  # between texts that came apart
TEXTS = {"text", "input_text", "output_text", "reasoning_text", "summary_text"}
MEDIA = ("image", "audio", "video", "file", "document", "pdf", "screenshot")


class Shown(NamedTuple):
    """A part of a content as text, and what of it the model does not get: nothing, or a sentence."""

    text: str
    note: str | None = None


def shown(content: Any, whose: Literal["own", "tool", "other"] = "tool") -> Iterator[Shown]:
    """The parts of a content of any form: a text, a part, a list of both, none.

    Args:
        whose: the user's or system's own words, which have to be read as they are; a tool's result; another's.

    Raises: ValueError: the user's own image, or another part that is no text.
    """
    for part in as_list(content):
        if isinstance(part, dict):
            yield _part(part, whose)
        elif isinstance(part, str):
            yield Shown(part)
        elif part is not None:
            require(whose != "own", ".content should be texts or parts", part)
            yield Shown(as_json(part))


def as_list(content: Any) -> list[Any]:
    """A content as a list of its parts; none has none."""
    if content is None or content == "":
        return []
    return content if isinstance(content, list) else [content]


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def named(part: dict[str, Any]) -> str:
    """A part's type, by which it is called in sentences."""
    kind = part.get("type")
    return kind[:40] if isinstance(kind, str) else "part"


def _part(part: dict[str, Any], whose: str) -> Shown:
    kind = named(part)
    is_untyped = not isinstance(part.get("type"), str)
    if kind in TEXTS or (is_untyped and isinstance(part.get("text"), str)):
        text = part.get("text") or ""
        require(isinstance(text, str), ".content should have texts", text)
        return Shown(text)
    if kind == "refusal":
        return Shown(str(part.get("refusal") or ""))
    if kind == "tool_reference":  # whose name is all there is
        return Shown(f"[tool {part.get('tool_name') or part.get('name')}]")
    if kind == "json" or not (whose == "own" or "type" in part):
        return Shown(as_json(part.get("json", part)))
    text = _text_within(part)
    if text is not None:
        return Shown(_titled(part, text))
    media = _media(part, kind)
    if whose == "own" and media is not None:
        what = f".content has {'an' if media[0] in 'aeiou' else 'a'} {media}"
        raise ValueError(f"{what}, and this model reads text only: leave it out")
    if whose == "tool" and media is None:  # a tool of a service has answered it
        return Shown(as_json({k: v for k, v in part.items() if not k.startswith("encrypted")}))
    name = media or kind
    about = ", ".join([f"[{name}", *_size(part), "not shown to this model]"])
    return Shown(f"\n{about}\n", f"a part of the type {kind} is not shown to the model")


def _media(part: dict[str, Any], kind: str) -> str | None:
    """What this part is that is no text, if it is: an MCP server's resource may be any file."""
    resource = part.get("resource")
    is_file = isinstance(resource, dict) and isinstance(resource.get("blob"), str)
    return next((name for name in MEDIA if name in kind), "file" if is_file else None)


def _titled(part: dict[str, Any], text: str) -> str:
    """A document's text, under its title."""
    file = part.get("file")
    title = part.get("title") or (file if isinstance(file, dict) else part).get("filename")
    return f"{title}\n{text}{BREAK}" if isinstance(title, str) else text + BREAK


def _text_within(part: dict[str, Any]) -> str | None:
    """The text that a document, a file, a search result or a resource consists of, if it is one."""
    source = part.get("source")
    nested = (
        part.get("resource") or part.get("file") or (source if isinstance(source, dict) else None)
    )
    if isinstance(nested, dict):
        kind = nested.get("type")
        if kind == "text" and isinstance(nested.get("data"), str):
            return nested["data"]
        if kind == "content":
            return BREAK.join(each.text for each in shown(nested.get("content")))
        if isinstance(nested.get("text"), str):
            return nested["text"]
        named_type = nested.get("media_type") or nested.get("mimeType") or ""
        data = nested.get("file_data") or nested.get("data") or nested.get("blob")
        return _decoded(data, str(named_type), named(part))
    if isinstance(part.get("file_data"), str):
        return _decoded(part["file_data"], "", named(part))
    if named(part) == "compaction" and isinstance(part.get("content"), str):  # what was said before
        return part["content"]
    if named(part) == "search_result" and isinstance(part.get("content"), list):
        text = BREAK.join(each.text for each in shown(part["content"]))
        return f"{source}\n{text}" if isinstance(source, str) else text
    return None


def _decoded(data: Any, media_type: str, kind: str) -> str | None:
    """The text in base64, or in a data URL, of a file: of a text's type, or of one that tells nothing."""
    if not isinstance(data, str):
        return None
    if data.startswith("data:"):
        media_type, _, data = data.removeprefix("data:").partition(";base64,")
    is_file = "file" in kind and media_type.partition("/")[0] in ("", "application")
    if not (is_file or media_type.startswith(("text/", "application/json"))):
        return None
    try:
        text = base64.b64decode(data, validate=True).decode()
    except ValueError:
        return None
    is_text = is_file and not text.startswith("%PDF") and "\0" not in text
    return text if is_text or not is_file else None


def _size(part: dict[str, Any]) -> list[str]:
    """How much a part has, or where it is: some words, or none."""
    for value in _strings(part):
        data = value.partition(";base64,")[2] if value.startswith("data:") else value
        if value.startswith(("http://", "https://", "file://")):
            return [value[:200]]
        try:
            n_bytes = len(base64.b64decode(data, validate=True))
        except (binascii.Error, ValueError):
            continue
        if len(data) >= 4 and value != named(part):
            return [f"{n_bytes} bytes"]
    return []


def _strings(value: Any) -> Iterator[str]:
    """The longest texts within come first, since data are longer than what is said of them."""
    texts: list[str] = []
    stack = [value]
    while stack:
        each = stack.pop()
        if isinstance(each, str):
            texts.append(each)
        elif isinstance(each, (dict, list)):
            stack += each.values() if isinstance(each, dict) else each
    yield from sorted(texts, key=len, reverse=True)
