"""Forward passes: interface of the implementations by the model's own code (eager), `torch.compile`, and C++ on CPUs.

All read and write a ragged KV cache, and none has state between passes that changes a result.

Shape letters: B rows of a batch, N new tokens of a pass, R tokens whose logits are wanted, V rows of the output head,
D hidden size, E rows of the embedding, P rows added to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from paradraft.models.forward.gated import GatedChange
    from paradraft.models.kv_cache import Storage  # which moves an accepted path with this package's C++

FINAL_NORM = -1
"""The hidden layer after the final norm, whose states the output head reads."""


@dataclass(frozen=True, kw_only=True)
class ForwardOut:
    """Result of a pass. States of absent tokens are 0; states and logits of their descendants are undefined.

    Args:
        logits: `[B, R, V]`; float32 from C++, else in the model's dtype.
        hidden: by requested layer, `[B, N, D]` states of all new tokens, in the dtype of the logits.
    """

    logits: Tensor
    hidden: dict[int, Tensor] = field(default_factory=dict)


class Forward(Protocol):
    """The forward pass of one model."""

    @property
    def min_rows(self) -> int:
        """Least rows that a batch of several may shrink to without another compilation."""

    @property
    def warm_up_rounds(self) -> int:
        """Passes of a shape until it runs at full speed; 0 for at once."""

    @property
    def is_native(self) -> bool:
        """Whether it is in C++: logits are then bitwise the same in every chunk, batch and tree, and passes have their
        own threads."""

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
        """One pass over new tokens; writes their keys and values into the storage after the cached ones.

        Args:
            storage: the cache.
            lengths: cached tokens of each row.
            tokens_BN: `[B, N]` token ids, at most E + P - 1; below 0 where a row has fewer.
            parents_BN: `[B, N]` parents in the draft tree, -1 for the last cached token, or `paradraft.parents.BLOCK`.
            logit_rows: `[B, R]` indices of the tokens whose logits are wanted, in C++ also -1 for none, whose logits
                are undefined; R = 0 in prefill.
            hidden_layers: whose states are wanted, numbered as in `output_hidden_states` of `transformers`: 0 for the
                embeddings, i for the output of the i-th layer (for the last layer too before the final norm), and
                `FINAL_NORM`. With the last layer or `FINAL_NORM`, the last layer is computed for all N tokens, else in
                C++ only for those of `logit_rows`.
            vectors: `[B, N, D]` read in place of the embeddings; ids then only say whether a token is absent.

        Raises:
            NotFiniteError: states became NaN or infinite in prefill.
        """

    def add_embeddings(self, rows_PD: Tensor, changes: Sequence[tuple[range, GatedChange]] = ()) -> None:
        """Sets the embeddings of ids from E on, in place of those added before, and how attention differs for some of
        them. No such id is ever chosen, because the output head does not change."""

    def head(self, states: Tensor) -> Tensor:
        """The logits `[M, V]` of states `[M, D]` after the final norm, as a pass computes them."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """A linear layer of a drafter, computed as the model's own: a function from `[M, inputs]` to `[M, outputs]`.

        The weight is `[outputs, inputs]`, the bias `[outputs]`.
        """

    def weight_bytes(self, weight: Tensor) -> int:
        """Bytes that a pass reads of one of the model's weights."""

    def first(self, layers: int) -> Forward:
        """The pass of the first layers, then the final norm and the output head, with the same weights.

        Raises:
            ValueError: this implementation has no such pass.
        """

    def forget(self) -> None:
        """Drops references to the storage, before another is allocated."""


class NotFiniteError(ValueError):
    """The model's states became NaN or infinite in prefill; `row` is the first such row of the batch."""

    def __init__(self, row: int) -> None:
        super().__init__(
            "states of the target or the draft model are not numbers: its weights are damaged, or its dtype overflows"
        )
        self.row = row
