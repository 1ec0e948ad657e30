"""Where a model's files lie: an embedded model, a folder, a GGUF file, or the Hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from huggingface_hub import is_offline_mode, try_to_load_from_cache

from agentcache.engine.embedded import EMBEDDED_NAMES, embedded_folder
from agentcache.errors import ModelNotFound, UnsupportedOption

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Source", "find_source", "first_line", "hub_hint", "is_hub_id", "ways_to_name"]

T = TypeVar("T")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, slots=True)
class Source:
    """Where to load from. where: a folder, or a Hub id. gguf: the file in it to take."""

    where: str
    gguf: str | None = None
    is_hub: bool = False

    def load(self, load: Callable[..., T], **options: Any) -> T:
        """Call a `from_pretrained` on the folder that lies on this machine.

        Only for a Hub id whose files are not here, and unless the Hub is switched off, with the id,
        which downloads.
        """
        if self.gguf is not None:
            options["gguf_file"] = self.gguf
        try:
            if self.folder is None:
                raise FileNotFoundError("it has not been downloaded")
            return load(str(self.folder), local_files_only=True, **options)
        except (OSError, ValueError):
            if not self.is_hub or is_offline_mode():
                raise
        return load(self.where, **options)

    @property
    def folder(self) -> Path | None:
        """Where its files lie on this machine, so far as they do."""
        if not self.is_hub:
            return Path(self.where)
        config = try_to_load_from_cache(self.where, "config.json")
        return Path(config).parent if isinstance(config, str) else None


def find_source(name: str | Path) -> Source:
    """Where a name points to; nothing is read and nothing downloaded.

    A path that exists goes before a Hub id of the same name. Raises ModelNotFound for a name that
    can be neither, and UnsupportedOption for a GGUF file where the packages to read it are missing.
    """
    if str(name) in EMBEDDED_NAMES:
        return Source(str(embedded_folder(str(name))))
    path = Path(name).expanduser()
    if path.is_file():
        return _gguf(path)
    if name and path.is_dir():
        return _folder(path)
    if not is_hub_id(name):
        raise ModelNotFound(f"no model at {str(name)!r}: no such folder or file; {ways_to_name()}")
    return Source(str(name), is_hub=True)


def is_hub_id(name: str | Path) -> bool:
    """Whether a name may be one of the Hub's; a Path never is."""
    return isinstance(name, str) and _HUB_ID.fullmatch(name) is not None


def ways_to_name() -> str:
    """What may be given for a model, for the end of a message."""
    known = ", ".join(EMBEDDED_NAMES)
    return (
        f"give an embedded name ({known}), a folder with config.json and weights, a GGUF file, or "
        "a Hub id"
    )


def hub_hint() -> str:
    """What to do about a Hub id that is not on this machine."""
    if is_offline_mode():
        return "HF_HUB_OFFLINE is set, so nothing is downloaded: unset it, or download the model"
    return "check the id and the connection"


def first_line(error: Exception) -> str:
    """The first line of an error's message, or the name of its class."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _folder(path: Path) -> Source:
    found = [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ModelNotFound(f"{str(path)!r} holds several models; give the path of one: {names}")
    return _gguf(found[0]) if found else Source(str(path))


def _gguf(path: Path) -> Source:
    if path.suffix.lower() != ".gguf":
        raise ModelNotFound(f"{str(path)!r} is a file, but no .gguf; {ways_to_name()}")
    missing = [package for package in ("gguf", "accelerate") if find_spec(package) is None]
    if missing:
        raise UnsupportedOption(
            f"{path.name} is a GGUF file, and to read one {' and '.join(missing)} is missing; "
            "pip install agentcache[gguf]"
        )
    return Source(str(path.parent), path.name)
