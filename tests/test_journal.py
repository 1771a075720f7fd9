"""What a run writes beside its checkpoints: whatever was switched, lost, damaged or left lying about, each line and each point is there once,
or the start is refused by the name of what is wrong."""
import errno
import json
import os
import re
import shutil
from dataclasses import replace

import pytest
from faults import checkpoints, curves, files, outcome
from tiny import made, train  # noqa: F401

import mmgrpo.journal as journal
import mmgrpo.record as record
import mmgrpo.trainer as trainer
from mmgrpo.artifact import kept_attempts
from mmgrpo.checkpoint import latest_checkpoint
from mmgrpo.record import HIDDEN_LOG, LOG, log_path
from mmgrpo.settings import InputError
from mmgrpo.storage import DISK, StorageError, read_lines

TAG = 'group/reward_mean'


class Killed(BaseException):
    "As by a kill: nobody catches it, nothing is saved."


def killed_at(monkeypatch, room, name, call, after=False):
    "Let a call of a function be the last thing that a process does."
    whole, n = getattr(room, name), []

    def wrapped(*args, **kwargs):
        n.append(1)
        found = whole(*args, **kwargs) if after or len(n) != call else None
        if len(n) == call: raise Killed
        return found
    monkeypatch.setattr(room, name, wrapped)


def killed(monkeypatch, cfg, *how, **kwargs) -> None:
    with monkeypatch.context() as patch:
        killed_at(patch, *how, **kwargs)
        with pytest.raises(Killed): train(cfg)


def steps(run, tag=TAG) -> list: return [step for step, _ in curves(run)[tag]]
def attempts(run) -> list: return [line['attempted'] for line in read_lines(log_path(run))]


def measured(run) -> list:
    "The updates at which the curves have an evaluation."
    return steps(run, next(tag for tag in curves(run) if tag.startswith('validation/')))


# --- settings that change from start to start

SWITCHES = [dict(jsonl=False), {}], [{}, dict(jsonl=False), {}], [{}, dict(tensorboard=False), {}], [dict(tensorboard=False, jsonl=False), {}], \
    [{}, dict(jsonl=False), dict(tensorboard=False), {}]


@pytest.mark.goal('R12')
@pytest.mark.parametrize('switched', SWITCHES, ids=str)
def test_logs_that_are_switched_off_and_on(ledger, made, straight, tmp_path, switched):
    "An update a start, each with other wishes, then the rest: the end is that of a run that had both all the time."
    run = tmp_path/'run'
    for wish in switched:
        train(made.config(run, dict(logging=wish)), stop_after_updates=1)
        shown, hidden = (run/name for name in (LOG, HIDDEN_LOG))
        assert (shown.exists(), hidden.exists()) == (wish.get('jsonl', True), not wish.get('jsonl', True))
    train(made.config(run))
    ledger.judge('switched log', switched, outcome(run) | curves(run), outcome(straight.run) | straight.curves)


@pytest.mark.goal('R12')
def test_points_of_a_try_that_was_taken_back(ledger, made, tmp_path, monkeypatch):
    "TensorBoard was off while the updates were done again in another way: the curves are those of the log."
    run, plain = tmp_path/'run', dict(evaluation=dict(every_updates=0, at_start=False, at_end=False), checkpoint=dict(every_updates=99))
    killed(monkeypatch, made.config(run, plain), trainer, 'log_attempt', 3, after=True)
    other = plain | dict(trainer=dict(micro_batch_rollouts=1), checkpoint=dict(every_updates=99, resume_mode='execution_change'))
    train(made.config(run, other | dict(logging=dict(tensorboard=False))), stop_after_updates=3)
    train(made.config(run, other))
    wanted = [(line['attempted'], pytest.approx(line['grad_norm'], rel=1e-6)) for line in read_lines(run/LOG)]
    assert curves(run)['grad_norm'] == wanted
    ledger.fault('switched log')


@pytest.mark.goal('R12')
def test_artifacts_that_are_no_longer_wanted(ledger, made, tmp_path):
    "Fewer are kept from the next start on; one that is not whole goes with its turn."
    run = made.copy('paused', tmp_path)
    assert kept_attempts(run) == [1, 2, 3]
    (run/'artifacts'/'attempt-000002'/'MANIFEST').unlink()
    train(made.config(run, dict(logging=dict(keep_artifacts=2))), stop_after_updates=1)
    assert sorted(path.name for path in (run/'artifacts').iterdir()) == ['attempt-000003', 'attempt-000004']
    run = made.copy('paused', tmp_path/'none')
    train(made.config(run, dict(logging=dict(keep_artifacts=0))))
    assert list((run/'artifacts').iterdir()) == []
    ledger.fault('switched log', 2)


