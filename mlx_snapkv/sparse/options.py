"""The options of sparse attention: what chunks of a prompt and tokens of an answer read of all entries."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple

from ..entries.quota import Quota
from ..errors import SnapKVError
from ..hyperparameters import (
    Hyperparameters,
    amount,
    choice,
    count,
    entry_count,
    folder,
    option,
    smallest_budget,
)

CHUNK_SIZE = 512  # prompt tokens that are read at a time and choose together
CHUNK_WINDOW = 256  # a chunk reads this many tokens before it
# Last tokens of a prompt, which read more entries because the question is among them.
LAST_TOKENS = 512
FIRST_TOKENS = 16  # first tokens of an answer, which read all entries if `when` is "faster"
LAST_CHOSEN = 16384  # entries that the last tokens choose, at least; all entries of shorter prompts
# If entries are in files, the last tokens choose 4 times as many as other chunks.
LAST_FACTOR_IN_FILES = 4
# Neighbouring entries that a chunk chooses together. The KL after needles in 4,096 tokens (SmolLM2-135M) was 0.0046,
# 0.0123 with pages of 8, and 0.0064 with pages of 32.
PAGE_SIZE = 16
# The default budget of a token of the answer: 1/16 of the entries, and at least 1,024.
BUDGET_SHARE = 16
MIN_BUDGET = 1024
# Entries that a chunk chooses by default: at least 1,024, 1/32 of the prompt, and the number whose attention costs a
# quarter of the model's other products. More take longer and lose less (measured by scripts/measure_sparse.py).
READ_TOP_K = 1024
READ_SHARE = 32
CHEAP_SHARE = 1 / 4
# Last queries of the prompt, for which an index is made; the residual is weighed for fewer.
N_VOTERS = 16


class Reach(NamedTuple):
    """Numbers of entries that a chunk reads before it: the first, the chosen ones, and the newest, in whole pages."""

    n_sink: int
    n_chosen: int
    n_window: int

    @property
    def most(self) -> int:
        """Return the most entries that a chunk reads; a window may begin in the middle of a page."""
        return self.n_sink + self.n_chosen + self.n_window + PAGE_SIZE - 1

    def before_choice(self, n_prompt: int, n_held: int = 0) -> int:
        """Return how many tokens come before the first chunk that chooses; `n_prompt` if only the last chunk could."""
        n = max(n_held, self.most) + CHUNK_SIZE
        return n if n < n_prompt - LAST_TOKENS else n_prompt

    def of_last(self, in_files: bool) -> Reach:
        """Return how many entries the last tokens read, which are fewer if entries are in files."""
        n = LAST_FACTOR_IN_FILES * self.n_chosen if in_files else max(LAST_CHOSEN, self.n_chosen)
        return self._replace(n_chosen=n)


@dataclass(frozen=True, kw_only=True)
class Sparse(Hyperparameters):
    """All entries stay; a token reads a sink, a recent window and the entries that its own queries choose.

    A prompt of no more tokens than the budget is left to mlx-lm.

    Attributes:
        top_k: entries that a token of the answer chooses per KV head, by the logits of its own queries.
        budget: all entries that it reads, instead of `top_k`: a number, or a share of the prompt ("6.25%"); by default
            1/16 of the prompt, and at least 1,024.
        n_sink: number of first entries, which every token reads.
        n_window: number of the prompt's last entries, which every token reads, or a share of the budget. A token also
            reads the answer's latest 256 tokens or more, and chooses among its older ones as in the prompt.
        residual: how a token sees the entries that it does not read: as "means" of clusters, or not at all ("none").
            A cluster has about 256 similar keys. Its mean entry is weighed by two factors a head, which are found at
            the prompt's end (`sparse/residual.py`).
        read: how chunks of the prompt read: few entries ("sparse"), or everything before them ("dense"), as mlx-lm
            does. With "sparse" a chunk reads the sink, the 256 tokens before it, itself, and pages of 16 neighbours
            that its own queries choose.
        read_top_k: entries that a chunk chooses per KV head: a number, or a share of the prompt; by default the most
            of 1,024, of 1/32 of the prompt, and of the entries whose attention costs a quarter of the model's other
            products.
        when: when chunks and tokens choose: while that is "faster" on this machine, or "always". With "faster" at least
            the first 16 tokens of an answer read all entries, and with "always" the first two. Entries in 8 or 4 bits
            or in files are always chosen from. A batch measures nothing, and follows the speed record.
        store: where all entries stay: in memory ("memory", or in few bits "8bit" and "4bit"), or in a "file".
        store_dir: folder of the files, by default TMPDIR. Entries do not depend on it, so the string form lacks it.
    """

    name = "sparse"

    top_k: int | None = count(None, least=1)
    n_sink: int = count(4)
    n_window: int | str = entry_count("6.25%", least=1)
    budget: int | str | None = entry_count(None, least=2, example="6.25%")
    residual: str | None = option("means", (None, "means").__contains__, "means or none")
    read: str = choice("sparse", "dense")
    read_top_k: int | str | None = entry_count(None, least=16, example="12.5%")
    when: str = choice("faster", "always")
    store: str = choice(
        "memory",
        "8bit",
        "4bit",
        "file",
        help="Where --sparse keeps entries: memory (the default), 8bit, 4bit or file.",
    )
    store_dir: str | None = folder(help="Folder for --store file; default: TMPDIR.")

    def __post_init__(self):
        """Check the values, and compute `budget` from `top_k`. Raises: SnapKVError: the two contradict."""
        super().__post_init__()
        if self.top_k is not None:
            budget = smallest_budget(self.top_k, self.n_sink, self.n_window)
            self._require("n_window", budget is not None, "less than all of the budget")
            if self.budget not in (None, budget):
                raise SnapKVError("sparse options top_k and budget say the same: give only one")
            object.__setattr__(self, "budget", budget)
        if self.store_dir is not None:
            object.__setattr__(self, "store_dir", os.path.expanduser(self.store_dir))

    @property
    def implied_option(self) -> str | None:  # type: ignore[override]
        """Return "budget" if it follows from `top_k`."""
        return "budget" if self.top_k is not None else None

    def entries(self, n_prompt: int) -> int:
        """Return the number of a prompt's entries that a token of the answer reads per KV head."""
        if self.budget is None:
            return max(MIN_BUDGET, n_prompt // BUDGET_SHARE)
        return amount(self.budget, n_prompt)

    def quota(self, n_prompt: int) -> Quota:
        """Return the entries of a prompt that a token of the answer reads in each full-attention layer.

        Raises: SnapKVError: the budget's share of the prompt is less than one entry.
        """
        n_entries = self.entries(n_prompt)
        if n_entries < 1:
            raise SnapKVError(
                f"sparse option budget={self.budget} is less than one entry of this prompt"
            )
        return Quota(n_entries, self.n_sink, amount(self.n_window, n_entries)).shrunk()

    def fits(self, n_prompt: int) -> bool:
        """Return whether a token would read all entries of a prompt of `n_prompt` tokens."""
        return n_prompt <= self.entries(n_prompt)

    @property
    def reads_sparsely(self) -> bool:
        """Return whether prompt chunks read only entries that they choose."""
        return self.read == "sparse"

    def reach(self, n_prompt: int, n_cheap: int = 0) -> Reach:
        """Return how many entries a chunk reads in a prompt of `n_prompt` tokens.

        Args:
            n_prompt: number of tokens of the prompt.
            n_cheap: entries whose attention takes no more than `CHEAP_SHARE` of the model's other products.
        """
        if self.read_top_k is None:
            chosen = max(READ_TOP_K, n_prompt // READ_SHARE, n_cheap)
        else:
            chosen = max(PAGE_SIZE, amount(self.read_top_k, n_prompt))
        return Reach(
            -(-self.n_sink // PAGE_SIZE) * PAGE_SIZE, chosen // PAGE_SIZE * PAGE_SIZE, CHUNK_WINDOW
        )
