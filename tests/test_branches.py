"""The cells of the rooms that a run's files depend on take every branch of their code, so that no error path is tried for the first time by a full disk.

A process of its own measures, because what is imported before measuring begins does not count: `python tests/test_branches.py` shows the missing branches."""
import io
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOMS = ('12_storage', '19_record', '20_checkpoint')


def run_cells(notebook) -> None:
    "Run the cells that are not exported, with the names of the module that is."
    from project import NBS, cells
    module = import_module(f'mmgrpo.{notebook.partition("_")[2]}')
    names = {**vars(module), '__name__': notebook}                     # private names too
    for cell in cells(NBS/f'{notebook}.ipynb'):
        if cell.code and not cell.exported and 'nbdev_export(' not in cell.source:
            exec(compile(cell.source, f'{notebook}, {cell.id}', 'exec'), names)


def measured(folder) -> tuple:
    "Per cent of lines and branches that were taken, and the table of those that were not."
    from coverage import Coverage
    files = [folder/f'{room.partition("_")[2]}.py' for room in ROOMS]
    seen, table = Coverage(data_file=None, config_file=False, branch=True, include=[str(file) for file in files]), io.StringIO()
    seen.start()
    for room in ROOMS: run_cells(room)
    seen.stop()
    return seen.report(show_missing=True, file=table), table.getvalue()


def main() -> int:
    share, table = measured(Path(__file__).resolve().parent.parent/'mmgrpo')
    print(table)
    return int(share < 100)


def test_every_branch_is_taken():
    pytest.importorskip('coverage')
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=300, env=os.environ | {'OMP_NUM_THREADS': '1'})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_a_branch_that_is_not_taken_is_seen(tmp_path):
    "The measuring itself can fail: a line and a branch that nothing tries."
    coverage = pytest.importorskip('coverage')
    (tmp_path/'toy_room.py').write_text('def half(x):\n    if x:\n        return 1\n    return 2\n')
    code = f'''
import sys; sys.path.insert(0, {str(tmp_path)!r})
from coverage import Coverage
seen = Coverage(data_file=None, config_file=False, branch=True, include=[{str(tmp_path/'toy_room.py')!r}])
seen.start(); import toy_room; toy_room.half(1); seen.stop()
print(seen.report(file=sys.stderr))
'''
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=60)
    assert coverage.__version__ and 0 < float(done.stdout) < 100, done.stderr


if __name__ == '__main__': sys.exit(main())
