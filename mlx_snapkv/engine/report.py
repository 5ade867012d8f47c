"""The report of a compression: measured figures, or the reason why nothing was compressed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..planning.units import format_bytes

if TYPE_CHECKING:  # commands import this file before they need MLX
    from ..planning.request_plan import Plan

SLOWER = 0.9  # a warning is given below this speed, relative to the full cache
NO_POLICY = "none"
STAYING = "kv_bytes_staying", "file_bytes"  # fields of a report that are shown unless they are 0
ENDED_EARLY = "the answer ended before its prompt was compressed"
ENDED_IN_FULL = "the answer ended among its first tokens, which read all entries"
ENDED_IN_BLOCKS = (
    "the answer ended before the decode policy chose from the entries that prefill had kept"
)


@dataclass
class CompressionReport:
    """The compression of one request. If several Macs share the model, the figures are those of this Mac.

    Attributes:
        policy: the setting, as on the command line, or NO_POLICY.
        prompt_tokens: number of tokens in the whole prompt.
        reason: why nothing was compressed, and what to change; None if entries were evicted or are read sparsely.
        entries_kept: entries per KV head, by layer of the model; None for layers without a KV cache.
        kv_bytes_before: bytes of the entries of all tokens at the compression, including evicted entries.
        kv_bytes_after: bytes of all keys and values in memory afterwards, and of their index, in `kv_dtype` ("float16"
            or "8 bits", for example). An answer token reads all of them except `kv_bytes_staying`.
        kv_bytes_staying: the bytes of `kv_bytes_after` that a token does not read.
        file_bytes: bytes of entries in files.
        block: number of tokens that fit in the cache in addition to the kept entries, if the answer evicts in blocks.
        attention_share: share (0 to 1) of the voters' attention that the kept entries received, by layer, if queries
            vote.
        prefill_seconds: time from the first chunk to the compression.
        selection_seconds: time for scoring, ranking and gathering, including evictions during prefill.
        read_per_chunk: largest number of earlier entries that a chunk of the prompt read by choice, per KV head; None
            if chunks read all.
        read_per_token: largest number of entries per KV head that a token of the answer reads by choice; None if tokens
            do not choose.
        read_all: first and last token, counted from 1, of each run of answer tokens that read all entries while others
            choose. The last token is None if the run lasts to the end of the answer.
        means: largest number of cluster means that a token reads in place of unread entries; 0 without means.
        plain_path: why MLX's operations compute the attention of tokens that choose; None if GPU kernels do, or if no
            token chooses.
        auto: the setting that `policy="auto"` selected, and why.
        full_token_seconds: time of a token from the full cache, before the compression.
        token_seconds: time of a token after the compression.
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
        """Return the report of a prompt that is left to mlx-lm."""
        return cls(str(plan.options.setting or NO_POLICY), plan.n_prompt, plan.reason)

    @property
    def compressed(self) -> bool:
        """Return whether entries were evicted or are read sparsely."""
        return self.reason is None

    @property
    def entries(self) -> int:
        """Return the largest number of entries that a layer keeps per KV head; 0 if nothing was compressed."""
        return max((n for n in self.entries_kept if n is not None), default=0)

    @property
    def kv_bytes_read(self) -> int:
        """Return the bytes that a token of the answer reads, including the index and unused rows."""
        return self.kv_bytes_after - self.kv_bytes_staying

    @property
    def warnings(self) -> list[str]:
        """Return a sentence for each disadvantage of the compression in speed or memory."""
        found = []
        if self.full_token_seconds and self.token_seconds:
            times = self.full_token_seconds / self.token_seconds
            if self.read_all:
                if self.read_all[-1][1] is None:
                    found.append(
                        f"sparse attention was {times:.2f} times as fast as the full cache here, "
                        "so the answer went on with all entries"
                    )
            elif times < SLOWER:
                found.append(f"{times:.2f} times as fast as the full cache at this length")
        if self.compressed and self.kv_bytes_read > self.kv_bytes_before:
            found.append("the entries kept take more memory than the full cache would")
        return found

    @property
    def entries_text(self) -> str:
        """Describe the entries that were kept, or that a token reads."""
        chunk = "" if self.read_per_chunk is None else f", at most {self.read_per_chunk} by a chunk"
        if self.read_per_token is not None:
            means = ""
            if self.means:
                means = f" and {self.means} mean{'s' if self.means > 1 else ''} of the rest"
            every = f"{self.read_per_token} entries{means} read by every token"
            return f"{every}{self._exceptions}{chunk}"
        if self.read_all:
            return f"all entries read by every token{chunk}"
        kept = [n for n in self.entries_kept if n is not None] or [0]
        least, most = min(kept), max(kept)
        return (
            f"{most} entries kept" if least == most else f"{least} to {most} entries kept by layer"
        )

    @property
    def _exceptions(self) -> str:
        """Describe the tokens that read all entries while others choose."""
        if not self.read_all:
            return ""
        runs = [
            f"{first} to {'the last' if last is None else last}" for first, last in self.read_all
        ]
        return f" but {' and '.join(runs)}"

    @property
    def memory_text(self) -> str:
        """Describe the KV memory before and after the compression, and the entries that stay unread.

        Buffers may be larger than the kept entries.
        """
        kept = [n for n in self.entries_kept if n is not None]
        share = sum(kept) / max(1, len(kept) * self.prompt_tokens)
        spare = self.kv_bytes_read > 1.05 * share * self.kv_bytes_before and not self.read_per_token
        room = f", with room for {f'a block of {self.block}' if self.block else 'more'}"
        before, after = format_bytes(self.kv_bytes_before), format_bytes(self.kv_bytes_after)
        how = f"({self.kv_dtype}{room if spare else ''})"
        if not self.kv_bytes_staying and not self.file_bytes:
            return f"KV memory {before} → {after} {how}"
        in_files = f"{format_bytes(self.file_bytes)} of files"
        where = in_files if self.file_bytes else format_bytes(self.kv_bytes_staying)
        stay = f", all {self.prompt_tokens} entries stay in {where}"
        return f"KV memory {before} → {after}: a token reads {format_bytes(self.kv_bytes_read)} {how}{stay}"

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as a dict, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """Return the report as one line for users."""
        if not self.compressed:
            return f"not compressed: {self.reason}"
        shares = [s for s in self.attention_share if s is not None]
        share = ""
        if shares:
            share = f" ({100 * min(shares):.0f} to {max(shares):.0%} of the attention, by layer)"
        took = f", selection {self.selection_seconds:.2f} s"
        kept = f"{self.entries_text}{share}, {self.memory_text}"
        return f"{self.prompt_tokens} prompt tokens, {kept}{took}"
