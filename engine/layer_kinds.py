"""What the layers of a loaded model compute, for estimates of cost: read off its matrices.

Their shapes say what a config says under another name in every family: which layers have experts,
whether a gate is joined to the queries, how wide a low-rank projection is. Where attention's
matrices have names that are not known here, the config's usual settings stand in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from torch import nn

from agentcache.types import LayerKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentcache.engine.families.base import KeptLayer
    from agentcache.pools.layout import KVSpec, StateSpec
    from agentcache.types import Mixer

__all__ = ["layer_kinds"]


def layer_kinds(
    model: nn.Module, config: Any, mixer: Mixer, layers: tuple[KeptLayer, ...]
) -> tuple[LayerKind, ...]:
    """The mixers of every layer in order; of several in one the first is followed by its MLP.

    config: of the text model. mixer: what its state layers compute. layers: what each keeps.
    """
    modules = _decoder_layers(model, len(layers))
    out: list[LayerKind] = []
    attends: dict[int, LayerKind] = {}
    for layer_idx, kept in enumerate(layers):
        matrices = _Matrices.of(modules[layer_idx], config.hidden_size) if modules else None
        kinds = []
        if kept.states and not kept.parts:
            kinds.append(_recurrence(mixer, kept.states, matrices))
        attention = _attention(config, layer_idx, kept.kv, matrices, attends)
        if attention is not None:
            kinds.append(attention)
        first, *others = kinds or [LayerKind("none", num_heads=0, head_dim=0)]
        out += [_with_mlp(first, config, matrices), *others]
    return tuple(out)


def _decoder_layers(model: nn.Module, num: int) -> nn.ModuleList | None:
    """The largest list of `num` modules in the model; None if there is none."""
    lists = [
        each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == num
    ]
    sizes = [sum(weight.numel() for weight in each.parameters()) for each in lists]
    return lists[sizes.index(max(sizes))] if lists else None


@dataclass(frozen=True, slots=True)
class _Matrices:
    """Shapes of one layer's weights by name, without "weight" at the end of it; and the width of
    the model."""

    shapes: Mapping[str, tuple[int, ...]]
    hidden_dim: int

    @classmethod
    def of(cls, module: nn.Module, hidden_dim: int) -> _Matrices:
        names = ((_stem(name), weight) for name, weight in module.named_parameters())
        return cls({name: tuple(each.shape) for name, each in names if each.dim() > 1}, hidden_dim)

    def find(self, *leaves: str) -> tuple[int, ...] | None:
        """Shape of the first matrix that has one of these names, in the order of these."""
        found = (shape for leaf in leaves for shape in self._named(leaf).values())
        return next(found, None)

    def columns(self, *leaves: str) -> int:
        """Rows of what `find` finds, which is how many columns it computes; 0 if nothing."""
        return (self.find(*leaves) or (0,))[0]

    def _named(self, leaf: str) -> dict[str, tuple[int, ...]]:
        return {
            name: shape
            for name, shape in self.shapes.items()
            if name.rsplit(".", 1)[-1] == leaf and not _is_indexer(name)
        }

    def mlp(self, num_chosen: int) -> tuple[int, int, int]:
        """(width of all experts a token visits, matrices, columns of what chooses experts)."""
        width, gated = 0, False
        for name, shape in self.shapes.items():
            parent, _, leaf = name.rpartition(".")
            is_down = leaf in _DOWN and "attn" not in parent and not self._is_router(name)
            if not is_down or self.hidden_dim not in shape[-2:]:
                continue
            one = prod(shape[-2:]) // self.hidden_dim
            num = 1 if len(shape) == 2 else shape[0]
            is_choice = len(shape) == 3 and "shared" not in parent
            width += one * (num_chosen if is_choice else num)
            gated |= any(f"{parent}.{gate}" in self.shapes for gate in _GATE)
        columns = sum(
            shape[0]
            for name, shape in self.shapes.items()
            if self._is_router(name) and shape[-1] == self.hidden_dim
        )
        return width, 3 if gated or not width else 2, columns

    @staticmethod
    def _is_router(name: str) -> bool:
        return not _ROUTERS.isdisjoint(name.split("."))

    def other_columns(self, input_dim: int) -> int:
        """Columns of what stands beside the usual projections of attention and reads its input."""
        output = next((name for leaf in _OUTPUT for name in self._named(leaf)), None)
        if output is None:
            return 0
        room = output.rsplit(".", 1)[0] + "."
        return sum(
            shape[0]
            for name, shape in self.shapes.items()
            if name.startswith(room)
            and len(shape) == 2
            and shape[1] == input_dim
            and name.rsplit(".", 1)[-1] not in _USUAL
        )


_DOWN = ("down_proj", "output_linear", "w2", "fc2", "c_proj", "dense_4h_to_h")
_GATE = ("gate_proj", "gate_up_proj", "input_linear", "w3")
_ROUTERS = {"router", "gate", "shared_expert_gate"}
_OUTPUT = ("o_proj", "out_proj", "o_b_proj")
_VALUES = {"v_proj", "v_proj_current", "v_proj_delayed"}
_LATENT = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "kv_proj"}
_USUAL = {"q_proj", "k_proj", "o_a_proj", *_OUTPUT, *_VALUES, *_LATENT}


def _stem(name: str) -> str:
    """A weight's name without what says that it is one."""
    for ending in (".weight", "_weight", ".linear"):
        name = name.removesuffix(ending)
    return name


