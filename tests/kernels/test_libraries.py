"""cuDNN and FlashAttention behind segments: torch's operators have dense attention inside, on the CPU."""

import json
import types

import pytest
import torch

from megatron_tree.core import energy, kernels
from megatron_tree.core.kernels import aten, backends, fastest, libraries
from megatron_tree.core.layout import Segment, positions_of
from megatron_tree.core.spec import AttnSpec
from support.blocks import CELLS, masks_of
from support.library_stand_ins import Cudnn, Flash, stand_ins_of_libraries
from support.rounding import assert_near
from support.triton_inputs import inputs


@pytest.fixture
def stand_ins(monkeypatch):
    with stand_ins_of_libraries(monkeypatch) as activated:
        yield activated


@pytest.mark.parametrize("cell", ["one", "cell of a grid", "packed"])
@pytest.mark.parametrize(
    ("library", "d", "d_v"),
    [("cudnn", 16, 16), ("cudnn", 24, 13), ("fa3", 16, 16), ("fa4", 10, 16), ("aten", 24, 20), ("aten", 12, 12)],
)
def test_segments_and_gradients_match_the_oracle(stand_ins, cell, library, d, d_v):
    """Errors at most twice (gradients: thrice) reference's in bf16; the backward gets global statistics alone."""
    cell, spec = CELLS[cell], AttnSpec(softmax_scale=0.3)
    q, k, v, dout = (x.cpu().bfloat16() for x in inputs(cell.s_q, cell.s_k, (4, 2), d, d_v))
    k, v = torch.cat((k, v), -1).split((d, d_v), -1)  # as they are gathered: rows that begin anywhere
    masks, exact = masks_of(cell, spec, 2, 4, "cpu"), [x.double() for x in (q, k, v, dout)]
    out, lse = energy.attention(*exact[:3], **masks)
    truth = out, *energy.attention_grads(*exact, **masks)
    results = {}
    for backend in (library, "reference"):
        call = dict(q_segments=cell.q_segments, k_segments=cell.k_segments, spec=spec, backend=backend)
        o, l = kernels.attn_fwd(q, k, v, **call)
        assert torch.equal(l == float("-inf"), lse == float("-inf"))
        assert_near(l, lse, cell.s_k)
        delta = kernels.attn_delta(dout, out)
        delta[..., positions_of(cell.q_segments, cell.s_q) < 0] = 0.0
        results[backend] = (o, *kernels.attn_bwd(dout, q, k, v, lse.float(), delta.float(), **call))
    for found, low, t, allowed in zip(results[library], results["reference"], truth, (2, 3, 3, 3)):
        dense = max((low.double() - t).abs().max(), t.abs().max() * torch.finfo(torch.bfloat16).eps)
        assert (found.double() - t).abs().max() <= allowed * dense
    assert stand_ins == ([library.upper(), None] * 2 if library in ("fa3", "fa4") else [])


@pytest.mark.parametrize("before", [None, "FA3", "FA4"])
def test_torchs_flash_kernel_is_switched_within_our_call_alone(stand_ins, before):
    """And is what it was after an error, too: other attention of the process may have dropout, which FA3 refuses."""
    if before:
        torch.nn.attention.activate_flash_attention_impl(before)
    current, seen = torch.nn.attention.current_flash_attention_impl, []

    def forward(*args):
        seen.append(current())
        if len(seen) == 2:
            raise RuntimeError("no memory")
        return aten.flash_forward(*args)

    library, q = libraries.LIBRARIES["fa3"]._replace(forward=forward), torch.zeros(1, 8, 2, 16, dtype=torch.bfloat16)
    whole = dict(q_segments=(Segment(0, 0, 8),), k_segments=(Segment(0, 0, 8),), spec=AttnSpec(softmax_scale=1.0))
    library.attn_fwd(q, q, q, **whole)
    assert current() == before
    with pytest.raises(RuntimeError, match="no memory"):
        library.attn_fwd(q, q, q, **whole)
    assert current() == before and seen == ["FA3", "FA3"]


def test_what_libraries_refuse(stand_ins, monkeypatch):
    """By name: a ValueError that says what; for "auto" the reason to take another backend."""
    q = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
    wide, plain = torch.zeros(1, 8, 2, 160, dtype=torch.bfloat16), dict(softmax_scale=1.0)
    refused = [
        ("cudnn", q, dict(softcap=1.0), {}, "softcap"),
        ("cudnn", q, dict(window_size=(4, 0)), {}, "window_size"),
        ("fa3", q, dict(deterministic=True), {}, "deterministic=True"),
        ("cudnn", q, {}, dict(flowing_lse=True), "a gradient that flows through lse"),
        ("fa3", q, {}, dict(decodes=True), "decoding"),
        ("cudnn", q.float(), {}, {}, "dtype torch.float32"),
        ("cudnn", wide, {}, {}, "head_dim 160 above 128"),
        ("fa4", wide, {}, {}, "head_dim 160 above 128"),
    ]
    for name, x, options, how, why in refused:
        with pytest.raises(ValueError, match=f"backend='{name}' can't take {why}"):
            kernels.choose(x, x, x, AttnSpec(**plain | options), name, **how)
    assert kernels.choose(wide, wide, wide, AttnSpec(**plain), "fa3").name == "fa3"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"a GPU of compute capability 8.x: FA3 is for \(9,\)"):
        kernels.choose(q, q, q, AttnSpec(**plain), "fa3")
    monkeypatch.setattr(libraries, "_installed", lambda module: False)
    with pytest.raises(ValueError, match="flash_attn_interface is not installed"):
        kernels.choose(q, q, q, AttnSpec(**plain), "fa3")
    monkeypatch.setattr(aten, "GPUS", ("cuda",))
    with pytest.raises(ValueError, match="it needs an NVIDIA GPU"):
        kernels.choose(q, q, q, AttnSpec(**plain), "cudnn")


