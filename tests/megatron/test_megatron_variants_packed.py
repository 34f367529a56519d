"""Packed documents (thd) in a GPTModel on 1, 2 and 4 ranks against every document alone with Megatron's attention."""

import dataclasses
import functools
import itertools
import sys
import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_tree import shard_positions
from megatron_tree.integrations import megatron as tree
from megatron_tree.integrations.megatron.megatron_lm import dispatched_batches
from support.megatron_dsa import DSA, build_weighted, run_dsa, with_options
from support.megatron_hybrid import build_hybrid, mixers_in_torch
from support.megatron_models import (
    VOCAB,
    Case,
    build_model,
    check,
    gradients_over_cp,
    megatron,
    mtp_losses,
    multimodal_positions,
    reference_of,
    schedules,
)
from support.ranks import on_ranks
from support.refusals import refused_with


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed(Case):
    """A batch of documents of these lengths, each padded for `padded_for` ranks."""

    documents: tuple = (13, 0, 27, 5, 3)
    padded_for: int = 4
    counts_padding: bool = False  # cu_seqlens are those of the padded documents
    over_data: bool = False  # each data-parallel rank brings some of the documents

    @property
    def rows(self):
        """Every document's rows, its padding included: zigzag wants a multiple of 2p."""
        return [-(-n // (2 * self.padded_for)) * 2 * self.padded_for for n in self.documents]


def text_of(case):
    """[tokens and labels of a document]."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, VOCAB, (n + 1,), generator=generator) for n in case.documents]


def positions_of(case, length):
    """Of one document: [1, length] or, for multimodal embeddings, [3, 1, length]."""
    return multimodal_positions(1, length) if case.positions == "mrope" else torch.arange(length)[None]


def each_alone(case, build=build_model):
    """(losses, gradients) of the model that gets one document after another."""
    model, losses = build(case), []
    for text in text_of(case):
        if len(text) > 1:
            with mtp_losses() as further:
                first = model(text[None, :-1], positions_of(case, len(text) - 1), None, labels=text[None, 1:])
            first.sum().backward()
            losses.append(torch.stack((first.detach(), *further))[:, 0])
    return torch.cat(losses, 1), gradients_over_cp(model)


def packed(case, build=build_model):
    """The same of the model that gets all documents in one row."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    rank, group = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_group()
    begins = [0, *itertools.accumulate(case.rows)]
    tokens, labels = (torch.full((begins[-1],), VOCAB - 1) for _ in range(2))
    positions, valid = torch.zeros_like(tokens), torch.zeros(begins[-1])
    mine = []
    for text, begin, n, rows in zip(text_of(case), begins, case.documents, case.rows, strict=False):
        tokens[begin : begin + n], labels[begin : begin + n] = text[:-1], text[1:]
        positions[begin : begin + rows], valid[begin : begin + n] = torch.arange(rows), 1.0
        chunks = torch.arange(begin, begin + rows).chunk(2 * case.cp) if rows else [torch.arange(0)] * 2 * case.cp
        mine += [chunks[rank], chunks[2 * case.cp - 1 - rank]]
    mine = torch.cat(mine)
    lengths = case.rows if case.counts_padding else case.documents
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    documents = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=torch.tensor(begins, dtype=torch.int32),
        cu_seqlens_kv_padded=torch.tensor(begins, dtype=torch.int32),
        max_seqlen_q=max(case.rows),
        max_seqlen_kv=max(case.rows),
    )
    model = build(case)
    tokens, labels, positions, mask = (x[None, mine] for x in (tokens, labels, positions, valid))
    masked = {"loss_mask": mask} if dict(case.extra).get("mtp_num_layers") else {}
    with mtp_losses() as further:
        first = model(tokens, positions, None, labels=labels, packed_seq_params=documents, **masked)
    (first * mask).sum().backward()
    losses = torch.zeros(1 + len(further), begins[-1])
    losses[:, mine] = torch.stack((first.detach(), *further))[:, 0]
    dist.all_reduce(losses, group=group)
    return losses[:, valid.bool()], gradients_over_cp(model)


def one_row(case):
    """Tokens, labels and loss mask [1, t] of all documents without padding, and their boundaries."""
    text = [x for x in text_of(case) if len(x) > 1]
    tokens, labels = torch.cat([x[:-1] for x in text])[None], torch.cat([x[1:] for x in text])[None]
    begins = torch.tensor([0, *itertools.accumulate(case.documents)], dtype=torch.int32)
    batch = {"tokens": tokens, "labels": labels, "loss_mask": torch.ones(tokens.shape)}
    if case.positions == "mrope":
        batch["position_ids"] = torch.cat([positions_of(case, n) for n in case.documents], -1)
    return batch, begins


def _of_data_rank(batch, begins):
    """The documents of this data-parallel rank: the first one gets fewer than the last."""
    from megatron.core import parallel_state

    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    first, last = (i * i * (len(begins) - 1) // ranks**2 for i in (rank, rank + 1))
    mine = {name: x[..., begins[first] : begins[last]] for name, x in batch.items()}
    return mine, begins[first : last + 1] - begins[first]


def _all_losses(losses, rows, total, group):
    """[n, total] from this rank's losses [n, rows]; row -1 holds none."""
    found = torch.zeros(len(losses), total)
    found[:, rows[rows >= 0]] = losses.detach()[:, rows >= 0]
    dist.all_reduce(found, group=group)
    return found


def dispatched(case, build=build_model):
    """The same of the model that gets documents which are whole on one rank, or spread."""
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    batch, begins = one_row(case)
    given = batch, begins
    if case.over_data:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        given = _of_data_rank(batch, begins)
    share, packed = tree.dispatch_batch(*given, over_data=case.over_data, multiple_of=case.padded_for)
    model = tree.use_dispatched_documents(build(case))
    tokens, mask = share["tokens"], share["loss_mask"]
    masked = {"loss_mask": mask} if dict(case.extra).get("mtp_num_layers") else {}
    with mtp_losses() as further:
        first = model(tokens, share["position_ids"], None, labels=share["labels"], packed_seq_params=packed, **masked)
    (first * mask).sum().backward()
    losses = torch.stack((first.detach(), *further))[:, 0]
    rows = shard_positions(group.size() * tokens.shape[1], group.rank(), group.size(), packed.layout)
    return _all_losses(losses, rows, int(begins[-1]), group), gradients_over_cp(model, group)


def inter_document(case, build=build_model):
    """The same of the batches of --dataloader-inter-document-masking: the row is cut zigzag as a whole."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    group = parallel_state.get_context_parallel_group()
    batch, begins = one_row(case)
    total = int(begins[-1])
    rows = shard_positions(total, group.rank(), case.cp)
    lengths = dict(max_seqlen_q=max(case.documents), max_seqlen_kv=max(case.documents))
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=begins, cu_seqlens_kv=begins, **lengths)
    arguments = types.SimpleNamespace(dataloader_inter_document_masking=True)
    with mock.patch.dict(sys.modules, {"megatron.training.global_vars": types.SimpleNamespace(_GLOBAL_ARGS=arguments)}):
        tree.install()
        try:
            model = build(case)
        finally:
            tree.uninstall()
        tokens, labels = (batch[name][:, rows] for name in ("tokens", "labels"))
        with mtp_losses() as further:
            first = model(tokens, rows[None], None, labels=labels, packed_seq_params=packed)
        first.sum().backward()
    losses = torch.stack((first.detach(), *further))[:, 0]
    return _all_losses(losses, rows, total, group), gradients_over_cp(model)


def alone(case):
    return dataclasses.replace(reference_of(case), padded_for=1)


def options(**extra):
    return tuple(extra.items())


check_packed = functools.partial(check, run=packed, reference=alone, run_reference=each_alone)
ONE = {"batch": 1}
WINDOW = options(window_size=(5, 0), window_attn_skip_freq=2, softmax_type="learnable")


@pytest.mark.parametrize("cp", [1, 4])
@pytest.mark.supports("packed sequences (thd)", with_="cut one by one; cp = 4; MLA, windows, sinks, Ulysses")
def test_packed_documents(cp):
    case = functools.partial(Packed, cp=cp, tree=True, **ONE)
    kinds = [{"extra": WINDOW}, {"mla": True}, {"mla": True, "extra": options(rope_type="yarn")}]
    kinds += schedules(cp) if cp > 1 else [{}]
    check_packed(cp, [case(**kind) for kind in kinds])


MROPE = {"positions": "mrope", "extra": options(mrope_section=[1, 1, 2])}
RECOMPUTED = options(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.supports("multimodal rotary embeddings (mrope)", with_="packed sequences (thd), dispatched; cp = 2")
@pytest.mark.supports("packed sequences (thd)", with_="dispatched; cp = 2; MLA, windows, sinks")
def test_dispatched_documents(cp):
    case = functools.partial(Packed, cp=cp, tree=True, padded_for=3, **ONE)
    kinds = [{}, {"extra": WINDOW}, {"mla": True}, {"mla": True, "extra": options(rope_type="yarn")}]
    kinds += [{"extra": RECOMPUTED}, {"mla": True, "extra": RECOMPUTED}, {"cp_comm_type": "a2a"}, MROPE]
    check(cp, [case(**kind) for kind in kinds], run=dispatched, reference=alone, run_reference=each_alone)


@pytest.mark.supports("packed sequences (thd)", with_="cut as a whole (inter-document masking); cp = 2; MLA")
def test_inter_document_masking():
    case = functools.partial(Packed, cp=2, install=True, local_spec=True, **ONE)
    kinds = [{}, {"mla": True}, {"extra": WINDOW}, {"extra": options(mtp_num_layers=2)}]
    check(2, [case(**kind) for kind in kinds], run=inter_document, reference=alone, run_reference=each_alone)


@on_ranks(2)
def test_a_model_that_was_not_prepared_says_so(world):
    case = Packed(cp=world, **ONE)
    with megatron(tp=1, pp=1, cp=world):
        batch, begins = one_row(case)
        share, packed = tree.dispatch_batch(batch, begins)
        with refused_with("use_dispatched_documents", "rotary embedding"):
            build_model(case)(share["tokens"], share["position_ids"], None, packed_seq_params=packed)
        with pytest.raises(ValueError, match=r"batch has entries \['text'\]"):
            tree.dispatch_batch({"text": 1}, begins)
        model = tree.use_dispatched_documents(build_model(dataclasses.replace(case, **MROPE)))
        with pytest.raises(ValueError, match=r"position_ids \[1, 24\]: multimodal .* need those of time"):
            model(share["tokens"], share["position_ids"], None, packed_seq_params=packed)
        whole = type(packed).of(packed.layout, None, "cpu")  # as of inter-document masking
        with pytest.raises(ValueError, match="position_embedding_type='mrope' needs .* cut one by one"):
            model(share["tokens"], share["position_ids"], None, packed_seq_params=whole)


def test_packed_documents_and_ulysses():
    check_packed(4, [Packed(cp=4, cp_comm_type="a2a", extra=WINDOW, **ONE)])
    check_packed(4, [Packed(cp=4, cp_comm_type=kind, cp_sizes=(2, 2), **ONE) for kind in ("a2a+tree", "a2a+p2p")])


MTP = dict(cp=2, tree=True, extra=options(mtp_num_layers=2), **ONE)


@pytest.mark.supports("multi-token prediction (mtp_num_layers)", with_="packed sequences")
def test_packed_documents_and_multi_token_prediction():
    """Without padding, and with padding that counts as tokens: Megatron rolls labels at the ends in cu_seqlens_q."""
    cases = [Packed(mla=mla, documents=(16, 32, 8), **MTP) for mla in (False, True)]
    check_packed(2, [*cases, Packed(documents=(13, 27, 5), counts_padding=True, **MTP)])


@pytest.mark.parametrize("cp", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.supports("multi-token prediction (mtp_num_layers)", with_="dispatched documents")
def test_dispatched_documents_and_multi_token_prediction(cp):
    """Tokens and labels further on may lie on other ranks, and end with their document."""
    mtp = MTP | {"cp": cp, "padded_for": 3, "documents": (13, 27, 1, 5, 2)}
    cases = [Packed(**mtp), Packed(**mtp | {"mla": True})]
    check(cp, cases, run=dispatched, reference=alone, run_reference=each_alone)


@on_ranks(2)
def test_multi_token_prediction_at_other_ends_is_refused(world):
    said = "mtp_num_layers=2 with documents that end at token 45 (cu_seqlens_q), with their padding at 56"
    with megatron(tp=1, pp=1, cp=world), refused_with(said):
        packed(Packed(documents=(13, 27, 5), **MTP))


def _hybrid(case, *, run, pattern):
    with mixers_in_torch():
        return run(case, functools.partial(build_hybrid, pattern=pattern))


@pytest.mark.supports("hybrid models (MambaModel)", with_="packed sequences: cut one by one, dispatched, as a whole")
@pytest.mark.supports("gated delta nets", with_="packed sequences: cut one by one, dispatched, as a whole")
@pytest.mark.parametrize("pattern", ["M*-M", "G*"])
def test_recurrent_layers(pattern):
    reference = dict(reference=alone, run_reference=functools.partial(_hybrid, run=each_alone, pattern=pattern))
    plugin = dict(install=True, local_spec=True)
    cases = {packed: dict(padded_for=2), dispatched: dict(padded_for=3), inter_document: plugin}
    for run, kind in cases.items():
        check(2, [Packed(cp=2, **kind, **ONE)], run=functools.partial(_hybrid, run=run, pattern=pattern), **reference)


INDEXED = functools.partial(Packed, mla=True, tree=True, extra=DSA, **ONE)


def _dsa_alone(case, times=1.0):
    return run_dsa(case, each_alone, functools.partial(build_weighted, times=times))


@pytest.mark.supports("sparse attention (DSA)", with_="packed sequences: cut one by one, dispatched, as a whole")
def test_dsa():
    """Of documents with fewer and more tokens than a query selects."""
    sparse = with_options(dsa_indexer_use_sparse_loss=True, rope_type="yarn")
    cases = {packed: dict(padded_for=2, extra=sparse), dispatched: dict(padded_for=3), inter_document: {}}
    for run, kind in cases.items():
        options = dict(run=functools.partial(run_dsa, run=run), reference=alone, run_reference=_dsa_alone)
        check(2, [INDEXED(cp=2, **kind)], **options)


UNEVEN = (1, 70, 2, 9, 0, 3, 16, 5)
DYNAMIC = functools.partial(Packed, tree=True, padded_for=1, over_data=True, documents=UNEVEN, **ONE)


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.supports("packed sequences (thd)", with_="dispatched over data x context ranks, 4 x 1 and 2 x 2; MLA")
def test_documents_over_data_and_context_ranks(cp):
    kinds = [{}, {"extra": WINDOW}, {"mla": True}, {"mla": True, "extra": RECOMPUTED}, {"cp_comm_type": "a2a"}]
    kinds += [MROPE]
    cases = [DYNAMIC(cp=cp, **kind) for kind in kinds]
    check(4, cases, run=dispatched, reference=alone, run_reference=each_alone)


@pytest.mark.slow
def test_dsa_over_data_and_context_ranks():
    """The loss of an indexer is a mean over the tokens of each data-parallel rank; here over all, as many times."""
    cases = [INDEXED(cp=2, padded_for=1, over_data=True, documents=UNEVEN)]
    reference = dict(reference=alone, run_reference=functools.partial(_dsa_alone, times=2.0))
    check(4, cases, run=functools.partial(run_dsa, run=dispatched), **reference)


@pytest.mark.parametrize(("pattern", "cp"), [("M*-M", 2), ("G*", 1)])
def test_recurrent_layers_over_data_and_context_ranks(pattern, cp):
    reference = dict(reference=alone, run_reference=functools.partial(_hybrid, run=each_alone, pattern=pattern))
    check(4, [DYNAMIC(cp=cp)], run=functools.partial(_hybrid, run=dispatched, pattern=pattern), **reference)


@on_ranks(2)
def test_batches_of_a_script():
    """What Megatron-LM's get_batch gets with --dispatch-documents, where the other data rank has other documents."""
    from megatron.core import utils

    arguments = types.SimpleNamespace(
        calculate_per_token_loss=True, sequence_parallel=True, tensor_model_parallel_size=3
    )
    scripts = {"megatron.training.global_vars": types.SimpleNamespace(_GLOBAL_ARGS=arguments)}
    with megatron(tp=1, pp=1, cp=1), mock.patch.dict(sys.modules, scripts), dispatched_batches():
        batch, begins = _of_data_rank(*one_row(DYNAMIC()))
        share, packed = utils.get_thd_batch_on_this_cp_rank(batch, begins, begins, torch.tensor([70]))
        want, _ = tree.dispatch_batch(batch, begins, over_data=True, multiple_of=3)
        assert all(map(torch.equal, share.values(), want.values()))
        with pytest.raises(ValueError, match="leave cp_group out"):
            tree.dispatch_batch(batch, begins, over_data=True, cp_group=dist.group.WORLD)
        arguments.calculate_per_token_loss = False
        with pytest.raises(ValueError, match="add --calculate-per-token-loss"):
            utils.get_thd_batch_on_this_cp_rank(batch, begins, None, torch.tensor([70]))
    assert packed.layout.lengths == UNEVEN and share["tokens"].shape[1] == 54
