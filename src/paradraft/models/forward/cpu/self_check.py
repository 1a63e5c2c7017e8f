"""Whether a pass in C++ computes what the model's own code does, asked once after loading.

Two right passes do not give the same logits: each rounds what it multiplies, and models amplify that, some more than
others and on some tokens more than on others. So there is no single bound on a difference. The check has four parts,
each of which knows how much difference is right:

1. *The formula.* The C++ has an exact mode, in which nothing is rounded but float32 arithmetic. It is compared with the
   model's own code in float32, over the same weights. How far two right float32 passes are apart is measured: the own
   code reads the same tokens a second time, with all that it multiplies moved by about a unit in the last place.
2. *The kernels.* Each product of the pass, of the states that the model really has, is compared with a float32 product
   of the same rounded inputs, all outputs of all matrices. Only the order of a sum differs.
3. *The rounding.* The logits of the pass are at most `MOST_ROUNDING` times as far from the exact ones as those of the
   model's own code in the model's dtype.
4. *Each layer.* Over a whole model, roundings that flip hide what else is wrong. So the model's own code computes every
   layer, and the head, from the state that the pass has before it and from the keys and values that it has stored, with
   inputs rounded as the pass rounds them. How far two right layers are apart is measured, as for the formula.

Then the same text is read in several passes, as text is decoded: the logits are the same to the last bit.

Where all logits are the same, as with a head of zeros, only the products say something.

That weights were packed as they are is checked to the last bit where they are packed (`PackedMatrix`).

Tokens are spread over the vocabulary, and stand at positions that are farther and farther apart, so that rotations by
large angles are compared too.

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
"""Positions of the tokens are below this."""
GOLDEN = 0.6180339887498949
MOST_FORMULA = 5.0
"""Times the distance of two right float32 passes that the exact mode may be from the own code, as a geometric mean over
all places; of right passes it was at most 1.6."""
MOST_AT_A_PLACE = 30.0
"""The same at each place, where it was at most 5.6."""
MOST_KERNEL = 5e-6
"""Of a product's error, where 1 is the product of the lengths of the two vectors."""
MOST_ROUNDING = 2.5
"""Times the own code's distance from the exact logits that the pass may have, as a geometric mean over all places. Of
one place, two right passes had between a fifth and 4.3 times the other's; the mean of 16 was at most 1.1."""
MOST_LAYER = 5.0
"""Times the distance of two right layers with the same roundings that the pass may be from the own code, as a geometric
mean over all places, at the worst layer, which keys and values are too. Of right passes it was at most 0.61, with
attention scaled by 1.01 at least 8.5."""
MOST_HEAD = 1.0
"""Times what rounding does in the head that the largest difference of a place may be, likewise. Of right passes it was
at most 0.13, with a quarter added to a logit at least 3.9."""
SPREAD = 0.75
"""Standard deviation of the logarithm of how far two right passes are from the exact one at a place, one by the other:
between a fifth and 4.3 times."""
LEAST = 1e-6
"""A distance, in standard deviations of the logits, that is never too large."""


class OtherLogitsError(Exception):
    """A pass does not compute what it did before."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured.

    Args:
        formula: distance of the exact mode from the own code, times that of two right float32 passes; a geometric mean.
        worst: the same at the worst place.
        kernel: the largest error of a product, see `MOST_KERNEL`.
        rounding: distance of the pass from the exact logits, times the own code's; 0 where nothing is rounded.
        layer: distance of the worst layer from the own code with the same roundings, see `MOST_LAYER`; likewise 0.
        head: that of the logits, see `MOST_HEAD`; likewise 0.
    """

    formula: float
    worst: float
    kernel: float
    rounding: float
    layer: float
    head: float

    @property
    def is_right(self) -> bool:
        """Whether the pass is the model's."""
        return all(found <= most for found, most in self._limited)

    @property
    def _limited(self) -> list[tuple[float, float]]:
        return [
            (self.formula, MOST_FORMULA), (self.worst, MOST_AT_A_PLACE), (self.kernel, MOST_KERNEL),
            (self.rounding, MOST_ROUNDING), (self.layer, MOST_LAYER), (self.head, MOST_HEAD),
        ]  # fmt: skip

    def __str__(self) -> str:
        names = "formula", "formula at a place", "products", "rounding", "layers", "head"
        limited = zip(names, self._limited, strict=True)
        return ", ".join(f"{name} {found:.2g} of at most {most:g}" for name, (found, most) in limited)


