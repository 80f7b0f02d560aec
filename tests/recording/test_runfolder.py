from __future__ import annotations

import errno
import getpass
import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from raysim.errors import ConfigError
from raysim.recording import runfolder
from raysim.recording.runfolder import check_space, claim


def test_claim_creates_the_folder_and_its_parents(tmp_path):
    folder = tmp_path / "out" / "\u00e9t\u00e9 1" / "run"
    claim(folder)
    assert list(folder.iterdir()) == []


def test_a_folder_is_claimed_once(tmp_path):
    claim(tmp_path / "run")
    (tmp_path / "run" / "result.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        claim(tmp_path / "run")
    text = str(caught.value)
    assert all(part in text for part in (str(tmp_path / "run"), "`name`", "`output.dir`", "remove"))
    assert "`raysim resume`" in text
    assert (tmp_path / "run" / "result.json").read_text() == "{}"


def test_one_of_many_wins(tmp_path):
    def attempt(_: int) -> bool:
        try:
            claim(tmp_path / "out" / "run")
        except ConfigError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(8))) == 1


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder(tmp_path):
    (tmp_path / "out").mkdir(mode=0o555)
    with pytest.raises(ConfigError, match="Permission denied"):
        claim(tmp_path / "out" / "run")


@pytest.mark.parametrize("function", ["mkdir", "parents"])
def test_no_permission(tmp_path, monkeypatch, function):
    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(*((runfolder.os, "mkdir") if function == "mkdir" else (runfolder.Path, "mkdir")), refuse)
    with pytest.raises(ConfigError) as caught:
        claim(tmp_path / "out" / "run")
    assert str(tmp_path / "out" / "run") in str(caught.value)
    assert getpass.getuser() in str(caught.value)
    assert "Permission denied" in str(caught.value)


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        claim(tmp_path / "out" / "run")
    with pytest.raises(ConfigError, match="Not a directory"):
        claim(tmp_path / "out" / "deeper" / "run")


def test_space(tmp_path, monkeypatch):
    check_space(tmp_path / "not" / "yet" / "there", 1)
    monkeypatch.setattr(runfolder.shutil, "disk_usage", lambda place: SimpleNamespace(free=3_000_000))
    with pytest.raises(ConfigError, match=r"about 1\.2 GB .* 3\.0 MB are free"):
        check_space(tmp_path / "run", 1_200_000_000)
