"""Do activations move for a chunk of a prompt, or weights?"""

from megatron_tree.plan.prefill import PrefillSizes, plan_prefill

H = 8192
LAYERS = 80
SIZES = PrefillSizes(  # Llama 70B in bf16 on 16 ranks: 64 heads, 8 KV heads
    world=16,
    head_groups=8,
    hidden=2 * H,
    heads=2 * 2 * (64 + 8) * 128,
    attention=[15 * 2 * (2 * H * H + 2 * H * 1024) // 16] * LAYERS,
    blocks=[15 * 2 * 3 * H * 28672 // 16] * LAYERS,
)


def test_the_form_that_sends_less():
    for num_tokens in (1, 2048, 8192, 12288, 32768, 131072):
        plan = plan_prefill(num_tokens, SIZES)
        assert plan.shares_tokens == (plan.sharing < plan.otherwise)
    assert not plan_prefill(8192, SIZES).shares_tokens
    middle, long = plan_prefill(16384, SIZES), plan_prefill(65536, SIZES)
    assert middle.shares_tokens and not any(middle.gathers)  # attention's weights are gathered, the MLPs' tokens
    assert long.shares_tokens and all(long.gathers)
    assert plan_prefill(131072, SIZES).sharing < 1.1 * long.sharing  # bytes stop growing with the chunk ...
    assert plan_prefill(131072, SIZES).otherwise == 2 * long.otherwise  # ... which activations don't


def test_bytes():
    sizes = PrefillSizes(world=4, head_groups=2, hidden=10, heads=30, attention=[50], blocks=[70, 1000])
    plan = plan_prefill(8, sizes)
    hidden = 8 * 10 * 3 / 4  # gathered, or reduced and scattered
    assert plan.gathers == (True, False)
    assert plan.sharing == hidden / 4 + 50 + 70 + 2 * hidden + 8 / 4 * 30 / 2
    assert plan.otherwise == 2 * hidden * 4  # the embedding, attention, two blocks


def test_one_rank_runs_everything():
    assert not plan_prefill(10**6, SIZES._replace(world=1, head_groups=1)).shares_tokens
