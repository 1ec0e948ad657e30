"""The embedded hybrid models: their configs, and seeded weights with a long memory.

They compute honestly and answer noise. What matters is that an error shows. With the usual
initialisation a lost recurrent state vanishes below the rounding of the logits; here the decay
rates of a layer's heads are spread from a few tokens to tens of thousands, every branch of a layer
weighs as much as what it is added to, and the multipliers of the config differ from one. So a
token changed 8K tokens ago, or a state that is off by one token, moves the logits a thousand times
further than rounding does.
"""

from __future__ import annotations

import hashlib
import math
import re
import shutil
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor
from transformers import GenerationConfig, GraniteMoeHybridConfig

from agentcache.engine._model_folder import cache_home, ensure_folder
from agentcache.errors import ModelNotFound, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import GraniteMoeHybridForCausalLM

    _Rule = Callable[["_Draw"], Tensor]

__all__ = [
    "EMBEDDED_MODELS",
    "build",
    "hybrid_path",
    "small_hybrid_config",
    "tiny_hybrid_config",
    "tiny_hybrid_path",
]

_ASSETS = Path(__file__).with_name("assets")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_END_OF_TEXT_ID = 0
_PAD_ID = 3
_MAMBA_HEAD_DIM = 32
_MAMBA_EXPAND = 2

# Tokens after which the fastest and the slowest head of a Mamba-2 layer forget; heads between are
# spread evenly on a logarithmic scale.
_SHORTEST_MEMORY = 8.0
_LONGEST_MEMORY = 65536.0
# Strength of what a head writes; the same for all heads once their memory is full.
_WRITE_GAIN = 4.0
# Logits spread over a few units, so that sampling at temperature 1 is neither flat nor greedy.
_LOGIT_SCALE = 8.0


def tiny_hybrid_config() -> GraniteMoeHybridConfig:
    """`tiny-hybrid`: 4.5M parameters, six Mamba-2 layers and two attention layers."""
    return _config(
        hidden_size=192,
        num_layers=8,
        attention_layers=(2, 6),
        num_attention_heads=3,
        mlp_size=256,
        state_size=64,
    )


def small_hybrid_config() -> GraniteMoeHybridConfig:
    """`small-hybrid`: the same family at some 32M parameters, for benchmarks."""
    return _config(
        hidden_size=448,
        num_layers=12,
        attention_layers=(4, 9),
        num_attention_heads=7,
        mlp_size=896,
        state_size=128,
    )


EMBEDDED_MODELS: dict[str, Callable[[], GraniteMoeHybridConfig]] = {
    "tiny-hybrid": tiny_hybrid_config,
    "small-hybrid": small_hybrid_config,
}
"""Names `hybrid_path` knows, with their configs."""


def build(config: GraniteMoeHybridConfig, *, seed: int = 0) -> GraniteMoeHybridForCausalLM:
    """A float32 model in evaluation mode whose weights follow from config and seed alone.

    Every tensor is drawn from a hash of the seed and its own name: the same bits on any machine and
    in any order. The global random state of torch is left as it was.

    Raises `UnsupportedModel` for a config with parameters that no rule here covers (experts,
    attention biases).
    """
    # not at the top: a model that is written already needs none of transformers' modeling code
    from transformers import GraniteMoeHybridForCausalLM

    with torch.random.fork_rng(devices=[]):
        model = GraniteMoeHybridForCausalLM(config)
    module: torch.nn.Module = model
    module.float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            role = re.sub(r"^model\.(layers\.\d+\.)?", "", name)
            rule = _RULES.get(role)
            if rule is None:
                raise UnsupportedModel(
                    f"no rule to initialise {name}; build takes dense configs without attention "
                    "biases (num_local_experts=0, attention_bias=False)"
                )
            parameter.copy_(rule(_Draw(f"{seed}/{name}", tuple(parameter.shape), config)))
    return model


def tiny_hybrid_path(home: Path | None = None) -> Path:
    """The folder of `tiny-hybrid`, written on first use. See `hybrid_path`."""
    return hybrid_path("tiny-hybrid", home)


