"""Initialise weights so that a model learns to look facts up within minutes on a CPU.

From random weights, most of a small training budget is spent on finding two circuits: attention to the previous tokens,
and attention to what followed an earlier occurrence of the token (induction heads, Olsson et al. 2022). `prime` sets up
rough versions of both, which training improves. The residual stream is initially partitioned: coordinate 0 is a
constant, `TOKEN` is the token's embedding, and `LAGS` are projections of the embeddings one and two tokens earlier.
"""

from __future__ import annotations

import torch

CONSTANT, TOKEN = 0, slice(1, 64)
LAGS = {1: slice(64, 96), 2: slice(96, 128)}
LAG_DIMS = 32
HEAD_DIM, ROPE_BASE = 64, 1e7


def prime(arch: str, model: torch.nn.Module) -> None:
    """Set the weights of a model's first two layers. `arch` is "llama" or "qwen3-next"."""
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding.normal_(std=0.1)
        embedding[:, 64:] *= 0.1
        embedding[:, CONSTANT] = 0.3
        # Use one projection for all lags, so that lags can be compared with each other.
        projection = torch.linalg.qr(torch.randn(63, LAG_DIMS))[0].T.contiguous()
        layers = model.model.layers
        if arch == "llama":
            _llama_lags(layers[0].self_attn, projection)
            _llama_induction(layers[1].self_attn, projection)
        else:
            _qwen_lags(layers[0].linear_attn, projection)
            _qwen_induction(layers[1].self_attn, projection)


def _llama_lags(attention, projection: torch.Tensor) -> None:
    """Make layer 0's heads attend 1, 2, 3 and 4 tokens back. The first two write projections of those tokens."""
    amplitude, pairs = 1.7, 8
    frequency = ROPE_BASE ** (-torch.arange(32) / 32)[:pairs]
    heads = attention.q_proj.weight.view(4, HEAD_DIM, 128)
    keys = attention.k_proj.weight.view(2, HEAD_DIM, 128)
    keys[:, :pairs, CONSTANT] = amplitude
    # Heads 0 and 1 share KV head 0, heads 2 and 3 share KV head 1.
    for head, lag in enumerate((1, 2, 3, 4)):
        heads[head, :pairs, CONSTANT] = amplitude * torch.cos(lag * frequency)
        heads[head, 32 : 32 + pairs, CONSTANT] = -amplitude * torch.sin(lag * frequency)
    attention.v_proj.weight.view(2, HEAD_DIM, 128)[0, :LAG_DIMS, TOKEN] = projection
    for head, lag in ((0, 1), (1, 2)):
        out = attention.o_proj.weight[LAGS[lag], head * HEAD_DIM : head * HEAD_DIM + LAG_DIMS]
        out += 0.15 * torch.eye(LAG_DIMS)


def _llama_induction(attention, projection: torch.Tensor) -> None:
    """Make layer 1 attend to what followed an earlier occurrence of a token.

    KV head 0 compares the current token with each key's previous token. KV head 1 compares the previous token with the
    token two before each key. Only RoPE's 12 slowest pairs are used, because they change little over thousands of
    tokens.
    """
    slow = torch.cat([torch.arange(20, 32), torch.arange(52, 64)])
    n = len(slow)
    queries = attention.q_proj.weight.view(2, 2, HEAD_DIM, 128)
    keys = attention.k_proj.weight.view(2, HEAD_DIM, 128)
    pick = torch.eye(LAG_DIMS)[:n]
    for head in range(2):
        queries[0, head, slow, TOKEN] += pick @ projection
        queries[1, head, slow, LAGS[1]] += pick
    keys[0, slow, LAGS[1]] += pick
    keys[1, slow, LAGS[2]] += pick
    _copying(attention)


def _copying(attention) -> None:
    """Make the values and the output projection copy the attended token's embedding to `TOKEN`."""
    identity = torch.eye(63)
    values = attention.v_proj.weight.view(2, HEAD_DIM, 128)
    for kv_head in range(2):
        values[kv_head, :63, TOKEN] += identity
    out = attention.o_proj.weight.view(128, 4, HEAD_DIM)
    for head in range(4):
        out[TOKEN, head, :63] += 0.05 * identity


def _qwen_lags(linear, projection: torch.Tensor) -> None:
    """Make layer 0's convolution delay values by 1 and 2 tokens. A fast decay forgets older values."""
    d = 32
    # Rows of a key head: q, k, v of 2 heads, z of 2 heads.
    rows = linear.in_proj_qkvz.weight.view(2, 6 * d, 128)
    rows[0, : 2 * d, CONSTANT] = torch.rand(d).repeat(2) + 0.5
    rows[0, 4 * d :, CONSTANT] = 0.5
    convolution = linear.conv1d.weight[:, 0]  # channels: q (2 heads), k (2 heads), v (4 heads)
    for channels in (slice(0, d), slice(2 * d, 3 * d)):
        convolution[channels] = torch.tensor([0.0, 0, 0, 1])
    out = linear.out_proj.weight
    for head, lag in ((0, 1), (1, 2)):
        rows[0, (2 + head) * d : (3 + head) * d, TOKEN] = projection
        taps = torch.zeros(4)
        taps[3 - lag] = 1.0
        convolution[(4 + head) * d : (5 + head) * d] = taps
        linear.A_log[head] = 2.77
        out[LAGS[lag], head * d : (head + 1) * d] += 0.15 * torch.eye(d)


def _qwen_induction(attention, projection: torch.Tensor) -> None:
    """Set up layer 1 as in the LLaMA, in the dimensions that partial RoPE does not rotate."""
    content = slice(16, 16 + LAG_DIMS)
    queries = attention.q_proj.weight.view(2, 2, 2, HEAD_DIM, 128)
    queries = queries[:, :, 0]  # the other half is the gate
    keys = attention.k_proj.weight.view(2, HEAD_DIM, 128)
    for head in range(2):
        queries[0, head, content, TOKEN] += projection
        queries[1, head, content, LAGS[1]] += torch.eye(LAG_DIMS)
    keys[0, content, LAGS[1]] += torch.eye(LAG_DIMS)
    keys[1, content, LAGS[2]] += torch.eye(LAG_DIMS)
    attention.q_norm.weight.fill_(0.5)
    attention.k_norm.weight.fill_(0.5)
    _copying(attention)
