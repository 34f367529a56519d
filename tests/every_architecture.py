"""What every causal language model class of the installed Transformers does on 2 ranks: a table of docs/huggingface.md.

    python tests/every_architecture.py results.json              # runs what the file lacks, and writes the table
    python tests/every_architecture.py results.json llama blt    # runs these again first

For each architecture that `AutoModelForCausalLM` knows a tiny random model is built. Generation, training on shards and
generation with sharded weights are "exact", as the plain model on one rank, or "refused" by a ``ValueError`` of this
package, the same on all ranks. Anything else is "wrong" or, with another exception or no answer in time, "broken", and
the table is not written. Ranks are processes of support/ranks.py, so one bad class stops nothing.
"""

import argparse
import json
import math
import re
import traceback
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import megatron_tree
import megatron_tree.integrations.transformers as tree_hf
import transformers
from megatron_tree.integrations.transformers.architectures import attention_windows
from megatron_tree.integrations.transformers.families.table import families_of
from megatron_tree.integrations.transformers.infer.engine import generate, share_model
from support.hf_architectures import SHARED_KEYS, assert_logits, model_of, tiny_config
from support.hf_models import plain, prompt
from support.hf_served import check_served
from support.hf_training import check_trained_batches
from support.ranks import DistributedTestError, run_distributed
from transformers import AutoModelForCausalLM

PAGE = Path(__file__).resolve().parents[1] / "docs" / "huggingface.md"
BEGIN, END = "<!-- every architecture: begin -->\n", "\n<!-- every architecture: end -->"
RELEASE = transformers.__version__.rpartition(".")[0]
NAMES = tuple(x for x in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if x != "gemma3n")  # it has gemma3n_text, and needs timm
OPTIONS = {  # of some architectures, by which tokens see others
    "bert": {"is_decoder=False": {"is_decoder": False}},
    "gemma3_text": {"use_bidirectional_attention": {"use_bidirectional_attention": True}},
    "gemma4_text": {
        "attention_k_eq_v": {"attention_k_eq_v": True},
        "num_kv_shared_layers": SHARED_KEYS,
        "use_bidirectional_attention": {"use_bidirectional_attention": "all"},
    },
    "gemma4_unified_text": {"num_kv_shared_layers": SHARED_KEYS},
    "minimax_m3_vl_text": {
        "minimax_m3_sparse layers": {"layer_types": ["full_attention", "minimax_m3_sparse", "full_attention"]}
    },
}
OF_PARTS = {  # of vision and audio, which these texts leave out
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4, "crop_size": 16, "num_key_value_heads": 2, "head_dim": 8, "vision_use_head": False, "mlp_dim": 16,
    "output_channels": 16, "global_attn_indexes": [0], "window_size": 2, "position_embedding_size": 64,
    "num_blocks": 1, "ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16, "nemo_conv_channels": 16,
    "mm_embed_dim": 16, "mm_posemb_size": 16, "output_proj_dims": 16,
}  # fmt: skip
TIME_LIMIT = 60.0  # seconds for one way of one architecture
PACKAGE = str(Path(megatron_tree.__file__).parent)


def cases():
    """{title: (architecture, its options)}"""
    found = {}
    for name in NAMES:
        found[f"`{name}`"] = name, {}
        for what, options in OPTIONS.get(name, {}).items():
            found[f"`{name}` with {what}"] = name, options
    return found


def causal_config(name, options):
    """The tiny configuration of what AutoModelForCausalLM makes of an architecture; dropout is off."""
    made = transformers.CONFIG_MAPPING[name]
    if name.endswith("_assistant"):  # without options it can't be made
        of_text = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
        of_text |= {"enable_moe_block": False} if name == "gemma4_assistant" else {}
        config = made(text_config=tiny_config(name.replace("_assistant", "_text"), **of_text).to_dict())
    else:
        config, text = made(), tiny_config(name, **options)
        if type(text) is made or AutoModelForCausalLM._model_mapping[made].config_class is type(text):
            config = text
        for part in config.sub_configs:
            own = getattr(config, part, None)
            if own is config.get_text_config(decoder=True):
                setattr(config, part, text)
            elif part in ("vision_config", "audio_config") and own is not None:
                for option in OF_PARTS.keys() & vars(own).keys():
                    setattr(own, option, OF_PARTS[option])
    for part in (config, config.get_text_config(decoder=True)):
        for option, value in list(vars(part).items()):
            if "drop" in option and isinstance(value, float):
                setattr(part, option, 0.0)
    return config


def _page_size(config):
    """A small one, which blocks of tokens divide."""
    return math.lcm(2, *getattr(config, "compress_rates", {}).values())


def _generation(config, make):
    tree_hf.TreeCache(config, page_size=_page_size(config))
    check_served(make(), pads=not families_of(config).keys() & {"pooled", "compressed"}, page_size=_page_size(config))


