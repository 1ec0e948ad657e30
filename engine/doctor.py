"""What `agentcache doctor` finds out: families by tiny models of them, and a user's own model."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from agentcache.engine.families.tiny import build
from agentcache.engine.loader import load_model
from agentcache.engine.native.backend import NativeBackend, has_native
from agentcache.engine.probe import CHECKS, first_line, probe
from agentcache.engine.transformers_backend import TransformersBackend
from agentcache.errors import ModelError, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table
    from rich.text import Text

    from agentcache.engine.probe import Check, Reference, Report
    from agentcache.types import BackendName, IntArray

__all__ = [
    "Diagnosis",
    "diagnose_family",
    "diagnose_model",
    "diagnosis_table",
    "stock_reference",
]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is known of a family, or of a model given by name, computed by one backend.

    report: what the probe found; None if the model is refused before, for `refusal`. doubt: why it
    is admitted by the flag alone, if so, whatever the probe found.
    """

    family: str
    model_type: str | None = None
    report: Report | None = None
    refusal: str | None = None
    doubt: str | None = None
    backend: BackendName = "transformers"

    @property
    def label(self) -> str:
        """Its name in a table; the backend with it where it is the native one."""
        return f"{self.family} (native)" if self.backend == "native" else self.family

    @property
    def ok(self) -> bool:
        return self.report is not None and self.report.ok

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the kinds of cached data; none if they are not known."""
        return self.report.components if self.report else ()

    @property
    def reason(self) -> str | None:
        """Why it is not ok."""
        return self.report.reason if self.report else self.refusal

    def to_json(self) -> dict[str, Any]:
        """Values that are no finite number are null."""
        report = self.report
        return {
            "family": self.family,
            "model_type": self.model_type,
            "backend": self.backend,
            "ok": self.ok,
            "components": list(self.components),
            "tolerance": report.tolerance if report else None,
            "errors": _finite(report.errors) if report else {},
            "effects": _finite(report.effects) if report else {},
            "reason": self.reason,
            "unproven": self.doubt,
        }


def _finite(values: dict[str, float | None]) -> dict[str, float | None]:
    return {
        name: value if value is not None and math.isfinite(value) else None
        for name, value in values.items()
    }


def diagnose_family(name: str, *, seed: int = 0, unproven: bool = False) -> list[Diagnosis]:
    """Probe a tiny random model of a variant with every backend it has. Raises ConfigError.

    unproven: also one that is not admitted otherwise, to see what it would pass.
    """
    return _diagnose(name, build(name, seed), seed, unproven)


def diagnose_model(
    name: str, *, adapter: str | None = None, seed: int = 0, unproven: bool = False
) -> list[Diagnosis]:
    """Probe a model by its name with every backend it has; in float32: no rounding hides a loss.

    adapter: folder or Hub id of a LoRA adapter to merge first. unproven: also a model that is not
    admitted otherwise, to see what it would pass. Raises ModelNotFound, and ModelError for an
    adapter of another model. A model that is not admitted is a diagnosis, no error.
    """
    try:
        model = load_model(name, torch.float32, adapter=adapter, unproven=unproven).model
    except UnsupportedModel as error:
        return [Diagnosis(name, refusal=str(error))]
    return _diagnose(name, model, seed, unproven)


def _diagnose(name: str, model: Any, seed: int, unproven: bool) -> list[Diagnosis]:
    """One diagnosis by transformers, and one of the native backend where the family has it."""
    model_type = model.config.get_text_config(decoder=True).model_type
    reference = stock_reference(model)
    try:
        backend = TransformersBackend(model, unproven=unproven)
    except UnsupportedModel as error:
        return [Diagnosis(name, model_type, refusal=str(error))]
    except Exception as error:  # a family's own code failed on this config: that is the finding
        reason = f"the engine cannot take the model over: {first_line(error)}"
        return [Diagnosis(name, model_type, refusal=reason)]
    report = probe(backend, reference, seed=seed)
    found = [Diagnosis(name, model_type, report, doubt=backend.doubt)]
    if backend.doubt is None and has_native(model_type):
        found.append(_diagnose_native(name, model_type, model, reference, seed, backend))
    return found


def _diagnose_native(
    name: str,
    model_type: str,
    model: Any,
    reference: Reference,
    seed: int,
    other: TransformersBackend,
) -> Diagnosis:
    try:
        backend = NativeBackend(model)
    except ModelError as error:
        return Diagnosis(name, model_type, refusal=str(error), backend="native")
    report = probe(backend, reference, seed=seed, other=other)
    return Diagnosis(name, model_type, report, backend="native")


def stock_reference(model: Any) -> Reference:
    """The model as transformers computes it, without a cache.

    Has modules of its own over the same weights: to be called before a backend takes the model
    over, which then does not change it.
    """
    weights = {id(weight): weight for weight in model.parameters()}
    stock = copy.deepcopy(model, weights).eval()
    stock.set_attn_implementation("eager")

    @torch.inference_mode()
    def logits(tokens: IntArray) -> torch.Tensor:
        ids = torch.tensor([tokens.tolist()], device=stock.device)
        out: torch.Tensor = stock(input_ids=ids, use_cache=False).logits
        return out[0].float()

    return logits


_WIDE = 112
"""Columns of text that a table with components of their own column needs."""


def diagnosis_table(diagnoses: Iterable[Diagnosis], width: int) -> Table:
    """One row each: components, a value per check, and whether all is well.

    width: columns of text there is room for; readable from 80 on.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows = list(diagnoses)
    is_wide = width >= _WIDE
    hidden = {CHECKS[0], *(() if is_wide else ("kept",))}
    found = {name for row in rows for name in _checks(row)} - hidden
    shown = [name for name in CHECKS if name in found]
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0) if is_wide else 0,
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("family", overflow="fold")
    if is_wide:
        table.add_column("components", no_wrap=True)
    for name in shown:
        table.add_column(name.replace(" noticed", "\nlost"), justify="right", no_wrap=True)
    table.add_column("ok", no_wrap=True)
    for row in rows:
        checks = _checks(row)
        heading = [row.label, "+".join(row.components).upper()]
        table.add_row(
            *map(Text, heading if is_wide else ["\n".join(filter(None, heading))]),
            *(_cell(checks.get(name)) for name in shown),
            Text("yes", "green") if row.ok else Text("no", "red"),
        )
    return table


def _checks(row: Diagnosis) -> dict[str, Check]:
    return {check.name: check for check in row.report.checks} if row.report else {}


def _cell(check: Check | None) -> Text:
    from rich.text import Text

    if check is None:
        return Text("-")
    style = "" if check.ok else "red"
    if check.value is None:
        return Text("error", style)
    digits, _, exponent = f"{check.value:.0e}".partition("e")
    return Text(f"{digits}e{int(exponent)}" if exponent else digits, style)
