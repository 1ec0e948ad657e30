"""Who asks: API keys, the tenants they stand for, and which hosts a browser may name."""

from __future__ import annotations

import hashlib
import ipaddress
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from agentcache import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

__all__ = ["ApiKeys", "Identity", "is_loopback", "is_loopback_origin", "names_loopback"]


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose request it is. sees_all: also what is not one tenant's own: metrics and the page."""

    tenant: str | None = None
    sees_all: bool = False


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """Keys by their digest, so that looking one up tells nothing by the time it takes.

    A key without a tenant is a tenant of its own. Without any keys everybody is the default tenant
    and sees all.

    >>> keys = ApiKeys.parse(["one", "two=team"], admin="three")
    >>> keys.identity("two"), keys.identity("three")
    (Identity(tenant='team', sees_all=False), Identity(tenant=None, sees_all=True))
    >>> keys.identity("four") is None
    True
    """

    identities: Mapping[bytes, Identity] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.identities)

    @classmethod
    def parse(
        cls, given: Iterable[str] = (), *, file: Path | None = None, admin: str | None = None
    ) -> ApiKeys:
        """From `KEY` or `KEY=TENANT` texts and a JSON file `{"KEY": "TENANT" or null}`.

        admin: a key for the default tenant that sees metrics and page. Raises ConfigError.
        """
        tenants: dict[str, str | None] = {}
        for text in given:
            key, named, tenant = text.partition("=")
            if not key or (named and not tenant.strip("=")):
                raise ConfigError(
                    "an API key is empty, or its tenant is; write KEY or KEY=TENANT, and put a key "
                    "that holds = itself into a file for --api-keys"
                )
            tenants[key] = tenant or None
        if file is not None:
            tenants.update(_read(file))
        identities = {_digest(key): Identity(t or _own(key)) for key, t in tenants.items()}
        if admin is not None:
            if not admin or admin in tenants:
                raise ConfigError("the admin key is empty or an ordinary key; choose another one")
            identities[_digest(admin)] = Identity(None, sees_all=True)
        return cls(identities)

    def identity(self, key: str | None) -> Identity | None:
        """Whose key it is; None for one that is missing or unknown."""
        if not self.identities:
            return Identity(None, sees_all=True)
        return None if key is None else self.identities.get(_digest(key))


def _read(file: Path) -> dict[str, str | None]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the API keys in {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is no JSON: {error}") from error
    if not isinstance(found, dict) or not all(
        key and (tenant is None or (isinstance(tenant, str) and tenant))
        for key, tenant in found.items()
    ):
        raise ConfigError(f'{file} has to hold {{"KEY": "TENANT"}}; null makes a tenant of the key')
    return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _own(key: str) -> str:
    """The tenant that a key without one stands for."""
    return f"key-{_digest(key).hex()[:16]}"


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def names_loopback(header: str) -> bool:
    """Whether a Host header names this machine: a page elsewhere that resolves its own name to this
    address does not."""
    host = header.strip()
    if host.startswith("["):
        return is_loopback(host.partition("]")[0])
    return is_loopback(host.rpartition(":")[0] or host)


def is_loopback_origin(header: str) -> bool:
    """Whether an Origin header is that of a page which this machine serves.

    A page elsewhere may send requests here that it cannot read the answers of; they act all the
    same.

    >>> is_loopback_origin("http://localhost:8000"), is_loopback_origin("https://example.org")
    (True, False)
    >>> is_loopback_origin("null")
    False
    """
    try:
        origin = urlsplit(header.strip())
    except ValueError:
        return False
    return origin.scheme in ("http", "https") and names_loopback(origin.netloc)
