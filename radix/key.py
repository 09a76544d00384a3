"""Who a prefix belongs to, and its tokens in whole pages.

Two requests may share KV only if everything that shaped it is equal. A `Namespace` holds those
parts side by side and never joined: `extra_key='a'` with LoRA `'bc'` is not `extra_key='abc'`.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]


class Namespace(NamedTuple):
    """What must be equal before tokens are even compared. None and ``""`` are different.

    Args:
        tenant: the authorization boundary, derived by the server and never by the client.
        salt: the client's own; can only narrow what a tenant shares.
        extra_key: SGLang's further key of a request.
        lora_id: the adapter.
        model: weights and their version.
        rotary: how positions enter the keys.
        policy: None for KV of full attention; else the identity of the policy whose KV this is.
    """

    tenant: str | None = None
    salt: str | None = None
    extra_key: str | None = None
    lora_id: str | None = None
    model: str | None = None
    rotary: str | None = None
    policy: str | None = None

    def digest(self) -> bytes:
        """32 bytes that differ for different namespaces: SHA-256 of length-prefixed parts."""
        state = hashlib.sha256()
        for part in self:
            data = b"" if part is None else part.encode("utf-8", "surrogatepass")
            state.update((-1 if part is None else len(data)).to_bytes(8, "little", signed=True))
            state.update(data)
        return state.digest()


class Key(NamedTuple):
    """A prompt as the tree sees it: its namespace and its tokens ``[n]`` int64."""

    namespace: Namespace
    tokens: Tokens

    @classmethod
    def of(
        cls, tokens: Tokens | array[int] | Sequence[int], namespace: Namespace | None = None
    ) -> Key:
        """A key over ``tokens``; an int64 array or ``array('q')`` is looked at, not copied."""
        if isinstance(tokens, array) and tokens.typecode == "q" and len(tokens):
            ids = np.frombuffer(tokens, dtype=np.int64)
        else:
            ids = np.asarray(tokens, dtype=np.int64)
        if ids.ndim != 1:
            raise ValueError(f"tokens must have one dimension, got shape {ids.shape}")
        return cls(Namespace() if namespace is None else namespace, ids)


def common_prefix(a: Tokens, b: Tokens, page_size: int) -> int:
    """Tokens in the whole pages with which both begin."""
    length = min(len(a), len(b))
    if length == 0:
        return 0
    differ = a[:length] != b[:length]
    first = int(differ.argmax())
    same = first if differ[first] else length
    return same // page_size * page_size


def pages_of(tokens: Tokens, page_size: int) -> list[bytes]:
    """The whole pages of ``tokens``, as bytes that are equal where the pages are."""
    whole = len(tokens) // page_size * page_size
    data, step = tokens[:whole].tobytes(), page_size * tokens.itemsize
    return [data[i : i + step] for i in range(0, len(data), step)]
