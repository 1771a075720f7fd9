"""The warm start as a command, in its one-minute form, and the model that ships."""
import json, os, shutil, signal, subprocess, sys, time
from pathlib import Path

import pytest

from mmgrpo.config import load_sft_config
from mmgrpo.sft import weights_digest

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / 'mmgrpo' / 'assets' / 'tiny'
SHORT = ['pictures.updates=12', 'pictures.log_every=1', 'trajectories.updates=6', 'trajectories.batch_puzzles=16',
         'trajectories.log_every=3', 'trajectories.warmup_updates=1', 'data.n_valid=16', 'data.workers=0']

def begun(folder:Path, *overrides:str) -> subprocess.Popen:
    "The real command with the shipped recipe, cut short."
    sets = [word for o in [f'run.output={folder}', *SHORT, *overrides] for word in ('--set', o)]
    command = [sys.executable, '-c', 'import sys; from mmgrpo.cli import sft_main; sys.exit(sft_main())']
    return subprocess.Popen(command + ['--config', str(ROOT / 'configs' / 'quickstart_sft.yaml'), *sets], cwd=folder, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)})

def sft(folder:Path, *overrides:str) -> subprocess.CompletedProcess:
    "Run it to its end."
    process = begun(folder, *overrides)
    out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)

def lines_of(run:Path) -> list[dict]:
    "Its log without clocks."
    lines = map(json.loads, (run / 'train_log.jsonl').read_text().splitlines())
    return [{key: value for key, value in line.items() if not key.startswith('timing/')} for line in lines]

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
    lines = lines_of(made)
    first, last = lines[0], lines[11]
    assert [(l['stage'], l['update']) for l in lines[11:]] == [('pictures', 12), ('trajectories', 3), ('trajectories', 6)]
    assert last['psnr_db'] > first['psnr_db'] + 0.1
    assert lines[13]['text'] < lines[12]['text'] - 0.3 and lines[13]['visual'] < lines[12]['visual']

def test_the_same_recipe_makes_the_same_bytes(made, tmp_path):
    assert sft(tmp_path).returncode == 0
    assert weights_digest(tmp_path / 'quickstart-sft' / 'model') == weights_digest(made / 'model')

def test_a_killed_warm_start_goes_on_to_the_same_bytes(made, tmp_path):
    "In the first stage, and in the second; a second process meanwhile is refused."
    run = tmp_path / 'quickstart-sft'
    for n in (4, 13):                                       # lines of the log: one an update, then one every three
        process = begun(tmp_path)
        while not (run / 'train_log.jsonl').exists() or len((run / 'train_log.jsonl').read_bytes().splitlines()) < n: time.sleep(.01)
        if n == 4:
            second = sft(tmp_path)
            assert second.returncode == 2 and 'is being written by another process' in second.stderr
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not (run / 'model').exists()
    last = sft(tmp_path)
    assert last.returncode == 0 and 'SFT_RESUME update=1' in last.stdout, last.stderr
    assert weights_digest(run / 'model') == weights_digest(made / 'model')
    assert lines_of(run) == lines_of(made)

def test_a_finished_run_is_left_alone(made):
    before = {p: p.stat().st_mtime_ns for p in made.rglob('*')}
    again = sft(made.parent)
    assert again.returncode == 0 and again.stdout == f'SFT_ALREADY_COMPLETE {made / "model"}\n'
    other = sft(made.parent, 'run.seed=1')
    assert other.returncode == 2 and 'choose another run.name' in other.stderr and len(other.stderr.strip().splitlines()) == 1
    assert before == {p: p.stat().st_mtime_ns for p in made.rglob('*')}

def test_a_damaged_checkpoint_is_refused_by_name(made, tmp_path):
    run = Path(shutil.copytree(made, tmp_path / 'quickstart-sft'))
    shutil.rmtree(run / 'model')
    path = sorted((run / 'checkpoints').iterdir())[-1] / 'weights.safetensors'
    data = path.read_bytes()
    path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    refused = sft(tmp_path)
    assert refused.returncode == 2 and str(path) in refused.stderr and len(refused.stderr.strip().splitlines()) == 1

def test_the_shipped_model_is_what_its_recipe_says():
    recipe = json.loads((SHIPPED / 'recipe.json').read_text())
    assert recipe['weights_sha256'] == weights_digest(SHIPPED)
    assert recipe['config_sha256'] == load_sft_config(ROOT / 'configs' / 'quickstart_sft.yaml').fingerprint()
    assert sum(p.stat().st_size for p in SHIPPED.iterdir()) < 12e6
    lines = [json.loads(line) for line in (SHIPPED / 'sft_log.jsonl').read_text().splitlines()]
    assert lines[-1]['greedy_accuracy'] == recipe['held_out']['greedy_accuracy']
