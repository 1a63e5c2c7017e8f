"""Faults that a pass in C++ may have, planted after it has been built and before its self-check."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paradraft.formats.gguf_blocks import Products
from paradraft.models.architectures import head_size
from paradraft.models.forward.cpu.matrix import PackedMatrix
from paradraft.models.forward.cpu.model import NativePass
from paradraft.models.forward.cpu.self_check import text_for
from paradraft.models.quantized import QuantizedTensor
from paradraft.sources.gguf_model import row_order

Plant = Callable[[NativePass, PreTrainedModel], None]


def faulty(plant: Plant) -> type[NativePass]:
    """Passes with a fault."""

    class Faulty(NativePass):
        def _check(self, model: PreTrainedModel, probe: str | None) -> str:
            plant(self, model)
            return super()._check(model, probe)

    return Faulty


def numbers_of(native: NativePass, weight: Tensor) -> Tensor:
    """A weight as the pass has it, in float32."""
    if id(weight) not in native._weights._packed:
        return weight.float()
    matrix, first = native.packed(weight)
    return matrix.panels.numbers_of(first, len(weight))


def keep(native: NativePass, tensor: Tensor) -> int:
    return native._weights.keep(tensor).data_ptr()


def plain(native: NativePass, numbers: Tensor, bias: Tensor | None) -> Any:
    """A matrix of numbers, or of a weight as it is stored."""
    packed = PackedMatrix([numbers], [bias])
    native._weights.matrices.append(packed)
    return packed.matrix


def changed(native: NativePass, weight: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The numbers of a weight, changed; the weight itself if nothing is, so that its inputs are rounded as before."""
    numbers = numbers_of(native, weight)
    return weight if (result := change(numbers)) is numbers else result


