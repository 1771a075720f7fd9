"""Training that is asked to stop, or for its stacks, wherever it is: it ends in time, and goes on as if nothing had happened.

Run as a script, this file is the server of `faults.py` whose children send themselves signals."""
import functools
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import faults
import pytest
from faults import UPDATES, Trials, checkpoints, goes_on, undisturbed

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
    (INT, [('step', 1), ('commit', 2), ('rollout', 1), ('commit', 1)]),
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
    run = tmp_path/'run'
    life = trials.live(run, grace(0), sends=[('commit', 1, 1, [TERM], 0)])
    assert (life.code, life.err.splitlines(), saved(run)) == (143, [said(TERM)], 2)
    goes_on(trials, straight, run, 'in a commit')


def test_stacks_are_shown_and_nothing_else_changes(trials, straight, tmp_path):
    run, places = tmp_path/'run', [('rollout', 0), ('reward', 1), ('rollout', 'greedy'), ('commit', 2), ('backward', 3), ('finish', 'greedy')]
    life = trials.live(run, sends=[(place, when, 1, [USR1, USR1], 0) for place, when in places])
    assert life.code == 0 and life.lines[-1] == straight[0].lines[-1].replace(str(straight[1]), str(run))
    assert life.err.count(' in go_on\n') == 2 * len(places), 'each stack of the main thread goes through it'
    for name in ('decode', 'collect', 'evaluate', 'save_checkpoint', 'execute_actor_update', 'finish'): assert f' in {name}\n' in life.err
    goes_on(trials, straight, run, 'SIGUSR1')


if __name__ == '__main__': serve(Path(sys.argv[1]))
