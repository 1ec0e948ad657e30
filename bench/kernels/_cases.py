"""What a case of a kernel's benchmark is, and the usual forms of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Case", "Form", "Outputs", "alone", "in_place", "moving", "pure"]

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """One way to compute an op: `run` is timed, `outputs` is what it computes, for the check."""

    run: Callable[[], Any]
    outputs: Callable[[], Outputs]


@dataclass(frozen=True, slots=True)
class Case:
    """An op at one shape: the form under test, the reference, and others to compare with."""

    name: str
    num_tokens: int
    ours: Form
    reference: Form
    others: dict[str, Form] = field(default_factory=dict)

    @property
    def forms(self) -> dict[str, Form]:
        """All of them by name, ours first."""
        return {"ours": self.ours, "reference": self.reference, **self.others}


def pure(run: Callable[[], Outputs]) -> Form:
    """A form that changes nothing."""
    return Form(run, run)


def alone(run: Callable[[], Tensor]) -> Form:
    """A form that changes nothing and gives one tensor."""
    return Form(run, lambda: (run(),))


def in_place(update: Callable[[Tensor], Tensor], state: Tensor) -> Form:
    """A form that changes a state: timed on one copy, checked on fresh ones."""

    def outputs() -> Outputs:
        fresh = state.clone()
        y = update(fresh)
        return y, fresh

    return Form(partial(update, state.clone()), outputs)


def moving(step: Callable[..., Tensor], **states: Tensor) -> Form:
    """A form that changes states: timed on one copy, checked on fresh ones."""

    def copies() -> dict[str, Tensor]:
        return {name: state.clone() for name, state in states.items()}

    def outputs() -> Outputs:
        moved = copies()
        y = step(**moved)
        return y, *moved.values()

    return Form(partial(step, **copies()), outputs)
