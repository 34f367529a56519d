"""Who failed, and who waits for whom, where ranks come in an unlucky order."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from megatron_tree import CommError, TreeConfig, tree_attn_func, unshard_sequence
from megatron_tree.core import comm
from megatron_tree.core.comm.watchdog import Watchdog
from support.bound import bound
from support.failing_ranks import IN_TIME, LIMIT, PATIENT, call, run_to_the_end, start_clock
from support.ranks import run_distributed

ALWAYS = TreeConfig(check="always", timeout_s=20)


def attend(config=PATIENT, group=None, **options):
    q, k, v = (torch.ones(1, 4, 2, 8, requires_grad=True) for _ in "qkv")
    return tree_attn_func(q, k, v, cp_group=group or dist.group.WORLD, config=config, **options)


def agree(name, config=ALWAYS, **values):
    with comm.Ranks.of(dist.group.WORLD, config=config).call(name) as call:
        call.agree(**values)


def _what(job):
    """(its error or result in words, seconds)"""
    started = time.monotonic()
    try:
        said = str(job())
    except (ValueError, CommError) as error:
        said = f"{type(error).__name__}: {error}"
    return said, time.monotonic() - started


def _refused_before_it_could_show(rank, world):
    """Rank 0 comes first and hears that rank 2 refuses; only then rank 1 comes, and differs from rank 0."""
    if rank > 0:
        time.sleep(0.3 if rank == 2 else 1.0)
    return _what(lambda: attend(causal=rank != 1, softmax_scale=float("nan") if rank == 2 else None))


def test_the_first_rank_has_left_when_one_that_differs_comes():
    for said, seconds in run_distributed(_refused_before_it_could_show, 3):
        assert said.startswith("ValueError: ") and "softmax_scale=nan" in said and seconds < IN_TIME


def _late(rank, world):
    if rank == 1:
        time.sleep(2.0)
    return _what(lambda: attend(TreeConfig(timeout_s=1.0), causal=rank != 1))


@pytest.mark.alone
def test_a_rank_that_differs_and_comes_too_late():
    for said, seconds in run_distributed(_late, 2):
        assert "CommError: rank 1 did not respond within 1 s: " in said and seconds < IN_TIME


def _refused_by_all(rank, world, told):
    """A call that all refuse, or that one refuses and the others hear of, and then the backward of an earlier one."""
    out = attend()
    with pytest.raises(ValueError, match="softmax_scale=nan"):
        attend(causal=False, softmax_scale=float("nan") if rank == 1 or not told else None)
    if rank == 1:
        time.sleep(0.6)
    out.sum().backward()
    return True


@pytest.mark.parametrize("told", [False, True])
def test_a_refused_call_leaves_an_earlier_ones_backward_alone(told):
    assert all(run_distributed(_refused_by_all, 2, told))


def _refused_in_the_call(rank, world):
    """All ranks raise inside a call that they have agreed on: none waits for another."""
    out = attend()
    with pytest.raises(ValueError, match="memory_budget"):
        attend(TreeConfig(timeout_s=30, memory_budget=1))
    if rank == 1:
        time.sleep(0.6)
    out.sum().backward()
    return True


def test_what_all_refuse_after_they_agreed_does_no_harm():
    assert all(run_distributed(_refused_in_the_call, 2))


def _two_calls_ahead(rank, world):
    """Rank 0 has gone on with two calls that all know; rank 1 differs in the first of them."""

    def compare(name, size=3):
        agree(name, TreeConfig(timeout_s=20), size=size)

    for name in "ab":
        compare(name)
    dist.barrier()
    if rank == 1:
        return _what(lambda: compare("a", size=4))
    with comm.monitored("step 1"):
        for name in "ab":
            compare(name)
        time.sleep(1.5)
    return "", 0.0


def test_a_rank_answers_for_the_call_that_it_is_asked_about():
    said, seconds = run_distributed(_two_calls_ahead, 2, fresh=True)[1]
    assert "rank 0 has size=3; rank 1 has size=4" in said and seconds < IN_TIME


def _watched_anew(rank, world):
    """torch gives a group of the same ranks the same name again once the former one is gone."""
    return [Watchdog(dist.group.WORLD, 20.0).key() for _ in range(2)]


def test_a_group_of_a_former_ones_name_starts_anew():
    (first, second), others = run_distributed(_watched_anew, 2)
    assert first != second and others == [first, second]


def _shares(rank, world):
    whole = torch.ones(1, 4, 2)
    unshard_sequence(whole, dist.group.WORLD, 1)
    return _what(lambda: unshard_sequence(whole[:, : 4 - rank], dist.group.WORLD, 1, seq_len=8))


def test_a_refusal_is_heard_in_every_call():
    for said, seconds in run_distributed(_shares, 2, fresh=True):
        assert said.startswith("ValueError: ") and "x has 3 tokens" in said and seconds < IN_TIME


def _out_of_memory_before(rank, world):
    attend()
    if rank == 1:
        from megatron_tree.core.attention import call as module

        def only_backward():
            raise MemoryError("no room")

        module.only_backward = only_backward
    started = time.monotonic()
    with pytest.raises(MemoryError if rank == 1 else ValueError, match="no room"):
        attend()
    return time.monotonic() - started


def test_what_else_fails_ahead_of_a_call_is_told():
    assert max(run_distributed(_out_of_memory_before, 2, fresh=True)) < IN_TIME


def _in_rows_and_columns(rank, world):
    """Rank 3 is stuck; rank 1 waits for it in a column, by torch, and rank 0 for rank 1 in a row, by us."""
    rows, columns = ([dist.new_group(x) for x in pairs] for pairs in (((0, 1), (2, 3)), ((0, 2), (1, 3))))
    row, column = rows[rank // 2], columns[rank % 2]
    config = TreeConfig(timeout_s=LIMIT)
    attend(group=row)
    attend(config, row)
    dist.barrier()
    start_clock()
    with comm.monitored("step 2"):
        if rank == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank == 1:
            dist.all_reduce(torch.ones(2), group=column)
        if rank == 2:
            time.sleep(LIMIT / 2)
        attend(config, row)


@pytest.mark.alone
def test_the_one_that_all_wait_for_is_named_not_the_next_one():
    outcomes = run_to_the_end(_in_rows_and_columns, 4, victims=(3,))
    for outcome in outcomes[:3]:
        assert outcome.error == "CommError" and outcome.text.startswith("rank 3 did not respond"), outcome


def _in_two_groups(rank, world):
    """Some wait for plans and some for attention, in groups of the same ranks, as when generating."""
    plans = dist.new_group([0, 1, 2, 3])
    config = TreeConfig(timeout_s=LIMIT, grid=(4, 1))
    for first in (PATIENT, config):
        attend(first)
    bound(plans).broadcast(torch.ones(1), 0)
    dist.barrier()
    start_clock()
    with comm.monitored("generation"):
        if rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            bound(plans, timeout_s=600.0).broadcast(torch.ones(1), 3)
        for _ in range(2):
            attend(config)


@pytest.mark.alone
def test_ranks_in_two_groups_find_out_together():
    for outcome in run_to_the_end(_in_two_groups, 4, victims=(3,))[:3]:
        assert outcome.error == "CommError" and outcome.text.startswith("rank 3 did not respond"), outcome


def _in_a_part_of_the_job(rank, world):
    """Ranks 1 to 3 disagree, and then lose one."""
    group = dist.new_group([1, 2, 3])
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:  # it keeps the store
        store.wait(["1 has said it", "3 has said it"])
        return ""
    config = TreeConfig(timeout_s=LIMIT)
    said, _ = _what(lambda: attend(group=group, causal=rank != 2))
    attend(config, group)
    start_clock()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(2):  # a rank that did not wait for the victim in the first one does in the next
            attend(config, group)
    except CommError as error:
        store.set(f"{rank} has said it", "")
        return said, error.ranks, str(error)


@pytest.mark.alone
def test_ranks_are_named_by_their_number_in_the_job():
    for outcome in run_to_the_end(_in_a_part_of_the_job, 4, victims=(2,))[1::2]:
        said, ranks, text = outcome.value
        assert "rank 2 has causal=False" in said, said
        assert ranks == [2] and text.startswith("rank 2 did not respond: "), text


def _without_a_sub_group(rank, world, victim, how):
    """The victim is lost where torch makes the groups of a grid's rows and columns."""
    dist.barrier()
    start_clock()
    if rank == victim:
        dist.new_group = lambda *_, **__: os.kill(os.getpid(), how)
    attend(TreeConfig(timeout_s=LIMIT, transport="builtin", grid=(2, 2)))


