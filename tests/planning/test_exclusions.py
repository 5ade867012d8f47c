"""Every row of the table of exclusions refuses its options, at its time, in one sentence."""

import re
from types import SimpleNamespace

import pytest

from mlx_snapkv import SnapKVError
from mlx_snapkv.compress.options import Compress
from mlx_snapkv.planning.config import CompressionConfig
from mlx_snapkv.planning.exclusions import EXCLUSIONS, When, require_compatible
from mlx_snapkv.planning.settings import setting_named

REFUSED = [  # rows have the order of the table
    ("sparse", {"kv_bits": 4}),
    ("snapkv", {"store": "memory"}),
    ("sparse", {"draft_model": object()}),
    ("snapkv", {"max_kv_size": 9}),
    ("snapkv", {"kv_bits": 4, "draft_model": object()}),
    ("h2o", {"draft_model": object()}),
    (None, {"store": "file"}),
]


def _required(policy, options, when):
    more = {name: options[name] for name in ("is_text",) if name in options}
    given = {name: value for name, value in options.items() if name not in more}
    config, _ = CompressionConfig.from_keywords(given | {"policy": policy}, **more)
    require_compatible(config, when)


@pytest.mark.parametrize("exclusion, refused", list(zip(EXCLUSIONS, REFUSED, strict=True)))
def test_each_row_refuses_and_says_what_to_change(exclusion, refused):
    method, options = refused
    policy = None if method is None else setting_named(method)
    with pytest.raises(SnapKVError) as error:
        _required(policy, options, exclusion.when)
    said = str(error.value)
    compress = policy if isinstance(policy, Compress) else None
    named = {"store": None, "compress": compress} | options
    assert said == str(exclusion.error(SimpleNamespace(**named)))
    assert any(name in said for name in exclusion.names) and re.search("drop |give |use ", said)
    if exclusion.when > When.GIVEN:
        _required(policy, options, When(exclusion.when - 1))
