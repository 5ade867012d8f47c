"""Multi-head latent attention (MLA): the queries and keys that policies see.

A layer stores one latent for all heads, and the positional part of one key; a query head's logit is
`embed_q(q_nope) . latent + q_pe . k_pe`. So a key, as policies see it, is `[latent, k_pe]`, and a query
`[embed_q(q_nope), q_pe]`. mlx-lm's modules give the attention function `q_nope`, or for a single token
`embed_q(q_nope)`, and hide `q_pe` in a mask of scores; some give both parts of the query at once.
"""

from typing import Any

import mlx.core as mx

from ..entries.queries import Captured


def asked(attention: Any, captured: Captured, positional: mx.array, absorbed: bool) -> Captured:
    """The whole queries of a call.

    Given are those that the attention function has, perhaps with `embed_q` absorbed, and `q_pe`, of
    `(B, n_heads, L, ...)` each.
    """
    n_plain, queries = attention.qk_nope_head_dim, captured.heads
    if absorbed or queries.shape[3] == n_plain:
        queries = mx.concatenate([queries, positional], axis=-1)
    if absorbed:
        return captured._replace(heads=queries)

    def read(some: mx.array) -> mx.array:
        plain, rest = some[..., :n_plain], some[..., n_plain:]
        return mx.concatenate([attention.embed_q(plain), rest], axis=-1)

    return captured._replace(heads=queries, read=read)


def output_weights(attention: Any, output: Any, n_heads: int, like: mx.array) -> mx.array:
    """The projection `output` of latents `like` these, by query head: `(n_heads, kv_lora_rank, hidden_size)`."""
    rank = like.shape[3]
    values = attention.unembed_out(mx.eye(rank, dtype=like.dtype)[None, None])[0]  # by head
    D = values.shape[2]
    nothing = output(mx.zeros((1, n_heads * D), like.dtype))
    made = []
    for head in range(n_heads):  # the others' parts are zeros
        sides = [(0, 0), (head * D, (n_heads - 1 - head) * D)]
        made.append(output(mx.pad(values[head], sides)) - nothing)
    return mx.stack(made)