@pytest.mark.alone
@pytest.mark.parametrize(("victim", "how"), [(3, signal.SIGKILL), (0, signal.SIGSTOP)])
def test_a_rank_lost_where_groups_are_made(victim, how):
    """Rank 0 keeps the store, which torch waits for without a limit."""
    outcomes = run_to_the_end(_without_a_sub_group, 4, victim, how, victims=(victim,))
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.error == "CommError" and outcome.seconds < LIMIT + IN_TIME, outcome
            assert f"rank {victim}" in outcome.text, outcome


def _first_use(rank, world):
    dist.barrier()
    start_clock()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    call("forward", world, rank)


@pytest.mark.alone
def test_the_keeper_of_the_store_is_stopped_before_the_first_call():
    for outcome in run_to_the_end(_first_use, 3, victims=(0,))[1:]:
        assert outcome.error == "CommError" and "rank 0" in outcome.text and outcome.seconds < LIMIT + IN_TIME, outcome


def _without_the_store_client(rank, world, how):
    agree("first")
    if rank == 1:
        time.sleep(1.0)
        return ""
    if how == "dead":
        threading.excepthook = lambda _: None
        Watchdog.of(dist.group.WORLD).store._inbox.put(None)
        return _what(lambda: agree("second"))
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, repr(_what(lambda: agree("second"))).encode())
        os._exit(0)
    return eval(os.read(reader, 4096))


