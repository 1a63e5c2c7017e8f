"""Runs the model's own passes over a whole text, as they are and with finer products.

The reference is the Hugging Face model's plain forward pass: all tokens at once, without our cache, masks, positions,
compiled passes or C++. The rounding of a dtype, for a model and a text, is measured without the engine: the same pass
is made again with its products in another dtype, and the difference is what the coarser of the two dtypes rounds away.
The tests of FlashAttention bound errors in the same way: by a multiple of the error that PyTorch's own attention makes
in that dtype (https://github.com/Dao-AILab/flash-attention, `tests/test_flash_attn.py`).

Shape letters: N tokens of an answer, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from paradraft.audit.recording import Case, NotNumbersError, Recording, are_numbers
from paradraft.models.architectures import spec_of
from paradraft.models.causal_lm import CausalLM
from paradraft.models.quantized import QuantizedTensor, numbers_of

MEASURED = 8
"""Answers over which the rounding of a dtype is measured; two passes over a whole text each."""
LARGEST_FACTORS = {torch.float64: 8.0, torch.float32: 8.0, torch.float16: 4.0, torch.bfloat16: 4.0}
"""Bound on the largest difference between the engine and the model's own pass, times the rounding of the dtype. Correct
passes of random models stayed below 2.7 in float32 and 1.4 in 16 bits. A fault is far larger than rounding in float32,
so a larger bound costs nothing there."""
TYPICAL_FACTOR = 3.0
"""The same for the root mean square, which was at most 1.4."""
MOST_TYPICAL = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 0.0125, torch.bfloat16: 0.1}
"""Bound on the root mean square, in standard deviations of the logits, by the dtype that passes round to; float16 has 3
more bits than bfloat16."""
MOST_LARGEST = 10.0
"""Bound on the largest difference, times `MOST_TYPICAL`."""
OTHER_DTYPE = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float64,
    torch.float64: torch.float32,
}
"""The dtype of the products of the second pass. Nothing is finer than float64, whose norms and rotations
`transformers` computes in float32 anyway: there the rounding of float32 is the measure."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Difference between two sets of logits, over all positions and tokens; infinite where a side is not a number."""

    largest: float
    root_mean_square: float

    def within(self, other: Difference) -> bool:
        """Whether neither figure exceeds the other's."""
        return self.largest <= other.largest and self.root_mean_square <= other.root_mean_square

    def times(self, largest: float, root_mean_square: float) -> Difference:
        """Each figure times its own factor."""
        return Difference(largest=self.largest * largest, root_mean_square=self.root_mean_square * root_mean_square)

    def plus(self, other: Difference) -> Difference:
        """The sum of each figure."""
        return Difference(
            largest=self.largest + other.largest, root_mean_square=self.root_mean_square + other.root_mean_square
        )

    def at_most(self, other: Difference) -> Difference:
        """The smaller of each figure."""
        return Difference(
            largest=min(self.largest, other.largest),
            root_mean_square=min(self.root_mean_square, other.root_mean_square),
        )

    def __str__(self) -> str:
        return f"{self.largest:.2g} (root mean square {self.root_mean_square:.2g})"


@torch.no_grad()
def own_logits(
    lm: CausalLM, case: Case, answer: Recording, *, dtype: torch.dtype | None = None, all_rows: bool = False
) -> Tensor:
    """The logits `[N, V]` by which the model itself would choose each token of an answer.

    Args:
        lm: only its model is used, neither its cache nor its passes.
        dtype: of the products; None for the model's.
        all_rows: whether padding rows of the output head, which are no tokens, keep their logits.

    Raises:
        NotNumbersError: the model's logits are not numbers.
    """
    text = torch.tensor([[*case.prompt, *answer.tokens[:-1]]], device=lm.device)
    with nullcontext() if dtype is None else _products_in(dtype, lm.model):
        logits_NV = lm.model(text, use_cache=False, logits_to_keep=len(answer.tokens)).logits[0]
    allowed_NV = lm.allowed(logits_NV)  # in place
    logits_NV = logits_NV if all_rows else allowed_NV
    if not bool((is_finite_N := are_numbers(logits_NV)).all()):
        raise NotNumbersError(case, int(is_finite_N.int().argmin()), "in the model's own pass")
    return logits_NV


