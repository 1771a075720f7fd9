"""Numbers that are NaN or infinite, at one place of the computation and for some updates: these updates never happened, and too many end the run."""
import itertools
import random

import pytest
from faults import checkpoints, files, outcome
from ledger import size

from mmgrpo.checkpoint import load_checkpoint
from mmgrpo.storage import read_lines

PLACES = ['logits text', 'logits visual', 'loss text', 'loss visual', 'gradient backbone', 'gradient visual_head']
BUDGET = 2
SECTIONS = dict(trainer=dict(max_updates=3), optimizer=dict(max_nonfinite_updates=BUDGET), checkpoint=dict(keep_latest=20), evaluation=dict(every_updates=0))
BURSTS = list(itertools.product(range(1, BUDGET + 2), PLACES, ['nan', 'inf', '-inf']))


def weights(path) -> tuple: return tuple((path/name).read_bytes() for name in ('policy.safetensors', 'optimizer.safetensors'))


def assert_unmoved(run, poison) -> None:
    "Each poisoned update has a line that says so, and a checkpoint with the weights, moments and count of the one before."
    first, n = poison['first'], poison['n']
    saved = {load_checkpoint(path).state['attempted']: path for path in checkpoints(run)}
    skipped = [record['attempted'] for record in read_lines(run/'train_log.jsonl') if record['skipped_nonfinite']]
    assert skipped == list(range(first + 1, first + n + 1))
    for attempted in skipped:
        before, after = (load_checkpoint(saved[number]).state for number in (attempted - 1, attempted))
        assert weights(saved[attempted]) == weights(saved[attempted - 1])
        assert (after['successful'], after['nonfinite'], after['scheduler']) == (before['successful'], before['nonfinite'] + 1, before['scheduler'])


@pytest.mark.goal('R7')
@pytest.mark.parametrize('number', range(size(3, 288)))
def test_a_burst_that_the_budget_covers(trials, tmp_path, number):
    "It moves nothing; the run ends well, and as one that was killed on the way."
    chance = random.Random(number)
    n, place, value = [burst for burst in BURSTS if burst[0] <= BUDGET][number % 36]
    poison = dict(place=place, value=value, first=chance.randint(0, 2), n=n)
    life = trials.live(tmp_path/'alone'/'run', SECTIONS, poison=poison)
    assert life.code == 0, (poison, life.err)
    assert_unmoved(tmp_path/'alone'/'run', poison)
    trials.ledger.fault('not finite', n)
    for _ in range(size(2, 5)):
        killed = trials.live(tmp_path/'killed'/'run', SECTIONS, poison=poison, after=chance.uniform(0, life.cpu), cpu=True)
        if killed.code == 0: break
    assert trials.live(tmp_path/'killed'/'run', SECTIONS, poison=poison).code == 0
    trials.judge('not finite', poison, outcome(tmp_path/'killed'/'run'), outcome(tmp_path/'alone'/'run'), n)


@pytest.mark.goal('R7')
@pytest.mark.parametrize('number', range(size(1, 108)))
def test_a_burst_that_the_budget_does_not_cover(trials, tmp_path, number):
    "The run stops with one line, and so does every start after that; its weights are those before the burst."
    n, place, value = [burst for burst in BURSTS if burst[0] > BUDGET][number % 18]
    poison, run = dict(place=place, value=value, first=random.Random(number).randint(0, 2), n=n), tmp_path/'run'
    life = trials.live(run, SECTIONS, poison=poison)
    assert life.code == 1 and 'max_nonfinite_updates' in life.err and len(life.err.splitlines()) == 1, life.err
    assert_unmoved(run, poison)
    before = files(run)
    again = trials.live(run, SECTIONS)
    assert again.code == 1 and 'max_nonfinite_updates' in again.err and not again.draws, again.err
    after = {path: data for path, data in files(run).items() if 'tensorboard' not in path.parts}
    trials.judge('not finite', poison, after, {path: data for path, data in before.items() if 'tensorboard' not in path.parts}, n)


@pytest.mark.goal('R7')
@pytest.mark.parametrize('value', ['nan', 'inf', '-inf'])
def test_a_reward_that_is_no_number(trials, straight, tmp_path, value):
    "It is not taken for one: the run stops with a line that says so, and goes on once the scorer is mended."
    run = tmp_path/'run'
    life = trials.live(run, straight.sections, poison=dict(place='reward', value=value, first=2, n=9))
    assert life.code and 'reward' in life.err and len(life.err.splitlines()) == 1, life.err
    assert life.saved == 2
    assert trials.ended(run, straight.sections).start == 2
    trials.judge('not finite', 'reward', outcome(run), straight.found)
