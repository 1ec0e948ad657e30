"""Hymba: attention heads and Mamba heads side by side in every layer, behind constant meta tokens.

Dong et al., "Hymba: A Hybrid-head Architecture for Small Language Models" (2024). One projection
feeds both kinds of heads; their outputs are normalised, averaged and projected back together. Most
layers attend within a window, and neighbouring ones share their keys and values.

The meta tokens stand in front of every sequence, see nothing of it, and every token sees them
whatever its window. So all they leave behind follows from the weights: keys and values per layer,
which attention takes beside those of the text, and the states the Mamba heads begin at. The model
counts positions of text only; rotary positions begin after the meta tokens.

For inference: the scans compute without gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep

from agentcache.engine.hymba.config import HymbaConfig
from agentcache.engine.hymba.mixer import Before, HymbaMixer, HymbaRMSNorm, Shared
from agentcache.engine.hymba.weights import register_names
from agentcache.errors import ModelError, UnsupportedModel

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

__all__ = ["HymbaForCausalLM", "HymbaModel"]


class HymbaMLP(nn.Module):
    """Gated by SiLU, or squared ReLU without a gate."""

    def __init__(self, config: HymbaConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = None
        if config.mlp_hidden_act == "silu":
            self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        up = F.relu(up).square() if self.gate_proj is None else F.silu(self.gate_proj(x)) * up
        out: Tensor = self.down_proj(up)
        return out


class HymbaLayer(nn.Module):
    """Heads, then an MLP, each behind a norm and added to what came in."""

    def __init__(self, config: HymbaConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = HymbaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer = HymbaMixer(config, layer_idx)
        self.post_mixer_layernorm = HymbaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = HymbaMLP(config)

    def forward(self, hidden: Tensor, before: Before, shared: Shared) -> Tensor:
        hidden = hidden + self.mixer(self.input_layernorm(hidden), before, shared)
        out: Tensor = hidden + self.mlp(self.post_mixer_layernorm(hidden))
        return out


class HymbaPreTrainedModel(PreTrainedModel):
    """Loading and initialisation."""

    config_class = HymbaConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _is_stateful = True

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As transformers', but no weight may be missing, left over or of another shape.

        Raises ModelError with the names.
        """
        kwargs["ignore_mismatched_sizes"] = True  # they are listed with the others
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        model, info = loaded
        wrong = {what: sorted(map(str, names)) for what, names in info.items() if names}
        if wrong:
            listed = "; ".join(f"{what}: {', '.join(names)}" for what, names in wrong.items())
            raise ModelError(f"the weights are not those of this Hymba config ({listed})")
        return (model, info) if output_loading_info else model

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]
        if isinstance(module, HymbaMixer):
            rates = torch.arange(1, self.config.mamba_d_state + 1, dtype=torch.float32).log()
            init.copy_(module.A_log, rates.expand_as(module.A_log))
            init.ones_(module.D)
        elif isinstance(module, HymbaModel) and module.meta_tokens is not None:
            init.normal_(module.meta_tokens)


