"""Head gates: how much each (layer, KV head) needs the whole history, for DuoAttention.

Read from our JSON or from the patterns that MIT publishes with DuoAttention
(https://github.com/mit-han-lab/duo-attention): a TSV of [layers, KV heads], alone or in a
folder with a ``config.json``. Gates for some models come with the package; those that a user
downloads are found by the model's name in `gates_dir`.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from sglang_kv.compression.base import PolicyError, shorten

TSV = "full_attention_heads.tsv"
CONFIG = "config.json"
FORMAT = "sglang-kv-gates/1"
#: How far outside [0, 1] a value of a TSV may lie: a training step or two.
SLACK = 0.1
#: Decimals that a gates file keeps.
DECIMALS = 5

Values = np.ndarray[Any, np.dtype[np.float32]]
Heads = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, eq=False)
class HeadGates:
    """Gates of a model: 1 for a head that needs everything, 0 for one that needs little.

    Equal and hashed by what they hold; ``values`` cannot be written to.

    Args:
        values: float32 [layers, kv_heads] in [0, 1].
        model: id of the model, "" where the file does not say.
        method: how the gates were found.
        source: the file they came from.
        sinks: first tokens that streaming heads kept when the gates were found. For the reader: a
            policy's own count holds, as in the reference's evaluations of its patterns.
        recent: newest tokens that streaming heads kept then.
        model_hash: `model_hash` of the model, "" where the file does not say.
    """

    values: Values
    model: str
    method: str
    source: str
    sinks: int | None = None
    recent: int | None = None
    model_hash: str = ""

    def __post_init__(self) -> None:
        values = np.array(self.values, np.float32, order="C")
        if values.ndim != 2 or not values.size:
            raise PolicyError(
                f"--kv-gates: {self.source}: expected [layers, kv_heads], got {values.shape}"
            )
        for layer, head in np.argwhere(~((values >= 0) & (values <= 1))):  # NaN, too
            raise PolicyError(
                f"--kv-gates: {self.source}: layer {layer} head {head}: {values[layer, head]} is "
                "not in [0, 1]"
            )
        values += 0.0  # no negative zeros, which hash differently
        values.flags.writeable = False
        object.__setattr__(self, "values", values)

    def _key(self) -> tuple[Any, ...]:
        rest = (getattr(self, field.name) for field in fields(self)[1:])
        return (self.values.shape, self.values.tobytes(), *rest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeadGates) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


def retrieval_heads(
    gates: HeadGates | Values, *, sparsity: float | None = None, threshold: float | None = None
) -> Heads:
    """Which heads keep everything, [layers, kv_heads]; the others stream.

    Exactly one of the two is given.

    Args:
        gates: gates or their values.
        sparsity: share of streaming heads over all layers together: ``round(sparsity *
            heads)`` of them, halves to even, those with the lowest gates. Of equal gates the
            earlier (layer, head) streams first.
        threshold: heads with at least this gate keep everything.

    Raises:
        PolicyError: neither or both are given, or the one is not in [0, 1].
    """
    values = gates.values if isinstance(gates, HeadGates) else np.asarray(gates, np.float32)
    if (sparsity is None) == (threshold is None):
        raise PolicyError("kv_compression.sparsity: give either sparsity or threshold")
    for name, share in (("sparsity", sparsity), ("threshold", threshold)):
        if share is None:
            continue
        if isinstance(share, bool) or not isinstance(share, (int, float)):
            raise PolicyError(f"kv_compression.{name}: expected a number, got {share!r}")
        if not 0 <= share <= 1:
            raise PolicyError(f"kv_compression.{name}: must be in [0, 1], got {share!r}")
    if threshold is not None:
        return values >= np.float32(threshold)
    assert sparsity is not None
    streaming = round(sparsity * values.size)
    heads = np.ones(values.size, np.bool_)
    heads[np.argsort(values, axis=None, kind="stable")[:streaming]] = False
    return heads.reshape(values.shape)


def load_gates(path: str | Path) -> HeadGates:
    """Gates from our JSON, from MIT's TSV, or from a folder with the TSV and a config.json.

    Raises:
        PolicyError: the message names the file and what is wrong with it.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        return _load_folder(path)
    text = _read(path)
    return _parse_tsv(text, path) if path.suffix.lower() == ".tsv" else _parse_json(text, str(path))


