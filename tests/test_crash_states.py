"""Power cuts: from the recorded calls of a run's life every state of the disk that a cut may leave is built, and the run goes on from each.

What a call acknowledged is there, what is read is right, and the run ends with the files of one that was left alone. Wrong writers are caught.
`MMGRPO_TORTURE=1` is the nightly size."""
import functools
import os
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
from crash import Died, Recorder, crash_states, lay_out
from ledger import TORTURE

from mmgrpo import checkpoint, record, storage
from mmgrpo.checkpoint import MANIFEST, latest_checkpoint, load_checkpoint, prune_checkpoints, save_checkpoint
from mmgrpo.config import RLConfig, make_config
from mmgrpo.record import COMPLETE, RunDirectory
from mmgrpo.settings import InputError
from mmgrpo.storage import TEMP_PREFIX, Disk, append_line, read_folder, read_lines, write_file

DISK, UPDATES = Disk(fsync=os.fstat), 3
pytestmark = pytest.mark.goal('R3')


# --- a life, and what must be left of it

@functools.cache
def config(output, lr=1e-3): return make_config(dict(
    run=dict(name='run', output=str(output)), trainer=dict(max_updates=9, prompts_per_update=1), optimizer=dict(lr=lr)), RLConfig)
def tensors(n): return {'policy': {'w': torch.full((3,), float(n))}, 'optimizer': {'w/step': torch.tensor(float(n))}}
def state(n): return {'successful': n, 'attempted': n}
def line(n): return {'attempted': n, 'reward': n/4}


def life(output, disk=DISK, said=lambda **facts: None) -> None:
    "What a trainer writes from one start to the end, wherever the run is when it starts; `said` hears of what is done."
    with RunDirectory.open(config(output), disk) as run:
        said(claimed=True)
        if run.complete: return
        newest = latest_checkpoint(run.path)
        found = load_checkpoint(newest).state if newest else {'attempted': -1}
        done = found['attempted']
        run.pin('provenance.json', {'model': 'm'})
        said(pinned=True)
        if not (run.path/'reference').is_dir(): run.publish('reference', lambda temp: write_file(temp/'weights', b'first', disk), {})
        said(reference=True)
        if read_lines(run.path/'environment.jsonl')[-1:] != [{'torch': '2'}]: append_line(run.path/'environment.jsonl', {'torch': '2'}, disk)
        run.rewind(max(0, done), found.get('log'))
        for n in range(done + 1, UPDATES + 1):
            if n: run.log(line(n))
            path = save_checkpoint(run.path, tensors(n), state(n) | dict(log=run.log_seal()), n in (0, UPDATES), 'rolling', disk)
            said(saved=n)
            prune_checkpoints(path.parent, 1, path, disk)
        run.write_json('validation_start.json', {'accuracy': .5})
        run.publish('adapter', lambda temp: write_file(temp/'weights', b'last', disk), {'update': UPDATES})
        run.finish({'adapter': 'adapter', 'attempted': UPDATES, 'successful': UPDATES})
        said(finished=True)


def files(output) -> dict:
    "What a run is in the end, but for places."
    found = {p.relative_to(output).as_posix(): p.read_bytes() for p in Path(output).rglob('*') if p.is_file()}
    return {name: data for name, data in found.items() if not name.endswith(('config.json', '.run-lock'))}


def plain(groups) -> dict: return {name: {key: t.tolist() for key, t in held.items()} for name, held in groups.items()}


def recovers(output, said) -> None:
    "A start finds all that was said, right and whole, and nothing half."
    with RunDirectory.open(config(output), DISK) as run:
        assert run.resumed or not said.get('claimed'), 'the claim is lost'
        assert run.complete or not said.get('finished'), 'the end is lost'
        newest = latest_checkpoint(run.path)
        found = load_checkpoint(newest) if newest else None
        done = found.state['attempted'] if found else -1
        assert done >= said.get('saved', -1), f'checkpoint {said["saved"]} is lost, the newest is {done}'
        if found: assert {key: found.state[key] for key in state(0)} == state(done) and plain(found.tensors) == plain(tensors(done)), 'a checkpoint of something else'
        for name, content, sure in (('reference', b'first', said.get('reference')), ('adapter', b'last', run.complete)):
            if (run.path/name).exists() or sure: assert read_folder(run.path/name, COMPLETE)[1] == {'weights': content}
        if run.complete: return
        run.rewind(max(0, done), found and found.state['log'])
        assert run.records() == [line(n) for n in range(1, done + 1)], 'the log is not that of the checkpoint'
        if said.get('pinned'): refused(lambda: run.pin('provenance.json', {'model': 'other'}))
        assert not [p for folder in (run.path, run.path/'checkpoints') for p in folder.glob(f'{TEMP_PREFIX}*')]
    if said.get('claimed'): refused(lambda: RunDirectory.open(config(output, lr=.5), DISK))


def refused(start) -> None:
    try: start()
    except InputError: return
    raise AssertionError('what was recorded is lost: another start is let in')


def check(said, tree, place, wanted=None) -> None:
    "Lay a state out and recover from it; with `wanted`, also go on to the end, where these files must be."
    place.mkdir()
    try:
        recovers(lay_out(tree, place), said)
        if wanted is None: return
        life(place)
        assert files(place) == wanted
    finally: shutil.rmtree(place)


def recorded(folder, at=None, writer=life) -> Recorder:
    "A life below a new folder; one that dies before call `at` is followed by one that does not."
    folder.mkdir()
    recorder = Recorder(folder, at)
    try: writer(folder, recorder.disk(), recorder.said)
    except Died:
        recorder.at, recorder.start = None, len(recorder.ops)
        writer(folder, recorder.disk(), recorder.said)
    return recorder


