"""The server's log says which prompts will not fit this machine."""

import logging

from server_helpers import serving

from mlx_snapkv.planning import fit
from mlx_snapkv.planning.machine import Machine


def test_a_long_prompt_is_told_and_answered(monkeypatch, caplog):
    monkeypatch.setattr(fit, "this_machine", lambda: Machine(10**7, 10**7))
    with caplog.at_level(logging.WARNING, "mlx_snapkv.server"), serving() as server:
        for n, told in ((5, 0), (900, 1)):
            body = {"prompt": [5 + i % 60 for i in range(n)], "max_tokens": 1}
            assert server.post("/v1/completions", body).status_code == 200
            warnings = [r.getMessage() for r in caplog.records if "this machine" in r.getMessage()]
            assert len(warnings) == told
    assert warnings[0].startswith("900 tokens will take about")
