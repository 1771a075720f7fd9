"""The committed modules are what the notebooks export, no more and no less; `nbdev_clean` would change no notebook."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from project import GENERATED, LIB, NBS, ROOT, notebooks


def command(name:str, cwd:Path) -> None:
    "Run one of nbdev's commands from this environment; `IN_TEST` would make an export do nothing."
    env = {k: v for k, v in os.environ.items() if k != 'IN_TEST'}
    done = subprocess.run([Path(sys.executable).with_name(name)], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope='module')
def fresh(tmp_path_factory) -> Path:
    "A copy of the project without generated modules, cleaned and exported there."
    root = tmp_path_factory.mktemp('project')
    shutil.copy(ROOT / 'settings.ini', root)
    shutil.copytree(NBS, root / 'nbs')
    (root / 'mmgrpo').mkdir()
    shutil.copy(LIB / '__init__.py', root / 'mmgrpo')
    command('nbdev_clean', root)
    command('nbdev_export', root)
    return root


def sources(lib:Path) -> dict[str, str]:
    return {p.relative_to(lib).as_posix(): p.read_text() for p in lib.rglob('*.py')}


def test_a_fresh_export_gives_the_committed_modules(fresh):
    "Also `_modidx.py`, the index of names that the export adds: `tools/docs.py` takes its links from there."
    made, kept = sources(fresh / 'mmgrpo'), sources(LIB)
    assert '_modidx.py' in made
    assert sorted(made.keys() - kept.keys()) == [], 'exported, but missing here; run `make export`'
    assert sorted(kept.keys() - made.keys()) == [], 'modules that no notebook exports'
    assert [n for n in kept if kept[n] != made[n]] == [], 'run `make export`'


def test_every_module_but_the_package_itself_is_marked_as_generated():
    by_hand = {name for name, text in sources(LIB).items() if GENERATED not in text}
    assert by_hand <= {'__init__.py', '_modidx.py'}


def test_notebooks_are_clean(fresh):
    dirty = [p.name for p in notebooks() if p.read_bytes() != (fresh / p.relative_to(ROOT)).read_bytes()]
    assert dirty == [], 'run `nbdev_clean`'


def test_the_package_and_settings_give_one_version():
    settings = (ROOT / 'settings.ini').read_text()
    version = next(line.split('=')[1].strip() for line in settings.splitlines() if line.startswith('version'))
    assert f'__version__ = "{version}"' in (LIB / '__init__.py').read_text()
