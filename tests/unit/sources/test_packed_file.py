"""Packed weights in the user's cache: the same numbers as before, once in memory, and never those of something else."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paradraft.drafters import drafter_names
from paradraft.engine.loader import load
from paradraft.models import quantization
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward.cpu import build, matrix
from paradraft.models.quantized import QuantizedTensor
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from paradraft.sources import loading, packed_file, target_loading
from paradraft.sources.load_plan import plan_of
from paradraft.sources.packed_file import SETTING
from paradraft.sources.rounding_reader import files_of
from paradraft.sources.target_loading import load_target, weights_bytes
from tests.conftest import tiny_tokenizer
from tests.support.drafts import draft_of
from tests.support.gguf_files import tiny_model, write_gguf
from tests.support.packed_models import write_packed
from tests.support.random_models import KINDS_OF_MODELS, SIZES, random_model

DTYPES = ["int8", "int4"]
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in a user's cache, but for the compiled library: the compiler takes ten seconds."""
    build.library()
    name = f"pass-{build.library_key()}.so"
    library = next(folder / name for folder in build._folders() if (folder / name).is_file())
    folder = tmp_path / "cache" / "paradraft"
    folder.mkdir(parents=True, mode=0o700)
    shutil.copy(library, folder / name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent))
    monkeypatch.setenv(SETTING, "1")
    return folder


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def no_rounding(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, nothing is read of a checkpoint, rounded or packed."""

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("that is on disk")

    def forbid() -> None:
        for place, name in [(matrix, "_pack_quantized"), (target_loading, "fill"), (target_loading, "quantize")]:
            monkeypatch.setattr(place, name, fail)

    return forbid


def lm_of(folder: Path | str, dtype: str = "int8", **settings: Any) -> CausalLM:
    return load_target(str(folder), Runtime(device="cpu", dtype=dtype, **settings)).lm


def logits_of(lm: CausalLM) -> Tensor:
    lm.start()
    lm.cache.join(2)
    return lm.forward(torch.arange(1, 21).view(2, 10)).logits


def files(cache: Path) -> list[Path]:
    return sorted(cache.glob("weights-*"))


def saved(folder: Path, kind: str = "qwen3", size: tuple[int, ...] = SIZES[0], **settings: Any) -> Path:
    model = random_model(kind, size)
    model.save_pretrained(folder, **settings)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("size", [SIZES[0], SIZES[1]])
@pytest.mark.parametrize("kind", KINDS_OF_MODELS)
def test_the_second_time_nothing_is_packed_and_all_is_the_same(
    cache: Path, tmp_path: Path, dtype: str, kind: str, size: tuple[int, ...], no_rounding: Callable[[], None]
) -> None:
    """Guards the promise: the same bits, and the weights in the order in which they are on disk."""
    folder = saved(tmp_path / "model", kind, size)
    first = lm_of(folder, dtype)
    logits = logits_of(first)
    no_rounding()
    second = lm_of(folder, dtype)
    assert torch.equal(logits_of(second), logits) and second.probe == first.probe is not None
    assert second.model.generation_config.to_dict() == first.model.generation_config.to_dict()
    assert second.model.config.to_dict() == first.model.config.to_dict() and not second.model.training
    before, after = (dict(lm.model.named_parameters(remove_duplicate=False)) for lm in (first, second))
    assert list(before) == list(after)
    for name, weight in before.items():
        assert type(after[name]) is type(weight) and after[name].dtype == weight.dtype, name
        if isinstance(weight, QuantizedTensor):
            assert str(after[name]) == str(weight) and torch.equal(after[name].dequantize(), weight.dequantize()), name
        else:
            assert torch.equal(after[name], weight), name
    assert all(torch.equal(*pair) for pair in zip(first.model.buffers(), second.model.buffers(), strict=True))


def test_panels_are_those_on_disk(cache: Path, family: Path) -> None:
    """Guards memory: a second copy of the weights would have the same numbers. They lie where caches' lines begin."""
    lm_of(family / "target")
    weights = [weight for weight in lm_of(family / "target").model.parameters() if isinstance(weight, QuantizedTensor)]
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(cache) in line]
    places = [tuple(int(end, 16) for end in line[0].split("-")) for line in mapped if "weights" in line[-1]]
    for weight in weights:
        address = weight.source.panels.numbers.data_ptr()  # type: ignore[union-attr]  # they are packed
        assert any(start <= address < end for start, end in places) and address % packed_file.ALIGNMENT == 0


