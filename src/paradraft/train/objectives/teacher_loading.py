"""Loads teachers: models of numbers, and files of few bits with the pass that decodes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from paradraft.models.architectures import context_of
from paradraft.models.devices import device_of
from paradraft.models.runtime import Runtime
from paradraft.sources.loading import is_in_few_bits, load_config, load_numbers, load_tokenizer, locate
from paradraft.sources.target_loading import load_target
from paradraft.text.vocabulary import check_rows, of_one_family
from paradraft.train.objectives.pass_teacher import PassTeacher
from paradraft.train.objectives.teacher import Teacher


def teacher_folder(name: str) -> str:
    """Folder or Hugging Face id of a teacher."""
    with _as_teacher():
        return locate(name, "target")


@contextmanager
def _as_teacher() -> Iterator[None]:
    """Prefixes errors with "teacher: "."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"teacher: {error}") from None


def is_decoded_as_stored(folder: str, config: PretrainedConfig, device: torch.device) -> bool:
    """Whether the pass that decodes a frozen model computes its states and logits: for weights of few bits, on a CPU.

    That pass runs on CPUs. On a GPU, where it would be slow, such weights are numbers.
    """
    return device.type == "cpu" and is_in_few_bits(folder, config)


def load_teacher(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    mask_id: int | None,
    masks: int = 1,
    longest: int,
    largest: int,
    runtime: Runtime,
) -> Teacher:
    """Loads a teacher for a drafter.

    Args:
        longest: tokens of the longest sample.
        largest: largest token id of the samples.

    Raises:
        ValueError: there is no such model, its vocabulary differs, its embedding lacks a token of the samples, or its
            context is too short.
    """
    folder = teacher_folder(name)
    with _as_teacher():
        config, theirs = load_config(folder), load_tokenizer(folder).get_vocab()
    ours = tokenizer.get_vocab()
    if not of_one_family(ours, theirs):
        raise ValueError(f"teacher {name!r} has another vocabulary than the model: use one of the same family")
    check_rows(config.vocab_size, largest, f"teacher {name!r}")
    if longest > (room := context_of(config)):
        raise ValueError(f"teacher {name!r} has room for {room} tokens, a sample has {longest}: set max_length={room}")
    if is_decoded_as_stored(folder, config, torch.device(device_of(runtime.device))):
        return PassTeacher(load_target(folder).lm, mask_id=mask_id, masks=masks)
    model = load_numbers(folder, runtime)
    return Teacher(model, vocab_size=max(ours.values()) + 1, mask_id=mask_id, masks=masks)
