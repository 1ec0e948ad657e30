"""A database by URL: opened, checked, brought to the present schema; errors in our own words."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, create_engine, event, inspect, make_url, text
from sqlalchemy.exc import ArgumentError, DatabaseError, OperationalError, SQLAlchemyError

from agentcache.errors import ConfigError, StoreDamaged, StoreError, StoreUnavailable, StoreVersion

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection, Engine

__all__ = ["VERSION_TABLE", "Database", "upgrade", "url_of"]

VERSION_TABLE = "agentcache_version"
HEAD = "0001"
"""The newest revision in `migrations/versions`."""

_TABLES = frozenset({"sessions", "turns", "messages", "toolsets"})
_FORBIDDEN = "42501"
"""PostgreSQL's code where a user may not do what was asked."""

_BUSY_S = 5.0
"""How long SQLite waits for another process to let go of the file."""

_ALEMBIC = threading.Lock()
"""Alembic keeps what it works on in globals: one upgrade at a time in a process."""


def url_of(target: str | Path) -> URL:
    """The URL of a database: a text with "://" is one, any other a file for SQLite.

    Raises ConfigError for what is no URL, and for SQLite in memory.
    """
    given = str(target)
    if not given:
        raise ConfigError("the store is an empty text; give a file or a URL such as runs.db")
    if "://" not in given:
        return URL.create("sqlite", database=given)
    try:
        url = make_url(given)
    except (ArgumentError, ValueError) as error:
        raise ConfigError(
            f"{given!r} is no database URL; write sqlite:///runs.db or postgresql://user@host/name"
        ) from error
    backend = url.get_backend_name()
    if backend not in ("sqlite", "postgresql"):
        raise ConfigError(f"a store cannot be kept in {backend!r}; take sqlite or postgresql")
    if backend == "sqlite" and url.database in (None, "", ":memory:"):
        raise ConfigError("a store in memory would be lost at the end; give a file for SQLite")
    return url


def upgrade(target: str | Path) -> None:
    """Bring a database to the present schema, making it first where there is none.

    Raises ConfigError, StoreError.
    """
    Database(url_of(target)).close()


class Database:
    """An engine on a database of the present schema.

    create: make the file, and bring an older schema up to date; without it there has to be one.
    Raises ConfigError where no driver is installed; StoreUnavailable, StoreDamaged, StoreVersion.
    """

    def __init__(self, url: URL, *, create: bool = True) -> None:
        self.url = url
        if not create and url.get_backend_name() == "sqlite" and not Path(_file(url)).exists():
            raise StoreUnavailable(f"there is no database {_file(url)}; give the file of a store")
        self._engine = _make_engine(url)
        try:
            self._check(create)
        except BaseException:
            self._engine.dispose()
            raise

    def __str__(self) -> str:
        return self.url.render_as_string(hide_password=True)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection to read with. What goes wrong is raised as StoreError."""
        with self._translated(), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction to write in, committed at the end. Raises as `reading`."""
        with (
            self._translated(),
            self._engine.execution_options(agentcache_writes=True).begin() as connection,
        ):
            yield connection

    def close(self) -> None:
        """Let the connections go."""
        self._engine.dispose()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            raise _translated(str(self), error) from error
        except UnicodeError as error:
            raise StoreError(f"{self}: a text cannot be stored: {error}") from error

    def _check(self, create: bool) -> None:
        with self.reading() as connection:
            found = _revision(connection, str(self))
        if found == HEAD:
            return
        if not create:
            raise StoreVersion(
                f"{self} holds {'no store' if found is None else 'the older schema ' + found}; "
                "open it once with Runtime(store=...)"
            )
        with self.writing() as connection:
            _upgrade(connection)


def _revision(connection: Connection, name: str) -> str | None:
    """The schema's revision, None in an empty database. Raises StoreVersion for another program's
    tables and for a revision that is not known here."""
    tables = set(inspect(connection).get_table_names())
    if VERSION_TABLE not in tables:
        foreign = sorted(tables & _TABLES)
        if foreign:
            raise StoreVersion(
                f"{name} has a table {foreign[0]!r} that is no store's; give another database"
            )
        return None
    found: str | None = connection.scalar(text(f"SELECT version_num FROM {VERSION_TABLE}"))
    if found is not None and found > HEAD:
        raise StoreVersion(
            f"{name} has schema {found}, and this version of agentcache knows up to {HEAD}; "
            "update agentcache, or give another database"
        )
    return found


def _upgrade(connection: Connection) -> None:
    """Run what revisions are missing, while nobody else does. In a transaction for writing."""
    from alembic import command  # takes its time, and is needed only here
    from alembic.config import Config

    if connection.dialect.name == "postgresql":  # SQLite's transaction for writing is alone
        connection.execute(text(f"SELECT pg_advisory_xact_lock(hashtext('{VERSION_TABLE}'))"))
    config = Config()
    folder = Path(__file__).with_name("migrations")
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    with _ALEMBIC:
        command.upgrade(config, "head")


def _make_engine(url: URL) -> Engine:
    is_sqlite = url.get_backend_name() == "sqlite"
    arguments: dict[str, Any] = {"timeout": _BUSY_S} if is_sqlite else {}
    try:
        # errors are logged, and messages have no business in logs
        engine = create_engine(
            url, connect_args=arguments, hide_parameters=True, pool_pre_ping=not is_sqlite
        )  # a connection may be gone since it was used, as when the server was started anew
    except ImportError as error:
        raise ConfigError(
            f"no driver for {url.drivername} is installed ({error.name}); pip install it, such as "
            "psycopg for postgresql+psycopg://"
        ) from error
    except (SQLAlchemyError, ValueError, TypeError) as error:
        shown = url.render_as_string(hide_password=True)
        raise ConfigError(f"{shown} cannot be used as a store: {error}") from error
    if is_sqlite:
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _set_up_sqlite(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # or the driver would begin transactions of its own
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    """A transaction that will write takes its lock at once: later it might be refused."""
    writes = connection.get_execution_options().get("agentcache_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _file(url: URL) -> str:
    return str(url.database)


def _translated(name: str, error: SQLAlchemyError) -> StoreError:
    problem = str(getattr(error, "orig", None) or error).strip()
    if "not a database" in problem or "malformed" in problem:
        return StoreDamaged(f"{name} is damaged or no database ({problem}); give another file")
    if "locked" in problem:
        return StoreUnavailable(
            f"{name} is locked by another program for more than {_BUSY_S:.0f} s; end that one"
        )
    is_forbidden = getattr(getattr(error, "orig", None), "sqlstate", None) == _FORBIDDEN
    if isinstance(error, OperationalError) or is_forbidden:
        return StoreUnavailable(
            f"{name} cannot be used ({problem}); check that it exists, its permissions and the "
            "space on its disk"
        )
    if isinstance(error, DatabaseError):
        return StoreDamaged(f"{name} does not hold what a store holds ({problem})")
    return StoreError(f"{name}: {problem}")
