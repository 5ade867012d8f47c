"""Methods to compare: the full cache, policies and sparse attention."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..errors import SnapKVError
from ..planning.prompt_plan import reason_to_leave
from ..planning.settings import Setting
from ..sparse.options import Sparse
from .reading import shares_reading

FULL_CACHE = "full cache"
KNOWN, LATER = "known", "later"
ANSWER_SETTINGS = (KNOWN, LATER)


@dataclass(frozen=True)
class Method:
    """A way to answer a prompt: with a policy, with sparse attention, or from the full cache.

    Attributes:
        policy: the setting, or None for the full cache. Sparse attention is measured with `when="always"`. With
            "faster", the first tokens, or even all tokens, would be decoded with full attention.
    """

    policy: Setting | None = None

    def __post_init__(self):
        """Set sparse attention's `when` option to "always"."""
        if isinstance(self.policy, Sparse):
            object.__setattr__(self, "policy", replace(self.policy, when="always"))

    @property
    def name(self) -> str:
        """Return the method's name in tables."""
        if self.policy is None:
            return FULL_CACHE
        setting = self.policy
        if isinstance(setting, Sparse):
            setting = replace(setting, when="faster")
        return str(setting)

    @property
    def shares_reading(self) -> bool:
        """Return whether the method can share one reading of the prompt with other methods."""
        return shares_reading(self.policy)


def require_compression(methods: Iterable[Method], lengths: Sequence[int]) -> None:
    """Check that every policy would compress a prompt of at least one of these lengths.

    Raises: SnapKVError: a policy would not compress any prompt of these lengths.
    """
    for method in methods:
        if method.policy is None:
            continue
        reasons = [reason_to_leave(method.policy, length, prompt_cache=None) for length in lengths]
        if lengths and all(reasons):
            raise SnapKVError(f"{method.name} would compress none of the prompts: {reasons[-1]}")
