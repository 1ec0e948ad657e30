"""The probe passes what is sound, and of what is damaged fails exactly the check that is for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from agentcache.engine.doctor import diagnose_family, stock_reference
from agentcache.engine.families import FAMILIES
from agentcache.engine.families.tiny import VARIANTS, build
from agentcache.engine.native.backend import has_native
from agentcache.engine.probe import probe
from agentcache.engine.transformers_backend import TransformersBackend
from agentcache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentcache.engine.backend import Batch
    from agentcache.engine.probe import Reference, Report
    from agentcache.types import IntArray

ADMITTED = [name for name, each in VARIANTS.items() if each.text_model_type in FAMILIES]


class Damaged:
    """A backend of which something is wrong."""

    def __init__(self, backend: TransformersBackend) -> None:
        self.inner = backend
        self.shape = backend.shape
        self.kv_layout = backend.kv_layout
        self.state_layout = backend.state_layout
        self.device = backend.device
        self.max_extend_batch = backend.max_extend_batch

    def forward(self, batch: Batch) -> list[torch.Tensor]:
        return self.inner.forward(batch)


class LosesStatesOnResume(Damaged):
    """A row that it did not bring to where a pass begins holds a loaded state."""

    def __init__(self, backend: TransformersBackend) -> None:
        super().__init__(backend)
        self.reached: dict[tuple[int, int], int] = {}

    def forward(self, batch: Batch) -> list[torch.Tensor]:
        for span in batch.spans:
            place = (id(batch.pools), span.row)
            if span.start and self.reached.get(place) != span.start:
                for state in batch.pools.state.values():
                    state[span.row] = 0
            self.reached[place] = span.stop
        return super().forward(batch)


class CapturesLate(Damaged):
    """Hands out the state at the end of the pass for every state inside it."""

    def forward(self, batch: Batch) -> list[torch.Tensor]:
        logits = super().forward(batch)
        for span in batch.spans:
            for capture in span.captures:
                batch.pools.copy_row(span.row, capture.row)
        return logits


class MixesUpRows(Damaged):
    """Gives a sequence the logits of another one in the batch."""

    def forward(self, batch: Batch) -> list[torch.Tensor]:
        return super().forward(batch)[::-1]


class KeepsOldStateInSteps(Damaged):
    """Decodes, and leaves the state where it was."""

    def forward(self, batch: Batch) -> list[torch.Tensor]:
        rows = [span.row for span in batch.spans if len(span.ids) == 1]
        before = [state[rows].clone() for state in batch.pools.state.values()]
        logits = super().forward(batch)
        for state, old in zip(batch.pools.state.values(), before, strict=True):
            state[rows] = old
        return logits


class SpoilsItsPages(Damaged):
    """Overwrites the first position of a sequence in every extension."""

    def forward(self, batch: Batch) -> list[torch.Tensor]:
        for span in batch.spans:
            if len(span.ids) > 1 and span.start:
                for group in batch.pools.kv_layout.groups:
                    slot, _ = next(span.pages(group.kind).runs(0, 1))
                    for spec in group.specs:
                        batch.pools.kv[spec.layer_idx][0][slot] = 3.0
        return super().forward(batch)


class IsNotANumber(Damaged):
    def forward(self, batch: Batch) -> list[torch.Tensor]:
        return [logits * torch.nan for logits in super().forward(batch)]


class Raises(Damaged):
    def forward(self, batch: Batch) -> list[torch.Tensor]:
        if len(batch.spans) > 1:
            raise RuntimeError("no batches here\nand more lines")
        return super().forward(batch)


def subject(
    damage: type[Damaged] = Damaged, name: str = "granitemoehybrid"
) -> tuple[Damaged, Reference]:
    model = build(name)
    reference = stock_reference(model)
    return damage(TransformersBackend(model)), reference


class KeepsAnotherState(Damaged):
    """One layer's state is a little larger; no logits show it."""

    def forward(self, batch: Batch) -> list[torch.Tensor]:
        logits = super().forward(batch)
        name = next(name for name in batch.pools.state if name[1] == "recurrent")
        for span in batch.spans:
            batch.pools.state[name][span.row] *= 1.01
        return logits


def probed(damage: type[Damaged], name: str = "granitemoehybrid") -> Report:
    backend, reference = subject(damage, name)
    return probe(backend, reference, seed=0)


def failed(report: Report) -> set[str]:
    return {check.name for check in report.checks if not check.ok}


@pytest.mark.parametrize("name", ADMITTED)
def test_every_admitted_family_passes(name: str) -> None:
    diagnoses = diagnose_family(name)
    assert len(diagnoses) == 1 + has_native(VARIANTS[name].text_model_type)
    for diagnosis in diagnoses:
        assert diagnosis.ok, (diagnosis.label, diagnosis.reason)
        assert diagnosis.model_type == VARIANTS[name].text_model_type


def test_every_admitted_family_has_a_tiny_model_to_be_probed_on() -> None:
    assert set(FAMILIES) <= {each.text_model_type for each in VARIANTS.values()}


