"""A random Llama and a tokenizer of single characters, small enough for eager attention."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = " ".join(f"Sentence {i} tells of nothing at all, and ends here." for i in range(40))
TEMPLATE = (
    "{% for message in messages %}<user> {{ message['content'] }} </user> {% endfor %}"
    "{% if add_generation_prompt %}<bot> {% endif %}"
)


def tiny_tokenizer() -> Any:
    """Every string has tokens, and digits stand alone."""
    letters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=raw)
    fast.chat_template = TEMPLATE
    return fast


def tiny_llama(heads: int = 6, kv_heads: int = 2, layers: int = 3) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=8 * heads,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
    )
    model = LlamaForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            weight.data *= 20  # so that attention is far from uniform
    return model
