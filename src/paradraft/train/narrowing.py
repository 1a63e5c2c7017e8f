"""Fewer neurons in the MLPs of a model: those are kept whose weights are largest."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel


@torch.no_grad()
def narrow(model: PreTrainedModel, size: int) -> None:
    """Keeps in every layer's MLP the neurons that can write most, and drops the others.

    A neuron writes down · silu(gate · x) · (up · x), so the product of the three norms bounds what it
    writes for inputs of norm 1. No text is needed for that, and training mends what the others leave.

    Args:
        model: with gated MLPs, as Llama and Qwen have; changed in place, its config too.
        size: neurons to keep in each layer, at most as many as there are.
    """
    for layer in model.model.layers:
        mlp, scale = layer.mlp, layer.post_attention_layernorm.weight.float()
        gates, ups = ((linear.weight.float() * scale).norm(dim=1) for linear in (mlp.gate_proj, mlp.up_proj))
        writes = gates * ups * mlp.down_proj.weight.float().norm(dim=0)
        kept = writes.topk(size).indices.sort().values
        for linear in (mlp.gate_proj, mlp.up_proj):
            linear.weight, linear.out_features = nn.Parameter(linear.weight[kept]), size
            if linear.bias is not None:
                linear.bias = nn.Parameter(linear.bias[kept])
        mlp.down_proj.weight, mlp.down_proj.in_features = nn.Parameter(mlp.down_proj.weight[:, kept]), size
        if hasattr(mlp, "intermediate_size"):
            mlp.intermediate_size = size
    model.config.intermediate_size = size
