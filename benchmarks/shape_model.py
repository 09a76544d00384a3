"""A model with another's KV shape and next to nothing to compute.

What fits a pool, what is dropped and what is freed follow from layers, KV heads, head size, page
size and policy; weights decide which tokens, not how many. To count requests in a pool, any do.
"""

from __future__ import annotations

import shutil
from pathlib import Path

HIDDEN = 32  #: per KV head: transformers asks for a multiple
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt")


def write_shape_model(model: str, folder: Path) -> Path:
    """Random weights (seed 0): as many layers, KV heads, positions and words; a small hidden size.

    One query head for each KV head.

    Args:
        model: path or name of the model whose shape is taken; one of Llama's kind.
        folder: where the model is written, with the other's tokenizer.

    Raises:
        ValueError: the model's layers are not Llama's.
    """
    import torch
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

    config = AutoConfig.from_pretrained(model)
    if config.model_type != "llama":
        raise ValueError(f"{model}: a model of type llama was expected, got {config.model_type}")
    config.head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    config.num_attention_heads = config.num_key_value_heads
    config.hidden_size = config.intermediate_size = HIDDEN * config.num_key_value_heads
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    if Path(model).is_dir():
        for pattern in TOKENIZER:
            for path in Path(model).glob(pattern):
                shutil.copy(path, folder)
    else:
        AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder
