"""The eviction policies, one file each, and how a request names one."""

from __future__ import annotations

from typing import Any

from ..errors import SnapKVError, UnknownOptionError
from ..votes import Rows
from .base import Policy
from .snapkv import SnapKV

POLICIES: dict[str, type[Policy]] = {cls.name: cls for cls in (SnapKV,)}

__all__ = ["POLICIES", "Policy", "Rows", "SnapKV", "resolve_policy"]


def resolve_policy(
    snapkv: SnapKV | dict[str, Any] | str | bool | None = None, policy: Policy | str | None = None
) -> Policy | None:
    """The policy that the two keywords of `generate_step` ask for, or None.

    Args:
        snapkv: a `SnapKV`, a dict of its options, `"top_k=4096,n_sink=128"`, or True for the defaults.
        policy: a policy object, or a string such as `"snapkv:top_k=4096"`.

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


def _from_policy(policy: Policy | str) -> Policy:
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        raise SnapKVError(
            f"policy must be a policy object or a string, got {type(policy).__name__}"
        )
    name, _, options = policy.partition(":")
    if name not in POLICIES:
        raise UnknownOptionError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name].from_string(options)
