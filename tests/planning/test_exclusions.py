"""Every row of the table of exclusions: options that it refuses, from when on, and what it says of them."""

import re

import pytest

from mlx_snapkv import SnapKVError
from mlx_snapkv.planning.config import CompressionConfig
from mlx_snapkv.planning.exclusions import EXCLUSIONS, When, require_compatible
from mlx_snapkv.policies import method_named

REFUSED = [  # in the table's order
    ("sparse", {"verify": "all", "memory": "recall:file"}),
    ("sparse", {"kv_bits": 4}),
    ("keydiff", {"memory": "recall"}),
    ("h2o:schedule=once", {"memory": "recall"}),
    ("kvzip", {"memory": "recall:4bit"}),
    ("sparse", {"draft_model": object()}),
    ("snapkv", {"memory": "recall:8bit", "draft_model": object()}),
    ("snapkv", {"verify": "all"}),
    (None, {"verify": "all"}),
    ("snapkv", {"max_kv_size": 9}),
    ("snapkv", {"kv_bits": 4, "draft_model": object()}),
    ("h2o", {"draft_model": object()}),
    (None, {"memory": "recall", "is_text": True}),
    ("snapkv", {"memory": "recall", "is_text": True}),
]


def _required(method, options, when):
    more = {name: options[name] for name in ("is_text",) if name in options}
    given = {name: value for name, value in options.items() if name not in more}
    policy = None if method is None else method_named(method)
    config, _ = CompressionConfig.taken_from(given | {"policy": policy}, **more)
    require_compatible(config, when)


@pytest.mark.parametrize("exclusion, refused", list(zip(EXCLUSIONS, REFUSED, strict=True)))
def test_each_row_refuses_and_says_what_to_change(exclusion, refused):
    with pytest.raises(SnapKVError) as error:
        _required(*refused, exclusion.when)
    pattern = re.sub(r"\\\{o\S+?\\\}", ".+", re.escape(exclusion.sentence))
    assert re.fullmatch(pattern, str(error.value)), error.value
    if exclusion.when > When.GIVEN:
        _required(*refused, When(exclusion.when - 1))
