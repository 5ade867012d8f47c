"""The report of a request's compression: figures read from the arrays, or why nothing was compressed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..planning.units import format_bytes

if TYPE_CHECKING:  # commands import this file before they need MLX
    from ..planning.request_plan import Plan

SLOWER = 0.9  # times as fast as the full cache: below it, a warning says so
NO_POLICY = "none"
STAYING = "kv_bytes_staying", "file_bytes"  # fields of a report that are shown if they are not 0
ENDED_EARLY = "the answer ended before its prompt was compressed"
ENDED_IN_FULL = "the answer ended among its first tokens, which read all entries"
ENDED_IN_BLOCKS = (
    "the answer ended before the decode policy chose from the entries that prefill had kept"
)


@dataclass
class CompressionReport:
    """One request's compression. If several Macs share the model, the figures are this Mac's.

    Attributes:
        policy: the policy, as its command-line string, or NO_POLICY.
        prompt_tokens: tokens of the whole prompt.
        reason: why nothing was compressed, with what to change; None when entries were dropped.
        entries_kept: by layer of the model, entries per KV head; None for layers without a KV cache.
        kv_bytes_before: bytes of all tokens' entries at the compression, including those evicted earlier.
        kv_bytes_after: bytes of all keys and values in memory after it, and of their index. This is what an answer
            token reads (its `kv_dtype` is "float16", for example, or "8 bits") and, with sparse attention, the
            entries that stay beside that.
        kv_bytes_staying: the part of `kv_bytes_after` that stays unread.
        file_bytes: bytes of the entries that stay in files.
        block: tokens for which the cache has room beside the entries kept, if the answer evicts in blocks.
        attention_share: by layer, the share (0 to 1) of the voters' attention that the entries kept received, if the
            prompt votes.
        prefill_seconds: from the first chunk to the compression, without the selection.
        selection_seconds: scoring, ranking and gathering, including all evictions during prefill.
        read_per_chunk: the most entries before it that a chunk of the prompt reads, per KV head; None if chunks read
            all.
        read_per_token: entries per KV head that a token of the answer reads if it chooses, the most of any layer; None
            if tokens don't choose.
        read_all: first and last token of the answer, from 1, of each run of tokens that read all entries while other
            tokens choose. The last token is None if the run lasts until the end of the answer.
        means: cluster means that a token reads instead of the other entries, the most of any layer; 0 without means.
        plain_path: why MLX's own operations, not the GPU kernels, compute the attention of tokens that choose; None if
            the kernels do, or no token chooses.
        auto: the setting that `policy="auto"` chose, and why.
        full_token_seconds: time of a token on the full cache, before the compression.
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
        """Return the report of a prompt that its plan leaves to mlx-lm."""
        return cls(str(plan.options.setting or NO_POLICY), plan.n_prompt, plan.reason)

    @property
    def compressed(self) -> bool:
        """Return whether entries were evicted, or are read sparsely."""
        return self.reason is None

    @property
    def entries(self) -> int:
        """Return the entries kept per KV head in the layer with the most; 0 if nothing was compressed."""
        return max((n for n in self.entries_kept if n is not None), default=0)

    @property
    def kv_bytes_read(self) -> int:
        """Return the bytes that a token of the answer reads, with the buffers' spare room and the index."""
        return self.kv_bytes_after - self.kv_bytes_staying

    @property
    def warnings(self) -> list[str]:
        """Return a sentence for each loss by the compression, of speed or memory."""
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
        """Return the words about the entries kept, or about the entries that a token reads."""
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
        """Return the words about tokens that read all entries though others choose."""
        if not self.read_all:
            return ""
        runs = [
            f"{first} to {'the last' if last is None else last}" for first, last in self.read_all
        ]
        return f" but {' and '.join(runs)}"

    @property
    def memory_text(self) -> str:
        """Return the words about the KV memory before and after, and about entries that stay unread.

        Buffers may have room for more than the entries kept.
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
        """Return all fields, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """Return the report in one line for users."""
        if not self.compressed:
            return f"not compressed: {self.reason}"
        shares = [s for s in self.attention_share if s is not None]
        share = ""
        if shares:
            share = f" ({100 * min(shares):.0f} to {max(shares):.0%} of the attention, by layer)"
        took = f", selection {self.selection_seconds:.2f} s"
        kept = f"{self.entries_text}{share}, {self.memory_text}"
        return f"{self.prompt_tokens} prompt tokens, {kept}{took}"
