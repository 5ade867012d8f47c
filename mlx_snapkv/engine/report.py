"""What a request's compression did, in figures read from the arrays, or why it did nothing."""

from dataclasses import asdict, dataclass, field
from typing import Any

NO_POLICY = "none"


@dataclass
class Verified:
    """What an answer asked of the entries that it was not decoded from, counted as it goes on.

    Attributes:
        verify: "unsure" or "all".
        tokens: fed to the model after the compression.
        votes: times that all layers' queries voted over all entries.
        drafted, accepted: tokens that the small cache proposed, and those of them that were right.
        seconds: what the tokens took of a model whose drafts are checked, and `plain_seconds` what one takes without.
    """

    verify: str
    tokens: int = 0
    votes: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0

    @property
    def gain(self) -> float:
        """Times as fast as the full cache."""
        return self.tokens * self.plain_seconds / self.seconds if self.seconds else 1.0

    def __str__(self) -> str:
        if self.verify == "unsure":
            return f"{self.votes} votes in {self.tokens} tokens"
        share = self.accepted / max(1, self.tokens)
        return f"{share:.0%} of the tokens drafted, {self.gain:.1f} times as fast as the full cache"


@dataclass
class CompressionReport:
    """One request's compression.

    Attributes:
        policy: the policy, as its command-line string, or NO_POLICY.
        prompt_tokens: tokens of the whole prompt.
        reason: why nothing was compressed, with what to change; None when entries were dropped.
        entries_kept: by layer of the model, entries per KV head; None for layers without a KV cache.
        kv_bytes_before: bytes of all tokens' entries at the compression, those evicted before included.
        kv_bytes_after: bytes of the buffers of the caches that go on.
        kv_dtype: what the numbers of those entries are: "float16", say, or "8 bits".
        attention_share: by layer, the part (0 to 1) of the voters' attention that went to the entries kept; None for
            policies without votes, and for those that go on evicting.
        prefill_seconds: from the first chunk to the compression, selection excluded.
        selection_seconds: scoring, ranking and gathering, all evictions while reading included.
        verified: what the answer asks of all entries; None without `verify`.
    """

    policy: str
    prompt_tokens: int
    reason: str | None = None
    entries_kept: list[int | None] = field(default_factory=list)
    kv_bytes_before: int = 0
    kv_bytes_after: int = 0
    kv_dtype: str = ""
    attention_share: list[float | None] = field(default_factory=list)
    prefill_seconds: float = 0.0
    selection_seconds: float = 0.0
    verified: Verified | None = None

    @property
    def compressed(self) -> bool:
        return self.reason is None

    @property
    def entries(self) -> int:
        """Entries kept per KV head, the most of any layer; 0 when nothing was compressed."""
        return max((n for n in self.entries_kept if n is not None), default=0)

    @property
    def entries_text(self) -> str:
        """The entries kept in words: one number, or the range over the layers."""
        kept = sorted(n for n in self.entries_kept if n is not None)
        if not kept or kept[0] == kept[-1]:
            return f"{self.entries} entries kept"
        return f"{kept[0]} to {kept[-1]} entries kept by layer"

    @property
    def memory_text(self) -> str:
        """The KV memory in words; buffers may have room for more than the entries kept."""
        kept = [n for n in self.entries_kept if n is not None]
        share = sum(kept) / max(1, len(kept) * self.prompt_tokens)
        spare = self.kv_bytes_after > 1.05 * share * self.kv_bytes_before
        room = ", with room for more" if spare else ""
        before, after = format_bytes(self.kv_bytes_before), format_bytes(self.kv_bytes_after)
        return f"KV memory {before} → {after} ({self.kv_dtype}{room})"

    # What `entries`, `entries_kept` and `attention_share` were called before.
    rows = property(lambda self: self.entries)
    rows_kept = property(lambda self: self.entries_kept)
    mass_kept = property(lambda self: self.attention_share)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if not self.compressed:
            return f"not compressed: {self.reason}"
        shares = [s for s in self.attention_share if s is not None]
        share = f", {min(shares):.0%} to {max(shares):.0%} of the votes" if shares else ""
        asked = "" if self.verified is None else f", {self.verified}"
        return (
            f"{self.prompt_tokens} prompt tokens, {self.entries_text}{share}, {self.memory_text}, "
            f"selection {self.selection_seconds:.2f} s{asked}"
        )


def format_bytes(n: float) -> str:
    """Bytes in decimal units, as mlx-lm reports memory: 1,234,567 is "1.23 MB"."""
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} GB"
