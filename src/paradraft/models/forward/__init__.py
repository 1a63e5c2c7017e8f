"""What computes a model's forward pass: the model's own code (eager), `torch.compile`, or C++ on CPUs.

All are called in the same way, over a cache whose rows have different lengths, and none keeps anything between passes
that changes a result.

Shape letters: B rows of a batch, N new tokens of a pass, R tokens whose logits are wanted, V rows of the output head,
D hidden size, E rows of the embedding, P rows added to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from paradraft.models.kv_cache import Storage  # which moves an accepted path with this package's C++

FINAL_NORM = -1
"""The hidden layer whose states the output head reads: those after the final norm."""


@dataclass(frozen=True, kw_only=True)
class ForwardOut:
    """What a pass returns. Where a row has no token (`ABSENT`), its states are 0; of what follows such a token neither
    states nor logits may be used.

    Args:
        logits: `[B, R, V]`; float32 from C++, else in the model's dtype.
        hidden: for each hidden layer that was asked for `[B, N, D]` states of all new tokens, in the dtype of the
            logits.
    """

    logits: Tensor
    hidden: dict[int, Tensor] = field(default_factory=dict)


class Forward(Protocol):
    """The forward pass of one model."""

    @property
    def min_rows(self) -> int:
        """How few rows a batch of several may shrink to, so that nothing new must be compiled."""

    @property
    def warm_up_rounds(self) -> int:
        """How often each shape must be seen before passes of that shape run at their full speed; 0 for at once."""

    @property
    def is_native(self) -> bool:
        """Whether it is in C++: logits are then the same to the last bit in every cut, batch and tree, and passes have
        threads of their own."""

    @property
    def threads(self) -> int:
        """Most threads of a pass."""

    def __call__(
        self,
        storage: Storage,
        lengths: list[int],
        tokens_BN: Tensor,
        parents_BN: Tensor,
        *,
        logit_rows: Tensor,
        hidden_layers: Sequence[int] = (),
        vectors: Tensor | None = None,
    ) -> ForwardOut:
        """One pass over new tokens; their keys and values go into the storage after the kept ones.

        Args:
            storage: the cache, of the capacity given at the start.
            lengths: for each row how many tokens the cache keeps.
            tokens_BN: `[B, N]` token ids, at most E + P - 1; below 0 where a row has fewer.
            parents_BN: `[B, N]` the index of the token that each one follows, -1 for the last kept token.
            logit_rows: `[B, R]` indices of the tokens whose logits are wanted. With R = 0 a prompt is read.
            hidden_layers: whose states are wanted, named as `output_hidden_states` of `transformers` does: 0 for the
                embeddings, i for the output of the i-th layer, before the final norm also for the last one, and
                `FINAL_NORM`. If the last layer or `FINAL_NORM` is among them, the last layer is computed for all N
                tokens, else for the R tokens of `logit_rows` in C++.
            vectors: `[B, N, D]` read in place of the embeddings of the tokens, whose ids then only say where a row
                has a token.

        Raises:
            NotFiniteError: while a prompt was read, states became NaN or infinite.
        """

    def add_embeddings(self, rows_PD: Tensor) -> None:
        """Lets passes read the ids from E on as these rows `[P, D]`, which replace those added before. The output head
        stays as it is, so that no such id is ever chosen."""

    def head(self, states: Tensor) -> Tensor:
        """What the output head makes of states `[M, D]` after the final norm: `[M, V]`, as a pass has them."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """A linear layer of a drafter that reads the model's states, computed as the model's own layers are.

        Args:
            weight: `[outputs, inputs]`.
            bias: `[outputs]`.

        Returns:
            What makes `[M, outputs]` of `[M, inputs]`.
        """

    def weight_bytes(self, weight: Tensor) -> int:
        """How many bytes a pass reads of one of the model's weights."""

    def forget(self) -> None:
        """Lets go of the storage, before another is allocated."""


class NotFiniteError(ValueError):
    """While a prompt was read, the model's states became NaN or infinite.

    Args:
        row: of the batch; the first of them.
    """

    def __init__(self, row: int) -> None:
        super().__init__(
            "states of the target or the draft model are not numbers: its weights are damaged, or its dtype overflows"
        )
        self.row = row
