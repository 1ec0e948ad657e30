"""Settings check themselves."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.config import CacheConfig, parse_bytes
from agentcache.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (0, 0),
        (4096, 4096),
        ("4097", 4097),
        ("17b", 17),
        ("2kB", 2000),
        ("2KiB", 2048),
        ("3MB", 3_000_000),
        ("512MiB", 512 * 2**20),
        ("1.5 GB", 1_500_000_000),
        (" 2 gib ", 2 * 2**30),
        ("0.5KiB", 512),
    ],
)
def test_sizes_are_read_with_and_without_units(text: int | str, wanted: int) -> None:
    assert parse_bytes(text) == wanted


@pytest.mark.parametrize(
    "text", [-1, "", "MiB", "-2", "12 parsecs", "1,5GB", "1e9", "0x10", "1 2", "512 MiB/s"]
)
def test_what_is_no_size_is_refused_by_name(text: int | str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_bytes(text)
    assert str(text) in str(error.value)


@given(st.integers(0, 2**50), st.sampled_from(["", "B", "KB", "KiB", "MiB", "gib"]))
def test_whole_numbers_of_a_unit_are_exact(number: int, unit: str) -> None:
    number %= 2**20 if unit else 2**50
    factors = {"": 1, "b": 1, "kb": 1000, "kib": 2**10, "mib": 2**20, "gib": 2**30}
    assert parse_bytes(f"{number} {unit}") == number * factors[unit.lower()]


def test_defaults_work_and_cannot_be_changed() -> None:
    config = CacheConfig()
    assert config.budget_bytes == 512 * 2**20
    assert config.policy == "auto"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.budget = 1  # type: ignore[misc]


def test_no_limit_is_no_number() -> None:
    assert CacheConfig(budget=None).budget_bytes is None
    assert CacheConfig(budget=12345).budget_bytes == 12345
    assert CacheConfig(page_size=1, prefill_chunk=1, max_running=1).page_size == 1


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"budget": 0}, "budget"),
        ({"budget": "0MiB"}, "budget"),
        ({"budget": -5}, "-5"),
        ({"budget": "many"}, "many"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": 2.0}, "page_size"),
        ({"prefill_chunk": -1}, "prefill_chunk"),
        ({"max_running": "8"}, "max_running"),
        ({"max_running": 0}, "max_running"),
        ({"admission": "everything"}, "everything"),
    ],
)
def test_setting_that_cannot_work_is_refused_at_start(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        CacheConfig(**settings)


def test_unknown_setting_is_refused() -> None:
    with pytest.raises(TypeError, match="pagesize"):
        CacheConfig(pagesize=16)  # type: ignore[call-arg]