def test_it_is_a_safetensors_file(cache: Path, family: Path) -> None:
    """Guards a format of our own: others can read it, and its embedding is the checkpoint's."""
    embedding = lm_of(family / "target").model.get_input_embeddings().weight
    (file,) = files(cache)
    assert torch.equal(load_file(file)["model.embed_tokens.weight"], embedding)
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", drafter_names())
def test_texts_are_the_same_with_every_drafter(cache: Path, family: Path, name: str) -> None:
    """Guards drafters that read the target's weights and states, and those whose own weights are mapped."""
    samplings = [Sampling(), Sampling(temperature=0.9, seed=4)]

    def texts() -> list[Any]:
        runtime = Runtime(device="cpu", dtype="int4")
        engine = load(
            str(family / "target"), drafter=name, draft=draft_of(family, name), k=4, runtime=runtime, lengths="fixed"
        )
        return [engine.generate("helloworld", max_new_tokens=20, sampling=each).tokens for each in samplings]

    first = texts()
    assert files(cache) and texts() == first


def test_shapes_are_kept_too(cache: Path, no_rounding: Callable[[], None]) -> None:
    """Guards what is timed with random weights."""
    logits = logits_of(lm_of("shape:tiny-target", "int4"))
    no_rounding()
    assert torch.equal(logits_of(lm_of("shape:tiny-target", "int4")), logits)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1", "Q4_K", "Q6_K", "gptq", "awq"])
