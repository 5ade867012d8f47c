"""Options of sparse attention. They set which entries prompt chunks and answer tokens read."""

from __future__ import annotations

import math
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

CHUNK_SIZE = 512  # prompt tokens per chunk with sparse prefill; all of a chunk's tokens read the same earlier entries
CHUNK_WINDOW = 256  # a chunk always reads this many tokens before it
# A prompt's last tokens read more entries, because they usually contain the question.
LAST_TOKENS = 512
# If `when` is "faster", at least this many answer tokens are fed to the full caches, and each of them yields the next
# token. The prompt yields the first token, so at least `FIRST_TOKENS + 1` are decoded before tokens choose entries.
FIRST_TOKENS = 16
LAST_CHOSEN = 16384  # minimum number of entries that the prompt's last tokens choose
# If entries are in files, the last tokens choose at most 4 times as many entries as other chunks. This limits how much
# is read from the files.
LAST_FACTOR_IN_FILES = 4
# Chunks choose whole pages of neighbouring entries. In a needle test of 4,096 tokens (SmolLM2-135M), pages of 16 gave a
# KL divergence from the full cache of 0.0046, compared with 0.0123 for pages of 8 and 0.0064 for pages of 32.
PAGE_SIZE = 16
# An answer token reads 1/16 of the prompt's entries by default, with a minimum of 1,024.
BUDGET_SHARE = 16
MIN_BUDGET = 1024
# Default number of entries that a chunk chooses: the largest of 1,024, 1/32 of the prompt, and the number of entries
# whose attention costs a quarter as much as the model's other matrix products. Choosing more takes longer and loses
# less accuracy (measured by scripts/measure_sparse.py).
READ_TOP_K = 1024
READ_SHARE = 32
CHEAP_SHARE = 1 / 4
# The magnitudes of the prompt's last 16 queries set the weights of the index's channels. The residual is fitted to the
# last `FITTING_QUERIES` of these queries (`residual.py`).
N_VOTERS = 16


class Reach(NamedTuple):
    """How many earlier entries a chunk reads: sink, chosen entries and window, in multiples of the page size."""

    n_sink: int
    n_chosen: int
    n_window: int

    @property
    def max_read(self) -> int:
        """Return the maximum number of earlier entries that a chunk reads.

        The window is extended to the start of a page, so it can have up to 15 extra entries.
        """
        return self.n_sink + self.n_chosen + self.n_window + PAGE_SIZE - 1

    def first_choice_position(self, n_prompt: int, n_earlier: int = 0) -> int:
        """Return an upper bound on the position of the first chunk that chooses entries.

        If this bound is not before the prompt's last tokens, return `n_prompt`, because the bound does not hold for the
        last tokens, which have a different reach.

        Args:
            n_prompt: prompt length in tokens.
            n_earlier: number of tokens read in earlier turns.
        """
        # A chunk chooses if there are more pages between sink and window than it may choose.
        min_start = self.n_sink + self.n_chosen + self.n_window + PAGE_SIZE
        n_chunks_before = math.ceil(max(0, min_start - n_earlier) / CHUNK_SIZE)
        position = n_earlier + n_chunks_before * CHUNK_SIZE
        last_tokens_start = n_prompt - LAST_TOKENS
        return position if position < last_tokens_start else n_prompt

    def for_last_tokens(self, in_files: bool) -> Reach:
        """Return how many entries the prompt's last tokens read. They usually choose more entries than other chunks."""
        n_chosen = max(LAST_CHOSEN, self.n_chosen)
        if in_files:
            n_chosen = min(n_chosen, LAST_FACTOR_IN_FILES * self.n_chosen)
        return self._replace(n_chosen=n_chosen)


