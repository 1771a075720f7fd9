"""Training that is asked to stop, or for its stacks, wherever it is: it ends in time, and goes on as if nothing had happened.

Run as a script, this file is the server of `faults.py` whose children send themselves signals."""
import functools
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import faults
import pytest
from faults import UPDATES, Trials, checkpoints, goes_on, outcome, undisturbed
from ledger import TORTURE

from mmgrpo.process import Stopped, StopSignals

pytestmark = pytest.mark.goal('R9')
TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
PLACES = dict(       # where a child may send itself a signal: a function that is called there
    rollout='mmgrpo.rollout:draw_step', reward='mmgrpo.verifier:VisualJigsawABCDVerifier.__call__',
    backward='torch:Tensor.backward', step='torch.optim:AdamW.step', log='mmgrpo.record:append_line',
    commit='mmgrpo.checkpoint:write_file', finish='mmgrpo.record:RunDirectory.publish')


# --- the child

def wrapped(name, before) -> None:
    "Let a function begin with something else."
    module, _, path = name.partition(':')
    *owner, name = path.split('.')
    owner = functools.reduce(getattr, owner, importlib.import_module(module))
    whole = getattr(owner, name)

    @functools.wraps(whole)
    def with_it(*args, **kwargs):
        before(*args, **kwargs)
        return whole(*args, **kwargs)
    setattr(owner, name, with_it)


def send(sendings) -> None:
    "Plan signals: (place, when, which call of it from then on, numbers, pause after each); when: an attempt or a condition of an evaluation."
    now, counts = [None], [0] * len(sendings)

    def begun(self, prompts, n, key, **kwargs): now[0] = key[1]
    wrapped('mmgrpo.rollout:GRPORolloutController.rollouts', begun)
    for i, (place, when, nth, numbers, pause) in enumerate(sendings):
        def called(*args, i=i, when=when, nth=nth, numbers=numbers, pause=pause, **kwargs):
            counts[i] += now[0] == when
            if now[0] != when or counts[i] != nth: return
            for number in numbers:
                os.kill(os.getpid(), number)
                time.sleep(pause)
        wrapped(PLACES[place], called)


def serve(folder) -> None:
    "The server of `faults.py`; its children look up what to send themselves."
    plain = faults.live

    def live(job, *args):
        send(json.loads((folder/'signals.json').read_text()))
        plain(job, *args)
    faults.live = live
    faults.serve(folder)


class SignalTrials(Trials):
    "Trials that send themselves signals."
    def __init__(self, folder, ledger): super().__init__(folder, ledger, __file__)

    def live(self, run, sections=(), *, sends=(), **how):
        (self.folder/'signals.json').write_text(json.dumps(sends))
        return super().live(run, sections, **how)


# --- the tests

@pytest.fixture(scope='module')
def trials(ledger, tmp_path_factory):
    made = SignalTrials(tmp_path_factory.mktemp('signals'), ledger)
    yield made
    made.close()


@pytest.fixture(scope='module')
def straight(trials, tmp_path_factory):
    "The run that nobody disturbs."
    return undisturbed(trials, tmp_path_factory.mktemp('straight')/'run', UPDATES)


def said(number, step=None) -> str:
    "The last line on stderr."
    return f'mmgrpo_train: stopped by {number.name}{"" if step is None else f" at update {step}"}; the same command goes on'


def saved(run) -> int:
    "Updates of the last checkpoint."
    return json.loads((checkpoints(run)[-1]/'state.json').read_text())['successful']


def grace(seconds) -> dict: return dict(checkpoint=dict(every_updates=1, grace_s=seconds))


WISH = '{}: stops after this update, in 30 s at the latest; at once when sent again'


@pytest.mark.parametrize('number, places', [
    (TERM, [('rollout', 3), ('reward', 2), ('backward', 1), ('log', 1)]),
    (INT, [('commit', 2), ('step', 1), ('commit', 1), ('rollout', 1)]),
])
def test_the_running_update_ends_and_is_saved(trials, straight, tmp_path, number, places):
    "In each update of a run; sent twice within a moment, as a launcher may do, it is one signal."
    run = tmp_path/'run'
    for attempt, (place, nth) in enumerate(places):
        life, done = trials.live(run, sends=[(place, attempt, nth, [number, number], 0)]), attempt + 1
        assert (life.code, life.err.splitlines()) == (128 + number, [WISH.format(number.name), said(number, done)]), place
        assert life.lines[-2:] == [f'RL_CHECKPOINT_COMPLETE step={done} rank=0', f'RL_PAUSED step={done}'] and saved(run) == done
        assert [n for n, _ in life.draws] == [attempt], 'not one update more'
    goes_on(trials, straight, run, number.name, len(places))


