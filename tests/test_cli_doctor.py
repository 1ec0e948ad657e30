"""`agentcache doctor`: a table, JSON, exit status, and reasons in place of stack traces."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from testkit.command import agentcache

from agentcache.engine import doctor
from agentcache.engine.families import FAMILIES, tiny
from agentcache.engine.transformers_backend import TransformersBackend

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from agentcache.engine.backend import Batch


class Swapped(TransformersBackend):
    """Gives every sequence of a batch the logits of another."""

    def forward(self, batch: Batch) -> list[torch.Tensor]:
        return super().forward(batch)[::-1]


def test_sound_families_fill_the_table_and_the_json(tmp_path: Path) -> None:
    out = tmp_path / "doctor.json"
    done = agentcache("doctor", "--family=granitemoehybrid", "--family=gemma3", f"--json={out}")
    assert done.status == 0, done.stdout + done.stderr
    for word in ("granitemoehybrid", "FULL+STATE", "gemma3", "FULL+SWA", "resume", "window", "yes"):
        assert word in done.stdout
    assert "Traceback" not in done.stderr
    found = json.loads(out.read_text())
    assert [each["backend"] for each in found] == ["transformers", "native"] * 2
    hybrid, native, windowed, _ = found
    assert native["ok"]
    assert native["errors"]["kept"] < 1e-4
    assert (hybrid["family"], hybrid["ok"], hybrid["reason"]) == ("granitemoehybrid", True, None)
    assert hybrid["components"] == ["full", "state"]
    assert hybrid["model_type"] == "granitemoehybrid"
    assert 0 < max(hybrid["errors"].values()) <= hybrid["tolerance"]
    assert min(hybrid["effects"].values()) >= 100 * hybrid["tolerance"]
    assert "window" not in hybrid["errors"]
    assert "window" in windowed["errors"]
    assert windowed["model_type"] == "gemma3_text"


def test_a_wide_terminal_has_a_row_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    done = agentcache("doctor", "--family=llama")
    assert done.status == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("llama")]
    assert [line.split("FULL")[0].strip() for line in lines] == ["llama", "llama (native)"]
    assert all(line.split()[-1] == "yes" for line in lines)


def test_json_on_standard_output_is_alone_there() -> None:
    done = agentcache("doctor", "--family=llama", "--json=-")
    assert done.status == 0, done.stderr
    assert [each["family"] for each in json.loads(done.stdout)] == ["llama"] * 2
    assert "llama" in done.stderr


def test_the_default_model_is_probed_if_nothing_is_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "doctor.json"
    done = agentcache("doctor", f"--json={out}")
    assert done.status == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert [(each["family"], each["backend"], each["ok"]) for each in found] == [
        ("tiny-hybrid", "transformers", True),
        ("tiny-hybrid", "native", True),
    ]
    assert all(each["components"] == ["full", "state"] for each in found)


def test_damage_is_named_and_the_status_is_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "TransformersBackend", Swapped)
    out = tmp_path / "doctor.json"
    done = agentcache("doctor", "--family=llama", f"--json={out}")
    assert done.status == 1
    assert "llama: ragged: error" in done.stdout
    damaged, native = json.loads(out.read_text())
    assert not damaged["ok"]
    assert damaged["reason"].startswith("ragged: error")
    assert damaged["errors"]["ragged"] > damaged["tolerance"] >= damaged["errors"]["steps"]
    assert native["ok"]


def test_every_known_family_is_listed_and_one_not_admitted_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known = {name: tiny.VARIANTS[name] for name in ("mamba2", "qwen3")}
    monkeypatch.setattr(tiny, "VARIANTS", known)
    monkeypatch.delitem(FAMILIES, "qwen3")
    out = tmp_path / "doctor.json"
    done = agentcache("doctor", "--families", f"--json={out}")
    assert done.status == 1
    admitted, refused = json.loads(out.read_text())
    assert (admitted["family"], admitted["ok"]) == ("mamba2", True)
    assert (refused["family"], refused["ok"]) == ("qwen3", False)
    assert refused["components"] == []
    assert refused["errors"] == {}
    assert "not admitted" in refused["reason"]
    assert "qwen3: model type 'qwen3' is not admitted" in done.stdout


def test_family_whose_code_breaks_is_a_row_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Breaks(TransformersBackend):
        def __init__(self, model: object, *, unproven: bool = False) -> None:
            super().__init__(model, unproven=unproven)
            if not self.kv_layout.specs:
                raise KeyError("no such layer")

    monkeypatch.setattr(doctor, "TransformersBackend", Breaks)
    out = tmp_path / "doctor.json"
    done = agentcache("doctor", "--family=mamba2", "--family=llama", f"--json={out}")
    assert done.status == 1
    broken, *sound = json.loads(out.read_text())
    assert not broken["ok"]
    assert "no such layer" in broken["reason"]
    assert len(sound) == 2
    assert all(each["ok"] for each in sound)


def test_model_of_a_family_that_is_not_admitted_is_a_row_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    out = tmp_path / "doctor.json"
    done = agentcache("doctor", f"--model={tmp_path}", f"--json={out}")
    assert done.status == 1
    (only,) = json.loads(out.read_text())
    assert (only["family"], only["ok"]) == (str(tmp_path), False)
    assert "'gpt2' is not admitted" in only["reason"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--family=nobody"], "no family 'nobody'; there are granitemoehybrid"),
        (["--family=llama", "--family=nobody"], "no family 'nobody'"),
        (["--model=no/such-model"], "tiny-hybrid"),
        (["--no-such-flag"], "no-such-flag"),
        (["--family=llama", "--json=/no/such/folder/out.json"], "cannot write"),
    ],
)
def test_wrong_usage_says_what_to_do(arguments: list[str], said: str) -> None:
    done = agentcache("doctor", *arguments)
    assert done.status == 2, done.stdout + done.stderr
    assert said in (done.stdout + done.stderr).replace("\n", " ")
