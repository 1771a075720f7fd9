"""The warm start as a command, in its one-minute form, and the model that ships."""
import json, os, random, shutil, signal, subprocess, sys, time
from pathlib import Path

import psutil
import pytest
from faults import ends_soon
from ledger import size
from safetensors import SafetensorError

import mmgrpo.sft as sft_room
from mmgrpo.config import load_sft_config
from mmgrpo.record import RunDirectory, RunLock
from mmgrpo.settings import InputError
from mmgrpo.sft import is_made, run_sft, weights_digest
from mmgrpo.storage import StorageError

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / 'mmgrpo' / 'assets' / 'tiny'
SHORT = ['pictures.updates=12', 'pictures.log_every=1', 'trajectories.updates=6', 'trajectories.batch_puzzles=16',
         'trajectories.log_every=3', 'trajectories.warmup_updates=1', 'data.n_valid=16', 'data.workers=0']

def begun(folder:Path, *overrides:str, patch:str='', **how) -> subprocess.Popen:
    "The real command with the shipped recipe, cut short; `patch` is code that runs before it."
    sets = [word for o in [f'run.output={folder}', *SHORT, *overrides] for word in ('--set', o)]
    command = [sys.executable, '-c', f'{patch}\nimport sys; from mmgrpo.cli import sft_main; sys.exit(sft_main())']
    return subprocess.Popen(command + ['--config', str(ROOT / 'configs' / 'quickstart_sft.yaml'), *sets], cwd=folder, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)}, **how)

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

def killed(process:subprocess.Popen, log:Path, n:int, number:int=signal.SIGKILL) -> tuple[str, str]:
    "End it once its log has so many lines; what it said."
    while not log.exists() or len(log.read_bytes().splitlines()) < n: time.sleep(.01)
    process.send_signal(number)
    return process.communicate()

def test_a_killed_warm_start_goes_on_to_the_same_bytes(made, tmp_path):
    "In the first stage, at whose puzzles a worker is busy that must not outlive it, and in the second; a second process meanwhile is refused."
    run, log = tmp_path / 'quickstart-sft', tmp_path / 'quickstart-sft' / 'train_log.jsonl'
    process = begun(tmp_path, 'data.workers=1')
    while not log.exists(): time.sleep(.01)
    with pytest.raises(InputError, match='is being written by another process'): RunLock(run)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert workers
    killed(process, log, 4)
    assert not psutil.wait_procs(workers, timeout=10)[1], 'a worker was left behind'
    ended = killed(begun(tmp_path), log, 13, signal.SIGTERM)[1].splitlines()
    assert ended == ['mmgrpo_sft: stopped by SIGTERM; the same command goes on'] and not (run / 'model').exists()
    last = sft(tmp_path)
    assert last.returncode == 0 and 'SFT_RESUME update=1' in last.stdout, last.stderr
    assert weights_digest(run / 'model') == weights_digest(made / 'model')
    assert lines_of(run) == lines_of(made)

HELD = """
import os, signal, threading, multiprocessing.queues as queues
class At:
    n = 0
    def __init__(self, condition): self.condition = condition
    def __enter__(self):
        found, At.n = self.condition.__enter__(), At.n + 1
        if At.n == 6 and threading.current_thread() is threading.main_thread(): os.kill(os.getpid(), signal.SIGTERM)
        return found
    def __exit__(self, *error): return self.condition.__exit__(*error)
    def __getattr__(self, name): return getattr(self.condition, name)
whole = queues.Queue._reset
def reset(self, after_fork=False):
    whole(self, after_fork)
    if not after_fork: self._notempty = At(self._notempty)
queues.Queue._reset = reset
"""

def test_a_signal_while_a_worker_is_told_something_ends_it_too(tmp_path):
    "Between a lock of the worker's queue and the block that would give it back: who is interrupted there waits for it for ever."
    process = begun(tmp_path, 'data.workers=1', patch=HELD)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (143, 'mmgrpo_sft: stopped by SIGTERM; the same command goes on\n')