@pytest.mark.parametrize("how", ["dead", "forked"])
def test_a_process_without_the_thread_that_talks_to_the_store(how):
    said, seconds = run_distributed(_without_the_store_client, 2, how, fresh=True)[0]
    assert "CommError" in said and seconds < IN_TIME
    if how == "forked":
        assert "a forked process must create a process group of its own" in said


def _count_keys(rank, world):
    store, counts = dist.distributed_c10d._get_default_store(), []
    for i in range(3):
        if rank == 1:
            time.sleep(0.5)  # so that it is asked
        agree("call", i=i)
        agree("fence")
        end = time.monotonic() + IN_TIME
        time.sleep(0.3)
        while i > 0 and store.num_keys() > counts[0] and time.monotonic() < end:
            time.sleep(0.1)
        counts.append(store.num_keys())
        agree("fence")
    time.sleep(0.3)
    return counts


def test_calls_leave_nothing_in_the_store():
    counts = run_to_the_end(_count_keys, 2)[0].value
    assert max(counts) == counts[0], counts


def _save_and_leave(rank, world, folder):
    from megatron_tree.core.cache.files import model_fingerprint
    from megatron_tree.integrations.transformers.attention import TreeCache
    from megatron_tree.integrations.transformers.infer.generation import generate
    from support.hf_models import prompt, tiny_model

    model = tiny_model("llama", 1)
    model.set_attn_implementation("tree")
    cache, ids = TreeCache(model.config, cp_group=dist.group.WORLD), prompt(1, 12)
    generate(model, ids, cache=cache, max_new_tokens=1)
    cache.save(folder, list(ids), fingerprint=model_fingerprint(model))
    os._exit(0)


@pytest.mark.slow
def test_rank_0_may_leave_right_after_a_save(tmp_path):
    pytest.importorskip("transformers")
    outcomes = run_to_the_end(_save_and_leave, 3, str(tmp_path / "saved"))
    assert [outcome.code for outcome in outcomes] == [0, 0, 0], outcomes
