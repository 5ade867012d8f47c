"""The lines that commands print about a prompt before reading it: what will be kept, and whether it is too long."""

from typing import Any

from ..errors import SnapKVError
from ..models.trained_length import beyond_trained_length
from ..sparse.options import BUDGET_SHARE, LAST_TOKENS
from ..sparse.prompt_caches import in_files
from .auto import AutoRequest, recommended, worth_comparing
from .config import CompressionConfig
from .entry_sizes import EntrySizes
from .footprint import Footprint
from .machine import this_machine
from .memory_plan import Planner
from .options import OPTIONS
from .request_plan import Plan, plan_request
from .settings import Setting
from .units import format_bytes

MIN_BUDGET_TO_SUGGEST = 16  # entries of a budget, below which to read fewer is worth no word
LONG_PROMPT = 2048  # tokens from which a prompt without a policy is worth a word
_PLANNED = ("max_tokens", "prefill_step_size", "kv_group_size")


class LongPrompts:
    """Warns about prompts before they are read, and says what would help; the options are those of `generate_step`.

    Args:
        is_text: the prompts are texts, read on their own for questions to come.
    """

    def __init__(
        self,
        model: Any,
        *,
        policy: Setting | None = None,
        is_text: bool = False,
        **options: Any,
    ):
        self._model, self._usable = model, this_machine().usable
        given = {name: value for name, value in options.items() if value is not None}
        self._own = {name: given[name] for name in OPTIONS if name in given}
        self._config, given = CompressionConfig.taken_from(
            {**given, "policy": policy}, is_text=is_text
        )
        self._kv_bits, self._is_rotating = given.get("kv_bits"), "max_kv_size" in given
        self._options = {name: given[name] for name in _PLANNED if name in given}
        self._planner: Planner | None = None

    def warnings(self, n_prompt: int, n_before: int = 0) -> list[str]:
        """Return the problems of a prompt of `n_prompt` tokens, after `n_before` tokens that were read already."""
        if self._is_rotating:
            return []
        beyond = beyond_trained_length(self._model, n_before + n_prompt)
        return [said for said in (self._too_large(n_prompt), beyond) if said is not None]

    def foretold(self, n_prompt: int, n_before: int = 0) -> str | None:
        """Return a sentence about the entries to be kept and the memory saved, or about why nothing is evicted.

        Return None for a short prompt without a setting. Raises: SnapKVError: the model does not support the setting.
        """
        n, policy = n_before + n_prompt, self._config.setting
        self._config.require(self._model)
        if self._is_rotating or (policy is None and n < LONG_PROMPT):
            return None
        sizes = EntrySizes(self._model)
        before = n * sizes.full(None)
        if policy is None:
            return f"all {n:,} entries will be kept ({format_bytes(before)}); --policy auto chooses a policy"
        max_tokens = self._options.get("max_tokens", 0)
        plan = plan_request(
            self._model, self._config, n, max_tokens=max_tokens, layers=sizes.layers
        )
        if plan.reason is not None:
            return _foretold_in_full(plan)
        return _foretold(Footprint(sizes, self._config), plan, before)

    def _too_large(self, n_prompt: int) -> str | None:
        """Return a sentence if a prompt will not fit in memory; None if it will, or can't be planned."""
        try:
            self._planner = self._planner or Planner(self._model, **self._options)
            plan, _ = self._planner.planned(n_prompt, self._config, self._kv_bits)
            if plan.peak <= self._usable:
                return None
            request = AutoRequest(n_prompt, options=self._own, kv_bits=self._kv_bits)
            found = recommended(self._planner, request, self._usable)
        except SnapKVError:  # it is read all the same
            return None
        said = (
            f"{n_prompt} tokens will take about {format_bytes(plan.peak)}, but this machine has "
            f"{format_bytes(self._usable)} for models"
        )
        if not found.fits:
            return f"{said}; no policy makes them fit"
        return f"{said}; {found.config.flags or 'the full cache'} would take {format_bytes(found.plan.peak)}"


def _foretold_in_full(plan: Plan) -> str:
    """Return the sentence about a prompt that is left to mlx-lm: why, and what would change that."""
    n, sparse = plan.n_prompt, plan.sparse
    if sparse is not None and not sparse.fits(n):
        return f"all {n:,} entries will be read: {plan.reason}"
    if sparse is not None:
        fits = f"all {n:,} entries will be read: they fit the budget of {sparse.entries(n):,}"
        fewer = n // BUDGET_SHARE
        return (
            f"{fits}; --sparse budget={fewer} reads fewer"
            if fewer >= MIN_BUDGET_TO_SUGGEST
            else fits
        )
    example = worth_comparing(n)[0]
    return f"nothing will be evicted: {plan.reason}, for example --policy {example}"


def _where_stored(sizes: EntrySizes, store: str | None, n: int) -> str:
    """Return the words about the bytes of all entries of `n` tokens in a `store`."""
    stored = n * sizes.stored(store)
    if in_files(store):
        return f"{format_bytes(stored)} of files"
    return format_bytes(stored + n * sum(sizes.plain))


def _foretold(footprint: Footprint, plan: Plan, before: int) -> str:
    """Return the sentence about the entries kept or read of a prompt; `before` is the bytes of all entries."""
    n, kept, sizes = plan.n_prompt, footprint.kept(plan), footprint.sizes
    count = f"{kept:,}"
    if plan.sparse is not None:
        stay = f"all of them stay in {_where_stored(sizes, plan.options.store, n)}"
        if plan.sparse_reading is None or (most := plan.sparse_reading.reach.most) >= n:
            token = f"a token of the answer will read at most {count} of {n:,} entries"
            return f"the prompt will be read in full, {token}; {stay}"
        chunk = f"a chunk will read at most {most:,} of {n:,} entries"
        rest = f"the prompt's last {LAST_TOKENS} tokens read more"
        return f"{chunk}, and a token of the answer at most {count}; {stay}; {rest}"
    first = plan.n_ahead + 2  # token of the answer that is decoded from what was kept
    at_once = plan.options.evicts_in_blocks or plan.options.is_text  # a text has no answer
    since = "" if at_once else f" from the answer's token {first} on"
    last = plan.decode_policy
    beside = last.block if last.schedule == "block" else 0  # the next tokens' entries
    after = footprint.row_bytes * (kept + beside) + n * sum(sizes.plain)
    saved = f"KV memory {format_bytes(before)} → {format_bytes(after)}"
    room = f", room for a block of {beside:,} included" if beside else ""
    return f"{count} of {n:,} entries will be kept{since}: {saved}{room}"