def test_a_signal_to_the_whole_group_is_told_in_one_line(tmp_path):
    "As `timeout` and a closed terminal send it: the worker hears it too, and leaves the answer to its parent."
    log = tmp_path / 'quickstart-sft' / 'train_log.jsonl'
    process = begun(tmp_path, 'data.workers=2', start_new_session=True)
    while not log.exists() or len(log.read_bytes().splitlines()) < 2: time.sleep(.01)
    workers = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert workers and (process.returncode, err) == (143, 'mmgrpo_sft: stopped by SIGTERM; the same command goes on\n')
    assert not psutil.wait_procs(workers, timeout=10)[1], 'a worker was left behind'

def test_a_finished_model_proves_each_of_its_files(made, tmp_path):
    "A tokenizer that is gone or changed is no finished model; what somebody put beside it is none of our business."
    cfg = load_sft_config(ROOT / 'configs' / 'quickstart_sft.yaml', [f'run.output={made.parent}', *SHORT])
    copy = Path(shutil.copytree(made, tmp_path / 'run'))
    (copy / 'model' / 'notes').mkdir()
    assert is_made(copy / 'model', cfg)
    for name in ('config.json', 'tokenizer.json', 'pixel_decoder.json', 'model.safetensors'):
        path, whole = copy / 'model' / name, (made / 'model' / name).read_bytes()
        for harm in (path.unlink, lambda: path.write_bytes(whole.replace(b':', b': ', 1))):
            harm()
            with pytest.raises(ValueError, match='model is damaged, or not the model of this config'): is_made(copy / 'model', cfg)
            path.write_bytes(whole)
    assert is_made(copy / 'model', cfg)

def test_a_finished_run_is_left_alone(made):
    before = {p: p.stat().st_mtime_ns for p in made.rglob('*')}
    again = sft(made.parent)
    assert again.returncode == 0 and again.stdout == f'SFT_ALREADY_COMPLETE {made / "model"}\n'
    other = sft(made.parent, 'run.seed=1')
    assert other.returncode == 2 and 'choose another run.name' in other.stderr and len(other.stderr.strip().splitlines()) == 1
    assert before == {p: p.stat().st_mtime_ns for p in made.rglob('*')}

TINY = ['model.hidden_size=64', 'model.n_layers=1', 'model.n_heads=2', 'model.n_kv_heads=1', 'model.intermediate_size=96', 'model.tower_size=32',
        'model.tower_layers=2', 'model.bsq_dim=8', 'model.decoder_size=24', 'model.decoder_layers=1', 'pictures.updates=2', 'pictures.batch_puzzles=2',
        'trajectories.updates=2', 'trajectories.batch_puzzles=2', 'trajectories.log_every=1', 'pictures.log_every=1', 'data.n_valid=2', 'data.workers=0']

@pytest.fixture
def short(tmp_path, monkeypatch):
    "A warm start of seconds in this process: its config, and a run that nobody disturbed."
    monkeypatch.setattr(sft_room, 'say', lambda line: None)
    def config(name): return load_sft_config(ROOT / 'configs' / 'quickstart_sft.yaml', [f'run.output={tmp_path}', f'run.name={name}', *TINY])
    return config, run_sft(config('whole'))

@pytest.fixture(scope='module')
def straight(tmp_path_factory) -> Path:
    "A warm start of seconds as a command, which nobody disturbed."
    folder = tmp_path_factory.mktemp('straight')
    done = sft(folder, *TINY)
    assert done.returncode == 0, done.stderr
    return folder / 'quickstart-sft'

