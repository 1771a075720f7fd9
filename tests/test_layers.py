"""A room imports only from rooms with lower numbers, and the rooms that must start at once import nothing heavy."""
import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest
from project import LIB, NBS, ROOT, cells, modules, named, notebooks, rooms

LIGHT = ['settings', 'config', 'viz', 'verifier', 'cli']    # `mmgrpo_train --help` and a plot do not wait for torch
HEAVY = {'torch', 'transformers', 'peft', 'accelerate', 'matplotlib', 'tensorboard'}
NOT_AT_RUN_TIME = {'nbdev', 'fastcore', 'execnb', 'IPython', 'pytest', 'hypothesis'}    # the dev extra


def imported(node:ast.AST) -> list[str]:
    "Dotted names that an import statement brings in; relative ones as `mmgrpo.X`."
    if isinstance(node, ast.Import): return [a.name for a in node.names]
    if not isinstance(node, ast.ImportFrom): return []
    base = '.'.join(filter(None, ['mmgrpo' if node.level else None, node.module]))
    return [f'{base}.{a.name}' for a in node.names] if base == 'mmgrpo' else [base]


def imports(tree:ast.AST) -> set[str]:
    "Everything imported anywhere in `tree`, inside functions too."
    return {name for node in ast.walk(tree) for name in imported(node)}


def at_import(body:list[ast.stmt]) -> Iterator[str]:
    "What is imported when the module is: not inside functions, not under `if TYPE_CHECKING`."
    for node in body:
        yield from imported(node)
        if isinstance(node, ast.If) and 'TYPE_CHECKING' in ast.unparse(node.test): yield from at_import(node.orelse)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for field in ('body', 'orelse', 'finalbody'): yield from at_import(getattr(node, field, []))
            for handler in getattr(node, 'handlers', []): yield from at_import(handler.body)


def used_rooms(names:set[str]) -> set[str]:
    return {n.split('.')[1] for n in names if n.startswith('mmgrpo.')} - {'__version__'}


def out_of_order(room:str, names:set[str], own:bool=False) -> list[str]:
    "The rooms among `names` that `room` may not import; its own module only where `own` allows it."
    place = rooms()
    return sorted(r for r in used_rooms(names) if place.get(r, 10**6) >= place[room] + own)


def test_the_checker_tells_late_own_and_unknown_rooms(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], 'rooms', lambda: {'core': 0, 'loss': 6, 'engine': 13})
    seen = imports(ast.parse('from mmgrpo.core import A\nfrom .engine import B\n'
                             'def f():\n  from mmgrpo import loss, typo'))
    assert seen == {'mmgrpo.core', 'mmgrpo.engine', 'mmgrpo.loss', 'mmgrpo.typo'}
    assert out_of_order('loss', seen) == ['engine', 'loss', 'typo']
    assert out_of_order('loss', seen, own=True) == ['engine', 'typo']


def test_the_checker_tells_import_time_from_call_time():
    tree = ast.parse('try:\n  import a\nexcept ImportError:\n  import b\n'
                     'if TYPE_CHECKING:\n  import c\nelse:\n  import d\ndef f():\n  import e\nclass C:\n  import g')
    assert set(at_import(tree.body)) == {'a', 'b', 'd', 'g'}


def test_room_numbers_are_unique():
    assert len(set(rooms().values())) == len(rooms())


@pytest.mark.parametrize('path', **named(modules()))
def test_a_module_imports_only_lower_rooms(path):
    assert out_of_order(path.stem, imports(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize('path', **named(p for p in notebooks() if p.parent == NBS and p.stem[0].isdigit()))
def test_the_cells_of_a_room_import_only_lower_rooms(path):
    room = path.stem.partition('_')[2]
    late = {c.id: out_of_order(room, imports(c.tree), own=not c.exported) for c in cells(path) if c.code}
    assert {i: rooms for i, rooms in late.items() if rooms} == {}


@pytest.mark.parametrize('path', **named(modules()))
def test_no_module_needs_the_dev_extra(path):
    assert {n.split('.')[0] for n in imports(ast.parse(path.read_text()))} & NOT_AT_RUN_TIME == set()


@pytest.mark.parametrize('room', LIGHT)
def test_a_light_room_imports_nothing_heavy(room):
    if not (LIB / f'{room}.py').exists(): pytest.skip(f'there is no room `{room}`')
    code = f'import sys, mmgrpo.{room}; print(*sorted({HEAVY!r} & sys.modules.keys()))'
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr or blame(room)


def blame(room:str) -> str:
    "Which room of those that `room` imports names a heavy package."
    todo, seen = [room], {}
    while todo:
        name = todo.pop()
        if name in seen or not (LIB / f'{name}.py').exists(): continue
        found = set(at_import(ast.parse((LIB / f'{name}.py').read_text()).body))
        seen[name] = {n.split('.')[0] for n in found} & HEAVY
        todo += used_rooms(found)
    return f'heavy imports at import time: { {k: v for k, v in seen.items() if v} }'
