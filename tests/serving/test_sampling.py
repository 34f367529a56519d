"""Choosing tokens: options, penalties, what can be drawn and how often, seeds."""

import math

import pytest
import torch
import torch.distributed as dist

from megatron_tree.core.comm import Ranks
from megatron_tree.core.comm.wire import PACKET, share, share_all, share_check
from megatron_tree.core.errors import TreeError
from megatron_tree.inference.generation.sampler import Sampler, choose_tokens
from megatron_tree.inference.generation.sampling import SamplingParams, derived_seed
from support.ranks import on_ranks

LOGITS = torch.tensor([0.3, -1.2, 2.0, 1.9, -math.inf, 0.31, 1.1, -3.0, 0.0, 1.05, -0.4, 0.7])


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", math.nan), ("top_k", True), ("top_p", 0.0), ("seed", 2**63), ("stop", ("",)), ("logprobs", 101)],
)
def test_a_wrong_option_is_named(name, value):
    with pytest.raises(ValueError, match=f"^{name}="):
        SamplingParams(**{name: value})


def test_one_stop_text_is_a_list_and_unknown_options_are_refused():
    params = SamplingParams().with_options({"stop": "end", "stop_token_ids": (3,), "temperature": 1})
    assert (params.stop, params.stop_token_ids, params.temperature) == (["end"], [3], 1)
    assert SamplingParams(stop=("a", "b")).stop == ["a", "b"]
    with pytest.raises(ValueError, match="'beams' is not a sampling option: choose from temperature"):
        params.with_options({"beams": 4})


def test_greedy_takes_the_most_likely_and_broken_rows_harm_no_others():
    samplers = [Sampler(SamplingParams()), Sampler(SamplingParams(logprobs=0)), Sampler(SamplingParams())]
    rows = torch.stack([LOGITS, LOGITS.roll(1), LOGITS.clone()])
    rows[2, 5] = math.nan
    (first, second, _), (nothing, chosen, broken) = choose_tokens(samplers, rows)
    assert (first, nothing, second, chosen.token) == (2, None, 3, 3)
    assert isinstance(broken, TreeError) and "the largest logit is nan" in str(broken)
    with pytest.raises(TreeError, match="-inf"):
        samplers[0].choose(torch.full((4,), -math.inf))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_that_overflows_is_an_error_of_its_row(temperature):
    params = SamplingParams(temperature=temperature, seed=1, repetition_penalty=0.01)
    samplers = [Sampler(params, torch.arange(12)) for _ in range(2)]
    tokens, (broken, _) = choose_tokens(samplers, torch.stack([torch.full((12,), 1e37), torch.arange(12.0)]))
    assert isinstance(broken, TreeError) and "the largest logit is inf" in str(broken)
    assert tokens[1] == 11


def _expected(logits, params):
    """Probabilities in float64 by the definitions, without sorting tricks."""
    scores = logits.double() / params.temperature
    if params.top_k:
        scores[scores < scores.sort(descending=True).values[params.top_k - 1]] = -math.inf
    p = scores.softmax(0)
    order = p.argsort(descending=True)
    before = p[order].cumsum(0) - p[order]  # what the likelier ones add up to
    p[order[before >= params.top_p]] = 0
    p[p < params.min_p * p.max()] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    "options", [{"top_p": 0.8}, {"temperature": 1.7, "top_k": 7, "top_p": 0.85, "min_p": 0.15}], ids=str
)
def test_draws_follow_the_exact_distribution(options):
    params, draws = SamplingParams(**{"temperature": 1.0, "seed": 5, **options}), 3000
    sampler, expected = Sampler(params), _expected(LOGITS, params)
    counts = torch.bincount(torch.tensor([sampler.choose(LOGITS).token for _ in range(draws)]), minlength=len(LOGITS))
    assert not counts[expected == 0].any()
    wanted = draws * expected
    rare = wanted < 10  # chi-square holds for cells that are not small: these make one, with the most likely token
    assert counts[~rare].all(), "something that should come up ten times never did"
    rare[int(wanted.argmax())] = True
    wanted = torch.cat((wanted[~rare], wanted[rare].sum()[None]))
    counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
    chi_square, degrees = ((counts - wanted) ** 2 / wanted).sum(), len(wanted) - 1
    # Wilson and Hilferty: the cube root is nearly normal; 4 standard deviations
    deviation = (chi_square / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))
    assert deviation < 4 * math.sqrt(2 / (9 * degrees)), (counts, wanted)


