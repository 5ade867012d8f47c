"""A chat under way: what its loop and its commands share."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..chat.conversation import Conversation
from ..engine.book_cost import BookCost, book_cost
from .lines import Lines
from .notices import tell_if_too_long, telling_cost
from .options import SamplingOptions
from .progress import PrefillBar, stderr_console
from .sharded import SharedLines
from .waiting import TOKENISING, waited_for

_TITLES = {"system": "System prompt", "user": "Question", "assistant": "Answer"}


class Session:
    """A conversation and the terminal or script that it is with. Answers go to stdout, all else to stderr.

    Attributes:
        model: the model's name, as the user gave it.
        conversation: the one that the next message goes to.
        sampling: how its answers are sampled.
        policy_wanted, memory_wanted: what a new conversation gets, whatever a loaded one has brought with it.
        names: of the documents attached, by their text.
        exported: files that hold this chat already.
        speed: of the last turn, in words.
        quiet: whether stderr has only what commands and mistakes say.
    """

    def __init__(
        self,
        model: str,
        conversation: Conversation,
        sampling: SamplingOptions,
        lines: Lines | SharedLines,
        quiet: bool = False,
    ):
        self.model = model
        self.conversation = conversation
        self.sampling = sampling
        self.lines = lines
        self.policy_wanted, self.memory_wanted = conversation.policy, conversation.memory
        self.names: dict[str, str] = {}
        self.exported: set[str] = set()
        self.speed = ""
        self.quiet = quiet
        self._console = stderr_console()
        self._progress = stderr_console(quiet)
        self._in_file: list[dict[str, str]] = []  # the messages that are in a file

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def attach(self, text: str) -> int:
        """Attach a document; the number of its tokens."""
        now = self.conversation
        # Not `now.attach`: after Ctrl-C the thread goes on, and would attach it all the same.
        n_tokens = waited_for(self._progress, TOKENISING, partial(now.count, text))
        now.attached.append(text)
        tell_if_too_long(
            self._progress,
            now.model,
            n_tokens,
            len(now.read),
            policy=now.policy,
            memory=now.memory,
            verify=now.verify,
            far=now.far,
            **now.generation,
        )
        return n_tokens

    def answer(self, text: str) -> None:
        """Send a message, and print the answer as it comes."""
        bar = PrefillBar(self._progress)
        last = None
        now = self.conversation
        n_before = len(now.read)
        cost = partial(_long_turn, now, n_before)
        send = partial(now.send, text, telling_cost(self._progress, cost, bar.update))
        responses: Any = waited_for(self._progress, TOKENISING, send)
        try:
            for last in responses:
                print(last.text, end="", flush=True)
        finally:
            responses.close()  # now, and not when it is collected: it may have been interrupted
            bar.close()
            if last is not None:
                print(flush=True)
                self.speed = f"prompt {last.prompt_tps:.1f} tokens/s, generation {last.generation_tps:.1f} tokens/s"

    @property
    def ways(self) -> str:
        """The conversation's policy and memory."""
        now = self.conversation
        verified = f", verify {now.verify}" if now.verify else ""
        far = f", far {now.far}" if now.far else ""
        return f"policy {now.policy or 'none'}, memory {now.memory}{verified}{far}"

    @property
    def waiting(self) -> str:
        """What was attached and is still to be read."""
        n = len(self.conversation.attached)
        if not n:
            return ""
        them = "the document" if n == 1 else f"the {n} documents"
        return f", and {them} will be read with your next message"

    def name_of(self, document: str) -> str:
        """The name of a document's file; how it begins if a saved conversation brought it."""
        start = " ".join(document[:200].split())
        return self.names.get(document) or f"“{start if len(start) <= 40 else start[:39] + '…'}”"

    def saved(self) -> None:
        """Take note that the conversation is in a file."""
        self._in_file = self.conversation.messages

    def may_replace(self) -> bool:
        """Whether the conversation may be lost: it is in a file, or the user at the terminal agrees."""
        lost = bool(self.conversation.said) and self.conversation.messages != self._in_file
        if not lost or not self.lines.interactive:
            return True
        if self.lines.agree("This conversation is not saved: replace it?"):
            return True
        self.say("the conversation goes on")
        return False

    def replace(self, conversation: Conversation) -> None:
        """Go on with another conversation."""
        self.conversation = conversation
        self.saved()

    def start_again(self, **changes: Any) -> None:
        """Forget the conversation, and what the file it came from may have brought with it."""
        now = self.conversation
        options = {"system": now.system, "policy": self.policy_wanted} | changes
        options |= {"refresh": now.refresh, "far": now.far}
        if options["policy"] is not None and self.memory_wanted != "drop":
            options["verify"] = now.verify
        self.replace(
            Conversation(
                now.model, now.tokenizer, memory=self.memory_wanted, **options, **now.generation
            )
        )
        self.policy_wanted = self.conversation.policy

    def sample(self, sampling: SamplingOptions) -> None:
        """Sample answers this way from now on."""
        self.sampling = sampling
        self.conversation.generation.update(sampling.generation(self.conversation.tokenizer))


def _long_turn(conversation: Conversation, n_before: int, n_new: int) -> BookCost | None:
    """What a turn will cost that reads more of a book than a block."""
    policy = conversation.policy
    if policy is None or n_new <= policy.stages[0].block:
        return None
    return book_cost(conversation.model, policy, conversation.memory, n_new, n_before=n_before)


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
