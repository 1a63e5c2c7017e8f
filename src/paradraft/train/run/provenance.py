"""Provenance of a drafter: the record next to its weights, and the digest of the training tokens.

Recipe, data files and models alone do not decide the tokens: a chat template may write the date, a data set on Hugging
Face may grow, and another library version may tokenize differently. A run resumes only with identical tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedTokenizerBase

from paradraft.data.samples import Sample
from paradraft.digests import revision_of
from paradraft.environment import describe_machine
from paradraft.train.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Learnt:
    """Description of all samples of a run, including the held-out set.

    Args:
        sha256: of all tokens and labels.
        chat_template: SHA-256 of the model's chat template.
        tokenizer: SHA-256 of the tokenizer's vocabulary.
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
        digest.update(memoryview(sample.is_label).cast("B"))  # type: ignore[arg-type]  # an array
    return Learnt(
        samples=len(samples),
        tokens=sum(len(sample.tokens) for sample in samples),
        sha256=digest.hexdigest(),
        chat_template=_sha256(str(tokenizer.chat_template)),
        tokenizer=_sha256(str(sorted(tokenizer.get_vocab().items()))),
        transformers=transformers.__version__,
    )


def difference(before: Learnt, now: Learnt) -> str | None:
    """Difference between two descriptions, with its cause; None if the tokens are the same."""
    if before.sha256 == now.sha256:
        return None
    if before.tokenizer != now.tokenizer:
        cause = "the model's tokenizer is another one"
    elif before.chat_template != now.chat_template:
        cause = "the model's chat template is another one"
    elif before.transformers != now.transformers:
        cause = f"transformers was {before.transformers} and is {now.transformers}"
    else:
        cause = "recipe, files and libraries are the same, so a data set or model on Hugging Face must have changed"
    return f"{_count(before)} were learnt, and now there are {_count(now)} of other content: {cause}"


def _count(learnt: Learnt) -> str:
    return f"{learnt.samples} samples of {learnt.tokens} tokens"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


RECORD = "train_command.json"


def write_record(recipe: Recipe, device: str, **results: object) -> None:
    """Writes `train_command.json` into `recipe.out`: recipe, data, models, command, versions, hardware and results."""
    record = {
        "fingerprint": recipe.fingerprint,
        "kind": type(recipe).__name__,
        "recipe": recipe.model_dump(mode="json"),
        "data_sha256": recipe.data_hashes,
        "models": _models(recipe),
        "machine": describe_machine(device),
        **results,
    }
    recipe.out.mkdir(parents=True, exist_ok=True)
    file = recipe.out / RECORD
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read_record(folder: Path) -> dict[str, Any]:
    """Reads the record in a folder; empty if there is none."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _models(recipe: Recipe) -> dict[str, dict[str, str | None]]:
    """Models of a recipe: local folders by content digest, those of Hugging Face by revision."""
    names = {role: name for role in recipe.ROLES if (name := getattr(recipe, role)) is not None}
    return {
        role: {"name": name, "sha256_sampled": recipe.model_hashes[role]}
        if role in recipe.model_hashes
        else {"name": name, "revision": revision_of(name)}
        for role, name in names.items()
    }
