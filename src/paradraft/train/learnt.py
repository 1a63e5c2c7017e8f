"""What a run learns, as a digest: a run may go on with the very same tokens alone.

Recipe, data and models do not decide the tokens alone. A chat template may write the date, a data set on Hugging Face
may grow, and another version of a library may read a text otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import transformers
from transformers import PreTrainedTokenizerBase

from paradraft.train.sample import Sample


@dataclass(frozen=True, kw_only=True)
class Learnt:
    """All samples of a run, those that are held out among them, and what made them.

    Args:
        samples: how many there are.
        tokens: of all samples.
        sha256: of all tokens, and of which of them are labels.
        chat_template: SHA-256 of the model's chat template.
        tokenizer: SHA-256 of the tokenizer's vocabulary.
        transformers: the version of the library.
    """

    samples: int
    tokens: int
    sha256: str
    chat_template: str
    tokenizer: str
    transformers: str


def learnt_of(samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase) -> Learnt:
    """Describes the samples of a run."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(len(sample.tokens).to_bytes(8, "little"))
        digest.update(memoryview(sample.tokens).cast("B"))  # type: ignore[arg-type]  # an array
        digest.update(memoryview(sample.is_label).cast("B"))  # type: ignore[arg-type]
    return Learnt(
        samples=len(samples),
        tokens=sum(len(sample.tokens) for sample in samples),
        sha256=digest.hexdigest(),
        chat_template=_sha256(str(tokenizer.chat_template)),
        tokenizer=_sha256(str(sorted(tokenizer.get_vocab().items()))),
        transformers=transformers.__version__,
    )


def difference(before: Learnt, now: Learnt) -> str | None:
    """What changed between two descriptions; None if the tokens are the same."""
    if before.sha256 == now.sha256:
        return None
    if before.tokenizer != now.tokenizer:
        why = "the model's tokenizer is another one"
    elif before.chat_template != now.chat_template:
        why = "the model's chat template is another one"
    elif before.transformers != now.transformers:
        why = f"transformers was {before.transformers} and is {now.transformers}"
    else:
        why = "recipe, files and libraries are the same, so a data set or model on Hugging Face must have changed"
    return f"{_count(before)} were learnt, and now there are {_count(now)} of other content: {why}"


def _count(learnt: Learnt) -> str:
    return f"{learnt.samples} samples of {learnt.tokens} tokens"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
