"""The warm start as a command, in its one-minute form, and the model that ships."""
import json, os, subprocess, sys
from pathlib import Path

import pytest

from mmgrpo.config import load_sft_config
from mmgrpo.sft import weights_digest

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / 'mmgrpo' / 'assets' / 'tiny'
SHORT = ['pictures.updates=12', 'pictures.log_every=1', 'trajectories.updates=6', 'trajectories.batch_puzzles=16',
         'trajectories.log_every=3', 'trajectories.warmup_updates=1', 'data.n_valid=16', 'data.workers=0']

def sft(folder:Path, *overrides:str) -> subprocess.CompletedProcess:
    "Run the real command with the shipped recipe, cut short."
    sets = [word for o in [f'run.output={folder}', *SHORT, *overrides] for word in ('--set', o)]
    command = [sys.executable, '-c', 'import sys; from mmgrpo.cli import sft_main; sys.exit(sft_main())']
    return subprocess.run(command + ['--config', str(ROOT / 'configs' / 'quickstart_sft.yaml'), *sets], cwd=folder,
                          capture_output=True, text=True, env=os.environ | {'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)})

@pytest.fixture(scope='module')
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('sft')
    done = sft(folder)
    assert done.returncode == 0, done.stderr
    return folder / 'quickstart-sft'

def test_the_recipe_makes_a_model_folder(made):
    assert {p.name for p in (made / 'model').iterdir()} >= {
        'config.json', 'model.safetensors', 'tokenizer.json', 'pixel_decoder.safetensors', 'pixel_decoder.json', 'recipe.json'}
    recipe = json.loads((made / 'model' / 'recipe.json').read_text())
    assert recipe['weights_sha256'] == weights_digest(made / 'model')
    assert set(recipe['held_out']) >= {'psnr_db', 'greedy_accuracy', 'sampled_accuracy', 'greedy_valid'}

def test_both_stages_learn(made):
    lines = [json.loads(line) for line in (made / 'sft_log.jsonl').read_text().splitlines()]
    first, last = lines[0], lines[11]
    assert [(l['stage'], l['update']) for l in lines[11:]] == [('pictures', 12), ('trajectories', 3), ('trajectories', 6)]
    assert last['psnr_db'] > first['psnr_db'] + 0.1
    assert lines[13]['text'] < lines[12]['text'] - 0.3 and lines[13]['visual'] < lines[12]['visual']

def test_the_same_recipe_makes_the_same_bytes(made, tmp_path):
    assert sft(tmp_path).returncode == 0
    assert weights_digest(tmp_path / 'quickstart-sft' / 'model') == weights_digest(made / 'model')

def test_a_finished_folder_is_not_written_over(made):
    before = {p: p.stat().st_mtime_ns for p in made.rglob('*')}
    again = sft(made.parent)
    assert again.returncode == 2 and 'exists already' in again.stderr and len(again.stderr.strip().splitlines()) == 1
    assert before == {p: p.stat().st_mtime_ns for p in made.rglob('*')}

def test_the_shipped_model_is_what_its_recipe_says():
    recipe = json.loads((SHIPPED / 'recipe.json').read_text())
    assert recipe['weights_sha256'] == weights_digest(SHIPPED)
    assert recipe['config_sha256'] == load_sft_config(ROOT / 'configs' / 'quickstart_sft.yaml').fingerprint()
    assert sum(p.stat().st_size for p in SHIPPED.iterdir()) < 12e6
    lines = [json.loads(line) for line in (SHIPPED / 'sft_log.jsonl').read_text().splitlines()]
    assert lines[-1]['greedy_accuracy'] == recipe['held_out']['greedy_accuracy']
