"""Rounded weights: what is lost, what is saved, and where torchao cannot serve."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch._inductor import config as inductor

from paradraft.bench.hardware.roofline import Size
from paradraft.engine.loader import load
from paradraft.models.quantization import check_quantization, stored_bytes
from paradraft.models.quantized import QuantizedTensor
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from paradraft.sources.target_loading import load_target
from tests.e2e.conftest import Paradraft, assert_mistake
from tests.e2e.conftest import paradraft as paradraft
from tests.support.decoding import empty_rows

PROMPT = "abcabcabc"


@pytest.fixture(params=[False, True], ids=["without bf16", "with bf16"], autouse=True)
def has_bf16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Runs every test as on a CPU without instructions for bfloat16 and as on one with them: which one it is decides
    what passes compute in."""
    monkeypatch.setattr("paradraft.models.devices.computes_bf16", lambda device: request.param)
    return request.param


def logits(family: Path, dtype: str, *, compiled: bool = False) -> torch.Tensor:
    lm = load_target(str(family / "target"), Runtime(dtype=dtype, compiled=compiled)).lm
    empty_rows(lm, 1)
    return lm.forward(torch.arange(1, 13)[None]).logits


def test_logits_are_nearly_those_of_whole_weights(family: Path) -> None:
    """Guards against weights that are not rounded at all, and against scales that belong to others."""
    whole = logits(family, "float32")
    lm = load_target(str(family / "target"), Runtime(device="cpu", dtype="int8", compiled=False)).lm
    for module in lm.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = torch.nn.Parameter(module.weight.dequantize(), requires_grad=False)
    empty_rows(lm, 1)
    error = (lm.forward(torch.arange(1, 13)[None]).logits - whole).abs().max() / whole.std()
    assert 1e-4 < error < 0.1


def test_inputs_are_rounded_too(family: Path) -> None:
    """Guards against products in float32, which take longer, and against inputs that are rounded too coarsely."""
    whole, rounded = logits(family, "float32"), logits(family, "int8")
    assert 1e-4 < (rounded - whole).square().mean().sqrt() / whole.std() < 0.05


def test_only_a_quarter_is_read(family: Path) -> None:
    """Guards the floor of rounded weights, and a head that keeps all its bits because it was the embedding."""
    whole, rounded = (
        load_target(str(family / "target"), Runtime(dtype=dtype)).lm.model for dtype in ("float32", "int8")
    )
    head = rounded.get_output_embeddings().weight
    rows, width = head.shape
    assert rows * width < stored_bytes(head) <= rows * width + 8 * rows  # a scale for each row, perhaps a zero point
    assert rounded.get_input_embeddings().weight.dtype == Runtime(dtype="int8").computed_in
    assert Size.of(rounded).weight_bytes < 0.5 * Size.of(whole).weight_bytes
    assert Size.of(rounded).body_weights == Size.of(whole).body_weights
    # Prompts of few-bit models ran in half of the "least" time while it was of float32 products.
    assert (Size.of(rounded).dtype, Size.of(whole).dtype) == (torch.int8, torch.float32)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=3)])
def test_a_drafter_changes_no_token_of_a_rounded_target(family: Path, sampling: Sampling, dtype: str) -> None:
    """Guards the promise of the library where target and draft are rounded."""
    runtime = Runtime(device="cpu", dtype=dtype)
    plain = load(str(family / "target"), runtime=runtime)
    drafted = load(
        str(family / "target"), drafter="pard", draft=str(family / "pard"), k=3, runtime=runtime, lengths="fixed"
    )
    expected = plain.generate(PROMPT, max_new_tokens=30, sampling=sampling).tokens
    assert drafted.generate(PROMPT, max_new_tokens=30, sampling=sampling).tokens == expected


@pytest.mark.slow
def test_compiled_passes_compute_the_same(family: Path, has_bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a cache on disk that takes rounded weights for others, and against a failed compilation, which is
    only warned of. In bfloat16 a compiled pass rounds at other places than an eager one, and what is rounded to 8 bits
    after that falls to either side: it is as far from what float32 gives."""
    plain = logits(family, "int8")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="compilation failed")
        fast = logits(family, "int8", compiled=True)
    if not has_bf16:
        assert (fast - plain).abs().max() < 1e-4 * plain.std()
        return
    monkeypatch.setattr("paradraft.models.devices.computes_bf16", lambda device: False)
    exact = logits(family, "int8")
    far, as_far = ((found - exact).square().mean().sqrt() / exact.std() for found in (fast, plain))
    assert 1e-3 < far < 1.25 * as_far < 0.05


def test_methods_of_a_benchmark_may_have_it(paradraft: Paradraft, family: Path, tmp_path: Path) -> None:
    """Guards `dtype=int8` beside other dtypes in one run, `generate` of transformers included."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc"}\n', encoding="utf-8")
    asked = ["--prompts", prompts, "--num-prompts", 1, "--max-new-tokens", 6, "--runs", 1, "--no-compile"]
    methods = "hf:dtype=int8,ar,ar:dtype=int8,ngram:dtype=int8"
    done = paradraft("bench", "--target", family / "target", "--methods", methods, *asked)
    assert done.code == 0, done.err
    assert "warning" not in done.err