@pytest.mark.goal('R12')
def test_drawings_of_a_try_that_was_taken_back(ledger, made, tmp_path, monkeypatch):
    "The updates are done again without drawings: neither file nor point is left of the first try."
    run, drawing = tmp_path/'run', dict(checkpoint=dict(every_updates=99), evaluation=dict(every_updates=0), logging=dict(pictures_every_updates=1))
    killed(monkeypatch, made.config(run, drawing), trainer, 'log_attempt', 2, after=True)
    assert len(list((run/'pictures').iterdir())) == 4
    plain = made.config(run, drawing | dict(logging=dict(pictures_every_updates=0)))
    for _ in range(2): train(plain, stop_after_updates=2)
    assert list((run/'pictures').iterdir()) == []
    assert not [event for _, event in journal.whole_events((run/'tensorboard'/journal.EVENTS).read_bytes()) if event.summary.value and event.summary.value[0].tag == 'drawings']
    ledger.fault('switched log')


# --- an update that was thrown away, then a kill

def poisoned(monkeypatch, attempt):
    "Let one update have scores that are no numbers."
    whole, n = trainer.execute_actor_update, []

    def update(learner, *args, **kwargs):
        n.append(1)
        if len(n) != attempt: return whole(learner, *args, **kwargs)
        scored = lambda batch: (lambda found: replace(found, logps=found.logps * float('nan')))(learner.scorer(batch))
        return whole(replace(learner, scorer=scored), *args, **kwargs)
    monkeypatch.setattr(trainer, 'execute_actor_update', update)