@pytest.fixture(scope='module')
def life_alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp('alone')/'life'
    return recorded(folder), files(folder)


# --- every state is recovered from

def test_a_power_cut(ledger, life_alone, tmp_path):
    "At every call of a life; some of the states are gone on from to the end."
    recorder, wanted = life_alone
    states = list(crash_states(recorder.ops, random.Random(0), 4000 if TORTURE else 64))
    for i, (said, tree) in enumerate(states):
        check(said, tree, tmp_path/'state', wanted if i % 25 == 0 else None)
        ledger.fault('power cut')
    assert len(states) > 500


def test_a_kill_and_then_a_power_cut(ledger, life_alone, tmp_path):
    "The second process goes on from what the first left, part of which no disk has."
    calls, chance = life_alone[0].n, random.Random(1)
    for at in range(1, calls) if TORTURE else sorted(chance.sample(range(1, calls), 40)):
        first = recorded(tmp_path/f'life-{at}', at)
        assert files(tmp_path/f'life-{at}') == life_alone[1]
        states = list(crash_states(first.ops, chance, 24 if TORTURE else 16, first.start))
        for said, tree in chance.sample(states, min(len(states), 200 if TORTURE else 36)):
            check(said, tree, tmp_path/'state')
            ledger.fault('power cut after a kill')
        shutil.rmtree(tmp_path/f'life-{at}')


# --- the harness can fail: each of these writers is caught

def caught(ops, tmp_path) -> str:
    "What is wrong with the first state that cannot be recovered from."
    for said, tree in crash_states(ops, random.Random(0), 64):
        try: check(said, tree, tmp_path/'state')
        except (AssertionError, ValueError, OSError, RuntimeError) as error: return f'{type(error).__name__}: {error}'
    raise AssertionError('nothing is wrong with this writer')


def forgetful(ops, folders) -> list:
    "The calls of a disk that says that it has synced all files, or all directories, and has not."
    kinds = {0: 'folder'} | {op[3]: op[0] for op in ops if op[0] in ('file', 'folder')}
    return [op for op in ops if op[0] != 'fsync' or (kinds[op[1]] == 'folder') != folders]


def test_a_disk_that_lies(life_alone, tmp_path):
    "The harness can fail: a disk that does not sync what it says it has synced is found out."
    assert 'Error' in caught(forgetful(life_alone[0].ops, folders=False), tmp_path)
    assert 'Error' in caught(forgetful(life_alone[0].ops, folders=True), tmp_path)


def rename_first(temp, dest, disk):
    "Publish, and sync afterwards."
    disk.replace(temp, dest)
    storage.sync_directory(dest.parent, disk)
    for path in [*dest.iterdir(), dest]: storage.sync_directory(path, disk)
    return dest


def manifest_first(run_dir, tensors, state, permanent, reason, disk):
    "Write in place, and say that it is whole before it is."
    made = checkpoint.save_checkpoint(run_dir.parent.parent/'aside', tensors, state, permanent, reason, DISK)
    dest = storage.make_directory(run_dir/'checkpoints'/made.name, disk)
    for path in sorted(made.iterdir(), key=lambda path: path.name != MANIFEST): write_file(dest/path.name, path.read_bytes(), disk)
    storage.sync_directory(dest, disk)
    shutil.rmtree(made)
    return dest


def old_one_first(run_dir, tensors, state, permanent, reason, disk):
    "Make room, then save."
    old = latest_checkpoint(run_dir)
    if old and not permanent: storage.remove_directory(old, disk)
    return checkpoint.save_checkpoint(run_dir, tensors, state, permanent, reason, disk)


def in_place(path, data, disk=DISK):
    "Write over a file."
    fd = disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    disk.write(fd, data)
    disk.fsync(fd)
    disk.close(fd)
    storage.sync_directory(Path(path).parent, disk)


HERE = sys.modules[__name__]


@pytest.mark.parametrize('where, name, wrong, what', [
    (storage, 'publish_directory', rename_first, 'is not complete'), (HERE, 'save_checkpoint', manifest_first, 'has no MANIFEST'),
    (HERE, 'save_checkpoint', old_one_first, 'tells of updates'), (record, 'atomic_write', in_place, 'JSON'),
    (storage, 'sync_directory', lambda path, disk: None, 'not a run of ours')])
def test_a_wrong_writer(tmp_path, monkeypatch, where, name, wrong, what):
    "And so is each of five writers that leave out a step, or do it in another order."
    with monkeypatch.context() as patch:
        patch.setattr(where, name, wrong)
        ops = recorded(tmp_path/'life').ops
    found = caught(ops, tmp_path)
    assert what in found


def test_what_the_model_says():
    "A few calls, and all that they may leave."
    def left(*ops): return sorted({(tuple(sorted(tree.items()))) for _, tree in crash_states(ops, random.Random(0), 99) if tree} - {()})
    made, written = ('file', 0, 'a', 1), ('write', 1, 0, b'1234')
    assert {dict(tree)['a'] for tree in left(made, written)} == {b'', b'1234', b'12', b'\0\0\0\0', b'12\0\0', b'\0\x0034'}
    whole = made, written, ('fsync', 1), ('fsync', 0), ('file', 0, 'b', 2), ('rename', 0, 'b', 0, 'a'), ('fsync', 0)
    assert (('a', b'1234'),) in left(*whole) and (('a', b''),) in left(*whole) and (('a', b''), ('b', b'')) not in left(*whole)
    assert list(crash_states(whole, random.Random(0), 99, len(whole))) == [({}, {'a': b''})]
