"""Request traces: one JSON object per line, small enough to keep and to share.

    {"namespace": {"tenant": "a"}, "prompt": [[7, 1024], [901, 48]], "output": [[902, 64]],
     "importance": [0.0002, ...]}

Text stands as *segments* ``[id, tokens]``: the first tokens of the text called ``id``. Two requests
share a prefix as far as their segments agree, which is all that a cache sees of their text. The
block hashes that public traces come with are segments as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_kv.radix.key import Key, Namespace, Tokens

Segments = tuple[tuple[int, int], ...]
#: Tokens of one segment, at most: ids of tokens are segment * 2**22 + position.
MAX_SEGMENT = 2**22


@dataclass(frozen=True)
class Request:
    """A prompt, its answer, and what the window pass at the prompt's end saw.

    Args:
        prompt, output: segments.
        importance: density of each whole page of the prompt (`importance.page_density`);
            None: not measured.
    """

    prompt: Segments
    output: Segments = ()
    namespace: Namespace = field(default_factory=Namespace)
    importance: NDArray[np.float64] | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(count for _, count in self.prompt)

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + sum(count for _, count in self.output)

    def key(self) -> Key:
        """Prompt and output, under the request's namespace."""
        return Key(self.namespace, expand(self.prompt + self.output))


def expand(segments: Segments) -> Tokens:
    """The tokens of ``segments``, end to end. ``[n]`` int64"""
    for name, count in segments:
        if not 0 < count <= MAX_SEGMENT or not 0 <= name < 2**40:
            raise ValueError(f"bad segment [{name}, {count}]")
    parts = [name * MAX_SEGMENT + np.arange(count, dtype=np.int64) for name, count in segments]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def write_trace(path: Path, requests: Iterable[Request]) -> None:
    """One line per request; importance with five significant digits."""
    with path.open("w", encoding="utf-8") as file:
        for request in requests:
            parts = request.namespace._asdict().items()
            row: dict[str, Any] = {
                "namespace": {name: part for name, part in parts if part is not None},
                "prompt": request.prompt,
                "output": request.output,
            }
            if request.importance is not None:
                row["importance"] = [float(f"{x:.4e}") for x in request.importance]
            file.write(json.dumps(row) + "\n")


def read_trace(path: Path) -> Iterator[Request]:
    """The requests of a file. Raises ValueError, with the line's number, for a bad line."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                importance = row.get("importance")
                yield Request(
                    prompt=tuple((int(name), int(count)) for name, count in row["prompt"]),
                    output=tuple((int(name), int(count)) for name, count in row.get("output", [])),
                    namespace=Namespace(**row.get("namespace", {})),
                    importance=None if importance is None else np.array(importance, dtype=float),
                )
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
