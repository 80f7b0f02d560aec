from __future__ import annotations

import dataclasses
import json
import logging

import numpy as np
import pytest
import torch

from raysim.errors import RunError
from raysim.recording import checkpoint as module
from raysim.recording.checkpoint import (
    ClientFile,
    arrays_checksum,
    read_client_state,
    read_latest,
    write_checkpoint,
    write_client_state,
)
from raysim.state import ServerState, record_checksum, to_arrays


def arrays_of(round_num: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(round_num)
    return {
        "params": rng.normal(size=50).astype(np.float32),
        "buffers/ints": np.array([round_num], dtype=np.int64),
        "client/7/control": rng.normal(size=(2, 3)),
        "file": np.asarray(0.5),
        "empty": np.zeros((0, 3), dtype=np.float32),
    }


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_round_trip(tmp_path):
    path = write_checkpoint(tmp_path, 5, arrays_of(5), {"history": [0.1, 1 / 3], "bad": float("nan"), "shape": (1, 2)})
    assert path == tmp_path / "checkpoints" / "round-00005.json"
    found = read_latest(tmp_path)
    assert found.round_num == 5
    assert found.info == {"history": [0.1, 1 / 3], "bad": None, "shape": [1, 2]}
    assert found.clients == {}
    assert list(found.arrays) == list(arrays_of(5))
    for name, array in arrays_of(5).items():
        assert found.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(found.arrays[name], array)


def test_manifest_says_what_the_file_holds(tmp_path):
    manifest = json.loads(write_checkpoint(tmp_path, 5, arrays_of(5), {}).read_text(encoding="utf-8"))
    assert manifest["format"] == 1
    assert manifest["file"] == "round-00005.npz"
    assert manifest["arrays"]["client/7/control"]["shape"] == [2, 3]
    with np.load(tmp_path / "checkpoints" / "round-00005.npz") as archive:  # Plain numpy reads it.
        np.testing.assert_array_equal(archive["params"], arrays_of(5)["params"])


def test_none_yet(tmp_path):
    assert read_latest(tmp_path) is None


def test_equal_state_makes_equal_files(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_checkpoint(tmp_path / name, 1, arrays_of(1), {})
    for file in ("round-00001.npz", "round-00001.json"):
        assert (tmp_path / "a/checkpoints" / file).read_bytes() == (tmp_path / "b/checkpoints" / file).read_bytes()


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_keep(tmp_path, keep):
    for round_num in range(1, 6):
        write_checkpoint(tmp_path, round_num, arrays_of(round_num), {}, keep=keep)
    rounds = range(6 - keep, 6)
    expected = sorted(f"round-0000{n}.{kind}" for n in rounds for kind in ("json", "npz"))
    assert names(tmp_path / "checkpoints") == expected


def cut(path):
    path.write_bytes(path.read_bytes()[:-30])


def flip(path):
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)


def lie(path):
    """Change the arrays into others that are well formed."""
    module._save(path, arrays_of(4))


def lose(path):
    module._save(path, {"params": arrays_of(5)["params"]})


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        *[("round-00005.npz", damage) for damage in (cut, flip, lie, lose, lambda path: path.unlink())],
        ("round-00005.npz", lambda path: path.write_bytes(b"")),
        ("round-00005.json", cut),
        ("round-00005.json", lambda path: path.write_text("[]")),
        ("round-00005.json", lambda path: path.write_text('{"format": 2}')),
    ],
)
def test_a_broken_checkpoint_is_passed_by(tmp_path, caplog, file, damage):
    for round_num in (4, 5):
        write_checkpoint(tmp_path, round_num, arrays_of(round_num), {})
    damage(tmp_path / "checkpoints" / file)
    with caplog.at_level(logging.WARNING):
        assert read_latest(tmp_path).round_num == 4
    assert "round-00005.json is broken" in caplog.text


def test_the_manifest_is_the_commit_point(tmp_path, monkeypatch, caplog):
    """Killed after the arrays are written: the previous checkpoint counts and nothing is amiss."""
    write_checkpoint(tmp_path, 4, arrays_of(4), {})

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            write_checkpoint(tmp_path, 5, arrays_of(5), {}, keep=1)
    assert "round-00005.npz" in names(tmp_path / "checkpoints")
    assert read_latest(tmp_path).round_num == 4
    assert not caplog.records
    write_checkpoint(tmp_path, 5, arrays_of(5), {}, keep=1)
    assert read_latest(tmp_path).round_num == 5


