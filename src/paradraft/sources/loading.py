"""Loads models by name: a Hugging Face id, a local folder, a GGUF file, the shipped "pocket" family, or a shape."""

from __future__ import annotations

import logging
import shlex
import warnings
from collections.abc import Iterable
from copy import deepcopy
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed import DistributedConfig

from paradraft.formats.folder import ADAPTER_CONFIG, check_index
from paradraft.formats.gguf import SUFFIX, is_gguf, read_gguf
from paradraft.models.architectures import context_of, experts_settings, spec_of
from paradraft.models.config_check import check_architecture
from paradraft.models.devices import device_of
from paradraft.models.names import POCKET, check_has_weights, is_shape
from paradraft.models.quantized import dequantize
from paradraft.models.runtime import DTYPES, QUANTIZED, STORED, Runtime
from paradraft.sources import gguf_config, gguf_model, hub, packed_folder
from paradraft.sources.gguf_tokenizer import check_same_tokens, gguf_tokenizer
from paradraft.sources.loading_errors import is_no_table, loading_of, some_of, without_bars
from paradraft.sources.presets import id_tokenizer, shape_of
from paradraft.sources.reduced_head import ReducedHead, set_head
from paradraft.text.generation_config import end_ids, suppressed_ids
from paradraft.text.vocabulary import used_rows

ATTENTION = "sdpa"
"""Attention of every loaded model; the config's choice is ignored, because it could be code from the hub."""


def pocket_folder(role: str) -> Path:
    """The folder of the shipped target, draft or pard model."""
    return Path(str(resources.files("paradraft"))) / "pocket" / role


def locate(name: str, role: str) -> str:
    """Resolves a model name to a folder, file, Hugging Face id or shape; "pocket" depends on the role.

    A GGUF file of a Hugging Face repository, such as "REPO:Q4_K_M", is downloaded if the cache lacks it.

    Raises:
        ValueError: there is no such model.
    """
    if name == POCKET:
        if not (folder := pocket_folder(role)).is_dir():
            raise ValueError(
                f"the shipped family has no {role} drafter: train one with `paradraft train {role} RECIPE`, and name "
                "its folder as the draft model"
            )
        return str(folder)
    if is_shape(name):
        shape_of(name)
    elif not Path(name).exists() and (hub.names_gguf(name) or not is_gguf(name)):
        return hub.located(name)
    elif is_gguf(name):
        read_gguf(name)
    elif (Path(name) / ADAPTER_CONFIG).is_file():
        command = shlex.join(["paradraft", "merge", name, "--out", "FOLDER"])
        raise ValueError(f"{name!r} is an adapter: `{command}` makes a model of it")
    elif not (Path(name) / "config.json").is_file():
        if (Path(name) / "checkpoint").is_dir():
            raise ValueError(f"{name!r} is of a training that has not ended: the same `paradraft train` goes on")
        if files := sorted(Path(name).glob(f"*{SUFFIX}")):
            raise ValueError(f"{name!r} is not a model folder: name the file, such as {str(files[0])!r}")
        raise ValueError(f"{name!r} is not a model folder: it has no config.json")
    return name


def load_config(name: str) -> PretrainedConfig:
    """Loads the config of a causal LM, and checks it before its weights are loaded.

    Raises:
        ValueError: there is none, or the model is no supported causal LM.
    """
    check_has_weights(name)
    if is_gguf(name):
        return gguf_config.config_of(name)
    check_index(Path(name))
    with loading_of(f"model {name!r}"):
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        except KeyError as error:
            if "rope_parameters" not in str(error):
                raise
            raise ValueError(error.args[0]) from None  # a missing setting, not a damaged file
    check_architecture(config, name)
    return config


def config_of(name: str) -> PretrainedConfig:
    """The config of a causal LM or of a shape; raises as `load_config`."""
    return shape_of(name).config() if is_shape(name) else load_config(name)


def is_in_few_bits(name: str, config: PretrainedConfig) -> bool:
    """Whether a model's weights are stored quantized: a GGUF file, or a folder of GPTQ or AWQ.

    Args:
        config: of the model.

    Raises:
        ValueError: they are, in an unsupported format.
    """
    if is_shape(name):
        return False
    if is_gguf(name):
        return gguf_model.has_few_bits(read_gguf(name))
    return packed_folder.packing_of(config, name) is not None


