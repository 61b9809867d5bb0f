"""Archives of user code: the same whoever packs them, and nothing unsafe is ever unpacked."""

from __future__ import annotations

import errno
import io
import itertools
import os
import stat
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.protocol import code_archive
from trainer.protocol.code_archive import CodeError, add_to_path, check, id_of, pack, unpack


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "src"
    (root / "towers" / "__pycache__").mkdir(parents=True)
    (root / "towers" / "__init__.py").write_text("WIDTH = 8\n")
    (root / "towers" / "net.py").write_text("from towers import WIDTH\n")
    (root / "towers" / "__pycache__" / "net.pyc").write_bytes(b"cache")
    (root / ".git").mkdir()
    (root / ".git" / "config").write_text("secret")
    (root / "link.py").symlink_to("/etc/passwd")
    return root


def zip_of(*entries: tuple[str, bytes], mode: int = 0o100644) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in entries:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            archive.writestr(info, content)
    return buffer.getvalue()


def test_the_same_code_has_the_same_id_whenever_it_was_written(folder: Path) -> None:
    first = pack(folder)
    os.utime(folder / "towers" / "net.py", (1, 1))
    (folder / "towers" / "net.py").chmod(0o700)
    assert pack(folder) == first
    (folder / "towers" / "net.py").write_text("WIDTH = 9\n")
    assert id_of(pack(folder)) != id_of(first)


def test_what_is_packed_comes_out_again_without_caches_links_and_hidden_files(
    folder: Path, tmp_path: Path
) -> None:
    data = pack(folder)
    root = unpack(data, id_of(data), tmp_path / "out")
    found = sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())
    assert found == ["towers/__init__.py", "towers/net.py"]
    assert (root / "towers" / "__init__.py").read_text() == "WIDTH = 8\n"
    assert check(data).num_files == 2


def test_a_path_that_could_leave_the_folder_is_refused(tmp_path: Path) -> None:
    outside = ["../evil.py", "/etc/evil.py", "C:/evil.py", "evil.py", "codes/evil.py", "code"]
    outside += ["code/../../evil.py", "code\\..\\evil.py", "code/./ok.py", "code//ok.py"]
    unusable = ["code/bell\x07.py", "code/" + "a" * 300, "code/" + "é" * 150 + ".py"]
    for name in outside + unusable:
        data = zip_of(("code/ok.py", b""), (name, b"import os"))
        with pytest.raises(CodeError):
            unpack(data, id_of(data), tmp_path / "out")
        assert list(tmp_path.iterdir()) == []


def test_links_and_devices_are_refused() -> None:
    for kind in (stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR):
        with pytest.raises(CodeError, match="links are not taken"):
            check(zip_of(("code/link.py", b"/etc/passwd"), mode=kind | 0o777))


def test_a_file_that_is_also_a_folder_or_there_twice_is_refused() -> None:
    for other in ("code/a/b.py", "code/a/", "code/a/b/"):
        with pytest.raises(CodeError, match="'code/a' is a file and a folder"):
            check(zip_of(("code/a", b""), (other, b"")))
    with pytest.warns(UserWarning, match="Duplicate"):
        data = zip_of(("code/a.py", b"1"), ("code/a.py", b"2"))
    with pytest.raises(CodeError, match="twice"):
        check(data)


def test_a_bomb_is_refused_by_what_it_states_and_by_what_comes_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(code_archive, "MAX_UNPACKED_BYTES", 1000)
    assert check(zip_of(("code/a.py", b"x" * 1000))).size_bytes == 1000
    with pytest.raises(CodeError, match="MiB"):
        check(zip_of(("code/a.py", b"x" * 600), ("code/b.py", b"x" * 600)))
    honest = zip_of(("code/a.py", b"x" * 5000))
    lying = honest.replace((5000).to_bytes(4, "little"), (10).to_bytes(4, "little"))
    with pytest.raises(CodeError):
        check(lying)


def test_an_upload_is_a_module_or_a_zip_of_a_folder_and_no_bomb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = zip_of(("code/net.py", b"WIDTH = 8"))
    assert code_archive.pack_upload("code.zip", ready) == ready
    (tmp_path / "net.py").write_bytes(b"WIDTH = 8")
    assert code_archive.pack_upload("net.py", b"WIDTH = 8") == pack(tmp_path)
    (tmp_path / "net").mkdir()
    (tmp_path / "net/x.py").touch()
    left_out = [(f"net/{name}", b"") for name in ("__pycache__/x.pyc", ".git/config", "._x.py")]
    for files in itertools.permutations([("net.py", b"WIDTH = 8"), ("net/x.py", b"")]):
        packed = code_archive.pack_upload("x.ZIP", zip_of(*files, *left_out))
        assert packed == pack(tmp_path), "the same code has one id"
    links = code_archive.pack_upload("x.zip", zip_of(("a.py", b"net.py"), mode=0o120777))
    assert not zipfile.ZipFile(io.BytesIO(links)).namelist()
    monkeypatch.setattr(code_archive, "MAX_UNPACKED_BYTES", 10)
    with pytest.raises(CodeError, match="holds more than"):
        code_archive.pack_upload("x.zip", zip_of(("a.py", b"123456"), ("b.py", b"123456")))
    with pytest.raises(CodeError, match="not a zip"):
        code_archive.pack_upload("x.zip", b"no zip")


