"""Sparse attention: nothing is evicted, and chunks of the prompt and tokens of the answer read little."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..errors import SnapKVError
from .budgets import Quota, amount, is_amount, smallest_budget
from .method import Method, choice, count, entry_count, option

CHUNK = 512  # tokens that are read at a time and choose together
WINDOW = 256  # tokens before a chunk that it reads
LAST = 512  # tokens of the prompt that choose more than others: the question is among these
LAST_CHOSEN = 16384  # entries, which is everything in shorter prompts
LAST_WIDER = 4  # times as many as others, where entries are in files
PAGE = 16  # neighbours that a chunk chooses together
SHARE, LEAST = 16, 1024  # a token of the answer reads one entry in so many, and at least so many
READ_TOP_K = 1024  # entries that a chunk chooses by default, at least
READ_SHARE = 32  # of a longer prompt at least one entry in so many
CHEAP = 1 / 4  # and as many as take at most so much of what else the model multiplies


class Reach(NamedTuple):
    """What a chunk reads of the entries before it: the first, those that it chooses, the newest; whole pages."""

    n_sink: int
    n_chosen: int
    n_window: int

    @property
    def most(self) -> int:
        """Entries at most: a window may begin in the middle of a page."""
        return self.n_sink + self.n_chosen + self.n_window + PAGE - 1

    def before_choice(self, n_prompt: int, n_held: int = 0) -> int:
        """Tokens of a prompt at most before the first chunk that chooses: all, if only the last ones could."""
        n = max(n_held, self.most) + CHUNK
        return n if n < n_prompt - LAST else n_prompt

    def of_last(self, in_files: bool) -> Reach:
        """Return what the last tokens read, fewer entries where they are in files."""
        n = LAST_WIDER * self.n_chosen if in_files else max(LAST_CHOSEN, self.n_chosen)
        return self._replace(n_chosen=n)


@dataclass(frozen=True, kw_only=True)
class Sparse(Method):
    """All entries stay; a token reads a sink, a recent window and the entries that its own queries choose.

    Attributes:
        top_k: entries that a token of the answer chooses per KV head, by the logits of its own queries.
        budget: all entries that it reads, instead of `top_k`: a number, or a share of the prompt ("6.25%"). By default
            it is 1/16 of the prompt, and at least 1,024.
        n_sink: number of first entries, which every token reads.
        n_window: number of the prompt's last entries, which every token reads, or a share of the budget. A token also
            reads the answer's latest 256 tokens or more, and chooses among its older ones as in the prompt.
        rest: how a token sees the entries that it does not read. "means": as one mean entry for every cluster of about
            256 similar keys, weighed by two factors a head that are found at the prompt's end (`entries/rest.py`);
            "none": not at all.
        read: how the prompt is read. "sparse": a chunk reads the sink, the 256 tokens before it, itself, and pages of
            16 neighbours that its own queries choose. "dense": everything before it, as mlx-lm does.
        read_top_k: entries that a chunk chooses per KV head, or a share of the prompt. None is the most of 1,024, of
            1/32 of the prompt, and of the entries whose attention costs a quarter of the model's other products.

    A prompt of no more tokens than the budget is left to mlx-lm.
    """

    name = "sparse"
    evicts = False
    on_full = "grow"  # all of the answer's entries stay
    obs_window = 16  # of the prompt's last queries: an index is made for such, and the rest is weighed for some

    top_k: int | None = count(None, least=1)
    n_sink: int = count(4)
    n_window: int | str = entry_count("6.25%", least=1)
    budget: int | str | None = option(  # type: ignore[assignment]
        None,
        lambda value: value is None or is_amount(value, least=2),
        'a whole number of entries of at least 2 or a share such as "6.25%"',
    )
    rest: str | None = option("means", (None, "means").__contains__, "means or none")
    read: str = choice("sparse", "dense")
    read_top_k: int | str | None = option(
        None,
        lambda value: value is None or is_amount(value, least=16),
        'a whole number of entries of at least 16 or a share such as "12.5%"',
    )

    def __post_init__(self):
        self._check_options()
        if self.top_k is not None:
            budget = smallest_budget(self.top_k, self.n_sink, self.n_window)
            self._require("n_window", budget is not None, "less than all of the budget")
            if self.budget not in (None, budget):
                raise SnapKVError("sparse options top_k and budget say the same: give only one")
            object.__setattr__(self, "budget", budget)
        super().__post_init__()

    @property
    def _implied(self) -> str | None:  # type: ignore[override]
        return "budget" if self.top_k is not None else None

    def entries(self, n_prompt: int) -> int:
        """What a token of the answer reads of a prompt, per KV head."""
        if self.budget is None:
            return max(LEAST, n_prompt // SHARE)
        return amount(self.budget, n_prompt)

    def quota(self, n_prompt: int) -> Quota:
        """Return what a token of the answer reads of a prompt in each full-attention layer."""
        n = self.entries(n_prompt)
        self._require_entries(n)
        return Quota(n, self.n_sink, self.window(n)).shrunk()

    def fits(self, n_prompt: int) -> bool:
        return n_prompt <= self.entries(n_prompt)

    @property
    def reads_little(self) -> bool:
        return self.read == "sparse"

    @property
    def prefill_chunk(self) -> int | None:  # type: ignore[override]
        return CHUNK if self.reads_little else None

    def reach(self, n_prompt: int, n_cheap: int = 0) -> Reach:
        """What a chunk of a prompt of `n_prompt` tokens reads, unless that is everything.

        Args:
            n_cheap: entries whose attention takes no more than `CHEAP` of what else the model multiplies.
        """
        if self.read_top_k is None:
            chosen = max(READ_TOP_K, n_prompt // READ_SHARE, n_cheap)
        else:
            chosen = max(PAGE, amount(self.read_top_k, n_prompt))
        return Reach(-(-self.n_sink // PAGE) * PAGE, chosen // PAGE * PAGE, WINDOW)