def load_generation_config(name: str, config: PretrainedConfig | None = None) -> GenerationConfig:
    """Loads a model's generation config, or derives it from the model's config if there is no such file.

    Args:
        config: of the model; None loads it.

    Raises:
        ValueError: as `load_config`, or it names invalid token ids.
    """
    config = load_config(name) if config is None else config
    if is_gguf(name):
        return gguf_config.generation_config_of(name)
    with loading_of(f"model {name!r}"):
        try:
            generation = GenerationConfig.from_pretrained(name)
        except OSError:
            if (Path(name) / "generation_config.json").exists():
                raise  # it is there and cannot be read
            generation = GenerationConfig.from_model_config(config)
    for ids in (end_ids, suppressed_ids):
        ids(generation, name)  # raises ValueError
    return generation


def room(config: PretrainedConfig, capacity: int | None) -> int:
    """Maximum tokens of a row, prompt included: the requested capacity, or the model's limit."""
    return context_of(config) if capacity is None else capacity


def load_model(
    name: str,
    runtime: Runtime,
    config: PretrainedConfig | None = None,
    *,
    head: ReducedHead | None = None,
    **settings: Any,
) -> PreTrainedModel:
    """Loads a causal LM for inference, without rounding its weights: `load_target` does that for int8 and int4.

    Args:
        runtime: its dtype is not "auto".
        config: of the model; None loads it.
        head: its output head, if that has fewer rows than the embedding.
        settings: further arguments of `from_pretrained`.

    Raises:
        ValueError: there is no such model, it is no supported causal LM, its weights do not fit its config, or they are
            stored quantized and `runtime` requires a dtype.
    """
    config = load_config(name) if config is None else config
    if runtime.dtype in DTYPES and is_in_few_bits(name, config):
        raise ValueError(
            f"{name!r} has weights that are stored in few bits, and {runtime.dtype} is needed here: name the model "
            "that it was made from"
        )
    device = device_of(runtime.device)
    if is_gguf(name):
        return gguf_model.load(name, runtime.computed_in, attention=ATTENTION).to(device)
    generation = load_generation_config(name, config)  # `from_pretrained` ignores a file that cannot be read
    if runtime.dtype == STORED:
        packing = packed_folder.packing_of(config, name)
        assert packing is not None
        model, unused = packed_folder.load(name, deepcopy(config), packing, runtime.computed_in, attention=ATTENTION)
        model.generation_config = generation
        _warn_of_unused(unused, name)
        return model
    logging.getLogger("transformers.modeling_utils").addFilter(is_no_table)
    with loading_of(f"model {name!r}"), without_bars():
        model, info = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=runtime.computed_in,
            trust_remote_code=False,
            attn_implementation=ATTENTION,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **experts_settings(runtime.computed_in, config) | settings,
        )
    apart = set_head(model, head)
    others = [
        f"{key} has the shape {tuple(is_)}, not {tuple(wanted)}"
        for key, is_, wanted in info["mismatched_keys"]
        if key not in apart
    ]
    if wrong := sorted([*others, *(f"{key} is missing" for key in set(info["missing_keys"]) - apart)]):
        raise ValueError(f"model {name!r}: its weights do not fit its config.json, {some_of(wrong)}")
    _warn_of_unused(set(info["unexpected_keys"]) - apart, name)
    return (model if settings else model.to(device)).eval()


def load_numbers(name: str, runtime: Runtime, *, head: ReducedHead | None = None) -> PreTrainedModel:
    """Loads a causal LM as `load_model`, for training: weights that are stored in few bits become numbers."""
    config = load_config(name)
    if not is_in_few_bits(name, config):
        return load_model(name, runtime, config, head=head)
    model = load_model(name, Runtime(device="cpu", dtype=STORED), config)
    dequantize(model, runtime.computed_in)
    return model.to(device_of(runtime.device))


def _warn_of_unused(weights: Iterable[str], name: str) -> None:
    if unused := sorted(weights):
        warnings.warn(f"{name}: weights that are not used: {some_of(unused)}", stacklevel=3)


