"""Where a model's config comes from: a path, the catalogue, or the Hugging Face hub."""

from __future__ import annotations

import json
import logging
import os
import socket
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sglang_kv.planner.config import read_model
from sglang_kv.planner.model import Model
from sglang_kv.planner.units import PlanError
from sglang_kv.planner.weights import quantized_dtype


@cache
def catalogue() -> dict[str, dict[str, Any]]:
    """Models that come with the package, by name (``data/models.json``)."""
    file = resources.files("sglang_kv") / "data" / "models.json"
    entries: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return entries


def find_model(text: str) -> Model:
    """A model by path (a folder or its config.json), by name in the catalogue, or on the hub.

    Raises:
        PlanError: there is no such model, or its config cannot be read or understood.
    """
    path = existing(text)
    if path is not None:
        file = path / "config.json" if path.is_dir() else path
        name = (file.parent if file.name == "config.json" else file).resolve().stem
        model = read_model(_load(file), name)
        weights = model.weight_dtype or _quantized_beside(file)
        return replace(model, path=text, source=str(file), weight_dtype=weights)
    entry = _in_catalogue(text)
    if entry is not None:
        name, held = entry
        model = read_model(held["config"], name, parameters=held.get("parameters"))
        notes = (*model.notes, *([held["note"]] if "note" in held else []))
        return replace(model, path=held["hub"], source=held["source"][0], notes=notes)
    if text.count("/") == 1 and not text.startswith((".", "/", "~")) and not text.endswith(".json"):
        model = read_model(_download(text), text.split("/")[1])
        return replace(model, path=text, source=f"https://huggingface.co/{text}")
    raise PlanError(
        f"MODEL: {text[:80]!r} is no path, no name on the hub (ORG/NAME), and not in the "
        f"catalogue: {', '.join(catalogue())}"
    )


def existing(text: str) -> Path | None:
    """The path that ``text`` is; None where there is none, or it cannot be one."""
    try:
        path = Path(text).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, no such user, a null byte
        return None


def _quantized_beside(file: Path) -> str | None:
    """ModelOpt's checkpoints say in a file of their own how the weights are quantized."""
    beside = file.parent / "hf_quant_config.json"
    if file.name != "config.json" or not beside.exists():
        return None
    held = _load(beside)
    quantization = held.get("quantization") if isinstance(held, dict) else None
    algorithm = quantization.get("quant_algo") if isinstance(quantization, dict) else None
    return quantized_dtype({"quant_method": str(algorithm).lower()})


def _in_catalogue(text: str) -> tuple[str, dict[str, Any]] | None:
    wanted = text.lower()
    for name, entry in catalogue().items():
        hub = entry["hub"].lower()
        if wanted in (name, hub, hub.split("/")[-1]):
            return name, entry
    return None


def _load(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanError(f"MODEL: {file.parent} holds no config.json") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise PlanError(f"MODEL: {file}: cannot be read: {reason}") from None
    except ValueError as error:
        raise PlanError(f"MODEL: {file}: not JSON: {error}") from None
    except RecursionError:
        raise PlanError(f"MODEL: {file}: not JSON: nested too deeply") from None


def _download(repo: str) -> Any:
    """config.json of a model on the hub, and nothing else of it."""
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise PlanError(
            f"MODEL: {repo} is not in the catalogue, and huggingface_hub, which could fetch its "
            "config.json, is not installed; give a path"
        ) from None
    # Its retries are not what a one-line answer looks like.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        return _load(Path(hf_hub_download(repo, "config.json", local_files_only=True)))
    except Exception:  # not in the cache: one kind of many, so it is asked for
        pass
    try:
        _resolve_hub()
        file = hf_hub_download(repo, "config.json")
    except Exception as error:  # many kinds: no network, no such model, gated
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise PlanError(
            f"MODEL: {repo}: its config.json cannot be fetched from the hub "
            f"({reason[0][:120].strip()}); give a path"
        ) from None
    return _load(Path(file))


def _resolve_hub() -> None:
    """Fail at once where there is no network; the hub's client would try for half a minute."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return  # names are the proxy's to resolve
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        raise OSError(f"{host} cannot be reached") from None
