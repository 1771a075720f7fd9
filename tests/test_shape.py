"""Ceilings that keep the rooms readable, counted from the syntax trees of notebooks and modules."""
import ast
import re
from collections.abc import Iterator
from statistics import median

import pytest
from project import cell, cells, modules, named, notebooks

LINES, MEDIAN, PARAMETERS, NESTING = 40, 10, 6, 3    # of a function
CELLS, BYTES = 60, 150_000                           # of a notebook
COLUMNS = 120                                        # of an exported line
BLOCKS = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
FORBIDDEN_IMPORTS = {'pickle', 'cPickle', 'dill', 'cloudpickle', 'marshal', 'shelve', 'joblib'}
FORBIDDEN_CALLS = {'eval', 'exec', 'torch.load', 'torch.save'}
SEEDS = {'torch.manual_seed', 'torch.random.manual_seed', 'np.random.seed', 'random.seed'}


def functions(tree:ast.AST) -> Iterator[ast.FunctionDef]:
    return (n for n in ast.walk(tree) if isinstance(n, FUNCTIONS))


def length(node:ast.AST) -> int: return node.end_lineno - node.lineno + 1


def parameters(f:ast.FunctionDef) -> int:
    "How many a caller may pass; `self` and `cls` are not passed by hand."
    args = [a.arg for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)]
    return len(args) - (args[:1] in (['self'], ['cls']))


def nesting(node:ast.AST) -> int:
    "Levels of blocks inside a function; `elif` is the level of its `if`, and an inner function counts for itself."
    def deepest(body): return max((level(n) for n in body), default=0)
    def level(n):
        if isinstance(n, (*FUNCTIONS, ast.ClassDef)): return 0
        if not isinstance(n, (*BLOCKS, ast.ExceptHandler)): return 0
        chained = isinstance(n, ast.If) and len(n.orelse) == 1 and isinstance(n.orelse[0], ast.If)
        below = [*n.body, *([] if chained else getattr(n, 'orelse', [])), *getattr(n, 'finalbody', [])]
        inner = 1 + max(deepest(below), *(deepest(h.body) for h in getattr(n, 'handlers', [])), 0)
        return max(inner, level(n.orelse[0])) if chained else inner
    return deepest(node.body)


def offence(n:ast.AST) -> str | None:
    "What a node says that no room may: code from data, `*` imports, patches, globals, swallowed exceptions."
    if isinstance(n, (ast.Import, ast.ImportFrom)):
        names = [a.name for a in n.names]
        if '*' in names: return 'import *'
        roots = {name.split('.')[0] for name in [*names, getattr(n, 'module', None) or '']}
        if roots & FORBIDDEN_IMPORTS: return f'import of {", ".join(sorted(roots & FORBIDDEN_IMPORTS))}'
    if isinstance(n, ast.Call) and (name := ast.unparse(n.func)) in FORBIDDEN_CALLS: return f'{name}(...)'
    if isinstance(n, ast.Global): return 'global'
    if isinstance(n, ast.ExceptHandler) and n.type is None: return 'bare except'
    if isinstance(n, ast.ExceptHandler) and all(isinstance(s, ast.Pass) for s in n.body): return 'except: pass'
    patched = any(ast.unparse(d).startswith('patch') for d in getattr(n, 'decorator_list', []))
    return '@patch' if patched else None


def offences(tree:ast.AST) -> list[str]:
    return [f'line {n.lineno}: {found}' for n in ast.walk(tree) if (found := offence(n))]


def reseeds(tree:ast.AST) -> list[str]:
    "Calls that seed a generator of the whole process and do not put it back: those outside `with ...fork_rng(...)`."
    blocks = (n for n in ast.walk(tree) if isinstance(n, ast.With))
    forks = [n for n in blocks if any('fork_rng' in ast.unparse(i) for i in n.items)]
    kept = {id(n) for fork in forks for n in ast.walk(fork)}
    return [f'line {n.lineno}: {ast.unparse(n.func)}(...)' for n in ast.walk(tree)
            if isinstance(n, ast.Call) and ast.unparse(n.func) in SEEDS and id(n) not in kept]


def asserts(c) -> bool:
    "Whether a cell that is not exported checks something."
    calls = (ast.unparse(n.func).rpartition('.')[2] for n in ast.walk(c.tree) if isinstance(n, ast.Call))
    return (any(isinstance(n, ast.Assert) for n in ast.walk(c.tree))
            or any(n.startswith(('test_', 'expect_fail')) for n in calls))


def defines(c) -> bool:
    "Whether an exported cell has more than imports in it."
    return c.exported and any(not isinstance(n, (ast.Import, ast.ImportFrom)) for n in c.tree.body)


# --- the counting itself

def test_nesting_counts_levels_not_branches():
    def depth(text): return nesting(ast.parse('def f():\n' + text).body[0])
    assert depth('  return 1') == 0
    assert depth('  if a: pass\n  elif b: pass\n  elif c: pass\n  else: pass') == 1
    assert depth('  for a in b:\n    with c:\n      if d: pass') == 3
    assert depth('  if a: pass\n  else:\n    for b in c:\n      pass') == 2
    assert depth('  try: pass\n  except E:\n    if a:\n      while b: pass') == 3


def test_parameters_leave_out_self():
    def count(text): return parameters(next(functions(ast.parse(text))))
    assert count('def f(a, b, *, c, d=1): pass') == 4
    assert count('class C:\n  def f(self, a): pass') == 1


