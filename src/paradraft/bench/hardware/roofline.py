"""Roofline model: the floor of a pass, which no machine with this bandwidth and this matrix unit can beat.

A pass must read its weights and the keys and values of all earlier tokens, write those of the new ones, and multiply.
In the last layer only tokens whose logits are wanted need more than keys and values. It takes at least
max(bytes / bandwidth, operations / rate). What could stay in registers is not counted: activations, logits, the mask.
So a floor is never too high, with one exception: every row of a batch counts as many earlier tokens as the longest.

Bandwidth is that of reading, again and again, as many bytes as the model's weights have. Where these fit into a cache
it is the cache's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paradraft.bench.hardware.bandwidth import Speeds
from paradraft.core import Drafter
from paradraft.models.architectures import head_size, spec_of
from paradraft.models.causal_lm import CausalLM, Pass
from paradraft.models.quantization import stored_bytes
from paradraft.models.quantized import QuantizedTensor

Passes = dict[str, Counter[Pass]]
"""Passes of each model by its part: "target", or "draft"."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Lower bounds of the cost of passes; a multiplication with its addition is two `flops`."""

    bytes: int
    flops: int
    floor_s: float


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of a model, by which its passes are counted.

    Args:
        body_weights: weights of all layers that multiply.
        last_bytes: weights of the last layer that make neither keys nor values.
        row_bytes: of a token's embedding.
        kv_bytes: keys and values of a token, all layers.
        attended: products of a new token with an earlier one, in one layer: scores and weighted values.
        dtype: of its products: int8 where weights of few bits are on a CPU, whose passes round inputs to 8 bits too.
    """

    body_bytes: int
    body_weights: int
    last_bytes: int
    last_weights: int
    head_bytes: int
    head_weights: int
    row_bytes: int
    kv_bytes: int
    attended: int
    layers: int
    dtype: torch.dtype

    @classmethod
    def of(cls, model: PreTrainedModel, bytes_of: Callable[[Tensor], int] = stored_bytes) -> Size:
        """The size of a causal LM.

        A tied embedding counts as the head; of the experts of a layer, those that one token uses count.
        """
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        body = [weight for weight in model.parameters() if weight is not embedding and weight is not head]
        base: Any = model.base_model
        last = [
            weight
            for name, weight in base.layers[-1].named_parameters()
            if weight.ndim >= 2 and "k_proj" not in name and "v_proj" not in name
        ]
        rounds_inputs = head.device.type == "cpu" and any(
            isinstance(weight, QuantizedTensor) for weight in [*body, head]
        )
        config, per_head = model.config, head_size(model.config)
        experts = config.num_experts_per_tok / config.num_experts if spec_of(config).has_experts else 1.0

        def total(weights: list[Tensor], size: Callable[[Tensor], int]) -> int:
            return sum(round(size(weight) * experts) if weight.ndim == 3 else size(weight) for weight in weights)

        return cls(
            body_bytes=total(body, bytes_of),
            body_weights=total([weight for weight in body if weight.ndim >= 2], Tensor.numel),
            last_bytes=total(last, bytes_of),
            last_weights=total(last, Tensor.numel),
            head_bytes=bytes_of(head),
            head_weights=head.numel(),
            row_bytes=stored_bytes(embedding) // len(embedding),
            kv_bytes=2 * config.num_hidden_layers * per_head * config.num_key_value_heads * model.dtype.itemsize,
            attended=2 * per_head * config.num_attention_heads,
            layers=config.num_hidden_layers,
            dtype=torch.int8 if rounds_inputs else model.dtype,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a decoding pass reads."""
        return self.body_bytes + self.head_bytes

    def cost(self, step: Pass, speeds: Speeds) -> Cost:
        """The bytes, operations and floor of a pass."""
        new, wanted = step.rows * step.tokens, step.rows * step.logits
        read = self.body_bytes + (self.head_bytes if wanted else -self.last_bytes) + new * self.row_bytes
        read += step.rows * (step.context + step.tokens) * self.kv_bytes
        # The i-th of N new tokens attends to the earlier ones, itself and i - 1 others; the last ones are wanted.
        attended = step.rows * sum(step.context + i + 1 for i in range(step.tokens))
        attended_by_wanted = step.rows * sum(step.context + step.tokens - i for i in range(step.logits))
        products = new * (self.body_weights - self.last_weights) + wanted * (self.last_weights + self.head_weights)
        products += ((self.layers - 1) * attended + attended_by_wanted) * self.attended
        floor_s = max(read / speeds.bytes_per_s(self.weight_bytes), 2 * products / speeds.flops_per_s(self.dtype))
        return Cost(bytes=read, flops=2 * products, floor_s=floor_s)


