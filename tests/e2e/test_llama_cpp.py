"""llama.cpp itself, where it is installed: the same text, with and without a draft, which is as often accepted."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from paradraft.bench.baselines.llama_cpp import LlamaCppProcess, model_file
from paradraft.engine.loader import load
from paradraft.formats.folder import save_model
from paradraft.models.quantized import QuantizedTensor
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import GREEDY
from paradraft.sources.gguf_model import names_of
from paradraft.sources.target_loading import load_target
from tests.conftest import VOCAB, tiny_tokenizer
from tests.e2e.conftest import Paradraft
from tests.support.drafts import PROMPTS
from tests.support.gguf_files import tiny_model, unpermuted, write_gguf
from tests.support.installed_llama_cpp import PYTHON, needs_llama_cpp
from tests.support.random_models import SIZES, random_model

K, TOKENS = 4, 48


def models_of(folder: Path, kind: str, size: tuple[int, ...]) -> list[Path]:
    """A random target with a tiny tokenizer, and a draft model: the target's weights, disturbed."""
    found = []
    for name, noise in (("target", 0.0), ("draft", 0.02)):
        model = mistral() if kind == "mistral" else random_model(kind, size)
        generator = torch.Generator().manual_seed(2)
        for parameter in model.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
        save_model(folder / name, model, tiny_tokenizer())
        found.append(folder / name)
    return found


def mistral() -> PreTrainedModel:
    torch.manual_seed(5)
    config = MistralConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=192, initializer_range=0.2, sliding_window=None,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return MistralForCausalLM(config).eval().requires_grad_(False)


@needs_llama_cpp
@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("llama", SIZES[0]),
        ("llama", SIZES[1]),
        ("llama with biases", SIZES[2]),
        ("qwen2", (64, 96, 4, 2, 16, 80)),
        ("qwen3", SIZES[0]),
        ("qwen3", SIZES[3]),
        ("mistral", SIZES[0]),
    ],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_llama_cpp_says_and_drafts_what_we_do(kind: str, size: tuple[int, ...], batch: int, tmp_path: Path) -> None:
    """Guards names, the order of rows, rotary frequencies, biases, rows that are no tokens, caches that go back, and
    batches: each of them would be another text, or drafts that are accepted less often."""
    target, draft = models_of(tmp_path, kind, size)
    ours = load(str(target), drafter="autoregressive", draft=str(draft), k=K, dtype="float32", lengths="fixed")
    files = {
        role: model_file(str(folder), "float32", tmp_path / "gguf", print)
        for role, folder in (("target", target), ("draft", draft))
    }
    given: dict[str, Any] = {"k": K, "batch": batch, "exact": True, "threads": 1, "forbidden": []}
    given["tokens"] = ours.target.vocab_size
    prompts = [*PROMPTS, "abcdefghij" * 6][:3]
    wanted = [ours.generate(prompt, max_new_tokens=TOKENS) for prompt in prompts]
    for drafted in (False, True):
        models = {"target": files["target"], "draft": files["draft"] if drafted else None}
        with LlamaCppProcess("llama-cpp", PYTHON.absolute(), given | models, ours.target) as engine:
            for start in range(0, len(prompts), batch):
                theirs = engine(prompts[start : start + batch], TOKENS, GREEDY)
                expected = wanted[start : start + batch]
                assert theirs.tokens == [answer.tokens for answer in expected]
                if drafted:
                    assert theirs.accepted == [list(answer.accepted) for answer in expected]
    assert any(sum(answer.accepted) for answer in wanted) and len({tuple(answer.tokens) for answer in wanted}) == 3


@needs_llama_cpp
@pytest.mark.parametrize(("dtype", "weights"), [("int8", "Q8_0"), ("int4", "Q4_0"), ("float16", "F16")])
def test_weights_of_few_bits_are_still_the_model(dtype: str, weights: str, tmp_path: Path) -> None:
    """Guards llama.cpp's rounding of files without a vocabulary: weights take the bits that they are said to take, and
    begin the texts of the shipped model as the whole weights do."""
    ours = load("pocket", dtype="float32")
    told = model_file("src/paradraft/pocket/target", dtype, tmp_path / "gguf", print)
    given = {"target": told, "draft": None, "k": 1, "batch": 1, "exact": False, "threads": 1, "forbidden": []}
    given["tokens"] = ours.target.vocab_size
    prompt = "def add(first, second):\n    return first"
    wanted = ours.generate(prompt, max_new_tokens=4).tokens
    with LlamaCppProcess("llama-cpp", PYTHON.absolute(), given, ours.target) as engine:
        assert engine([prompt], 4, GREEDY).tokens == [wanted]
        facts = engine.facts
    bits = {"Q8_0": (8.5, 8.7), "Q4_0": (4.5, 5.5), "F16": (16.0, 16.2)}[weights]
    numbers = sum(weight.numel() for weight in ours.target.lm.model.parameters())
    assert (
        facts["weights"] == {"target": weights} and bits[0] <= 8 * facts["weight_bytes"]["target"] / numbers <= bits[1]
    )
    assert Path(told["file"]).is_file()