@pytest.mark.parametrize("has_bf16", [True], ids=["in a process of its own"], indirect=True)
def test_nothing_is_said_at_import() -> None:
    """Guards everyone who has torchao installed: `transformers` imports it, and it complains."""
    done = subprocess.run(
        [sys.executable, "-c", "import paradraft; paradraft.load; import torchao"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_cpus_need_no_torchao(paradraft: Paradraft, family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the base installation: on CPUs the kernels for few bits are our own."""
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    asked = ["--target", family / "target", "--prompt", "a", "--device", "cpu", "--max-new-tokens", 3]
    for dtype in ("int8", "int4"):
        assert paradraft("generate", *asked, "--dtype", dtype).code == 0
    with pytest.raises(ValueError, match=r"pip install 'paradraft\[quantized\]'"):
        check_quantization(8, torch.device("cuda"), torch.bfloat16)


def test_models_of_other_kinds_have_the_kernels(family: Path) -> None:
    """Guards architectures that have no pass in C++: their own code multiplies with the same kernels."""
    lm = load_target(str(family / "target"), Runtime(device="cpu", dtype="int8", compiled=False)).lm
    weights = [weight for weight in lm.model.parameters() if isinstance(weight, QuantizedTensor)]
    assert weights and all(weight.product is not None for weight in weights)


def test_other_models_are_compiled_as_before(family: Path) -> None:
    """Guards other methods of the same run: torchao would set Inductor's options for the whole process."""
    before = inductor.get_config_copy(), torch.get_float32_matmul_precision()
    load_target(str(family / "target"), Runtime(dtype="int8"))
    assert (inductor.get_config_copy(), torch.get_float32_matmul_precision()) == before


def test_4_bits_need_bf16() -> None:
    """Guards the message on a GPU that computes no bf16."""
    with pytest.raises(ValueError, match="compute in bf16, which this GPU does not: use int8"):
        check_quantization(4, torch.device("cuda"), torch.float32)


def test_a_benchmark_finds_it_before_it_loads(
    paradraft: Paradraft, family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards minutes of loading: what cannot be had is known before."""

    def refuse(*_: object) -> None:
        raise ValueError("dtype='int4': not on this device: use int8")

    monkeypatch.setattr("paradraft.models.quantization.check_quantization", refuse)
    asked = ["--methods", "ar,ar:dtype=int4", "--num-prompts", 1, "--device", "cpu"]
    assert_mistake(paradraft("bench", "--target", family / "target", *asked), "use int8")


def test_answers_of_a_rounded_target_are_its_own(paradraft: Paradraft, family: Path, tmp_path: Path) -> None:
    """Guards files of training data against two targets in one: rounded weights are another target."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc"}\n', encoding="utf-8")
    asked = [
        "--target",
        family / "target",
        "--prompts",
        prompts,
        "--out",
        tmp_path / "out.jsonl",
        "--max-new-tokens",
        4,
    ]
    done = paradraft("regenerate", *asked, "--dtype", "int8")
    assert done.code == 0, done.err
    computed_in = str(Runtime(dtype="int8").computed_in).removeprefix("torch.")
    assert_mistake(paradraft("regenerate", *asked), f"{computed_in}, QuantizedTensor")
    assert paradraft("regenerate", *asked, "--dtype", "int8").code == 0


def test_vllm_does_not_read_them(paradraft: Paradraft, family: Path, tmp_path: Path) -> None:
    """Guards a comparison of other weights than ours."""
    asked = ["--vllm-python", sys.executable, "--num-prompts", 1, "--dtype", "int8"]
    outcome = paradraft("bench", "--target", family / "target", "--methods", "ar,vllm", *asked)
    assert_mistake(outcome, "'vllm'", "dtype='int8'", "use float32 or bfloat16")