def change_linear(native: NativePass, layer: Any, struct: Any, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Replaces a linear layer of the pass by one whose weights are changed."""
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    if name in ("q_proj", "k_proj", "v_proj"):
        found = []
        for each in projections:
            weight = changed(native, each.weight, change) if each is getattr(attention, name) else each.weight
            found.append(plain(native, weight, each.bias))
        struct.qkv = (type(found[0]) * 3)(*found)
        return
    linear, field = {
        "o_proj": (attention.o_proj, "output"), "gate_proj": (mlp.gate_proj, "gate"), "up_proj": (mlp.up_proj, "up"),
        "down_proj": (mlp.down_proj, "down"),
    }[name]  # fmt: skip
    setattr(struct, field, plain(native, changed(native, linear.weight, change), linear.bias))


def field(**changes: Callable[[Any], Any]) -> Plant:
    """Changes numbers of the struct."""

    def plant(native: NativePass, model: PreTrainedModel) -> None:
        for name, change in changes.items():
            setattr(native._model, name, change(getattr(native._model, name)))

    return plant


def linear(name: str, change: Callable[[PreTrainedModel, Tensor], Tensor], layer: int = 1) -> Plant:
    def plant(native: NativePass, model: PreTrainedModel) -> None:
        place, struct = model.model.layers[layer], native._model.layer[layer]
        change_linear(native, place, struct, name, lambda numbers: change(model, numbers))

    return plant


def base(factor: float) -> Plant:
    """Rotations with another base."""

    def plant(native: NativePass, model: PreTrainedModel) -> None:
        rotary: Any = copy.deepcopy(native._rotary)
        exponents = torch.arange(len(rotary.inv_freq)) / len(rotary.inv_freq)
        rotary.inv_freq *= factor**-exponents
        native._rotary, native._rotations = rotary, (torch.empty(0), torch.empty(0))

    return plant


def ids_swapped(native: NativePass, model: PreTrainedModel) -> None:
    first, second = text_for(model)[0][:2].tolist()
    numbers = numbers_of(native, model.get_input_embeddings().weight).clone()
    numbers[[first, second]] = numbers[[second, first]]
    native._model.embedding, native._model.embedding_bfloat16 = keep(native, numbers), None
    native._model.embedding_integers = None


def logit_raised(native: NativePass, model: PreTrainedModel, by: float = 3.0) -> None:
    bias = torch.zeros(len(model.lm_head.weight))
    bias[len(bias) // 3] = by
    native._model.head.bias = keep(native, bias)


def where_rounded(plant: Plant) -> Plant:
    """A fault of numbers of the struct, or of the head's bias, that exact passes do not have."""

    def planted(native: NativePass, model: PreTrainedModel) -> None:
        names = ("scale", "epsilon")
        right = [getattr(native._model, name) for name in names], native._model.head.bias
        plant(native, model)
        wrong = [getattr(native._model, name) for name in names], native._model.head.bias

        class RightIfExact(type(native)):  # type: ignore[misc]  # its class is known at run time only
            def __call__(self, *args: Any, **settings: Any) -> Any:
                fields, self._model.head.bias = right if self._model.is_exact else wrong
                for name, number in zip(names, fields, strict=True):
                    setattr(self._model, name, number)
                return super().__call__(*args, **settings)

        native.__class__ = RightIfExact

    return planted


def another_head(native: NativePass, model: PreTrainedModel) -> None:
    native._model.head = plain(native, numbers_of(native, model.lm_head.weight).roll(1, 0), model.lm_head.bias)


def norm(name: str, change: Callable[[Tensor], Tensor]) -> Plant:
    """Changes the weights of a norm."""

    def plant(native: NativePass, model: PreTrainedModel) -> None:
        layer = model.model.layers[1]
        attention = layer.self_attn
        whole: dict[str, Any] = {
            "norm": layer.input_layernorm, "post_attention_norm": layer.post_attention_layernorm,
            "query_norm": getattr(attention, "q_norm", None), "key_norm": getattr(attention, "k_norm", None),
        }  # fmt: skip
        if name == "final_norm":
            native._model.final_norm = keep(native, change(model.model.norm.weight.float()))
        else:
            setattr(native._model.layer[1], name, keep(native, change(whole[name].weight.float())))

    return plant


def offsets_ignored(native: NativePass, model: PreTrainedModel) -> None:
    """Of the first matrix whose groups have offsets."""
    for number, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        fields = {"output": attention.o_proj, "gate": mlp.gate_proj, "up": mlp.up_proj, "down": mlp.down_proj}
        for name, projection in fields.items():
            weight = projection.weight
            if isinstance(weight, QuantizedTensor) and (offsets := weight.parts[2]) is not None:
                nothing = (
                    Products(factors=torch.zeros_like(offsets.factors), numbers=offsets.numbers)
                    if isinstance(offsets, Products)
                    else torch.zeros_like(offsets)
                )
                changed = QuantizedTensor(*weight.parts[:2], nothing, bits=weight.bits, group=weight.group)
                setattr(native._model.layer[number], name, plain(native, changed, projection.bias))
                return
    raise AssertionError("no matrix has offsets")


def without_bias(index: int) -> Plant:
    """Of queries, keys or values."""

    def plant(native: NativePass, model: PreTrainedModel) -> None:
        attention, struct = model.model.layers[1].self_attn, native._model.layer[1]
        linears = [attention.q_proj, attention.k_proj, attention.v_proj]
        found = [
            plain(native, numbers_of(native, each.weight), None if place == index else each.bias)
            for place, each in enumerate(linears)
        ]
        struct.qkv = (type(found[0]) * 3)(*found)

    return plant


def one_position_off(native: NativePass, model: PreTrainedModel) -> None:
    rotate = native._rotate

    def further(positions: int) -> None:
        native._rotations = torch.empty(0), torch.empty(0)
        rotate(positions + 1)
        native._rotations = native._rotations[0][1:].contiguous(), native._rotations[1][1:].contiguous()

    native._rotate = further  # type: ignore[method-assign]


def swapped(left: str, right: str) -> Plant:
    """Two matrices of a layer."""

    def plant(native: NativePass, model: PreTrainedModel) -> None:
        struct = native._model.layer[1]
        kept = {name: bytes(getattr(struct, name)) for name in (left, right)}
        for name, other in ((left, right), (right, left)):
            ctypes.memmove(ctypes.byref(getattr(struct, name)), kept[other], len(kept[other]))

    return plant


def of_another_layer(name: str) -> Plant:
    def plant(native: NativePass, model: PreTrainedModel) -> None:
        setattr(native._model.layer[1], name, getattr(native._model.layer[0], name))

    return plant


def heads_swapped(model: PreTrainedModel, numbers: Tensor) -> Tensor:
    """The first two heads of keys or values."""
    size = head_size(model.config)
    return torch.cat([numbers[size : 2 * size], numbers[:size], numbers[2 * size :]])


def first_head_reversed(model: PreTrainedModel, numbers: Tensor) -> Tensor:
    size = head_size(model.config)
    return torch.cat([numbers[:size].flip(0), numbers[size:]])


def in_llama_order(model: PreTrainedModel, numbers: Tensor) -> Tensor:
    """Rows of keys as llama.cpp rotates them."""
    return numbers[row_order(model.config.num_key_value_heads, head_size(model.config)).argsort()]


def without_panel(model: PreTrainedModel, numbers: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(numbers[:16]), numbers[16:]])