def models_of(target: CausalLM, drafter: Drafter) -> dict[str, CausalLM]:
    """The models of a method, target first; a drafter may have none."""
    names = ["draft", *(f"draft {index}" for index in range(2, len(drafter.models) + 1))]
    return {"target": target} | dict(zip(names, drafter.models, strict=False))


def passes_of(models: dict[str, CausalLM]) -> Passes:
    """The passes of the models since the answer began."""
    return {name: lm.passes for name, lm in models.items()}


def plain_passes(rows: int, prompt_tokens: int, new_tokens: int) -> Passes:
    """The passes of decoding with a KV cache and without a draft.

    >>> [step.tokens for step in plain_passes(1, 7, 3)["target"]]
    [7, 1, 1]
    """
    first = Pass(rows=rows, tokens=prompt_tokens, logits=1, context=0)
    later = [Pass(rows=rows, tokens=1, logits=1, context=prompt_tokens + i) for i in range(new_tokens - 1)]
    return {"target": Counter([first, *later])}


def speeds_for(models: list[CausalLM]) -> Speeds:
    """The speeds that the floors of these models need, measured once."""
    sizes = [Size.of(lm.model, lm.weight_bytes) for lm in models]
    speeds = Speeds(models[0].device, {size.weight_bytes for size in sizes}, {size.dtype for size in sizes})
    speeds.measure()
    return speeds


def added(parts: list[Passes]) -> Passes:
    """The passes of several answers together; none if those of one answer are unknown."""
    names = parts[0] if all(parts) else ()
    return {name: sum((part[name] for part in parts), Counter[Pass]()) for name in names}


def total(passes: Counter[Pass], size: Size, speeds: Speeds) -> Cost:
    """The sum over passes of one model."""
    costs = [(size.cost(step, speeds), count) for step, count in passes.items()]
    return Cost(
        bytes=sum(cost.bytes * count for cost, count in costs),
        flops=sum(cost.flops * count for cost, count in costs),
        floor_s=math.fsum(cost.floor_s * count for cost, count in costs),
    )


def decoding_passes(passes: Counter[Pass]) -> int:
    """Passes that gave logits, and not only keys and values."""
    return sum(count for step, count in passes.items() if step.logits)


def reached(
    passes: Passes, sizes: dict[str, Size], speeds: Speeds, *, total_s: float, prefill_s: float | None
) -> dict[str, Any]:
    """The share of the floor that a method reaches: the floor of all its passes over the time it took.

    Returns:
        `floor_s` and `share_of_floor` with all prefill; `decode_floor_s` and `decode_share_of_floor` without the
        target's (a drafter reads its prompts while it drafts); `floor_of` the bytes, operations, floor and decoding
        passes by model. All are None if the passes are unknown, those of decoding if the prefill time is.
    """
    if not passes:
        return dict.fromkeys(("floor_s", "share_of_floor", "decode_floor_s", "decode_share_of_floor", "floor_of"))
    of_model = {name: total(counts, sizes[name], speeds) for name, counts in passes.items()}
    floor_s = math.fsum(cost.floor_s for cost in of_model.values())
    prompts = Counter({step: count for step, count in passes["target"].items() if not step.logits})
    decode_floor_s = floor_s - total(prompts, sizes["target"], speeds).floor_s
    return {
        "floor_s": floor_s,
        "share_of_floor": floor_s / total_s,
        "decode_floor_s": None if prefill_s is None else decode_floor_s,
        "decode_share_of_floor": None if prefill_s is None else decode_floor_s / (total_s - prefill_s),
        "floor_of": {name: asdict(cost) | {"passes": decoding_passes(passes[name])} for name, cost in of_model.items()},
    }
