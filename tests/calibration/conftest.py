"""The tiny model that all calibration tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import TEXT, tiny_llama, tiny_tokenizer

from sglang_kv.calibration.passkey import Passkey, samples


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def model() -> Any:
    return tiny_llama()


@pytest.fixture(scope="session")
def sample(tokenizer: Any) -> Passkey:
    return next(samples(tokenizer, TEXT, seed=0, lengths=(900, 1000), sinks=8, recent=64))


@pytest.fixture(scope="session")
def folder(model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model on disk."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def common(folder: Path, tmp_path: Path) -> list[str]:
    """The model's folder and what suits it, for the command line."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    return [str(folder), "--text", str(text), "--threads", str(torch.get_num_threads())]
