"""Assemble an answer from its tokens: text, reasoning, tool calls and finish reason."""

from mlx_lm.generate import TextStateMachine
from mlx_lm.tokenizer_utils import StreamingDetokenizer

from .answer_parser import AnswerParser, Reply
from .request import CompletionRequest


class Completion:
    """The answer to one request, assembled as its tokens arrive.

    Stop strings are matched against text rather than tokens, because the same text can be tokenised in several ways.
    They are ignored in reasoning and in tool calls.

    Attributes:
        reply: the answer so far.
        n_tokens: number of tokens so far, including the end-of-answer token.
        n_reasoning: number of reasoning tokens so far, including the end marker.
        finish_reason: None until the answer ends, then "stop", "length", "tool_calls", or "function_call" (for clients
            that send `functions`).
    """

    def __init__(self, request: CompletionRequest, tokenizer):
        """Start an empty answer, in the request's initial state."""
        self.request = request
        self.reply = Reply()
        self.n_tokens = self.n_reasoning = 0
        self.finish_reason: str | None = None
        self._parser = AnswerParser(request, tokenizer)
        self._detokenizer = _new_detokenizer(tokenizer, not request.chat or bool(request.prefill))
        self._stop_matcher = StopMatcher(request.stop)

    @property
    def stopped_by(self) -> str | None:
        """Return the stop string that ended the answer, or None."""
        return self._stop_matcher.matched_stop

    def add(self, token: int, finish_reason: str | None) -> list[Reply]:
        """Add a token, and return the parts of the answer that can no longer change.

        `finish_reason` is mlx-lm's finish reason, which is None for all tokens except the last. A stop string can end
        the answer before mlx-lm does.
        """
        is_last = finish_reason is not None
        self.n_tokens += 1
        # Count before parsing: the end marker counts as reasoning, but parsing it ends the reasoning state.
        if self._parser.state == "reasoning":
            self.n_reasoning += 1
        if finish_reason != "stop":  # the end-of-answer token has no text
            self._detokenizer.add_token(token)
        if is_last:
            self._detokenizer.finalize()
        parts = self._parser.parse(self._detokenizer.last_segment, is_last)
        if self.request.stop:
            parts = self._parts_before_stop(parts, is_last)
        for part in parts:
            self.reply.text += part.text
            self.reply.reasoning += part.reasoning
            self.reply.calls += part.calls
        if self.stopped_by is not None:
            finish_reason = "stop"
        self.finish_reason = self._api_finish_reason(finish_reason)
        return parts

    def _parts_before_stop(self, parts: list[Reply], is_last: bool) -> list[Reply]:
        """Return the parts before the first stop string, holding back text that may be the start of one."""
        certain_parts: list[Reply] = []
        follows_reasoning = bool(self.reply.reasoning) and not self.reply.text.strip()
        for part in parts:
            if not part.text:  # reasoning or calls, which a stop string can't span
                certain_parts += [*self._flush_held_back(), part]
                continue
            # Whitespace between reasoning and text belongs to neither, so stop strings don't apply to it.
            is_between_reasoning_and_text = follows_reasoning and not part.text.strip()
            if is_between_reasoning_and_text:
                certain_parts.append(part)
                continue
            certain_text = self._stop_matcher.add(part.text)
            if certain_text:
                certain_parts.append(Reply(certain_text))
            if self._stop_matcher.matched_stop is not None:
                return certain_parts
        if is_last:
            certain_parts += self._flush_held_back()
        return certain_parts

    def _flush_held_back(self) -> list[Reply]:
        """Return the held-back text, which turned out not to start a stop string."""
        held_back = self._stop_matcher.flush()
        return [Reply(held_back)] if held_back else []

    def _api_finish_reason(self, finish_reason: str | None) -> str | None:
        """Convert mlx-lm's finish reason to the API's."""
        constraint = self.request.constraint
        if finish_reason != "stop":
            return finish_reason
        if constraint is not None and constraint.closed_early:
            return "length"
        if self.reply.calls:
            return "function_call" if self.request.uses_functions else "tool_calls"
        return "stop"


class StopMatcher:
    """Finds the first stop string in text that arrives in pieces.

    Args:
        stop: the stop strings.

    Attributes:
        matched_stop: the stop string that was found, or None.
    """

    def __init__(self, stop: list[str]):
        """Start with no text."""
        self._machine = TextStateMachine({"normal": [(text, None) for text in stop]})
        # mlx-lm represents the machine's state as a tuple: (state, trie node, all states, held-back text).
        self._state = self._machine.make_state()
        self.matched_stop: str | None = None

    def add(self, text: str) -> str:
        """Add text, and return the text that is certain to precede any stop string.

        The end of the text is held back if it may be the start of a stop string. Once a stop string is complete,
        `matched_stop` is set.
        """
        *_, held_back = self._state
        open_text = held_back + text
        self._state, segments = TextStateMachine.split(self._state, text)
        _, text_before_stop = segments[0]
        state, *_, text_after_stop = self._state
        is_complete = state is None  # a stop string leads to the state None
        if is_complete:
            stop_start = len(text_before_stop)
            stop_end = len(open_text) - len(text_after_stop)
            self.matched_stop = open_text[stop_start:stop_end]
        return text_before_stop

    def flush(self) -> str:
        """Return the text that `add` held back, and reset the matcher."""
        _, held_back, _ = TextStateMachine.flush(self._state)
        self._state = self._machine.make_state()
        return held_back


def _new_detokenizer(tokenizer, continues_text: bool) -> StreamingDetokenizer:
    """Return a new detokenizer. If `continues_text`, it keeps the leading space of the answer.

    A detokenizer drops the space before its first word. To keep the space, a dummy word is decoded first.
    """
    detokenizer = tokenizer.detokenizer
    if continues_text:
        *_, dummy_token = tokenizer.encode("a", add_special_tokens=False)
        detokenizer.add_token(dummy_token)
        _ = detokenizer.last_segment  # reading the segment discards the dummy word
    return detokenizer
