"""The eviction policies, one file each, and how a request names one."""

import importlib
import pkgutil
from typing import Any

from ..errors import SnapKVError, UnknownOptionError
from .base import POLICIES, Policy, suggestion
from .stages import THEN, Stages

# The registry, and so every list of the policies, is in the order of these imports; SnapKV is the first.
# isort: off
from .snapkv import SnapKV
from .keydiff import KeyDiff as KeyDiff
from .streaming_llm import StreamingLLM as StreamingLLM
from .h2o import H2O as H2O
from .tova import TOVA as TOVA
from .key_norm import KeyNorm as KeyNorm
from .lagkv import LagKV as LagKV
from .expected_attention import ExpectedAttention as ExpectedAttention
from .scissorhands import ScissorHands as ScissorHands
from .kvzip import KVzip as KVzip
from .random_rows import RandomRows as RandomRows
# isort: on

# A policy is its file: those that no import above names follow, in the order of their files' names.
for _name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_name}")


def resolve_policy(
    snapkv: SnapKV | dict[str, Any] | str | bool | None = None,
    policy: Policy | Stages | str | None = None,
) -> Policy | Stages | None:
    """The policy that the two keywords of `generate_step` ask for, or None.

    Args:
        snapkv: a `SnapKV`, a dict of its options, `"top_k=4096,n_sink=128"`, or True for the defaults.
        policy: a policy object, or a string such as `"keydiff:budget=8192"`, or two of them joined by
            " then ".

    Raises:
        SnapKVError: both are given, or one can't be read.
    """
    if snapkv is False:
        snapkv = None
    if snapkv is not None and policy is not None:
        raise SnapKVError("snapkv and policy both name a policy: give only one of them")
    if policy is not None:
        return _from_policy(policy)
    if snapkv is None or isinstance(snapkv, SnapKV):
        return snapkv
    if snapkv is True:
        return SnapKV()
    if isinstance(snapkv, dict):
        return SnapKV.from_options(snapkv)
    if isinstance(snapkv, str):
        return SnapKV.from_string(snapkv)
    raise SnapKVError(f"snapkv must be a SnapKV, a dict or a string, got {type(snapkv).__name__}")


def _from_policy(policy: Policy | Stages | str) -> Policy | Stages:
    if isinstance(policy, (Policy, Stages)):
        return policy
    if not isinstance(policy, str):
        raise SnapKVError(
            f"policy must be a policy object or a string, got {type(policy).__name__}"
        )
    stages = [_from_name(part.strip()) for part in policy.split(THEN)]
    if len(stages) > 2:
        raise SnapKVError(
            f"at most two policies can follow each other, got {len(stages)} in {policy!r}"
        )
    return stages[0] if len(stages) == 1 else Stages(*stages)


# Their heads keep different numbers of entries: to store them, every head would be padded to the longest.
BY_MASK = ("adakv", "fastgen")


def _from_name(text: str) -> Policy:
    name, _, options = text.partition(":")
    name = name.strip()
    if name.partition(" ")[0] in BY_MASK:
        raise SnapKVError(
            f"{name.partition(' ')[0]} can't be used to answer: its heads keep different numbers of entries, which "
            "saves nothing when they are stored together; give budget=adaptive, or measure it: mlx-snapkv eval suite "
            "--by-mask"
        )
    if name not in POLICIES:
        close = suggestion(name, POLICIES)
        raise UnknownOptionError(
            f"unknown policy {name!r}{close}; known: {', '.join(POLICIES)} (mlx-snapkv policies)"
        )
    return POLICIES[name].from_string(options)
