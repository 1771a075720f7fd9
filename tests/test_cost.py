"""What safety costs, measured: checkpoints, starts, long logs, and how much of its time a run that is killed again and again puts to use."""
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest
from faults import checkpoints, outcome
from ledger import TORTURE, size

from mmgrpo.checkpoint import load_checkpoint, save_checkpoint
from mmgrpo.record import LogSeal
from mmgrpo.storage import json_bytes, read_lines

pytestmark = [pytest.mark.goal('cost'), pytest.mark.skipif(not TORTURE, reason='nightly: figures of a busy machine say little')]
ROOT = Path(__file__).parents[1]


def started(words, place) -> tuple:
    "A cold `mmgrpo_train` on the quickstart without evaluations: seconds to its first update, exit code."
    words = ['--config', str(ROOT/'configs'/'quickstart.yaml'), '--set', f'run.output={place}', '--set', 'evaluation.at_start=false',
             '--set', 'data.n_train=64', '--set', 'data.n_valid=8', *words]
    code = 'import sys; from mmgrpo.cli import train_main; sys.exit(train_main())'
    began, first = time.monotonic(), None
    with subprocess.Popen([sys.executable, '-c', code, *words], stdout=subprocess.PIPE, text=True, env=os.environ | {'PYTHONPATH': str(ROOT)}) as process:
        for line in process.stdout:
            if line.startswith('RL_PROGRESS') and first is None: first = time.monotonic() - began
    return first, process.returncode


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "A folder with the quickstart's puzzles."
    made = tmp_path_factory.mktemp('quickstart')
    assert started(['--set', 'run.name=warm', '--stop-after-updates', '1'], made)[1] == 0
    return made


def between(run) -> tuple:
    "Median seconds of an update, and from one update's end to the next one's start."
    records = read_lines(run/'train_log.jsonl')
    pauses = [after['timing/finished_at'] - after['timing/seconds'] - before['timing/finished_at'] for before, after in zip(records, records[1:])]
    return median(record['timing/seconds'] for record in records[1:]), median(pauses)


def test_the_cost_of_a_checkpoint(ledger, place):
    "One after every update of the quickstart, against none."
    n, found = str(max(4, size(1, 12))), {}
    for name, every in (('always', 1), ('never', 1000)):
        assert started(['--set', f'run.name={name}', '--set', f'checkpoint.every_updates={every}', '--stop-after-updates', n], place)[1] == 0
        found[name] = between(place/name)
    update, pause = found['always']
    share = (pause - found['never'][1]) / update
    ledger.figures |= {'seconds of a quickstart update': round(update, 3), 'one checkpoint an update costs, share of the update': round(share, 4)}
    assert share < .2, 'far from the 5 % that are wanted'


def test_the_cost_of_a_restart(ledger, place):
    "From the command to the first new update: at the beginning, and of a run that goes on."
    fresh, resumed = [], []
    for n in range(size(1, 3)):
        words = ['--set', f'run.name=start-{n}', '--stop-after-updates', '1']
        for seconds in (fresh, resumed):
            first, code = started(words, place)
            assert code == 0
            seconds.append(first)
    ratio = median(resumed) / median(fresh)
    ledger.figures |= {'seconds from the command to the first update': round(median(fresh), 2), 'the same on resume, as a multiple': round(ratio, 3)}
    assert ratio < 2, 'far from the 1.5 that are wanted'


def lengthened(run, n) -> None:
    "Make a run of a few updates look like one of `n`: its log, its curves, and the checkpoint that it goes on from."
    [*_, line], newest = read_lines(run/'train_log.jsonl'), load_checkpoint(checkpoints(run)[-1])
    lines = [line | dict(attempted=number) for number in range(1, n + 1)]
    (run/'train_log.jsonl').write_bytes(b''.join(map(json_bytes, lines)))
    seals = {key: LogSeal(lines).value() for key, value in newest.state.items() if isinstance(value, dict) and value.keys() == {'lines', 'sha256'}}
    save_checkpoint(run, newest.tensors, newest.state | dict(attempted=n, successful=n) | seals)


def test_the_length_of_the_log(ledger, trials, tmp_path):
    "Going on after ten thousand updates, against ten."
    sections, seconds = dict(trainer=dict(max_updates=20_000)), {}
    for n in (10, 10_000):
        run = tmp_path/str(n)/'run'
        trials.ended(run, sections, stop=2)
        lengthened(run, n)
        trials.ended(run, sections, stop=1)                                     # writes the curves of all lines once
        seconds[n] = median(trials.ended(run, sections, stop=1).cpu for _ in range(3))
    ledger.figures['seconds of work that 10,000 lines of log add to a start'] = round(seconds[10_000] - seconds[10], 2)


BUSY = dict(trainer=dict(max_updates=size(6, 60), prompts_per_update=72, micro_batch_rollouts=96), rollout=dict(group_size=8), data=dict(n_train=72, cache_root=None),
            evaluation=dict(at_start=False, at_end=False, every_updates=0), logging=dict(pictures_every_updates=0))


@pytest.fixture(scope='module')
def busy(trials, tmp_path_factory):
    "A run with larger updates, undisturbed: its folder, the seconds that its updates took, and all of its seconds."
    run = tmp_path_factory.mktemp('busy')/'run'
    life = trials.ended(run, BUSY)
    return run, sum(record['timing/seconds'] for record in read_lines(run/'train_log.jsonl')), life.seconds


@pytest.mark.parametrize('mean', [20, 5])
def test_goodput(ledger, trials, busy, tmp_path, mean):
    "Killed after exponentially distributed times: useful seconds of updates as a share of all seconds, and what an undisturbed run took as a share of them."
    straight, useful, whole = busy
    update, chance, wall, run, kills = useful / BUSY['trainer']['max_updates'], random.Random(mean), 0., tmp_path/'run', 0
    while True:
        life = trials.live(run, BUSY, after=chance.expovariate(1 / (mean * update)))
        wall += life.seconds
        if life.code == 0: break
        assert life.code == -signal.SIGKILL, life.err
        kills += 1
    trials.judge('SIGKILL', run, outcome(run), outcome(straight), kills)
    ledger.figures |= {f'goodput, killed every {mean} updates on average': round(useful / wall, 3), f'kills, every {mean} updates on average': kills,
                       'seconds of an update of the killed runs, where nobody kills': round(update, 2),
                       f'the seconds of an undisturbed run, as a share of those of one killed every {mean} updates': round(whole / wall, 3),
                       'goodput of a run that nobody kills': round(useful / whole, 3)}
