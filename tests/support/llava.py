"""A served model of images and text whose processor needs Pillow only."""

import torch

import transformers
from megatron_tree.integrations import transformers as tree_hf
from megatron_tree.integrations.transformers.models import load_model
from support.byte_tokens import byte_tokenizer
from support.hf_images import image_model

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}[assistant]"
)


def save_llava(folder):
    """A random LLaVA with its processor; an image is 16 tokens."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = TEMPLATE
    size = {"height": 16, "width": 16}
    pictures = transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=size)
    processor = transformers.LlavaProcessor(pictures, tokenizer, 4, "default", TEMPLATE, num_additional_image_tokens=1)
    processor.save_pretrained(folder)
    text = {"vocab_size": 264, "max_position_embeddings": 256, "eos_token_id": 0, "bos_token_id": None}
    model = image_model("llava", torch.float32, text=text, image_token_id=tokenizer.convert_tokens_to_ids("<image>"))
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)


def llava_runner(folder):
    model = load_model(folder, torch.float32)
    model.set_attn_implementation({"text_config": "tree", "vision_config": "sdpa"})
    return tree_hf.Runner(model, tree_hf.TreeCache(model.config), chunk_size=16)
