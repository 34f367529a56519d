"""Sizes of a model's recurrent layers: their weights, what they keep of a row, and what ranks exchange of it."""

from __future__ import annotations

from typing import NamedTuple

from .layers import Config

STATE_WORD = 4  # bytes: states are fp32


class Recurrent(NamedTuple):
    """Words of one recurrent layer; a row's state is `heads` matrices [head_dim, head_dim_v]."""

    layers: int
    heads: int
    """Value heads, which ranks can share; of Mamba 1 and of a convolution alone, channels."""
    key_heads: int
    """Each of them serves as many value heads: the keys of delta rules, the groups of Mamba 2."""
    weights: int
    key_weights: int
    """Those of them that belong to key heads."""
    whole_weights: int
    """Those that every rank has."""
    head_dim: int
    """Rows of a head's state; 0: the layer is a convolution alone."""
    head_dim_v: int
    map_numbers: int
    """Of a head's transition between two segments: a matrix, a diagonal, or 1."""
    channels: int
    """Of the convolution."""
    key_channels: int
    """Those of them that belong to key heads."""
    kernel: int

    @classmethod
    def of(cls, config: Config, layers: int) -> Recurrent:
        """Raises: ValueError that names a missing field, or for layers that are not planned."""
        families = (
            ("linear_num_value_heads", _gated_delta),
            ("linear_key_head_dim", _gated_delta),
            ("linear_attn_config", _kimi_delta),
            ("linear_num_heads", _kimi_delta),
            ("short_conv_kernel_size", _kimi_delta),
            ("conv_L_cache", _convolution),
            ("mamba_dt_rank", _mamba1),
            ("mamba_d_state", _mamba2),
            ("ssm_state_size", _mamba2),
        )
        sizes = next((sizes for name, sizes in families if name in config), None)
        if config.get("model_type") == "olmo_hybrid":  # its sizes may be left out
            sizes = _gated_delta
        if sizes is None or config.get("model_type") == "zamba":
            raise ValueError(
                "the model's config describes recurrent layers that are not planned: planned are gated and Kimi delta "
                "rules, Mamba 1 (Jamba) and 2, and short convolutions"
            )
        return cls(layers, **sizes(config))

    @property
    def state(self) -> int:
        """Numbers of a row's recurrent state, in fp32."""
        return self.heads * self.head_dim * self.head_dim_v

    @property
    def general(self) -> bool:
        """Whether a transition is a matrix, which the layer's kernel itself returns."""
        return self.map_numbers == self.head_dim**2 and self.head_dim > 0

    @property
    def conv(self) -> int:
        """Numbers of a row's convolution state, which holds the last `kernel` rows, in the model's dtype."""
        return self.channels * self.kernel

    def share(self, ranks: int) -> float:
        """Of the value heads, on the busiest of `ranks` ranks: those of whole key heads, or some of one."""
        if ranks <= self.key_heads:
            return self._key_share(ranks)
        return -(-self.heads // (ranks // self.key_heads * self.key_heads)) / self.heads

    def _key_share(self, ranks: int) -> float:
        return -(-self.key_heads // ranks) / self.key_heads

    def weights_on(self, ranks: int) -> float:
        """Of a layer, on the busiest of `ranks` ranks that share its heads."""
        of_values = self.weights - self.key_weights - self.whole_weights
        return self.whole_weights + self.key_weights * self._key_share(ranks) + of_values * self.share(ranks)

    def row_bytes(self, bytes_per_word: int, ranks: int = 1) -> float:
        """Of the states of a row in all layers, on the busiest of `ranks` ranks that share the heads."""
        channels = self.key_channels * self._key_share(ranks)
        channels += (self.channels - self.key_channels) * self.share(ranks)
        return self.layers * (self.state * STATE_WORD * self.share(ranks) + channels * self.kernel * bytes_per_word)


def _gated_delta(config: Config) -> dict[str, int]:
    """Qwen3-Next, Qwen3.5, OLMo Hybrid: q, k, v through a convolution, z, b and a."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    h_k = config.number("linear_num_key_heads", default=heads)
    h_v = config.number("linear_num_value_heads", default=heads)
    d_k = config.number("linear_key_head_dim", default=int(0.75 * hidden / h_k))
    d_v = config.number("linear_value_head_dim", default=2 * d_k)
    kernel, values = config.number("linear_conv_kernel_dim"), h_v * d_v
    channels = 2 * h_k * d_k + values
    weights = hidden * (channels + values + 2 * h_v) + channels * kernel + values * hidden + d_v + 2 * h_v
    return dict(
        heads=h_v,
        key_heads=h_k,
        weights=weights,
        key_weights=2 * h_k * d_k * (hidden + kernel),
        whole_weights=d_v,
        head_dim=d_k,
        head_dim_v=d_v,
        map_numbers=d_k * d_k,
        channels=channels,
        key_channels=2 * h_k * d_k,
        kernel=kernel,
    )


def _kimi_delta(config: Config) -> dict[str, int]:
    """Kimi Linear, whose gates are products of two thin matrices; Bailing, whose gates are whole."""
    hidden, sizes = config.number("hidden_size"), Config(config.get("linear_attn_config", {}))
    bailing = "layer_group_size" in config
    heads = sizes.number("num_heads", default=config.number("linear_num_heads", "num_attention_heads"))
    d = sizes.number("head_dim", default=config.number("linear_head_dim", "head_dim"))
    kernel = config.number("linear_conv_kernel_dim", "short_conv_kernel_size", default=4)
    kernel, width = sizes.number("short_conv_kernel_size", default=kernel), heads * d
    gate = hidden * width if bailing else d * (hidden + width)
    weights = 4 * hidden * width + 3 * width * kernel + 2 * gate + hidden * heads + width + heads + d
    return dict(
        heads=heads,
        key_heads=heads,
        weights=weights,
        key_weights=0,
        whole_weights=d + (0 if bailing else 2 * d * hidden),
        head_dim=d,
        head_dim_v=d,
        map_numbers=d * d,
        channels=3 * width,
        key_channels=0,
        kernel=kernel,
    )


def _mamba2(config: Config) -> dict[str, int]:
    """Bamba, Falcon H1, Granite hybrids, Nemotron H, Zamba 2."""
    hidden, n = config.number("hidden_size"), config.number("mamba_d_state", "ssm_state_size")
    heads = config.number("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    inner = config.number("mamba_d_ssm", default=config.number("mamba_expand", "expand", default=2) * hidden)
    d_v = config.number("mamba_d_head", "mamba_head_dim", "mamba_headdim", default=inner // heads)
    groups = config.number("mamba_n_groups", "n_groups", "mamba_ngroups", default=1)
    kernel, inner = config.number("mamba_d_conv", "conv_kernel"), heads * d_v
    channels = inner + 2 * groups * n
    normed = config.get("mamba_rms_norm", "mamba_d_ssm" not in config)
    weights = hidden * (inner + channels + heads) + channels * (kernel + 1) + inner * (hidden + normed) + 3 * heads
    return dict(
        heads=heads,
        key_heads=groups,
        weights=weights,
        key_weights=2 * groups * n * (hidden + kernel + 1),
        whole_weights=0,
        head_dim=n,
        head_dim_v=d_v,
        map_numbers=1,
        channels=channels,
        key_channels=2 * groups * n,
        kernel=kernel,
    )


def _mamba1(config: Config) -> dict[str, int]:
    """Jamba: every channel is a head, whose state decays number by number."""
    hidden, n = config.number("hidden_size"), config.number("mamba_d_state")
    rank = config.number("mamba_dt_rank", default=-(-hidden // 16))
    inner, kernel = config.number("mamba_expand", default=2) * hidden, config.number("mamba_d_conv")
    weights = 3 * hidden * inner + inner * (kernel + 1) + inner * (rank + 2 * n) + inner * (rank + 1)
    weights += inner * (n + 1) + rank + 2 * n
    return dict(
        **_channels(inner, weights, kernel), whole_weights=rank + 2 * n, head_dim=n, head_dim_v=1, map_numbers=n
    )


def _convolution(config: Config) -> dict[str, int]:
    """LFM 2 and 3."""
    hidden, kernel = config.number("hidden_size"), config.number("conv_L_cache")
    weights = 4 * hidden * hidden + hidden * kernel
    return dict(**_channels(hidden, weights, kernel), whole_weights=0, head_dim=0, head_dim_v=0, map_numbers=0)


def _channels(count: int, weights: int, kernel: int) -> dict[str, int]:
    """A layer without heads: each channel is one."""
    return dict(
        heads=count, key_heads=count, weights=weights, key_weights=0, channels=count, key_channels=0, kernel=kernel
    )
