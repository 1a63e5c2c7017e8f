"""The self-check of passes in C++: it accepts right ones, random and like trained ones, and no wrong one."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from paradraft.models.forward.cpu import matrix, own_code, self_check, verdicts
from paradraft.models.forward.cpu.build import library
from paradraft.models.forward.cpu.matrix import WrongPassError
from paradraft.models.forward.cpu.model import NativePass
from paradraft.models.forward.cpu.self_check import TOKENS, Figures, figures_of, readings_of, text_for
from paradraft.models.quantization import quantize, rounded_to_8_bits
from paradraft.models.quantized import Parts, QuantizedTensor
from paradraft.models.quantized_format import Format
from tests.support.pass_faults import WHERE_ROUNDED, faults_of, faulty, offsets_ignored, unchanged
from tests.support.quick import mostly_slow
from tests.support.random_models import KINDS_OF_MODELS, SIZES, random_model
from tests.support.real_statistics import MASSIVE, SPECIAL, VOCABULARIES, realistic_model

WEIGHTS = ("float32", "bfloat16", "int8", "int4")
ROWS = 2048


@pytest.fixture(autouse=True)
def no_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that took long, as on a busy machine, are not remembered: later ones would find no fault."""
    monkeypatch.setattr(self_check, "has_passed", lambda _: False)
    monkeypatch.setattr(verdicts, "LEAST_S", math.inf)


@cache
def small(kind: str, weights: str) -> PreTrainedModel:
    """A model with the statistics of trained ones, and a small vocabulary."""
    return as_stored(realistic_model(kind, rows=ROWS), weights)


def as_stored(model: PreTrainedModel, weights: str) -> PreTrainedModel:
    model = model if weights == "float32" else model.bfloat16()
    if weights.startswith("int"):
        quantize(model, int(weights[3:]))
    return model


def with_offsets(model: PreTrainedModel) -> PreTrainedModel:
    """A model in bfloat16 with all linear layers but the head in 4 bits, as in Q4_1 files."""
    for module in model.bfloat16().base_model.modules():
        if isinstance(module, nn.Linear):
            blocks = module.weight.float().unflatten(1, (-1, 32))
            least, most = blocks.aminmax(dim=2)
            scales, offsets = ((most - least) / 15).half(), least.half()
            values = ((blocks - offsets[..., None].float()) / scales[..., None].float()).round().clamp(0, 15)
            weight = QuantizedTensor(values.flatten(1).to(torch.int8), scales, offsets, bits=4, group=32)
            module.weight = nn.Parameter(weight, requires_grad=False)
    return model


def measured(model: PreTrainedModel) -> Figures:
    native = NativePass(model)
    return figures_of(model, native, native.logits_at(*text_for(model)))