def test_report_of_a_sound_backend_has_a_value_for_every_check_that_applies() -> None:
    report = probed(Damaged)
    assert report.ok
    assert report.reason is None
    assert report.components == ("full", "state")
    assert list(report.errors) == [
        "uncached",
        "extend",
        "chunks",
        "steps",
        "resume",
        "fork",
        "ragged",
    ]
    assert all(0 < error <= report.tolerance for error in report.errors.values() if error)
    assert None not in report.errors.values()
    assert list(report.effects) == ["states noticed", "kv noticed"]
    assert all(effect and effect >= 100 * report.tolerance for effect in report.effects.values())


@pytest.mark.parametrize(
    ("damage", "checks"),
    [
        (LosesStatesOnResume, {"resume", "fork"}),
        (CapturesLate, {"resume"}),
        (MixesUpRows, {"ragged"}),
        (KeepsOldStateInSteps, {"chunks", "steps", "ragged"}),  # one of the chunks is one token
        (SpoilsItsPages, {"chunks", "resume", "fork"}),
    ],
)
def test_damage_fails_the_checks_that_are_for_it_and_no_other(
    damage: type[Damaged], checks: set[str]
) -> None:
    report = probed(damage)
    assert failed(report) == checks
    assert not report.ok
    for name in checks:
        assert f"{name}: error" in (report.reason or "")


def test_window_that_is_not_kept_to_fails_the_check_of_windows_alone() -> None:
    """Longer than the other checks' sequences, so that none of them leaves it behind."""
    window = 100
    narrow = build("gemma3", sliding_window=window)
    reference = stock_reference(narrow)
    backend = Damaged(TransformersBackend(build("gemma3", sliding_window=2000)))
    backend.kv_layout = TransformersBackend(narrow).kv_layout
    assert {spec.window for spec in backend.kv_layout.specs} == {None, window}
    report = probe(backend, reference, seed=0)
    assert report.components == ("full", "swa")
    assert failed(report) == {"window"}


def test_check_that_raises_has_failed_for_the_first_line_of_its_error() -> None:
    report = probed(Raises)
    assert failed(report) == {"ragged"}
    assert report.errors["ragged"] is None
    assert report.reason == "ragged: no batches here"


def test_logits_that_are_no_numbers_are_an_infinite_error() -> None:
    report = probed(IsNotANumber)
    assert report.errors["extend"] == float("inf")
    assert {"extend", "chunks", "steps", "resume", "fork", "ragged"} <= failed(report)


def test_model_that_forgets_is_not_admitted_though_its_errors_are_small() -> None:
    """With default weights all recurrent states can be lost and no check of the answers sees it."""
    trained = build("falcon_h1")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = type(trained)._from_config(trained.config).eval()
    reference = stock_reference(model)
    report = probe(TransformersBackend(model), reference, seed=0)
    assert failed(report) == {"states noticed"}
    assert "without its" in (report.reason or "")


def test_model_without_an_answer_of_its_own_is_not_compared_with_it() -> None:
    backend, reference = subject()

    def looks_ahead(tokens: IntArray) -> torch.Tensor:
        return reference(tokens[::-1].copy())

    report = probe(backend, looks_ahead, seed=0)
    assert failed(report) == {"uncached"}
    assert [check.name for check in report.checks] == ["uncached"]


def test_tolerance_follows_what_uncached_passes_differ_by() -> None:
    backend, reference = subject()

    def rough(tokens: IntArray) -> torch.Tensor:
        logits = reference(tokens)
        return logits + logits.std() * 1e-5 * len(tokens)

    report = probe(backend, rough, seed=0)
    spread = report.errors["uncached"]
    assert spread is not None
    assert spread == pytest.approx(58e-5, rel=0.1)  # 71 tokens against 13
    assert report.tolerance == pytest.approx(3 * spread)


def test_same_seed_gives_the_same_report() -> None:
    reports = [probed(Damaged) for _ in range(2)]
    assert reports[0] == reports[1]


@pytest.mark.parametrize("damage", [LosesStatesOnResume, CapturesLate])
def test_lost_states_fail_with_any_seed(damage: Callable[..., Damaged]) -> None:
    backend, reference = subject(damage, "mamba2")  # type: ignore[arg-type]
    for seed in (1, 2):
        assert "resume" in failed(probe(backend, reference, seed=seed))


def test_reference_is_untouched_by_the_backend_that_shares_its_weights() -> None:
    model = build("granitemoehybrid")
    reference = stock_reference(model)
    tokens = torch.arange(80, 120).numpy().astype("int32")
    before = reference(tokens)
    backend = TransformersBackend(model)
    assert torch.equal(reference(tokens), before)
    assert backend.model.get_input_embeddings().weight.data_ptr() != 0


def test_tiny_models_follow_from_their_seed_and_leave_the_global_random_state() -> None:
    def weights(seed: int) -> dict[str, Any]:
        return dict(build("zaya", seed).state_dict())

    state = torch.get_rng_state()
    first, again, other = weights(0), weights(0), weights(1)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_unknown_tiny_model_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'nobody'.*granitemoehybrid.*llama"):
        build("nobody")


def test_another_backend_has_to_keep_the_same() -> None:
    backend, reference = subject(Damaged, "granitemoehybrid")
    same = probe(backend, reference, seed=0, other=backend)
    assert same.ok
    assert same.errors["kept"] == 0
    other = probe(backend, reference, seed=0, other=KeepsAnotherState(backend.inner))
    assert failed(other) == {"kept"}
    detail = next(check.detail for check in other.checks if check.name == "kept")
    assert detail.startswith("recurrent of layer")
