"""The setting of a request: a policy evicts entries, or sparse attention keeps all entries and reads few of them."""

from typing import Any

from ..compress.options import Compress
from ..compress.policies import SnapKV
from ..compress.policy import Policy
from ..errors import Option, SnapKVError
from ..sparse.options import Sparse

AUTO = "auto"  # the value of `policy` that leaves the choice to `planning/auto.py`

Setting = Compress | Sparse


def asks_for_auto(snapkv: Any = None, policy: Any = None) -> bool:
    """Return whether the keywords of `generate_step` ask for "auto". Raises: SnapKVError: both are given."""
    if snapkv is None or snapkv is False:
        return isinstance(policy, str) and policy.strip() == AUTO
    if policy is not None:
        raise SnapKVError(
            "{} and {} both name a policy: give only one", Option("snapkv"), Option("policy")
        )
    return snapkv is True


def resolve_setting(
    snapkv: SnapKV | dict[str, Any] | str | bool | None = None,
    policy: Policy | Setting | str | None = None,
    sparse: Sparse | dict[str, Any] | str | bool | None = None,
) -> Setting | None:
    """Return the setting that the three keywords of `generate_step` ask for, or None.

    Raises: SnapKVError: two are given, or one can't be read.
    """
    if isinstance(policy, Sparse):  # a setting that was resolved before
        return policy
    compress = resolve_compress(snapkv, policy)
    sparse_setting = Sparse.from_keyword(sparse)
    if compress is not None and sparse_setting is not None:
        raise SnapKVError(
            "a policy says which entries stay, and {} says which are read while all stay: give only one of them",
            Option("sparse"),
        )
    return compress or sparse_setting


def resolve_compress(
    snapkv: SnapKV | dict[str, Any] | str | bool | None = None,
    policy: Policy | Compress | str | None = None,
) -> Compress | None:
    """Return the setting that the keywords `snapkv` and `policy` of `generate_step` ask for, or None.

    Args:
        snapkv: a `SnapKV`, a dict of its options, or `"top_k=4096,n_sink=128"`.
        policy: a policy object, a `Compress`, or a string such as `"keydiff:budget=8192"`, or two policies joined by
            " then ".

    Raises: SnapKVError: both are given, one can't be read, or "auto" is asked for, which is resolved before.
    """
    if asks_for_auto(snapkv, policy):
        raise SnapKVError(
            f"policy {AUTO} works only in generate, chat, batch, serve and plan: name a policy here "
            "(mlx-snapkv policies)"
        )
    if policy is None:
        snapkv_policy = SnapKV.from_keyword(snapkv)
        return None if snapkv_policy is None else Compress(snapkv_policy)
    if isinstance(policy, Compress):
        return policy
    if isinstance(policy, Policy):
        return Compress(policy)
    if isinstance(policy, str):
        return Compress.from_string(policy)
    kind = type(policy).__name__
    raise SnapKVError(f"policy must be a policy object or a string, got {kind}")


def setting_named(text: str) -> Setting | None:
    """Return the setting of the string that a report or a file's header has."""
    name, _, options = text.partition(":")
    if name.strip() == Sparse.name:
        return Sparse.from_string(options)
    return resolve_compress(policy=text)
