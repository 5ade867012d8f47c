"""Split an answer into text, reasoning and tool calls as it is generated."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tool_parsers import json_tools

from .request import CompletionRequest
from .tool_calls import ends_within_argument, parse_tool_calls

# Maximum number of end markers to try as the end of a call. A model may repeat a marker endlessly.
MAX_END_MARKERS = 16
Segment = tuple[str, str]  # (state of mlx-lm's `TextStateMachine`, text)


@dataclass
class Reply:
    """An answer, or part of one.

    Attributes:
        calls: tool calls in OpenAI's format.
    """

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


class AnswerParser:
    """Splits an answer at the model's reasoning and tool-call markers, and parses the calls.

    mlx-lm's `TextStateMachine` finds the markers. This class adds four rules:

    - A marker inside a call's argument is part of the argument.
    - A marker inside the required JSON is text.
    - A call inside reasoning does not end the reasoning.
    - A call that can't be parsed is text, or reasoning if the call is complete and inside reasoning.

    Attributes:
        state: state of the last segment: "normal", "reasoning", "tool", or another state that the tokenizer defines.
    """

    def __init__(self, request: CompletionRequest, tokenizer):
        """Start in the request's initial state, with no text."""
        answer_format = request.constraint.format if request.constraint else None
        continues_json = answer_format is not None and bool(answer_format.prefill)
        self.state = request.initial_state
        self._tools = request.tools
        # An answer of the kind "call" (see `AnswerFormat`) has no call markers, so everything outside reasoning is the
        # call.
        self._answer_is_call = answer_format is not None and answer_format.kind == "call"
        self._tool_parser = (
            json_tools.parse_tool_call if self._answer_is_call else tokenizer.tool_parser
        )
        self._call_start_marker = tokenizer.tool_call_start
        self._call_end_marker = tokenizer.tool_call_end
        # True until the required JSON, or a tool call in its place, starts.
        self._awaits_json = answer_format is not None and not continues_json
        # Text completions and answers that continue JSON have no markers.
        has_markers = request.chat and not continues_json
        self._machine = make_text_state_machine(tokenizer) if has_markers else TextStateMachine()
        # mlx-lm represents the machine's state as a tuple: (state, trie node, all states, held-back text).
        self._machine_state = self._machine.make_state(request.initial_state)
        self._call_text = ""  # text of the current call
        self._call_is_in_reasoning = False

    def parse(self, text: str, is_last: bool) -> list[Reply]:
        """Parse the next piece of text, and return the parts of the answer that can no longer change.

        Text that may be the start of a marker is held back, and a call is held back until it ends. If `is_last`,
        nothing is held back.
        """
        parts: list[Reply] = []
        state_after_text, segments = TextStateMachine.split(self._machine_state, text)
        has_call_text = any(state == "tool" for state, _ in segments)
        may_end_call = has_call_text and bool(self._call_end_marker)
        # The machine splits at every marker, but a marker in a call's argument or in the required JSON is text. So
        # discard the segments and split one character at a time. `_split_character` corrects the machine's state.
        if may_end_call or self._begins_json(segments):
            for character in text:
                parts += self._add_segments(self._split_character(character))
        else:
            self._machine_state = state_after_text
            parts += self._add_segments(segments)
        if is_last:
            _, held_back, state = TextStateMachine.flush(self._machine_state)
            parts += self._add_segments([(state, held_back)])
            if self._call_text:
                parts += self._end_unfinished_call()
        return parts

    def _add_segments(self, segments: Sequence[Segment]) -> list[Reply]:
        """Append call text to the current call. Return all other text, and the calls that have ended."""
        parts: list[Reply] = []
        for state, text in segments:
            self.state = state
            is_call_text = state == "tool" or (state == "normal" and self._answer_is_call)
            if is_call_text:
                self._call_text += text
                continue
            parts += self._end_call()
            if text and state == "reasoning":
                parts.append(Reply(reasoning=text))
            elif text:
                parts.append(Reply(text))
        return parts

    def _split_character(self, character: str) -> list[Segment]:
        """Feed the next character to the machine, and return the new segments.

        An end marker that is part of an argument does not end the call. Once the required JSON has started, markers are
        text. A tool call replaces the required JSON, so no JSON is expected once a call has started.
        """
        state_before, *_ = self._machine_state
        self._machine_state, segments = TextStateMachine.split(self._machine_state, character)
        state_after, *_ = self._machine_state
        starts_call = state_after == "tool" and state_before != "tool"
        ends_call = state_before == "tool" and state_after != "tool"
        if starts_call:
            self._call_is_in_reasoning = state_before == "reasoning"
            self._awaits_json = False
        elif ends_call:
            segments = self._correct_call_end(segments)
        if self._begins_json(segments):
            segments = [*segments, *self._drop_markers()]
            self._awaits_json = False
        return segments

    def _correct_call_end(self, segments: list[Segment]) -> list[Segment]:
        """Return the corrected segments at a call's end marker, and set the state after the marker.

        If the marker is part of an argument, the call continues. After a call within reasoning, the reasoning
        continues.
        """
        _, last_call_text = segments[0]
        if ends_within_argument(self._call_text + last_call_text, self._tool_parser):
            self._machine_state = self._machine.make_state("tool")
            return [("tool", last_call_text + self._call_end_marker)]
        if self._call_is_in_reasoning:
            self._machine_state = self._machine.make_state("reasoning")
        return segments

    def _drop_markers(self) -> list[Segment]:
        """Switch to a machine without markers, and return the segments of the held-back text."""
        *_, held_back = self._machine_state
        state_without_markers = TextStateMachine().make_state()
        self._machine_state, segments = TextStateMachine.split(state_without_markers, held_back)
        return segments

    def _begins_json(self, segments: Sequence[Segment]) -> bool:
        """Return whether the segments contain the first character of the required JSON."""
        return self._awaits_json and any(
            state == "normal" and text.strip() for state, text in segments
        )

    def _end_call(self, is_complete: bool = True) -> list[Reply]:
        """End the current call, if any. Return the parsed calls, or the call's text if it can't be parsed.

        The text is returned as reasoning if the call is complete and inside reasoning. `is_complete` is False if the
        answer ended without the call's end marker.
        """
        call_text = self._call_text
        self._call_text = ""
        if not call_text:
            return []
        calls = self._parse_calls(call_text, is_complete)
        if calls:
            return [Reply(calls=calls)]
        if is_complete and self._call_is_in_reasoning:
            return [Reply(reasoning=call_text)]
        return [Reply(call_text)]

    def _parse_calls(self, call_text: str, is_complete: bool) -> list[dict[str, Any]]:
        """Parse the text after a call's start marker, which small models sometimes write twice."""
        marker = self._call_start_marker
        has_second_marker = bool(marker) and call_text.lstrip().startswith(marker)
        if has_second_marker:
            call_text = call_text.lstrip().removeprefix(marker)
        return parse_tool_calls(call_text, self._tool_parser, self._tools, is_complete)

    def _end_unfinished_call(self) -> list[Reply]:
        """End the call that is still open when the answer ends, and return the answer's last parts.

        So far, end markers in the call's text were treated as part of an argument. If the whole text is not a valid
        call, one of these markers was the real end. Use the first marker whose preceding text is a valid call, or
        else the first marker. The text after the marker is parsed again.
        """
        call_text = self._call_text
        marker = self._call_end_marker  # empty if the model's calls have no end marker
        marker_positions = _positions_of(marker, call_text) if marker else []
        if self._answer_is_call or not marker_positions:
            return self._end_call(is_complete=False)
        if self._parse_calls(call_text, is_complete=False):
            return self._end_call(is_complete=False)
        call_end = marker_positions[0]
        for position in marker_positions[:MAX_END_MARKERS]:
            if self._parse_calls(call_text[:position], is_complete=True):
                call_end = position
                break
        text_after_call = call_text[call_end + len(marker) :]
        self._call_text = call_text[:call_end]
        self._machine_state = self._machine.make_state()  # outside the call
        # If there is no text before the marker, `_end_call` returns an empty list. The marker itself is then text.
        parts = self._end_call() or [Reply(marker)]
        return parts + self.parse(text_after_call, is_last=True)


def _positions_of(part: str, text: str) -> list[int]:
    """Return the positions at which `part` starts in `text`."""
    return [match.start() for match in re.finditer(re.escape(part), text)]
