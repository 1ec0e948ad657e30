"""The runtime: where model, cache and sessions are put together."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from agentcache.cache import HybridCache
from agentcache.clock import Clock, SystemClock
from agentcache.components.full import FullComponent
from agentcache.components.state import StateComponent
from agentcache.components.swa import SwaComponent
from agentcache.config import CacheConfig
from agentcache.engine.backends import check_backend_name, check_weight_format, make_backend
from agentcache.engine.chat import ChatFormat
from agentcache.engine.fingerprint import fingerprint
from agentcache.engine.loader import load_model
from agentcache.engine.loop import Engine, Submission
from agentcache.engine.machine import release_memory
from agentcache.engine.threads import release_team, use_threads
from agentcache.engine.tokenizer import Tokenizer
from agentcache.engine.weights import free_bytes
from agentcache.errors import UnsupportedOption
from agentcache.events import Events
from agentcache.metrics import Metrics
from agentcache.policy.admission import make_admission
from agentcache.policy.base import Costs
from agentcache.policy.eviction import make_policy
from agentcache.pools.layout import PoolSizes, divide_budget
from agentcache.pools.packing import make_packing
from agentcache.pools.tensors import TensorPools
from agentcache.session import Session
from agentcache.session.pinning import Volatile
from agentcache.session.prompts import PromptBuilder
from agentcache.session.recent import RecentConversations
from agentcache.sessions.registry import Registry
from agentcache.simulate.results import Setup
from agentcache.simulate.shadows import Shadows
from agentcache.simulate.tuner import ReplayTuner
from agentcache.tree.key import Namespace
from agentcache.tree.radix_tree import RadixTree
from agentcache.types import FEW_TOKENS, BackendName, Kind, ModelShape, WeightFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    import torch

    from agentcache.components.base import Component
    from agentcache.engine.backend import ModelBackend
    from agentcache.engine.request import RequestSpec
    from agentcache.policy.base import Policy
    from agentcache.session.history import History
    from agentcache.session.host import Marks
    from agentcache.store.base import Recorder
    from agentcache.store.trajectories import Store

__all__ = ["Runtime"]

T = TypeVar("T")


class Runtime:
    """A model in this process with one cache, which hands out session handles.

    Runtime(model, tokenizer): takes a loaded transformers model over; use it through the runtime
    only. `Runtime.load(name)`: an embedded model ("tiny-hybrid"), a folder, a GGUF file, a Hub id.

    cache: its settings. verify, exact: defaults for calls (see `CallOptions`). on_mismatch: a call
    that verification finds to differ from a cold run is logged and counted in any case; "drop" has
    its path leave the cache as well, with all that was computed from it. adapter: digest of what
    was merged into the model; prefixes of different ones are kept apart. backend: "native", layers
    of our own, for the families that have them; "transformers" for every family; "auto" the native
    one where it is there and computes the same, else transformers. weight_format: "int8" rounds the
    weights of linear maps, experts, embedding and head to 8 bits, for the native backend on a CPU;
    by how much that moves logits is logged. cuda_graphs: decode steps of the native backend are
    captured and launched as one, for a model on a CUDA device. unproven: admit a model for which
    warm = cold has not been proven; nothing is promised of it, which is logged, and it decodes
    sequences one by one. tool_form: how the model writes tool calls, where its template does not
    tell. volatile: regular expressions; lines of the system prompt in which one is found keep the
    text that a session first had there. store: a file or database URL that finished turns are
    written to, or an open Store, which stays open. clock, seed: time and randomness. poison: fill
    freed memory with NaN, so that a read of evicted data shows.

    Raises UnsupportedModel, UnsupportedOption, BudgetTooSmall, UnknownPolicy, StoreError.

    >>> rt = Runtime.load("tiny-hybrid", cache=CacheConfig(budget="64MiB"))     # doctest: +SKIP
    >>> with rt.session("demo") as s:                                           # doctest: +SKIP
    ...     s.chat([{"role": "user", "content": "Hi"}], max_new_tokens=8).usage
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        cache: CacheConfig | None = None,
        verify: bool | float = False,
        exact: bool = False,
        on_mismatch: Literal["log", "drop"] = "log",
        adapter: str | None = None,
        backend: BackendName = "auto",
        weight_format: WeightFormat = "unchanged",
        cuda_graphs: bool = False,
        unproven: bool = False,
        tool_form: str | None = None,
        volatile: Sequence[str] = (),
        store: Store | str | Path | None = None,
        clock: Clock | None = None,
        seed: int = 0,
        poison: bool = False,
    ) -> None:
        if on_mismatch not in ("log", "drop"):
            raise UnsupportedOption(f"on_mismatch is {on_mismatch!r}; take log or drop")
        self.exact = exact
        self.config = cache or CacheConfig()
        _check_exact(exact, self.config)
        self.verify = verify
        admission = make_admission(self.config.admission)
        make_policy(self.config.policy)  # or it is refused before a model is looked at
        self.clock = clock or SystemClock()
        self.tokenizer = Tokenizer(tokenizer)
        # before the weights are moved: it reads them where they were loaded
        self._fingerprint = fingerprint(model, self.tokenizer, weight_format)
        computing = make_backend(
            model,
            backend,
            unproven=unproven,
            weight_format=weight_format,
            cuda_graphs=cuda_graphs,
        )
        end_ids = self.tokenizer.end_ids(getattr(model, "generation_config", None))
        self.end_id = _end_id(tokenizer, end_ids)
        self.chat_format = ChatFormat(self.tokenizer, end_ids=end_ids, tool_form=tool_form)
        self.prompts = PromptBuilder(
            self.chat_format,
            self.tokenizer,
            computing.shape.vocab_size,
            Volatile(volatile) if volatile else None,
        )
        self.registry: Registry[History] = Registry()
        self.recent = RecentConversations()
        self._adapter = adapter
        self._metrics = Metrics()
        self.events = Events()
        given = self.config.budget_bytes
        self._budget = free_bytes(model) // 2 if given is None else given
        self._pools = _make_pools(computing, self.config, self._budget, poison)
        self.recorder: Recorder | None = None
        if store is not None:
            self.recorder = _record(store, _name_of(model), self._fingerprint)
        self._shadows: Shadows | None = None
        if self.config.policy == "auto":
            self._shadows = _make_shadows(computing, self.config, self._pools)
        policy = _make_policy(computing.shape, self.config, self._pools, self._shadows)
        tree = RadixTree(_components(computing, self.config.page_size))
        self._cache = HybridCache(
            tree,
            self._pools,
            policy,
            self.clock,
            self._metrics,
            min_gain=FEW_TOKENS,
            events=self.events,
            admission=admission,
        )
        self.marks: Marks = self._cache
        self._engine = Engine(
            computing,
            self._pools,
            self._cache,
            self.tokenizer,
            end_ids=end_ids,
            chunk_len=self.config.prefill_chunk,
            clock=self.clock,
            seed=seed,
            drop_mismatches=on_mismatch == "drop",
        )
        # whoever loaded the model computes no more; the engine's thread does
        release_team()
        release_memory()

    @classmethod
    def load(
        cls,
        name: str | Path,
        *,
        backend: BackendName = "auto",
        dtype: torch.dtype | None = None,
        adapter: str | Path | None = None,
        threads: int | None = None,
        device: str = "cpu",
        cache: CacheConfig | None = None,
        unproven: bool = False,
        **options: Any,
    ) -> Runtime:
        """Load a model by name; `options` as for the constructor.

        adapter: folder or Hub id of a LoRA adapter, merged into the weights. threads: of torch, for
        the whole process; None takes one per physical core, unless the process has set a number.
        device: where the model and its cache lie, as torch names it, such as "cuda". backend,
        unproven: as for the constructor. Raises ModelNotFound, ModelTooLarge, UnsupportedModel,
        ConfigError, and what the constructor raises.
        """
        check_backend_name(backend)
        check_weight_format(options.get("weight_format", "unchanged"))
        cache = cache or CacheConfig()
        use_threads(threads)
        loaded = load_model(
            name,
            dtype,
            adapter=adapter,
            cache_bytes=cache.budget_bytes or 0,
            unproven=unproven,
            backend=backend,
            device=device,
        )
        return cls(
            loaded.model,
            loaded.tokenizer,
            cache=cache,
            adapter=loaded.adapter,
            backend=backend,
            unproven=unproven,
            **options,
        )

    def session(
        self,
        id: str | None = None,
        *,
        tenant: str | None = None,
        parent: Session | str | None = None,
        priority: int = 0,
        shared_head: bool | None = None,
    ) -> Session:
        """Open a session, or resume the open one of that id; without an id always a new one.

        tenant: sessions of different tenants share nothing; None is a tenant of its own. To be set
        by the host program, never from a request. priority: higher runs first. shared_head: keep
        the system prompt and the tools of this session for every tenant's sessions that say the
        same and have this set too, and only what follows for its own tenant. It tells those
        tenants, by the time a first call takes, that somebody uses the same head; by default
        nothing is shared.

        Raises SessionError where an open session of that id has another parent or `shared_head`.
        """
        parent_id = parent.id if isinstance(parent, Session) else parent
        record = self.registry.open(id, tenant, parent_id, priority, shared_head)
        return Session(self, record, is_unnamed=id is None)

    def namespace(
        self, tenant: str | None, shared_head: bool = False, exact: bool = False
    ) -> Namespace:
        """The identity that prefixes of a tenant, or heads shared by tenants, are kept under."""
        return Namespace(
            model=self._fingerprint,
            tenant=None if shared_head else tenant,
            adapter=self._adapter,
            shares_head=shared_head,
            split=self.config.prefill_chunk if exact else None,
        )

    def submit(self, spec: RequestSpec) -> Submission:
        """Queue a request. Raises RuntimeClosed, RequestTooLarge, UnsupportedOption."""
        _check_exact(spec.exact, self.config)
        return self._engine.submit(spec)

    def on_engine(self, function: Callable[[], T]) -> T:
        """Run a function on the engine thread between two steps. Raises RuntimeClosed."""
        return self._engine.call(function)

    def on_engine_later(self, function: Callable[[], None]) -> None:
        """Run a function on the engine thread some time soon. Raises RuntimeClosed."""
        self._engine.post(function)

    @property
    def engine(self) -> Engine:
        """The engine, for benchmarks and tests."""
        return self._engine

    @property
    def cache(self) -> HybridCache:
        """The cache; only to be touched through `on_engine`."""
        return self._cache

    @property
    def shape(self) -> ModelShape:
        """The model's sizes."""
        return self._engine.backend.shape

    @property
    def max_len(self) -> int:
        """Most tokens of prompt and reply together."""
        return self.shape.max_len

    def tool_call_grammar(
        self,
        tools: Sequence[Mapping[str, Any]],
        *,
        name: str | None = None,
        parallel: bool = False,
    ) -> str:
        """A grammar that makes a reply call a tool, any or the one named, in the model's own form.

        tools: in OpenAI form; arguments follow their schemas. parallel: several calls may follow
        each other. Give it as the `lark` option of a call, along with the same tools.

        >>> session.chat(messages, tools=tools, lark=rt.tool_call_grammar(tools))  # doctest: +SKIP

        Raises InvalidRequest for no tools, or none of that name.
        """
        return self.chat_format.tool_call_grammar(tools, name=name, parallel=parallel)

    def clear(self) -> int:
        """Drop everything idle; the bytes freed. Running calls are not disturbed.

        What calls without a session's id said is forgotten as well.
        """
        self.recent.clear()
        return self.on_engine(self._cache.clear)

    def close(self) -> None:
        """End the engine; calls under way fail with RuntimeClosed, and what finished is stored.

        Twice is the same as once.
        """
        self._engine.close()
        if self._shadows is not None:
            self._shadows.close()
        if self.recorder is not None:
            self.recorder.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def stats(self) -> dict[str, Any]:
        """Counts and bytes at this moment; see the documentation for the keys."""
        return self.on_engine(self._stats)

    def _stats(self) -> dict[str, Any]:
        cache, metrics = self._cache, self._metrics
        records = [record for record in self.registry if not record.closed]
        entries = Counter(kind for node in cache.tree.nodes() for kind in node.data)
        leases = len(cache.leases)
        return {
            "bytes": self._bytes(),
            "budget": self._budget,
            "held_bytes": self._pools.held_bytes(),
            "running": {"requests": leases, "bytes": leases * self._pools.row_bytes},
            "leases": leases,
            "sessions": {
                "open": len(records),
                "tips": sum(len(record.tips()) for record in records),
            },
            "entries": {kind: entries[kind] for kind in _kinds(cache.used_pages())},
            "evictions": metrics.group("evictions"),
            "filed": metrics.group("filed"),
            "reused": metrics.group("reused"),
            "preempted": metrics.get("preempted", "requests"),
            "unfiled": metrics.group("unfiled"),
            "hits": {
                name: metrics.get("hits", name) for name in ("prompt_tokens", "cached_tokens")
            },
            "passes": dict(self._engine.num_passes),
            "verify": {
                name: metrics.get("verify", name) for name in ("calls", "failed", "dropped")
            },
            "store": None if self.recorder is None else self.recorder.counts(),
        }

    def _bytes(self) -> dict[str, dict[str, int]]:
        """Per kind what is used, what is set aside and the most ever used; of what is used what
        running calls need (protected) and what eviction could free. Reserved bytes add up to what
        the tensors hold. Free pages serve every kind."""
        sizes, pools = self._pools.sizes, self._pools
        page, row = sizes.page_bytes, sizes.row_bytes
        used = self._cache.used_pages()
        peaks, total_peak = self._cache.peak_pages()
        rows_used = pools.rows.num_rows - pools.rows.num_free
        accounts = self._cache.account()
        out = {
            kind: {
                "used": used.get(kind, 0) * page,
                "reserved": used.get(kind, 0) * page,
                "peak": peaks.get(kind, 0) * page,
                "evictable": accounts[kind].evictable * page if kind in accounts else 0,
                "protected": accounts[kind].protected * page if kind in accounts else 0,
            }
            for kind in _kinds(used)
        }
        out["free"] = {"used": 0, "reserved": pools.pages.num_free * page, "peak": 0}
        out["running"] = {
            "used": rows_used * row,
            "reserved": sizes.num_rows * row,
            "peak": pools.rows.peak * row,
        }
        for spec in pools.kv_layout.sidecars:
            beside = spec.page_bytes(sizes.page_size)
            out[spec.name] = {
                "used": used.get(Kind.FULL, 0) * beside,
                "reserved": sizes.num_pages * beside,
                "peak": peaks.get(Kind.FULL, 0) * beside,
            }
        staging = sizes.num_staging * row + sizes.packing_bytes
        out["scratch"] = {"used": 0, "reserved": staging, "peak": staging}
        out["total"] = {
            "used": pools.pages.num_used * page + rows_used * row,
            "reserved": sizes.total_bytes,
            "peak": total_peak * page + pools.rows.peak * row + staging,
        }
        return out


