"""Options that several commands take, each declared once."""

from __future__ import annotations

from typing import Annotated

import typer

from agentcache.policy.eviction import POLICIES
from agentcache.types import BackendName
from agentcache.types import WeightFormat as WeightFormatName

__all__ = [
    "Adapter",
    "Backend",
    "Budget",
    "JsonFile",
    "Model",
    "Policy",
    "Threads",
    "Unproven",
    "WeightFormat",
]

Model = Annotated[str, typer.Option(help="Embedded model, folder, or downloaded Hub id.")]

Adapter = Annotated[
    str | None, typer.Option(help="Folder or Hub id of a LoRA adapter, merged into the model.")
]

Unproven = Annotated[
    bool,
    typer.Option(
        "--unproven", help="Admit a model for which warm = cold has not been proven, at your risk."
    ),
]

Backend = Annotated[
    BackendName,
    typer.Option(
        help="What computes the model: native, transformers, or auto, the native one where it is "
        "there and right."
    ),
]

WeightFormat = Annotated[
    WeightFormatName,
    typer.Option(
        help="What weights are kept as: unchanged, or int8, in a quarter of the memory of float32 "
        "and not quite the same."
    ),
]

Budget = Annotated[str, typer.Option(help='Bytes for the cache, such as "512MiB" or "2GB".')]

Policy = Annotated[str, typer.Option(help=f"Eviction policy: {', '.join(sorted(POLICIES))}.")]

Threads = Annotated[
    int | None, typer.Option(help="Threads to compute with; by default one per physical core.")
]

JsonFile = Annotated[
    str | None, typer.Option("--json", help="Write the results as JSON; - for standard output.")
]
