"""llama.cpp in a process of its own: drafts never change its text, and whatever goes wrong is one sentence."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paradraft.bench.baselines import llama_cpp
from paradraft.bench.baselines.llama_cpp import (
    LlamaCppProcess,
    check_llama_cpp,
    installed_python,
    model_file,
    without_llama_cpp,
    worker_settings,
)
from paradraft.bench.result import PeerCounts
from paradraft.bench.spec import Method
from paradraft.bench.synthetic import SyntheticAcceptance
from paradraft.sampling_params import GREEDY, Sampling
from paradraft.sources.loading import load_model
from paradraft.text.generation_config import suppressed_ids
from tests.conftest import tiny_tokenizer
from tests.support.fake_llama_cpp import TOKENS, drafted_token, next_token, python
from tests.support.fake_vllm import executable

END = 51
"""A token that the draft model guesses, and the one after it too."""


def target(eos_ids: frozenset[int] = frozenset()) -> Any:
    return SimpleNamespace(tokenizer=tiny_tokenizer(), eos_ids=eos_ids, capacity=128)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Of a target and a draft model."""
    found = {}
    for name in ("target", "draft"):
        file = tmp_path / f"{name}-F32.gguf"
        file.write_bytes(b"weights")
        found[name] = {"file": str(file)}
    return found


def given(files: dict[str, dict[str, Any]], **further: Any) -> dict[str, Any]:
    settings = {"k": 3, "batch": 1, "exact": True, "threads": 1, "tokens": TOKENS, "forbidden": []}
    return {"target": files["target"], "draft": files.get("draft"), **settings, **further}


def expected(prompt: str, tokens: int) -> list[int]:
    """What the target says."""
    row = [tiny_tokenizer()(prompt)["input_ids"][-1]]
    for _ in range(tokens):
        row.append(next_token(row[-1]))
    return row[1:]


def passes(prompt: str, tokens: int, k: int, *, ends: bool = False) -> tuple[list[int], list[int]]:
    """For each round of an answer, how many tokens are accepted and how many drafted, by a plain loop."""
    last, accepted, drafted, done = tiny_tokenizer()(prompt)["input_ids"][-1], list[int](), list[int](), 0
    while done < tokens:
        draft = [last]
        for _ in range(min(k, tokens - done - 1)):
            draft.append(drafted_token(draft[-1]))
        same = 0
        while same < len(draft) - 1 and draft[same + 1] == next_token(draft[same]):
            same += 1
        new = [*draft[1 : same + 1], next_token(draft[same])]
        drafted.append(len(draft) - 1)
        if ends and END in new:
            return [*accepted, min(same, new.index(END) + 1)], drafted
        accepted.append(same)
        last, done = new[-1], done + len(new)
    return accepted, drafted


