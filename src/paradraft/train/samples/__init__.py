"""Sources of training samples: one file each, found by its name, or a module of another package.

A source is written `name` or `name:setting=value:…`, as drafters are; its settings are the fields of the file's
`Config`, and its function `build(config, data)` makes the `SampleSource`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from paradraft.data.samples import Sample
from paradraft.plugins import find_module, module_names, parse_settings

if TYPE_CHECKING:
    from paradraft.core import Drafter
    from paradraft.models.target import Target

GROUP = "paradraft.train.samples"
"""Entry points by which other packages add sources."""
DATASET = "dataset"
"""The default source, which is no part of a run's identity: the first runs did not record it."""


@dataclass(frozen=True, kw_only=True)
class SourceData:
    """Data and settings of a run that sources are built from.

    Args:
        samples: the training set.
        per_step: samples of a step, on all devices together.
        steps: of the whole run.
        prompt_tokens: most tokens of a prompt that is cut from plain text.
        is_taught: whether losses compare with a teacher's probabilities, and not with the text's tokens.
    """

    samples: list[Sample]
    per_step: int
    steps: int
    seed: int
    prompt_tokens: int
    is_taught: bool


class SampleSource(Protocol):
    """The samples of each step; the defaults are those of a source that depends on the step alone.

    A resumed run gets the samples of an uninterrupted one, bit by bit: they are a function of step, seed and state.
    """

    decodes: bool = False
    """Whether steps are ever due, so that a target is loaded to decode with, and checkpoints hold the state."""
    notes: tuple[str, ...] = ()
    """For the summary before the first step."""

    def samples_of(self, step: int) -> list[Sample]:
        """Samples of a step, for all processes. Another thread calls it during the step before, unless it is due."""
        ...

    def is_due(self, step: int) -> bool:
        """Whether `renew` must run before a step, because its samples depend on the weights then."""
        return False

    def renew(self, step: int, target: Target, drafter: Drafter) -> None:
        """Makes new samples, from a step on; only in the main process, whose state the others load then.

        Args:
            drafter: after `step` steps, as it is saved.

        Raises:
            ValueError: they cannot decode the prompts.
        """
        return

    def state_dict(self) -> dict[str, Any]:
        """The state, in numbers, texts, lists and dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state."""
        return


def source_names() -> list[str]:
    """Files in `paradraft/train/samples`, and the sources of other packages."""
    return module_names(__path__, GROUP)


def load_source(source: str, data: SourceData) -> SampleSource:
    """Builds a source.

    Raises:
        ValueError: there is no such source, a setting is wrong, or it does not fit the run.
    """
    config, module = source_config(source), _module(source)
    try:
        built: SampleSource = module.build(config, data)
    except ValueError as error:
        raise ValueError(f"source={source}: {error}") from None
    return built


def source_config(source: str) -> Any:
    """The `Config` of a source.

    Raises:
        ValueError: there is no such source, or a setting is wrong.

    >>> source_config("dataset")
    Config()
    """
    kind = _module(source).Config
    values = parse_settings(source.split(":")[1:], kind, f"source={source}")
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"source={source}: {error}") from None


def source_identity(source: str) -> dict[str, Any]:
    """What a run's identity says of its source: name and all settings; nothing of the default one.

    >>> source_identity("dataset")
    {}
    """
    name = source.partition(":")[0]
    return {} if name == DATASET else {"source": {"name": name, **vars(source_config(source))}}


def _module(source: str) -> ModuleType:
    name = source.partition(":")[0]
    if name not in source_names():
        raise ValueError(f"source={source}: use one of {', '.join(source_names())}")
    return find_module(name, __name__, __path__, GROUP)