@pytest.mark.parametrize("point", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_draw_what_has_a_probability(monkeypatch, point):
    logits = torch.full((40,), -200.0)  # behind 33 their weights round to nothing in the float64 sum
    logits[7], logits[21], logits[33] = 1.0, 1.1, 0.9
    logits[:3] = -2000.0  # a weight of exactly 0
    monkeypatch.setattr(torch, "rand", lambda n, **__: torch.full((n,), point, dtype=torch.float64))
    token = Sampler(SamplingParams(temperature=1.0, seed=1)).choose(logits).token
    assert token == {0.0: 3, 1 - 2**-53: 33}[point]


def test_penalties_are_those_of_their_definitions():
    logits = torch.tensor([2.0, 1.9, -1.0, 1.0, 0.5])
    repeating = Sampler(SamplingParams(repetition_penalty=2.0, logprobs=5), torch.tensor([0, 0]))
    # 0 stands in the prompt: 2.0 -> 1.0; then 1 in the answer: 1.9 -> 0.95
    assert [repeating.choose(logits).token for _ in range(2)] == [1, 0]
    counting = Sampler(SamplingParams(presence_penalty=0.05, frequency_penalty=0.3), torch.tensor([0, 0]))
    left, expected = logits.clone(), []
    for _ in range(9):
        token = int(left.argmax())
        left[token] -= 0.3 + 0.05 * (token not in expected)
        expected.append(token)
    assert [counting.choose(logits).token for _ in range(9)] == expected
    assert len(set(expected)) > 2


def test_logprobs_are_those_of_the_models_own_logits():
    sampler = Sampler(SamplingParams(temperature=0.5, top_k=2, seed=3, logprobs=4, presence_penalty=1.0))
    choice, expected = sampler.choose(LOGITS), LOGITS.double().log_softmax(0)
    assert choice.logprob == pytest.approx(expected[choice.token].item())
    assert [token for token, _ in choice.top_logprobs] == [2, 3, 6, 9]
    assert [value for _, value in choice.top_logprobs] == pytest.approx(expected[[2, 3, 6, 9]].tolist())
    assert Sampler(SamplingParams(logprobs=0)).choose(LOGITS).top_logprobs == ()


def test_tokens_depend_on_the_seed_and_the_sample_alone():
    rows = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))

    def drawn(seed, sample=0, others=()):
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), sample=sample)
        batch = [sampler, *others]
        return [choose_tokens(batch, rows[i].expand(len(batch), -1))[0][0] for _ in range(10) for i in range(4)]

    alone = drawn(7)
    others = [Sampler(SamplingParams()), Sampler(SamplingParams(temperature=2.0, seed=8, top_p=0.5))]
    torch.manual_seed(99)  # the global generator has no say
    assert drawn(7, others=others) == alone
    assert drawn(7, sample=1) != alone and drawn(8) != alone
    assert len({derived_seed(s, i) for s in range(20) for i in range(20)}) == 400


def _raise(error):
    raise error


@on_ranks(2)
def test_values_and_errors_of_rank_0_are_those_of_all_ranks(rank):
    ranks = Ranks.of(dist.group.WORLD)
    values = [None, {"steps": []}, "x" * (PACKET - 10), "x" * (PACKET - 9), list(range(5000)), "ü€👍"]
    for value in values:
        assert share(value if rank == 0 else "other", ranks) == value
        assert share(value if rank == 1 else "other", ranks, source=1) == value
    assert share_all({"rank": rank}, ranks) == [{"rank": 0}, {"rank": 1}]
    assert share_check(lambda: [rank, 1.5], ranks) == [0, 1.5]
    for error in (ValueError("bad line"), FileNotFoundError("no file")):
        with pytest.raises(ValueError if rank else type(error), match=str(error)):
            share_check(lambda error=error: _raise(error), ranks)
    with pytest.raises(TreeError if rank else ZeroDivisionError):
        share_check(lambda: 1 // 0, ranks)
