"""Replay recorded agent runs from Python, at a tenth of the memory they would like to have."""

from pathlib import Path

import agentcache
from agentcache.replay.trace import read_paths
from agentcache.replayer import Replayer, ReplayOptions

SAMPLE = Path(agentcache.__file__).with_name("data") / "sample"

read = read_paths(SAMPLE)
options = ReplayOptions(concurrency=3, max_turns=3, verify=2)
replayer = Replayer("tiny-hybrid", read, options)
result = replayer.run(budget="50%")
print(f"{len(result.calls)} calls of {result.num_trajectories} runs")
print(f"hit rate {result.tokens.hit_rate:.1%}, ideal {result.ideal_hit_rate:.1%}")
print(f"peak {result.peak_bytes / 2**20:.1f} MiB of {(result.budget_bytes or 0) / 2**20:.1f} MiB")
assert result.verify.passed(result.verify_tolerance)
