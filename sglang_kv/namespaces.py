"""Who may share prefixes with whom: a request's namespace in the prefix tree.

Two requests share KV only where everything that shaped it, and everyone who may see it, is equal.
Parts stay apart (`radix.key.Namespace`): SGLang joins a LoRA's id to ``extra_key``, which is undone
here, so that ``extra_key='a'`` with LoRA ``'bc'`` is not ``extra_key='abc'``.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sglang_kv.compression import Compressor
from sglang_kv.radix.key import Namespace


@dataclass
class Sharing:
    """The server's part of every namespace.

    Args:
        mode: ``all``: whoever sends the same tokens; ``tenant``: requests of one tenant, and a
            request without an identity with nobody; ``off``: nobody.
        model: which weights, and how they were read.
        rotary: how positions enter keys.
        weights: grows with every change of the weights while the server runs.
    """

    mode: str = "all"
    model: str = ""
    rotary: str = ""
    weights: int = 0
    #: How often a tenant's prefixes were flushed, where they were.
    flushes: Counter[str] = field(default_factory=Counter)

    def namespace_of(self, req: Any, tenant: str | None) -> Namespace | None:
        """Where a request looks up and stores KV of full attention; None: nowhere.

        ``tenant`` is what the server found, never what the client claims; the client's
        ``cache_salt`` and ``extra_key`` are parts beside it and can only narrow it.
        """
        if self.mode == "off" or (self.mode == "tenant" and tenant is None):
            return None
        lora, extra = getattr(req, "lora_id", None), req.extra_key
        if lora is not None and extra is not None and extra.endswith(lora):
            extra = extra[: len(extra) - len(lora)] or None
        return Namespace(
            tenant=None if self.mode == "all" else f"{tenant}#{self.flushes[str(tenant)]}",
            salt=req.cache_salt,
            extra_key=extra,
            lora_id=lora,
            model=f"{self.model}#{self.weights}",
            rotary=self.rotary,
        )

    def start_anew(self, tenant: str) -> None:
        """From now on the tenant's requests find nothing of what there is."""
        self.flushes[tenant] += 1

    @staticmethod
    def is_of(namespace: Namespace, tenant: str) -> bool:
        """Whether a namespace is one of the tenant's, of whatever time."""
        return namespace.tenant is not None and namespace.tenant.rpartition("#")[0] == tenant


def rotary_identity(config: Any) -> str:
    """How a model's positions enter its keys, from its text config."""
    names = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    values = {name: getattr(config, name, None) for name in names}
    return json.dumps(values, sort_keys=True, default=str)


def under_policy(namespace: Namespace, policy: Compressor, *, thinned: bool = False) -> Namespace:
    """Where KV lies that was computed after ``policy`` had dropped something.

    ``thinned``: by a request that may have gone on from a thinned prefix, which gives other KV.
    """
    parameters = json.dumps(policy.parameters, sort_keys=True, default=str)
    return namespace._replace(policy=f"{policy.name} {parameters}{' thinned' * thinned}")
