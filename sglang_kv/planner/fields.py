"""A config.json's fields: read with clear errors, and remembered, so that none is overlooked.

The danger of reading a config by a few well-known names is the name one does not know: a window, a
state, a shared layer, and the answer is wrong by a factor of four without a word. So every field
that smells of memory has to be understood; one that was never read refuses the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sglang_kv.planner.units import PlanError

#: Names of fields that change what a request keeps.
_MATTERS = re.compile(
    r"mamba|ssm|^linear_|conv|window|layer_types|layers_block_type|block_types|hybrid|attn_layer|"
    r"attn_config|lora_rank|^index|kv_shared|compress|recurrent|rwkv|state_size|cross_attention|"
    r"chunk_size|sparse|kda|swa_|key_value_heads|head_dim|full_attn|kv_heads|_cache_|per_layer|"
    r"block_configs|attn_type|attention_type|attention_groups|attention_other|cla_|layer_group_size"
)
#: Fields of that look that change nothing: how something is computed, not what is kept.
_HARMLESS = re.compile(
    r"^q_lora_rank$|^qk_head_dim$|mlp_layer_types|linear_(a_log|dt|allow)|mamba_chunk_size|^chunk_size$|use_mamba_kernels|mamba_hidden_act|conv_bias|"
    r"mamba_proj_bias|mamba_dt|mamba_rms_norm|mamba_norm|mamba_use_mlp|ssm_.*multiplier|"
    r"decoder_sparse_step|max_window_layers|chunk_size_feed_forward|mtp_|_token_index|"
    r"moe_layer|per_layer_input|^chunk_size_|sparse_step|_cache_dtype|hybrid_layer_ids|image_|"
    r"vision|audio|^use_long_context|time_step|mamba_act|_per_layer_projection|mup_|"
    r"^(sliding|no_rope|expert)_.*(pattern|interval)$|^sparsity|moe_.*"
)


class Fields:
    """Fields of one config, by their first name or by any other that models use for it."""

    def __init__(self, values: Mapping[str, Any], source: str, defaults: Mapping[str, Any]):
        self.values = values
        self.source = source
        self.defaults = defaults
        self._read: set[str] = set()

    def get(self, *names: str) -> Any:
        """The first of these fields that is there and not null; else its family's default."""
        self._read.update(names)
        for holder in (self.values, self.defaults):
            for name in names:
                if holder.get(name) is not None:
                    return holder[name]
        return None

    def count(self, *names: str, least: int = 1) -> int:
        """As `get`, a whole number; `PlanError` where it is missing."""
        number = self.optional_count(*names, least=least)
        if number is None:
            raise PlanError(f"{self.source}: {names[0]} is missing")
        return number

    def optional_count(self, *names: str, least: int = 1) -> int | None:
        value = self.get(*names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise PlanError(f"{self.source}: {names[0]}: expected a number, got {str(value)[:40]}")
        if value < least:
            raise PlanError(f"{self.source}: {names[0]}: must be at least {least}, got {value}")
        if value >= 2**31:
            raise PlanError(f"{self.source}: {names[0]}: {str(value)[:20]} is absurdly large")
        return value

    def flag(self, name: str) -> bool | None:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise PlanError(f"{self.source}: {name}: expected true or false, got {str(value)[:40]}")
        return value

    def text(self, *names: str) -> str:
        value = self.get(*names)
        if value is not None and not isinstance(value, str):
            raise PlanError(f"{self.source}: {names[0]}: expected text, got {str(value)[:40]}")
        return value or ""

    def names(self, *names: str) -> list[str] | None:
        """A list of names, such as ``layer_types``."""
        value = self.get(*names)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise PlanError(f"{self.source}: {names[0]}: expected a list of names")
        return value

    def indices(self, name: str) -> list[int] | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise PlanError(f"{self.source}: {name}: expected a list of layers")
        return value

    def overlooked(self) -> list[str]:
        """Fields that matter for memory, are set, and nobody asked for."""
        return sorted(
            name
            for name, value in self.values.items()
            if value not in (None, False, 0, "", [], {})
            and name not in self._read
            and _MATTERS.search(name)
            and not _HARMLESS.search(name)
        )
