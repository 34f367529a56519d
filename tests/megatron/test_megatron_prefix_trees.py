"""Rows with shared prefixes as one thd batch of a GPTModel, against every row alone with Megatron's attention."""

import dataclasses
import functools
import random

import pytest
import torch
import torch.distributed as dist

from megatron_tree import prefix_tree, unshard_sequence
from megatron_tree.integrations import megatron as tree_mcore
from support.megatron_dsa import DSA, build_dsa, build_weighted, hadamard_in_torch, logged_losses, run_dsa, with_options
from support.megatron_hybrid import build_hybrid, mixers_in_torch
from support.megatron_models import Case, build_model, check, gradients_over_cp, megatron, mtp_losses, reference_of
from support.prefix_trees import grown
from support.ranks import on_ranks
from support.refusals import refused_with
from support_matrix import slow_but


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows(Case):
    """Rows that begin alike, of at most 32 tokens, and how many rows of a rank there are multiples of."""

    multiple_of: int = 3
    pattern: str = ""
    """Of a hybrid model (`build_hybrid`)."""

    @property
    def documents(self):
        """Lengths of the rows, without the last tokens, which are labels only."""
        return [len(row) - 1 for row in _rows()[0]]

    @property
    def num_further(self):
        """Layers of multi-token prediction."""
        return dict(self.extra).get("mtp_num_layers", 0)


def _rows():
    draw = random.Random(3)
    rows = grown(draw, 7, vocab=3, longest=10)
    return rows, [[draw.choice([0.0, 1.0, 2.0]) for _ in row] for row in rows]


def each_alone(case, build=build_model):
    """(weighted losses [n, 1, s] of the rows, then those of multi-token prediction summed over rows, gradients)."""
    model, (rows, weights), found = build(case), _rows(), []
    longest = max(map(len, rows))
    sums = torch.zeros(case.num_further, 1, longest)
    for row, given in zip(rows, weights, strict=True):
        row, given = torch.tensor([row]), torch.tensor([given])
        losses, n = torch.zeros(1, longest), row.shape[1] - 1
        if n:
            masked = {"loss_mask": given[:, 1:]} if case.num_further else {}
            with mtp_losses() as further:
                each = model(row[:, :-1], torch.arange(n)[None], None, labels=row[:, 1:], **masked) * given[:, 1:]
            each.sum().backward()
            losses[:, :n] = each.detach()
            for total, x in zip(sums, further, strict=True):
                total[:, :n] += x
        found.append(losses)
    return torch.stack((*found, *sums)), gradients_over_cp(model)


def as_tree(case, build=build_model):
    """The same of the model that gets their tree."""
    from megatron.core import parallel_state

    group, (rows, weights) = parallel_state.get_context_parallel_group(), _rows()
    tree = prefix_tree(rows, weights=weights, num_predicted=1 + case.num_further)
    batch, packed = tree_mcore.dispatch_batch({"prefix_tree": tree}, multiple_of=case.multiple_of)
    model = tree_mcore.use_dispatched_documents(build(case))
    options = {"labels": batch["labels"], "packed_seq_params": packed}
    options |= {"loss_mask": batch["loss_mask"]} if case.num_further else {}
    with mtp_losses() as further:
        losses = model(batch["tokens"], batch["position_ids"], None, **options)
    (losses * batch["loss_mask"]).sum().backward()
    assert losses.shape[1] % case.multiple_of == 0
    whole, *further = (unshard_sequence(x.detach(), group, 1, packed.layout) for x in (losses, *further))
    found = (tree.rows_of(whole) * tree.row_weights)[:, None]
    sums = [found.new_zeros(1, found.shape[2]).index_add(1, tree.position_ids[0], x) for x in further]
    return torch.stack((*found, *sums)), gradients_over_cp(model)


def alone(case):
    return dataclasses.replace(reference_of(case), multiple_of=1)


