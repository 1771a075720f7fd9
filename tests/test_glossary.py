"""The glossary of metrics against a real log: every key is explained, nothing else is, and what it says of the first line is so."""
import contextlib
import io
import re
from fnmatch import fnmatch

import mmgrpo.trainer as trainer
import pytest
from mmgrpo.config import load_config
from mmgrpo.storage import read_lines
from project import ROOT

PAGE = (ROOT / 'docs' / 'glossary.md').read_text().split('\n## Reasons')[0]
ROWS = [[cell.strip() for cell in line.strip('|').split(' | ')] for line in PAGE.splitlines() if line.startswith('| `')]
SMALL = ('trainer.max_updates=1', 'trainer.prompts_per_update=2', 'rollout.group_size=4', 'data.n_train=4', 'data.n_valid=1',
         'evaluation.at_start=false', 'evaluation.at_end=false', 'logging.tensorboard=false', 'logging.pictures_every_updates=0',
         'logging.keep_artifacts=0', 'trainer.device=cpu')


@pytest.fixture(scope='module')
def first(tmp_path_factory):
    "The first line of a log in which everything is measured: several rewards, entropies, a correction."
    cfg = load_config(ROOT / 'configs' / 'recipes' / 'gdpo.yaml', [
        *SMALL, f'run.output={tmp_path_factory.mktemp("runs")}', 'text.entropy_coef=0.01', 'loss.correction=truncate'])
    with contextlib.redirect_stdout(io.StringIO()): path = trainer.train(cfg)
    return read_lines(path / 'train_log.jsonl')[0]


def keys_of(row): return re.findall('`([^`]+)`', row[0])


def test_every_key_is_explained_and_nothing_else_is(first):
    patterns = [key for row in ROWS for key in keys_of(row)]
    assert len(patterns) == len(set(patterns)) == len(ROWS)
    assert [key for key in first if not any(fnmatch(key, pattern) for pattern in patterns)] == []
    assert [pattern for pattern in patterns if not any(fnmatch(key, pattern) for key in first)] == []


def test_every_row_has_a_meaning_and_a_range():
    for key, meaning, span, *_ in ROWS: assert len(meaning.split()) > 1 and span.strip(' |'), key


def test_everything_is_measured(first): assert [key for key, value in first.items() if value is None] == []


def test_what_is_said_of_the_first_line_is_so(first):
    "Where the glossary names a value, it is the value."
    said = {key: m[1] for row in ROWS for key in keys_of(row) if (m := re.match(r'(?:exactly )?([01]|true|false)\b(?![.\d])', row[-1].strip(' |')))}
    assert len(said) > 15 and {'policy/*/ratio_mean', 'policy/*/clip_frac', 'policy/*/ref_kl', 'reward/*/error', 'nonfinite'} <= set(said)
    for pattern, value in said.items():
        for key in (key for key in first if fnmatch(key, pattern)):
            assert abs(first[key] - {'0': 0, '1': 1, 'true': True, 'false': False}[value]) <= (1e-4 if 'correction' in key else 0), key