def without_inputs(model: PreTrainedModel, numbers: Tensor) -> Tensor:
    return torch.cat([numbers[:, :-32], torch.zeros_like(numbers[:, -32:])], dim=1)


FAULTS: dict[str, Plant] = {
    "epsilon of 1e-4": field(epsilon=lambda _: 1e-4),
    "base times 0.9": base(0.9),
    "base times 0.99": base(0.99),
    "scores times 1.05": field(scale=lambda scale: scale * 1.05),
    "two ids swapped": ids_swapped,
    "3 added to a logit": logit_raised,
    "another head": another_head,
    "norm moved by a channel": norm("norm", lambda weight: weight.roll(1)),
    "final norm left out": norm("final_norm", torch.ones_like),
    "second norm of another layer": of_another_layer("post_attention_norm"),
    "rows of a head of queries reversed": linear("q_proj", first_head_reversed),
    "heads of values swapped": linear("v_proj", heads_swapped),
    "keys in llama.cpp's order": linear("k_proj", in_llama_order),
    "gate and up swapped": swapped("gate", "up"),
    "last layer skipped": field(layers=lambda layers: layers - 1),
    "one position off": one_position_off,
    "16 outputs not added": linear("o_proj", without_panel),
    "last block of inputs not added": linear("down_proj", without_inputs),
    "down projection of another layer": of_another_layer("down"),
}
WITH_BIASES = {
    "queries without bias": without_bias(0),
    "keys without bias": without_bias(1),
    "values without bias": without_bias(2),
}
WITH_OFFSETS = {"offsets ignored": offsets_ignored}
"""Of models whose weights of few bits have offsets."""
WITH_NORMS = {
    "queries without norm": norm("query_norm", torch.ones_like),
    "norm of keys moved by a channel": norm("key_norm", lambda weight: weight.roll(1)),
}


WHERE_ROUNDED = {
    "epsilon of 1e-4 where rounded": where_rounded(FAULTS["epsilon of 1e-4"]),
    "scores times 1.01 where rounded": where_rounded(field(scale=lambda scale: scale * 1.01)),
    "a quarter added to a logit where rounded": where_rounded(lambda native, model: logit_raised(native, model, 0.25)),
}
"""Faults of passes that round, which the exact mode does not have, and which are less than the rounding of a model."""


def faults_of(model_type: str) -> dict[str, Plant]:
    """The faults that models of a kind can have."""
    return FAULTS | (WITH_BIASES if model_type == "qwen2" else {}) | (WITH_NORMS if model_type == "qwen3" else {})


def unchanged(native: NativePass, model: PreTrainedModel) -> None:
    """No fault, planted in the same way."""
    linear("k_proj", lambda _, numbers: numbers)(native, model)
    linear("down_proj", lambda _, numbers: numbers)(native, model)
    norm("norm", lambda weight: weight)(native, model)
    base(1.0)(native, model)