class HymbaModel(HymbaPreTrainedModel):
    """Embeddings, layers and the last norm.

    before: what the meta tokens leave to each layer, once it is fixed; None: computed anew in every
    pass, so that it follows the weights.
    """

    def __init__(self, config: HymbaConfig) -> None:
        super().__init__(config)
        if config.unsupported is not None:
            raise UnsupportedModel(f"this hymba model is not supported: {config.unsupported}")
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.meta_tokens = None
        if config.num_memory_tokens:
            self.meta_tokens = nn.Parameter(
                torch.empty(config.num_memory_tokens, config.hidden_size)
            )
        self.layers = nn.ModuleList(
            HymbaLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)
        )
        self.norm = HymbaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.before: tuple[Before, ...] | None = None
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Sequences in a batch are of one length: a mask may hide nothing. Positions, and what a
        cache counts, are those of the text."""
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError("padded batches are not supported; pass sequences of one length")
        hidden: Tensor = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        start = 0 if cache is None else cache.get_seq_length()
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None] + start
        shared = Shared(
            cache,
            self._turns(position_ids + self.config.num_memory_tokens, hidden),
            {} if "agentcache" in kwargs else self._masks(start, hidden),
            {},
            kwargs,
        )
        before = self.before or self.read_meta_tokens()
        return BaseModelOutputWithPast(self.norm(self._through(hidden, before, shared)), cache)

    @property
    def mixers(self) -> list[HymbaMixer]:
        """The layers' heads."""
        return [layer.mixer for layer in self.layers if isinstance(layer, HymbaLayer)]

    def read_meta_tokens(self) -> tuple[Before, ...]:
        """What the meta tokens leave to each layer."""
        nothing = self._nothing()
        if self.meta_tokens is None:
            return (nothing,) * len(self.layers)
        cache = DynamicCache(config=self.config)
        hidden = self.meta_tokens[None]
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        seen = torch.ones(2 * positions.shape[1:], dtype=torch.bool, device=hidden.device).tril()
        windows = {mixer.window for mixer in self.mixers}
        masks = dict.fromkeys(windows, seen[None, None])
        shared = Shared(cache, self._turns(positions, hidden), masks, {}, {})
        self._through(hidden, (nothing,) * len(self.layers), shared)
        return tuple(self._left_behind(mixer, shared, cache) for mixer in self.mixers)

    def _left_behind(self, mixer: HymbaMixer, shared: Shared, cache: DynamicCache) -> Before:
        layer: Any = cache.layers[mixer.layer_idx]
        keys, values = (t[0].transpose(0, 1).contiguous() for t in shared.kv[mixer.producer])
        conv = layer.conv_states[0][0, :, 1 - self.config.mamba_d_conv :]
        return Before(keys, values, conv, layer.recurrent_states[0][0])

    def _nothing(self) -> Before:
        """What a layer finds where there are no meta tokens."""
        config, empty = self.config, self.embed_tokens.weight.new_zeros
        return Before(
            empty(0, config.num_key_value_heads, config.head_dim),
            empty(0, config.num_key_value_heads, config.value_dim),
            empty(config.inner_size, config.mamba_d_conv - 1),
            empty(config.inner_size, config.mamba_d_state, dtype=torch.float32),
        )

    def _through(self, hidden: Tensor, before: tuple[Before, ...], shared: Shared) -> Tensor:
        for layer, its_before in zip(self.layers, before, strict=True):
            hidden = layer(hidden, its_before, shared)
        return hidden

    def _turns(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines of rotary positions [B, T], in the dtype of `like`."""
        if not self.config.rope:
            return None
        width = self.config.head_dim
        steps = torch.arange(0, width, 2, device=like.device, dtype=torch.float32) / width
        angles = positions[:, None, :, None].float() * self.config.rope_base**-steps
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)

    def _masks(self, start: int, hidden: Tensor) -> dict[int | None, Tensor]:
        """By window, which of the keys [meta + text] each new token sees."""
        num_meta, stop = self.config.num_memory_tokens, start + hidden.shape[1]
        tokens = torch.arange(stop, device=hidden.device)
        distance = tokens[start:, None] - tokens
        masks: dict[int | None, Tensor] = {}
        for window in {mixer.window for mixer in self.mixers}:
            seen = distance >= 0
            if window is not None:
                seen &= distance < window
            masks[window] = F.pad(seen, (num_meta, 0), value=True)[None, None]
        return masks


class HymbaForCausalLM(HymbaPreTrainedModel, GenerationMixin):
    """The language model."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 (theirs)

    def __init__(self, config: HymbaConfig) -> None:
        super().__init__(config)
        self.model = HymbaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Next-token logits [B, T, vocab], of those tokens that `logits_to_keep` names."""
        out = self.model(
            input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache, **kwargs
        )
        hidden = slice_logits_to_keep(out.last_hidden_state, logits_to_keep)
        return CausalLMOutputWithPast(logits=self.lm_head(hidden), cache=out.cache)


AutoModelForCausalLM.register(HymbaConfig, HymbaForCausalLM, exist_ok=True)
register_names()