@pytest.mark.goal('R7')
@pytest.mark.parametrize('jsonl', [True, False])
@pytest.mark.parametrize('lost', ['nothing', 'the last event', 'the file'])
def test_the_evaluation_before_an_update_that_was_thrown_away(ledger, made, tmp_path, monkeypatch, jsonl, lost):
    "The next process does it again; the curves have it once, and every drawing, also after a power cut."
    run, sections = tmp_path/'run', dict(evaluation=dict(every_updates=1), logging=dict(jsonl=jsonl), optimizer=dict(max_nonfinite_updates=3))
    with monkeypatch.context() as patch:
        poisoned(patch, 2)
        killed(patch, made.config(run, sections), trainer, 'draw_batch', 3)
    path = run/'tensorboard'/journal.EVENTS
    *_, (before, _), (end, _) = journal.whole_events(path.read_bytes())
    if lost != 'nothing': path.write_bytes(path.read_bytes()[:(before + end) // 2] if lost == 'the last event' else b'')
    for _ in range(2): train(made.config(run, sections), stop_after_updates=1)
    assert (steps(run), attempts(run), measured(run)) == ([1, 2, 3, 4], [1, 2, 3, 4], [0, 1, 2, 3])
    drawn = [event.step for _, event in journal.whole_events(path.read_bytes()) if event.summary.value and event.summary.value[0].tag == 'drawings']
    assert sorted(drawn) == [1, 2, 4]
    ledger.fault('thrown away, then killed')


# --- files that are lost, damaged or not ours

@pytest.mark.goal('R4')
@pytest.mark.parametrize('bend', [lambda data: data[:len(data)//2], lambda data: b'', lambda data: bytes(len(data)), lambda data: data[:900] + bytes(64) + data[964:],
                                  lambda data: data + data], ids=['half', 'empty', 'zeros', 'hole', 'twice'])
def test_an_event_file_is_made_again(ledger, made, straight, tmp_path, bend):
    "Half, empty, zeros, a hole, everything twice: the curves are those of the undisturbed run."
    run = made.copy('paused', tmp_path)
    path = run/'tensorboard'/journal.EVENTS
    path.write_bytes(bend(path.read_bytes()))
    train(made.config(run))
    ledger.judge('tampered curves', path, curves(run), straight.curves)


@pytest.mark.goal('R4')
@pytest.mark.parametrize('name', ['montage.png', 'attempt-000001 (copy).png', 'attempt-000001-crop.png'])
def test_a_picture_that_is_not_ours(ledger, made, straight, tmp_path, name):
    "It is left alone, and the run goes on."
    run = made.copy('paused', tmp_path)
    shutil.copy(run/'pictures'/'attempt-000001.png', run/'pictures'/name)
    train(made.config(run))
    ledger.judge('tampered pictures', name, curves(run), straight.curves)


@pytest.mark.goal('R4')
@pytest.mark.parametrize('name, bend', [('attempt-000001.png', lambda data: data[:len(data)//2]), ('attempt-000001.png', lambda data: b'GIF89a' + data),
                                        ('attempt-000001.json', lambda data: b'{}\n'), ('attempt-000001.json', lambda data: data[:30])])
def test_a_damaged_picture_is_named(ledger, made, straight, tmp_path, name, bend, capsys):
    "It is needed when the curves are made again; put back, the run goes on as if nothing had happened."
    run = made.copy('paused', tmp_path)
    path, events = run/'pictures'/name, run/'tensorboard'/journal.EVENTS
    whole = path.read_bytes()
    path.write_bytes(bend(whole))
    events.write_bytes(b'')
    with pytest.raises(ValueError, match=re.escape(str(path.with_suffix('.png')))) as told: train(made.config(run))
    assert '\n' not in str(told.value)
    path.write_bytes(whole)
    train(made.config(run))
    ledger.judge('tampered pictures', name, curves(run) | outcome(run), straight.curves | straight.found)


@pytest.mark.goal('R4')
def test_a_damaged_report_is_told_at_the_next_start(ledger, made, tmp_path):
    "Not after the last update; without it the run goes on, and does not take a later report for that of its start."
    run = made.copy('paused', tmp_path)
    report = run/'validation_start.json'
    whole = report.read_bytes()
    report.write_bytes(whole[:50] + b'x' + whole[51:])
    with pytest.raises(ValueError, match=re.escape(str(report))): train(made.config(run), stop_after_updates=1)
    assert len(attempts(run)) == 3
    report.unlink()
    train(made.config(run))
    summary = json.loads((run/'summary.json').read_bytes())
    assert summary['validation_start'] == summary['validation_change'] == {} and summary['validation_final']
    ledger.fault('tampered report')


@pytest.mark.goal('R4')
@pytest.mark.parametrize('jsonl', [True, False])
def test_checkpoints_that_were_moved_away(ledger, made, tmp_path, jsonl):
    "It is never a fresh start over a run that was there."
    run = tmp_path/'run'
    train(made.config(run, dict(logging=dict(jsonl=jsonl))), stop_after_updates=2)
    (run/'checkpoints').rename(tmp_path/'moved')
    with pytest.raises(InputError, match='tells of updates'): train(made.config(run, dict(logging=dict(jsonl=jsonl))))
    assert attempts(run) == [1, 2] and kept_attempts(run) == [1, 2]
    ledger.fault('tampered checkpoints')


@pytest.mark.goal('R11')
@pytest.mark.parametrize('where', [0, -1])
def test_a_clock_that_is_no_number(ledger, made, tmp_path, where):
    "Clocks are no part of the seal, but must be JSON."
    run = made.copy('paused', tmp_path)
    data = (run/LOG).read_bytes()
    digit = list(re.finditer(rb'"timing/finished_at":(\d)', data))[where].start(1)
    (run/LOG).write_bytes(data[:digit] + b'0' + data[digit + 1:])
    with pytest.raises(ValueError, match=f'{re.escape(str(run/LOG))}, line {(1, 3)[where]},'): train(made.config(run))
    ledger.fault('torn log')


@pytest.mark.goal('R11')
def test_a_log_torn_while_it_was_hidden(ledger, made, straight, tmp_path):
    "The line after the last checkpoint is half written, or zeros after a power cut; the log had been hidden before."
    for tail in (b'{"attempted":3,"grad', b'{"att' + bytes(300) + b'\n'):
        run = tmp_path/str(len(tail))/'run'
        train(made.config(run), stop_after_updates=1)
        train(made.config(run, dict(logging=dict(jsonl=False))), stop_after_updates=1)
        (run/HIDDEN_LOG).write_bytes((run/HIDDEN_LOG).read_bytes() + tail)
        train(made.config(run))
        ledger.judge('torn log', tail, outcome(run), straight.found)


# --- starts that must not be mistaken

@pytest.mark.goal('R13')
def test_a_fork_that_was_killed_before_its_first_checkpoint(ledger, made, tmp_path, monkeypatch):
    "Begun again without its parent it would train from scratch, with the parent's reference."
    parent = str(checkpoints(made.paused)[1])
    whole, fork = ((lambda run: lambda **more: made.config(tmp_path/run/'run', dict(checkpoint=dict(more))))(run) for run in ('whole', 'fork'))
    train(whole(resume_from=parent))
    killed(monkeypatch, fork(resume_from=parent), trainer, 'save', 1)
    with pytest.raises(InputError, match=f'{re.escape(str(tmp_path/"fork"/"run"))} was begun from a checkpoint of another run'): train(fork())
    train(fork(resume_from=parent), stop_after_updates=1)
    train(fork())                                               # it has a checkpoint of its own now
    ledger.judge('changed fact', 'fork', outcome(tmp_path/'fork'/'run'), outcome(tmp_path/'whole'/'run'))


@pytest.mark.goal('R13')
def test_a_declared_change_is_told_once(ledger, made, tmp_path, monkeypatch):
    "However often a start is killed right after it told it."
    run = made.copy('paused', tmp_path)
    changed = made.config(run, dict(trainer=dict(micro_batch_rollouts=2), checkpoint=dict(resume_mode='execution_change')))
    for _ in range(3):
        with monkeypatch.context() as patch:
            whole = record.atomic_write
            patch.setattr(record, 'atomic_write', lambda path, *rest: whole(path, *rest) if path.name != 'config.json' else (_ for _ in ()).throw(Killed))
            with pytest.raises(Killed): train(changed, stop_after_updates=1)
    train(changed, stop_after_updates=1)
    assert len(read_lines(run/'execution_changes.jsonl')) == 1
    ledger.fault('changed field', 3)


@pytest.mark.goal('R13')
def test_a_declared_change_of_a_start_that_is_refused(ledger, made, tmp_path):
    "It never happened: without it the run goes on as if nobody had tried."
    run = made.copy('paused', tmp_path)
    weights = latest_checkpoint(run)/'policy.safetensors'
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    held = files(run)
    with pytest.raises(ValueError, match='policy.safetensors'):
        train(made.config(run, dict(trainer=dict(micro_batch_rollouts=2), checkpoint=dict(resume_mode='execution_change'))))
    assert files(run) == held
    weights.write_bytes(whole)
    train(made.config(run))
    ledger.judge('changed field', run, outcome(run), outcome(made.done))


@pytest.mark.goal('R5')
def test_a_lock_that_somebody_removed(ledger, made, tmp_path, monkeypatch):
    "Both processes have a lock then; the one that finds its own gone ends before it writes a line."
    run = made.copy('paused', tmp_path)
    whole = trainer.draw_batch

    def removing(*args, **kwargs):
        (run/record.LOCK).unlink(missing_ok=True)
        return whole(*args, **kwargs)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, 'draw_batch', removing)
        with pytest.raises(RuntimeError, match='was removed, so another process may be writing'): train(made.config(run))
    assert attempts(run) == kept_attempts(run) == [1, 2, 3] and len(checkpoints(run)) == len(checkpoints(made.paused))
    ledger.fault('removed lock')


@pytest.mark.goal('R2')
def test_the_first_error_is_the_one_that_is_told(ledger, made, tmp_path):
    "The log finds the disk full, and then the event file cannot be closed."
    run, opened, real = made.copy('paused', tmp_path), {}, {name: getattr(DISK, name) for name in ('open', 'close', 'write')}

    def opening(path, flags, mode):
        fd = real['open'](path, flags, mode)
        opened[fd] = str(path)
        return fd

    def closing(fd):
        real['close'](fd)
        if 'tfevents' in opened.pop(fd, ''): raise OSError(errno.EIO, os.strerror(errno.EIO))

    def writing(fd, data):
        if opened.get(fd, '').endswith(LOG): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real['write'](fd, data)
    try:
        for name, call in dict(open=opening, close=closing, write=writing).items(): object.__setattr__(DISK, name, call)
        with pytest.raises(StorageError, match=f'{LOG}: No space left'): train(made.config(run))
    finally:
        for name, call in real.items(): object.__setattr__(DISK, name, call)
    ledger.fault('ENOSPC, then EIO')
