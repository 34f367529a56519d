"""Packed documents (thd) in a GPTModel on 1, 2 and 4 ranks against every document alone with Megatron's attention."""

import dataclasses
import functools
import itertools

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from support.megatron_models import (
    VOCAB,
    Case,
    build_model,
    check,
    gradients_over_cp,
    mtp_losses,
    reference_of,
    schedules,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed(Case):
    """A batch of documents of these lengths, each padded for `padded_for` ranks."""

    documents: tuple = (13, 0, 27, 5, 3)
    padded_for: int = 4

    @property
    def rows(self):
        """Every document's rows, its padding included: zigzag wants a multiple of 2p."""
        return [-(-n // (2 * self.padded_for)) * 2 * self.padded_for for n in self.documents]


def text_of(case):
    """[tokens and labels of a document]."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, VOCAB, (n + 1,), generator=generator) for n in case.documents]


def each_alone(case):
    """(losses, gradients) of the model that gets one document after another."""
    model, losses = build_model(case), []
    for text in text_of(case):
        if len(text) > 1:
            with mtp_losses() as further:
                first = model(text[None, :-1], torch.arange(len(text) - 1)[None], None, labels=text[None, 1:])
            first.sum().backward()
            losses.append(torch.stack((first.detach(), *further))[:, 0])
    return torch.cat(losses, 1), gradients_over_cp(model)


def packed(case):
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
    cu_seqlens = torch.tensor([0, *itertools.accumulate(case.documents)], dtype=torch.int32)
    documents = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=torch.tensor(begins, dtype=torch.int32),
        cu_seqlens_kv_padded=torch.tensor(begins, dtype=torch.int32),
        max_seqlen_q=max(case.rows),
        max_seqlen_kv=max(case.rows),
    )
    model = build_model(case)
    tokens, labels, positions, mask = (x[None, mine] for x in (tokens, labels, positions, valid))
    with mtp_losses() as further:
        first = model(tokens, positions, None, labels=labels, packed_seq_params=documents, loss_mask=mask)
    (first * mask).sum().backward()
    losses = torch.zeros(1 + len(further), begins[-1])
    losses[:, mine] = torch.stack((first.detach(), *further))[:, 0]
    dist.all_reduce(losses, group=group)
    return losses[:, valid.bool()], gradients_over_cp(model)


def alone(case):
    return dataclasses.replace(reference_of(case), padded_for=1)


def options(**extra):
    return tuple(extra.items())


check_packed = functools.partial(check, run=packed, reference=alone, run_reference=each_alone)
ONE = {"batch": 1}
WINDOW = options(window_size=(5, 0), window_attn_skip_freq=2, softmax_type="learnable")


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.supports(
    "packed sequences (thd)", with_="padded, empty and split documents; cp = 1, 2, 4; MLA, windows, sinks"
)
def test_packed_documents(cp):
    case = functools.partial(Packed, cp=cp, tree=True, **ONE)
    kinds = [{"extra": WINDOW}, {"mla": True}, {"mla": True, "extra": options(rope_type="yarn")}]
    kinds += schedules(cp) if cp > 1 else [{}]
    check_packed(cp, [case(**kind) for kind in kinds])


@pytest.mark.supports("packed sequences (thd)", with_="cp_comm_type a2a, a2a+tree, a2a+p2p; cp = 4")
def test_packed_documents_and_ulysses():
    check_packed(4, [Packed(cp=4, cp_comm_type="a2a", extra=extra, **ONE) for extra in ((), WINDOW)])
    two_parts = [Packed(cp=4, cp_comm_type=kind, cp_sizes=(2, 2), **ONE) for kind in ("a2a+tree", "a2a+p2p")]
    check_packed(4, two_parts)


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.supports("multi-token prediction (mtp_num_layers)", with_="packed sequences without padding")
def test_packed_documents_and_multi_token_prediction(cp):
    """Without padding: Megatron rolls labels at the ends of documents, not of their padding."""
    case = functools.partial(Packed, cp=cp, tree=True, documents=(16, 32, 8), extra=options(mtp_num_layers=2), **ONE)
    check_packed(cp, [case(mla=mla) for mla in (False, True)])
