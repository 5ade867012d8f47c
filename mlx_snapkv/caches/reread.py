"""A layer's entries of tokens that were read again, by themselves, beyond the trained length."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx

from ..entries.entries import Entries
from ..entries.quantization import write


class Reread(NamedTuple):
    """Entries that stand in for some of those that the prompt has."""

    which: mx.array  # for which of these: ascending uint32 `(n,)`
    entries: Entries  # at the positions that their tokens were read at

    def among(self, others: Entries) -> Entries:
        """The others, with these in the place of some."""
        keys, values = others.plain()
        positions = mx.array(others.positions)
        write((keys, values), self.which, self.entries.plain())
        positions[..., self.which] = self.entries.positions
        return replace(others, stored_keys=keys, stored_values=values, given_positions=positions)