def test_what_is_passed_fits_the_schemas_of_this_torch():
    """The results' shapes by torch's own shape functions, and the names of the arguments."""
    q, k = torch.zeros(2, 4, 40, 64, device="meta"), torch.zeros(2, 2, 40, 64, device="meta")
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, k, None, True, 0.0, True, scale=0.1)
    assert out.shape == q.shape and lse.shape == (2, 4, 40, 1)
    for name, operator in (
        ("_scaled_dot_product_cudnn_attention_backward", Cudnn.backward),
        ("_flash_attention_backward", Flash.backward),
    ):
        schema = getattr(torch.ops.aten, name).default._schema
        positional = [x.name for x in schema.arguments if not x.kwarg_only]
        assert len(positional) == operator.__code__.co_argcount, schema
        assert "scale" in {x.name for x in schema.arguments if x.kwarg_only}


def test_auto_takes_what_was_measured_fastest(stand_ins, monkeypatch):
    """Where the library can't take a call, and for decoding, the next backend; nothing changes on other GPUs."""
    monkeypatch.setattr(backends, "ACCELERATORS", ("cpu",))
    monkeypatch.setattr(fastest, "table", lambda: {"GPU X": {"64": "cudnn", "128": "fa3"}})
    gpu = types.SimpleNamespace(name="GPU X")
    monkeypatch.setattr(fastest, "name_of", lambda device: gpu.name)

    def chosen(d, **options):
        how = {name: options.pop(name) for name in ("decodes",) if name in options}
        q = torch.zeros(1, 4, 2, d, dtype=torch.float16)
        return kernels.choose(q, q, q, AttnSpec(softmax_scale=1.0, **options), **how).name

    assert [chosen(d) for d in (48, 64, 80, 128, 160)] == ["cudnn", "cudnn", "fa3", "fa3", "triton"]
    assert chosen(64, softcap=1.0) == chosen(64, window_size=(3, 0)) == chosen(64, decodes=True) == "triton"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    libraries.preferred.cache_clear()
    gpu.name = "GPU Y"
    assert chosen(64) == "triton"


@pytest.mark.parametrize(
    ("capability", "installed", "names"),
    [
        ((9, 0), True, ["fa3", "fa3", "fa3"]),
        ((9, 0), False, ["cudnn", "cudnn", "triton"]),
        ((10, 0), True, ["fa4", "fa4", "triton"]),
        ((10, 3), False, ["cudnn", "cudnn", "triton"]),
        ((8, 0), True, ["triton"] * 3),
        ((12, 0), True, ["triton"] * 3),
    ],
)
def test_auto_takes_libraries_where_they_are(capability, installed, names, stand_ins, monkeypatch):
    """On the GPUs that they are made for, unless something was measured; never for what they can't take."""
    monkeypatch.setattr(backends, "ACCELERATORS", ("cpu",))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(libraries, "_installed", lambda module: installed)
    libraries.preferred.cache_clear()
    try:
        found = []
        for d in (64, 128, 192, 320):
            q = torch.zeros(1, 4, 2, d, dtype=torch.float16)
            found.append(kernels.choose(q, q, q, AttnSpec(softmax_scale=1.0)))
        assert [x.name for x in found[:3]] == names and found[3].name == "reference"
        assert all("the default on such a GPU" in x.reason for x in found[:3] if x.name != "triton")
        dual = found[0].for_duals(torch.float16, 64)  # of which libraries have none
        assert dual.dual and dual.name == "triton"
        if names[0] != "triton":
            q = torch.zeros(1, 4, 2, 64, dtype=torch.float16)
            with pytest.raises(ValueError, match=f"backend='{names[0]}' has first derivatives only"):
                kernels.choose(q, q, q, AttnSpec(softmax_scale=1.0), names[0]).for_duals(torch.float16, 64)
        windows = names[0] if names[0] in ("fa3", "fa4") else "triton"
        for options, how, name in (
            (dict(deterministic=True), {}, "triton"),
            ({}, dict(decodes=True), "triton"),
            (dict(window_size=(3, 0)), {}, windows),
        ):
            q = torch.zeros(1, 4, 2, 64, dtype=torch.float16)
            assert kernels.choose(q, q, q, AttnSpec(softmax_scale=1.0, **options), **how).name == name
        monkeypatch.setattr(fastest, "table", lambda: {"GPU X": {"64": "triton"}})
        monkeypatch.setattr(fastest, "name_of", lambda device: "GPU X")
        q = torch.zeros(1, 4, 2, 64, dtype=torch.bfloat16)
        assert kernels.choose(q.half(), q.half(), q.half(), AttnSpec(softmax_scale=1.0)).name == "triton"
    finally:
        libraries.preferred.cache_clear()


def test_the_shipped_table_is_valid(tmp_path, monkeypatch):
    fastest.table()
    (tmp_path / "fastest.json").write_text(json.dumps({"GPU": {"64": "fastest"}}))
    monkeypatch.setattr(fastest, "TABLE", tmp_path / "fastest.json")
    with pytest.raises(ValueError, match="must be a head_dim and one of triton"):
        fastest.table.__wrapped__()
