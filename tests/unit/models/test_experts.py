"""Mixtures of experts: what a token gets beside other tokens, and what does not know them is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paradraft.audit.audit import audit, findings
from paradraft.audit.recording import Case, Recording
from paradraft.audit.reference import own_logits
from paradraft.audit.verdict import PASS, TIES
from paradraft.engine.loader import load
from paradraft.models.causal_lm import CausalLM
from paradraft.models.quantization import quantize
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import GREEDY
from paradraft.sources.loading import load_config, load_model, load_shard
from paradraft.train.init.init_draft import make
from paradraft.train.init.init_from import PrunedTarget, RandomInit
from tests.conftest import VOCAB, tiny_tokenizer
from tests.support.kinds import model_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose third layer of four is dense."""
    found = tmp_path_factory.mktemp("experts")
    model_of("qwen3_moe", torch.float32).save_pretrained(found)
    tiny_tokenizer().save_pretrained(found)
    return str(found)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_other_tokens_change_no_more_than_rounding(implementation: str) -> None:
    """Guards the promise: there is no capacity that tokens of other rows could use up, and no expert is chosen for
    several tokens together. The control is another row."""
    model = model_of("qwen3_moe", torch.float32)
    model.set_experts_implementation(implementation)
    lm = CausalLM(model, vocab_size=VOCAB, compiled=False)
    alone, together = [], []
    rows = torch.randint(VOCAB, (9, 6), generator=torch.Generator().manual_seed(0))
    for some, found in ((rows[:1], alone), (rows, together)):
        lm.start()
        lm.cache.join(len(some))
        found.append(lm.forward(some).logits)
    torch.testing.assert_close(together[0][:1], alone[0], rtol=1e-4, atol=1e-4)
    assert (together[0][1] - alone[0][0]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("sizes", "implementation"), [((30, 16), "eager"), ((32, 10), "eager"), ((32, 16), "grouped_mm")]
)
def test_sizes_without_grouped_products(tmp_path: Path, sizes: tuple[int, int], implementation: str) -> None:
    """Guards small experts: torch has no grouped products for rows that are no multiple of 16 bytes, a traceback."""
    hidden, moe = sizes
    model = model_of("qwen3_moe", torch.float32, hidden_size=hidden, moe_intermediate_size=moe, head_dim=8)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    engine = load(str(tmp_path), drafter="ngram", k=3, runtime=Runtime(device="cpu", dtype="float32"), lengths="fixed")
    assert engine.target.lm.model.config._experts_implementation == implementation
    assert len(engine.generate("helloworld", max_new_tokens=8).tokens) > 0


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_the_audit_passes(folder: str, dtype: str) -> None:
    """Guards the measure of rounding, in which experts have a part, and that the audit leaves the model as it was."""
    engine = load(folder, drafter="ngram", k=3, runtime=Runtime(device="cpu", dtype=dtype), lengths="fixed")
    implementation = "eager" if dtype == "float64" else "grouped_mm"
    report = audit(
        engine, ["helloworld", "abcabcabcabc", "a"], sampling=GREEDY, seeds=1, max_new_tokens=16, batch_size=2,
        report=lambda _: None,
    )  # fmt: skip
    assert report.verdict in (PASS, TIES), findings(report)
    assert engine.target.lm.model.config._experts_implementation == implementation


def test_rounding_is_measured_in_experts_too(folder: str) -> None:
    """Guards an audit that measures rounding of everything but the experts, which are most of such a model."""
    engine = load(folder, drafter="none", runtime=Runtime(device="cpu", dtype="float32"))
    lm, answer = engine.target.lm, Recording(tokens=[5, 6, 7, 8], logits=torch.empty(0))
    case = Case(number=0, prompt=[1, 2, 3], sampling=GREEDY)
    finer = load_model(folder, Runtime(device="cpu", dtype="float64"))
    with torch.no_grad():
        expected = finer(torch.tensor([[1, 2, 3, 5, 6, 7]])).logits[0, 2:, :VOCAB]
    found = own_logits(lm, case, answer, dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert (own_logits(lm, case, answer) - expected).abs().max() > 1e-8


def test_what_knows_no_experts_is_refused(folder: str) -> None:
    """Guards against "int8" that leaves most weights whole, and shares of layers that nobody has tried."""
    with pytest.raises(ValueError, match="dtype='int8': linear layers are rounded, and experts are none"):
        quantize(load_model(folder, Runtime(device="cpu", dtype="float32")), 8)
    with pytest.raises(ValueError, match="mixtures of experts are not shared out"):
        load_shard(folder, Runtime(device="cpu", dtype="float32"), load_config(folder), 2)
    with pytest.raises(ValueError, match="intermediate_size=8: the MLPs of qwen3_moe models cannot be cut"):
        PrunedTarget(intermediate_size=8).check_narrower(model_of("qwen3_moe").config)


def test_drafts_are_made(folder: str, tmp_path: Path) -> None:
    """Guards configs of drafts: which of the kept layers are dense, and that a small draft has no experts."""
    make(folder, tmp_path / "cut", PrunedTarget(layers=2))
    make(folder, tmp_path / "cut more", PrunedTarget(every=2))
    make(folder, tmp_path / "fresh", RandomInit(layers=1, hidden_size=16, heads=2, intermediate_size=24))
    runtime = Runtime(device="cpu", dtype="float32")
    cut, more, fresh = (load_model(str(tmp_path / name), runtime) for name in ("cut", "cut more", "fresh"))
    assert [hasattr(layer.mlp, "experts") for layer in cut.model.layers] == [True, True]
    assert [hasattr(layer.mlp, "experts") for layer in more.model.layers] == [True, False, True]
    assert not any(hasattr(layer.mlp, "experts") for layer in fresh.model.layers)
    engine = load(
        folder, drafter="autoregressive", draft=str(tmp_path / "fresh"), k=2, runtime=runtime, lengths="fixed"
    )
    assert (
        engine.generate("abc", max_new_tokens=4).tokens
        == load(folder, runtime=runtime).generate("abc", max_new_tokens=4).tokens
    )