@dataclass(frozen=True, kw_only=True)
class Sparse(Hyperparameters):
    """Keeps all entries, but each answer token reads only a sink, a recent window and the entries its queries choose.

    If the prompt fits the budget, mlx-lm's full attention is used.

    Attributes:
        top_k: number of entries that an answer token chooses per KV head, ranked by the logits of the token's queries.
        budget: total number of entries that an answer token reads, or a share of the prompt ("6.25%"). Give only one of
            `budget` and `top_k`. The default is 1/16 of the prompt, with a minimum of 1,024.
        n_sink: number of entries at the start of the prompt that every token reads.
        n_window: number of entries at the end of the prompt that every token reads, or a share of the budget. Tokens
            also read at least the answer's latest 256 entries. As an answer grows, the window and the answer's older
            entries join the entries that tokens choose among.
        residual: how a token sees the entries that it does not read: as cluster "means", or not at all ("none"). A
            cluster has about 256 entries with similar keys. Each head weighs the cluster means by two factors that are
            fitted at the end of the prompt (`sparse/residual.py`).
        read: whether a prompt chunk reads all earlier entries ("dense"), as in mlx-lm, or only a few of them
            ("sparse"), which was faster on a CPU but can lose facts. With "sparse", a chunk reads the sink, the 256
            tokens before the chunk, the chunk itself, and the pages of 16 neighbouring entries that its queries choose.
            The default is "sparse" if entries are in files or `read_top_k` is set, otherwise "dense".
        read_top_k: number of entries that a prompt chunk chooses per KV head, or a share of the prompt. Not used with
            read="dense". The default is the largest of 1,024, 1/32 of the prompt, and the number of entries whose
            attention costs a quarter as much as the model's other matrix products.
        when: when answer tokens choose entries: only while that is "faster" on this machine, or "always". With
            "faster", at least the first 17 tokens of an answer read all entries. With "always", only the first two do.
            On several Macs, or if entries are in files or stored in 8 bits, tokens always choose. A batch does not
            measure speed, but uses the times that earlier requests recorded on this machine.
        store: where to keep all entries: in memory ("memory", or "8bit" to quantise them), or in a "file".
        store_dir: folder for the files, TMPDIR by default. If the options are written as a string, the folder is left
            out, because it does not affect the entries.
    """

    name = "sparse"

    top_k: int | None = count(None, least=1)
    n_sink: int = count(4)
    n_window: int | str = entry_count("6.25%", least=1)
    budget: int | str | None = entry_count(None, least=2, example="6.25%")
    residual: str | None = option("means", (None, "means").__contains__, "means or none")
    read: str | None = option(None, ("dense", "sparse").__contains__, "dense or sparse")
    read_top_k: int | str | None = entry_count(None, least=16, example="12.5%")
    when: str = choice("faster", "always")
    store: str = choice(
        "memory",
        "8bit",
        "file",
        help="Where --sparse keeps entries: memory (the default), 8bit or file.",
    )
    store_dir: str | None = folder(help="Folder for --store file; default: TMPDIR.")

    def __post_init__(self):
        """Check the values, and compute `budget` from `top_k` if `top_k` is set.

        Raises: SnapKVError: a value is not allowed, or `top_k` and `budget` contradict each other.
        """
        super().__post_init__()
        if self.top_k is not None:
            budget = smallest_budget(self.top_k, self.n_sink, self.n_window)
            leaves_room_for_top_k = budget is not None
            self._require("n_window", leaves_room_for_top_k, "less than all of the budget")
            if self.budget not in (None, budget):
                raise SnapKVError("sparse options top_k and budget say the same: give only one")
            object.__setattr__(self, "budget", budget)
        if self.store_dir is not None:
            object.__setattr__(self, "store_dir", os.path.expanduser(self.store_dir))

    @property
    def implied_option(self) -> str | None:  # type: ignore[override]
        """Return "budget" if it follows from `top_k`, otherwise None."""
        return "budget" if self.top_k is not None else None

    def entries(self, n_prompt: int) -> int:
        """Return how many of a prompt's entries an answer token may read per KV head."""
        if self.budget is None:
            return max(MIN_BUDGET, n_prompt // BUDGET_SHARE)
        return amount(self.budget, n_prompt)

    def quota(self, n_prompt: int) -> Quota:
        """Return the quota of prompt entries that an answer token reads in each full-attention layer.

        Raises: SnapKVError: the budget is a share that comes to less than one entry.
        """
        n_entries = self.entries(n_prompt)
        if n_entries < 1:
            raise SnapKVError(
                f"sparse option budget={self.budget} is less than one entry of this prompt"
            )
        n_window = amount(self.n_window, n_entries)
        return Quota(n_entries, self.n_sink, n_window).shrunk_to_fit()

    def fits(self, n_prompt: int) -> bool:
        """Return whether an answer token would read every entry of a prompt with `n_prompt` tokens."""
        return n_prompt <= self.entries(n_prompt)

    def reach(self, n_prompt: int, n_cheap: int = 0) -> Reach:
        """Return how many earlier entries a chunk reads in a prompt of `n_prompt` tokens.

        Args:
            n_prompt: prompt length in tokens.
            n_cheap: number of entries whose attention costs `CHEAP_SHARE` times as much as the model's other matrix
                products.
        """
        if self.read_top_k is None:
            n_chosen = max(READ_TOP_K, n_prompt // READ_SHARE, n_cheap)
        else:
            n_chosen = max(PAGE_SIZE, amount(self.read_top_k, n_prompt))
        return Reach(
            n_sink=math.ceil(self.n_sink / PAGE_SIZE) * PAGE_SIZE,
            n_chosen=n_chosen // PAGE_SIZE * PAGE_SIZE,
            n_window=CHUNK_WINDOW,
        )
