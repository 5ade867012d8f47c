"""Messages that commands print before they read a prompt: what will be kept, and whether the prompt is too long."""

from typing import Any

from ..errors import Option, SnapKVError
from ..models.trained_length import beyond_trained_length
from ..sparse.options import LAST_TOKENS
from ..sparse.prompt_caches import in_files
from .auto import AutoRequest, recommend, worth_comparing
from .config import CompressionConfig
from .entry_sizes import EntrySizes
from .footprint import Footprint
from .kv_limit import NO_KV_LIMIT
from .machine import this_machine
from .memory_plan import Planner, planner_options
from .request_plan import Plan, plan_request
from .settings import Setting
from .units import format_bytes

LONG_PROMPT = 2048  # tokens; shorter prompts without a policy get no message


class LongPrompts:
    """Checks prompts before they are read, and suggests what to do about prompts that are too long.

    Args:
        model: an mlx-lm model. Its weights need not be loaded.
        policy: the setting, or None for the full cache.
        is_text: whether the prompts are texts to ask questions about later.
        **options: options of `generate_step`, except for the setting. Options that are None are ignored.
    """

    def __init__(
        self,
        model: Any,
        *,
        policy: Setting | None = None,
        is_text: bool = False,
        **options: Any,
    ):
        """Resolve the options. Everything else depends on a prompt's length, so the methods compute it."""
        self._model = model
        self._usable = this_machine().usable
        set_options = {name: value for name, value in options.items() if value is not None}
        self._config, mlx_options = CompressionConfig.from_keywords(
            set_options | {"policy": policy}, is_text=is_text
        )
        self._kv_bits = mlx_options.get("kv_bits")
        self._is_rotating = "max_kv_size" in mlx_options
        self._planner_options = planner_options(mlx_options)

    def warning(self, n_prompt: int, n_before: int = 0) -> str | None:
        """Return a warning if the prompt and the `n_before` tokens before it exceed the model's trained length.

        Return None for a rotating cache, which never has more than `max_kv_size` entries.
        """
        if self._is_rotating:
            return None
        return beyond_trained_length(self._model, n_before + n_prompt)

    def kept_text(self, n_prompt: int, n_before: int = 0) -> str | None:
        """Describe how many entries will be kept or read and how much memory they take, or why nothing will be evicted.

        Return None for a rotating cache, or for a short prompt without a setting.

        Raises: SnapKVError: see `plan_request`.
        """
        n_tokens = n_before + n_prompt
        setting = self._config.setting
        if self._is_rotating or (setting is None and n_tokens < LONG_PROMPT):
            return None
        sizes = EntrySizes(self._model)
        if setting is None:
            full_size = format_bytes(n_tokens * sizes.full_cache_bytes(None))
            return f"all {n_tokens:,} entries will be kept ({full_size}); --policy auto chooses a policy"
        max_tokens = self._planner_options.get("max_tokens", 0)
        plan = plan_request(
            self._model, self._config, n_tokens, max_tokens=max_tokens, layers=sizes.layers
        )
        if plan.is_left_to_mlx_lm:
            return _describe_full(plan)
        footprint = Footprint(sizes, self._config)
        if plan.sparse is not None:
            return _describe_sparse(footprint, plan)
        return _describe_compressed(footprint, plan)

    def require_memory(
        self, n_prompt: int, n_before: int = 0, max_kv_bytes: int | None = None
    ) -> None:
        """Check that a prompt of `n_prompt` tokens fits in memory. Raises: SnapKVError.

        Prompts that can't be planned pass this check, but may be rejected later. Rotating caches always fit.

        Args:
            n_prompt: number of tokens to read.
            n_before: number of tokens read earlier. Their entries also count, unless a policy evicts.
            max_kv_bytes: limit on KV memory in bytes. 0 turns off the check. If None, the request and the weights must
                fit in this machine's memory for models.
        """
        if self._is_rotating or max_kv_bytes == NO_KV_LIMIT:
            return
        n_tokens = n_prompt if self._config.compress is not None else n_before + n_prompt
        try:
            planner = Planner(self._model, **self._planner_options)
            memory_plan, entry_bytes = planner.memory_and_peak(
                n_tokens, self._config, self._kv_bits
            )
        except SnapKVError:
            return
        if max_kv_bytes is not None:
            if entry_bytes > max_kv_bytes:
                raise SnapKVError(
                    f"{n_tokens} tokens and their answer need {format_bytes(entry_bytes)} of KV memory, and {{}} is "
                    f"{format_bytes(max_kv_bytes)}: raise it",
                    Option("max_kv_bytes"),
                )
        elif memory_plan.peak > self._usable:
            what_fits = self._what_fits(planner, n_tokens)
            raise SnapKVError(
                f"{n_tokens} tokens will take about {format_bytes(memory_plan.peak)}, but this machine has "
                f"{format_bytes(self._usable)} for models; {what_fits}, and {{}} reads them anyway",
                Option("max_kv_bytes", str(NO_KV_LIMIT)),
            )

    def _what_fits(self, planner: Planner, n_prompt: int) -> str:
        """Advise on how to make the prompt fit in memory, for example with another setting."""
        request = AutoRequest(n_prompt, kv_bits=self._kv_bits)
        try:
            recommendation = recommend(planner, request, self._usable)
        except SnapKVError:
            return "shorten the prompt"
        if not recommendation.fits:
            return "no policy makes them fit"
        flags = recommendation.config.flags or "the full cache"
        return f"{flags} would take {format_bytes(recommendation.plan.peak)}"


