from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paradraft import drafters, train
from paradraft.cli import main
from paradraft.drafters import check_draft, drafter_module, drafter_names, split_settings, traits_of
from paradraft.train import trainee_module, trainee_names
from paradraft.traits import Traits
from tests.support.packages import install


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Installs packages with entry points, and forgets their modules afterwards."""
    before = set(sys.modules)
    yield lambda name, **groups: install(tmp_path / name, name, monkeypatch, **groups)
    for name in set(sys.modules) - before:
        if name.startswith("other"):
            del sys.modules[name]


def test_a_package_adds_a_drafter(package: Callable[..., None], tmp_path: Path) -> None:
    """Guards drafters that are not ours: found by an entry point, under the name that it gives."""
    package("other", modules={"other_bigram": "Config = build = 'theirs'"}, drafters={"bigram": "other_bigram"})
    assert "bigram" in drafter_names()
    assert drafter_module("bigram").build == "theirs"
    assert "bigram" not in trainee_names()


def test_a_name_that_two_packages_have_is_a_mistake(
    package: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against decoding with another drafter than was meant, whichever was installed last; and other drafters
    go on as before."""
    package("other", modules={"other_ngram": ""}, drafters={"ngram": "other_ngram"})
    with pytest.raises(ValueError, match="paradraft and package 'other' both have 'ngram': uninstall one"):
        check_draft("ngram", None, "pocket")
    check_draft("none", None, "pocket")
    package("other2", modules={"other_pard": ""}, train={"pard": "other_pard"})
    monkeypatch.setattr(sys, "argv", ["paradraft", "train", "pard", "recipe.yaml"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert re.fullmatch(
        r"paradraft: paradraft\.train: paradraft and package 'other2' both have 'pard': .*\n", capsys.readouterr().err
    )


def test_a_module_that_cannot_be_imported_is_a_mistake(package: Callable[..., None]) -> None:
    """Guards against a traceback out of somebody else's package, or advice to install what is ours."""
    package(
        "other", modules={"other_bad": "import no_such_module"}, drafters={"bad": "other_bad", "gone": "other_gone"}
    )
    with pytest.raises(
        ValueError, match="'bad' of package 'other' cannot be imported: No module named 'no_such_module'"
    ):
        drafter_module("bad")
    with pytest.raises(ValueError, match="'gone' of package 'other' cannot be imported: No module named 'other_gone'"):
        drafter_module("gone")
    drafters._all_traits.cache_clear()
    assert split_settings("n-gram")[0] == "ngram" and traits_of("bad") == Traits(), "no harm to others"


def test_a_training_without_a_builder_is_a_mistake(package: Callable[..., None]) -> None:
    """Guards the first try of a newcomer: the module is found, and says what is missing."""
    from paradraft.train import recipe_class

    package(
        "other",
        modules={"other_x": "", "other_y": "def build(recipe: int): ..."},
        drafters={"x": "other_x", "y": "other_y"},
        train={"x": "other_x", "y": "other_y"},
    )
    assert {"x", "y"} <= set(trainee_names())
    for name in ("x", "y"):
        with pytest.raises(ValueError, match=f"other_{name}: it has no function build"):
            recipe_class(trainee_module(name))


def test_shipped_names_are_files() -> None:
    """Guards against a drafter that is found in this checkout alone."""
    folder = Path(drafters.__file__).parent
    assert set(drafter_names()) == {file.stem for file in folder.glob("*.py")} - {"__init__"}
    files = {file.stem for file in Path(str(train.drafters.__file__)).parent.glob("*.py")}
    assert set(trainee_names()) == files & set(drafter_names()) >= {"pard", "medusa"}