def _is_indexer(name: str) -> bool:
    return "indexer" in name or "compressor" in name


def _with_mlp(layer: LayerKind, config: Any, matrices: _Matrices | None) -> LayerKind:
    num_chosen = _named(config, "num_experts_per_tok", "num_experts_per_token")
    if matrices is None:
        return replace(layer, mlp_dim=_usual_mlp_dim(config, num_chosen))
    width, num_matrices, columns = matrices.mlp(num_chosen)
    return replace(layer, mlp_dim=width, mlp_matrices=num_matrices, router_dim=columns)


def _usual_mlp_dim(config: Any, num_chosen: int) -> int:
    """Width of a layer's MLP by the usual settings, experts that one token visits together."""
    dense = _named(config, "intermediate_size")
    if not _named(config, "num_local_experts", "num_experts", "n_routed_experts"):
        return _named(config, "shared_intermediate_size") or dense
    shared = _named(config, "shared_intermediate_size", "shared_expert_intermediate_size")
    return shared + num_chosen * (_named(config, "moe_intermediate_size") or dense)


def _named(config: Any, *names: str) -> int:
    """The first of a config's settings that says something, of a list the largest; else 0."""
    value = next((v for v in (getattr(config, name, None) for name in names) if v), 0)
    return int(max(value) if isinstance(value, (list, tuple)) else value)


def _attention(
    config: Any,
    layer_idx: int,
    kv: KVSpec | None,
    matrices: _Matrices | None,
    attends: dict[int, LayerKind],
) -> LayerKind | None:
    """The layer's attention, if it has any. attends: that of earlier layers with KV; is added to.

    A layer without KV may read that of an earlier one.
    """
    if kv is None:
        source = attends.get(_source(config, layer_idx, matrices, attends))
        return None if source is None else replace(source, num_kv_heads=0)
    attends[layer_idx] = _latent(config, matrices) or _own_attention(config, kv, matrices)
    return attends[layer_idx]


def _source(
    config: Any, layer_idx: int, matrices: _Matrices | None, attends: Mapping[int, LayerKind]
) -> int:
    """Index of the layer whose KV a layer without its own reads; -1: it does not attend."""
    if hasattr(config, "producer_of"):
        return int(config.producer_of(layer_idx))
    types = getattr(config, "layer_types", None)
    if types is None or matrices is None or matrices.find("q_proj") is None:
        return -1
    return max((i for i in attends if types[i] == types[layer_idx]), default=-1)


