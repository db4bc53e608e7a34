"""The architectures that can be loaded: what their config.json says, and what of it is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.errors import ModelError
from pdserve.models.api import ExpertShape, LatentShape
from pdserve.ops.api import Routing

Raw = Mapping[str, Any]

# What may stand in config.json under a key for a model to be served, where the key is there at all.
_PLAIN = {
    "hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,), "quantization_config": (None,),
    "use_sliding_window": (False,), "partial_rotary_factor": (None, 1.0),
}  # fmt: skip
_DEEPSEEK = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)}


@dataclass(frozen=True, slots=True)
class Family:
    """Of one architecture; `head_norms`, `latents` and `experts` say which parts its layers are made of."""

    head_norms: bool = False
    latents: bool = False
    experts: bool = False
    default_head_dim: int | None = None


FAMILIES = {
    "LlamaForCausalLM": Family(),
    "Qwen3ForCausalLM": Family(head_norms=True, default_head_dim=128),
    "Qwen3MoeForCausalLM": Family(head_norms=True, experts=True),
    "DeepseekV3ForCausalLM": Family(latents=True, experts=True),
}


def family_of(raw: Raw, where: str) -> tuple[str, Family]:
    """Architecture and family. Raises ModelError for one that is not supported, or a setting that is not."""
    name = (raw.get("architectures") or ["(none named)"])[0]
    if name not in FAMILIES:
        raise ModelError(f"{where} is a {name}, which is not supported (supported: {', '.join(FAMILIES)})")
    family = FAMILIES[name]
    for key, allowed in (_PLAIN | (_DEEPSEEK if family.latents else {})).items():
        if raw.get(key, allowed[0]) not in (*allowed, None):
            raise ModelError(f"{where}/config.json: {key} {raw[key]!r} is not supported")
    if any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        raise ModelError(f"{where}/config.json: layer_types other than 'full_attention' are not supported")
    return str(name), family


def latent_shape(raw: Raw) -> LatentShape:
    """Raises KeyError; ModelError for widths that the kernels cannot take."""
    shape = LatentShape(
        rank=int(raw["kv_lora_rank"]),
        rope=int(raw["qk_rope_head_dim"]),
        nope=int(raw["qk_nope_head_dim"]),
        value=int(raw["v_head_dim"]),
        query_rank=int(raw["q_lora_rank"]) if raw.get("q_lora_rank") else None,
        interleaved=bool(raw.get("rope_interleave", True)),
    )
    for key, width in (("kv_lora_rank", shape.rank), ("qk_rope_head_dim", shape.rope)):
        if width % 16:
            raise ModelError(f"config.json: {key} {width} is not a multiple of 16")
    return shape


def expert_shape(raw: Raw, family: Family) -> ExpertShape | None:
    """None where no layer has experts. Raises KeyError; ModelError where the routing is impossible."""
    shape = _deepseek_experts(raw) if family.latents else _qwen_experts(raw)
    if not shape.count or not shape.layers:
        return None
    routing = shape.routing
    in_group = shape.count // routing.groups
    if shape.count % routing.groups or (routing.kept_groups < routing.groups and in_group < 2):
        raise ModelError(f"config.json: {shape.count} experts cannot form {routing.groups} groups of two or more")
    choosable = in_group * routing.kept_groups
    if not 1 <= routing.top_k <= choosable:
        raise ModelError(
            f"config.json: num_experts_per_tok {routing.top_k} does not fit: a token can choose among {choosable}"
        )
    return shape


def _qwen_experts(raw: Raw) -> ExpertShape:
    layers, step, dense = (
        int(raw["num_hidden_layers"]),
        int(raw.get("decoder_sparse_step", 1)),
        raw.get("mlp_only_layers"),
    )
    count = int(raw["num_experts"] if "num_experts" in raw else raw["num_local_experts"])
    return ExpertShape(
        count=count,
        intermediate=int(raw["moe_intermediate_size"]),
        shared_intermediate=0,
        routing=Routing(int(raw["num_experts_per_tok"]), normalise=bool(raw.get("norm_topk_prob", False))),
        layers=frozenset(i for i in range(layers) if i not in (dense or ()) and (i + 1) % step == 0),
        choice_bias=False,
    )


def _deepseek_experts(raw: Raw) -> ExpertShape:
    count = int(raw["n_routed_experts"] if "n_routed_experts" in raw else raw["num_local_experts"])
    intermediate, groups = int(raw["moe_intermediate_size"]), int(raw.get("n_group") or 1)
    return ExpertShape(
        count=count,
        intermediate=intermediate,
        shared_intermediate=intermediate * int(raw.get("n_shared_experts") or 0),
        routing=Routing(
            int(raw["num_experts_per_tok"]), True, groups, int(raw.get("topk_group") or groups),
            bool(raw.get("norm_topk_prob", True)), float(raw["routed_scaling_factor"]),
        ),
        layers=frozenset(range(int(raw["first_k_dense_replace"]), int(raw["num_hidden_layers"]))),
        choice_bias=True,
    )  # fmt: skip
