"""The speed of a drafted answer, by a clock that the test sets."""

import time

from mlx_lm.generate import GenerationResponse

from mlx_snapkv.engine.draft_speed import UNTIMED, timed_rounds

ROUNDS = [[True, True, False], [True, False], [False], [True, True, False]]
SECONDS = 0.5  # a round
CALL = 1e-6  # between two tokens of one


def test_the_tokens_of_the_first_round_are_the_prompts(monkeypatch):
    """Of mlx-lm's own figure they would be made in no time, which are thousands of tokens a second."""
    clock = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def responses():
        n = 0
        for drafted in ROUNDS:
            clock[0] += SECONDS
            for from_draft in drafted:
                n += 1
                clock[0] += CALL
                yield GenerationResponse("", 5, None, from_draft, 9, 30.0, n, n / CALL, 0.0, None)

    speeds = [response.generation_tps for response in timed_rounds(responses())]
    assert speeds[:3] == [UNTIMED] * 3
    assert abs(speeds[-1] - 6 / (3 * SECONDS)) < 0.01 and max(speeds) < 5