def test_where_nothing_can_be_saved_it_ends_at_once(trials, straight, tmp_path):
    "No grace, grace that is over in a sampler that hangs, a second signal, an evaluation, the last files."
    run, faults = tmp_path/'run', [
        (TERM, 'rollout', 'sampled', 0, {}), (INT, 'rollout', 0, 0, grace(0)), (TERM, 'rollout', 0, 60, grace(.2)),
        (INT, 'backward', 0, .6, {}), (TERM, 'finish', 'greedy', 0, {})]
    for number, place, when, pause, sections in faults:
        life = trials.live(run, sections, sends=[(place, when, 1, [number, number], pause)])
        line = 'mmgrpo_train: stopped by SIGTERM' if place == 'finish' else said(number)
        assert (life.code, life.err.splitlines()[-1]) == (128 + number, line), (place, when)
        assert life.seconds < straight[0].seconds + 5 and not any('RL_PAUSED' in line for line in life.lines), (place, when)
        assert saved(run) == (UPDATES if place == 'finish' else 0)
    goes_on(trials, straight, run, 'at once', len(faults))


def test_a_commit_ends_before_the_process_does(trials, straight, tmp_path):
    "SIGTERM in the middle of a checkpoint."
    run = tmp_path/'run'
    life = trials.live(run, grace(0), sends=[('commit', 1, 1, [TERM], 0)])
    assert (life.code, life.err.splitlines(), saved(run)) == (143, [said(TERM)], 2)
    goes_on(trials, straight, run, 'in a commit')


def test_stacks_are_shown_and_nothing_else_changes(trials, straight, tmp_path):
    "SIGUSR1."
    run, places = tmp_path/'run', [('rollout', 0), ('reward', 1), ('rollout', 'greedy'), ('commit', 2), ('backward', 3), ('finish', 'greedy')]
    life = trials.live(run, sends=[(place, when, 1, [USR1, USR1], 0) for place, when in places])
    assert life.code == 0 and life.lines[-1] == straight[0].lines[-1].replace(str(straight[1]), str(run))
    assert life.err.count(' in go_on\n') == 2 * len(places), 'each stack of the main thread goes through it'
    for name in ('decode', 'collect', 'evaluate', 'save_checkpoint', 'execute_actor_update', 'finish'): assert f' in {name}\n' in life.err
    goes_on(trials, straight, run, 'SIGUSR1')


def test_a_forked_process_dies_of_the_signal_and_the_run_does_not_hear_of_it():
    "A worker of a library is not the run."
    with StopSignals(60) as stop:
        child = os.fork()
        if child == 0:
            signal.raise_signal(TERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -TERM
    assert stop.asked is None


def test_what_swallows_the_end_is_told_again():
    "Code that catches everything, as callbacks do, holds it up by a second."
    began, swallowed = time.monotonic(), 0
    with pytest.raises(Stopped), StopSignals(.1):
        os.kill(os.getpid(), TERM)
        while not swallowed:
            try: time.sleep(60)
            except BaseException: swallowed += 1
        time.sleep(60)
    assert time.monotonic() - began < 30


# --- two ranks

def two_ranks(trials, run, sections=(), when='', number=None) -> list:
    "(exit code, lines, stderr) of both; the second rank alone is sent a signal when it has said something."
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    raw = faults.config(trials.folder, run, sections)
    raw['trainer'] |= dict(world_size=2, prompts_per_update=2)
    raw['evaluation'] |= dict(max_prompts=2)       # one a rank
    raw['data'] |= dict(n_valid=2, cache_root=None)
    (trials.folder/'two.yaml').write_text(json.dumps(raw))
    common = os.environ | dict(WORLD_SIZE='2', LOCAL_WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port), OMP_NUM_THREADS='1',
                               PYTHONPATH=str(Path(__file__).parent.parent), PYTHONUNBUFFERED='1')
    both = [subprocess.Popen([sys.executable, '-m', 'mmgrpo.cli', '--config', str(trials.folder/'two.yaml')], text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, env=common | dict(RANK=str(rank), LOCAL_RANK=str(rank))) for rank in (0, 1)]
    said = ''
    while number and when not in said and (line := both[1].stdout.readline()): said += line
    if number: both[1].send_signal(number)
    try: found = [process.communicate(timeout=faults.HANG_S) for process in both]
    finally:
        for process in both: process.kill()     # nothing, if it has ended
    return [(process.returncode, (said * rank + out).splitlines(), err) for rank, (process, (out, err)) in enumerate(zip(both, found))]


@pytest.mark.skipif(not TORTURE, reason='nightly')
def test_a_signal_to_one_rank_stops_both_at_the_same_update(trials, tmp_path):
    "Two processes; only the second is sent SIGTERM."
    straight, run = tmp_path/'straight'/'run', tmp_path/'run'
    for code, _, err in two_ranks(trials, straight): assert code == 0, err
    for when in ('CHECKPOINT_COMPLETE step=0', 'CHECKPOINT_COMPLETE step=2'):
        ended = two_ranks(trials, run, when=when, number=TERM)
        assert [code for code, _, _ in ended] == [143, 143], ended
        assert len({lines[-1] for _, lines, _ in ended}) == 1 and ended[0][1][-1] == f'RL_PAUSED step={saved(run)}'
    for code, _, err in two_ranks(trials, run): assert code == 0, err
    assert outcome(run) == outcome(straight)


if __name__ == '__main__': serve(Path(sys.argv[1]))
