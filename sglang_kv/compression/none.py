"""Keep everything: the identity every other method equals when its budget covers the length."""

from dataclasses import dataclass
from typing import ClassVar

from sglang_kv.compression.base import Compressor, register
from sglang_kv.compression.plan import Geometry, Plan


@register("none")
@dataclass(frozen=True)
class NoCompression(Compressor):
    """Full attention over the whole context."""

    idea: ClassVar[str] = "keep every token"

    def plan(self, prompt_tokens: int, geometry: Geometry) -> Plan:
        return Plan(geometry)
