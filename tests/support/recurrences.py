"""A recurrence, token by token, as the oracle of recurrent layers: no chunks, no closed forms."""

import torch


def delta_rule(inputs, v, initial_state):
    """Gated delta rule: S_t = exp(g_t) (1 - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, o_t = q_t S_t."""
    q, k, g, beta = inputs
    state = (
        q.new_zeros(*v[:, 0, :, :1].shape[:-1], q.shape[-1], v.shape[-1]) if initial_state is None else initial_state
    )
    outs = []
    for t in range(v.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        change = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhd,bhdv->bhv", k[:, t], state))
        state = state + torch.einsum("bhd,bhv->bhdv", k[:, t], change)
        outs.append(torch.einsum("bhd,bhdv->bhv", q[:, t], state))
    return torch.stack(outs, 1), state


def decaying(inputs, v, initial_state):
    """Linear attention whose states decay: S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T; g [b, s, h] or [b, s, h, d]."""
    q, k, g = inputs
    g = g if g.dim() == 4 else g[..., None]
    state = q.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[-1]) if initial_state is None else initial_state
    outs = []
    for t in range(v.shape[1]):
        state = state * g[:, t, ..., None].exp() + torch.einsum("bhd,bhv->bhdv", k[:, t], v[:, t])
        outs.append(torch.einsum("bhd,bhdv->bhv", q[:, t], state))
    return torch.stack(outs, 1), state


def delta_inputs(batch, tokens, heads, head_dim, head_dim_v, *, seed, dtype=torch.float64):
    """(inputs, v) of `delta_rule`, whose states live long."""
    draw = torch.Generator().manual_seed(seed)
    random = [
        torch.randn(batch, tokens, heads, d, generator=draw, dtype=dtype) for d in (head_dim, head_dim, head_dim_v)
    ]
    q, k, v = random
    g, beta = (torch.rand(batch, tokens, heads, generator=draw, dtype=dtype) for _ in range(2))
    return [q, k / k.norm(dim=-1, keepdim=True), -0.05 * g, beta], v