def test_weights_that_are_stored_in_few_bits(
    cache: Path, tmp_path: Path, kind: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards embeddings of few bits, groups of every size, offsets, and activations in a dtype that a file needs."""
    place = tmp_path / "stored"
    model = tiny_model("qwen3", tied=tied, width=256 if "_K" in kind else 64)
    if kind in ("gptq", "awq"):
        place.mkdir()
        write_packed(place, model, method=kind)
    else:
        place = place.with_suffix(".gguf")
        write_gguf(place, model, kind)
    first = load_target(str(place), Runtime(device="cpu")).lm
    assert len(files(cache)) == first.is_native == 1
    monkeypatch.setattr(target_loading, "load_model", None)
    second = load_target(str(place), Runtime(device="cpu")).lm
    assert torch.equal(logits_of(second), logits_of(first)) and second.model.dtype == first.model.dtype
    pairs = zip(first.model.named_parameters(), second.model.named_parameters(), strict=True)
    for (name, before), (same_name, after) in pairs:
        numbers = [each.dequantize() if isinstance(each, QuantizedTensor) else each for each in (before, after)]
        assert same_name == name and torch.equal(*numbers) and type(before) is type(after), name
    head, embedding = second.model.get_output_embeddings(), second.model.get_input_embeddings()
    assert (head.weight is embedding.weight) == tied


def cut(content: bytes) -> bytes:
    return content[:-100]


def nothing(_: bytes) -> bytes:
    return b""


def other_kind(_: bytes) -> bytes:
    return b"no tensors at all " * 1000


def flipped(share: float) -> Callable[[bytes], bytes]:
    """One bit is another, somewhere in the file."""

    def damage(content: bytes) -> bytes:
        place = int(share * len(content))
        return content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]

    damage.__name__ = f"bit at {share}"
    return damage


def in_header(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def damage(content: bytes) -> bytes:
        assert content.count(old) >= 1 and len(old) == len(new)
        return content.replace(old, new, 1)

    damage.__name__ = old.decode()
    return damage


DAMAGES = [
    cut, nothing, other_kind, *(flipped(share) for share in (0.5, 0.7, 0.9, 0.999)),
    in_header(b'"digest"', b'"dugest"'), in_header(b'\\"first\\": 0', b'\\"first\\": 2'), in_header(b'"U8"', b'"I8"'),
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_file_is_made_anew(cache: Path, family: Path, damage: Callable[[bytes], bytes]) -> None:
    """Guards weights that are wrong without an error, and a start that fails from then on."""
    logits = logits_of(lm_of(family / "target"))
    (file,) = files(cache)
    content = file.read_bytes()
    file.write_bytes(damage(content))
    with pytest.warns(UserWarning, match="damaged and made anew"):
        assert torch.equal(logits_of(lm_of(family / "target")), logits)
    assert file.read_bytes() == content


def test_other_logits_are_found(cache: Path, family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards kernels that compute something else than those that were compared with the model's own code."""
    logits = logits_of(lm_of(family / "target"))
    (file,) = files(cache)
    true = packed_file._mapped

    def with_other_probe(*given: Any) -> Any:
        description, tensors = true(*given)  # type: ignore[misc]  # it is there
        return description | {"probe": "0" * 64}, tensors

    monkeypatch.setattr(packed_file, "_mapped", with_other_probe)
    written = file.stat().st_ino
    with pytest.warns(UserWarning, match="other logits than before"):
        assert torch.equal(logits_of(lm_of(family / "target")), logits)
    assert file.stat().st_ino != written


def test_models_and_dtypes_have_files_of_their_own(cache: Path, family: Path) -> None:
    """Guards one model against the weights of another, also where its file is put under the other's name."""
    found = [logits_of(lm_of(family / name, dtype)) for name in ("target", "draft") for dtype in DTYPES]
    assert len(files(cache)) == 4
    one, *others = (file.read_bytes() for file in files(cache))
    for file in files(cache):
        file.write_bytes(one)
    again = [logits_of(lm_of(family / name, dtype)) for name in ("target", "draft") for dtype in DTYPES]
    assert all(map(torch.equal, found, again)) and [file.read_bytes() for file in files(cache)] == [one, *others]


def test_weights_that_have_changed_are_read_again(cache: Path, tmp_path: Path) -> None:
    """Guards a checkpoint that was trained on, also by tools that set times; the old file goes."""
    folder = saved(tmp_path / "model")
    logits = logits_of(lm_of(folder))
    weights = folder / "model.safetensors"
    before = weights.stat()
    changed = {name: weight * (1.5 if "up_proj" in name else 1.0) for name, weight in load_file(weights).items()}
    save_file(changed, weights, {"format": "pt"})
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_size == before.st_size
    assert not torch.equal(logits_of(lm_of(folder)), logits) and len(files(cache)) == 1
    config = json.loads((folder / "config.json").read_text())
    logits = logits_of(lm_of(folder))
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    assert not torch.equal(logits_of(lm_of(folder)), logits)


def test_the_file_of_a_model_that_is_gone_leaves(cache: Path, family: Path, tmp_path: Path) -> None:
    """Guards the cache against all models that ever were; a process that computes with one of them goes on."""
    saved(tmp_path / "model")
    lm_of(tmp_path / "model")
    (gone,) = files(cache)
    mapped = lm_of(tmp_path / "model")
    logits = logits_of(mapped)
    lm_of(family / "target")
    assert gone in files(cache) and len(files(cache)) == 2
    shutil.rmtree(tmp_path / "model")
    lm_of(family / "target", "int4")
    assert gone not in files(cache) and len(files(cache)) == 2
    assert torch.equal(logits_of(mapped), logits)


def test_a_new_version_of_the_rounding_is_used(
    cache: Path, family: Path, monkeypatch: pytest.MonkeyPatch, no_rounding: Callable[[], None]
) -> None:
    """Guards an update of the program against the weights of the one before."""
    lm_of(family / "target")
    monkeypatch.setattr(packed_file, "ROUNDING", quantization.ROUNDING + 1)
    no_rounding()
    with pytest.raises(AssertionError, match="that is on disk"):
        lm_of(family / "target")


def test_no_room(cache: Path, family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a disk that would be full."""
    monkeypatch.setattr(packed_file.shutil, "disk_usage", lambda _: Usage(2**40, 2**40 - 2**30, 2**30))
    with pytest.warns(UserWarning, match=r"not kept for the next start: 0\.0 GiB, and 1 that stays free, do not fit"):
        assert lm_of(family / "target").is_native
    assert not files(cache)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
def test_a_disk_that_refuses(cache: Path, family: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    """Guards a start against a cache that cannot be written, and the disk against what was begun."""
    true_open = os.open

    def refuse(path: Any, *given: Any, **named: Any) -> Any:
        if call == "open" and not str(path).endswith(".new"):
            return true_open(path, *given, **named)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(packed_file.os, call, refuse)
    with pytest.warns(UserWarning, match=f"not kept for the next start: .*{os.strerror(code)}"):
        assert lm_of(family / "target").is_native
    assert not files(cache)


def test_a_cache_that_others_can_write(cache: Path, family: Path, no_rounding: Callable[[], None]) -> None:
    """Guards against weights of another user's."""
    lm_of(family / "target")
    cache.chmod(0o777)
    before = files(cache)[0].stat()
    with pytest.warns(UserWarning, match="packed weights are not kept in .*, which others can write into"):
        lm_of(family / "target")
    assert files(cache)[0].stat() == before
    cache.chmod(0o700)
    files(cache)[0].chmod(0o666)
    no_rounding()
    with pytest.raises(AssertionError, match="that is on disk"):
        lm_of(family / "target")


def test_a_cache_that_is_no_folder(cache: Path, family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a start where there is nothing to write into."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert lm_of(family / "target").is_native


def test_the_setting(cache: Path, family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards those who want no such files, and a value that is none."""
    monkeypatch.setenv(SETTING, "0")
    lm_of(family / "target")
    assert not files(cache)
    monkeypatch.setenv(SETTING, "off")
    with pytest.raises(ValueError, match="PARADRAFT_PACKED_FILES='off': use 0"):
        lm_of(family / "target")


def test_whole_weights_and_torchs_passes_have_no_file(cache: Path, family: Path) -> None:
    """Guards the disk: bfloat16 is on it already."""
    lm_of(family / "target", "bfloat16")
    lm_of(family / "target", "int8", compiled=False)
    assert not files(cache)


def test_one_process_writes_and_the_others_do_not_wait(cache: Path, family: Path) -> None:
    """Guards a file against two that write it."""
    logits = logits_of(lm_of(family / "target"))
    (file,) = files(cache)
    content = file.read_bytes()
    file.unlink()
    with file.with_suffix(".new").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert torch.equal(logits_of(lm_of(family / "target")), logits)
        assert not file.exists() and file.with_suffix(".new").stat().st_size == 0
    lm_of(family / "target")
    assert file.read_bytes() == content and files(cache) == [file]


def test_a_file_that_has_taken_its_place_is_not_written_over(cache: Path, tmp_path: Path) -> None:
    """Guards a mapped file: the one that writes may put it in its place between another's opening and locking."""
    path = tmp_path / "file.new"
    true = fcntl.flock

    def late(stream: Any, how: int) -> None:
        path.write_bytes(b"whole")
        os.replace(path, tmp_path / "file")
        true(stream, how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_file.fcntl, "flock", late)
        with packed_file._locked(path) as stream:
            assert stream is None
    assert (tmp_path / "file").read_bytes() == b"whole"


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_what_was_begun_is_no_file(cache: Path, family: Path, share: float) -> None:
    """Guards against half of the weights: what is left by a process that was killed is written over."""
    logits = logits_of(lm_of(family / "target"))
    (file,) = files(cache)
    content = file.read_bytes()
    file.unlink()
    begun = file.with_suffix(".new")
    begun.write_bytes(content[: int(share * len(content))])
    assert torch.equal(logits_of(lm_of(family / "target")), logits)
    assert file.read_bytes() == content and files(cache) == [file]


def test_it_takes_its_place_when_it_is_on_the_disk(cache: Path, family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the order that a loss of power needs."""
    calls: list[str] = []
    for name in ("fsync", "replace"):
        true = getattr(os, name)

        def told(*given: Any, name: str = name, true: Any = true) -> None:
            calls.append(name)
            true(*given)

        monkeypatch.setattr(os, name, told)
    lm_of(family / "target")
    assert calls == ["fsync", "replace", "fsync"]


def child(code: str, cache: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD + code], stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL,
        env=os.environ | {"XDG_CACHE_HOME": str(cache.parent), SETTING: "1"} | environment,
    )  # fmt: skip


CHILD = """
import os, signal, sys
from paradraft.sources import packed_file
from paradraft.sources.target_loading import load_target
from paradraft.models.runtime import Runtime

def resident(kind):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(kind))

def loaded(folder):
    return load_target(folder, Runtime(device="cpu", dtype="int8")).lm
"""


@pytest.mark.slow
def test_two_processes_at_once(cache: Path, family: Path) -> None:
    """Guards servers that start together."""
    code = f"print(loaded({str(family / 'target')!r}).probe)"
    told = {process.communicate()[0] for process in [child(code, cache) for _ in range(3)]}
    assert told == {f"{lm_of(family / 'target').probe}\n"} and len(files(cache)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("call", ["memoryview", "fsync", "replace"])
def test_a_kill_leaves_nothing_half(cache: Path, family: Path, call: str) -> None:
    """Guards the same against SIGKILL, which nothing can be done after."""
    folder = str(family / "target")
    code = f"""
def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)
if {call == "memoryview"}:  # of the third tensor
    packed_file.memoryview = lambda part, left=[1, 2]: memoryview(part) if left and left.pop() else kill()
else:
    os.{call} = kill
loaded({folder!r})
"""
    process = child(code, cache)
    process.communicate()
    assert process.returncode == -9
    assert not [file for file in files(cache) if file.suffix != ".new"]
    logits = logits_of(lm_of(folder))
    assert [file.suffix for file in files(cache)] == [".safetensors"]
    assert torch.equal(logits_of(lm_of(folder)), logits)


def test_memory_is_counted_with_few_bits(
    cache: Path, tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards models that fit once they are rounded: the check before loading counted all bits, and refused them."""
    size = (256, 1024, 8, 4, 32, 1024)
    saved(tmp_path, size=size)
    runtime = Runtime(device="cpu", dtype=dtype)
    whole = sum(weight.numel() for weight in loading.load_skeleton(str(tmp_path)).parameters())
    itemsize = runtime.computed_in.itemsize
    asked = weights_bytes(plan_of(str(tmp_path), runtime))
    lm_of(tmp_path, dtype)
    (file,) = files(cache)
    largest = 256 * 1024 * (itemsize + 1)
    assert file.stat().st_size == pytest.approx(asked - largest, rel=0.05)
    assert asked - largest < 0.75 * whole * itemsize
    monkeypatch.setattr(target_loading, "files_of", lambda *_: None)  # the control
    assert weights_bytes(plan_of(str(tmp_path), runtime)) == whole * itemsize


@pytest.mark.slow
def test_memory_has_the_weights_once(cache: Path, tmp_path: Path) -> None:
    """Guards against a second copy; the control has the setting 0, and the weights in memory of its own."""
    folder = saved(tmp_path / "model", "qwen3", (768, 2048, 12, 12, 64, 64))
    code = f"""
before = resident("RssAnon")
lm = loaded({str(folder)!r})
print(resident("RssAnon") - before)
"""
    first, second, control = (
        int(child(code, cache, **{SETTING: setting}).communicate()[0]) for setting in ("1", "1", "0")
    )
    (file,) = files(cache)
    size = file.stat().st_size
    assert 20e6 < size < 40e6
    assert control > 0.9 * size and second < control - 0.8 * size, (first, second, control, size)


@pytest.mark.parametrize("settings", [{}, {"max_shard_size": "30KB"}], ids=["one file", "several"])
@pytest.mark.parametrize("kind", KINDS_OF_MODELS)
def test_a_checkpoint_is_rounded_as_it_is_packed(
    tmp_path: Path, dtype: str, kind: str, settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the weights that are read here against those that `transformers` reads."""
    folder = saved(tmp_path / "model", kind, **settings)
    ours = logits_of(lm_of(folder, dtype))
    with monkeypatch.context() as patch:
        patch.setattr(target_loading, "load_model", None)
        lm_of(folder, dtype)  # which is not asked
    monkeypatch.setattr(target_loading, "files_of", lambda *_: None)
    assert torch.equal(logits_of(lm_of(folder, dtype)), ours)


def other_name(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("q_proj", "query"): weight for name, weight in weights.items()}


def one_less(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight for name, weight in weights.items() if "layers.1.mlp.up" not in name}


def one_more(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return weights | {"adapter": torch.zeros(1)}


@pytest.mark.parametrize("change", [other_name, one_less, one_more])
def test_other_checkpoints_are_read_by_transformers(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    """Guards its messages, and names that only it knows."""
    folder = saved(tmp_path / "model")
    assert files_of(str(folder), loading.load_skeleton(str(folder))) is not None
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    assert files_of(str(folder), loading.load_skeleton(str(folder))) is None


def test_weights_are_rounded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards rounding against its speed: all outputs at once give the same numbers."""
    weight = torch.randn(70, 100, generator=torch.Generator().manual_seed(2)).bfloat16()
    whole = [rounded(weight).parts for rounded in (quantization.rounded_to_8_bits, quantization.rounded_to_4_bits)]
    monkeypatch.setattr(quantization, "ROUNDED_AT_ONCE", 900)
    pieces = [rounded(weight).parts for rounded in (quantization.rounded_to_8_bits, quantization.rounded_to_4_bits)]
    for before, after in zip(whole, pieces, strict=True):
        assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
