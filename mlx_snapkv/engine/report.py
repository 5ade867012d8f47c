"""The report on a request: what was kept and how long it took, or why nothing was compressed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..planning.units import format_bytes

if TYPE_CHECKING:  # commands import this file before they need MLX
    from ..planning.request_plan import Plan

MIN_SPEED_RATIO = 0.9  # warn below this speed, relative to the full cache
NO_POLICY = "none"
ENDED_EARLY = "the answer ended before its prompt was compressed"
ENDED_IN_FULL = "the answer ended among its first tokens, which read all entries"
ENDED_IN_BLOCKS = (
    "the answer ended before the decode policy chose from the entries that prefill had kept"
)


@dataclass
class CompressionReport:
    """The outcome of compression or sparse attention for one request.

    If several Macs share the model, all numbers are for this Mac only.

    Attributes:
        policy: the setting, as written on the command line, or NO_POLICY.
        prompt_tokens: length of the whole prompt in tokens.
        reason: why nothing was compressed, usually with advice. None if entries were evicted or are read sparsely.
        entries_kept: number of entries per KV head that each layer keeps or, with sparse attention, that an answer
            token reads. None for layers that are left alone, such as sliding-window layers.
        kv_bytes_before: size of a full, unquantised cache of all tokens read before compression, including tokens whose
            entries had already been evicted.
        kv_bytes_after: size of all keys, values and indexes in memory after compression. An answer token reads all of
            it except `kv_bytes_staying`.
        kv_bytes_staying: the part of `kv_bytes_after` that an answer token does not read.
        file_bytes: size of all keys, values and indexes in files.
        kv_dtype: type of the entries after compression, such as "float16" or "8 bits".
        block: number of tokens that fit in the cache besides the kept entries. None unless entries are evicted in
            blocks during the answer.
        attention_share: share of the voters' attention that went to the kept entries, by layer. None for layers without
            voters.
        prefill_seconds: time from the first chunk to the first answer token.
        selection_seconds: time spent scoring, ranking and copying entries or, with sparse attention, building indexes.
        read_per_chunk: largest number of earlier entries per KV head that a sparse prompt chunk read. None if every
            chunk read all entries.
        read_per_token: largest number of entries per KV head that a sparse answer token reads. None if all tokens read
            all entries.
        read_all: runs of answer tokens that read all entries, as `[first, last]` pairs. Tokens are counted from 1.
            `last` is None if the run lasts until the end of the answer. Empty unless the answer can switch between full
            and sparse attention.
        means: largest number of cluster means that a token reads in place of unread entries. 0 if no means are used.
        plain_path: why sparse attention runs on plain MLX operations. None if GPU kernels are used, or if no answer
            token uses sparse attention.
        auto: the setting that `policy="auto"` selected, and why.
        full_token_seconds: time per answer token with the full cache. None if too few tokens were timed.
        token_seconds: time per answer token with compression or sparse attention. None if too few tokens were timed.
    """

    policy: str
    prompt_tokens: int
    reason: str | None = None
    entries_kept: list[int | None] = field(default_factory=list)
    kv_bytes_before: int = 0
    kv_bytes_after: int = 0
    kv_bytes_staying: int = 0
    file_bytes: int = 0
    kv_dtype: str = ""
    block: int | None = None
    attention_share: list[float | None] = field(default_factory=list)
    prefill_seconds: float = 0.0
    selection_seconds: float = 0.0
    read_per_chunk: int | None = None
    read_per_token: int | None = None
    read_all: list[list[int | None]] = field(default_factory=list)
    means: int = 0
    plain_path: str | None = None
    auto: str | None = None
    full_token_seconds: float | None = None
    token_seconds: float | None = None

    @classmethod
    def of_full_cache(cls, plan: Plan) -> CompressionReport:
        """Create the report for a prompt that is left to mlx-lm."""
        return cls(str(plan.config.setting or NO_POLICY), plan.n_prompt, plan.reason)

    @property
    def compressed(self) -> bool:
        """Return whether entries were evicted or are read sparsely."""
        return self.reason is None

    @property
    def entries(self) -> int:
        """Return the largest number in `entries_kept`, or 0 if it contains no numbers."""
        return max((n for n in self.entries_kept if n is not None), default=0)

    @property
    def kv_bytes_read(self) -> int:
        """Return how many bytes an answer token reads, including the index and unused rows."""
        return self.kv_bytes_after - self.kv_bytes_staying

    @property
    def staying_fields(self) -> dict[str, int]:
        """Return `kv_bytes_staying` and `file_bytes`, each only if it is not 0."""
        fields = {"kv_bytes_staying": self.kv_bytes_staying, "file_bytes": self.file_bytes}
        return {name: n_bytes for name, n_bytes in fields.items() if n_bytes}

    @property
    def warnings(self) -> list[str]:
        """Return warnings if tokens were slower, or read more bytes, than with the full cache."""
        warnings = []
        speed_warning = self._speed_warning()
        if speed_warning is not None:
            warnings.append(speed_warning)
        if self.compressed and self.kv_bytes_read > self.kv_bytes_before:
            warnings.append("the entries kept take more memory than the full cache would")
        return warnings

    def _speed_warning(self) -> str | None:
        """Return a warning if tokens were clearly slower than with the full cache, otherwise None.

        If the answer could switch modes, warn about any slowdown, but only if the answer ended with full attention.
        """
        if not self.full_token_seconds or not self.token_seconds:
            return None
        speed_ratio = self.full_token_seconds / self.token_seconds
        if not self.read_all:
            if speed_ratio >= MIN_SPEED_RATIO:
                return None
            return f"{speed_ratio:.2f} times as fast as the full cache at this length"
        _, last_token = self.read_all[-1]
        ended_with_sparse_attention = last_token is not None
        # Also compare the speeds: an answer that is faster with sparse attention can end while full attention is being
        # tried.
        if ended_with_sparse_attention or speed_ratio >= 1:
            return None
        return (
            f"sparse attention was {speed_ratio:.2f} times as fast as the full cache here, "
            "so the answer went on with all entries"
        )

    @property
    def entries_text(self) -> str:
        """Describe how many entries were kept, or how many each token reads."""
        chunk_text = ""
        if self.read_per_chunk is not None:
            chunk_text = f", at most {self.read_per_chunk} by a chunk"
        if self.read_per_token is not None:
            means_text = ""
            if self.means:
                means_text = f" and {self.means} mean{'s' if self.means > 1 else ''} of the rest"
            token_text = f"{self.read_per_token} entries{means_text} read by every token"
            return f"{token_text}{self._tokens_that_read_all}{chunk_text}"
        if self.read_all:
            return f"all entries read by every token{chunk_text}"
        entries_by_layer = [n for n in self.entries_kept if n is not None] or [0]
        fewest, most = min(entries_by_layer), max(entries_by_layer)
        if fewest == most:
            return f"{most} entries kept"
        return f"{fewest} to {most} entries kept by layer"

    @property
    def _tokens_that_read_all(self) -> str:
        """Describe which answer tokens read all entries. Return "" if none do."""
        if not self.read_all:
            return ""
        runs = [
            f"{first} to {'the last' if last is None else last}" for first, last in self.read_all
        ]
        return f" but {' and '.join(runs)}"

    @property
    def memory_text(self) -> str:
        """Describe the KV memory before and after compression, and where unread entries stay."""
        room_text = f", with room for a block of {self.block}" if self.block else ""
        before, after = format_bytes(self.kv_bytes_before), format_bytes(self.kv_bytes_after)
        dtype_and_room = f"({self.kv_dtype}{room_text})"
        if not self.kv_bytes_staying and not self.file_bytes:
            return f"KV memory {before} → {after} {dtype_and_room}"
        stored_size = format_bytes(self.kv_bytes_staying)
        if self.file_bytes:
            stored_size = f"{format_bytes(self.file_bytes)} of files"
        token_text = ""
        if self.read_per_token is not None:
            token_text = f": a token reads {format_bytes(self.kv_bytes_read)}"
        return (
            f"KV memory {before} → {after}{token_text} {dtype_and_room}, "
            f"all {self.prompt_tokens} entries stay in {stored_size}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as a JSON-serialisable dict."""
        return asdict(self)

    def __str__(self) -> str:
        """Summarise the report in one line for users."""
        if not self.compressed:
            return f"not compressed: {self.reason}"
        shares = [share for share in self.attention_share if share is not None]
        attention = ""
        if shares:
            attention = (
                f" ({100 * min(shares):.0f} to {max(shares):.0%} of the attention, by layer)"
            )
        return (
            f"{self.prompt_tokens} prompt tokens, {self.entries_text}{attention}, {self.memory_text}, "
            f"selection {self.selection_seconds:.2f} s"
        )
