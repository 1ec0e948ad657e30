"""Proofs that a model is right on the native backend, kept so that it need not be shown again.

The first time a model is loaded, its own code says what it keeps and what the native backend is
held against (see `backends`). What came of it is written down. From then on the model's weights are
mapped from their files, and transformers' modeling code, which takes some 65 MB and more than a
second to import, is not needed.

A proof is about a config, the names, shapes and dtypes of weights, a dtype to load them as, and
this kind of processor; it holds for models whose digest it lists, and for the code it was made by.
Proofs lie below `cache_home()`. The environment variable AGENTCACHE_NO_PROOFS, set to anything but
0, has none read or written.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from agentcache import types
from agentcache.engine._model_folder import cache_home
from agentcache.engine.describe import Description, layouts, remember, text_config
from agentcache.engine.families import FAMILIES
from agentcache.engine.families.base import KeptLayer
from agentcache.engine.fingerprint import config_text, digest_of, remember_digest
from agentcache.engine.machine import processor
from agentcache.engine.mapped import MappedModel, Origin, map_model
from agentcache.engine.native.backend import has_native
from agentcache.engine.weight_files import Stored, stored_in, weight_files
from agentcache.kernels import rows
from agentcache.pools import layout
from agentcache.pools.layout import KVSpec, StateSpec
from agentcache.types import LayerKind, ModelShape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from agentcache.engine.source import Source

__all__ = ["Subject", "find_proven", "keep_proof", "remember_subject", "subject_of"]


@dataclass(frozen=True, slots=True)
class Subject:
    """What a proof may be about: a model in files, to be loaded as a dtype, None for its own."""

    folder: Path
    config: Any
    stored: Mapping[str, Stored]
    dtype: torch.dtype | None

    @property
    def path(self) -> Path:
        """Where its proof lies."""
        weights = sorted((name, each.dtype, each.shape) for name, each in self.stored.items())
        name = digest_of(
            [
                config_text(self.config),
                repr(weights),
                str(self.dtype),
                processor(),
                str(rows.IS_COMPILED),
            ]
        )
        return cache_home() / "proofs" / f"{name}.json"


@dataclass(frozen=True, slots=True)
class Proof:
    """What a model's own code has said, and how near the native backend came to it.

    dtype, shape, layers: as in a description. origins: of the model's weights, by name. errors: by
    the digests of models, by how much logits were off, in units of their deviation.
    """

    dtype: torch.dtype
    shape: ModelShape
    layers: tuple[KeptLayer, ...]
    origins: dict[str, Origin]
    errors: dict[str, float]


def subject_of(source: Source, config: Any, dtype: torch.dtype | None) -> Subject | None:
    """A model that a proof may be about; None where it is loaded in any but the plain way.

    That is: no safetensors files or others beside them, a packed form, a model that sees, settings
    that have other weights loaded, or no native backend. Nor is there one where proofs are turned
    off, or where there is no home folder to keep them in.
    """
    folder = source.folder
    if folder is None or source.gguf is not None or text_config(config) is not config:
        return None
    if not _are_kept():
        return None
    other = ("quantization_config", "transformers_weights", "fusion_config", "extra_files")
    if not has_native(config.model_type) or any(getattr(config, name, None) for name in other):
        return None
    try:
        files = weight_files(folder)
        if not files or {*files} != {*folder.glob("*.safetensors")}:
            return None
        if (folder / "adapter_config.json").exists():  # transformers would load that too
            return None
        stored = [stored_in(file) for file in files]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # what is wrong is told by whoever loads it
    names = {name: each for part in stored for name, each in part.items()}
    return Subject(folder, config, names, dtype) if len(names) == sum(map(len, stored)) else None


def _are_kept() -> bool:
    try:
        cache_home()
    except RuntimeError:  # a user that the system does not know, as in some containers
        return False
    return os.environ.get("AGENTCACHE_NO_PROOFS", "0") == "0"


def find_proven(subject: Subject, stock: Callable[[], Any]) -> MappedModel | None:
    """The model, mapped, if there is a proof that the native backend computes it right.

    stock: loads it through transformers.
    """
    proof = _read(subject.path)
    if proof is None:
        return None
    try:
        model = map_model(
            subject.folder, subject.config, proof.dtype, subject.stored, proof.origins, stock
        )
    except (OSError, ValueError, KeyError, SafetensorError):
        return None
    error = proof.errors.get(remember_digest(model))
    if error is None:
        return None
    kv, state = layouts(proof.layers, proof.dtype)
    family = FAMILIES[subject.config.model_type]
    remember(model, Description(family, proof.shape, kv, state, proof.layers))
    logging.getLogger("agentcache").debug(
        "by %s the native backend is off by %.1e of the logits' deviation", subject.path, error
    )
    return model


def remember_subject(model: Any, subject: Subject) -> None:
    """Say what a proof of this model, loaded through transformers, would be about.

    From here on its weights must not change.
    """
    vars(model)[_NAME] = subject


_NAME = "agentcache_subject"


def keep_proof(model: Any, description: Description, error: float) -> None:
    """Write down that the native backend computes a model right, if a proof may be about it.

    error: see `Proof`. Where that cannot be written, nothing is.
    """
    subject: Subject | None = vars(model).get(_NAME)
    origins = None if subject is None else _origins(model, subject.stored)
    if subject is None or origins is None:
        return
    known = _read(subject.path)
    errors = {**({} if known is None else known.errors), remember_digest(model): error}
    proof = Proof(model.dtype, description.shape, description.layers, origins, errors)
    try:
        _write(subject.path, proof)
    except OSError as failed:
        logging.getLogger("agentcache").debug("no proof is kept: %s", failed)


def _origins(model: Any, stored: Mapping[str, Stored]) -> dict[str, Origin] | None:
    """Where a model's weights come from, if they have in its files one of the names that they have
    in the model, where a tied one has several."""
    tensors: dict[str, torch.Tensor] = model.state_dict()
    by_place: dict[tuple[int, int], list[str]] = {}
    for name, tensor in tensors.items():
        by_place.setdefault((tensor.data_ptr(), tensor.numel()), []).append(name)
    origins: dict[str, Origin] = {}
    for names in by_place.values():
        found = next((name for name in names if name in stored), None)
        if found is None or stored[found].shape != tensors[found].shape:
            return None
        origins |= {name: Origin(found, tensors[name].dtype) for name in names}
    return origins


# on disk: {"sha256": of "proof", "proof": JSON as text, by what code, and the fields of a Proof}


def _write(path: Path, proof: Proof) -> None:
    text = json.dumps({"made_by": _code()} | asdict(proof), default=str)
    content = json.dumps({"sha256": digest_of([path.name, text]), "proof": text})
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=".writing-", delete=False
    ) as file:
        try:
            file.write(content)
            file.close()
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _read(path: Path) -> Proof | None:
    """A proof that is whole, about this and made by this code, and by this user: kernels write to
    memory that is laid out by it."""
    try:
        with path.open(encoding="utf-8") as file:
            if hasattr(os, "geteuid") and os.fstat(file.fileno()).st_uid != os.geteuid():
                return None
            content = json.load(file)
        text = content["proof"]
        if content["sha256"] != digest_of([path.name, text]):
            return None
        found = json.loads(text)
        return _decoded(found) if found["made_by"] == _code() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _decoded(found: dict[str, Any]) -> Proof:
    shape = found["shape"]
    kinds = tuple(LayerKind(**kind) for kind in shape["layers"])
    return Proof(
        _dtype(found["dtype"]),
        ModelShape(**(shape | {"layers": kinds})),
        tuple(_layer(layer) for layer in found["layers"]),
        {
            name: Origin(each["name"], _dtype(each["dtype"]))
            for name, each in found["origins"].items()
        },
        {digest: float(error) for digest, error in found["errors"].items()},
    )


def _layer(found: dict[str, Any]) -> KeptLayer:
    states = (
        StateSpec(**(spec | {"shape": tuple(spec["shape"]), "dtype": _dtype(spec["dtype"])}))
        for spec in found["states"]
    )
    return KeptLayer(None if found["kv"] is None else KVSpec(**found["kv"]), tuple(states))


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype


@cache
def _code() -> str:
    """Digest of what else results and proofs follow from: our code, torch and transformers."""
    rooms = [Path(module).parent for module in (__file__, rows.__file__, layout.__file__)]
    files = [file for room in rooms for file in sorted(room.rglob("*")) if file.suffix in _SUFFIXES]
    code = (memoryview(file.read_bytes()) for file in [*files, Path(types.__file__)])
    return digest_of([torch.__version__, version("transformers"), *code])


_SUFFIXES = (".py", ".so", ".pyd")