def load_shard(name: str, runtime: Runtime, config: PretrainedConfig, ranks: int) -> PreTrainedModel:
    """Loads this process's tensor-parallel shard of a causal LM, by the plan that `transformers` has for it.

    Args:
        runtime: its dtype, and the kind of device.
        ranks: number of processes that `torchrun` has started; all must call this and compute every pass together.

    Raises:
        ValueError: the model cannot be sharded among `ranks`, or is on another kind of device than requested.
    """
    if is_shape(name):
        raise ValueError(f"{name!r}: tensor parallelism needs weights that are on disk")
    if runtime.dtype in QUANTIZED or runtime.compiled:
        raise ValueError("tensor parallelism: passes are those of transformers, so neither int8, int4 nor --compile")
    if is_gguf(name) or is_in_few_bits(name, config):
        raise ValueError(f"{name!r}: tensor parallelism shares out folders of unrounded weights: use such a one")
    if spec_of(config).has_experts:
        raise ValueError(f"{name!r}: mixtures of experts are not shared out by layer: give whole layers to devices")
    if not getattr(config, "base_model_tp_plan", None):
        raise ValueError(f"{name!r}: transformers has no plan of how {config.model_type} models share their layers")
    for key in ("num_key_value_heads", "num_attention_heads"):
        if (heads := getattr(config, key)) % ranks:
            raise ValueError(f"{name!r}: {key} is {heads}, which {ranks} processes cannot share evenly")
    model = load_model(name, runtime, config, distributed_config=DistributedConfig(tp_size=ranks, tp_plan="auto"))
    if model.device.type != (wanted := torch.device(runtime.device).type):
        raise ValueError(f"device={wanted!r}: tensor parallelism computes on {model.device.type} here, name that")
    return model


def load_skeleton(
    name: str, dtype: torch.dtype | None = None, config: PretrainedConfig | None = None
) -> PreTrainedModel:
    """A causal LM or shape on the meta device, whose weights can be counted or filled in.

    Args:
        dtype: of the weights; by default the config's.
        config: of the model; None loads it.

    Raises:
        ValueError: there is no such model, or it is no supported causal LM.
    """
    config = config_of(name) if config is None else deepcopy(config)  # models change theirs
    settings = {} if dtype is None else {"dtype": dtype}
    with loading_of(f"model {name!r}"), torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, trust_remote_code=False, attn_implementation=ATTENTION, **settings
        ).eval()


def load_tokenizer(name: str, config: PretrainedConfig | None = None) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model, whose `config` is read unless given; raises ValueError if there is none."""
    # Silences the warning about texts longer than the model's limit, which is checked with a better message where the
    # text is used.
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    if is_gguf(name):
        return gguf_tokenizer(read_gguf(name, vocabulary=True))
    if config is None and (not Path(name).is_dir() or (Path(name) / "config.json").is_file()):
        load_config(name)  # the tokenizer's class depends on it, so its errors would be reported as the tokenizer's
    with loading_of(f"the tokenizer of {name!r}"):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    if tokenizer.get_vocab().keys() == {token.content for token in tokenizer.added_tokens_decoder.values()}:
        # `transformers` returns such a tokenizer for a Qwen folder without tokenizer files.
        raise ValueError(f"cannot load the tokenizer of {name!r}: it has no tokens but special ones")
    return tokenizer


def tokenizer_of(folder: str, config: PretrainedConfig | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model or of a shape; see `load_tokenizer`."""
    return id_tokenizer(folder) if is_shape(folder) else load_tokenizer(folder, config)


def tokenizer_for(folder: str, named: str | None, config: PretrainedConfig | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer for a target.

    Args:
        named: folder or Hugging Face id of another tokenizer; None for the target's own.
        config: of the target; None loads it.

    Raises:
        ValueError: there is none, or the named tokenizer has other tokens than the target.
    """
    if named is None:
        return tokenizer_of(folder, config)
    tokenizer = load_tokenizer(named if Path(named).is_dir() else locate(named, "target"))
    if (used := used_rows(tokenizer)) > (rows := (config or config_of(folder)).vocab_size):
        raise ValueError(
            f"tokenizer {named!r} has {used} tokens, and {folder!r} an embedding of {rows} rows: name the tokenizer of "
            "the model that it was made of"
        )
    if is_gguf(folder):
        check_same_tokens(read_gguf(folder, vocabulary=True), tokenizer.get_vocab(), f"tokenizer {named!r}")
    return tokenizer


def tokens_of(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Number of ids of a target that are tokens; further rows of its embedding are padding."""
    return min(max(tokenizer.get_vocab().values()) + 1, int(config.vocab_size))