def hybrid_path(name: str, home: Path | None = None) -> Path:
    """The folder of an embedded model, for `from_pretrained`; written on first use.

    It lies below `home`, by default the user's cache directory (`$AGENTCACHE_HOME`, else
    `$XDG_CACHE_HOME/agentcache`, else `~/.cache/agentcache`). Its name carries a digest of all it
    follows from, so that another version of this package never loads it. A damaged folder is
    written anew, and processes may ask for the same model at once.

    Raises `ModelNotFound` for a name not in `EMBEDDED_MODELS`, `ModelError` if the folder cannot be
    written.
    """
    if name not in EMBEDDED_MODELS:
        raise ModelNotFound(
            f"no model of a seed {name!r}; there are {', '.join(sorted(EMBEDDED_MODELS))}"
        )
    config = EMBEDDED_MODELS[name]()
    folder = (home or cache_home()) / "models" / f"{name}-{_digest(config)}"
    return ensure_folder(folder, partial(_write_model, config))


def _write_model(config: GraniteMoeHybridConfig, folder: Path) -> None:
    model = build(config)
    # the parts of model.save_pretrained that matter here, without its progress bar
    config.architectures = [type(model).__name__]
    config.dtype = torch.float32
    config.save_pretrained(folder)
    GenerationConfig.from_dict(
        {"do_sample": False, "eos_token_id": _END_OF_TEXT_ID, "pad_token_id": _PAD_ID}
    ).save_pretrained(folder)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    for file in _TOKENIZER_FILES:
        shutil.copyfile(_ASSETS / file, folder / file)


def _digest(config: GraniteMoeHybridConfig) -> str:
    """Changes whenever the files of `_write_model` may: code, config, tokenizer, transformers."""
    digest = hashlib.sha256(version("transformers").encode())
    digest.update(config.to_json_string().encode())
    for path in (Path(__file__), *(_ASSETS / name for name in _TOKENIZER_FILES)):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _config(
    *,
    hidden_size: int,
    num_layers: int,
    attention_layers: tuple[int, ...],
    num_attention_heads: int,
    mlp_size: int,
    state_size: int,
) -> GraniteMoeHybridConfig:
    return GraniteMoeHybridConfig(
        vocab_size=8192,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        layer_types=[
            "full_attention" if layer in attention_layers else "linear_attention"
            for layer in range(num_layers)
        ],
        intermediate_size=mlp_size,
        shared_intermediate_size=mlp_size,
        num_local_experts=0,
        num_experts_per_tok=0,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=1,
        position_embedding_type="nope",
        max_position_embeddings=131072,
        mamba_n_heads=_MAMBA_EXPAND * hidden_size // _MAMBA_HEAD_DIM,
        mamba_d_head=_MAMBA_HEAD_DIM,
        mamba_d_state=state_size,
        mamba_n_groups=1,
        mamba_expand=_MAMBA_EXPAND,
        mamba_d_conv=4,
        # transformers' own scan is fastest on a CPU with short chunks
        mamba_chunk_size=64,
        tie_word_embeddings=True,
        # none is one, so that code which forgets a multiplier gives other logits
        embedding_multiplier=12.0,
        attention_multiplier=1 / 16,
        residual_multiplier=0.5,
        logits_scaling=4.0,
        bos_token_id=None,
        eos_token_id=_END_OF_TEXT_ID,
        pad_token_id=_PAD_ID,
    )


@dataclass(frozen=True, slots=True)
class _Draw:
    """One tensor to be drawn: the key its bits follow from, its shape, the model's config."""

    key: str
    shape: tuple[int, ...]
    config: Any  # transformers types every size as one that may be missing

    def uniform(self, deviation: float) -> Tensor:
        """Uniform around zero with the given standard deviation. Exact: no transcendentals."""
        num_values = math.prod(self.shape)
        bits = np.frombuffer(hashlib.shake_256(self.key.encode()).digest(4 * num_values), "<u4")
        unit = (bits >> 8).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
        return torch.from_numpy(unit * np.float32(math.sqrt(3) * deviation)).reshape(self.shape)