def test_a_draft_changes_no_token(files: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Guards the loop of the real worker, with caches that refuse a text with a gap: after all, some and none of a
    draft is accepted, up to the limit of the answer; and rows of the embedding that are no tokens, which score highest.
    """
    with LlamaCppProcess("llama-cpp-draft", python(tmp_path / "env"), given(files), target()) as engine:
        assert engine.version == "0.fake, llama-cpp-python 0.0.fake"
        facts = engine.facts
        assert facts["weights"] == {"target": "F32", "draft": "F32"} and facts["cpu"] == "CPU : FAKE = 1"
        assert facts["weight_bytes"] == {"target": 1000, "draft": 1001} and facts["threads"] == 1
        for prompt, tokens in (("a", 1), ("abc", 2), ("c", 31), ("d" * 60, 40), ("c", 31)):
            answer = engine([prompt], tokens, GREEDY)
            assert answer.tokens == [expected(prompt, tokens)]
            accepted, drafted = passes(prompt, tokens, k=3)
            assert answer.accepted == [accepted] and answer.counts == PeerCounts.of(tokens, drafted, accepted)
            assert answer.engine_passes == {"target": len(accepted), "draft": sum(drafted)}
            assert answer.delivered_s is not None and sorted(answer.delivered_s[0]) == answer.delivered_s[0]
            assert len(answer.delivered_s[0]) == len(accepted) and answer.delivered_s[0][-1] <= answer.total_s < 1
            assert 2**20 < (answer.peak_rss_bytes or 0) < 2**28 and answer.stats is None
    assert len({*accepted}) == 4  # all, some and none
    assert engine._process.poll() == 0


def test_without_a_draft_model_nothing_is_counted(files: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Guards plain decoding: a pass for each token, the prompt's own among them."""
    del files["draft"]
    with LlamaCppProcess("llama-cpp", python(tmp_path / "env"), given(files), target()) as engine:
        answer = engine(["ab"], 7, GREEDY)
    assert answer.tokens == [expected("ab", 7)] and answer.engine_passes == {"target": 7}
    assert answer.counts is None and answer.accepted is None and len((answer.delivered_s or [[]])[0]) == 7


def test_rows_of_a_batch_end_one_by_one(files: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Guards rows that accept other numbers of tokens, and that end while others go on; what was drafted after an end
    is cut, and is not counted as accepted."""
    prompts = ["b", "cd", "efg", "h", "i", "j", "k", "l", "n", "o", "p", "q"]
    with LlamaCppProcess(
        "llama-cpp-draft", python(tmp_path / "env"), given(files, batch=3), target(frozenset([END]))
    ) as engine:
        answers = [engine(prompts[place : place + 3], 50, GREEDY) for place in range(0, len(prompts), 3)]
    whole = [expected(prompt, 50) for prompt in prompts]
    rows = [row for answer in answers for row in answer.tokens]
    assert rows == [row[: row.index(END) + 1] if END in row else row for row in whole]
    accepted = [rounds for answer in answers for rounds in answer.accepted or []]
    wanted = [passes(prompt, 50, k=3, ends=True) for prompt in prompts]
    assert accepted == [kept for kept, _ in wanted]
    # Some end at once, some at the limit, and some within what was accepted.
    assert min(map(len, rows)) < 10 and max(map(len, rows)) == 50
    assert any(sum(rounds) + len(rounds) > len(row) for rounds, row in zip(accepted, rows, strict=True))
    most = [max(len(rounds) for rounds in answer.accepted or []) for answer in answers]
    assert [answer.engine_passes and answer.engine_passes["target"] for answer in answers] == most


def test_forbidden_tokens_are_not_said(files: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Guards `suppress_tokens`, which our own methods obey: the second best token is said, and drafted."""
    last = tiny_tokenizer()("a")["input_ids"][-1]
    forbidden = [next_token(last)]
    with LlamaCppProcess("x", python(tmp_path / "env"), given(files, forbidden=forbidden), target()) as engine:
        assert engine(["a"], 2, GREEDY).tokens == [[forbidden[0] + 1, next_token(forbidden[0] + 1)]]


def test_verdicts_may_be_drawn(files: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Guards synthetic acceptance: the same work, and rates that come out, for the same prompt the same each time."""
    rates = (0.75, 0.5, 0.25)
    env, acceptance = python(tmp_path / "env"), SyntheticAcceptance(rates=rates)
    with LlamaCppProcess("x", env, given(files), target(), acceptance=acceptance) as engine:
        answer, again, other = (engine([text], 2000, GREEDY) for text in ("a", "a", "b"))
    assert answer.counts is not None and answer.accepted is None  # its text is no target's
    assert answer.counts == again.counts != other.counts
    shares = [kept / made for kept, made in zip(answer.counts.accepted, answer.counts.drafted, strict=True)]
    # About 800 rounds: six standard deviations are 0.11, so the chance of a false alarm is below 1e-8.
    assert shares == pytest.approx(rates, abs=0.11)
    assert sum(map(len, answer.tokens)) == 2000 and answer.engine_passes is not None
    assert answer.engine_passes["draft"] == sum(answer.counts.drafted)


def test_weights_are_rounded_once(files: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Guards int8 and int4: the worker rounds the whole weights, and keeps the file."""
    env, rounded = python(tmp_path / "env"), tmp_path / "target-Q8_0.gguf"
    told = {"target": {"file": str(rounded), "source": files["target"]["file"], "type": "Q8_0"}}
    with LlamaCppProcess("llama-cpp", env, given(told), target()) as engine:
        assert engine.facts["weights"] == {"target": "Q8_0"}
    assert rounded.read_bytes() == b"rounded to 7 of 7 bytes"
    Path(files["target"]["file"]).unlink()
    with LlamaCppProcess("llama-cpp", env, given(told), target()) as engine:
        assert engine(["a"], 1, GREEDY).tokens == [expected("a", 1)]
    rounded.unlink()
    with pytest.raises(ValueError, match=r"target-F32.gguf cannot be rounded to Q8_0"):
        LlamaCppProcess("llama-cpp", env, given(told), target()).__enter__()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["draft-F32.gguf", "env"]


def test_what_goes_wrong_is_said_in_a_sentence(files: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Guards the reasons that llama.cpp itself gives, when it loads and later, and a Python without it."""
    env = python(tmp_path / "env")
    Path(files["draft"]["file"]).write_bytes(b"")
    with pytest.raises(ValueError, match=r"'x': llama.cpp: OSError: .*draft-F32.gguf cannot be loaded: no weights in"):
        LlamaCppProcess("x", env, given(files), target()).__enter__()
    del files["draft"]
    with pytest.raises(ValueError, match="knows 72 tokens, and 80 are asked for"):
        LlamaCppProcess("x", env, given(files, tokens=80), target()).__enter__()
    too_long = pytest.raises(ValueError, match=r"no context of 100\d\d\d tokens: out of memory")
    with too_long, LlamaCppProcess("x", env, given(files), target()) as engine:
        engine(["a"], 100_000, GREEDY)
    with pytest.raises(ValueError, match="ended with code 7"), LlamaCppProcess("x", env, given(files), target()) as it:
        it([tiny_tokenizer().decode([13])], 3, GREEDY)
    without = executable(
        tmp_path / "without", f"import os, sys; os.execv({sys.executable!r}, ['python', *sys.argv[1:]])"
    )
    with pytest.raises(ValueError, match=r"'x': llama.cpp: ModuleNotFoundError: No module named 'llama_cpp'"):
        LlamaCppProcess("x", without, given(files), target()).__enter__()


def test_llama_cpp_that_is_not_installed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a bench that fails for want of a peer, drops it without a word, or writes models into `/usr`."""
    monkeypatch.chdir(tmp_path)
    methods = [Method.parse(spec) for spec in ("ar", "llama-cpp", "llama-cpp-draft:k=4")]
    left, skipped = without_llama_cpp(methods, None)
    assert [method.spec for method in left] == ["ar"] and list(skipped) == ["llama-cpp", "llama-cpp-draft:k=4"]
    assert "make llama-cpp" in skipped["llama-cpp"]
    with pytest.raises(ValueError, match=r"only llama-cpp, llama-cpp-draft:k=4, but llama.cpp is not installed"):
        without_llama_cpp(methods[1:], None)
    with pytest.raises(ValueError, match="there is no such file"):
        without_llama_cpp(methods, tmp_path / "python")
    system = executable(tmp_path / "python3", "")
    with pytest.raises(ValueError, match="in no environment of its own"):
        without_llama_cpp(methods, system)
    own = python(tmp_path / "env")
    assert without_llama_cpp(methods, own) == (methods, {})
    assert without_llama_cpp(methods[:1], tmp_path / "python") == (methods[:1], {})
    (tmp_path / "build").mkdir()
    (tmp_path / "env").rename(tmp_path / "build" / "llama-cpp")
    assert installed_python(None) == llama_cpp.DEFAULT_PYTHON
    shutil.rmtree(tmp_path / "build" / "llama-cpp" / "lib")  # as if the compiler had been stopped
    assert installed_python(None) is None
    with pytest.raises(ValueError, match="its environment has no llama-cpp-python"):
        without_llama_cpp(methods, llama_cpp.DEFAULT_PYTHON)


def test_what_cannot_be_compared_is_refused(family: Path, tmp_path: Path) -> None:
    """Guards against speeds of answers that are not the target's own, and against minutes of loading before that is
    said."""
    name, cpu = str(family / "target"), SimpleNamespace(device="cpu")

    def check(spec: str, name: str = name, sampling: Sampling = GREEDY, runtime: Any = cpu) -> None:
        check_llama_cpp([Method.parse("ar"), Method.parse(spec)], name, sampling, runtime)

    for spec in ("llama-cpp", "llama-cpp:dtype=int4", f"llama-cpp-draft:draft={family / 'draft'}:dtype=bf16"):
        check(spec)
    with pytest.raises(ValueError, match="greedily only"):
        check("llama-cpp", sampling=Sampling(temperature=0.5))
    with pytest.raises(ValueError, match="on the CPU only"):
        check("llama-cpp", runtime=SimpleNamespace(device="cuda"))
    with pytest.raises(
        ValueError, match=r"'llama-cpp:dtype=float64': llama.cpp has no weights in 'float64': use one of"
    ):
        check("llama-cpp:dtype=float64")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "olmo2", "vocab_size": 64}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"is a olmo2 model; GGUF files are written of llama, mistral"):
        check("llama-cpp", str(other))
    with pytest.raises(ValueError, match=r"'llama-cpp-draft:draft=nowhere': unknown model 'nowhere'|cannot be asked"):
        check("llama-cpp-draft:draft=nowhere")
    check_llama_cpp([Method.parse("ar")], "nowhere", Sampling(temperature=0.5), cpu)


def test_files_are_written_once_for_each_content(family: Path, tmp_path: Path) -> None:
    """Guards against a model that is converted in each run, and against one whose old weights are timed instead; names
    and times of change play no part. Nothing is written into the user's folder."""
    env, news = python(tmp_path / "env"), list[str]()
    cache, before = env.parent.parent / "gguf", sorted((family / "target").iterdir())
    method = Method.parse(f"llama-cpp-draft:k=5:draft={family / 'draft'}")
    model = SimpleNamespace(generation_config=SimpleNamespace(suppress_tokens=[5]))
    loaded: Any = SimpleNamespace(vocab_size=64, lm=SimpleNamespace(model=model))
    told = worker_settings(method, str(family / "target"), loaded, env, news.append)
    assert (told["k"], told["batch"], told["exact"], told["tokens"], told["forbidden"]) == (5, 1, True, 64, [5])
    assert suppressed_ids(model.generation_config) == {5}  # it is what our own methods obey
    files = [Path(told[role]["file"]) for role in ("target", "draft")]
    assert [file.parent for file in files] == [cache, cache] and sorted(cache.iterdir()) == sorted(files)
    assert [file.name.rpartition("-")[2] for file in files] == ["F32.gguf", "F32.gguf"] and len(news) == 2
    assert worker_settings(method, str(family / "target"), loaded, env, news.append) == told and len(news) == 2
    copy = tmp_path / "elsewhere" / "target"
    copy.parent.mkdir()
    shutil.copytree(family / "target", copy)
    assert model_file(str(copy), "float32", cache, news.append) == told["target"] and len(news) == 2
    weights = copy / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert model_file(str(copy), "float32", cache, news.append) != told["target"] and len(news) == 3
    rounded = model_file(str(family / "target"), "int4", cache, news.append)
    assert rounded["type"] == "Q4_0" and Path(rounded["source"]).is_file() and not Path(rounded["file"]).exists()
    Path(rounded["file"]).touch()
    assert model_file(str(family / "target"), "int4", cache, news.append) == {"file": rounded["file"]}
    assert sorted((family / "target").iterdir()) == before


def test_shapes_and_gguf_files_are_loaded_too(tmp_path: Path) -> None:
    """Guards models without a folder: random weights by a shape's name, another name another file; and a file that is
    in the format already."""
    tiny = model_file("shape:tiny-target", "float32", tmp_path / "gguf", print)
    draft = model_file("shape:tiny-draft", "float32", tmp_path / "gguf", print)
    assert Path(tiny["file"]).name.startswith("tiny-target-") and tiny != draft
    assert llama_cpp.locate_model(tiny["file"], "target") == tiny["file"]
    assert model_file(tiny["file"], "int4", tmp_path / "unused", print) == tiny and not (tmp_path / "unused").exists()


def test_models_from_the_hub_are_known_by_their_content(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards ids, whose files are in the cache of Hugging Face: the folder of the same content has the same file."""
    config = str(family / "target" / "config.json")
    monkeypatch.setattr(llama_cpp, "try_to_load_from_cache", lambda name, file: {"some/model": config}[name])
    monkeypatch.setattr(llama_cpp, "load_model", lambda name, runtime: load_model(str(family / "target"), runtime))
    found = model_file("some/model", "float32", tmp_path, print)
    folder = model_file(str(family / "target"), "float32", tmp_path, print)
    assert Path(found["file"]).name == Path(folder["file"]).name.replace("target-", "model-")


def test_an_environment_that_takes_no_file_is_one_line(family: Path, tmp_path: Path) -> None:
    """Guards against a traceback, and a half-written file, where the environment cannot be written."""
    (tmp_path / "gguf").touch()
    with pytest.raises(ValueError, match=r"gguf/target-.*-F32.gguf' cannot be written \(.*\): name a Python"):
        model_file(str(family / "target"), "float32", tmp_path / "gguf", print)
