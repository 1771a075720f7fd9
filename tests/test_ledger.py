"""The ledger of faults: what it counts, what it refuses, and how the records of several sessions add up."""
import importlib.util
import json
from pathlib import Path

import ledger
import pytest
from ledger import Ledger


def counted(n) -> Ledger:
    made = Ledger()
    made.begin('test_kills.py::test_kill', 'R1', 'Killed.')
    made.judge('SIGKILL', 'run', dict(a=1), dict(a=1), n)
    made.test.cases += 1
    made.begin('test_other.py::test_plain', '', '')
    return made


def test_a_wrong_resume_is_counted_and_named():
    made = counted(3)
    with pytest.raises(AssertionError, match=r"SIGKILL of run: \['a', 'c'\] differ"):
        made.judge('SIGKILL', 'run', dict(a=1, b=2), dict(a=3, b=2, c=4))
    assert made.line() == 'faults injected: 4 (4 SIGKILL) in 0 processes; wrong resumes: 1'
    assert Ledger().line() == ''


def test_records_of_pieces_add_up(tmp_path, monkeypatch):
    path = tmp_path/'record.json'
    for piece, n in (('1/2', 3), ('2/2', 4), ('1/2', 5)):
        monkeypatch.setattr(ledger, 'PIECE', piece)
        counted(n).write(path)
    record = json.loads(path.read_text())
    [(name, test)] = record['tests'].items()
    assert {piece: found['faults'] for piece, found in test['pieces'].items()} == {'1/2': dict(SIGKILL=5), '2/2': dict(SIGKILL=4)}
    text = page()(record)
    assert '**9 faults injected, 0 wrong resumes.**' in text and f'`{name}` | Killed. | 2 | 9 SIGKILL' in text
    monkeypatch.setattr(ledger, 'PIECE', '1/1')
    counted(1).write(path)
    assert list(json.loads(path.read_text())['tests'][name]['pieces']) == ['1/1'], 'another way to cut begins anew'


def page():
    spec = importlib.util.spec_from_file_location('reliability', Path(__file__).parents[1]/'tools'/'reliability.py')
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made.page


@pytest.mark.parametrize(('piece', 'wanted'), [('1/1', [0, 1, 2, 3, 4]), ('1/2', [0, 2, 4]), ('2/2', [1, 3])])
def test_a_piece_of_the_cases(monkeypatch, piece, wanted):
    monkeypatch.setattr(ledger, 'PIECE', piece)
    assert ledger.of_piece([0, 1, 2, 3, 4]) == wanted
