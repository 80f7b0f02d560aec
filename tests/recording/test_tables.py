from __future__ import annotations

import dataclasses
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from raysim.errors import RunError
from raysim.recording import files
from raysim.recording.records import ClientRecord, RoundRecord, Status
from raysim.recording.tables import CLIENTS, COLUMNS, ROUNDS, TableWriter, read_table


@pytest.fixture
def new_york(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "America/New_York")
        time.tzset()
        yield
    time.tzset()


def test_a_column_for_every_field():
    assert set(ROUNDS.names) == {field.name for field in dataclasses.fields(RoundRecord)}
    assert set(CLIENTS.names) == {field.name for field in dataclasses.fields(ClientRecord)} - {"unit_norms"}


def test_every_column_is_described_in_the_file(tmp_path, make_round):
    TableWriter(tmp_path).write_round(make_round(1), [])
    field = pq.read_schema(tmp_path / "rounds" / "00001.parquet").field("accuracy")
    assert field.metadata[b"description"].decode() == COLUMNS["rounds"]["accuracy"][1]
    assert all(text.endswith(".") for columns in COLUMNS.values() for _, text in columns.values())


def test_values_come_back(tmp_path, make_round, make_client):
    record = make_round(
        1,
        sampled=3,
        ok=2,
        failed=1,
        updated=True,
        accuracy=0.5,
        recall=(1.0, None, 0.0),
        notes=("Pneumonie \u00e0 virus",),
    )
    used = make_client(7, score=0.25, weight=1.0, num_examples=12, pid=4711, started=record.started, unit_norms=(1.0,))
    lost = make_client(3, status="failed", reason="timed out", attempt=3)
    TableWriter(tmp_path).write_round(record, [used, lost])
    assert read_table(tmp_path, "rounds").to_pylist() == [
        {**dataclasses.asdict(record), "recall": [1.0, None, 0.0], "notes": ["Pneumonie \u00e0 virus"]}
    ]
    rows = read_table(tmp_path, "clients").to_pylist()
    expected = [dataclasses.asdict(client) for client in (lost, used)]  # By client id.
    assert rows == [{name: row[name] for name in CLIENTS.names} for row in expected]


def test_schema_does_not_depend_on_the_values(tmp_path, make_round, make_client):
    writer = TableWriter(tmp_path)
    writer.write_round(make_round(1), [make_client(0)])
    writer.write_round(make_round(2, accuracy=0.5, recall=(0.5, 1.0), notes=("a",)), [make_client(1, 2, score=1.0)])
    writer.write_round(make_round(3), [])
    for table, schema in (("rounds", ROUNDS), ("clients", CLIENTS)):
        for path in (tmp_path / table).iterdir():
            assert pq.read_schema(path).equals(schema), path
        assert read_table(tmp_path, table).schema.equals(schema)


def test_tables_of_two_runs_concatenate(tmp_path, make_round):
    for name, accuracy in (("a", None), ("b", 0.5)):
        (tmp_path / name).mkdir()
        TableWriter(tmp_path / name).write_round(make_round(1, accuracy=accuracy), [])
    both = pa.concat_tables([read_table(tmp_path / name, "rounds") for name in ("a", "b")])
    assert both["accuracy"].to_pylist() == [None, 0.5]
    files = [str(tmp_path / name / "rounds") for name in ("a", "b")]
    assert pa.dataset.dataset([pa.dataset.dataset(name) for name in files]).count_rows() == 2


def test_rounds_are_sorted_beyond_the_width_of_file_names(tmp_path, make_round, make_client):
    writer = TableWriter(tmp_path)
    for round_num in (100_000, 2, 99_999):
        writer.write_round(make_round(round_num), [make_client(one, round_num) for one in (5, 1)])
    assert read_table(tmp_path, "rounds")["round_num"].to_pylist() == [2, 99_999, 100_000]
    assert read_table(tmp_path, "clients")["client_id"].to_pylist() == [1, 5] * 3