def test_more_files_than_code_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [(f"code/{number}.py", b"") for number in range(code_archive.MAX_FILES + 1)]
    with pytest.raises(CodeError, match=f"at most {code_archive.MAX_FILES}"):
        check(zip_of(*entries))
    # One that lies about its number of entries is refused before it is read.
    data = bytearray(zip_of(*entries))
    end = data.rindex(b"PK\x05\x06")
    data[end + 8 : end + 12] = (1).to_bytes(2, "little") * 2
    monkeypatch.delattr(zipfile, "ZipFile")
    with pytest.raises(CodeError, match="too many entries; at most 2000"):
        check(bytes(data))


def test_bytes_that_changed_on_the_way_are_not_unpacked(folder: Path, tmp_path: Path) -> None:
    data = pack(folder)
    with pytest.raises(CodeError, match="changed or cut short"):
        unpack(data + b" ", id_of(data), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@given(st.binary(max_size=400))
def test_bytes_that_are_no_archive_are_refused_in_words(data: bytes) -> None:
    with pytest.raises(CodeError):
        check(data)


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_damaged_archive_is_refused_or_still_safe(place: int, value: int) -> None:
    data = bytearray(zip_of(("code/a.py", b"x" * 50), ("code/b/c.py", b"y" * 50)))
    data[place % len(data)] = value
    try:
        summary = check(bytes(data))
    except CodeError:
        return
    assert summary.size_bytes <= code_archive.MAX_UNPACKED_BYTES


def test_a_folder_without_code_says_which_to_give(tmp_path: Path) -> None:
    with pytest.raises(CodeError, match="no files"):
        pack(tmp_path)
    with pytest.raises(CodeError, match="not a folder"):
        pack(tmp_path / "missing")


def test_a_folder_with_data_in_it_is_refused_without_reading_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (folder / "data.bin").open("wb") as file:
        file.truncate(100 * 2**30)
    with pytest.raises(CodeError, match="more than 64 MiB"):
        pack(folder)
    (folder / "data.bin").unlink()
    monkeypatch.setattr(code_archive, "MAX_FILES", 1)
    with pytest.raises(CodeError, match="more than 1 files"):
        pack(folder)


def test_code_that_would_take_the_place_of_what_is_there_is_refused_before_it_is_sent(
    tmp_path: Path,
) -> None:
    ours = ["trainer/training/worker.py", "service/__init__.py", "trainer.py", "trainer.abi3.so"]
    theirs = ["random.py", "types.py", "logging/__init__.py", "torch/__init__.py", "ray.py"]
    for number, name in enumerate([*ours, *theirs, "sitecustomize.py"]):
        path = tmp_path / str(number) / name
        path.parent.mkdir(parents=True)
        path.write_text("")
        with pytest.raises(CodeError, match="take the place of the module"):
            pack(tmp_path / str(number))
        with pytest.raises(CodeError, match="take the place of the module"):
            check(zip_of((f"code/{name}", b"")))
        harmless = zip_of((f"code/mine/{name}", b""), ("code/random.txt", b""))
        assert check(harmless).num_files == 2


def disk_is_full(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_code_on_the_module_path_is_unpacked_once_for_all_processes_of_a_host(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = pack(folder)
    archive = tmp_path / "code" / f"{id_of(data)}.zip"
    archive.parent.mkdir()
    archive.write_bytes(data)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setenv("PYTHONPATH", "before")
    for _ in range(2):
        add_to_path(archive)
    unpacked = archive.with_suffix("") / "code"
    assert sys.path == [str(unpacked)] * 2
    assert os.environ["PYTHONPATH"].endswith(f"{unpacked}{os.pathsep}before")
    assert {path.name for path in archive.parent.iterdir()} == {archive.name, archive.stem}
    archive.with_suffix("").rename(tmp_path / "moved")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(Path, "write_bytes", disk_is_full)
        add_to_path(archive)
    assert [path.name for path in archive.parent.iterdir()] == [archive.name]
    archive.write_bytes(data + b" ")
    with pytest.raises(CodeError, match="changed or cut short"):
        add_to_path(archive)
