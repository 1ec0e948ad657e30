"""Write what a training left as the folder that is shipped.

python -m agentcache.engine.tiny.export TRAINED [--to FOLDER]
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save
from transformers import GenerationConfig

from agentcache.engine.embedded import AGENT_FOLDER
from agentcache.engine.tiny.model import agent_config

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["export", "main"]


def export(trained: Path, folder: Path) -> None:
    """Config, tokenizer, and weights in bfloat16, beside the template and the card that are there.

    They are computed with in float32, as the config says: two cores without bfloat16 of their own
    would take several times as long otherwise.
    """
    state = torch.load(trained / "checkpoint.pt", weights_only=True)
    config = agent_config()
    config.architectures = ["GraniteMoeHybridForCausalLM"]
    config.dtype = torch.float32
    config.save_pretrained(folder)
    GenerationConfig.from_dict(
        {
            "do_sample": False,
            "eos_token_id": config.eos_token_id,
            "pad_token_id": config.pad_token_id,
        }
    ).save_pretrained(folder)
    weights = save(_weights(state["model"]), metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(weights)
    shutil.copyfile(trained / "tokenizer.json", folder / "tokenizer.json")


def _weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the output head, which is the embedding."""
    return {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in state.items()
        if name != "lm_head.weight"
    }


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trained", type=Path, help="folder that train wrote")
    parser.add_argument("--to", type=Path, default=AGENT_FOLDER, help="folder to write to")
    args = parser.parse_args()
    if not (args.trained / "checkpoint.pt").is_file():
        parser.error(f"no checkpoint.pt in {args.trained}; give a folder that train wrote")
    export(args.trained, args.to)


if __name__ == "__main__":
    main()
