"""C sources compiled on the machine that runs them: what is kept serves again, and where nothing can be had there is None, or an
error that says why."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from foundation.errors import SetupError
from foundation.native_library import _compiler, native_calls, native_library


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if not (shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")):
        pytest.skip("no C compiler")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("DECANT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "answer.c"
    path.write_text("int missing(void);\nint answer(void) { return ANSWER; }\n")
    return path


def test_each_set_of_flags_is_compiled_once(source: Path, tmp_path: Path) -> None:
    libraries = [native_library(source, (f"-DANSWER={answer}",)) for answer in (1, 2, 1)]
    assert [library and library.answer() for library in libraries] == [1, 2, 1]
    assert len(list((tmp_path / "cache" / "native").iterdir())) == 2


def test_a_source_that_does_not_compile_is_none(source: Path) -> None:
    assert native_library(source) is None


def test_without_a_compiler_it_is_none(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert native_library(source, ("-DANSWER=1",)) is None


def test_a_kept_library_that_cannot_be_loaded_is_none(source: Path, tmp_path: Path) -> None:
    """As where nothing in the cache folder may be run."""
    assert native_library(source, ("-DANSWER=missing()",)) is None
    assert len(list((tmp_path / "cache" / "native").iterdir())) == 1, "it was compiled"


def test_where_nothing_can_be_kept_it_is_none(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert native_library(source, ("-DANSWER=1",)) is None

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("DECANT_CACHE")
    monkeypatch.setattr(Path, "home", homeless)
    assert native_library(source, ("-DANSWER=1",)) is None


def test_a_compiler_may_be_named_with_options_of_its_own(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", " ".join([*_compiler(), "-DANSWER=7"]))
    library = native_library(source)
    assert library is not None
    assert library.answer() == 7


@pytest.mark.parametrize(
    ("compiler", "hindrance"),
    [("", "ANSWER"), ("no-such-compiler", "No such file or directory: 'no-such-compiler'")],
)
def test_what_cannot_be_done_without_says_what_hinders_it(
    compiler: str, hindrance: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(SetupError, match=f"answers need a C compiler .*DECANT_CACHE.*{hindrance}"):
        native_calls(source, "answers")
