"""A model that is told to know fewer positions than it does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

#: Lets SGLang serve a context that is longer than those positions.
LONGER = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}


def shortened(
    model: Path, folder: Path, positions: int, scaling: dict[str, Any] | None = None
) -> Path:
    """Write to ``folder`` a copy of ``model``, its weights as links, for ``positions`` positions
    and with ``scaling`` of its rotary embedding; returns the folder."""
    shutil.copytree(model, folder, copy_function=_link)
    config = json.loads((model / "config.json").read_text())
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    config.pop("rope_parameters", None)
    config |= {"max_position_embeddings": positions, "rope_theta": theta, "rope_scaling": scaling}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _link(source: str, target: str) -> None:
    Path(target).symlink_to(Path(source).resolve())
