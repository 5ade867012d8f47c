"""Create samplers that each have their own random sequence."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm import sample_utils

from ..errors import OptionError
from .body import Body, Defaults

SAMPLING_FIELDS = {"top_p", "top_k", "min_p", "xtc_probability", "xtc_threshold"}
# A temperature or top_p below this means greedy decoding, because sampling in float32 would pick the most likely token
# anyway, or fail.
NEARLY_ZERO = 1e-6


def make_sampler(
    body: Body, tokenizer, vocabulary_size: int, defaults: Defaults, seed: int
) -> Callable | None:
    """Return the sampler for a body, or None for greedy decoding. `seed` is used if the body has none.

    Raises: OptionError: `top_k` is not smaller than the vocabulary.
    """
    options = vars(defaults) | body.model_dump(include=SAMPLING_FIELDS, exclude_none=True)
    del options["max_tokens"]  # the sampler takes all other defaults
    if body.temperature is not None:
        options["temp"] = body.temperature
    top_k = options["top_k"]
    if top_k >= vocabulary_size:
        raise OptionError("top_k", f"less than the vocabulary's {vocabulary_size}", top_k)
    # A top_p of 0 means no limit in mlx-lm's flags, and therefore in `defaults`. In a body it means greedy decoding.
    has_zero_top_p = body.top_p is not None and body.top_p < NEARLY_ZERO
    if options["temp"] < NEARLY_ZERO or has_zero_top_p:
        return None
    # XTC must not remove these tokens. mlx-lm's server exempts the same tokens.
    exempt_from_xtc = (*tokenizer.encode("\n"), *tokenizer.eos_token_ids)
    sampler = sample_utils.make_sampler(
        **options,
        xtc_special_tokens=[token for token in exempt_from_xtc if token < vocabulary_size],
    )
    if body.seed is not None:
        seed = body.seed
    # XTC draws a second random number, which decides whether XTC is applied to this token.
    n_draws = 2 if options["xtc_probability"] > 0 else 1
    return SeededSampler(sampler, seed % 2**64, n_draws)


class SeededSampler:
    """A sampler with its own random sequence, independent of other requests in the batch.

    It samples like mlx-lm's loop after `mx.random.seed(seed)`. MLX has a single random generator, so the generator's
    state is set before each token. The state is computed on the CPU, without waiting for the model.

    Args:
        sampler: function that draws a token from log-probabilities `(1, vocab_size)` with MLX's generator.
        seed: 64-bit seed.
        n_draws: number of random draws per token.
    """

    def __init__(self, sampler: Callable[[mx.array], mx.array], seed: int, n_draws: int):
        """Start the random sequence from `seed`."""
        self._sampler = sampler
        self._key = mx.random.key(seed)
        self._n_draws = n_draws

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Sample the next token `(1,)` from log-probabilities `(1, vocab_size)`."""
        # MLX's generator uses the two 32-bit halves of its seed as its key. So this seed sets the key to `_key`.
        key_halves: Any = self._key.tolist()
        high, low = key_halves
        mx.random.seed((high << 32) | low)
        for _ in range(self._n_draws):
            next_keys = mx.random.split(self._key, stream=mx.cpu)
            self._key = next_keys[0]  # MLX's generator also continues with the first key
        return self._sampler(logprobs)