def _training(config, make):
    attention_windows(config)
    model = make()
    tree_hf.train_on_shards(model)
    samples = config.model_type == "phimoe"  # while it trains, its router draws experts
    check_trained_batches(make, recomputes=(model.supports_gradient_checkpointing and not samples,))


def _sharded_weights(config, make):
    tree_hf.TreeCache(config, page_size=_page_size(config))
    model, ids = make(), prompt(1, 45)
    want, size = plain(model, ids, 3), _text_size(model)
    engine = share_model(model, weights="sharded", page_size=_page_size(config), prefill_chunk=34)
    assert _text_size(model) < 0.75 * size
    result = generate(engine, ids, max_new_tokens=3, keep_logits=True)
    assert_logits(torch.stack(result.logits, 1), want[1], "sharded weights")
    assert torch.equal(result.tokens, want[0])


def _text_size(model):
    return sum(parameter.numel() for parameter in model.get_decoder().parameters())


WAYS = {"generation": _generation, "training on shards": _training, "sharded weights": _sharded_weights}


def _of_rank(rank, world, name, options, way):
    config = causal_config(name, options)
    try:
        WAYS[way](config, lambda: model_of(config, name))
    except Exception as error:
        text = "".join(traceback.format_exception(error))[-3000:]
        if isinstance(error, AssertionError):
            return "wrong", text
        ours = traceback.extract_tb(error.__traceback__)[-1].filename.startswith(PACKAGE)
        return ("refused", str(error)) if ours and isinstance(error, ValueError) else ("broken", text)
    return "exact", ""


def find_out(title, way):
    """["exact", ""], ["refused", the sentence], or ["wrong" or "broken", what happened]."""
    try:
        first, *others = run_distributed(_of_rank, 2, *cases()[title], way, timeout=TIME_LIMIT)
    except DistributedTestError as error:
        return ["broken", str(error)[-3000:]]
    return list(first) if others == [first] else ["broken", f"the ranks differ: {first}, {others}"]


def reason_of(sentence):
    """What a sentence says of an architecture, without the names of its classes, details and the way out."""
    sentence = re.sub(r"^\w+(\.\w+)*:? ", "", sentence)
    pattern = r"weights='sharded' can't split ([\w.]+?)(?:\.weight)?:? (?:\[.*?\] is )?(.*?)\. Use "
    if split := re.match(pattern, sentence):
        name, why = split.groups()
        return f"{name.rpartition('.')[2]}: {why}"
    return re.sub(r" \(.*?\)", "", re.split(r"[;,.]| and ignores |: TreeCache has", sentence)[0])


def table(results):
    """The Markdown of {title: {way: what `find_out` returned}}; what is refused with any options stands there once."""
    counts, refused = {}, {}
    for title, found in results.items():
        for way, (kind, sentence) in found.items():
            counts.setdefault(way, []).append(kind)
            if kind == "refused":
                refused.setdefault(title, {})[way] = reason_of(sentence)
    lines = [f"| Transformers {RELEASE} | exact | refused |", "| --- | --- | --- |"]
    lines += [f"| {way} | {kinds.count('exact')} | {kinds.count('refused')} |" for way, kinds in counts.items()]
    rows = {}
    for title, reasons in refused.items():
        without = refused.get(title.split(" with ")[0], {}) if " with " in title else {}
        reasons = {way: reason for way, reason in reasons.items() if without.get(way) != reason}
        for reason in dict.fromkeys(reasons.values()):
            ways = [way for way in WAYS if reasons.get(way) == reason]
            rows.setdefault((", ".join(ways) if len(ways) < len(WAYS) else "all", reason), []).append(title)
    lines += ["", "| refused | why | |", "| --- | --- | --- |"]
    lines += [f"| {ways} | {reason} | {'; '.join(titles)} |" for (ways, reason), titles in sorted(rows.items())]
    return "\n".join(lines)


def page_with(page, lines):
    """The page's text with the table between its two comment lines."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + lines + END + rest.split(END)[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path, help="JSON file of what was found: what it has is not run again")
    parser.add_argument("names", nargs="*", metavar="NAME", help="architectures that are")
    args = parser.parse_args()
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    todo = [(title, way) for title in cases() for way in WAYS]
    todo = [(x, way) for x, way in todo if cases()[x][0] in args.names or way not in results.get(x, {})]
    for title, way in (bar := tqdm(todo, disable=None)):
        bar.set_description(title)
        results.setdefault(title, {})[way] = find_out(title, way)
        args.results.write_text(json.dumps(results, indent=1))
    bad = {f"{title}, {way}": x for title, of_one in results.items() for way, x in of_one.items()}
    bad = {what: f"{kind}: {text}" for what, (kind, text) in bad.items() if kind in ("wrong", "broken")}
    for what, text in bad.items():
        print(f"{what}: {text}\n")
    if bad:
        raise SystemExit(f"{len(bad)} are wrong or broken, see above: {PAGE.name} stays as it is")
    PAGE.write_text(page_with(PAGE.read_text(), table({title: results[title] for title in cases()})))


if __name__ == "__main__":
    main()
