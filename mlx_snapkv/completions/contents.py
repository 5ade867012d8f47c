"""Convert the `content` of messages (text parts, documents, tool results, media) to text for the model."""

import base64
import json
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from .validation import require

SEPARATOR = "\n\n"  # between joined texts
TEXT_TYPES = {"text", "input_text", "output_text", "reasoning_text", "summary_text"}
MEDIA = ("image", "audio", "video", "file", "document", "pdf", "screenshot")
MAX_TYPE_LENGTH = 40  # maximum length of a part's type in a note, in characters
MAX_URL_LENGTH = 200  # maximum length of a URL shown to the model, in characters

Source = Literal["user", "tool", "other"]


class TextPart(NamedTuple):
    """One part of a message's content, as text.

    Attributes:
        note: a sentence about content that the model does not see, or None.
    """

    text: str
    note: str | None = None


def text_parts(content: Any, source: Source = "tool") -> Iterator[TextPart]:
    """Yield the text of each part of a message's content.

    Args:
        content: a message's `content` from any API: a string, a part, a list of strings and parts, or None.
        source: "user" for user and system messages in which media are an error, "tool" for tool results, "other" for
            everything else. In tool results, parts of unknown types become JSON. All other parts that the model can't
            read are replaced by a description in brackets.

    Raises: ValueError: a part's `text` is not a string, or a "user" message has media or a part that is neither text
        nor an object.
    """
    for part in as_list(content):
        if isinstance(part, dict):
            yield _text_part(part, source)
        elif isinstance(part, str):
            yield TextPart(part)
        elif part is not None:
            require(source != "user", ".content should be texts or parts", part)
            yield TextPart(as_json(part))


def as_list(content: Any) -> list[Any]:
    """Return a list unchanged, a single value as a list, and None or "" as an empty list."""
    if content is None or content == "":
        return []
    return content if isinstance(content, list) else [content]


def as_json(value: Any) -> str:
    """Return a value as single-line JSON, without escaping non-ASCII characters."""
    return json.dumps(value, ensure_ascii=False)


def part_type(part: dict[str, Any]) -> str:
    """Return a part's `type`, shortened for use in a sentence, or "part" if it has none."""
    kind = part.get("type")
    return kind[:MAX_TYPE_LENGTH] if isinstance(kind, str) else "part"


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates with U+FFFD. Clients send lone surrogates if they cut text within an emoji."""
    try:
        text.encode()
    except UnicodeEncodeError:
        # UTF-16 joins surrogates that form a pair, so only lone ones are replaced.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def replace_surrogates_in(value: Any) -> Any:
    """Apply `replace_surrogates` to every string in a JSON value except object keys."""
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, list):
        return [replace_surrogates_in(item) for item in value]
    if isinstance(value, dict):
        return {name: replace_surrogates_in(item) for name, item in value.items()}
    return value


def _text_part(part: dict[str, Any], source: Source) -> TextPart:
    """Convert a part to text, as described in `text_parts`.

    Raises: ValueError: the part's `text` is not a string, or a "user" message has media.
    """
    kind = part_type(part)
    is_untyped = not isinstance(part.get("type"), str)
    is_text = kind in TEXT_TYPES or (is_untyped and isinstance(part.get("text"), str))
    if is_text:
        text = part.get("text") or ""
        require(isinstance(text, str), ".content should have texts", text)
        return TextPart(text)
    if kind == "refusal":
        return TextPart(str(part.get("refusal") or ""))
    if kind == "tool_reference":
        return TextPart(f"[tool {part.get('tool_name') or part.get('name')}]")
    is_json_result = source != "user" and "type" not in part
    if kind == "json" or is_json_result:
        value = part.get("json", part)
        return TextPart(as_json(value))
    document_text = _document_text(part)
    if document_text is not None:
        return TextPart(_prepend_title(part, document_text))
    return _media_or_unknown_part(part, kind, source)


def _media_or_unknown_part(part: dict[str, Any], kind: str, source: Source) -> TextPart:
    """Convert media, or a part of an unknown type, as described in `text_parts`. `kind` is the part's type.

    Raises: ValueError: a "user" message has media.
    """
    media = _media_kind(part, kind)
    if source == "user" and media is not None:
        article = "an" if media[0] in "aeiou" else "a"
        raise ValueError(
            f".content has {article} {media}, and this model reads text only: leave it out"
        )
    if source == "tool" and media is None:  # for example a built-in tool's result
        readable_fields = {
            name: value for name, value in part.items() if not name.startswith("encrypted")
        }
        return TextPart(as_json(readable_fields))
    return _placeholder(part, media or kind)


def _placeholder(part: dict[str, Any], description: str) -> TextPart:
    """Return a description in brackets, such as "[image, 512 bytes, not shown to this model]", and a note."""
    facts = [description, _size_or_url(part), "not shown to this model"]
    text = ", ".join(fact for fact in facts if fact is not None)
    note = f"a part of the type {part_type(part)} is not shown to the model"
    return TextPart(f"\n[{text}]\n", note)


def _media_kind(part: dict[str, Any], kind: str) -> str | None:
    """Return the kind of media that a part contains, or None. Base64 MCP resources count as files."""
    for name in MEDIA:
        if name in kind:
            return name
    resource = part.get("resource")
    is_file = isinstance(resource, dict) and isinstance(resource.get("blob"), str)
    return "file" if is_file else None


def _prepend_title(part: dict[str, Any], text: str) -> str:
    """Prepend a document's title or file name to its text, and append a separator."""
    file = part.get("file")
    file_fields = file if isinstance(file, dict) else part
    title = part.get("title") or file_fields.get("filename")
    if isinstance(title, str):
        text = f"{title}\n{text}"
    return text + SEPARATOR


