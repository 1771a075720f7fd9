"""The quickstart as a user runs it: the shipped model, the real command, real processes, cut short."""
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig

import pytest
from project import ROOT

CONFIG = ROOT / 'configs' / 'quickstart.yaml'
SHORT = ('trainer.max_updates=4', 'trainer.prompts_per_update=4', 'data.n_train=32', 'data.n_valid=12', 'evaluation.max_prompts=12',
         'checkpoint.every_updates=1', 'logging.pictures_every_updates=2')
ENVIRONMENT = os.environ | {'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)}


def start(folder, *words, sets=SHORT):
    "Start the trainer in a folder of its own."
    sets = [word for s in sets for word in ('--set', s)]
    return subprocess.Popen([sys.executable, '-m', 'mmgrpo.cli', '--config', str(CONFIG), *sets, *words], cwd=folder, text=True,
                            env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def train(folder, *words, **kwargs):
    "Its lines, of a run that must end well."
    process = start(folder, *words, **kwargs)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out.splitlines()


def content(folder):
    "What must be the same: the adapter's bytes, and the log without its clocks."
    run = folder / 'runs' / 'quickstart'
    log = [json.loads(line) for line in (run / 'train_log.jsonl').read_text().splitlines()]
    log = [{k: v for k, v in record.items() if not k.startswith('timing/')} for record in log]
    return (run / 'adapter' / 'adapter_model.safetensors').read_bytes(), log


@pytest.fixture(scope='module')
def straight(tmp_path_factory):
    "A run from beginning to end."
    folder = tmp_path_factory.mktemp('straight')
    return folder, train(folder)


def test_it_says_where_the_run_lies_and_how_it_went(straight):
    folder, lines = straight
    said = '\n'.join(lines[-12:])
    for words in ('run        runs/quickstart', 'accuracy   12 puzzles of split', 'sampled', 'greedy', 'blanked', 'swapped',
                  'tensorboard --logdir runs/quickstart'): assert words in said
    run = folder / 'runs' / 'quickstart'
    assert {'adapter', 'checkpoints', 'config.json', 'pictures', 'summary.json', 'tensorboard', 'train_log.jsonl'} <= {
        p.name for p in run.iterdir()}
    assert (run / 'adapter' / 'COMPLETE').is_file() and len(content(folder)[1]) == 4


def test_the_first_update_is_what_theory_says(straight):
    record = content(straight[0])[1][0]
    for kind in ('text', 'visual'):
        assert record[f'policy/{kind}/ratio_mean'] == 1 and record[f'policy/{kind}/clip_frac'] == 0
        assert record[f'policy/{kind}/ref_kl'] == 0 and record[f'policy/{kind}/gap'] < 1e-4


def test_the_same_command_twice_gives_the_same_bytes(straight, tmp_path):
    train(tmp_path)
    assert content(tmp_path) == content(straight[0])


def test_a_stop_in_the_middle_changes_nothing(straight, tmp_path):
    process = start(tmp_path, '--stop-after-updates', '2')
    for line in process.stdout:
        if line.startswith('RL_PROGRESS 1/4'): break
    process.send_signal(signal.SIGUSR1)                                          # shows the stacks, and goes on
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and 'RL_PAUSED step=2' in out and 'most recent call first' in err
    assert not (tmp_path / 'runs' / 'quickstart' / 'adapter').exists()
    train(tmp_path)
    assert content(tmp_path) == content(straight[0])


def test_kill_9_changes_nothing(straight, tmp_path):
    for wanted in ('RL_PROGRESS 1/4', 'RL_PROGRESS 3/4'):
        process = start(tmp_path)
        for line in process.stdout:
            if line.startswith(wanted): break
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    train(tmp_path)
    assert content(tmp_path) == content(straight[0])


def test_a_full_batch_fits_in_3_gb(tmp_path):
    full = ('trainer.max_updates=1', 'data.n_train=32', 'data.n_valid=64', 'evaluation.max_prompts=64')
    script = ('import resource, runpy, sys; sys.argv[0] = "mmgrpo_train"\n'
              'try: runpy.run_module("mmgrpo.cli", run_name="__main__")\n'
              'finally: print("PEAK", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)')
    sets = [word for s in full for word in ('--set', s)]
    done = subprocess.run([sys.executable, '-c', script, '--config', str(CONFIG), *sets], cwd=tmp_path, env=ENVIRONMENT, text=True,
                          capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    peak_kib = int(done.stdout.rpartition('PEAK ')[2])
    assert 2e5 < peak_kib < 3e6


# --- what is refused, and what is left alone

def refused(folder, *words, sets=SHORT):
    "The one line of a run that is refused; nothing in the folder has changed."
    before = {p: p.stat().st_mtime_ns for p in folder.rglob('*')}
    process = start(folder, *words, sets=sets)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, len(err.splitlines())) == (2, '', 1), (out, err)
    assert before == {p: p.stat().st_mtime_ns for p in folder.rglob('*')}
    return err


def test_a_finished_run_is_left_alone(straight):
    folder, _ = straight
    before = {p: p.stat().st_mtime_ns for p in folder.rglob('*')}
    assert train(folder) == ['RL_ALREADY_COMPLETE runs/quickstart']
    assert before == {p: p.stat().st_mtime_ns for p in folder.rglob('*')}


@pytest.mark.parametrize('change, words', [
    ('run.name=new model.path=nowhere', 'model.path'), ('rollout.group_size=1', 'rollout.group_size: 1'), ('optimizer.lr=2e-3', 'optimizer.lr'),
    ('run.name=new data.cache_root=nowhere', 'nowhere'), ('run.name=new data.puzzle_seed=9 data.cache_root=CACHE', 'seed 1, not 9'),
    ('run.name=new checkpoint.resume_from=runs', 'MANIFEST')])
def test_bad_input_is_one_line_and_touches_nothing(straight, change, words):
    [cache] = (straight[0] / 'runs').glob('cache-*')
    assert words in refused(straight[0], sets=(*SHORT, *change.replace('CACHE', str(cache)).split()))


def test_a_directory_that_is_not_ours_is_refused(tmp_path):
    (tmp_path / 'runs' / 'quickstart').mkdir(parents=True)
    (tmp_path / 'runs' / 'quickstart' / 'thesis.txt').write_text('mine')
    assert 'quickstart' in refused(tmp_path)


def test_a_cache_of_another_model_is_refused(straight, tmp_path):
    [cache] = (straight[0] / 'runs').glob('cache-*')
    model = tmp_path / 'model'
    shutil.copytree(ROOT / 'mmgrpo' / 'assets' / 'tiny', model)
    text = (model / 'tokenizer.json').read_text()
    (model / 'tokenizer.json').write_text(text.replace('"single_word": false', '"single_word": true', 1))
    line = refused(tmp_path, sets=(*SHORT, f'model.path={model}', f'data.cache_root={cache}'))
    assert 'made for model' in line and 'mmgrpo_prepare' in line


# --- the package, somewhere else

def test_the_wheel_trains_from_another_folder(tmp_path):
    "Its dependencies are this environment's; everything of ours must come out of the wheel."
    source, venv, work = tmp_path / 'source', tmp_path / 'venv', tmp_path / 'work'
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns('.git', '.venv', 'runs', 'build', '*.egg-info', '__pycache__'))
    work.mkdir()
    quiet = dict(check=True, capture_output=True, text=True, cwd=work)
    subprocess.run([sys.executable, '-m', 'pip', 'wheel', '-q', '--no-deps', '--no-build-isolation', '-w', tmp_path, source], **quiet)
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', venv], **quiet)
    [site] = (venv / 'lib').glob('python*/site-packages')
    subprocess.run([sys.executable, '-m', 'pip', 'install', '-q', '--no-deps', '--target', site, next(tmp_path.glob('*.whl'))], **quiet)
    (site / 'dependencies.pth').write_text(sysconfig.get_paths()['purelib'] + '\n')
    shutil.copy(CONFIG, work)
    sets = [word for s in SHORT for word in ('--set', s)]
    environment = {k: v for k, v in ENVIRONMENT.items() if k != 'PYTHONPATH'}
    done = subprocess.run([venv / 'bin' / 'python', '-P', '-m', 'mmgrpo.cli', '--config', 'quickstart.yaml', *sets], cwd=work,
                          env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and 'RL_TRAINING_COMPLETE' in done.stdout, done.stderr
    where = subprocess.run([venv / 'bin' / 'python', '-P', '-c', 'import mmgrpo; print(mmgrpo.__file__)'], env=environment, **quiet)
    assert str(site) in where.stdout
    recipes = {path.name for path in (ROOT / 'configs' / 'recipes').glob('*.yaml')}
    assert recipes and recipes == {path.name for path in (site / 'mmgrpo' / 'configs' / 'recipes').iterdir()}
