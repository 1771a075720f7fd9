"""What must not matter: when a run is saved, measured and drawn, where it lies, what the clock says, how often it was started."""
import os
import random
import shutil
import subprocess
import tarfile

import pytest
from faults import UPDATES, checkpoints, copied, files, follows, goes_on, outcome, result
from ledger import size

# --- R12

NO_EVALUATION = dict(evaluation=dict(at_start=False, at_end=False, every_updates=0))
VARIANTS = dict(
    saved_every_3=dict(checkpoint=dict(every_updates=3)), saved_at_the_end=dict(checkpoint=dict(every_updates=99)) | NO_EVALUATION,
    saved_by_the_clock=dict(checkpoint=dict(every_updates=99, every_minutes=0)), one_checkpoint_kept=dict(checkpoint=dict(keep_latest=1)),
    not_evaluated=NO_EVALUATION, evaluated_always=dict(evaluation=dict(every_updates=1)), no_curves=dict(logging=dict(tensorboard=False)),
    no_pictures=dict(logging=dict(pictures_every_updates=0)), pictures_always=dict(logging=dict(pictures_every_updates=1)),
    no_artifacts=dict(logging=dict(keep_artifacts=0)), artifacts_of_two_updates=dict(logging=dict(keep_artifacts=2)))


@pytest.mark.goal('R12')
@pytest.mark.parametrize('name', VARIANTS)
def test_it_does_not_matter_when_a_run_is_saved_or_measured(trials, straight, tmp_path, name):
    "Also when it was killed once on the way."
    chance, run = random.Random(name), tmp_path/'run'
    killed = trials.live(run, VARIANTS[name], after=chance.uniform(0, straight.life.cpu), cpu=True)
    life = trials.live(run, VARIANTS[name])
    assert life.code == 0, life.err
    follows(life, straight)
    trials.judge('variant', name, result(run), result(straight.run), killed.sent)


@pytest.mark.goal('R12')
def test_a_restart_after_every_update(trials, straight, tmp_path):
    "As many processes as updates."
    lives = [trials.ended(tmp_path/'run', stop=1) for _ in range(UPDATES)]
    assert [life.start for life in lives] == list(range(UPDATES))
    assert [draw for life in lives for draw in life.draws] == straight.life.draws
    goes_on(trials, straight, tmp_path/'run', 'restart', UPDATES - 1)


@pytest.mark.goal('R12')
@pytest.mark.parametrize('number', range(size(1, 20)))
def test_ten_restarts_in_a_row(trials, long, tmp_path, number):
    "Killed ten times, each time a little later, and at last left alone."
    chance, run = random.Random(number), tmp_path/'run'
    for n in range(10):
        life = trials.live(run, long.sections, after=chance.uniform(.3, 1) * long.life.cpu/4, cpu=True)
        follows(life, long)
        if life.code == 0: break
    goes_on(trials, long, run, 'restart', n + 1)


@pytest.mark.goal('R12')
def test_a_model_that_was_just_loaded(trials, straight, tmp_path):
    "The other trials take the model that their parent loaded."
    trials.ended(tmp_path/'run', stop=2, cold=True)
    trials.ended(tmp_path/'run', cold=True)
    trials.judge('restart', tmp_path, outcome(tmp_path/'run'), straight.found)


# --- R14

@pytest.mark.goal('R14')
@pytest.mark.parametrize('mask', [0o077, 0o027, 0o022, 0o002])
def test_modes_follow_the_umask(trials, straight, tmp_path, mask):
    "Also of what another process with another umask adds."
    run = tmp_path/'run'
    trials.ended(run, stop=1, umask=0o022)
    old = {p for p in run.rglob('*')}
    trials.ended(run, stop=2, umask=mask)
    new = {p for p in run.rglob('*')} - old
    assert new and not {p: oct(p.stat().st_mode) for p in new if p.stat().st_mode & 0o777 != (0o777 if p.is_dir() else 0o666) & ~mask}
    goes_on(trials, straight, run, 'umask')


def read_only(run, trials, tmp_path):
    life = trials.live(run, change=1, error=30, lasting=True)
    assert life.code > 0 and str(run) in life.err and 'Read-only file system' in life.err, life.err


