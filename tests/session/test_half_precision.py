"""16-bit weights: what verification holds a call against, and what it still notices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from testkit.models import tokenizer

from agentcache.config import CacheConfig
from agentcache.engine.families.tiny import build
from agentcache.engine.verify import HALF_TOLERANCES, STATE_TOLERANCE
from agentcache.runtime import Runtime
from agentcache.types import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentcache.session import Turn

MODELS = ["granitemoehybrid", "qwen3_next", "gemma3"]
CHUNK = 32


@pytest.fixture(scope="module", params=MODELS)
def runtime(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    config = CacheConfig(budget="16MiB", page_size=8, prefill_chunk=CHUNK)
    model = build(request.param, dtype=torch.bfloat16)
    with Runtime(model, tokenizer(), cache=config) as made:
        yield made


def turns(runtime: Runtime, *, exact: bool, stepwise: bool | None = None) -> list[Turn]:
    """Three turns of one session, each compared with a cold run."""
    generator, session, ids, out = np.random.default_rng(0), runtime.session(), [], []
    for length in (70, 41, 55):
        ids += generator.integers(3, 250, length).tolist()
        replay = {} if stepwise is None else {"replay": [7] * 9, "stepwise": stepwise}
        turn = session.generate(ids, max_new_tokens=9, exact=exact, verify=True, **replay)
        ids += turn.ids.tolist()
        out.append(turn)
    assert out[-1].usage.cached_tokens >= 70
    return out


@pytest.mark.parametrize("stepwise", [None, False, True])
def test_exact_calls_differ_by_nothing(runtime: Runtime, stepwise: bool | None) -> None:
    for turn in turns(runtime, exact=True, stepwise=stepwise):
        assert turn.verify is not None
        assert turn.verify.max_logit_error == turn.verify.max_state_error == 0.0
        assert turn.verify.state_tolerance == STATE_TOLERANCE
        assert turn.verify.ok


def test_other_calls_differ_by_rounding_within_a_tolerance_of_their_own(runtime: Runtime) -> None:
    for turn in turns(runtime, exact=False):
        checked = turn.verify
        assert checked is not None
        assert checked.ok
        assert (checked.logit_tolerance, checked.state_tolerance) == HALF_TOLERANCES
        assert 0.0 < checked.max_state_error < HALF_TOLERANCES[1] / 4


def test_a_lost_state_is_noticed_all_the_same() -> None:
    config = CacheConfig(budget="16MiB", page_size=8, prefill_chunk=CHUNK)
    model = build("granitemoehybrid", dtype=torch.bfloat16)
    prompt = np.random.default_rng(1).integers(3, 250, 90).tolist()
    with Runtime(model, tokenizer(), cache=config) as runtime:
        runtime.session().generate(prompt, max_new_tokens=0)
        tree, pools = runtime.cache.tree, runtime._pools
        root = tree.root(runtime.namespace(None).digest())
        node = tree.match(root, np.array(prompt, dtype=np.int32), len(prompt)).node
        assert node.end == len(prompt)
        row = pools.staging_rows[0]
        pools.clear_state(row)
        pools.save_state(row, node.data[Kind.STATE].slots)
        turn = runtime.session().generate([*prompt, 5, 6, 7], max_new_tokens=4, verify=True)
        assert turn.usage.cached_tokens == len(prompt)
        assert turn.verify is not None
        assert not turn.verify.ok
        assert turn.verify.max_state_error > 3 * HALF_TOLERANCES[1]
