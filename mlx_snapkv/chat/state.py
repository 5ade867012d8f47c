"""A conversation as a file can hold it."""

from dataclasses import dataclass, field, fields

from ..policies import Policy, Stages


@dataclass
class ChatState:
    """What a conversation goes on from, but for the model and the options of its answers.

    All attributes are named as the conversation's own, which see. `prompt_cache` is of the kinds that `policy`
    and `memory` ask for.

    Attributes:
        said: what every message of the user's was made of: its documents, then what was typed.
    """

    prompt_cache: list
    policy: Policy | Stages | None = None
    memory: str = "drop"
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    said: list[list[str]] = field(default_factory=list)
    attached: list[str] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    pending_tokens: list[int] = field(default_factory=list)
    n_unknown: int = 0


STATE = frozenset(f.name for f in fields(ChatState))


def first_messages(system: str | None) -> list[dict[str, str]]:
    """The messages of a conversation in which nothing has been said."""
    return [] if system is None else [{"role": "system", "content": system}]