def _own_attention(config: Any, kv: KVSpec, matrices: _Matrices | None) -> LayerKind:
    value_dim = kv.value_width or kv.head_dim  # where there are no values, keys are the values
    num_heads, gate_dim, input_dim, query_rank = int(config.num_attention_heads), 0, 0, 0
    query = output = None
    if matrices is not None:
        query, output = matrices.find("q_proj", "q_b_proj"), matrices.find("o_proj")
        query_rank = matrices.columns("q_a_proj")
    if output is not None:
        num_heads = output[-1] // value_dim
    if matrices is not None and query is not None:
        reads = matrices.hidden_dim if query_rank else query[-1]
        input_dim = 0 if reads == matrices.hidden_dim else reads
        joined = max(0, query[0] - num_heads * kv.head_dim)
        gate_dim = joined + matrices.other_columns(reads)
    return LayerKind(
        "attention",
        num_heads=num_heads,
        head_dim=kv.head_dim,
        num_kv_heads=kv.num_kv_heads,
        window=kv.window,
        value_dim=0 if value_dim == kv.head_dim else value_dim,
        gate_dim=gate_dim,
        input_dim=input_dim,
        query_rank=query_rank,
    )


def _latent(config: Any, matrices: _Matrices | None) -> LayerKind | None:
    """Attention over a compressed KV; None where it is not."""
    if matrices is None or matrices.find("kv_b_proj") is None:
        return None
    rope_dim = _named(config, "qk_rope_head_dim")
    head_dim = _named(config, "qk_nope_head_dim") + rope_dim
    value_dim = _named(config, "v_head_dim")
    return LayerKind(
        "attention",
        num_heads=int(config.num_attention_heads),
        head_dim=head_dim,
        num_kv_heads=1,
        value_dim=0 if value_dim == head_dim else value_dim,
        gate_dim=matrices.other_columns(matrices.hidden_dim),
        query_rank=matrices.columns("q_a_proj"),
        kv_rank=_named(config, "kv_lora_rank"),
        rope_dim=rope_dim,
    )


def _recurrence(
    mixer: Mixer, states: tuple[StateSpec, ...], matrices: _Matrices | None
) -> LayerKind:
    sizes = {spec.name: spec.shape for spec in states}
    conv = sizes.get("conv", (0, 0))
    channels, conv_width = conv[0], conv[-1] + 1
    state = sizes.get("recurrent", ())
    if mixer == "mamba2" and len(state) == 2:
        mixer = "mamba1"  # what is assumed of a family that is not known, but here are no heads
    if len(state) == 3:
        heads, first, second = state
        head_dim, state_dim = (second, first) if mixer == "delta" else (first, second)
        shared = max(0, channels - heads * head_dim) // (2 * state_dim)
        groups = shared if channels else heads  # without a convolution no width tells of them
    else:
        heads, head_dim, groups = (state or (channels,))[0], 1, 0
        state_dim = state[1] if len(state) == 2 else 0
    layer = LayerKind(
        mixer=mixer,
        num_heads=heads,
        head_dim=head_dim,
        state_dim=state_dim,
        num_groups=groups,
        conv_width=conv_width,
    )
    return layer if matrices is None else _with_projections(layer, matrices)


def _with_projections(layer: LayerKind, matrices: _Matrices) -> LayerKind:
    """The layer with what its states' shapes do not tell."""
    if layer.mixer == "mamba1":
        through = matrices.find("dt_proj", "input_gate")
        return replace(layer, gate_rank=through[-1] if through else 0, num_groups=0)
    if layer.mixer == "delta":
        return replace(
            layer,
            gate_rank=matrices.columns("f_a_proj"),
            decay_dim=matrices.columns("f_b_proj", "f_proj"),
        )
    if layer.mixer == "conv":
        channels = layer.num_heads * layer.head_dim
        return replace(layer, num_groups=matrices.columns("in_proj") // max(1, channels))
    return layer
