"""Runs that are killed or interrupted, and two that want one directory: each ends like a run that was left alone."""
import random
import shutil
import signal

import pytest
from faults import curves, follows, goes_on, keeps, outcome
from ledger import TORTURE, size


# --- kills and signals

@pytest.mark.goal('R1')
@pytest.mark.parametrize('number', range(size(6, 200)))
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
@pytest.mark.parametrize('number', range(size(1, 10)))
def test_a_cold_process_is_killed(trials, long, tmp_path, number):
    "As from a shell: a new interpreter, killed from its start on; then one that goes on."
    chance, run = random.Random(number), tmp_path/'run'
    seconds = chance.uniform(4, 4 + 2 * long.life.seconds) if number else 1.
    code = trials.cold(run, long.sections, after=seconds)
    assert code in (0, -signal.SIGKILL)
    code = trials.cold(run, long.sections)
    assert code == 0
    trials.judge('SIGKILL of a cold process', run, outcome(run), long.found)
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


@pytest.mark.goal('R9')
@pytest.mark.parametrize('number', range(size(4, 300)))
def test_a_signal_at_random(trials, long, tmp_path, number):
    "SIGTERM or SIGINT, a third of them twice: the run ends by itself or by the signal, and goes on like any other."
    chance, run = random.Random(number), tmp_path/'run'
    sent = (signal.SIGTERM, signal.SIGINT)[number % 2]
    first = chance.uniform(0, long.life.cpu)
    signals = [(first, sent)] + [(first + chance.uniform(0, .2), sent)] * (number % 3 == 2)
    life = trials.live(run, long.sections, signals=signals, cpu=True)
    follows(life, long)
    if life.code: assert life.code in {signal.SIGTERM: (-signal.SIGTERM, 143), signal.SIGINT: (-signal.SIGINT, 130)}[sent], life.err
    goes_on(trials, long, run, sent.name, life.sent)


# --- two writers

@pytest.mark.goal('R5')
@pytest.mark.parametrize('number', range(size(5, 1000)))
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
    "A process that starts right after another was killed gets the run."
    run, at = tmp_path/'run', random.Random(number).uniform(.1, brief.life.seconds)
    killed, heir = trials.together([trials.job(run, brief.sections, after=at), trials.job(run, brief.sections, begin=at + .05)])
    assert killed.code in (0, -signal.SIGKILL) and heir.code == 0, heir.err
    goes_on(trials, brief, run, 'SIGKILL of the holder', killed.sent)