@pytest.mark.parametrize('text', [
    'eval("1")', 'exec(s)', 'torch.load(f)', 'import pickle', 'from pickle import loads', 'import pickle as p',
    'from os import *', 'def f():\n  global a', 'try: a\nexcept: b', 'try: a\nexcept E: pass', '@patch\ndef f(): pass'])
def test_an_offence_is_seen(text): assert len(offences(ast.parse(text))) == 1


def test_what_only_looks_like_an_offence_is_not():
    assert offences(ast.parse('model.eval(); load_file(f); re.compile(p); import pickletools')) == []


def test_a_seed_is_let_through_only_where_it_is_put_back():
    text = 'torch.manual_seed(0)\nwith torch.random.fork_rng(devices=[]):\n  torch.manual_seed(1)'
    assert reseeds(ast.parse(text)) == ['line 1: torch.manual_seed(...)']


@pytest.mark.parametrize('source, expected', [
    ('test_eq(1, 1)', True), ('assert a', True), ('#| hide\nfct.test_fail(f)', True),
    ('a = testing', False), ('from fastcore.test import test_eq', False)])
def test_asserting_cells_are_told(source, expected):
    assert asserts(cell(dict(id='a', cell_type='code', source=source))) == expected


# --- modules

@pytest.mark.parametrize('path', **named(modules()))
def test_functions_keep_the_ceilings(path):
    over = {f.name: (length(f), parameters(f), nesting(f)) for f in functions(ast.parse(path.read_text()))
            if length(f) > LINES or parameters(f) > PARAMETERS or nesting(f) > NESTING}
    assert over == {}, f'(lines, parameters, nesting) over {(LINES, PARAMETERS, NESTING)}'


def test_most_functions_are_short():
    lengths = [length(f) for p in modules() for f in functions(ast.parse(p.read_text()))]
    assert not lengths or median(lengths) <= MEDIAN


@pytest.mark.parametrize('path', **named(modules()))
def test_modules_say_nothing_forbidden(path):
    tree = ast.parse(path.read_text())
    assert offences(tree) + reseeds(tree) == []


# --- notebooks

@pytest.mark.parametrize('path', **named(notebooks()))
def test_a_notebook_is_of_a_size_to_read(path):
    found = cells(path)
    assert len(found) <= CELLS, 'cells'
    assert sum(c.size for c in found) <= BYTES, 'bytes of source and outputs'


@pytest.mark.parametrize('path', **named(notebooks()))
def test_an_exported_cell_fits_on_a_screen(path):
    sizes = {c.id: (len(lines) + len(c.marks), max(map(len, lines)))    # directives are lines too
             for c in cells(path) if c.exported and (lines := c.source.splitlines())}
    over = {i: (n, width) for i, (n, width) in sizes.items() if n > LINES or width > COLUMNS}
    assert over == {}, f'(lines, columns) over {(LINES, COLUMNS)}'


@pytest.mark.parametrize('path', **named(notebooks()))
def test_a_notebook_opens_with_its_name_and_promise(path):
    "nbdev makes the module's docstring of these two lines, and of nothing else."
    first = cells(path)[0]
    assert first.kind == 'markdown'
    assert re.match(r'# \S.*\n\n> \S.*(\n|$)', first.source), 'the first cell is `# name`, an empty line, `> a promise`'


@pytest.mark.parametrize('path', **named(notebooks()))
def test_cells_have_names_to_read(path):
    ids = [c.id for c in cells(path)]
    assert len(set(ids)) == len(ids)
    assert [i for i in ids if not re.fullmatch(r'[a-z0-9]+(-[a-z0-9]+)*', i) or re.fullmatch(r'[0-9a-f]{8}', i)] == []


@pytest.mark.parametrize('path', **named(notebooks()))
def test_a_room_exports_into_the_module_of_its_name_and_ends_with_the_export(path):
    found = cells(path)
    if not any(c.exported for c in found): pytest.skip('exports nothing')
    room = re.fullmatch(r'\d+_(\w+)', path.stem)
    assert room, 'only a numbered room exports'
    assert f'#| default_exp {room[1]}' in path.read_text()
    assert 'hide' in found[-1].marks and 'nbdev_export()' in found[-1].source


@pytest.mark.parametrize('path', **named(notebooks()))
def test_what_is_exported_is_tested_beside_it(path):
    found = cells(path)
    exported, tested = sum(map(defines, found)), sum(c.code and not c.exported and asserts(c) for c in found)
    assert 2 * tested >= exported, f'{tested} cells assert something, for {exported} that export'


@pytest.mark.parametrize('path', **named(notebooks()))
def test_no_cell_mixes_imports_with_other_code(path):
    "nbdev runs a cell with an import when it makes documentation, with whatever else is in it."
    def mixed(c):
        kinds = {isinstance(n, (ast.Import, ast.ImportFrom)) for n in c.tree.body}
        return c.code and len(kinds) == 2 and 'nbdev_export(' not in c.source
    assert [c.id for c in cells(path) if c.code and mixed(c)] == []


@pytest.mark.parametrize('path', **named(notebooks()))
def test_cells_say_nothing_forbidden(path):
    "A test may use a global or swallow the error that it provoked; it may not run data as code."
    excused = ('global', 'pass', 'except')
    grave = {c.id: [o for o in offences(c.tree) if not o.endswith(excused)] for c in cells(path) if c.code}
    assert {i: o for i, o in grave.items() if o} == {}