def _kinds(used: dict[str, int]) -> list[str]:
    """The built-in kinds, whether there are any of them or not, and those the model has besides."""
    return list(dict.fromkeys([*(kind.value for kind in Kind), *used]))


def _record(store: Store | str | Path, model: str, fingerprint: str) -> Recorder:
    """Begin to record in a store, opened first if need be. Raises ConfigError, StoreError."""
    from agentcache.store.trajectories import Store  # brings SQLAlchemy, which few need

    if isinstance(store, Store):
        return store.record(model=model, fingerprint=fingerprint)
    own = Store(store)
    return own.record(model=model, fingerprint=fingerprint, end=own.close)


def _name_of(model: Any) -> str:
    config = model.config
    return str(getattr(config, "name_or_path", "") or config.model_type)


def _end_id(tokenizer: Any, end_ids: frozenset[int]) -> int | None:
    """The id to close a recorded answer with."""
    own = getattr(tokenizer, "eos_token_id", None)
    return own if own in end_ids else min(end_ids, default=None)


def _components(backend: ModelBackend, page_size: int) -> list[Component]:
    out: list[Component] = []
    page_lens = backend.kv_layout.page_shape(page_size).lens
    for group in backend.kv_layout.groups:
        if group.window is None:
            out.append(FullComponent(page_lens[group.kind]))
        else:
            out.append(SwaComponent(group.window, page_lens[group.kind], group.kind))
    if backend.state_layout.specs:
        out.append(StateComponent())
    return out