def wide_model() -> PreTrainedModel:
    """One layer of the width of a model of 7 billion parameters."""
    config = LlamaConfig(
        vocab_size=128, hidden_size=4096, intermediate_size=2048, num_hidden_layers=1, num_attention_heads=32,
        num_key_value_heads=4, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(7)
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.detach().normal_(std=weight.shape[1] ** -0.5, generator=generator)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kind", VOCABULARIES)
def test_right_passes_are_accepted(kind: str, weights: str) -> None:
    """Guards real models against the slow path, with room to the limits: one that is just kept is a matter of luck."""
    found = measured(as_stored(realistic_model(kind), weights))
    assert found.is_right
    assert found.formula < 2 and found.worst < 10 and found.kernel < 2e-6 and found.rounding < 1.8
    assert found.layer < 1 and found.head < 0.3


def test_a_right_pass_of_a_wide_model_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards models of 7 billion parameters against the slow path: of 4,096 inputs a few round the other way in every
    right pass, and then many of the inputs that depend on them. The control allows for none of this."""
    model = as_stored(wide_model(), "int4")
    logits_NV = (native := NativePass(model)).logits_at(*text_for(model))
    monkeypatch.setattr(own_code, "LEAST_APART", 0.0)
    monkeypatch.setattr(own_code.OwnFloats, "_moved", lambda self, numbers, units=None: numbers)
    assert figures_of(model, native, logits_NV).layer > self_check.MOST_LAYER


def test_a_long_text_accuses_no_right_pass() -> None:
    """Guards audits: each place attends to those before it, and at some of those roundings flip."""
    model = small("llama", "int4")
    native, text_N = NativePass(model), torch.arange(600) * 7 % ROWS
    positions_N = torch.arange(len(text_N))
    logits_NV = native.logits_at(text_N, positions_N)
    found = readings_of(model, native, text_N, positions_N, logits_NV).figures(logits_NV)
    assert found.layer < 1 and found.is_right


def test_the_model_s_own_attention_may_be_any() -> None:
    """Guards `custom_generate` with a model that was loaded with eager attention against the slow path."""
    model = as_stored(realistic_model(rows=ROWS), "bfloat16")
    model.set_attn_implementation("eager")
    assert measured(model).is_right
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("kind", "size", "weights"),
    [
        (kind, SIZES[shift - index], WEIGHTS[index])  # every two of them meet
        for shift, kind in enumerate(KINDS_OF_MODELS)
        for index in range(len(WEIGHTS))
    ],
)
def test_right_passes_of_awkward_sizes_are_accepted(kind: str, size: tuple[int, ...], weights: str) -> None:
    """Guards groups that are not whole, heads of odd sizes, and few outputs."""
    assert measured(as_stored(random_model(kind, size), weights)).is_right


def refused() -> Iterator[tuple[str, str, str]]:
    """Faults, kinds of models and weights: every two of them that can meet do."""
    kinds = ("llama", "qwen2", "qwen3")
    for number, fault in enumerate(dict.fromkeys(fault for kind in kinds for fault in faults_of(kind))):
        having = [kind for kind in kinds if fault in faults_of(kind)]
        for index, weights in enumerate(WEIGHTS):
            yield fault, having[(number + index) % len(having)], weights


QUICK = [case for index, case in enumerate(refused()) if index % len(WEIGHTS) == index // len(WEIGHTS) % len(WEIGHTS)]
"""Each fault once, with all weights in turn."""


@pytest.mark.parametrize(("fault", "kind", "weights"), mostly_slow(refused(), quick=QUICK))
def test_wrong_passes_are_refused(fault: str, kind: str, weights: str) -> None:
    """Guards against a check that refuses nothing: each of these makes other texts."""
    with pytest.raises(WrongPassError, match="formula"):
        faulty(faults_of(kind)[fault])(small(kind, weights))


def test_faults_kinds_and_weights_meet() -> None:
    """Control of the choice above: 4 of the 12 combinations of a fault have all pairs."""
    chosen = list(refused())
    common = [case for case in chosen if all(case[0] in faults_of(kind) for kind in ("llama", "qwen2", "qwen3"))]
    for left, right in ((0, 1), (0, 2), (1, 2)):
        parts = [sorted({case[index] for case in common}) for index in (left, right)]
        assert {(case[left], case[right]) for case in common} == set(itertools.product(*parts))


@pytest.mark.parametrize("weights", WEIGHTS[1:])
@pytest.mark.parametrize("fault", WHERE_ROUNDED)
def test_a_fault_that_only_rounded_passes_have_is_found(
    fault: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the kernels that decode: the exact mode is right here, and over the whole model roundings that flip hide
    these faults, more or less by the instructions of the processor. Each layer by itself shows them by far."""
    model = small("llama", weights)
    with pytest.raises(WrongPassError, match="formula"):
        faulty(WHERE_ROUNDED[fault])(model)
    with monkeypatch.context() as unlimited:
        for name in ("MOST_ROUNDING", "MOST_LAYER", "MOST_HEAD"):
            unlimited.setattr(self_check, name, math.inf)
        native = faulty(WHERE_ROUNDED[fault])(model)
    found = figures_of(model, native, native.logits_at(*text_for(model)))
    whole = found.rounding / self_check.MOST_ROUNDING
    assert dataclasses.replace(found, rounding=0.0, layer=0.0, head=0.0).is_right
    assert max(found.layer / self_check.MOST_LAYER, found.head / self_check.MOST_HEAD) > 3 * whole
    assert whole < 1 or not fault.startswith("scores"), "layers are compared because nothing else shows this"


def test_ignored_offsets_are_found() -> None:
    """Guards models whose groups have offsets, which no other way of storing weights reads."""
    model = with_offsets(realistic_model(rows=ROWS))
    faulty(unchanged)(model)
    with pytest.raises(WrongPassError, match="formula"):
        faulty(offsets_ignored)(model)


def test_keys_and_values_alone_may_have_few_bits() -> None:
    """Guards right models against the slow path: such keys and values were once taken for bfloat16, and nothing."""
    model = realistic_model(rows=ROWS).bfloat16()
    for layer in model.model.layers:
        for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            projection.weight = nn.Parameter(rounded_to_8_bits(projection.weight), requires_grad=False)
    assert measured(model).is_right


@pytest.mark.parametrize("weights", WEIGHTS)
def test_what_plants_faults_is_none(weights: str) -> None:
    """Control: with the same means, and nothing wrong, a pass is accepted."""
    faulty(unchanged)(small("qwen2", weights))


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("byte", [0, 1, -1])
def test_one_bit_of_packed_weights_is_found(weights: str, byte: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards each weight, scale and offset: of a large model, no logit tells of one that is a little wrong."""
    check_packed = matrix._check_packed

    def damaged(panels: matrix.Panels, *rest: Any) -> None:
        if (panels.outputs, panels.inputs) == (64, 192):
            panels.numbers[byte] ^= 1
        check_packed(panels, *rest)

    monkeypatch.setattr(matrix, "_check_packed", damaged)
    with pytest.raises(WrongPassError, match=r"\[64, 192\] are packed as others"):
        NativePass(as_stored(realistic_model(rows=ROWS), weights))


def test_products_of_weights_that_are_packed_wrongly_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the model's own code against a wrong product, and its user against a slow one without a word."""
    packed = matrix._packed_integers

    def damaged(parts: Parts, format: Format) -> torch.Tensor:
        numbers = packed(parts, format)
        numbers[0] ^= 1
        return numbers

    layer = torch.nn.Linear(64, 32, bias=False)
    layer.weight = torch.nn.Parameter(rounded_to_8_bits(layer.weight), requires_grad=False)
    inputs = torch.randn(2, 64)
    expected = layer(inputs)
    monkeypatch.setattr(matrix, "_packed_integers", damaged)
    with pytest.warns(UserWarning, match=r"many times slower: weights of the shape \[32, 64\] are packed as others"):
        matrix.compute_products(layer)
    assert torch.equal(layer(inputs), expected)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_wrong_kernels_are_found(weights: str) -> None:
    """Guards products with weights of few bits, which the exact mode does not make: here of inputs of 6 bits."""

    class Coarse(NativePass):
        def product(self, matrix: matrix.PackedMatrix, inputs: torch.Tensor) -> torch.Tensor:
            largest = inputs.abs().amax(dim=1, keepdim=True)
            return super().product(matrix, (inputs / largest * 31).round() * largest / 31)

    model = small("qwen2", weights)
    native = Coarse.__new__(Coarse)
    with pytest.raises(WrongPassError, match="products"):
        native.__init__(model)


def test_a_cache_that_rounds_is_found() -> None:
    """Guards what only the real pass does: it rounds keys and values here, which this model's own code does not."""

    def plant(native: NativePass, model: PreTrainedModel) -> None:
        native._model.is_bfloat16 = True

    with pytest.raises(WrongPassError, match="rounding"):
        faulty(plant)(small("qwen2", "float32"))


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
def test_torchs_defaults_do_not_matter(default: torch.dtype) -> None:
    """Guards right models: noise that was rounded to bfloat16 moved nothing, and float64 ended the loading."""
    model = small("qwen2", "int8")
    torch.set_default_dtype(default)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            NativePass(model)
    finally:
        torch.set_default_dtype(torch.float32)


def test_products_are_compared_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards right models on CPUs with fast products of fewer bits, where a program allows these; it still does so
    afterwards, for one kind of product or for all."""
    seen, backends, matmul, weights_of = [], torch.backends, torch.backends.mkldnn.matmul, own_code.OwnFloats._slice

    def watched(self: own_code.OwnFloats, weight: torch.Tensor, few: slice) -> torch.Tensor:
        seen.append(matmul.fp32_precision)
        return weights_of(self, weight, few)

    monkeypatch.setattr(own_code.OwnFloats, "_slice", watched)
    try:
        for chooser in (matmul, backends):
            chooser.fp32_precision = "bf16"
            measured(small("qwen2", "int8"))
            assert set(seen) == {"ieee"} and matmul.fp32_precision == "bf16"
            seen.clear()
            chooser.fp32_precision = "none"
            assert matmul.fp32_precision == "none"
    finally:
        matmul.fp32_precision = backends.fp32_precision = "none"


@pytest.mark.parametrize("weights", WEIGHTS)
def test_logits_that_are_all_the_same_are_right(weights: str) -> None:
    """Guards a drafter before its training, whose head is nothing: its deviation is no divisor."""
    model = realistic_model(rows=ROWS, tied=False)
    model.lm_head.weight.zero_()
    assert measured(as_stored(model, weights)).is_right


def test_kernels_of_few_rows_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards plain decoding, whose passes read one token, against a fault that passes over many do not have."""
    call = NativePass.__call__

    def wrong(
        self: NativePass, storage: Any, lengths: list[int], tokens: torch.Tensor, *rest: Any, **named: Any
    ) -> Any:
        out = call(self, storage, lengths, tokens, *rest, **named)
        if tokens.shape[1] == 1:
            out.logits[..., 3] += 1e-3
        return out

    NativePass(small("qwen2", "float32"))
    monkeypatch.setattr(NativePass, "__call__", wrong)
    with pytest.raises(WrongPassError, match="several passes"):
        NativePass(small("qwen2", "float32"))


def test_the_second_load_checks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards starts of folders, which have no file of packed weights, and right verdicts on other models."""
    checked: list[PreTrainedModel] = []

    def count(model: PreTrainedModel, *rest: Any) -> Figures:
        checked.append(model)
        return figures_of(model, *rest)

    library()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(self_check, "figures_of", count)
    monkeypatch.setattr(self_check, "has_passed", verdicts.has_passed)
    (tmp_path / "paradraft").mkdir(mode=0o700)
    model = realistic_model(rows=ROWS)
    NativePass(model)
    assert len(checked) == 1 and not list(tmp_path.glob("*/checked-*"))  # that was fast
    monkeypatch.setattr(verdicts, "LEAST_S", 0.0)
    NativePass(model)
    old = tmp_path / "paradraft" / f"checked-{'0' * 64}"
    old.touch(mode=0o600)
    os.utime(old, (0, 0))
    with pytest.raises(WrongPassError):
        faulty(faults_of("qwen2")["scores times 1.05"])(model)
    assert len(checked) == 3 and len(list(tmp_path.glob("*/checked-*"))) == 2
    NativePass(model)
    assert len(checked) == 3
    model.model.layers[1].self_attn.scaling *= 2  # which the pass does not know of
    with pytest.raises(WrongPassError):
        NativePass(model)
    model.model.layers[1].self_attn.scaling /= 2
    model.get_input_embeddings().weight += 0.01
    NativePass(model)
    assert len(checked) == 5 and not old.exists() and len(list(tmp_path.glob("*/checked-*"))) == 2


def test_texts_are_spread() -> None:
    """Guards against the first ids, on which trained models are ill-conditioned, and positions that are all close."""
    tokens, positions = text_for(realistic_model())
    assert len(tokens) == TOKENS and tokens.sort().values.diff().min() > 2000 and tokens.min() > 1000
    assert positions.diff().min() >= 1 and positions[-1] == 4095 and positions[1] == 2
    small_model = random_model()
    small_model.config.max_position_embeddings = 5
    assert text_for(small_model)[1].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_models_have_the_statistics_of_trained_ones(kind: str) -> None:
    """Control of the models here: few tokens are massive, in two channels, and special ids are nearly nothing."""
    model = realistic_model(kind)
    states = model(torch.arange(1, 400)[None] * 100, output_hidden_states=True).hidden_states[1][0].abs()
    sizes = states.amax(1) / states.median()
    assert sizes.max() > 100 and sizes.median() < sizes.max() / 10
    assert set(states.amax(0).topk(2).indices.tolist()) == set(MASSIVE)
    assert model.get_input_embeddings().weight[:SPECIAL].abs().max() < 1e-3