def clock_back(run, trials, tmp_path): trials.ended(run, stop=1, clock=-86400)
def clock_ahead(run, trials, tmp_path): trials.ended(run, stop=1, clock=86400)


def temp_dir_elsewhere(run, trials, tmp_path):
    trials.ended(run, stop=1, environ=dict(TMPDIR=str(tmp_path)))
    assert {p.name for p in tmp_path.iterdir()} <= {'run', 'original'}, 'nothing of a run lies outside it'


def temp_dir_missing(run, trials, tmp_path): trials.ended(run, stop=1, environ=dict(TMPDIR=str(tmp_path/'nowhere')))


def times_equal(run, trials, tmp_path):
    for path in (run, *run.rglob('*')): os.utime(path, (4e9, 4e9))


def times_reversed(run, trials, tmp_path):
    for n, path in enumerate(sorted(run.rglob('*'))): os.utime(path, (2e9 - n, 2e9 - n))


def by_cp(run, trials, tmp_path):
    run.rename(tmp_path/'original')
    subprocess.run(['cp', '-r', tmp_path/'original', run], check=True)


def by_tar(run, trials, tmp_path):
    with tarfile.open(tmp_path/'run.tar', 'w') as tar: tar.add(run, 'run')
    shutil.rmtree(run)
    with tarfile.open(tmp_path/'run.tar') as tar: tar.extractall(tmp_path, filter='data')
    (tmp_path/'run.tar').unlink()


def file_by_file(run, trials, tmp_path):
    "As rsync does: under other names first, in any order."
    run.rename(tmp_path/'original')
    for path in random.Random(0).sample(sorted(files(tmp_path/'original')), len(files(tmp_path/'original'))):
        to = run/path.relative_to(tmp_path/'original')
        to.parent.mkdir(parents=True, exist_ok=True)
        (to.parent/f'.{to.name}.Xy1').write_bytes(path.read_bytes())
        (to.parent/f'.{to.name}.Xy1').rename(to)


CHANGED = [read_only, clock_back, clock_ahead, temp_dir_elsewhere, temp_dir_missing, times_equal, times_reversed, by_cp, by_tar, file_by_file]


@pytest.mark.goal('R14')
@pytest.mark.parametrize('change', CHANGED, ids=lambda change: change.__name__)
def test_it_does_not_matter_where_a_run_lies(trials, straight, paused, tmp_path, change):
    "A paused run after something happened to its place, its files or its clock."
    run, before = copied(paused, tmp_path), files(paused)
    change(run, trials, tmp_path)
    goes_on(trials, straight, run, 'other surroundings')
    assert files(paused) == before, 'what was copied from is left alone'


@pytest.mark.goal('R14')
@pytest.mark.parametrize('name', ['tensorboard', 'checkpoints', 'pictures'])
def test_a_part_on_another_disk(trials, straight, paused, tmp_path, name):
    "A folder of the run is a link: the run goes on at its other end."
    run, elsewhere = copied(paused, tmp_path), tmp_path/'elsewhere'
    (run/name).rename(elsewhere)
    (run/name).symlink_to(elsewhere)
    goes_on(trials, straight, run, 'link')
    assert (run/name).is_symlink() and files(elsewhere)


@pytest.mark.goal('R14')
def test_what_somebody_linked_into_a_run_is_left_alone(trials, straight, paused, tmp_path):
    "Whatever its names look like: a start removes what it left half done itself, and nothing else."
    run, elsewhere = copied(paused, tmp_path), tmp_path/'elsewhere'
    (elsewhere/'.tmp-cache-0123abcd').mkdir(parents=True)
    for name in ('.tmp-cache-0123abcd/x', '.tmp-results.csv', '.tmp-summary.json-0123abcd'): (elsewhere/name).write_text('mine')
    (run/'results').symlink_to(elsewhere)
    trials.ended(run, straight.sections)
    assert len(files(elsewhere)) == 3
    (run/'results').unlink()
    goes_on(trials, straight, run, 'link')


@pytest.mark.goal('R14')
def test_a_read_only_run_is_left_alone(trials, straight, paused, tmp_path):
    "Not a byte of it changes."
    run = copied(paused, tmp_path)
    before = files(run)
    read_only(run, trials, tmp_path)
    assert files(run) == before and len(checkpoints(run)) > 1
    goes_on(trials, straight, run, 'read-only')
