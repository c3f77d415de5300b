"""The work file of an export, as kills leave it."""

import sqlite3

import pytest

from mappa_graph.exchange.rows import Row, Rows


@pytest.mark.parametrize("statement", ["DELETE FROM state", "DROP TABLE siblings; DELETE FROM state", "DROP TABLE state"])
def test_a_file_that_was_killed_while_it_was_made_is_made_anew(tmp_path, statement):
    path = tmp_path / "work"
    Rows(path, "one")._db.close()
    with sqlite3.connect(path) as db:
        db.executescript(statement)
    db.close()
    rows = Rows(path, "one")
    assert not rows.resumed and rows.add(Row({"text": "a"}, "train")) is None
    rows.commit(1)
    rows._db.close()
    again = Rows(path, "one")
    assert again.resumed and again.done == 1
    again._db.close()