def save_gates(
    path: str | Path,
    gates: HeadGates,
    *,
    parameters: Mapping[str, Any] | None = None,
    date: datetime.date | None = None,
    pattern: bool = False,
) -> None:
    """Write gates as our JSON, which `load_gates` reads.

    Args:
        path: the JSON file.
        gates: what to write.
        parameters: of the calibration, for the reader of the file.
        date: of the calibration; None: today.
        pattern: also write MIT's ``full_attention_heads.tsv`` and ``config.json`` into a
            folder beside the file, named as the file without its ending.
    """
    path = Path(path)
    rows = gates.values.astype(np.float64).round(DECIMALS).tolist()
    head = {
        "format": FORMAT,
        "model": gates.model,
        "model_hash": gates.model_hash,
        "method": gates.method,
        "parameters": dict(parameters or {}),
        "date": (date or datetime.date.today()).isoformat(),
        "sinks": gates.sinks,
        "recent": gates.recent,
    }
    lines = json.dumps(head, indent=2).removesuffix("\n}")
    table = ",\n    ".join(json.dumps(row) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{lines},\n  "gates": [\n    {table}\n  ]\n}}\n', encoding="utf-8")
    if not pattern:
        return
    folder = path.with_suffix("")
    folder.mkdir(exist_ok=True)
    tsv = "".join("\t".join(map(str, row)) + "\n" for row in rows)
    (folder / TSV).write_text(tsv, encoding="utf-8")
    sizes = {"sink_size": gates.sinks, "recent_size": gates.recent}
    config = {key: value for key, value in sizes.items() if value is not None}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def find_gates(model_path: str, num_layers: int, num_kv_heads: int) -> HeadGates | None:
    """Gates for a model by its folder's name, in any case: the user's, else the package's.

    The package's are only taken for a model of their shape.

    Raises:
        PolicyError: the user's cannot be read, or are another model's.
    """
    path = _downloaded(model_path)
    if path is not None:
        gates = load_gates(path)
        require_model(gates, model_path, num_layers, num_kv_heads)
        return gates
    shipped = _shipped(model_path)
    shape = (num_layers, num_kv_heads)
    return shipped if shipped is not None and shipped.values.shape == shape else None


def has_gates(model_path: str) -> bool:
    """Whether the user or the package has gates for a model of that name."""
    return _downloaded(model_path) is not None or _shipped(model_path) is not None


def gates_dir() -> Path:
    """The folder of downloaded gates, in ``$SGLANG_KV_CACHE_DIR`` or ``~/.cache/sglang_kv``."""
    cache = os.environ.get("SGLANG_KV_CACHE_DIR")
    return (Path(cache) if cache else Path.home() / ".cache" / "sglang_kv") / "gates"


def require_match(
    gates: HeadGates, num_layers: int, num_kv_heads: int, digest: str | None = None
) -> None:
    """Raise `PolicyError` where gates are another model's.

    Args:
        gates: with the file's name, which the message gives.
        num_layers, num_kv_heads: of the model.
        digest: the model's `model_hash`; None: not compared. Gates that hold none match any.
    """
    if gates.values.shape != (num_layers, num_kv_heads):
        raise PolicyError(
            f"--kv-gates: {gates.source} holds gates for {gates.values.shape[0]} layers of "
            f"{gates.values.shape[1]} KV heads, this model has {num_layers} of {num_kv_heads}"
        )
    if digest and gates.model_hash and gates.model_hash != digest:
        raise PolicyError(
            f"--kv-gates: {gates.source} holds gates of {gates.model or 'a model'} with other "
            f"weights ({gates.model_hash[:19]}..., this model: {digest[:19]}...); calibrate this "
            "model, or remove model_hash from the file if you are sure"
        )


def require_model(gates: HeadGates, model_path: str, num_layers: int, num_kv_heads: int) -> None:
    """`require_match` with the model's hash, where gates hold one and the model is a folder."""
    require_match(gates, num_layers, num_kv_heads)
    if gates.model_hash and Path(model_path).is_dir():
        require_match(gates, num_layers, num_kv_heads, model_hash(model_path))


def _downloaded(model_path: str) -> Path | None:
    """The user's file or folder for a model: ``NAME.json``, ``NAME.tsv``, a folder ``NAME`` with
    a pattern, or, as MIT publishes them, with one folder that has one."""
    wanted, folder = _name(model_path), gates_dir()
    if not wanted or not folder.is_dir():
        return None
    found = []
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and entry.name.lower() == wanted:
            found += sorted(path.parent for path in (*entry.glob(TSV), *entry.glob(f"*/{TSV}")))
        elif entry.suffix in (".json", ".tsv") and entry.stem.lower() == wanted:
            found.append(entry)
    if len(found) > 1:
        raise PolicyError(
            f"--kv-gates: {folder} has more than one for {wanted}: "
            f"{', '.join(str(path.relative_to(folder)) for path in found)}; name one"
        )
    return found[0] if found else None