WINDOW = (("window_size", (5, 0)), ("window_attn_skip_freq", 2), ("softmax_type", "learnable"))
MTP = (("mtp_num_layers", 2),)
RECOMPUTED = (("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.supports("rows that share prefixes (prefix_tree)", with_="cp = 1, 2, 4; MLA, windows, sinks, Ulysses")
@pytest.mark.supports("multi-token prediction (mtp_num_layers)", with_="rows that share prefixes")
def test_losses_and_gradients_are_those_of_the_rows(cp):
    case = functools.partial(Rows, cp=cp, tree=True, batch=1)
    kinds = {1: [{}, {"extra": WINDOW}, {"positions": "learned_absolute", "extra": MTP}]}
    kinds[2] = [{"extra": WINDOW + RECOMPUTED}, {"mla": True, "extra": MTP}, {"positions": "learned_absolute"}]
    kinds[4] = [{"extra": MTP}, {"cp_comm_type": "a2a"}]
    check(cp, [case(**kind) for kind in kinds[cp]], run=as_tree, reference=alone, run_reference=each_alone)


@on_ranks(1)
def test_a_rank_without_labels():
    """Multi-token prediction of a prompt's tokens gives no loss, and no NaN."""
    with megatron(tp=1, pp=1, cp=1):
        batch, packed = tree_mcore.dispatch_batch({"prefix_tree": prefix_tree(_rows()[0], num_predicted=3)})
        case = Rows(cp=1, tree=True, batch=1, extra=MTP + (("calculate_per_token_loss", False),))
        model = tree_mcore.use_dispatched_documents(build_model(case))
        options = {"labels": batch["labels"], "loss_mask": torch.zeros_like(batch["loss_mask"])}
        with mtp_losses() as further:
            losses = model(batch["tokens"], batch["position_ids"], None, packed_seq_params=packed, **options)
        losses.sum().backward()
        assert len(further) == 2 and not torch.stack(further).any()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@on_ranks(1)
def test_rows_of_one_token():
    """They predict nothing, so an indexer learns nothing from them."""
    with megatron(tp=1, pp=1, cp=1), hadamard_in_torch() as dsa:
        batch, packed = tree_mcore.dispatch_batch({"prefix_tree": prefix_tree([[1], [2]])})
        model = tree_mcore.use_dispatched_documents(build_dsa(Rows(cp=1, tree=True, batch=1, mla=True, extra=DSA)))
        losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=packed)
        (losses * batch["loss_mask"]).sum().backward()
        assert not logged_losses(dsa).any()
        assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def _in_torch(run, case):
    with mixers_in_torch():
        return run(case, lambda case: build_hybrid(case, case.pattern))


@pytest.mark.parametrize("pattern", ["M*-M", "G*G"])
@pytest.mark.parametrize("cp", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.supports("rows that share prefixes (prefix_tree)", with_="Mamba, gated delta nets")
def test_recurrent_layers(cp, pattern):
    """A branch begins with the state, and the rows of its convolutions, where it leaves another."""
    case = functools.partial(Rows, cp=cp, tree=True, batch=1, pattern=pattern)
    cases = [case(), *([case(extra=RECOMPUTED)] if cp == 2 and "G" in pattern else [])]
    runs = dict(run=functools.partial(_in_torch, as_tree), run_reference=functools.partial(_in_torch, each_alone))
    check(cp, cases, reference=alone, **runs)


@pytest.mark.parametrize("cp", slow_but([2], [1, 2, 4]))
@pytest.mark.supports("rows that share prefixes (prefix_tree)", with_="DSA")
def test_sparse_attention(cp):
    """The loss of an indexer is the mean over the tokens of all rows, also of shared ones."""
    kinds = [{}, {"extra": with_options(dsa_indexer_use_sparse_loss=True, rope_type="yarn")}]
    cases = [Rows(**{"cp": cp, "tree": True, "batch": 1, "mla": True, "extra": DSA} | kind) for kind in kinds]
    runs = dict(run=functools.partial(run_dsa, run=as_tree, build=build_dsa))
    runs["run_reference"] = functools.partial(run_dsa, run=each_alone, build=build_weighted)
    check(cp, cases, reference=alone, **runs)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.refuses("prefix_tree with attention dropout", when="the forward")
@on_ranks()
def test_what_takes_no_tree(world):
    case = Rows(cp=world, tree=True, batch=1)

    def refused(messages, build, **options):
        batch, packed = tree_mcore.dispatch_batch({"prefix_tree": trees[options.pop("num_predicted", 1)]})
        model = tree_mcore.use_dispatched_documents(build(dataclasses.replace(case, **options)))
        with refused_with(*messages):
            model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=packed)

    with megatron(tp=1, pp=1, cp=world):
        trees = {n: prefix_tree(_rows()[0], num_predicted=n) for n in (1, 2)}
        tree = trees[1]
        batch, packed = tree_mcore.dispatch_batch({"prefix_tree": tree})
        with pytest.raises(ValueError, match="call .*use_dispatched_documents"):  # its positions would be others
            build_model(case)(batch["tokens"], batch["position_ids"], None, packed_seq_params=packed)
        refused(
            ["mrope", "takes no prefix_tree"], build_model, positions="mrope", extra=(("mrope_section", [1, 1, 2]),)
        )
        mtp = (("mtp_num_layers", 1),)
        refused(["mtp_num_layers=1", r"prefix_tree(rows, num_predicted=2)"], build_model, extra=mtp)
        refused(["pass loss_mask=batch['loss_mask']"], build_model, extra=mtp, num_predicted=2)
        dropout = (("attention_dropout", 0.1),)
        refused(["attention_dropout=0.1", "takes no prefix_tree"], build_model, extra=dropout)
        with pytest.raises(ValueError, match=r"beside \['tokens'\]"):
            tree_mcore.dispatch_batch({"prefix_tree": tree, "tokens": None}, None)
        with pytest.raises(ValueError, match="prefix_tree is a int"):
            tree_mcore.dispatch_batch({"prefix_tree": 1}, None)
    dist.barrier()
