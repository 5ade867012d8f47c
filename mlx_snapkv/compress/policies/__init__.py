"""The eviction policies, one per file."""

import importlib
import pkgutil

from ...errors import Option, SnapKVError, UnknownOptionError, suggestion
from ..policy import POLICIES, Policy

# Policies are listed in the order of these imports.
# isort: off
from .snapkv import SnapKV as SnapKV
from .keydiff import KeyDiff as KeyDiff
from .streaming_llm import StreamingLLM as StreamingLLM
from .h2o import H2O as H2O
from .tova import TOVA as TOVA
from .key_norm import KeyNorm as KeyNorm
from .lagkv import LagKV as LagKV
from .expected_attention import ExpectedAttention as ExpectedAttention
from .scissorhands import ScissorHands as ScissorHands
from .random_eviction import RandomEviction as RandomEviction

# isort: on

# Import all other files, in alphabetical order, to register their policies.
for _name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_name}")


def policy_named(text: str) -> Policy:
    """Parse a policy from a string such as `"keydiff:budget=8192"`. Raises: SnapKVError: the string is invalid."""
    name, _, options = (part.strip() for part in text.partition(":"))
    if name == "sparse":
        raise SnapKVError(
            "sparse is not a policy, since it evicts nothing: give {}, for example",
            Option("sparse", "top_k=2048"),
        )
    if name not in POLICIES:
        raise UnknownOptionError(
            f"unknown policy {name!r}{suggestion(name, POLICIES)}; known: {', '.join(POLICIES)} (mlx-snapkv policies)"
        )
    return POLICIES[name].from_string(options)