def _name(model_path: str) -> str:
    return PurePath(model_path.replace("\\", "/")).name.lower()


def _shipped(model_path: str) -> HeadGates | None:
    wanted = _name(model_path)
    folder = resources.files("sglang_kv") / "data" / "gates"
    if not folder.is_dir():
        return None
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".json") and file.name[:-5].lower() == wanted:
            return _parse_json(file.read_text(encoding="utf-8"), str(file))
    return None


def model_hash(folder: str | Path) -> str:
    """SHA-256 over a model's config and weights, as gates files carry it."""
    folder = Path(folder)
    files = sorted([*folder.glob(CONFIG), *folder.glob("*.safetensors"), *folder.glob("*.bin")])
    if not files:
        raise PolicyError(f"--kv-gates: {folder} holds no model")
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as handle:
            while chunk := handle.read(1 << 22):
                digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"


def _load_folder(folder: Path) -> HeadGates:
    gates = _parse_tsv(_read(folder / TSV), folder / TSV)
    file = folder / CONFIG
    if not file.exists():
        return gates
    config = _json_object(_read(file), str(file))
    return HeadGates(
        gates.values,
        model=folder.name,
        method=gates.method,
        source=str(folder),
        sinks=_count(config, "sink_size", str(file)),
        recent=_count(config, "recent_size", str(file)),
    )


def _parse_tsv(text: str, path: Path) -> HeadGates:
    rows: list[list[float]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            rows.append([float(cell) for cell in line.split()])
        except ValueError as error:
            raise PolicyError(f"--kv-gates: {path}: line {number}: {error}") from None
    values = _table(rows, str(path))
    for layer, head in np.argwhere((values < -SLACK) | (values > 1 + SLACK)):
        raise PolicyError(
            f"--kv-gates: {path}: layer {layer} head {head}: {values[layer, head]} is no gate in "
            "[0, 1]"
        )
    # Training leaves values a little outside; the reference clips them as well.
    values = np.clip(values, 0, 1)
    model = path.parent.name if path.name == TSV else path.stem
    return HeadGates(values, model=model, method="duoattention", source=str(path))


def _parse_json(text: str, source: str) -> HeadGates:
    held = _json_object(text, source)
    if "gates" not in held:
        raise PolicyError(f"--kv-gates: {source}: no 'gates' in it")
    if held.get("format", FORMAT) != FORMAT:
        raise PolicyError(
            f"--kv-gates: {source}: format {held['format']!r}; this version reads {FORMAT}"
        )
    strings = {}
    for key in ("model", "method", "model_hash"):
        strings[key] = held.get(key) or ""
        if not isinstance(strings[key], str):
            raise PolicyError(f"--kv-gates: {source}: {key}: expected text, got {held[key]!r}")
    return HeadGates(
        _table(held["gates"], source),
        source=source,
        sinks=_count(held, "sinks", source),
        recent=_count(held, "recent", source),
        **strings,
    )


def _table(rows: Any, source: str) -> Values:
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) for row in rows):
        empty = "no gates in it" if rows == [] else "expected one list of gates per layer"
        raise PolicyError(f"--kv-gates: {source}: {empty}")
    for layer, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise PolicyError(
                f"--kv-gates: {source}: ragged rows: layer {layer} has {len(row)} heads, layer 0 "
                f"has {len(rows[0])}"
            )
        for head, gate in enumerate(row):
            place = f"--kv-gates: {source}: layer {layer} head {head}"
            number = isinstance(gate, (int, float)) and not isinstance(gate, bool)
            if not number or not abs(gate) < 1e30:  # NaN, too
                raise PolicyError(f"{place}: expected a number, got {shorten(gate)}")
    if not rows[0]:
        raise PolicyError(f"--kv-gates: {source}: no gates in it")
    return np.array(rows, np.float32)


def _json_object(text: str, source: str) -> dict[str, Any]:
    try:
        held = json.loads(text)
    except ValueError as error:
        raise PolicyError(f"--kv-gates: {source}: not JSON: {error}") from None
    if not isinstance(held, dict):
        raise PolicyError(f"--kv-gates: {source}: expected a JSON object")
    return held


def _count(held: Mapping[str, Any], key: str, source: str) -> int | None:
    count = held.get(key)
    if count is None:
        return None
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise PolicyError(f"--kv-gates: {source}: {key}: expected a token count, got {count!r}")
    return count


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PolicyError(f"--kv-gates: {path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"--kv-gates: {path}: cannot be read: {error}") from None
