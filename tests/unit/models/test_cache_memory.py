"""How much memory a cache takes and how much there is."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig

from paradraft.models import kv_cache
from paradraft.models.architectures import head_size
from paradraft.models.kv_cache import allocate

CPU = torch.device("cpu")


def config(layers: int) -> LlamaConfig:
    return LlamaConfig(hidden_size=1024, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=layers)


def test_free_memory_is_what_the_system_says() -> None:
    """Guards the refusal of caches that do not fit against a wrong unit, which would refuse all of them or none."""
    with pytest.raises(ValueError, match="use a smaller batch or capacity") as error:
        allocate(config(1000), batch_size=1000, capacity=100_000, dtype=torch.float64, devices=[CPU] * 1000)
    said = re.search(r"needs (\S+) GiB and (\S+) GiB are free", str(error.value))
    assert said is not None
    assert float(said[1]) == pytest.approx(2 * 1000 * 1000 * 100_000 * 512 * 8 / 2**30, rel=1e-3)
    assert float(said[2]) == pytest.approx(psutil.virtual_memory().available / 2**30, rel=0.3, abs=0.3)


def free_gib(device: torch.device) -> str:
    """How much memory the refusal of a cache of 390,625 GiB says is free."""
    with pytest.raises(ValueError, match="GiB are free") as error:
        allocate(config(1000), batch_size=1000, capacity=50_000, dtype=torch.float64, devices=[device] * 1000)
    said = re.search(r"and (\S+) GiB are free", str(error.value))
    assert said is not None
    return said[1]


def test_each_device_has_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards models whose layers are on several devices: a cache fits if each part of it does."""
    free = {"cpu": 3 * 2**30, "cuda": 1.5 * 2**30, "meta": 2**30}
    monkeypatch.setattr(kv_cache, "free_bytes", lambda device: free[device.type])
    settings = {"batch_size": 1, "capacity": 2**15, "dtype": torch.float64}  # 256 MiB a layer
    with pytest.raises(ValueError, match=r"needs 1\.8 GiB and 1\.5 GiB are free"):
        allocate(config(9), devices=[CPU] * 2 + [torch.device("cuda")] * 7, **settings)
    layers = allocate(
        config(3), devices=[CPU, torch.device("meta"), CPU], **settings | {"capacity": 4, "batch_size": 1}
    )
    assert [keys.device.type for keys, _ in layers] == ["cpu", "meta", "cpu"]


def test_a_gib_has_1024_mib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards the unit of the system's report, to the last digit: its kB are of 1024 bytes."""
    report = tmp_path / "meminfo"
    report.write_text(f"MemTotal: {2**40} kB\nMemFree: 7 kB\nMemAvailable:   {1000 * 2**20} kB\nBuffers: 5 kB\n")
    monkeypatch.setattr(kv_cache, "Path", lambda name: report if name == "/proc/meminfo" else Path(name))
    assert free_gib(CPU) == "1000.0"


def test_a_gpu_says_itself_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards GPUs against the computer's memory, or all of their own, and against what torch keeps of the cache
    before: it is given back first."""
    steps: list[object] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: steps.append("given back"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: steps.append(device) or (3 * 2**30, 80 * 2**30))
    assert free_gib(torch.device("cuda", 1)) == "3.0"
    assert steps == ["given back", torch.device("cuda", 1)]


@pytest.mark.parametrize("report", ["MemTotal: 8 kB", None])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_where_free_memory_is_not_known_nothing_is_refused(
    device: str, report: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards systems that do not report, and devices that are no CPU against the CPU's memory."""
    path = tmp_path / "meminfo"
    if report is not None:
        path.write_text(report if device == "cpu" else "MemAvailable: 1 kB")
    monkeypatch.setattr(kv_cache, "Path", lambda name: path)
    layers = allocate(config(2), batch_size=1, capacity=4, dtype=torch.float64, devices=[torch.device(device)] * 2)
    assert layers[0][0].device.type == device


def test_a_config_need_not_say_the_size_of_a_head() -> None:
    """Guards models whose config has no such entry, not even an empty one."""
    assert head_size(PretrainedConfig(hidden_size=48, num_attention_heads=4)) == 12


@pytest.mark.parametrize("head_dim", [None, 16])
def test_a_cache_is_as_large_as_it_says(head_dim: int | None) -> None:
    """Guards the estimate against the memory that is really taken, with a head size of the config and without."""
    made = config(3)
    made.head_dim = head_dim
    layers = allocate(made, batch_size=2, capacity=5, dtype=torch.float32, devices=[CPU] * 3)
    assert [[tuple(tensor.shape) for tensor in layer] for layer in layers] == [[(2, 5, 4, head_dim or 128)] * 2] * 3