def test_later_checkpoints_of_an_earlier_attempt_go(tmp_path):
    for round_num in (4, 5):
        write_checkpoint(tmp_path, round_num, arrays_of(round_num), {})
    cut(tmp_path / "checkpoints" / "round-00005.npz")
    (tmp_path / "checkpoints" / "round-00007.npz").write_bytes(b"half")
    (tmp_path / "checkpoints" / ".round-00006.npz.0a1b2c3d.tmp").write_bytes(b"half")
    write_checkpoint(tmp_path, 3, arrays_of(3), {})  # Started again further back.
    assert names(tmp_path / "checkpoints") == ["round-00003.json", "round-00003.npz"]
    assert read_latest(tmp_path).round_num == 3


def test_a_failed_write_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, 4, arrays_of(4), {}, keep=1)
    before = names(tmp_path / "checkpoints")

    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array", full)
    with pytest.raises(RunError, match="No space left on device"):
        write_checkpoint(tmp_path, 5, arrays_of(5), {}, keep=1)
    assert names(tmp_path / "checkpoints") == before
    assert read_latest(tmp_path).round_num == 4


def test_objects_are_never_pickled(tmp_path):
    with pytest.raises(ValueError, match="allow_pickle"):
        write_checkpoint(tmp_path, 1, {"a": np.array([object()])}, {})


def control_of(client_id: int, round_num: int) -> dict[str, np.ndarray]:
    return {"control": np.array([client_id, round_num], dtype=np.float32), "h": np.zeros(2)}


def write_state(folder, client_id: int, round_num: int) -> ClientFile:
    arrays = control_of(client_id, round_num)
    return ClientFile(write_client_state(folder, client_id, round_num, arrays), arrays_checksum(arrays))


def test_client_states_are_written_once_per_change(tmp_path):
    """Clients 1 and 2 take part in round 1, client 2 in round 2, client 3 in round 3."""
    clients: dict[int, ClientFile] = {}
    for round_num, cohort in ((1, (1, 2)), (2, (2,)), (3, (3,))):
        clients |= {one: write_state(tmp_path, one, round_num) for one in cohort}
        write_checkpoint(tmp_path, round_num, arrays_of(round_num), {"clients": clients})
    assert clients[1].file == "clients/00001-00001.npz"
    # 00002-00001 belonged to checkpoint 1 only.
    expected = ["00001-00001.npz", "00002-00002.npz", "00003-00003.npz"]
    assert names(tmp_path / "checkpoints" / "clients") == expected
    found = read_latest(tmp_path)
    assert found.clients == clients
    for client_id, round_num in ((1, 1), (2, 2), (3, 3)):
        state = read_client_state(tmp_path, found.clients[client_id])
        np.testing.assert_array_equal(state["control"], control_of(client_id, round_num)["control"])


def test_client_states_of_the_previous_checkpoint_stay(tmp_path):
    for round_num in (1, 2):
        clients = {2: write_state(tmp_path, 2, round_num)}
        write_checkpoint(tmp_path, round_num, arrays_of(round_num), {"clients": clients}, keep=2)
    cut(tmp_path / "checkpoints" / "round-00002.npz")
    found = read_latest(tmp_path)
    assert read_client_state(tmp_path, found.clients[2])["control"].tolist() == [2, 1]


def test_states_on_their_way_to_the_next_checkpoint_stay(tmp_path):
    ahead = write_state(tmp_path, 2, 3)
    write_checkpoint(tmp_path, 2, arrays_of(2), {})
    assert read_client_state(tmp_path, ahead)["control"].tolist() == [2, 3]
    write_checkpoint(tmp_path, 4, arrays_of(4), {}, keep=1)
    assert names(tmp_path / "checkpoints" / "clients") == []


@pytest.mark.parametrize("damage", [cut, lambda path: path.unlink()])
def test_a_checkpoint_without_its_client_states_is_passed_by(tmp_path, caplog, damage):
    for round_num in (1, 2):
        clients = {2: write_state(tmp_path, 2, round_num)}
        write_checkpoint(tmp_path, round_num, arrays_of(round_num), {"clients": clients})
    damage(tmp_path / "checkpoints" / "clients" / "00002-00002.npz")
    assert read_latest(tmp_path).round_num == 1
    assert "round-00002.json is broken" in caplog.text


def test_a_damaged_client_state_is_never_used(tmp_path):
    client = write_state(tmp_path, 2, 1)
    with pytest.raises(ValueError, match="damaged"):
        read_client_state(tmp_path, dataclasses.replace(client, checksum="0" * 16))
    cut(tmp_path / "checkpoints" / client.file)
    with pytest.raises(ValueError, match="damaged"):
        read_client_state(tmp_path, client)


def test_checksum_is_that_of_the_record():
    record = ServerState(torch.arange(3.0))
    assert arrays_checksum(to_arrays(record)) == record_checksum(record)


def test_at_least_one_is_kept(tmp_path):
    with pytest.raises(ValueError, match="at least 1"):
        write_checkpoint(tmp_path, 1, {}, {}, keep=0)
