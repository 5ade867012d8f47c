"""A chat as a Markdown file, for people to read."""

from __future__ import annotations

from .chat_session import Session


def as_markdown(session: Session) -> str:
    """The conversation, with the names of its documents in place of their text."""
    conversation = session.conversation
    said = iter(conversation.said)
    lines = [f"# Chat with {session.model}", "", session.ways]
    for message in conversation.messages:
        role, content = message["role"], message["content"]
        lines += ["", f"## {_TITLES[role]}", ""]
        if role == "user":
            *documents, content = next(said)
            lines += [f"*File: {session.name_of(text)}*\n" for text in documents]
        lines.append(content.strip())
    return "\n".join(lines) + "\n"


_TITLES = {"system": "System prompt", "user": "Question", "assistant": "Answer"}