def _describe_full(plan: Plan) -> str:
    """Explain why a prompt is left to mlx-lm, and what would change that."""
    if plan.sparse is not None:
        return f"all entries will be read: {plan.reason}"
    example, _ = worth_comparing(plan.n_prompt)
    return f"nothing will be evicted: {plan.reason}, for example --policy {example}"


def _stored_size(sizes: EntrySizes, store: str | None, n_tokens: int) -> str:
    """Describe the size of `n_tokens` tokens in a `store`, e.g. "1.2 GB of files"."""
    store_bytes = n_tokens * sizes.store_bytes(store)
    if in_files(store):
        return f"{format_bytes(store_bytes)} of files"
    return format_bytes(store_bytes + n_tokens * sizes.incompressible_bytes)


def _describe_sparse(footprint: Footprint, plan: Plan) -> str:
    """Describe how many entries prompt chunks and answer tokens will read."""
    n_prompt = plan.n_prompt
    read_count = f"{footprint.n_kept(plan):,}"
    stored_text = (
        f"all of them stay in {_stored_size(footprint.sizes, plan.config.store, n_prompt)}"
    )
    from_token = ""
    if plan.adapts:
        from_token = f" from the {plan.n_decoded_before_compression + 1}th on, while that is faster"
    reading = plan.sparse_reading
    if reading is None or reading.n_before_choice >= n_prompt:
        token_text = f"a token of the answer will read at most {read_count} of {n_prompt:,} entries{from_token}"
        return f"the prompt will be read in full, {token_text}; {stored_text}"
    chunk_text = f"a chunk will read at most {reading.reach.max_read:,} of {n_prompt:,} entries"
    last_tokens_text = f"the prompt's last {LAST_TOKENS} tokens read more"
    token_text = f"a token of the answer at most {read_count}{from_token}"
    warning = "chunks that choose entries can lose facts, and with read=dense they would read all"
    return f"{chunk_text}, and {token_text}; {stored_text}; {last_tokens_text}; {warning}"


def _describe_compressed(footprint: Footprint, plan: Plan) -> str:
    """Describe how many prompt entries a policy will keep, and how much memory that saves.

    With schedule="block", the memory includes room for a block of new entries.
    """
    n_prompt = plan.n_prompt
    n_kept = footprint.n_kept(plan)
    decode_policy = plan.decode_policy
    n_block = decode_policy.block if decode_policy.schedule == "block" else 0
    sizes = footprint.sizes
    bytes_before = n_prompt * sizes.full_cache_bytes(None)
    bytes_after = footprint.row_bytes * (n_kept + n_block) + n_prompt * sizes.incompressible_bytes
    from_token = ""
    if not (plan.config.evicts_in_blocks or plan.config.is_text):  # a text has no answer
        from_token = f" from the answer's token {plan.n_decoded_before_compression + 1} on"
    room_for_block = f", room for a block of {n_block:,} included" if n_block else ""
    return (
        f"{n_kept:,} of {n_prompt:,} entries will be kept{from_token}: "
        f"KV memory {format_bytes(bytes_before)} → {format_bytes(bytes_after)}{room_for_block}"
    )