def test_readable_while_a_round_is_being_written(tmp_path, make_round, make_client, monkeypatch):
    import pandas  # A dependency of medmnist, so always there.

    writer = TableWriter(tmp_path)
    writer.write_round(make_round(1, accuracy=0.5), [make_client(0)])
    seen = []

    def look(source: Path, target: Path) -> None:
        assert source.exists()
        for table in ("rounds", "clients"):
            folder = tmp_path / table
            seen.append(pa.dataset.dataset(folder).count_rows())
            seen.append(len(pandas.read_parquet(folder)))
            seen.append(len(list(folder.glob("*.parquet"))))
            seen.append(len(read_table(tmp_path, table)))
        replace(source, target)

    replace = os.replace
    monkeypatch.setattr(files.os, "replace", look)
    writer.write_round(make_round(2), [make_client(0, 2)])
    # While the clients' file is about to appear, and while the rounds' file is: the clients are there first.
    assert seen == [1] * 8 + [1] * 4 + [2] * 4
    frame = pandas.read_parquet(tmp_path / "rounds")
    assert frame["round_num"].tolist() == [1, 2]
    assert str(frame["started"].dtype) == "datetime64[us, UTC]"


def test_a_full_disk_leaves_the_earlier_rounds(tmp_path, make_round, monkeypatch):
    writer = TableWriter(tmp_path)
    writer.write_round(make_round(1), [])

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(RunError, match=r"00002\.parquet: No space left on device"):
        writer.write_round(make_round(2), [])
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["00001.parquet"] * 2
    assert read_table(tmp_path, "rounds")["round_num"].to_pylist() == [1]


@pytest.mark.usefixtures("new_york")
def test_times_are_utc_wherever_the_run_was(tmp_path, make_round):
    noon_in_new_york = datetime(2026, 7, 1, 12).astimezone()
    assert noon_in_new_york.utcoffset().total_seconds() == -4 * 3600
    TableWriter(tmp_path).write_round(make_round(1, started=noon_in_new_york), [])
    assert str(read_table(tmp_path, "rounds").schema.field("started").type) == "timestamp[us, tz=UTC]"
    assert read_table(tmp_path, "rounds")["started"].to_pylist() == [datetime(2026, 7, 1, 16, tzinfo=UTC)]


def test_times_without_zone_are_refused(make_round, make_client):
    with pytest.raises(ValueError, match="time zone"):
        make_round(1, started=datetime(2026, 7, 1, 12))
    with pytest.raises(ValueError, match="time zone"):
        make_client(1, finished=datetime(2026, 7, 1, 12))


def test_a_round_written_again_replaces_the_old_one(tmp_path, make_round, make_client):
    for accuracy in (0.25, 0.5):
        TableWriter(tmp_path).write_round(make_round(1, accuracy=accuracy), [make_client(0)])
    assert read_table(tmp_path, "rounds")["accuracy"].to_pylist() == [0.5]
    assert len(read_table(tmp_path, "clients")) == 1


def test_discard_after(tmp_path, make_round, make_client):
    writer = TableWriter(tmp_path)
    for round_num in range(5):
        writer.write_round(make_round(round_num), [make_client(0, round_num)])
    (tmp_path / "clients" / ".00005.parquet.0a1b2c3d.tmp").write_bytes(b"PAR1")
    writer.discard_after(2)
    assert read_table(tmp_path, "rounds")["round_num"].to_pylist() == [0, 1, 2]
    assert sorted(path.name for path in (tmp_path / "clients").iterdir()) == [f"0000{n}.parquet" for n in (0, 1, 2)]


def test_a_column_that_an_older_version_did_not_write_is_null(tmp_path, make_round, make_client):
    writer = TableWriter(tmp_path)
    for number in (1, 2):
        writer.write_round(make_round(number), [make_client(0, number, peak_memory=5)])
    path = tmp_path / "clients" / "00001.parquet"
    pq.write_table(pq.ParquetFile(path).read().drop_columns(["peak_memory"]), path)
    table = read_table(tmp_path, "clients")
    assert table["peak_memory"].to_pylist() == [None, 5]
    assert table.schema.equals(CLIENTS)


def test_a_record_of_another_round_is_refused(tmp_path, make_round, make_client):
    with pytest.raises(ValueError, match="another round than 2"):
        TableWriter(tmp_path).write_round(make_round(2), [make_client(0, 1)])


def test_no_round_yet(tmp_path):
    assert read_table(tmp_path, "clients").schema.equals(CLIENTS)
    assert len(read_table(tmp_path, "rounds")) == 0


def test_status_words_are_described():
    assert all(word in COLUMNS["clients"]["status"][1] for word in get_args(Status))
