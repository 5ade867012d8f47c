import json
from pathlib import Path

import pytest

from mlx_snapkv.policies import POLICIES, resolve_policy
from scripts.measure_quality import SHARES, SLACK, ways
from scripts.quality_page import page

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("length", [1024, 2048, 4096])
@pytest.mark.parametrize("share", SHARES)
def test_every_policy_is_measured_under_both_schedules_and_has_room(share, length):
    found = ways(share, length)
    assert {(name, s) for name, cls in POLICIES.items() for s in cls.schedules} <= set(found)
    for (_, schedule), text in found.items():
        prefill_policy, decode_policy = resolve_policy(policy=text).stages
        assert schedule.endswith(decode_policy.schedule)
        assert schedule.startswith(prefill_policy.schedule)
        assert decode_policy.quotas(length, 3)[0].entries == length // share
        resolve_policy(policy=text).prefill_quotas(length - SLACK, 3)


def row(way, schedule, share, right, reason=None):
    return {
        "model": "demo",
        "length": 2048,
        "way": way,
        "schedule": schedule,
        "share": share,
        "right": right,
        "asked": 20,
        "reason": reason,
    }


def test_the_page_has_a_row_a_policy_and_schedule():
    about = {"command": "c", "date": "d", "commit": "x", "machine": "m", "versions": {"mlx": "1"}}
    about |= {"block": 256, "depths": 5, "needles": 4, "questions": 4}
    rows = [
        row("full cache", "", 1, 20),
        row("tova", "once", 8, 15),
        row("tova", "block", 8, 5),
        row("tova", "once", 4, 20),
        row("tova", "block", 4, 0, reason="it fits"),
    ]
    lines = page(about | {"rows": rows}).splitlines()
    assert lines[-6:] == [
        "Full cache: 1.00.",
        "",
        "| policy | schedule | 1/4 of the entries | 1/8 of the entries |",
        "| --- | --- | ---: | ---: |",
        "| tova | once | 1.00 | 0.75 |",
        "| tova | block | not compressed | 0.25 |",
    ]


def test_the_page_in_the_docs_is_its_result():
    if not (DOCS / "quality.json").exists():
        pytest.skip("not measured yet: python scripts/measure_quality.py")
    result = json.loads((DOCS / "quality.json").read_text(encoding="utf-8"))
    assert (DOCS / "quality.md").read_text(encoding="utf-8") == page(result)
