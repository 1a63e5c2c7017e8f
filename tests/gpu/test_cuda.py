"""The promise of equal texts on a GPU, through compiled passes, and training there. Run by `make test-gpu`."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import shapes_on_gpu
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from paradraft.bench.hardware.bandwidth import Speeds
from paradraft.bench.hardware.roofline import Size
from paradraft.core import Draft, TargetOut
from paradraft.data.samples import Sample
from paradraft.drafters import drafter_class, drafter_names
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.engine.speculation import Speculation
from paradraft.errors import is_out_of_memory
from paradraft.models.forward import eager
from paradraft.models.quantization import quantize
from paradraft.models.runtime import Runtime
from paradraft.placement import Placement, stages_of
from paradraft.sampling_params import Sampling
from paradraft.train.drafters import eagle_parallel, pard
from paradraft.train.drafters.eagle_parallel import EagleParallelRecipe
from paradraft.train.drafters.pard_recipe import PardRecipe
from paradraft.train.objectives.batch import Drop, collate
from paradraft.train.objectives.objective import Objective
from paradraft.train.run import launch
from paradraft.train.run.progress import Evaluation, Progress, Report
from paradraft.tree import Tree
from tests.e2e.conftest import Paradraft
from tests.e2e.conftest import paradraft as paradraft
from tests.support import gguf_files
from tests.support.drafts import draft_of
from tests.support.reduced_heads import reduced_folder

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def quick_speeds() -> None:
    """Measures the speeds as users do: a GPU takes no time for that, and buffers for CPUs say nothing of it."""


@pytest.mark.parametrize("name", drafter_names())
def test_text_equals_plain_decoding_on_the_cpu(family: Path, name: str) -> None:
    """Guards against noise, masks or cache writes that depend on the device or on compilation."""
    draft, target = draft_of(family, name), str(family / "target")
    plain = load(target, runtime=Runtime(dtype="float64"))
    drafted = load(
        target,
        drafter=name,
        draft=draft,
        k=4,
        runtime=Runtime(dtype="float64", device="cuda", compiled=True),
        lengths="fixed",
    )
    for sampling in (Sampling(), Sampling(temperature=0.9, top_p=0.9, seed=4)):
        expected = plain.generate("helloworld", max_new_tokens=40, sampling=sampling).tokens
        assert drafted.generate("helloworld", max_new_tokens=40, sampling=sampling).tokens == expected


@pytest.mark.parametrize("name", [name for name in drafter_names() if drafter_class(name).traits.can_run_ahead])
@pytest.mark.parametrize("draft_device", [None, "cuda", "cpu"], ids=["two streams", "two processes", "draft on CPUs"])
def test_drafting_ahead(family: Path, name: str, draft_device: str | None) -> None:
    """Guards work of two streams that is read before it is done, and sides on devices of their own; in float64, so that
    both devices draw the same tokens."""
    draft, target = draft_of(family, name), str(family / "target")
    runtime, placement = Runtime(dtype="float64", device="cuda"), Placement(draft_device=draft_device)
    plain = load(target, runtime=Runtime(dtype="float64"))
    with load(target, drafter=name, draft=draft, gamma=4, runtime=runtime, placement=placement) as engine:
        for sampling in (Sampling(), Sampling(temperature=0.9, top_p=0.9, seed=4)):
            texts = ["helloworld", "abcabc", "T"]
            found, expected = (
                each.generate(texts, max_new_tokens=40, sampling=sampling, batch_size=2) for each in (engine, plain)
            )
            assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]


@pytest.mark.parametrize("stages", ["cuda/cuda", "cpu/cuda", "cuda/cpu"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["none", "eagle", "ppd", "pard"])
def test_layers_on_two_devices(family: Path, name: str, compiled: bool, stages: str) -> None:
    """Guards what goes from one device to the next, and what of a cache is moved on each."""
    placement = Placement(target_stages=stages_of(stages))
    target, runtime = str(family / "target"), Runtime(dtype="float64", compiled=compiled)
    plain = load(target, runtime=Runtime(dtype="float64"))
    drafted = load(
        target, drafter=name, draft=draft_of(family, name), k=4, runtime=runtime, placement=placement, lengths="fixed"
    )
    for sampling in (Sampling(), Sampling(temperature=0.9, top_p=0.9, seed=4)):
        texts = ["helloworld", "abcabc", "T"]
        found, expected = (
            each.generate(texts, max_new_tokens=40, sampling=sampling, batch_size=2) for each in (drafted, plain)
        )
        assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]


@pytest.mark.parametrize("name", [name for name in drafter_names() if drafter_class(name).traits.can_run_ahead])
def test_drafting_on_the_devices_of_the_target(family: Path, name: str) -> None:
    """Guards copies of a draft model in processes of their own, on the target's devices."""
    target, runtime = str(family / "target"), Runtime(dtype="float64")
    placement = Placement(target_stages=stages_of("cuda/cuda"))
    plain = load(target, runtime=runtime)
    draft = draft_of(family, name)
    with load(target, drafter=name, draft=draft, gamma=5, runtime=runtime, placement=placement) as engine:
        found, expected = (each.generate(["hello", "T"], max_new_tokens=40) for each in (engine, plain))
        assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]