@needs_llama_cpp
def test_a_file_that_is_damaged_is_one_line(tmp_path: Path) -> None:
    """Guards against a crash of another program that nobody understands."""
    told = model_file("shape:tiny-target", "float32", tmp_path / "gguf", print)
    file = Path(told["file"])
    file.write_bytes(file.read_bytes()[:-5000])
    ours = load("pocket")
    given = {
        "target": told,
        "draft": None,
        "k": 1,
        "batch": 1,
        "exact": True,
        "threads": 1,
        "forbidden": [],
        "tokens": 9,
    }
    with pytest.raises(ValueError, match=r"llama.cpp: OSError: .*-F32.gguf cannot be loaded: .+") as raised:
        LlamaCppProcess("llama-cpp", PYTHON.absolute(), given, ours.target).__enter__()
    assert "\n" not in str(raised.value)


@needs_llama_cpp
def test_a_benchmark_with_llama_cpp(paradraft: Paradraft, tmp_path: Path) -> None:
    """Guards the comparison that users run: the shipped weights, token for token, and as often accepted as with our
    own loop; its settings and passes in the file; and drawn acceptance for shapes, with and without a draft model."""
    asked = ["--num-prompts", 2, "--max-new-tokens", 48, "--runs", 1, "--llama-cpp-python", PYTHON]
    methods = ["--methods", "ar,autoregressive:k=3,llama-cpp,llama-cpp-draft:k=3", "--dtype", "float32"]
    outcome = paradraft("bench", "--target", "pocket", *methods, *asked, "--json", tmp_path / "out.json")
    assert outcome.code == 0, outcome.err
    result = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    found, ours = result["methods"], result["methods"]["autoregressive:k=3"]
    assert found["llama-cpp"]["identical_to_ar"] and found["llama-cpp-draft:k=3"]["identical_to_ar"]
    for key in (
        "acceptance_length",
        "acceptance_per_position",
        "accepted_share_of_rounds",
        "acceptance_length_first_32",
    ):
        assert found["llama-cpp-draft:k=3"][key] == ours[key]
    engine = found["llama-cpp-draft:k=3"]["engine"]
    assert engine["passes"] == {part: ours["floor_of"][part]["passes"] for part in ("target", "draft")}
    assert engine["weights"] == {"target": "F32", "draft": "F32"} and engine["threads"] >= 1
    assert "llama-cpp-python" in result["machine"]["versions"]["llama_cpp"] == engine["version"]
    assert found["llama-cpp"]["engine"]["passes"] == {"target": 96} and ours["engine"] is None
    shapes = [
        "--target",
        "shape:tiny-target",
        "--draft",
        "shape:tiny-draft",
        "--prompt-tokens",
        20,
        "--dtype",
        "float32",
    ]
    drawn = ["--methods", "ar,llama-cpp,llama-cpp-draft:k=2:batch=2", "--synthetic-acceptance", "0.5,0.25"]
    outcome = paradraft("bench", *shapes, *drawn, *asked)
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out.splitlines()[-1])
    assert 1.2 < found["llama-cpp-draft:k=2:batch=2"]["acceptance_length"] < 2.5
    assert found["llama-cpp"]["synthetic_acceptance"] is None and found["llama-cpp"]["tokens"] == 96


QUANTIZE = """
import ctypes, sys
import llama_cpp
source, *made = sys.argv[1:]
for path, kind in zip(made[::2], made[1::2]):
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = int(kind), 1
    if llama_cpp.llama_model_quantize(source.encode(), path.encode(), ctypes.byref(settings)):
        sys.exit(f"{path} was not made")
"""
FILE_TYPES = {"Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18, "Q4_1": 3, "Q3_K_M": 12, "IQ4_NL": 25}
"""llama.cpp's numbers of some mixtures of types; the last two are not read here."""


@needs_llama_cpp
@pytest.mark.parametrize("tied", [True, False])
def test_files_that_llama_cpp_has_rounded(tied: bool, tmp_path: Path) -> None:
    """Guards real mixtures, where embedding, head and some layers have other types than the rest, against blocks that
    tests make up: the weights are those that the `gguf` package reads, bit for bit, and what is not read is named."""
    model = tiny_model("llama", tied=tied, width=256, num_hidden_layers=3)
    write_gguf(tmp_path / "f16.gguf", model, "F16")
    files = {name: tmp_path / f"{name}.gguf" for name in FILE_TYPES}
    made = [str(part) for name, file in files.items() for part in (file, FILE_TYPES[name])]
    subprocess.run([PYTHON, "-c", QUANTIZE, tmp_path / "f16.gguf", *made], check=True, capture_output=True, timeout=60)
    for name, file in files.items():
        if name in ("Q3_K_M", "IQ4_NL"):
            with pytest.raises(ValueError, match=rf"the tensor '.*' is of the type {name[:4]}.* is not supported"):
                load_target(str(file), Runtime())
            continue
        stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
        assert len({tensor.tensor_type for tensor in stored.values()}) > (1 if name == "Q6_K" else 2)
        found = load_target(str(file), Runtime(compiled=False)).lm.model
        weights = dict(found.named_parameters())
        for theirs, ours in names_of(3):
            if theirs not in stored:
                continue
            expected = torch.from_numpy(gguf.quants.dequantize(stored[theirs].data, stored[theirs].tensor_type).copy())
            heads = {"q_proj": 4, "k_proj": 2}.get(ours.split(".")[-2])
            expected = expected if heads is None else unpermuted(expected, heads)
            weight = weights[ours]
            numbers = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
            assert torch.equal(numbers, expected.to(numbers.dtype)), (name, theirs)
