"""The setting of a request: eviction by policies, or sparse attention."""

from typing import Any

from ..compress.options import Compress
from ..compress.policies import SnapKV
from ..compress.policy import Policy
from ..errors import Option, SnapKVError
from ..sparse.options import Sparse

AUTO = "auto"  # the value of `policy` that lets `planning/auto.py` choose

Setting = Compress | Sparse


def asks_for_auto(snapkv: Any = None, policy: Any = None) -> bool:
    """Return whether `policy="auto"` or `snapkv=True` is given. Raises: SnapKVError: both arguments are set."""
    if snapkv is None or snapkv is False:
        return isinstance(policy, str) and policy.strip() == AUTO
    if policy is not None:
        raise _both_name_a_policy()
    return snapkv is True


def _both_name_a_policy() -> SnapKVError:
    """Return the error to raise when both `snapkv` and `policy` are set."""
    return SnapKVError(
        "{} and {} both name a policy: give only one", Option("snapkv"), Option("policy")
    )


def resolve_setting(
    snapkv: SnapKV | dict[str, Any] | str | bool | None = None,
    policy: Policy | Setting | str | None = None,
    sparse: Sparse | dict[str, Any] | str | bool | None = None,
) -> Setting | None:
    """Resolve the `snapkv`, `policy` and `sparse` arguments of `generate_step` to a setting, or None.

    Raises: SnapKVError: more than one is set, a value is invalid, or "auto" is requested; see `resolve_compress`.
    """
    sparse_setting = Sparse.from_keyword(sparse)
    if isinstance(policy, Sparse):  # a setting that is already resolved
        if sparse_setting is not None:
            raise SnapKVError(
                "{} and {} both select sparse attention: give only one",
                Option("policy"),
                Option("sparse"),
            )
        if snapkv is True:
            raise _both_name_a_policy()
        policy, sparse_setting = None, policy
    compress = resolve_compress(snapkv, policy)
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
    """Resolve the `snapkv` and `policy` arguments of `generate_step` to a setting, or to None if neither is set.

    Args:
        snapkv: a `SnapKV`, a dict of its options, or a string such as `"top_k=4096,n_sink=128"`.
        policy: a policy object, a `Compress`, a string such as `"keydiff:budget=8192"`, or two such strings joined by
            `" then "`.

    Raises: SnapKVError: both are set, a value is invalid, or "auto" is requested, which the caller must resolve first.
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
    """Parse a setting from its string form, as in a report or a file's header."""
    name, _, options = text.partition(":")
    if name.strip() == Sparse.name:
        return Sparse.from_string(options)
    return resolve_compress(policy=text)