def difference(a_NV: Tensor, b_NV: Tensor) -> Difference:
    """Difference of logits `[N, V]`; forbidden tokens, -inf on both sides, are equal.

    >>> difference(torch.tensor([[1.0, 0.0, 0.0, -torch.inf]]), torch.tensor([[5.0, 0.0, 0.0, -torch.inf]]))
    Difference(largest=4.0, root_mean_square=2.0)
    """
    differences_NV = torch.where(a_NV == b_NV, 0.0, (a_NV.double() - b_NV.double()).abs()).nan_to_num(nan=torch.inf)
    return Difference(
        largest=float(differences_NV.max()), root_mean_square=float(differences_NV.square().mean().sqrt())
    )


def over_all(parts: Sequence[Difference]) -> Difference:
    """Over all answers, with equal weights, because they have the same number of tokens or nearly so."""
    squares = [part.root_mean_square**2 for part in parts]
    return Difference(
        largest=max(part.largest for part in parts), root_mean_square=math.sqrt(sum(squares) / len(squares))
    )


def can_compute_otherwise(lm: CausalLM) -> bool:
    """Whether `OTHER_DTYPE` is possible: Apple's GPUs have no float64, and some quantized weights only one dtype."""
    has_dtype = lm.device.type != "mps" or OTHER_DTYPE[lm.model.dtype] != torch.float64
    return has_dtype and all(_is_plain(weight) or hasattr(weight, "dequantize") for weight in lm.model.parameters())


def rounded_to(lm: CausalLM) -> torch.dtype:
    """The dtype that passes round to; products with weights of few bits round about as bfloat16 does."""
    has_few_bits = any(isinstance(weight, QuantizedTensor) for weight in lm.model.parameters())
    return torch.bfloat16 if has_few_bits else lm.model.dtype


def limit_of(lm: CausalLM, variances: Sequence[float]) -> Difference:
    """The largest difference that may be called rounding, whatever is measured: a share of the logits' deviation."""
    typical = MOST_TYPICAL[rounded_to(lm)] * math.sqrt(sum(variances) / max(len(variances), 1))
    return Difference(largest=MOST_LARGEST * typical, root_mean_square=typical)


def explained_by(lm: CausalLM, rounding: Sequence[Difference]) -> Difference:
    """The difference between correct passes that rounding explains: a multiple of what was measured."""
    return over_all(rounding).times(LARGEST_FACTORS[rounded_to(lm)], TYPICAL_FACTOR)


def _is_plain(weight: Tensor) -> bool:
    return type(weight) in (Tensor, nn.Parameter)


@contextmanager
def _products_in(dtype: torch.dtype, model: PreTrainedModel) -> Iterator[None]:
    """Makes a model's products in this dtype; experts run one by one, because grouped ones use the weights' dtype."""
    before = model.get_experts_implementation()
    if spec_of(model.config).has_experts:
        model.set_experts_implementation("eager")
    try:
        with _ProductsIn(dtype, model.dtype):
            yield
    finally:
        if spec_of(model.config).has_experts:
            model.set_experts_implementation(before)


class _ProductsIn(TorchFunctionMode):
    """Makes the products of linear layers in another dtype, one weight at a time: no second model is in memory.

    Between the products activations have the finer of the two dtypes.
    """

    def __init__(self, dtype: torch.dtype, own: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.between = torch.promote_types(dtype, own)

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """See `TorchFunctionMode`."""
        if func is linear:
            return self._linear(*args, **(kwargs or {}))
        output = func(*args, **(kwargs or {}))
        return output.to(self.between) if func is embedding else output

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        whole: Any = weight
        if isinstance(weight, QuantizedTensor):  # whose own product rounds the inputs
            whole = numbers_of(weight.parts, weight.group)
        elif not _is_plain(weight):  # torchao multiplies whole numbers and scales in float32 at most
            whole = whole.dequantize(output_dtype=torch.float32)
        whole = whole.to(self.dtype)
        output = linear(input.to(self.dtype), whole, None if bias is None else bias.to(self.dtype))
        return output.to(self.between)
