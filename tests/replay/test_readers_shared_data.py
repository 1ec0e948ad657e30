"""The whole collection of recordings, where a checkout has it beside the repository."""

from collections import defaultdict
from pathlib import Path
from statistics import median

import pytest

from agentcache.replay.trace import read_file, read_paths

REPOSITORY = Path(__file__).parents[2]
DATA = REPOSITORY.parent / "shared" / "data" / "trajectories"

pytestmark = pytest.mark.skipif(
    not DATA.is_dir(), reason="the collection ../shared/data/trajectories is not there"
)

# folder: trajectories, calls min / median / max, calls that do not extend the one before
COLLECTION = {
    "mini-swe-agent/verified-gemini-3-pro": (69, 18, 34, 145, 0),
    "mini-swe-agent/bare-list": (2, 2, 6, 10, 0),
    "swe-agent/marshmallow-1867": (8, 11, 11.5, 14, 7),
    "swe-agent/ctf": (5, 4, 9, 15, 0),
    "swe-agent/misc": (1, 5, 5, 5, 0),
    "swe-agent/swe-smith": (1, 17, 17, 17, 0),
    "tau-bench": (100, 4, 13, 30, 0),
    "openhands": (3, 6, 23, 33, 0),
    "claude-code/excerpts": (2, 4, 4.5, 5, 0),
    "claude-code/sessions": (2, 2, 2, 2, 0),
}


def num_not_append_only(run):
    return sum(
        call.messages[: len(before.messages) + 1] != (*before.messages, before.answer)
        for before, call in zip(run.calls, run.calls[1:], strict=False)
    )


@pytest.fixture(scope="module")
def result():
    return read_paths(DATA)


@pytest.mark.parametrize("folder", COLLECTION)
def test_group_has_the_published_counts(result, folder):
    runs = [
        run
        for run in result.trajectories
        if (DATA / folder) in (Path(run.path), *Path(run.path).parents)
    ]
    lengths = [len(run.calls) for run in runs]

    assert (
        len(runs),
        min(lengths),
        median(lengths),
        max(lengths),
        sum(num_not_append_only(run) for run in runs),
    ) == COLLECTION[folder]


def test_only_recordings_without_model_calls_are_rejected(result):
    rejected = defaultdict(int)
    for path, _ in result.rejected:
        rejected[Path(path).parent.name] += 1

    assert rejected == {"intercode": 6, "condenser-log": 2, "event-lists": 3}
    assert (result.loaded, result.partial, result.skipped) == (98, 0, 0)
    assert result.unknown == ()


def test_every_time_of_the_verified_runs_is_known(result):
    runs = [run for run in result.trajectories if "verified" in run.path]

    assert all(call.at is not None for run in runs for call in run.calls)
    assert all(
        [call.at for call in run.calls] == sorted(call.at for call in run.calls) for run in runs
    )


def test_odd_file_with_mark_and_crlf_equals_the_plain_recording():
    odd = REPOSITORY / "tests" / "fixtures" / "odd" / "bom_crlf.traj.json"
    [run] = read_file(odd)
    [plain] = read_file(DATA / "mini-swe-agent" / "verified-gemini-3-pro" / f"{run.id}.traj.json")

    prompts = [(call.messages, call.answer) for call in run.calls]
    assert prompts == [(call.messages, call.answer) for call in plain.calls]
