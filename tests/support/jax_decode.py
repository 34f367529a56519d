"""The paper's Algorithm 3 in JAX, a host device for each shard; a program, since JAX counts devices at its start.

    python jax_decode.py SHARDS IN.npz OUT.npz

IN: q [b, h, d], k and v [b, s, h_kv, d], float64; SHARDS divides s. OUT: out [b, h, d] and lse [b, h].
"""

import os
import sys

import numpy as np


def algorithm_3(shards: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, PartitionSpec

    jax.config.update("jax_enable_x64", True)
    everyone, own_tokens = PartitionSpec(), PartitionSpec(None, "ranks")

    def step(q, k, v):
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[2], axis=2) for x in (k, v))
        scores = jnp.einsum("bhd,bshd->bhs", q, k) / q.shape[-1] ** 0.5
        lse = jax.nn.logsumexp(scores, axis=-1)
        out = jnp.einsum("bhs,bshd->bhd", jnp.exp(scores - lse[..., None]), v)
        largest = jax.lax.pmax(lse, "ranks")  # the first all-reduce
        weight = jnp.exp(lse - largest)
        numerator = jax.lax.psum(out * weight[..., None], "ranks")  # the second, with the denominators
        denominator = jax.lax.psum(weight, "ranks")
        return numerator / denominator[..., None], largest + jnp.log(denominator)

    mesh = Mesh(np.array(jax.devices()[:shards]), ("ranks",))
    specs = dict(in_specs=(everyone, own_tokens, own_tokens), out_specs=(everyone, everyone))
    out, lse = jax.jit(jax.shard_map(step, mesh=mesh, **specs))(q, k, v)
    return np.asarray(out), np.asarray(lse)


if __name__ == "__main__":
    shards, inputs, results = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={shards}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    with np.load(inputs) as file:
        out, lse = algorithm_3(shards, file["q"], file["k"], file["v"])
    np.savez(results, out=out, lse=lse)
