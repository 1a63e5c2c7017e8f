"""Resolves names of Hugging Face models: a repository, or one of its GGUF files, which is downloaded into the cache.

A GGUF file is named as for llama.cpp's `-hf`: `REPO:Q4_K_M` by its quantisation, or `REPO:FILE.gguf`.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

# Not exported there, but importing it from the HTTP client itself would add a dependency.
from huggingface_hub.errors import HTTPError as HTTPError  # type: ignore[attr-defined]  # not exported
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import WeakFileLock as WeakFileLock  # type: ignore[attr-defined]  # the same
from huggingface_hub.utils import build_hf_headers as build_hf_headers  # type: ignore[attr-defined]  # the same

from paradraft.digests import file_digest
from paradraft.formats.gguf import SUFFIX
from paradraft.sources.loading_errors import first_sentence

DEFAULT = "Q4_K_M"
"""Default quantisation of a repository that has only GGUF files; if it is missing, the first file is used."""
TIMEOUT_S = 10
_OF_REPOSITORY = re.compile(r"([^/:\\]+/[^/:\\]+):(.+)")
_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def names_gguf(name: str) -> bool:
    """Whether a name has the form of a repository's GGUF file; an existing file or folder has priority over it.

    >>> names_gguf("Qwen/Qwen3-4B-GGUF:Q4_K_M"), names_gguf("Qwen/Qwen3-4B"), names_gguf("C:/models/a.gguf")
    (True, False, False)
    """
    return _OF_REPOSITORY.fullmatch(name) is not None


@functools.cache  # a command resolves a model several times
def located(name: str) -> str:
    """Resolves a name that is not local to a repository id, or to the path of its GGUF file in the hub's cache.

    A file is downloaded if the cache lacks it; an interrupted download is resumed. If the hub cannot be reached, or
    `HF_HUB_OFFLINE` is set, the cache is used.

    Args:
        name: `REPO`, `REPO:QUANTISATION` in any case, or `REPO:FILE.gguf`.

    Raises:
        ValueError: there is no such repository or file, it is not accessible, or the download fails.
    """
    match = _OF_REPOSITORY.fullmatch(name)
    repo, wanted = match.groups() if match else (name, None)
    try:
        # Checked first, because `from_pretrained` retries for a minute without a network.
        if wanted is None and name and isinstance(try_to_load_from_cache(name, "config.json"), str):
            return name
        files, is_online = _files_of(repo, name)
        if wanted is None and not _has_only_gguf(files):
            return name
        return _fetched(repo, chosen(repo, files, wanted), is_online)
    except HFValidationError:
        raise ValueError(f"unknown model {name!r}: there is no such folder, and it is no Hugging Face id") from None
    except GatedRepoError:
        raise ValueError(
            f"{repo!r} is gated: accept its conditions at {constants.ENDPOINT}/{repo}, then `hf auth login` or set "
            "HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise ValueError(
            f"unknown model {name!r}: there is no such file or folder and no such Hugging Face model; for a private "
            "one `hf auth login` or set HF_TOKEN"
        ) from None


def _files_of(repo: str, name: str) -> tuple[list[str], bool]:
    """The files of a repository and True if the hub lists them; else its cached GGUF files and False."""
    try:
        return [file.rfilename for file in HfApi().model_info(repo, timeout=TIMEOUT_S).siblings or []], True
    except RepositoryNotFoundError:
        raise
    except (OSError, HTTPError) as error:
        if files := _cached_files(repo):
            return files, False
        raise ValueError(
            f"unknown model {name!r}: there is no such file or folder, and Hugging Face cannot be asked for it "
            f"({first_sentence(error)})"
        ) from None


def _cached_files(repo: str) -> list[str]:
    """The cached GGUF files of a repository, in the revision that was downloaded last."""
    try:
        revision = (_cache_of(repo) / "refs" / constants.DEFAULT_REVISION).read_text()
    except OSError:
        return []
    snapshot = _cache_of(repo) / "snapshots" / revision
    return sorted(file.relative_to(snapshot).as_posix() for file in snapshot.rglob("*") if is_model(file.name))


def _cache_of(repo: str) -> Path:
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")


def is_model(file: str) -> bool:
    """Whether a repository's file is a GGUF model, not an image projector or an importance matrix.

    >>> is_model("a-Q4_K_M.gguf"), is_model("mmproj-F16.gguf"), is_model("imatrix.gguf"), is_model("config.json")
    (True, False, False, False)
    """
    name = file.rpartition("/")[2].lower()
    return name.endswith(SUFFIX) and "mmproj" not in name and not name.startswith("imatrix")


def _has_only_gguf(files: list[str]) -> bool:
    return any(map(is_model, files)) and not any(file.endswith(_WEIGHTS) for file in files)


def chosen(repo: str, files: list[str], wanted: str | None) -> str:
    """Selects the GGUF file of a repository.

    Args:
        wanted: a quantisation or a file name, in any case; None for the default.

    Raises:
        ValueError: no file matches, several do, or it is split into parts.

    >>> chosen("a/b", ["m-Q4_K_S.gguf", "m-Q4_K_M.gguf", "mmproj-F16.gguf"], "q4_k_m")
    'm-Q4_K_M.gguf'
    """
    # Split files are listed by their first part.
    models = sorted(
        file for file in files if is_model(file) and (not (part := _PART.search(file)) or int(part[1]) == 1)
    )
    if wanted is None:
        matching = [file for file in models if _is_of(file, DEFAULT)] or models[:1]
    elif wanted.lower().endswith(SUFFIX):
        matching = [file for file in models if wanted.lower() in (file.lower(), file.lower().rpartition("/")[2])]
    else:
        matching = [file for file in models if _is_of(file, wanted)]
    there_are = f"there are {', '.join(models)}" if models else "there is none"
    if not matching:
        raise ValueError(f"{repo!r} has no GGUF file {wanted!r}: {there_are}")
    if len(matching) > 1:
        raise ValueError(
            f"{repo!r} has {len(matching)} files of {wanted or DEFAULT}: name one, such as {_named(repo, matching)}"
        )
    if (part := _PART.search(matching[0])) and int(part[2]) > 1:
        raise ValueError(
            f"{repo!r} has {matching[0]!r} in {int(part[2])} parts, which are not read: name another file, or join "
            f"them with `llama-gguf-split --merge`; {there_are}"
        )
    return matching[0]


def _named(repo: str, files: list[str]) -> str:
    return " or ".join(f"{repo}:{file}" for file in files)


def _is_of(file: str, quantisation: str) -> bool:
    """Whether a file's name contains a quantisation.

    >>> _is_of("m.q4_k_m.gguf", "Q4_K_M"), _is_of("m-Q4_K_M.gguf", "Q4_K"), _is_of("m-IQ4_XS.gguf", "Q4_XS")
    (True, False, False)
    """
    return re.search(rf"(?:^|[-._/]){re.escape(quantisation)}[-.]", file, re.IGNORECASE) is not None


def _fetched(repo: str, file: str, is_online: bool) -> str:
    """The path of a file in the cache, downloaded if needed and online."""
    try:
        if is_online:
            _download(repo, file)
        return hf_hub_download(repo, file, local_files_only=not is_online)
    except GatedRepoError:
        raise
    except (OSError, HTTPError) as error:
        raise ValueError(
            f"cannot fetch {file!r} of {repo!r} ({first_sentence(error)}): the same command goes on where it stopped"
        ) from None


def _download(repo: str, file: str) -> None:
    """Downloads a file into the cache, where the hub's client expects it, because the client's own downloads do not
    resume after an interruption. Files that are too large for plain HTTP are left to the client."""
    url = hf_hub_url(repo, file)
    metadata = get_hf_file_metadata(url, timeout=TIMEOUT_S)
    if metadata.etag is None or metadata.size is None or metadata.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
        return
    content = _cache_of(repo) / "blobs" / metadata.etag
    # The client's own lock file.
    lock = Path(constants.HF_HUB_CACHE) / ".locks" / _cache_of(repo).name / f"{metadata.etag}.lock"
    for folder in (content.parent, lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if content.exists():
            return
        part = content.with_name(f"{metadata.etag}.incomplete")
        with part.open("ab") as stream:
            if stream.tell() > metadata.size:
                stream.truncate(0)
            http_get(
                url, stream, resume_size=part.stat().st_size, headers=build_hf_headers(), expected_size=metadata.size,
                displayed_filename=file,
            )  # fmt: skip
        if _SHA256.fullmatch(metadata.etag) and file_digest(part) != metadata.etag:
            part.unlink()
            raise OSError("it arrived damaged and was deleted")
        os.replace(part, content)
