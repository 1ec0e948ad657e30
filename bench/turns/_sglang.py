"""SGLang's prefix caches on the same calls: the tree cores of an unpacked wheel, without a server.

The wheel is imported from its folder. Packages that its bookkeeping imports and never calls are
answered with placeholders where they are absent, so that besides torch, transformers and pydantic
it takes `msgspec` and `dill`. Nothing of it is changed but two getters that read a server's
arguments.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import math
import os
import sys
from array import array
from time import thread_time
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from _turns import PHASES, Served

from agentcache.types import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from pathlib import Path

    from _turns import Step

__all__ = ["CORES", "Sglang", "SglangServer"]

CORES = ("rust", "python")

_BARE = ("sglang", "sglang.srt.layers", "sglang.srt.layers.quantization")
"""Packages whose own `__init__` would import kernels."""

_UNCALLED = [
    *("IPython", "aiohttp", "av", "compressed_tensors", "cuda", "decord", "deep_gemm", "fastapi"),
    *("flashinfer", "openai", "orjson", "outlines", "partial_json_parser", "prometheus_client"),
    *("psutil", "pybase64", "pynvml", "requests", "sentencepiece", "setproctitle", "sgl_kernel"),
    *("soundfile", "starlette", "torch_memory_saver", "torchaudio", "torchvision", "triton"),
    *("tvm_ffi", "uvicorn", "uvloop", "xgrammar", "zmq"),
]


class _Anything:
    """Called, indexed or combined, it is itself; as a decorator it changes nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        return

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        decorates = len(arguments) == 1 and callable(arguments[0]) and not options
        return arguments[0] if decorates else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __getitem__(self, key: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return other

    __ror__ = __or__

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (object,)


class _AnyClass:
    """Stands for a class: can be a base, an annotation and a field of a pydantic model."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        return

    def __init_subclass__(cls, **options: Any) -> None:
        return

    @classmethod
    def __get_pydantic_core_schema__(cls, *arguments: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()


class _Placeholder(ModuleType):
    """A module that has every name: classes where it is written like one."""

    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (_AnyClass,), {}) if name[0].isupper() else _Anything()
        setattr(self, name, value)
        return value


class _Placeholders(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _Placeholder(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        return


class Sglang:
    """The names of an unpacked wheel that a cache is built and called with."""

    def __init__(self, folder: Path) -> None:
        package = folder / "sglang"
        if not package.is_dir():
            raise FileNotFoundError(f"{folder} holds no folder sglang; unpack the wheel there")
        import transformers  # noqa: F401  (before the placeholders: it asks what is installed)

        logging.getLogger("sglang").setLevel(logging.ERROR)
        absent = [name for name in _UNCALLED if importlib.util.find_spec(name) is None]
        sys.meta_path.append(_Placeholders(absent))
        for name in _BARE:
            module = _Placeholder(name)
            module.__path__ = [str(package.joinpath(*name.split(".")[1:]))]
            sys.modules[name] = module
        os.environ.setdefault("SGLANG_RUST_BUILD_MODE", "auto")
        base = _cache_module("base_prefix_cache")
        self.match_params = base.MatchPrefixParams
        self.insert_params = base.InsertParams
        self.evict_params = base.EvictParams
        self.init_params = _cache_module("cache_init_params").CacheInitParams
        self.key = _cache_module("radix_cache").RadixKey
        self.cache = _cache_module("unified_radix_cache").UnifiedRadixCache
        self.kind = _cache_module("unified_cache.components").ComponentType
        self.request_pool = _cache_module("memory_pool").HybridReqToTokenPool
        self.window_allocator = _cache_module("allocator.swa").SWATokenToKVPoolAllocator
        _without_server()


def _cache_module(name: str) -> Any:
    return importlib.import_module(f"sglang.srt.mem_cache.{name}")


def _without_server() -> None:
    """Answer what the Mamba component asks of a server's arguments: any number of states."""
    arguments = SimpleNamespace(
        mamba=SimpleNamespace(mamba_max_states_per_path=-1, enable_mamba_extra_buffer_lazy=False)
    )
    mamba = _cache_module("unified_cache.components.mamba")
    for module in (mamba, _cache_module("rust_tree_core.adapter")):
        module.get_exec = lambda: arguments
        module.mamba_cache_chunk_size = lambda: _CHUNK
    mamba.mamba_checkpoint_grid = lambda page: math.lcm(_CHUNK, page)


_CHUNK = 64


class _Tokens:
    """Stands in for the allocator of token slots: counts them; no slot is ever used twice.

    spent_s: CPU seconds in here, which are no bookkeeping of the tree's.
    """

    device = "cpu"

    def __init__(self, room: int, page_size: int, has_window: bool) -> None:
        self.page_size = page_size
        self.spent_s = 0.0
        self._room = self.free_len = room
        self.window_free_len = room
        self._next = page_size
        self._in_window = np.zeros(1 << 20, dtype=bool) if has_window else None
        self.full_attn_allocator = SimpleNamespace(
            free_segment=self.free_full_segment, available_size=self.full_available_size
        )

    def alloc(self, count: int) -> torch.Tensor:
        begin = thread_time()
        count = self._whole_pages(count)
        if count > min(self.free_len, self.window_free_len):
            raise MemoryError(f"{count} token slots wanted; everything that is left is locked")
        start, self._next = self._next, self._next + count
        if self._in_window is not None:
            if self._next > len(self._in_window):
                self._in_window = np.resize(self._in_window, 2 * self._next)
                self._in_window[start:] = False
            self._in_window[start : self._next] = True
            self.window_free_len -= count
        self.free_len -= count
        slots = torch.arange(start, self._next, dtype=torch.int64)
        self.spent_s += thread_time() - begin
        return slots

    def missing(self, count: int) -> tuple[int, int]:
        """How many slots, of all attention and of windows, have to become free for `count`."""
        count = self._whole_pages(count)
        return max(0, count - self.free_len), max(0, count - self.window_free_len)

    def _whole_pages(self, count: int) -> int:
        return -(-count // self.page_size) * self.page_size

    @property
    def size_full(self) -> int:
        return self._room

    def available_size(self) -> int:
        return min(self.free_len, self.window_free_len)

    def full_available_size(self) -> int:
        return self.free_len

    def swa_available_size(self) -> int:
        return self.window_free_len

    def mamba_full_cache_donor(self) -> None:
        return

    def get_kvcache(self) -> None:
        return

    def free_full_segment(self, slots: torch.Tensor, start_pos: int = 0) -> None:
        self.free_len += len(slots)

    def free_swa_segment(self, slots: torch.Tensor, start_pos: int = 0) -> None:
        if self._in_window is None:
            return
        begin = thread_time()
        index = slots.numpy()
        self.window_free_len += int(self._in_window[index].sum())
        self._in_window[index] = False
        self.spent_s += thread_time() - begin

    def free_segment(self, slots: torch.Tensor, start_pos: int = 0) -> None:
        self.free_full_segment(slots)
        self.free_swa_segment(slots)

    def translate_swa_indices_for_transfer(self, slots: torch.Tensor) -> torch.Tensor:
        return slots

    translate_loc_from_full_to_swa = translate_swa_indices_for_transfer

    def set_full_to_swa_mapping(self, full: torch.Tensor, window: torch.Tensor) -> None:
        return

    def clear_full_to_swa_mapping(self, slots: torch.Tensor) -> None:
        return


class _States:
    """Stands in for the allocator of recurrent states."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._next = 1

    def available_size(self) -> int:
        return self._free

    schedulable_available_size = available_size

    def alloc(self, count: int) -> torch.Tensor | None:
        if count > self._free:
            return None
        self._free -= count
        start, self._next = self._next, self._next + count
        return torch.arange(start, self._next, dtype=torch.int64)

    def free(self, slots: torch.Tensor) -> None:
        self._free += slots.numel()


class SglangServer:
    """Serves steps the way SGLang's scheduler does: match, lock, room, an insertion at the end of
    the prompt and one at the end of the answer, each with the request's row read back from the tree
    and its lock moved.

    The sessions' rooms are generous: `room_len` token slots for each kind of attention, and
    `num_states` checkpoints beside them.
    """

    def __init__(
        self,
        sglang: Sglang,
        core: str,
        kinds: Sequence[Kind],
        page_size: int,
        room_len: int,
        num_states: int,
        window: int,
    ) -> None:
        self.core = f"sglang {core}"
        self._sglang = sglang
        self._page_size = page_size
        self._has_state, self._has_window = Kind.STATE in kinds, Kind.SWA in kinds
        self._tokens = self._allocator(room_len // page_size * page_size)
        self._states = _States(num_states)
        requests = sglang.request_pool.__new__(sglang.request_pool)
        requests.mamba_allocator = self._states if self._has_state else None
        requests.mamba_ckpt_pool = None
        names = {Kind.FULL: "FULL", Kind.SWA: "SWA", Kind.STATE: "MAMBA"}
        self._cache = sglang.cache(
            sglang.init_params(
                disable=False,
                req_to_token_pool=requests,
                token_to_kv_pool_allocator=self._tokens,
                page_size=page_size,
                eviction_policy="lru",
                enable_session_radix_cache=False,
                enable_mamba_extra_buffer=page_size > 1,
                sliding_window_size=window if self._has_window else None,
                tree_components=tuple(getattr(sglang.kind, names[kind]) for kind in kinds),
                tree_core_backend=core,
            )
        )
        self._grid = math.lcm(_CHUNK, page_size) if self._has_state and page_size > 1 else page_size
        self._served = Served({}, 0, 0)

    def _allocator(self, room_len: int) -> Any:
        if not self._has_window:
            return _Tokens(room_len, self._page_size, has_window=False)
        # the cache tells the windowed kind by its class; everything it calls is ours
        sizes = {"size": 0, "size_full": 0, "size_swa": 0, "__init__": _Tokens.__init__}
        both = type("_WindowTokens", (_Tokens, self._sglang.window_allocator), sizes)
        return both(room_len, self._page_size, has_window=True)

    def serve(self, step: Step) -> Served:
        self._served = served = Served(dict.fromkeys(PHASES, 0.0), 0, 0)
        ids = array("q", step.tokens.astype(np.int64).tobytes())
        total, prompt_len = len(ids), step.prompt_len
        timed, cache = self._timed, self._cache
        params = self._sglang.match_params(
            key=self._sglang.key(ids[: prompt_len - 1]), req=_request()
        )
        match = timed("acquire", cache.match_prefix, params)
        served.reused_len = reused = match.device_prefix_len
        node = match.last_device_node
        lock = timed("acquire", cache.lock, node)
        row = timed("acquire", cache.path_device_indices, node)[:reused]
        working = self._state() if self._has_state else None
        self._make_room(total - reused)
        row = torch.cat([row, self._tokens.alloc(total - reused)])
        filed = reused
        for phase, stop in (
            ("prefill_commit", prompt_len),
            ("decode_commit", total - 1),
        ):
            row, lock, filed = self._insert(phase, ids, stop, row, lock, filed)
        if len(row) > filed:
            self._tokens.free_segment(row[filed:])
        timed("release", cache.unlock, lock)
        if working is not None:
            self._states.free(working)
        return served

    def _insert(
        self, phase: str, ids: array[int], stop: int, row: torch.Tensor, lock: Any, filed: int
    ) -> tuple[torch.Tensor, Any, int]:
        """File `ids[:stop]` in whole pages; the row as the tree has it, the lock, what is filed."""
        stop = stop // self._grid * self._grid
        if stop <= filed:
            return row, lock, filed
        sglang, cache = self._sglang, self._cache
        params = sglang.insert_params(
            key=sglang.key(ids[:stop]),
            value=row[:stop],
            prev_prefix_len=filed,
            inserted_len=filed,
        )
        state = self._state() if self._has_state else None
        params.mamba_value = state
        if self._has_window:
            params.set_evicted_seqlen(sglang.kind.SWA, 0)
        done = self._timed(phase, cache.insert, params)
        if state is not None and done.mamba_exist:
            self._states.free(state)
        known = self._timed(phase, cache.path_device_indices, done.last_device_node)
        row = torch.cat([known, row[len(known) :]])
        self._timed(phase, cache.unlock, lock)
        return row, self._timed(phase, cache.lock, done.last_device_node), stop

    def _make_room(self, count: int) -> None:
        full, window = self._tokens.missing(count)
        if full or window:
            self._evict(num_tokens=full, swa_num_tokens=window)

    def _state(self) -> torch.Tensor:
        slot = self._states.alloc(1)
        if slot is None:
            self._evict(mamba_num=1)
            slot = self._states.alloc(1)
        if slot is None:
            raise MemoryError("a state wanted; all that are left are locked")
        return slot

    def _evict(self, **wanted: int) -> None:
        self._served.num_evictions += 1
        self._timed("evict", self._cache.evict_for_alloc, self._sglang.evict_params(**wanted))

    def _timed(self, phase: str, call: Callable[..., Any], *arguments: Any) -> Any:
        spent, begin = self._tokens.spent_s, thread_time()
        out = call(*arguments)
        self._served.seconds[phase] += thread_time() - begin - (self._tokens.spent_s - spent)
        return out


def _request() -> SimpleNamespace:
    """The fields of a request that the cache reads."""
    kv = SimpleNamespace(
        holds_mamba=False,
        mamba_pool_idx=None,
        mamba_cow_src_index=None,
        mamba_needs_clear=True,
        swa_evicted_seqlen=0,
    )
    return SimpleNamespace(
        session=None, session_id=None, session_generation=None, rid="bench", kv=kv
    )