def _document_text(part: dict[str, Any]) -> str | None:
    """Return the text of a document, file, MCP resource, search result or compaction, or None if there is no text."""
    kind = part_type(part)
    source = part.get("source")
    nested = part.get("resource") or part.get("file") or source
    if isinstance(nested, dict):
        return _nested_text(nested, kind)
    if isinstance(part.get("file_data"), str):
        return _decode_text(part["file_data"], media_type="", kind=kind)
    if kind == "compaction" and isinstance(part.get("content"), str):
        return part["content"]  # a summary of the earlier conversation
    if kind == "search_result" and isinstance(part.get("content"), list):
        text = SEPARATOR.join(result.text for result in text_parts(part["content"]))
        has_url = isinstance(source, str)
        return f"{source}\n{text}" if has_url else text
    return None


def _nested_text(nested: dict[str, Any], kind: str) -> str | None:
    """Return the text in a part's `resource`, `file` or `source`, or None. `kind` is the part's type."""
    nested_type = nested.get("type")
    if nested_type == "text" and isinstance(nested.get("data"), str):
        return nested["data"]
    if nested_type == "content":
        return SEPARATOR.join(inner.text for inner in text_parts(nested.get("content")))
    if isinstance(nested.get("text"), str):
        return nested["text"]
    media_type = nested.get("media_type") or nested.get("mimeType") or ""
    data = nested.get("file_data") or nested.get("data") or nested.get("blob")
    return _decode_text(data, str(media_type), kind)


def _decode_text(data: Any, media_type: str, kind: str) -> str | None:
    """Decode text from base64 or a data URL. Return None if the data is not text.

    If a file has no media type or an `application/...` type, its bytes determine whether it is text.
    """
    if not isinstance(data, str):
        return None
    if data.startswith("data:"):
        media_type, _, data = data.removeprefix("data:").partition(";base64,")
    main_type, _, _ = media_type.partition("/")
    is_text = media_type.startswith(("text/", "application/json"))
    may_be_text = "file" in kind and main_type in ("", "application")
    if not (is_text or may_be_text):
        return None
    try:
        text = base64.b64decode(data, validate=True).decode()
    except ValueError:
        return None
    looks_binary = text.startswith("%PDF") or "\0" in text
    return None if may_be_text and looks_binary else text


def _size_or_url(part: dict[str, Any]) -> str | None:
    """Return a part's URL, or the size of its data in bytes. Return None if it has neither."""
    for text in _strings_longest_first(part):
        if text.startswith(("http://", "https://", "file://")):
            return text[:MAX_URL_LENGTH]
        data = text
        if text.startswith("data:"):  # data:image/png;base64,...
            _, _, data = text.partition(";base64,")
        try:
            n_bytes = len(base64.b64decode(data, validate=True))
        except ValueError:
            continue
        # Short strings and the part's type, such as "file", can be valid base64 by accident.
        is_data = len(data) >= 4 and text != part_type(part)
        if is_data:
            return f"{n_bytes} bytes"
    return None


def _strings_longest_first(value: Any) -> list[str]:
    """Return all strings in a JSON value, longest first.

    A part's data is usually longer than the strings that describe it.
    """
    strings: list[str] = []
    unvisited = [value]
    while unvisited:
        item = unvisited.pop()
        if isinstance(item, str):
            strings.append(item)
        elif isinstance(item, dict):
            unvisited += item.values()
        elif isinstance(item, list):
            unvisited += item
    return sorted(strings, key=len, reverse=True)
