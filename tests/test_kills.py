"""Runs that are killed or interrupted, and two that want one directory: each ends like a run that was left alone."""
import random
import shutil
import signal

import pytest
from faults import curves, follows, goes_on, keeps, outcome
from ledger import TORTURE, size


# --- kills and signals

@pytest.mark.goal('R1')
@pytest.mark.parametrize('number', range(size(5, 5000)))
def test_kill_9_at_random(trials, long, tmp_path, number):
    "Twelve updates, killed up to five times: at an instant, or right before or after a call of the disk."
    chance, run, kills, left = random.Random(number), tmp_path/'run', 0, 1.
    for _ in range(chance.randint(1, 5)):
        call = dict(at=chance.randint(1, 1 + round(left * len(long.life.trace))), kind=chance.choice(['kill before', 'kill after']))
        at = dict(after=chance.uniform(0, left * long.life.cpu), cpu=True) if chance.random() < .7 else dict(call=call)
        life = trials.live(run, long.sections, **at)
        follows(life, long)
        assert life.code in (0, -signal.SIGKILL), life.err
        if life.code == 0: break
        kills, left = kills + 1, 1 - (life.saved or life.start or 0) / 12
        keeps(life, run)
    goes_on(trials, long, run, 'SIGKILL', kills)


@pytest.mark.goal('R1')
@pytest.mark.parametrize('number', range(size(1, 200)))
def test_a_cold_process_is_killed(trials, long, tmp_path, number):
    "As from a shell: a new interpreter, killed from its start on; then one that goes on."
    chance, run = random.Random(number), tmp_path/'run'
    code = trials.cold(run, long.sections, chance.uniform(0, long.life.seconds), started=number % 5 < 4)
    assert code in (0, -signal.SIGKILL)
    assert trials.cold(run, long.sections) == 0
    trials.judge('SIGKILL of a cold process', run, outcome(run), long.found, code == -signal.SIGKILL)
    assert curves(run) == long.curves


@pytest.mark.goal('R9')
@pytest.mark.parametrize('number', range(size(2, 60)))
def test_a_cold_process_is_sent_a_signal(trials, long, tmp_path, number):
    "From the first instant of its interpreter on, also while it loads libraries and a model: it ends soon, and the run goes on like any other."
    chance, run, sent, started = random.Random(number), tmp_path/'run', (signal.SIGTERM, signal.SIGINT)[number % 2], number % 4 > 1
    code = trials.cold(run, long.sections, chance.uniform(0, long.life.seconds if started else 12), started, sent)
    assert code in (0, 128 + sent, -sent), code
    assert trials.cold(run, long.sections) == 0
    trials.judge(f'{sent.name} to a cold process', run, outcome(run), long.found, code != 0)
    assert curves(run) == long.curves


@pytest.mark.goal('R1')
@pytest.mark.skipif(not TORTURE, reason='nightly')
def test_kill_9_before_each_change_of_a_file(trials, straight, tmp_path):
    "Seen by the interpreter's audit hook, so also where the seam is passed by."
    for change in range(1, straight.life.changes + 1):
        run = tmp_path/str(change)/'run'
        assert trials.live(run, change=change).code == -signal.SIGKILL
        goes_on(trials, straight, run, 'SIGKILL')
        shutil.rmtree(run)


ENDS = {signal.SIGTERM: (143, -signal.SIGTERM), signal.SIGINT: (130, -signal.SIGINT), signal.SIGUSR1: (-signal.SIGUSR1,)}     # or by itself: 0


@pytest.mark.goal('R9')
@pytest.mark.parametrize('number', range(size(3, 300)))
def test_a_signal_at_random(trials, long, tmp_path, number):
    "A third of them twice: the run ends soon, by itself or by the signal, and goes on like any other; SIGUSR1 does it no harm."
    chance, run, sent = random.Random(number), tmp_path/'run', list(ENDS)[number % 3]
    first = chance.uniform(0, long.life.cpu)
    signals = [(first, sent)] + [(first + chance.uniform(0, .3), sent)] * (number // 3 % 3 == 2)
    life = trials.live(run, long.sections, signals=signals, cpu=True)
    follows(life, long)
    assert life.code in (0, *ENDS[sent]), life.err
    if sent != signal.SIGUSR1: assert life.lasted < 30, life.lasted
    if (run/'checkpoints').exists(): keeps(life, run)
    goes_on(trials, long, run, sent.name, life.sent)


# --- two writers

@pytest.mark.goal('R5')
@pytest.mark.parametrize('number', range(size(4, 1000)))
def test_several_processes_want_one_run(trials, brief, tmp_path, number):
    "Released together: one goes on to the end, the others leave within five seconds and without a byte written."
    chance, run = random.Random(number), tmp_path/'run'
    if number % 2: trials.ended(run, brief.sections, stop=1)
    lives = trials.together([trials.job(run, brief.sections, begin=.05) for _ in range(chance.randint(2, 4))])
    winners, losers = ([life for life in lives if won(life)] for won in (lambda life: life.code == 0, lambda life: life.code))
    assert len(winners) == 1, [life.err for life in lives]
    for life in losers:
        assert (life.code, life.written, life.draws) == (2, 0, []) and 'another process' in life.err, life.err
        assert life.seconds < 5
    goes_on(trials, brief, run, 'second writer', len(losers))


@pytest.mark.goal('R5')
@pytest.mark.parametrize('number', range(size(2, 100)))
def test_the_lock_of_a_killed_process_is_free(trials, brief, tmp_path, number):
    "A process that starts a second after another was killed gets the run: the kernel has freed the lock."
    run, at = tmp_path/'run', random.Random(number).uniform(.1, brief.life.seconds)
    killed, heir = trials.together([trials.job(run, brief.sections, after=at), trials.job(run, brief.sections, begin=at + 1)])
    assert killed.code in (0, -signal.SIGKILL) and heir.code == 0, heir.err
    goes_on(trials, brief, run, 'SIGKILL of the holder', killed.sent)