def _check_exact(exact: bool, config: CacheConfig) -> None:
    if exact and config.checkpoint_format != "unchanged":
        raise UnsupportedOption(
            f"exact=True cannot hold with checkpoint_format={config.checkpoint_format!r}, which "
            "rounds what calls go on from; leave one of the two out"
        )


def _make_shadows(backend: ModelBackend, config: CacheConfig, pools: TensorPools) -> Shadows:
    """Caches of the same size that hold nothing, on a thread of their own."""
    return Shadows(
        Costs.of(backend.shape),
        lambda: _components(backend, config.page_size),
        num_pages=pools.sizes.num_pages,
        limit_pages=pools.sizes.num_pages,
        state_pages=pools.state_pages,
        in_background=True,
    )


def _make_policy(
    shape: ModelShape, config: CacheConfig, pools: TensorPools, shadows: Shadows | None
) -> Policy:
    size = pools.sizes
    setup = Setup(
        admission=config.admission,
        budget_bytes=size.num_pages * size.page_bytes,
        page_size=config.page_size,
    )
    tuner = ReplayTuner(shape, setup, in_background=True)
    return make_policy(config.policy, Costs.of(shape), tuner, shadows)


def _make_pools(
    backend: ModelBackend, config: CacheConfig, budget_bytes: int, poison: bool
) -> TensorPools:
    packing = make_packing(backend.state_layout, config.checkpoint_format)
    sizes: PoolSizes = divide_budget(
        backend.kv_layout,
        backend.state_layout,
        budget_bytes=budget_bytes,
        page_size=config.page_size,
        max_running=config.max_running,
        checkpoint_bytes=None if packing is None else packing.num_bytes,
    )
    return TensorPools(
        backend.kv_layout,
        backend.state_layout,
        sizes,
        packing=packing,
        poison=poison,
        device=backend.device,
    )
