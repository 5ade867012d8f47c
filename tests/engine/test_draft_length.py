"""How many tokens are drafted, on a clock of the test's own: seconds are in tokens of the full cache."""

import random

import pytest

from mlx_snapkv.engine.draft_length import AT_FIRST, MEASURE_EVERY, MOST_DRAFTS, DraftLength


def answered(n_tokens, accepted, draft, further, seed=0, noise=0.0):
    """The rule after an answer of which this share of drafts is accepted, its speed, and its rounds' drafts."""
    chance, length, seconds, n, rounds = random.Random(seed), DraftLength(), 0.0, 0, []

    def takes(least):
        return least * (1 + noise * chance.random())

    while n < n_tokens:
        drafts = length.next()
        right = next((i for i in range(drafts) if chance.random() >= accepted), drafts)
        took = takes(draft * drafts), takes(1 + further * drafts)
        length.took(drafts, *took)
        length.yielded(drafts, right)
        seconds, n = seconds + sum(took), n + 1 + right
        rounds.append(drafts)
    return length, n * (1 + noise / 2) / seconds, rounds


COSTS = [(0.95, 0.9), (0.9, 0.2), (0.6, 0.9), (0.55, 0.15), (0.4, 0.1), (0.1, 0.05)]


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize(("draft", "further"), COSTS)
@pytest.mark.parametrize("accepted", [0.0, 0.5, 0.7, 0.9, 0.98, 1.0])
def test_it_is_never_much_slower_than_the_full_cache(accepted, draft, further, noise):
    speeds = [answered(200, accepted, draft, further, i, noise)[1] for i in range(20)]
    assert sum(speeds) / len(speeds) > 0.95


@pytest.mark.parametrize("accepted", [0.8, 0.9, 0.98])
def test_it_is_near_the_best_length_that_does_not_change(accepted):
    for draft, further in [(0.55, 0.15), (0.4, 0.1), (0.1, 0.05)]:
        step = draft + further
        speeds = [
            sum(accepted**i for i in range(n + 1)) / (1 + n * step) for n in range(MOST_DRAFTS + 1)
        ]
        found = [answered(1000, accepted, draft, further, i)[1] for i in range(20)]
        assert sum(found) / len(found) > 0.9 * max(speeds)


def test_longer_while_all_are_accepted_and_shorter_behind_mistakes():
    length = DraftLength()
    lengths = []
    for accepts_all in [True] * 50 + [False] * 4:
        drafts = length.next()
        length.took(drafts, 0.5 * drafts, 1 + 0.1 * drafts)
        length.yielded(drafts, drafts if accepts_all else 0)
        lengths.append(drafts)
    grown = [n for n in lengths[AT_FIRST + 3 : 50] if n]  # behind the probes
    assert grown == sorted(grown) and grown[-1] == MOST_DRAFTS
    assert 0 < length.next() < MOST_DRAFTS


def test_it_stops_soon_where_drafts_can_not_pay_and_for_good():
    """Where a draft and its part of the pass take longer than a token of the full cache, and where none is right."""
    length, _, rounds = answered(60, 1.0, 0.95, 0.3)
    assert length.stopped and rounds[AT_FIRST : AT_FIRST + 2] == [1, 1]
    assert not any(rounds[:AT_FIRST] + rounds[AT_FIRST + 2 :])
    length, _, rounds = answered(60, 0.0, 0.4, 0.1)
    assert length.stopped and not any(rounds[-20:])


def test_a_short_answer_is_the_full_caches_own():
    """Whatever drafts would gain, they can't make up for the probes."""
    _, speed, rounds = answered(AT_FIRST, 1.0, 0.1, 0.05)
    assert speed == 1 and not any(rounds)


def test_a_slow_moment_does_not_stop_it():
    """Neither of its drafts, nor when all that was known of the full cache is that it was faster."""
    length, _, _ = answered(100, 0.98, 0.4, 0.1)
    length.took(4, 40, 100)
    assert length.next() > 0
    for _ in range(3):
        length.took(4, 8, 10)
    lengths = []
    for _ in range(12):
        lengths.append(length.next())
        length.took(lengths[-1], 2 * lengths[-1], 5 + 0.1 * lengths[-1])
    assert lengths[:3] == [0, 0, 0] and lengths[4] > 1


def test_the_full_cache_is_measured_again_now_and_then():
    _, _, rounds = answered(10 * MEASURE_EVERY, 1.0, 0.1, 0.1)
    assert 5 < rounds.count(0) < 20
