"""Run notebooks in place and keep their outputs, skipping the cells that `nbdev_test` skips.

`python tools/run_nbs.py [NOTEBOOK ...]`; all of them when none is named. Two runs give the same bytes. Each notebook
gets a fresh process, and one that fails is left as it was.
"""
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from execnb.nbio import read_nb, write_nb
from execnb.shell import CaptureShell
from fastcore.xtras import working_directory
from nbdev.clean import clean_nb
from nbdev.config import get_config
from nbdev.process import NBProcessor


def skipped(cell, directives:dict, flags:set[str]) -> bool:
    "Whether `nbdev_test` would not run this cell; exporting from inside a run is left out as well."
    never = directives.get('eval:', [''])[0].lower() == 'false'
    return cell.cell_type != 'code' or bool(flags & directives.keys()) or never or 'nbdev_export(' in cell.source


def run(path:Path) -> Path:
    "Run one notebook and write it back; on an error it says in which cell, and nothing is written."
    config = get_config()
    sys.path.insert(0, str(config.config_path))
    flags = set(config.tst_flags.split())
    directives = {c.id: c.directives_ or {} for c in NBProcessor(path).nb.cells}    # parsed, not run
    nb, shell = read_nb(path), CaptureShell(path, mpl_format='png')                 # 'retina' makes files twice as big
    with working_directory(path.parent):
        for cell in nb.cells:
            if cell.cell_type == 'code': cell['outputs'] = []
            if skipped(cell, directives[cell.id], flags): continue
            shell.cell(cell)
            if shell.exc: raise SystemExit(f'cell `{cell.id}`: {shell.prettytb(fname=path.name)}')
            cell['outputs'] = [o for o in cell['outputs'] if o.get('name') != 'stderr']     # bars and clocks
    clean_nb(nb)
    write_nb(nb, path)
    return path


def chosen(names:list[str]) -> list[Path]:
    "The notebooks named, or all of them in order; those whose name starts with `_` or `.` are not ours."
    nbs = get_config().nbs_path
    found = map(Path, names) if names else sorted(nbs.rglob('*.ipynb'))
    return [p.resolve() for p in found if not any(part[0] in '_.' for part in p.resolve().relative_to(nbs).parts)]


if __name__ == '__main__':
    with ProcessPoolExecutor(2, mp_context=get_context('spawn'), max_tasks_per_child=1) as pool:
        for path in pool.map(run, chosen(sys.argv[1:])): print('ran', path.name)