def _linear(gain: float) -> _Rule:
    """A projection [out, in] whose outputs deviate by `gain` where its inputs deviate by one."""
    return lambda draw: draw.uniform(gain / math.sqrt(draw.shape[1]))


def _around(mean: float, deviation: float) -> _Rule:
    """Values around `mean`: a weight that is applied twice, or not at all, gives other results."""
    return lambda draw: mean + draw.uniform(deviation)


def _embedding(draw: _Draw) -> Tensor:
    return draw.uniform(1 / draw.config.embedding_multiplier)


def _signs(draw: _Draw) -> Tensor:
    """Equal sizes, random signs: with tied embeddings a token would else best predict itself."""
    return torch.copysign(torch.full(draw.shape, _LOGIT_SCALE), draw.uniform(1.0))


def _in_proj(draw: _Draw) -> Tensor:
    """[gate, x, B, C, dt] by rows. Step sizes vary less, lest single tokens flush a head."""
    num_heads = draw.config.mamba_n_heads
    weight = _linear(1.0)(draw)
    weight[: num_heads * draw.config.mamba_d_head] *= 0.7
    weight[-num_heads:] *= 0.5
    return weight


def _head_memories(draw: _Draw) -> list[tuple[float, float]]:
    """Per head, memory in tokens and step size.

    A head that adds random terms of size dt and forgets after m tokens holds some dt * sqrt(m / 2):
    dt follows from m if all heads are to weigh the same in the norm that joins them.
    """
    num_heads = draw.shape[0]
    ratio = (_LONGEST_MEMORY / _SHORTEST_MEMORY) ** (1 / max(1, num_heads - 1))
    memories = [_SHORTEST_MEMORY * ratio**head for head in range(num_heads)]
    return [(memory, _WRITE_GAIN * math.sqrt(2 / memory)) for memory in memories]


def _rounded(values: list[float]) -> Tensor:
    """Rounding takes away the last bits, in which mathematical libraries differ."""
    return torch.tensor([round(value, 6) for value in values], dtype=torch.float32)


def _a_log(draw: _Draw) -> Tensor:
    """The decay per token is exp(-dt * exp(A_log)), that is exp(-1 / memory)."""
    return _rounded([-math.log(memory * step) for memory, step in _head_memories(draw)])


def _dt_bias(draw: _Draw) -> Tensor:
    """The inverse of the softplus that makes step sizes of it."""
    return _rounded([math.log(math.expm1(step)) for _, step in _head_memories(draw)])


_RULES: dict[str, _Rule] = {
    "embed_tokens.weight": _embedding,
    "input_layernorm.weight": _around(1.0, 0.2),
    "post_attention_layernorm.weight": _around(1.0, 0.2),
    "norm.weight": _signs,
    "mamba.in_proj.weight": _in_proj,
    # weak enough that the activation after it stays close to linear: a mean of one sign would pile
    # up in slow heads and drown what they remember
    "mamba.conv1d.weight": _around(0.0, 0.25),
    "mamba.conv1d.bias": _around(0.0, 0.05),
    "mamba.A_log": _a_log,
    "mamba.dt_bias": _dt_bias,
    "mamba.D": _around(0.25, 0.08),
    "mamba.norm.weight": _around(1.0, 0.2),
    "mamba.out_proj.weight": _linear(3.0),
    # queries against keys so sharp that some hundred of 8K tokens count, and the output as strong
    # as that average is weak
    "self_attn.q_proj.weight": _linear(2.0),
    "self_attn.k_proj.weight": _linear(2.0),
    "self_attn.v_proj.weight": _linear(1.0),
    "self_attn.o_proj.weight": _linear(6.0),
    "shared_mlp.input_linear.weight": _linear(1.0),
    "shared_mlp.output_linear.weight": _linear(2.0),
}
