"""Self-check after loading: compares a pass in C++ with the model's own code.

Two right passes do not give the same logits: each rounds its activations, and models amplify that, some more than
others and on some tokens more than on others. So no single bound on the difference is right for all. The check has four
parts, each with a bound of its own:

1. *The formula.* The C++ has an exact mode, in which nothing is rounded but float32 arithmetic. It is compared with the
   model's own code in float32, over the same weights. The bound is relative to the distance of two right float32
   passes, which is measured: the own code reads the same tokens four times more, with the operands of all products
   moved by about a unit in the last place.
2. *The kernels.* Each product of the pass, on the model's real states, is compared with a float32 product of the same
   rounded inputs, for all outputs of all matrices. Only the order of a sum differs.
3. *The rounding.* The logits of the pass are at most `MOST_ROUNDING` times as far from the exact ones as those of the
   model's own code in the model's dtype.
4. *Each layer.* Over a whole model, roundings that flip hide other errors. So the model's own code computes every
   layer, and the head, from the pass's state before it and from the pass's keys and values, with inputs rounded as in
   the pass. The bound is relative to the measured distance of two right layers, as in part 1.

Then the text is read in several passes, as in decoding: the logits must be bitwise the same.

Where all logits are the same, as with a head of zeros, only part 2 detects errors. `PackedMatrix` checks to the last
bit that weights are packed correctly.

Tokens are spread over the vocabulary, at positions that are farther and farther apart, so that rotations by large
angles are compared too.

Shape letters: N tokens, V vocabulary, K inputs of a matrix.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paradraft.models.forward.cpu.matrix import WrongPassError
from paradraft.models.forward.cpu.own_code import (
    FREE,
    Anchored,
    Checked,
    OwnFloats,
    OwnProducts,
    float32_products,
    mean,
    own_logits,
    rounding_of,
)
from paradraft.models.forward.cpu.threads import one_torch_thread
from paradraft.models.forward.cpu.verdicts import has_passed, remember, verdict_of

TOKENS = 16
FARTHEST = 4096
"""Bound of the positions."""
GOLDEN = 0.6180339887498949
MOST_FORMULA = 5.0
"""Largest distance of the exact mode from the own code, in distances of two right float32 passes, as a geometric mean
over all tokens; right passes of real models had at most 1.2."""
MOST_AT_A_TOKEN = 30.0
"""The same at each token; right passes of real models had at most 4.2."""
MOST_KERNEL = 5e-6
"""Largest error of a product, relative to the product of the lengths of the two vectors."""
MOST_ROUNDING = 2.5
"""Largest distance of the pass from the exact logits, in distances of the own code from them, as a geometric mean over
all tokens. At one token, right passes had 0.2 to 4.3; the mean of 16 was at most 1.1."""
MOST_LAYER = 5.0
"""Largest distance of the pass from the own code with the same roundings, in distances of two right layers, as a
geometric mean over all tokens, in the worst layer, key or value. Right passes had at most 0.61, passes with attention
scaled by 1.01 at least 8.5."""
MOST_HEAD = 1.0
"""Likewise of the largest difference of a token's logits, relative to the effect of rounding in the head. Right passes
had at most 0.13, passes with 0.25 added to a logit at least 3.9."""
SPREAD = 0.75
"""Standard deviation of the logarithm of the ratio of two right passes' distances from the exact one at a token; the
ratio is from 0.2 to 4.3."""
LEAST = 1e-6
"""Smaller distances, in standard deviations of the logits, count as this."""


class OtherLogitsError(Exception):
    """A pass computes other logits than when it was checked."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Results of the check, bounded by `MOST_FORMULA`, `MOST_AT_A_TOKEN`, `MOST_KERNEL`, `MOST_ROUNDING`, `MOST_LAYER`
    and `MOST_HEAD`; the last three are 0 where only float32 arithmetic is rounded."""

    formula: float
    worst: float
    kernel: float
    rounding: float
    layer: float
    head: float

    @property
    def is_right(self) -> bool:
        """Whether the pass is within all bounds."""
        return all(figure <= most for figure, most in self._limited)

    @property
    def _limited(self) -> list[tuple[float, float]]:
        return [
            (self.formula, MOST_FORMULA), (self.worst, MOST_AT_A_TOKEN), (self.kernel, MOST_KERNEL),
            (self.rounding, MOST_ROUNDING), (self.layer, MOST_LAYER), (self.head, MOST_HEAD),
        ]  # fmt: skip

    def __str__(self) -> str:
        names = "formula", "formula at a place", "products", "rounding", "layers", "head"
        limited = zip(names, self._limited, strict=True)
        return ", ".join(f"{name} {figure:.2g} of at most {most:g}" for name, (figure, most) in limited)


def text_for(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """The tokens and positions `[N]` of the check.

    Because the first ids are often special tokens that were hardly trained, and the last ones unused rows, ids are
    spread by the golden ratio. Positions begin close together and end at `FARTHEST`.
    """
    most, rows = model.config.max_position_embeddings, len(model.get_input_embeddings().weight)
    count, last = min(TOKENS, most), min(FARTHEST, most) - 1
    tokens = [int((index + 1) * GOLDEN % 1 * rows) for index in range(count)]
    steps = [round(last ** (index / max(count - 1, 1))) for index in range(count)]
    positions = [0]
    for index in range(1, count):
        positions.append(min(max(steps[index], positions[-1] + 1), last - (count - 1 - index)))
    return torch.tensor(tokens, device="cpu"), torch.tensor(positions, device="cpu")


def parts_of(tokens: int) -> list[int]:
    """Sizes of passes that together read a text: all small ones, because each has its own kernels.

    >>> parts_of(16)
    [1, 2, 3, 4, 5, 1]
    """
    parts: list[int] = []
    while (rest := tokens - sum(parts)) > 0:
        parts.append(min(len(parts) + 1, rest))
    return parts


@torch.no_grad()
def check(model: PreTrainedModel, native: Checked, probe: str | None) -> str:
    """Checks a new pass; returns a digest of its logits of a few tokens.

    With `probe`, the digest of an earlier pass over the same packed weights, only digests are compared.

    Raises:
        OtherLogitsError: the digest is not `probe`.
        WrongPassError: the pass differs from the model's own code.
    """
    logits_NV = native.logits_at(*text_for(model))
    digest = hashlib.sha256(logits_NV.numpy().tobytes()).hexdigest()
    if probe is not None:
        if digest != probe:
            raise OtherLogitsError
        return digest
    if has_passed(verdict := verdict_of(model, digest)):
        return digest
    start = time.perf_counter()
    # Several threads would wait for each other after each operation, for long if another program runs.
    with one_torch_thread():
        figures = figures_of(model, native, logits_NV)
    if not figures.is_right:
        raise WrongPassError(str(figures), _seconds(native))
    if not torch.equal(native.logits_at(*text_for(model), parts=parts_of(len(logits_NV))), logits_NV):
        raise WrongPassError("logits of one pass and of several passes are not the same", _seconds(native))
    remember(verdict, time.perf_counter() - start)
    return digest


def _seconds(native: Checked) -> float:
    """Time of a pass over one token."""
    token_N = torch.zeros(1, dtype=torch.long, device="cpu")
    start = time.perf_counter()
    native.logits_at(token_N, token_N)
    return time.perf_counter() - start


@dataclass(frozen=True, kw_only=True)
class Readings:
    """Logits `[n, V]` of the last n tokens of a text by several right passes.

    Args:
        exact: by the C++ in exact mode.
        floats: by the model's own code in float32.
        moved: `[4, n, V]` by the same, with operands of products moved by about a unit in the last place. Of one alone
            the distance from `floats`, as a mean over 16 tokens, was 0.4 to 1.6 times the root mean square of four.
        rounded: by the model's own code in its dtype, with products of quantized weights by the C++; None where only
            float32 arithmetic is rounded.
        kernel: see `Figures`, as for `layer` and `head`.
    """

    exact: Tensor
    floats: Tensor
    moved: Tensor
    rounded: Tensor | None
    kernel: float
    layer: float = 0.0
    head: float = 0.0

    def figures(self, logits_nV: Tensor) -> Figures:
        """The figures of logits of the pass in C++."""
        right_n = torch.stack([distances(moved_nV, self.floats) for moved_nV in self.moved]).square().mean(0).sqrt()
        apart_n = distances(self.exact, self.floats) / right_n.clamp(min=LEAST)
        rounding = 0.0
        if self.rounded is not None:
            limits_n = distances(self.rounded, self.exact).clamp(min=LEAST)
            rounding = as_of_many(mean(distances(logits_nV, self.exact) / limits_n), len(logits_nV))
        formula = as_of_many(mean(apart_n), len(logits_nV))
        return Figures(
            formula=formula, worst=float(apart_n.max()), kernel=self.kernel, rounding=rounding, layer=self.layer,
            head=self.head,
        )  # fmt: skip


@torch.no_grad()
def readings_of(
    model: PreTrainedModel, native: Checked, tokens_N: Tensor, positions_N: Tensor, logits_nV: Tensor
) -> Readings:
    """Reads a text at ascending positions with the exact mode of a pass in C++ and with the model's own code.

    `logits_nV` are those of the pass for the last n tokens. The model is on the CPU, its quantized weights are packed.
    """
    last = len(logits_nV)
    exact_nV = native.logits_at(tokens_N, positions_N, exactly=True)[-last:]
    own, rounded_nV, layer, head = OwnFloats(native), None, 0.0, 0.0
    with float32_products():
        if torch.equal(logits_nV, exact_nV):
            with one_torch_thread(), own:
                own_RnV = own_logits(model, tokens_N, positions_N, last, rows=FREE)
        else:
            course = native.course_of(tokens_N, positions_N)
            with one_torch_thread(), Anchored(model, native, course) as anchored, own:
                own_RnV = own_logits(model, tokens_N, positions_N, last, rows=FREE + 3)
            layer_nV, alike_nV, _ = own_RnV[FREE:]
            layer = as_of_many(anchored.worst(), len(tokens_N))
            apart_n = (logits_nV - alike_nV).abs().amax(1)
            head = mean(apart_n / rounding_of(layer_nV - alike_nV, logits_nV.std(dim=1, correction=0)))
            with OwnProducts(native):
                (rounded_nV,) = own_logits(model, tokens_N, positions_N, last, rows=1)
    return Readings(
        exact=exact_nV, floats=own_RnV[0], moved=own_RnV[1:FREE], rounded=rounded_nV, kernel=own.largest, layer=layer,
        head=head,
    )  # fmt: skip


def allowance(tokens: int) -> float:
    """The factor by which a geometric mean over some tokens may exceed one over very many: four standard deviations.

    >>> round(allowance(512), 2), round(allowance(16), 2), round(allowance(1), 1)
    (1.14, 2.12, 20.1)
    """
    return math.exp(4 * SPREAD / math.sqrt(tokens))


def as_of_many(ratio: float, tokens: int) -> float:
    """A geometric mean over some tokens, reduced to be comparable to one over `TOKENS` tokens, as the bounds are.

    >>> as_of_many(2.0, 16), round(as_of_many(4.2, 1), 2)
    (2.0, 0.44)
    """
    return ratio / max(1.0, allowance(tokens) / allowance(TOKENS))


def over_texts(figures: Sequence[Figures]) -> Figures:
    """The worst figures of several texts; of rounding, which varies from token to token, the geometric mean.

    >>> first, second = (Figures(formula=n, worst=2 * n, kernel=n, rounding=n, layer=n, head=n) for n in (1.0, 4.0))
    >>> over_texts([first, second])
    Figures(formula=4.0, worst=8.0, kernel=4.0, rounding=2.0, layer=4.0, head=4.0)
    """
    return Figures(
        formula=max(each.formula for each in figures),
        worst=max(each.worst for each in figures),
        kernel=max(each.kernel for each in figures),
        rounding=math.prod(each.rounding for each in figures) ** (1 / len(figures)),
        layer=max(each.layer for each in figures),
        head=max(each.head for each in figures),
    )


def figures_of(model: PreTrainedModel, native: Checked, logits_NV: Tensor) -> Figures:
    """Compares the logits of a pass for `text_for` with the model's own code."""
    return readings_of(model, native, *text_for(model), logits_NV).figures(logits_NV)


def distances(a_NV: Tensor, b_NV: Tensor) -> Tensor:
    """The root mean squares `[N]` of differences, in standard deviations of the second."""
    deviations_N = b_NV.std(dim=1, correction=0).clamp(min=torch.finfo(torch.float32).tiny)  # 0 if all are the same
    return (a_NV - b_NV).square().mean(dim=1).sqrt() / deviations_N
