"""How fast a drafted answer comes: mlx-lm's loop yields the tokens of a round at once, the first when it is over."""

import dataclasses
import time
from collections.abc import Iterable, Iterator

from mlx_lm.generate import GenerationResponse

UNTIMED = 0.0  # tokens a second of an answer that is too short to be timed


def timed_rounds(responses: Iterable[GenerationResponse]) -> Iterator[GenerationResponse]:
    """The responses with the speed of the rounds after the first, whose time counts as the prompt's."""
    started, n_first, in_first = 0.0, 0, True
    for response in responses:
        now = time.perf_counter()
        started = started or now
        tps = UNTIMED
        if in_first:
            n_first = response.generation_tokens
        else:
            tps = (response.generation_tokens - n_first) / (now - started)
        in_first = in_first and response.from_draft  # a round ends with a token of the main model's
        yield dataclasses.replace(response, generation_tps=tps)