@pytest.mark.goal('R9')
@pytest.mark.parametrize('number', range(size(2, 40)))
def test_a_warm_start_is_sent_a_signal(ledger, straight, tmp_path, number):
    "From its first instant on, with a worker; half of the signals come when it trains. It ends soon and by itself, and goes on to the same bytes."
    chance, run, sent = random.Random(number), tmp_path / 'quickstart-sft', (signal.SIGTERM, signal.SIGINT)[number % 2]
    sizes, log = [*TINY, 'data.workers=1'], run / 'train_log.jsonl'
    process = begun(tmp_path, *sizes)
    while number % 4 > 1 and process.poll() is None and not log.exists(): time.sleep(.01)
    time.sleep(chance.uniform(0, 2 if number % 4 > 1 else 12))
    process.send_signal(sent)
    assert ends_soon(process) in (0, 128 + sent, -sent)
    process.communicate()
    done = sft(tmp_path, *sizes)
    assert done.returncode == 0, done.stderr
    ledger.processes += 2
    ledger.judge(f'{sent.name} to a warm start', run, *(dict(weights=weights_digest(made / 'model'), lines=lines_of(made)) for made in (run, straight)))

def fails_at(monkeypatch, name, call, error):
    "Let one call of a function of the room fail before it does anything."
    whole, n = getattr(sft_room, name), []
    def wrapped(*args, **kwargs):
        n.append(1)
        if len(n) == call: raise error
        return whole(*args, **kwargs)
    monkeypatch.setattr(sft_room, name, wrapped)

def test_a_warm_start_that_fails_at_any_checkpoint_goes_on(short, monkeypatch):
    "The first one is made before there is a line; at the last call it is the folder that cannot be written."
    config, whole = short
    for call in range(1, 7):
        with monkeypatch.context() as patch:
            if call < 6: fails_at(patch, 'save_checkpoint', call, StorageError('cannot write here: No space left on device'))
            else: fails_at(patch, 'safetensors_bytes', 1, SafetensorError('I/O error: File too large'))
            with pytest.raises(StorageError, match='No space left|cannot write .*model: I/O error'): run_sft(config(f'cut-{call}'))
        assert weights_digest(run_sft(config(f'cut-{call}'))) == weights_digest(whole)
        assert lines_of(whole.parent.parent / f'cut-{call}') == lines_of(whole.parent)

def test_a_damaged_checkpoint_is_passed_over(short):
    config, whole = short
    lines, digest, path = lines_of(whole.parent), weights_digest(whole), sorted((whole.parent / 'checkpoints').iterdir())[-1] / 'weights.safetensors'
    shutil.rmtree(whole)
    path.write_bytes(path.read_bytes()[:-1])
    run_sft(config('whole'))
    assert (weights_digest(whole), lines_of(whole.parent)) == (digest, lines)

def test_a_model_that_another_process_made_meanwhile_is_left_alone(short, monkeypatch):
    config, whole = short
    made, said = sft_room.is_made, [False]                  # as it was when this one looked, before it waited for the lock
    monkeypatch.setattr(sft_room, 'is_made', lambda *args: said.pop() if said else made(*args))
    monkeypatch.setattr(sft_room, 'make_model', lambda *args: pytest.fail('it was made again'))
    assert run_sft(config('whole')) == whole

def test_another_model_in_the_place_of_a_runs_own_is_refused(short):
    "At once, not after an hour."
    config, whole = short
    other = config('other')
    with RunDirectory.open(other): pass
    shutil.copytree(whole, whole.parent.parent / 'other' / 'model')
    recipe = whole.parent.parent / 'other' / 'model' / 'recipe.json'
    recipe.write_text(json.dumps(json.loads(recipe.read_text()) | dict(config_sha256='0' * 64)))
    with pytest.raises(ValueError, match='other/model is damaged, or not the model of this config'): run_sft(other)
    recipe.unlink()
    with pytest.raises(ValueError, match='other/model is damaged, or not the model of this config'): run_sft(other)

def test_the_shipped_model_is_what_its_recipe_says():
    recipe = json.loads((SHIPPED / 'recipe.json').read_text())
    assert recipe['weights_sha256'] == weights_digest(SHIPPED)
    assert recipe['config_sha256'] == load_sft_config(ROOT / 'configs' / 'quickstart_sft.yaml').fingerprint()
    assert sum(p.stat().st_size for p in SHIPPED.iterdir()) < 12e6
    lines = [json.loads(line) for line in (SHIPPED / 'sft_log.jsonl').read_text().splitlines()]
    assert lines[-1]['greedy_accuracy'] == recipe['held_out']['greedy_accuracy']
