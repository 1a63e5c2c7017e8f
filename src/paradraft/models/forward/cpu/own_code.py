"""The model's own code as the self-check runs it: in float32, and with the roundings of a pass in C++, layer by layer.

A text is read in five or eight rows at once. All compute in float32:

1. as the model's own code does;
2. to 5., the same, with the operands of products moved by the rounding error of a float32 sum;
6. each layer from the state that the pass in C++ has before it;
7. the same, with inputs of products rounded as in the pass, and the pass's keys and values;
8. the same as 7, moved as 2 is, so that some roundings flip.

Shape letters: R rows, N tokens, V vocabulary, K inputs of a matrix, L layers, D size of a state, H heads of keys and
values, E size of a head.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from paradraft.models.forward.cpu.matrix import PackedMatrix
from paradraft.models.forward.cpu.threads import use_one_torch_thread
from paradraft.models.quantized import QuantizedTensor

FREE = 5
"""Rows that are read from the text alone: one as it is, and the moved ones."""
LEAST_ROUNDING = 1e-4
"""Least effect of rounding, as a share of a layer's change of the state, or of the deviation of logits."""
LEAST_APART = 0.05
"""Least distance of two right layers, as a share of the effect of rounding in the layer."""
LEAST_RATIO = 1e-6
"""Least ratio of distances, so that all have logarithms."""
AT_ONCE = 2**21
"""Weights that are dequantized at a time."""


@dataclass(frozen=True)
class Course:
    """Intermediate results of a pass over a text: states `[L + 1, N, D]` before each layer and after the last; keys and
    values `[L, H, N, E]` as the cache holds them, in float32."""

    states: Tensor
    keys: Tensor
    values: Tensor


class Checked(Protocol):
    """The interface of a pass that the check needs, see `NativePass`."""

    threads: int

    def logits_at(
        self, tokens_N: Tensor, positions_N: Tensor, *, exactly: bool = False, parts: Sequence[int] = ()
    ) -> Tensor:
        """The logits `[N, V]` of one text at these positions."""

    def course_of(self, tokens_N: Tensor, positions_N: Tensor) -> Course:
        """The intermediate results of the pass of `logits_at`."""

    def as_stored(self, numbers: Tensor) -> Tensor:
        """Keys or values as the cache holds them, as float32."""

    def packed(self, weight: Tensor) -> tuple[PackedMatrix, int]:
        """The packed matrix of a weight, and the index there of the weight's first output."""

    def product(self, matrix: PackedMatrix, inputs: Tensor) -> Tensor:
        """`[M, outputs]` of `[M, K]`, bias included."""

    def rounded(self, matrix: PackedMatrix, inputs: Tensor) -> Tensor:
        """The rounded inputs that `product` multiplies with a matrix."""


@contextmanager
def float32_products() -> Iterator[None]:
    """Inside, float32 products on CPUs have full precision, even where the program allows less."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # torch's module is an object that has it
    before, matmul.fp32_precision = matmul.fp32_precision, "none"
    if matmul.fp32_precision == before:  # inherited from all backends, and will be again
        before = "none"
    matmul.fp32_precision = "ieee"
    try:
        with torch.autocast("cpu", enabled=False):
            yield
    finally:
        matmul.fp32_precision = before


def mean(ratios_N: Tensor) -> float:
    """The geometric mean; ratios that are 0, or nearly so, count as `LEAST_RATIO`."""
    return float(ratios_N.clamp(min=LEAST_RATIO).log().mean().exp())


def own_logits(model: PreTrainedModel, tokens_N: Tensor, positions_N: Tensor, last: int, *, rows: int) -> Tensor:
    """The logits `[rows, last, V]` of the model's own code, as float32; all rows are the same text."""
    ids = tokens_N.expand(rows, -1)
    # Without a mask, positions with gaps are taken for those of several packed texts.
    mask = torch.ones_like(ids)
    positions = positions_N.expand(rows, -1)
    attention = model.config._attn_implementation
    model.set_attn_implementation("sdpa")  # which the modes below know
    try:
        out = model(ids, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=last)
    finally:
        model.set_attn_implementation(attention)
    logits: Tensor = out.logits
    return logits.float()