@pytest.mark.parametrize("compiled", [False, True])
def test_recorded_passes_are_replayed_and_change_no_token(
    family: Path, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards CUDA graphs: that they are recorded at all, in this torch and with these kernels, for batches, trees and
    texts that outgrow a step of the cache, and that they say what the passes say that they were recorded from."""
    monkeypatch.setattr(eager, "REPLAYED_BUCKET", 64)
    replays: list[object] = []
    again = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(graph), again(graph)))
    target, draft = str(family / "target"), str(family / "pard")
    found: dict[bool, list[list[int]]] = {}
    for graphs in (False, True):
        runtime = Runtime(dtype="float64", device="cuda", compiled=compiled, cuda_graphs=graphs)
        chains = load(target, drafter="pard", draft=draft, k=4, runtime=runtime, lengths="fixed")
        trees = Engine(chains.target, chains.drafter, Speculation(k=4, tree=Tree(budget=6), lengths="fixed"))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found[graphs] = [
                answer.tokens
                for engine in (chains, trees)
                for prompts in (["helloworld"], ["abc", "helloworld", "a"])
                for sampling in (Sampling(), Sampling(temperature=0.9, seed=4))
                for answer in engine.generate(prompts, max_new_tokens=80, sampling=sampling)
            ]
        assert not [warning for warning in said if "CUDA graphs" in str(warning.message)]
        assert bool(replays) == graphs
    assert len(set(map(id, replays))) < len(replays) / 4, "each is replayed often"
    assert found[True] == found[False]


def test_nothing_is_waited_for_between_draft_and_target(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the target's pass, which is sent while the drafter's still runs: one number that goes to the GPU the usual
    way waits for all of it."""
    runtime = Runtime(dtype="float32", device="cuda", compiled=True)
    engine = load(
        str(family / "target"), drafter="pard", draft=str(family / "pard"), k=4, runtime=runtime, lengths="fixed"
    )
    for _ in range(4):  # until nothing is compiled or recorded any more
        expected = engine.generate("helloworld", max_new_tokens=40).tokens
    propose, forward = engine.drafter.propose, engine.target.forward
    watched: list[int] = []

    def watch(lengths: Sequence[int]) -> Draft:
        watched.append(max(lengths))
        torch.cuda.set_sync_debug_mode("error" if len(watched) > 1 else "default")  # the first reads the prompt
        return propose(lengths)

    def done(draft: Draft) -> TargetOut:
        out = forward(draft)
        torch.cuda.set_sync_debug_mode("default")
        return out

    monkeypatch.setattr(engine.drafter, "propose", watch)
    monkeypatch.setattr(engine.target, "forward", done)
    try:
        assert engine.generate("helloworld", max_new_tokens=40).tokens == expected
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(watched) > 3
    assert all(lm._compute.replays._works for lm in (engine.target.lm, engine.drafter.lm))


@pytest.mark.parametrize("packed", [False, True])
def test_flex_attention_trains_as_sdpa_does(packed: bool) -> None:
    """Guards the block mask where it has a backward pass: the loss and all gradients are those of the dense mask."""
    config = Qwen3Config(
        vocab_size=72, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(64, (length,), generator=generator).tolist() for length in (300, 120, 40)]
    samples = [Sample(tokens=text, is_label=[True] * len(text)) for text in texts]
    sources = [torch.Generator().manual_seed(number) for number in range(3)]
    drop = Drop(k=4, r=0.7, r_min=0.2, mask_id=65)
    groups = [samples] if packed else [[sample] for sample in samples]
    batch = collate(groups, drop, [sources] if packed else [[source] for source in sources]).to(torch.device("cuda"))
    found = []
    for attention in ("sdpa", "flex_attention"):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config).to("cuda")
        model.set_attn_implementation(attention)
        loss, *_ = Objective(model)(batch, torch.full((4,), 1e-3, device="cuda"))
        loss.backward()
        found.append((loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}))
    (loss, gradients), (other_loss, other_gradients) = found
    torch.testing.assert_close(other_loss, loss, rtol=1e-4, atol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(other_gradients[name], gradient, rtol=2e-3, atol=2e-3 * gradient.abs().max().item())


def test_a_file_of_few_bits_teaches_there(tmp_path: Path) -> None:
    """Guards states, probabilities and heads of weights that are stored in few bits: on a GPU they are numbers, and
    evaluations decode the file on the CPU."""
    file, data = tmp_path / "target.gguf", tmp_path / "data.jsonl"
    gguf_files.write_gguf(file, gguf_files.tiny_model("llama"), "Q8_0")
    data.write_text("".join(f'{{"prompt": "{n}a", "response": "{"ab" * 9}"}}\n' for n in range(9)), encoding="utf-8")
    recipe = EagleParallelRecipe(
        model=str(file), data=[data], out=tmp_path / "out", draft_vocab_size=40, k=3, loss="forward_kl", regression=0,
        classification=1.0, steps=12, warmup_steps=1, lr=1e-2, max_length=32, held_out=2, prompts=1, answer_tokens=4,
        log_every=1, device="cuda",
    )  # fmt: skip
    reports: list[Report] = []
    launch.train(recipe, eagle_parallel.build, reports.append)
    losses = [report.loss for report in reports if isinstance(report, Progress)]
    assert len(losses) == 12 and losses[-1] < losses[0]
    assert [report.acceptance_length for report in reports if isinstance(report, Evaluation)][-1]


def test_a_trimmed_draft_is_trained_there(family: Path, tmp_path: Path) -> None:
    """Guards what a reduced head computes with ids: all of it is on the GPU."""
    draft, data = reduced_folder(family / "pard", tmp_path / "trimmed", range(0, 60, 2)), tmp_path / "data.txt"
    data.write_text("helloworld" * 6 + "abcabcabc" * 4, encoding="utf-8")
    recipe = PardRecipe(
        model=draft, teacher=str(family / "target"), data=[data], out=tmp_path / "out", k=3, steps=2, warmup_steps=0,
        max_length=20, held_out=0, log_every=1, device="cuda",
    )  # fmt: skip
    reports: list[Report] = []
    launch.train(recipe, pard.build, reports.append)
    assert len(reports) == 2


def test_a_gpu_reads_faster_than_a_cpu_and_multiplies_bf16_faster_than_float32() -> None:
    """Guards against a clock that does not wait for the kernels, and against floors of another device."""
    speeds = Speeds(torch.device("cuda"), {2**30}, {torch.bfloat16})
    speeds.measure()
    assert 1e11 < speeds.bytes_per_s(2**30) < 1e14
    assert 1e13 < speeds.flops_per_s(torch.bfloat16) < 1e16


def test_the_recipe_for_a_gpu_runs(tmp_path: Path) -> None:
    """Guards the measurement of an hour against what only a GPU finds: shapes made there, its peak memory, kernels."""
    sizes = ["--batch-sizes", "1", "2", "--prompts", "2", "--prompt-tokens", "5", "--tokens", "40", "--runs", "1"]
    shapes = ["--target", "shape:pocket-target", "--draft", "shape:pocket-draft", "--no-compile", "--rates", "speed"]
    shapes_on_gpu.main(["--json", str(tmp_path / "out.json"), *shapes, *sizes])
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["rates"]["speed"]
    assert all(0 < figures["share_of_floor"] < 1 for figures in report["methods"].values())
    assert all(figures["peak_gpu_bytes"] > 2**20 for figures in report["methods"].values())
    assert all(found["shares"][kind] > 0 for found in report["profile"].values() for kind in ("products", "sync"))
    assert all(sum(found["shares"].values()) == pytest.approx(1) for found in report["profile"].values())


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantized_weights_change_no_token(dtype: str) -> None:
    """Guards the kernels that a CPU does not have: with them too a drafter changes nothing."""
    runtime = Runtime(dtype=dtype, device="cuda", pad_to=8)
    plain = load("pocket", runtime=runtime)
    drafted = load("pocket", drafter="pard", k=4, runtime=runtime, lengths="fixed")
    expected = plain.generate("def read(path):", max_new_tokens=40).tokens
    assert drafted.generate("def read(path):", max_new_tokens=40).tokens == expected


@pytest.mark.parametrize(("bits", "most"), [(8, 0.51), (4, 0.32)])
def test_quantized_weights_take_less(bits: int, most: float) -> None:
    """Guards the memory of a GPU. In 4 bits the kernel pads the inputs of a matrix to multiples of 1,024, so that
    narrower models, such as pocket, take more."""
    config = Qwen3Config(
        vocab_size=8, hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=16,
        num_key_value_heads=4, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to("cuda", torch.bfloat16).eval()
    whole = Size.of(model).weight_bytes
    quantize(model, bits)
    assert Size.of(model).weight_bytes < most * whole


def test_memory_of_a_gpu_that_has_run_out_is_known_by_its_error() -> None:
    """Guards the one line that a command says then, which has torch's words for a sign."""
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**50, device="cuda")
    assert is_out_of_memory(caught.value) and "CUDA" in str(caught.value)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_second_gpu_is_measured_as_the_first(family: Path, tmp_path: Path, paradraft: Paradraft) -> None:
    """Guards `--device cuda:1`: its memory, its name, and times that wait for its kernels."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('{"prompt": "abc"}\n', encoding="utf-8")
    asked = ["--prompts", prompts, "--num-prompts", 1, "--max-new-tokens", 8, "--no-compile", "--json", out]
    done = paradraft("bench", "--target", family / "target", "--methods", "ar,ngram", "--device", "cuda:1", *asked)
    assert done.code == 0, done.err
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["machine"]["gpu"] == torch.cuda.get_device_name(1)
    assert all(figures["peak_gpu_bytes"] > 2**16 for figures in report["methods"].values())
