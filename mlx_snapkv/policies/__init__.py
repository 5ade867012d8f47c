"""The eviction policies, one file each, and how a request names one."""

import importlib
import pkgutil
from dataclasses import dataclass
from typing import Any

from ..errors import Option, SnapKVError, UnknownOptionError, suggestion
from .base import POLICIES, Policy
from .budgets import Quota

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
from .random_rows import RandomRows as RandomRows

# isort: on
from .method import Method
from .sparse import Sparse

# Any other file here is a policy too; those follow in the order of their names.
for _name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_name}")

THEN = " then "
AUTO = "auto"  # what `planning/auto.py` takes for a prompt, a task and a machine


@dataclass(frozen=True)
class Stages:
    """Keep the prompt within a budget, block by block, by one policy, then let another choose from what is left.

    The first, with schedule="block" and its own `min_ctx`, keeps at least the sink and recent entries that the other
    wants, which decides who votes when the prompt has been read, and how the answer is decoded. It is a SnapKVError if
    the first is no block policy.
    """

    prefill_policy: Policy
    decode_policy: Policy

    def __post_init__(self):
        if self.prefill_policy.schedule != "block":
            raise SnapKVError(
                f"only a policy with schedule=block can be followed by another, not {self.prefill_policy}"
            )

    reads_in_blocks = reads_little = evicts = True

    @property
    def stages(self) -> tuple[Policy, Policy]:
        return self.prefill_policy, self.decode_policy

    @property
    def min_ctx(self) -> int:
        return self.prefill_policy.min_ctx

    def fits(self, n_prompt: int) -> bool:
        return all(stage.fits(n_prompt) for stage in self.stages)

    def prefill_quota(self, n_prompt: int) -> Quota:
        """Return what each full-attention layer keeps while the prompt is read."""
        wanted, own = self.decode_policy.quota(n_prompt), self.prefill_policy.quota(n_prompt)
        n_sink, n_window = max(own.n_sink, wanted.n_sink), max(own.n_window, wanted.n_window)
        return Quota(own.entries, n_sink, n_window).shrunk()

    def __str__(self) -> str:
        return f"{self.prefill_policy}{THEN}{self.decode_policy}"


def asks_for_auto(snapkv: Any = None, policy: Any = None) -> bool:
    """Whether the two keywords of `generate_step` leave the choice to us. Raises: SnapKVError: both are given."""
    if snapkv is None or snapkv is False:
        return isinstance(policy, str) and policy.strip() == AUTO
    if policy is not None:
        raise SnapKVError(
            "{} and {} both name a policy: give only one", Option("snapkv"), Option("policy")
        )
    return snapkv is True


def resolve_method(
    snapkv: SnapKV | dict[str, Any] | str | bool | None = None,
    policy: Method | Stages | str | None = None,
    sparse: Sparse | dict[str, Any] | str | bool | None = None,
) -> Method | Stages | None:
    """The policy or the sparse attention that the three keywords of `generate_step` ask for, or None.

    Raises: SnapKVError: two are given, or one can't be read.
    """
    evicting, reading = resolve_policy(snapkv, policy), Sparse.from_keyword(sparse)
    if evicting is not None and reading is not None:
        raise SnapKVError(
            "a policy says which entries stay, and {} says which are read while all stay: give only one of them",
            Option("sparse"),
        )
    return evicting or reading


def method_named(text: str) -> Method | Stages | None:
    """A method from the string that a report or a file's header has of it."""
    name, _, options = text.partition(":")
    if name.strip() == Sparse.name:
        return Sparse.from_string(options)
    return resolve_policy(policy=text)


def resolve_policy(
    snapkv: SnapKV | dict[str, Any] | str | bool | None = None,
    policy: Method | Stages | str | None = None,
) -> Any:
    """The policy that the two keywords of `generate_step` ask for, or None.

    Args:
        snapkv: a `SnapKV`, a dict of its options, or `"top_k=4096,n_sink=128"`.
        policy: a policy object, or a string such as `"keydiff:budget=8192"`, or two of them joined by " then ".

    Raises: SnapKVError: both are given, one can't be read, or "auto" is asked for, which is resolved before.
    """
    if asks_for_auto(snapkv, policy):
        raise SnapKVError(
            f"policy {AUTO} works only in generate, chat, batch, serve and plan: name a policy here "
            "(mlx-snapkv policies)"
        )
    if policy is None:
        return SnapKV.from_keyword(snapkv)
    if isinstance(policy, (Method, Stages)):
        return policy  # type: ignore[return-value]
    if not isinstance(policy, str):
        kind = type(policy).__name__
        raise SnapKVError(f"policy must be a policy object or a string, got {kind}")
    stages = [_from_name(*part.split(":", 1)) for part in policy.split(THEN)]
    if len(stages) > 2:
        raise SnapKVError(
            f"policy must be one policy or two joined by 'then', got {len(stages)} in {policy!r}"
        )
    return stages[0] if len(stages) == 1 else Stages(*stages)


def _from_name(name: str, options: str = "") -> Policy:
    name = name.strip()
    if name == Sparse.name:
        raise SnapKVError(
            "sparse is not a policy, since it evicts nothing: give {}, for example",
            Option("sparse", "top_k=2048"),
        )
    if name not in POLICIES:
        raise UnknownOptionError(
            f"unknown policy {name!r}{suggestion(name, POLICIES)}; known: {', '.join(POLICIES)} (mlx-snapkv policies)"
        )
    return POLICIES[name].from_string(options)