def text_for(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """The tokens and positions `[N]` of the check.

    The vocabulary's first ids are often special tokens that were hardly trained, and its last ones rows that no token
    has, so ids are spread by the golden ratio; positions begin close together and end at `FARTHEST`.
    """
    most, rows = model.config.max_position_embeddings, len(model.get_input_embeddings().weight)
    count, last = min(TOKENS, most), min(FARTHEST, most) - 1
    tokens = [int((place + 1) * GOLDEN % 1 * rows) for place in range(count)]
    steps = [round(last ** (place / max(count - 1, 1))) for place in range(count)]
    positions = [0]
    for place in range(1, count):
        positions.append(min(max(steps[place], positions[-1] + 1), last - (count - 1 - place)))
    return torch.tensor(tokens, device="cpu"), torch.tensor(positions, device="cpu")


def parts_of(tokens: int) -> list[int]:
    """Passes of all small sizes that together read a text; each has kernels of its own.

    >>> parts_of(16)
    [1, 2, 3, 4, 5, 1]
    """
    parts: list[int] = []
    while (rest := tokens - sum(parts)) > 0:
        parts.append(min(len(parts) + 1, rest))
    return parts


@torch.no_grad()
def check(model: PreTrainedModel, native: Checked, probe: str | None) -> str:
    """Checks a pass that was just made.

    Args:
        model: whose pass it is.
        native: the pass.
        probe: what an earlier check of a pass over the same packed weights has returned; only that is compared then.

    Returns:
        A digest of the logits of a few tokens.

    Raises:
        OtherLogitsError: it is another than `probe`.
        WrongPassError: the pass does not compute what the model's own code does.
    """
    logits_NV = native.logits_at(*text_for(model))
    found = hashlib.sha256(logits_NV.numpy().tobytes()).hexdigest()
    if probe is not None:
        if found != probe:
            raise OtherLogitsError
        return found
    if has_passed(verdict := verdict_of(model, found)):
        return found
    start = time.perf_counter()
    # Several threads would wait for each other after each operation, long where another program runs.
    with one_torch_thread():
        figures = figures_of(model, native, logits_NV)
    if not figures.is_right:
        raise WrongPassError(str(figures), _seconds(native))
    if not torch.equal(native.logits_at(*text_for(model), parts=parts_of(len(logits_NV))), logits_NV):
        raise WrongPassError("logits of one pass and of several passes are not the same", _seconds(native))
    remember(verdict, time.perf_counter() - start)
    return found


def _seconds(native: Checked) -> float:
    """That a pass over one token takes."""
    token_N = torch.zeros(1, dtype=torch.long, device="cpu")
    start = time.perf_counter()
    native.logits_at(token_N, token_N)
    return time.perf_counter() - start


@dataclass(frozen=True, kw_only=True)
class Readings:
    """The last n tokens of a text, as several right passes read them: logits `[n, V]`.

    Args:
        exact: of the pass in C++, of which only float32 arithmetic is rounded.
        floats: of the model's own code in float32.
        moved: of the same, with all that it multiplies moved by about a unit in the last place.
        rounded: of the model's own code in its own dtype, with products of few bits by the C++; None where nothing but
            float32 arithmetic is rounded.
        kernel: the largest error of a product, see `MOST_KERNEL`.
        layer: see `Figures`.
        head: see `Figures`.
    """

    exact: Tensor
    floats: Tensor
    moved: Tensor
    rounded: Tensor | None
    kernel: float
    layer: float = 0.0
    head: float = 0.0

    def figures(self, logits_nV: Tensor) -> Figures:
        """What says whether logits of the pass in C++ are right."""
        apart_n = distances(self.exact, self.floats) / distances(self.moved, self.floats).clamp(min=LEAST)
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
    """Reads a text with the exact mode of a pass in C++ and with the model's own code.

    Args:
        model: on the CPU; its weights of few bits are packed.
        native: the pass.
        tokens_N: the text.
        positions_N: of its tokens, ascending.
        logits_nV: what the pass says of the last n tokens.
    """
    last = len(logits_nV)
    exact_nV = native.logits_at(tokens_N, positions_N, exactly=True)[-last:]
    own, rounded_nV, layer, head = OwnFloats(native), None, 0.0, 0.0
    with float32_products():
        if torch.equal(logits_nV, exact_nV):
            with one_torch_thread(), own:
                floats_nV, moved_nV = own_logits(model, tokens_N, positions_N, last, rows=2)
        else:
            course = native.course_of(tokens_N, positions_N)
            with one_torch_thread(), Anchored(model, native, course) as anchored, own:
                floats_nV, moved_nV, layer_nV, alike_nV, _ = own_logits(model, tokens_N, positions_N, last, rows=5)
            layer = as_of_many(anchored.worst(), len(tokens_N))
            apart_n = (logits_nV - alike_nV).abs().amax(1)
            head = mean(apart_n / rounding_of(layer_nV - alike_nV, logits_nV.std(dim=1, correction=0)))
            with OwnProducts(native):
                (rounded_nV,) = own_logits(model, tokens_N, positions_N, last, rows=1)
    return Readings(
        exact=exact_nV, floats=floats_nV, moved=moved_nV, rounded=rounded_nV, kernel=own.largest, layer=layer, head=head
    )


def allowance(places: int) -> float:
    """By what factor a geometric mean over some places may be larger than one over very many: four standard deviations.

    >>> round(allowance(512), 2), round(allowance(16), 2), round(allowance(1), 1)
    (1.14, 2.12, 20.1)
    """
    return math.exp(4 * SPREAD / math.sqrt(places))


def as_of_many(ratio: float, places: int) -> float:
    """A geometric mean over some places, less what it may be larger than one over `TOKENS` places, of which limits are.

    >>> as_of_many(2.0, 16), round(as_of_many(4.2, 1), 2)
    (2.0, 0.44)
    """
    return ratio / max(1.0, allowance(places) / allowance(TOKENS))


def over_texts(figures: Sequence[Figures]) -> Figures:
    """The worst of several texts; of rounding, which varies from place to place, the geometric mean.

    >>> one, two = (Figures(formula=n, worst=2 * n, kernel=n, rounding=n, layer=n, head=n) for n in (1.0, 4.0))
    >>> over_texts([one, two])
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
    """Compares what a pass says of `text_for` with the model's own code."""
    return readings_of(model, native, *text_for(model), logits_NV).figures(logits_NV)


def distances(a_NV: Tensor, b_NV: Tensor) -> Tensor:
    """`[N]` root mean squares of differences, in standard deviations of the second."""
    deviations_N = b_NV.std(dim=1, correction=0).clamp(min=torch.finfo(torch.float32).tiny)  # 0 if all are the same
    return (a_NV - b_NV).square().mean(dim=1).sqrt() / deviations_N
