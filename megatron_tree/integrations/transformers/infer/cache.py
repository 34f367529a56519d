"""A Transformers cache whose tokens are distributed over the ranks of a group; attention.py uses it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer

from transformers import PreTrainedConfig

from ....core.arguments import checked
from ....core.cache import ShardedCache
from ....core.cache.files import load_rows, save_rows
from ....core.cache.forward import ForwardPass, forward_pass
from ....core.cache.gathered import Piece
from ....core.cache.rows import Row
from ....core.comm import Ranks, begin_step, group_rank, group_size, outside_graphs, process_group, shared_checks
from ....core.config import DECODE_SCHEDULES, TreeConfig, check_choice, default_config
from ..architectures import LayerKind, check_cached, layers_of
from ..families.modeling import model_class, replace
from ..families.recurrent import RecurrentLayer
from ..families.rope import rope_rule
from ..families.table import check_pages, families_of, patch_model
from .model_runs import ModelRuns, Update, current_run, forget_notes, last_update


class Slots(dict):
    """Numbers in the cache by number of an attention layer in the model; another layer is a ``ValueError``."""

    def __missing__(self, layer_idx):
        raise ValueError(
            f"layer {layer_idx} has no place in this TreeCache, which was made for a model with attention in layers "
            f"{list(self)}: make it with TreeCache(model.config, ...) of the model that runs"
        )


class OwnPositions:
    """What models with an index of blocks keep of all tokens' positions in a cache: nothing here, where a token's
    position is its number in the row."""

    def __get__(self, layer, owner) -> None:
        return None

    def __set__(self, layer, position_ids: Tensor) -> None:
        """Of new tokens, int64 [3, b, n]: time, height and width. Raises: ValueError where they are not the same."""
        if position_ids.stride(0) and not (position_ids == position_ids[0]).all():
            raise ValueError(
                "positions of images in a model with an index of blocks of tokens: a TreeCache takes text only. Use "
                "attn_implementation='sdpa', and the model's own cache"
            )


class TreeCacheLayer(CacheLayerMixin):
    """Of a layer with attention. Rows are the same in all layers."""

    is_croppable = True
    supports_early_init = False
    indexer_position_ids = OwnPositions()

    def __init__(self, cache, layer_idx: int):
        super().__init__()
        self._cache, self._layer_idx = cache, layer_idx
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        return self._cache.update(key_states, value_states, self._layer_idx)

    def get_seq_length(self) -> int:
        return self._cache.get_seq_length(self._layer_idx)

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.get_seq_length() + query_length, 0


class TreeHybridLayer(RecurrentLayer, TreeCacheLayer):
    """Of a layer with attention beside a recurrent layer."""

    def __init__(self, cache, layer_idx: int, num_states: int):
        TreeCacheLayer.__init__(self, cache, layer_idx)
        RecurrentLayer.__init__(self, layer_idx, num_states)


def cache_layer(cache, layer_idx: int, kind: LayerKind) -> TreeCacheLayer | RecurrentLayer | DummyLayer:
    """The view of one layer."""
    if not kind.num_states:
        return TreeCacheLayer(cache, layer_idx) if kind.attends else DummyLayer()
    if kind.attends:
        return TreeHybridLayer(cache, layer_idx, kind.num_states)
    return RecurrentLayer(layer_idx, kind.num_states)


class TreeCache(Cache):
    """A KV cache for ``attn_implementation="tree"``: every rank of a group holds part of the tokens of every layer.

    It holds any number of rows (sequences) of any lengths, in pages; layers with a sliding window keep the window only.
    States of recurrent layers are on every rank (model_runs.py), or those of its heads where weights are split.
    Transformers' own `generate` uses it as one batch of rows of equal length (including padding); `Runner` adds,
    runs and removes rows one by one.

    Args:
        config: the model's configuration (or that of its text part); it gives the number and kinds of layers.
        cp_group: process group, or 1-D DeviceMesh, over which the tokens are spread; None = this rank holds them all.
        page_size: tokens of a page: neighbouring tokens on one rank. On GPUs 16, 32, 64, 128 or 256; blocks of tokens
            that have a key of their own have to divide it.
        dtype: "auto" (the model's), "int8" or "fp8", with a scale for each token and head; keys of blocks stay in the
            model's.
        schedule: how partial attention is merged, see `tree_decode`.
        head_shares: query heads of every rank of cp_group, for a model whose weights are split over the ranks
            (`init_inference(weights="sharded")` makes such caches).
        weights_group: all of these ranks, where they are several head groups of neighbours, of which cp_group is one;
            needed to save and load the cache.
        state_pieces: by name this rank's part of the recurrent states, where weights are split; needed likewise.
        tree_config: `TreeConfig` of all attention calls with this cache.
    Raises:
        ValueError: a layer that is not plain or sliding-window attention or recurrent, an encoder-decoder model, an
            unknown schedule or dtype, a page_size below 1, a rank outside of cp_group.
    """

    @checked
    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        cp_group=None,
        page_size: int = 16,
        dtype: str = "auto",
        schedule: str = "auto",
        head_shares: Sequence[int] | None = None,
        weights_group=None,
        state_pieces: dict[str, Piece] | None = None,
        tree_config: TreeConfig | None = None,
    ):
        cp_group, weights_group = process_group(cp_group), process_group(weights_group)
        check_choice("schedule", schedule, DECODE_SCHEDULES)
        text, kinds = config.get_text_config(decoder=True), layers_of(config)
        check_cached(config)
        attending = [i for i, kind in enumerate(kinds) if kind.attends]
        self.slot_of = Slots((layer_idx, slot) for slot, layer_idx in enumerate(attending))
        """By number of an attention layer in the model: its number in `store`."""
        self.cp_group, self.schedule, self.tree_config = cp_group, schedule, tree_config
        self.head_shares = head_shares
        self._has_all_heads = head_shares is None or sum(head_shares) == text.num_attention_heads
        everyone = None if self._has_all_heads else weights_group
        self._of_files = {"cp_group": cp_group, "weights_group": everyone, "state_pieces": state_pieces}
        self.rank, self.world = group_rank(cp_group), group_size(cp_group)
        self.families = families_of(config)
        """Of the model, by name."""
        self.latent = "latent" in self.families
        patch_model(config, cached=True)
        check_pages(config, page_size)
        self.windows = {layer_idx: kinds[layer_idx].window for layer_idx in attending}
        """By number of an attention layer in the model: how many of the last tokens the cache keeps; None = all."""
        blocks = {layer_idx: size for layer_idx in attending if (size := kinds[layer_idx].block_size)}
        self.block_slot_of = {layer_idx: len(attending) + i for i, layer_idx in enumerate(blocks)}
        """By number of a layer with keys of blocks of tokens in the model: their number in `store`."""
        self.store = ShardedCache(
            [*self.windows.values(), *(None for _ in blocks)],
            block_sizes=[*(1 for _ in attending), *blocks.values()],
            rank=self.rank,
            world=self.world,
            page_size=page_size,
            dtype=dtype,
            latent=self.latent,
        )
        self.rows: list[int] = []
        """The batch of Transformers' own `generate`, in its order."""
        self.texts: list[tuple[Row, Tensor]] = []
        """Rows that our `generate` has run, and their tokens then, int64 [n]."""
        self.rope = rope_rule(config)
        self.rope_kinds: list[int] = []
        """`RopeRule.kind` of every row of the batch, ..."""
        self.rope_slots = 0
        """... and its slots, padding included, after the run that they are for."""
        prepare_generate(config)
        layers = [cache_layer(self, i, kind) for i, kind in enumerate(kinds)]
        recurrent = [layer for layer in layers if isinstance(layer, RecurrentLayer)]
        self._sources = {i: kind.source for i, kind in enumerate(kinds) if kind.source is not None}
        self._read = {i: [j for j, x in self._sources.items() if x == i] for i in self._sources.values()}
        self._shared: dict[int, Update] = {}  # of this run, by number of a layer whose keys others read,
        self._readers: set[int] = set()  # and which of these have yet to read them
        self.runs = ModelRuns(len(self.store.layers), recurrent, continues="scan from zeros" not in self.families)
        super().__init__(layers=layers)

    @property
    def _of_passes(self) -> dict:
        return {"cp_group": self.cp_group, "schedule": self.schedule, "head_shares": self.head_shares}

    @contextlib.contextmanager
    def forward_pass(self, rows, num_tokens: int, **options):
        """Context of one run of the model over new tokens of some rows; see `megatron_tree.core.cache.forward`."""
        with shared_checks("a run of the model", self.cp_group):
            self.runs.end(self._batch())
            held = [self.store.book.rows[row] for row in rows]
            self.runs.take_states(held)
        with forward_pass(self.store, rows, num_tokens, **self._of_passes, **options) as forward:
            with self.running(forward):
                yield forward
            self.runs.give_states(held)

    @contextlib.contextmanager
    def running(self, forward: ForwardPass):
        """Context of one run of the model in this pass."""
        try:
            with self.runs.open(forward):
                current_run.set(self)
                yield
                self._check_taken()
        finally:
            forget_notes()
            self._shared.clear()
            self._readers.clear()

    @outside_graphs
    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """Take new tokens k [b, h_kv, n, d] and v [b, h_kv, n, d_v], and leave a note for the attention call.

        Returns: what that call is to be given, the arguments; the attention reads the pages.
        """
        if last_update.get() is not None:
            self._check_taken()
        if not self.runs.is_open:
            self._join_batch_run(key_states, layer_idx)
        forward = self.runs.forward
        forward.write(self.slot_of[layer_idx], key_states.transpose(1, 2), value_states.transpose(1, 2))
        update = Update(self, layer_idx, key_states, value_states, forward)
        last_update.set(update)
        if layer_idx in self._read:
            self._shared[layer_idx] = update
            self._readers.update(self._read[layer_idx])
        return key_states, value_states

    def update_read_by(self, layer_idx: int | None) -> Update | None:
        """The update of this run whose keys and values a layer without any of its own reads, once."""
        if layer_idx not in self._readers:
            return None
        self._readers.remove(layer_idx)
        return self._shared[self._sources[layer_idx]]

    def _check_taken(self) -> None:
        """Raise ``ValueError`` if no attention call followed the last update."""
        update = last_update.get()
        if update is not None and update.cache is self:
            raise ValueError(
                f"layer {update.layer_idx} updated the TreeCache, but its attention did not call attention 'tree': "
                "call model.set_attn_implementation('tree'). If you did, this model computes attention in its own "
                "code: use Transformers' own cache"
            )

    def end_layer(self) -> None:
        """Called after the attention of a layer: the run goes on, unless it was the last one."""
        if self.runs.is_open or not self.runs.has_stored(None) or self._readers:
            current_run.set(self)
        else:
            self._shared.clear()

    def _join_batch_run(self, key_states: Tensor, layer_idx: int) -> None:
        """Let a layer join the run over the batch, or begin the next one."""
        runs = self.runs
        if not runs.is_begun or (runs.forward is not None and runs.has_stored(self.slot_of[layer_idx])):
            self._begin_batch_run()
        if runs.forward is None:
            num_rows, num_tokens = key_states.shape[0], key_states.shape[2]
            with shared_checks("a run of the model", self.cp_group):
                if not self.rows:
                    self.rows = [self.store.book.add() for _ in range(num_rows)]
                self._check_batch(num_rows)
                self._check_rope(num_tokens)
                append = self.store.append(self.rows, num_tokens)
            begin_step(self.cp_group, rows=append.rows, positions=append.first, num_tokens=num_tokens)
            runs.forward = ForwardPass(self.store, append, **self._of_passes)

    def _begin_batch_run(self) -> None:
        with shared_checks("a run of the model", self.cp_group):
            self.runs.begin(self._batch())

    def _check_batch(self, num_rows: int) -> None:
        if self.rows and len(self.rows) != num_rows:
            raise ValueError(
                f"the cache holds a batch of {len(self.rows)} rows, not {num_rows}: call reset() before another batch, "
                "or batch_repeat_interleave() or batch_select_indices() to go on with other rows of this one"
            )

    def _batch(self) -> list[Row]:
        return [self.store.book.rows[row] for row in self.rows]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The state of a layer's convolution [b, channels, width]; None before a row's first tokens."""
        reached = self.runs.reaches(layer_idx, state_idx)
        if not self.runs.is_open and (reached or not self.runs.is_begun):
            self._begin_batch_run()
            self.runs.reaches(layer_idx, state_idx)
        return super().get_conv_state(layer_idx, state_idx)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs) -> Tensor:
        """Take new inputs of a convolution [b, channels, n]; returns them, with those before them."""
        self.runs.reaches(layer_idx, state_idx)
        if not self.runs.is_open:
            self._check_batch(conv_states.shape[0])
        self.runs.check_update(layer_idx, state_idx, conv_states.shape[-1])
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def activate_past_recording(self) -> None:
        """Called by Transformers before it proposes tokens that may be removed again."""
        if self.runs.has_states:
            raise ValueError(
                "assistant_model and prompt_lookup_num_tokens remove tokens from the cache again, but the state of "
                "recurrent layers can't go back: leave them out"
            )

    def _check_rope(self, num_tokens: int) -> None:
        """For models that are not run by `generate`, which runs rows again."""
        held = self.get_seq_length()
        if self.rope is None or not held or held + num_tokens == self.rope_slots:
            return
        if self.rope.kind(held) != self.rope.kind(held + num_tokens):
            raise ValueError(
                f"the cache holds {held} tokens and {num_tokens} more are run, but beyond {self.rope.switches} tokens "
                "this model (rope_type='longrope') has another rotary embedding, also for the tokens in the cache: "
                "call cache.reset() and run the whole text, or use generate, which does that"
            )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the longest row; in a run of the model those before it, until this layer has stored its own."""
        forward = self.runs.forward
        if forward is not None and not self.runs.has_stored(self.slot_of.get(layer_idx)):
            return max(forward.append.first)
        return self._longest()

    def _longest(self) -> int:
        return max((row.length for row in self._batch()), default=0)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def length(self, index: int) -> int:
        """Tokens of row `index` of the batch; 0 before there is one."""
        return self.store.book.rows[self.rows[index]].length if self.rows else 0

    @property
    def batch_size(self) -> int:
        """Rows of the batch; -1 before the first."""
        return len(self.rows) or -1

    def reset(self) -> None:
        """Forget all rows and free the memory."""
        self.store.reset()
        self.rows, self.texts = [], []
        self.runs.forget()
        forget_notes()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens of all rows of the batch; zero or negative, as in Transformers."""
        length = self._longest()
        if tokens_to_remove > 0 or -tokens_to_remove > length:
            raise ValueError(f"tokens_to_remove={tokens_to_remove} must be between -{length} and 0")
        if tokens_to_remove:
            self.runs.drop(self._batch())
            self.texts = []
            lengths = [max(self.length(i) + tokens_to_remove, 0) for i in range(len(self.rows))]
            for row, kept in zip(self.rows, lengths, strict=True):
                self.store.book.check_crop(row, kept)  # before any row changes: all rows or none
            for row, kept in zip(self.rows, lengths, strict=True):
                self.store.crop(row, kept)
            forget_notes()

    def save(self, folder, tokens: list[Tensor], *, fingerprint: str) -> None:
        """Write the batch to files; see `cache.files.save_rows`."""
        self._check_heads("save")
        self.runs.end(self._batch())
        for row in self.rows:
            held = self.store.book.rows[row]
            if held.next_positions is not None:
                raise ValueError(
                    "a row with images has positions that files don't keep: run it again instead of saving it"
                )
            if held.note is not None and held.note.kind != self.rope.kind(held.length):
                raise ValueError(
                    f"a row was cropped to {held.length} tokens, which are in the cache with the rotary embedding of "
                    "longer sequences (longrope): run it before it is saved"
                )
        save_rows(self.store, self.rows, folder, tokens, fingerprint=fingerprint, **self._of_files)

    def load(self, folder, *, fingerprint: str, device="cpu") -> list[Tensor]:
        """Make what `save` wrote the batch, which must be empty; returns its tokens. See `cache.files.load_rows`."""
        self._check_heads("load")
        if self.rows:
            raise ValueError(f"the cache holds a batch of {len(self.rows)} rows already: call reset() before load()")
        options = dict(fingerprint=fingerprint, device=device)
        self.rows, tokens = load_rows(self.store, folder, **options, **self._of_files)
        self.note_tokens(tokens)
        return tokens

    def note_tokens(self, tokens: list[Tensor]) -> None:
        """Tell what the rows of the batch hold, where they may have to be run again; int64 [n] each, or more."""
        for row_id, text in zip(self.rows, tokens, strict=True):
            row = self.store.book.rows[row_id]
            if self.rope is not None and row.length and row.note is None:
                row.note = self.rope.note(text[: row.length], row.length)

    def _check_heads(self, what: str) -> None:
        if not self._has_all_heads and self._of_files["weights_group"] is None:
            raise ValueError(
                f"{what} of a cache with head_shares={self.head_shares}: other head groups hold other KV heads. Make "
                "it with weights_group=, the group of all ranks, as an engine's new_cache() does"
            )
        has_parts = self.runs.has_states and not self.block_slot_of  # what blocks are made of is whole on every rank
        if self.head_shares is not None and has_parts and self._of_files["state_pieces"] is None:
            raise ValueError(
                f"{what} of a cache with head_shares={self.head_shares} and recurrent states: each rank has a part of "
                "these. Make it with state_pieces=, as an engine's new_cache() does"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row i of the batch by row beam_idx[i]; rows that are selected more than once share their pages."""
        self.runs.end(self._batch())
        forks = [self.store.book.fork(self.rows[i]) for i in beam_idx.tolist()]
        for row in self.rows:
            self.store.remove(row)
        self.rows = forks

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(len(self.rows)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(torch.as_tensor(indices))

    def __reduce_ex__(self, protocol):
        raise ValueError(
            "a TreeCache can't be pickled or copied by copy.deepcopy: it belongs to a group of ranks. To go on with a "
            "prompt several times, call batch_repeat_interleave(n), fork() of a Runner, or save(), then load() of a "
            "new TreeCache"
        )

    @property
    def num_local_tokens(self) -> int:
        """Tokens whose keys and values this rank holds, in layers without a window."""
        kinds = list(zip(self.store.book.windows, self.store.block_sizes))
        return self.store.num_local(kinds.index((None, 1)) if (None, 1) in kinds else 0)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's keys and values, all layers."""
        return self.store.nbytes


# What Transformers' own `generate` does over a `TreeCache`. First, it refuses options that would run the model without
# the cache. Before a step it compares the tokens of the ranks, and it runs a row again whose rotary embedding has
# changed (longrope).


RUN_BESIDE = {"guidance_scale": (None, 1), "assistant_early_exit": (None,), "use_mtp": (None, False)}
"""Options with which `generate` runs the model over another cache, too, and their values that don't."""


def prepare_generate(config) -> None:
    """Make `generate` of a configuration's model do this. No effect on other models and caches."""
    if (model := model_class(config)) is not None:
        replace(model, "prepare_inputs_for_generation", _prepare_inputs)  # Transformers reads the signature
        replace(model, "_prepare_cache_for_generation", _prepare_cache)


def _prepare_cache(plain, model, generation_config, model_kwargs, *args, **kwargs):
    if hasattr(model_kwargs.get("past_key_values"), "cp_group"):
        for option, allowed in RUN_BESIDE.items():
            if (value := getattr(generation_config, option, None)) not in allowed:
                raise ValueError(
                    f"{option}={value!r}: generate would run the model over a second cache, which is no TreeCache. "
                    f"Leave {option} out, or use attn_implementation='sdpa' and Transformers' own cache"
                )
        generation_config.use_cache = True  # else every step would run all tokens again over those in the cache
    return plain(model, generation_config, model_kwargs, *args, **kwargs)


def _prepare_inputs(plain, model, input_ids, *args, past_key_values=None, **kwargs):
    plain, cache, mask = functools.partial(plain, model), past_key_values, kwargs.get("attention_mask")
    if not hasattr(cache, "cp_group"):
        return plain(input_ids, *args, past_key_values=cache, **kwargs)
    _compare_tokens(cache, input_ids)
    if (rule := cache.rope) is None:
        return plain(input_ids, *args, past_key_values=cache, **kwargs)
    if rule.switches and kwargs.get("inputs_embeds") is not None:
        raise ValueError(
            "inputs_embeds with a TreeCache: this model (rope_type='longrope') may have to run its tokens again, "
            "pass input_ids"
        )
    slots = input_ids.shape[1]
    lengths = [slots] * input_ids.shape[0] if mask is None else mask.sum(1).tolist()
    kinds = [rule.kind(length) for length in lengths]
    if kinds != cache.rope_kinds and cache.get_seq_length():
        cache.reset()
    if not cache.get_seq_length():
        past_key_values, kwargs["next_sequence_length"] = None, None
    inputs = plain(input_ids, *args, past_key_values=past_key_values, **kwargs)
    if inputs.get("past_key_values") is None:
        cache.reset()
        inputs["past_key_values"] = cache
    cache.rope_kinds, cache.rope_slots = kinds, slots
    return inputs


def _compare_tokens(cache, input_ids: Tensor) -> None:
    """Raise the same ``ValueError`` on all ranks of the cache's group unless they are about to run the same tokens.

    Not with check="never" of `TreeConfig`. One message of 16 bytes: the sum of a number made of the tokens and of its
    square, which tell whether all are equal.
    """
    config, held = cache.tree_config or default_config(), cache.get_seq_length()
    if cache.world == 1 or config.check == "never":
        return
    ranks = Ranks.of(cache.cp_group, input_ids.device, config)
    with ranks.call("model.generate") as call:
        call.start()
        new = input_ids[:, held:].cpu().contiguous()
        digest = hashlib.blake2b(f"{list(input_ids.shape)}".encode() + new.numpy().tobytes(), digest_size=3).digest()
        number = int.from_bytes(digest, "big")
        sums = torch.tensor((number, number**2), device=input_ids.device)
        total, squares = ranks.reduce(sums).tolist()
        if cache.world * squares != total**2:
            raise ValueError(
                f"the ranks' input_ids differ, here {list(input_ids.shape)}, from token {held} on: pass the same "
                "prompts and options on all ranks and, to sample, set the same seed on all of them before generate"
            )
