"""Which policy suits your traffic? Ask a trace, without a model."""

import tempfile
from pathlib import Path

from agentcache.simulate.generate import agents, write_trace
from agentcache.simulate.read import read_traces
from agentcache.simulate.runs import Budget, Grid, simulate
from agentcache.simulate.shapes import load_shape

with tempfile.TemporaryDirectory() as folder:
    # A trace of your own takes the place of this one: token ids or block hashes, chats, agent runs.
    path = Path(folder) / "agents.jsonl"
    write_trace(agents(seed=1, num_sessions=8, num_turns=8), path)
    [trace] = read_traces(path)

shape = load_shape("marconi-7b")  # or the config.json of the model you run
budgets = [Budget(share=share) for share in (0.1, 0.2)]
policies = ["lru", "auto", "clairvoyant", "bound"]

rates = {}
for result in simulate(trace, shape, Grid(policies, ["structural"], budgets)):
    setup = result.setup
    rates[setup.policy, setup.budget_share] = result.hit_rate
    print(f"{setup.budget_share:4.0%} of the need, {setup.policy:12} {result.hit_rate:6.1%}")

for share in (0.1, 0.2):
    assert rates["clairvoyant", share] <= rates["bound", share]
