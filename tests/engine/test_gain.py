"""What was no gain is told: a setting that is slower, or bigger, than the full cache."""

import dataclasses

from tiny_models import make_llama

from mlx_snapkv import generate_step
from mlx_snapkv.engine.report import CompressionReport

GAINED = CompressionReport(
    "snapkv", 1000, kv_bytes_before=9, kv_bytes_after=8, full_token_seconds=2.0, token_seconds=1.0
)


def test_only_what_is_no_gain_is_told():
    assert GAINED.warnings == []
    slow, large = {"token_seconds": 4.0}, {"kv_bytes_after": 10}
    (said,) = dataclasses.replace(GAINED, **slow).warnings
    assert said.startswith("0.50 times as fast as the full cache")
    assert "more memory" in dataclasses.replace(GAINED, **large).warnings[0]
    assert dataclasses.replace(GAINED, full_token_seconds=None, **slow).warnings == []


def test_tokens_before_and_after_the_compression_are_timed(tokens):
    reports = []
    policy = "snapkv:budget=60,n_window=16,lookahead=12"
    asked = {"policy": policy, "on_report": reports.append}
    steps = generate_step(tokens, make_llama(), max_tokens=30, **asked)
    for n, _ in enumerate(steps, start=1):
        if n == 14:
            assert reports[0].full_token_seconds > 0 and reports[0].token_seconds is None
    assert reports[0].token_seconds > 0