def rounding_of(differences: Tensor, sizes: Tensor) -> Tensor:
    """Root mean squares of differences over the last dimension, at least `LEAST_ROUNDING` of the sizes."""
    least = (LEAST_ROUNDING * sizes).clamp(min=torch.finfo(torch.float32).tiny)
    return differences.square().mean(-1).sqrt().maximum(least)


class Anchored(TorchFunctionMode):
    """Gives layers the states, keys and values of a pass, so that a flipped rounding affects only its layer and token.

    Compares the seventh row with the pass, in distances of the eighth row from the seventh.
    """

    def __init__(self, model: PreTrainedModel, native: Checked, course: Course) -> None:
        super().__init__()
        self._model, self._native, self._course = model, native, course
        self._apart: list[float] = []
        self._attended = 0
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        decoder, states = cast(Any, self._model).model, self._course.states
        for module, state_ND in zip([*decoder.layers, decoder.norm], states, strict=False):
            self._hooks.append(module.register_forward_pre_hook(_anchor(state_ND), with_kwargs=True))
        for module, before_ND, after_ND in zip(decoder.layers, states, states[1:], strict=False):
            self._hooks.append(module.register_forward_hook(self._compare_layer(before_ND, after_ND)))
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for hook in self._hooks:
            hook.remove()

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """See `TorchFunctionMode`."""
        if func is scaled_dot_product_attention and self._attended < len(self._course.keys):
            queries, keys, values, *others = args
            layer, self._attended = self._attended, self._attended + 1
            keys = self._compare_stored(keys, self._course.keys[layer])
            values = self._compare_stored(values, self._course.values[layer])
            return func(queries, keys, values, *others, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def worst(self) -> float:
        """The largest mean of a layer, see `MOST_LAYER`."""
        return max(self._apart)

    def _compare_stored(self, rows: Tensor, stored_HNE: Tensor) -> Tensor:
        """Compares keys or values; returns the rows with the pass's own as the last two."""
        stored = stored_HNE.repeat_interleave(rows.shape[1] // len(stored_HNE), dim=0)
        compared = torch.cat([rows[FREE : FREE + 1], self._native.as_stored(rows[FREE + 1 :]), stored[None]])
        floats_NK, alike_NK, moved_NK, stored_NK = compared.transpose(1, 2).flatten(2)
        self._compare(floats_NK, alike_NK, moved_NK, stored_NK, alike_NK)
        return torch.cat([rows[: FREE + 1], stored.expand(2, -1, -1, -1)])

    def _compare_layer(self, before_ND: Tensor, after_ND: Tensor) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
            rows = outputs[0] if isinstance(outputs, tuple) else outputs
            floats_ND, alike_ND, moved_ND = rows[FREE:]
            self._compare(floats_ND, alike_ND, moved_ND, after_ND, alike_ND - before_ND)

        return hook

    def _compare(self, floats: Tensor, alike: Tensor, moved: Tensor, native: Tensor, added: Tensor) -> None:
        apart_N, right_N, sizes_N = (each.square().mean(1).sqrt() for each in (alike - native, alike - moved, added))
        rounding_N = rounding_of(floats - alike, sizes_N)
        self._apart.append(mean(apart_N / rounding_N) / max(mean(right_N / rounding_N), LEAST_APART))


def _anchor(state_ND: Tensor) -> Callable[..., Any]:
    def anchored(rows: Tensor) -> Tensor:
        return torch.cat([rows[:FREE], state_ND.expand(3, -1, -1)])

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (anchored(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": anchored(kwargs["hidden_states"])}

    return hook


class OwnFloats(TorchFunctionMode):
    """Makes the model's own code compute in float32, dequantizing a few weights at a time, and compares the products of
    the first row with those of the pass."""

    def __init__(self, native: Checked) -> None:
        super().__init__()
        self.native = native
        self.largest = 0.0
        """The largest error of a product."""
        self._random = torch.Generator().manual_seed(1)

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """See `TorchFunctionMode`."""
        if func is linear:
            return self._linear(*args, **(kwargs or {}))
        if func is embedding:
            return self._rows(args[1], args[0])
        if func is scaled_dot_product_attention:
            return func(*map(self._move_some, args[:2]), *args[2:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _rows(self, weight: Tensor, tokens: Tensor) -> Tensor:
        if not isinstance(weight, QuantizedTensor):
            return weight[tokens].float()
        matrix, first = self.native.packed(weight)
        rows = [matrix.panels.numbers_of(first + token, 1) for token in tokens.flatten().tolist()]
        return torch.cat(rows).unflatten(0, tokens.shape)

    def _linear(self, inputs_RNK: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        matrix, first = self.native.packed(weight)
        own_NK, *moved = inputs_RNK[:FREE]
        rounded_NK = self.native.rounded(matrix, own_NK)
        rows = [own_NK, *map(self._moved, moved)]
        if len(inputs_RNK) > FREE:
            floats_NK, alike_NK, last_NK = inputs_RNK[FREE:]
            alike_MK = self.native.rounded(matrix, torch.cat([alike_NK, self._moved(last_NK)]))
            rows += [floats_NK, *alike_MK.chunk(2)]
        outputs, lengths = self._product(torch.cat([*rows, rounded_NK]), weight)
        if bias is not None:
            outputs += bias.float()
        outputs = outputs.unflatten(0, (len(rows) + 1, -1))
        self._compare(matrix, own_NK, outputs[-1], first, rounded_NK.norm(dim=1)[:, None] * lengths)
        if bias is not None:  # it may be far larger than the product
            for moved_NO in outputs[1:FREE]:
                moved_NO.copy_(self._moved(moved_NO, 1.0))
        return outputs[:-1]

    def _product(self, inputs_MK: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Float32 products `[M, outputs]`, and the norms of the weight's rows."""
        size, threads = len(weight), self.native.threads
        outputs = torch.empty(len(inputs_MK), size, dtype=torch.float32, device="cpu")
        lengths = torch.empty(size, dtype=torch.float32, device="cpu")
        step = max(min(AT_ONCE // weight.shape[1], math.ceil(size / threads)), 1)

        @torch.no_grad()
        def multiply(start: int) -> None:
            piece = slice(start, min(start + step, size))
            numbers = self._slice(weight, piece)
            outputs[:, piece] = inputs_MK @ numbers.T
            lengths[piece] = numbers.norm(dim=1)

        # OpenMP's threads would wait for each other at each product, for long if another program runs.
        with ThreadPoolExecutor(threads, initializer=use_one_torch_thread) as pool:
            deque(pool.map(multiply, range(0, size, step)), maxlen=0)
        return outputs, lengths

    def _slice(self, weight: Tensor, piece: slice) -> Tensor:
        if not isinstance(weight, QuantizedTensor):
            return weight[piece].float()
        matrix, first = self.native.packed(weight)
        return matrix.panels.numbers_of(first + piece.start, piece.stop - piece.start)

    def _moved(self, numbers: Tensor, units: float | None = None) -> Tensor:
        """Adds noise of some units in the last place; by default as the error of a sum over the last dimension, which
        grows with the square root of its length."""
        units = math.sqrt(numbers.shape[-1]) / 4 if units is None else units
        noise = torch.randn(numbers.shape, generator=self._random, dtype=torch.float32, device="cpu")
        return numbers * (1 + units * torch.finfo(torch.float32).eps * noise)

    def _move_some(self, rows: Tensor) -> Tensor:
        return torch.cat([rows[:1], self._moved(rows[1:FREE]), rows[FREE:]])

    def _compare(self, matrix: PackedMatrix, inputs: Tensor, expected: Tensor, first: int, sizes: Tensor) -> None:
        product = self.native.product(matrix, inputs)[:, first : first + expected.shape[1]]
        errors = (product - expected).abs() / (sizes + expected.abs()).clamp(min=torch.finfo(torch.float32).tiny)
        self.largest = max(self.largest, float(errors.max()))


class OwnProducts(TorchFunctionMode):
    """Makes the C++ compute the products with quantized weights in the model's own code."""

    def __init__(self, native: Checked) -> None:
        super().__init__()
        self.native = native

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """See `TorchFunctionMode`."""
        if func is linear and isinstance(args[1], QuantizedTensor):
            inputs, weight = args[:2]
            matrix, first = self.native.packed(weight)
            outputs = self.native.product(matrix, inputs.flatten(0, -2))[:, first : first + len(weight)]
            return outputs.to(inputs.dtype).unflatten(0, inputs.shape[:-1])
        return func(*args, **(kwargs or {}))
