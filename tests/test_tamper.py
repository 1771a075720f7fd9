"""Files of a run, an adapter or a cache that somebody changed: each is refused by its name, or what it holds is exactly what was written.

`MMGRPO_TORTURE=1` is the nightly size."""
import errno
import os
import random
import shutil
import signal
import stat
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from faults import PAUSE, checkpoints, copied, files, follows, goes_on
from ledger import TORTURE
from tiny import made, train  # noqa: F401

from mmgrpo.checkpoint import find_checkpoint, latest_checkpoint, load_checkpoint
from mmgrpo.data import PackedTrajectoryCache
from mmgrpo.record import COMPLETE, RunDirectory, check_finished, rewind_log
from mmgrpo.settings import InputError
from mmgrpo.storage import StorageError, append_line, json_bytes, parse_json, publish_folder, read_folder, read_lines, write_file

REFUSALS = (ValueError, RuntimeError, FileNotFoundError)      # what the command turns into one line
pytestmark = pytest.mark.goal('R4')


# --- what is read, and how

def content(checkpoint): return checkpoint.path.name, checkpoint.state, {
    group: {name: t.tolist() for name, t in held.items()} for group, held in checkpoint.tensors.items()}


def newest(run): return content(load_checkpoint(latest_checkpoint(run)))


def folder(path): return lambda run: read_folder(run/path, COMPLETE)


@dataclass(frozen=True)
class Target:
    "A file, what reads it, and the file that could be put in its place."
    name:str          # from the run's folder, or 'cache/...'
    read:object       # run -> a value that can be compared; raises where the file is refused
    other:Path|None=None


def targets(made, run, done) -> list[Target]:
    "Every file whose bytes a start, or whoever takes the adapter, relies on."
    own, config = checkpoints(run), made.config(run)
    name, older = own[-1].name, own[-2].name
    found = [Target(f'checkpoints/{name}/{p.name}', newest, own[-2]/p.name) for p in sorted(own[-1].iterdir())]
    found += [Target(f'checkpoints/{older}/{p.name}', lambda run: content(load_checkpoint(run/'checkpoints'/older)),
                     made.other/'checkpoints'/older/p.name) for p in sorted(own[-2].iterdir())]
    found += [Target(f'reference/{p.name}', folder('reference'), done/'adapter'/p.name if p.name == COMPLETE else own[-1]/'policy.safetensors')
              for p in sorted((run/'reference').iterdir())]
    found += [Target(name, lambda run: opened(config), made.other/name) for name in ('.run-claim.json', 'config.json')]
    found.append(Target('provenance.json', lambda run: pinned(config, made), made.other/'config.json'))
    return found


def opened(config):
    with RunDirectory.open(config) as run: return run.resumed, sorted(p.name for p in run.path.iterdir())


def pinned(config, made):
    with RunDirectory.open(config) as run:
        run.pin('provenance.json', PROVENANCE)
        return True


PROVENANCE = {}


@pytest.fixture(scope='module')
def places(made, tmp_path_factory):
    "Copies to spoil: of the paused run, of the finished one, and of the cache."
    place = tmp_path_factory.mktemp('tamper')
    paused, done = (made.copy(name, place/name) for name in ('paused', 'done'))
    held = parse_json((paused/'provenance.json').read_bytes(), 'provenance.json')
    PROVENANCE.update({key: value for key, value in held.items() if key != 'digest'})
    return paused, done, Path(shutil.copytree(made.folder/'cache', place/'cache'))


# --- forgeries

@contextmanager
def in_its_place(path, make):
    "Something else where a file or folder was, for as long as the block lasts."
    away = path.rename(path.parent.parent.parent/f'{path.name}.kept')
    try:
        make(path, away)
        yield
    finally:
        if path.is_dir() and not path.is_symlink(): shutil.rmtree(path)
        else: path.unlink(missing_ok=True)
        away.rename(path)


def bytes_to_change(name, data, most, chance) -> list:
    "Positions: the beginning and the end, each byte of the header as far as `most` lets them, and 64 of the rest."
    header = 8 + int.from_bytes(data[:8], 'little') if name.endswith('.safetensors') else min(512, len(data))
    near = {*range(min(16, len(data))), *range(max(0, len(data) - 8), len(data))}
    rest = {chance.randrange(header, len(data)) for _ in range(64 if len(data) > header else 0)}
    wanted = max(0, most - len(near | rest))
    inside = chance.sample(range(header), min(wanted, header))
    return sorted(near | rest | set(inside))


def forgeries(target, path, chance):
    "(what, its bytes, how to make it where that takes more than bytes)."
    data = path.read_bytes()
    for at in bytes_to_change(path.name, data, 2000 if TORTURE else 160, chance):
        for bit in chance.sample(range(8), 3 if TORTURE else 1): yield f'bit {bit} of byte {at}', data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1:]
    for at in sorted({0, 1, len(data)//2, len(data) - 1, *range(0, len(data), 512 if TORTURE else 4096)}): yield f'cut at {at}', data[:at]
    for what, end in {'a line': b'\n', 'a zero': b'\0', 'itself': data, 'a page': bytes(4096)}.items(): yield f'longer by {what}', data + end
    yield 'zeros', bytes(len(data))
    yield 'turned round', data[::-1]
    if target.other is not None and target.other.read_bytes() != data: yield 'of another', target.other.read_bytes()


def judged(ledger, target, run, what, wanted, harmless=False) -> None:
    "A file in its forged state is refused by a line that names its folder at least, or what is read is what was written."
    ledger.fault(f'tampered {target.name.partition("/")[0].lstrip(".")}')
    try: found = target.read(run)
    except REFUSALS as error:
        line = str(error)
        assert str((run/target.name).parent) in line and '\n' not in line, f'{target.name} ({what}): {line}'
        assert not harmless, f'{target.name} ({what}) is refused: {line}'
        return
    assert harmless, f'{target.name} ({what}) is not refused'
    assert found == wanted, f'{target.name} ({what}) is read as something else'


def tampered(ledger, target, run) -> int:
    "All forgeries of the bytes of a file, one after the other."
    path, chance = run/target.name, random.Random(target.name)
    data, wanted, cases = path.read_bytes(), target.read(run), 0
    for what, forged in forgeries(target, path, chance):
        if forged == data: continue
        path.write_bytes(forged)
        judged(ledger, target, run, what, wanted)
        cases += 1
    path.write_bytes(data)
    assert target.read(run) == wanted
    return cases


def test_changed_bytes(ledger, made, places):
    "In every file that a start relies on: bits, cuts, growth, the same file of another step or run."
    run, done, cache = places
    cases = sum(tampered(ledger, target, run) for target in targets(made, run, done))
    finished = made.config(done)
    cases += sum(tampered(ledger, Target(f'adapter/{p.name}', lambda run: check_finished(run, finished)), done) for p in sorted((done/'adapter').iterdir()))
    cases += sum(tampered(ledger, Target(p.name, lambda cache: PackedTrajectoryCache(cache).fingerprint), cache) for p in sorted(cache.iterdir()))
    assert cases > 2000


# --- what is no file, or not the only one

@contextmanager
def within(seconds, what):
    "Fail when the block takes longer, even where it waits for ever."
    def ring(*args): raise AssertionError(f'{what}: it hangs')
    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try: yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def huge(path, kept):
    "A file of a terabyte, none of it on the disk."
    with path.open('wb') as file: file.truncate(2**40)


def device(minor): return lambda path, kept: os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, minor))


NO_FILES = dict(removed=lambda path, kept: None, link=lambda path, kept: path.symlink_to(kept), dangling=lambda path, kept: path.symlink_to('nowhere'),
                folder=lambda path, kept: path.mkdir(), fifo=lambda path, kept: os.mkfifo(path), huge=huge)
DEVICES = dict(null=device(3), endless=device(5))
BESIDE = dict(hard_link=lambda path, kept: os.link(kept, path))


def replaced(ledger, target, run, kinds, harmless=()) -> None:
    "Each of these in the place of a file; those in `harmless` are let pass if nothing else is read."
    wanted = target.read(run)
    for what, make in kinds.items():
        path = run/target.name
        with in_its_place(path, make), within(20, f'{target.name} ({what})'): judged(ledger, target, run, what, wanted, what in harmless)
    assert target.read(run) == wanted


def sorts(made, places):
    "(target, where, what passes for the file itself) of every kind of file."
    run, done, cache = places
    for target in targets(made, run, done):
        name = target.name.rpartition('/')[2]
        linked = ['link'] * (name in ('.run-claim.json', 'config.json', 'provenance.json'))      # the bytes are what counts
        yield target, run, ['hard_link', *linked]
    for path in sorted((done/'adapter').iterdir()): yield Target(f'adapter/{path.name}', lambda run: check_finished(run, made.config(done))), done, ['hard_link']
    for path in sorted(cache.iterdir()): yield Target(path.name, lambda cache: PackedTrajectoryCache(cache).fingerprint), cache, ['hard_link', 'link']


def test_what_is_no_file(ledger, made, places):
    "Nothing hangs on it, nothing is read through a link out of a checkpoint."
    for target, where, harmless in sorts(made, places):
        if target.name.endswith('MANIFEST') and target.read == newest: continue
        kinds = NO_FILES | BESIDE | (DEVICES if os.geteuid() == 0 else {})
        if not target.name.endswith(('.safetensors', 'state.json', 'adapter_config.json')): del kinds['huge']       # nobody says how large a list is
        if target.name in ('config.json', 'provenance.json'): kinds = {what: make for what, make in kinds.items() if what not in ('removed', 'dangling')}
        replaced(ledger, target, where, kinds, harmless)


def test_a_huge_list(ledger, made, places):
    "A manifest or a claim of a terabyte is not read."
    for target, where, _ in sorts(made, places):
        if target.name.endswith(('MANIFEST', 'COMPLETE', 'claim.json', 'config.json', 'provenance.json', 'cache.json')):
            replaced(ledger, target, where, dict(huge=huge))


def test_a_checkpoint_without_a_manifest_is_passed_over(ledger, made, places):
    "It never happened; the one before is loaded, and it is what was written."
    run = places[0]
    *_, older, last = checkpoints(run)
    before = content(load_checkpoint(older))
    for what in ('removed', 'dangling', 'folder', 'fifo'):
        with in_its_place(last/'MANIFEST', NO_FILES[what]), within(20, what): assert newest(run) == before
        ledger.fault('tampered checkpoints', 1)
    with in_its_place(last/'MANIFEST', NO_FILES['link']), pytest.raises(ValueError, match='is a link'): latest_checkpoint(run)


def test_a_file_too_many(ledger, places):
    "Refused by its name."
    run = places[0]
    last = checkpoints(run)[-1]
    for name in ('extra', '.hidden', 'policy.safetensors.bak', 'sub/extra', 'pickle.pkl'):
        (last/name).parent.mkdir(exist_ok=True)
        (last/name).write_bytes(b'')
        with pytest.raises(ValueError, match=f'{name} does not belong there'): latest_checkpoint(run)
        (last/name).unlink()
        ledger.fault('tampered checkpoints', 1)
    (last/'sub').rmdir()


def test_a_whole_checkpoint_in_the_place_of_another(ledger, made, places):
    "Sound, but of another step or run."
    run, done, _ = places
    *_, older, last = checkpoints(run)
    wanted = newest(run)
    with in_its_place(last, lambda path, kept: path.symlink_to(kept)), pytest.raises(ValueError, match='is a link'): latest_checkpoint(run)
    with in_its_place(last, lambda path, kept: shutil.copytree(older, path)), pytest.raises(ValueError, match='it was renamed'): latest_checkpoint(run)
    with in_its_place(last, lambda path, kept: shutil.copytree(done/'adapter', path)): assert newest(run)[0] == older.name, 'no manifest of ours'
    with in_its_place(last, lambda path, kept: path.mkdir()): assert newest(run)[0] == older.name
    with in_its_place(last, lambda path, kept: path.write_bytes(b'')): assert newest(run)[0] == older.name
    junk = last.with_name('update-999999-attempt-999999')
    junk.mkdir()
    assert newest(run) == wanted, 'a name makes no checkpoint'
    junk.rmdir()
    ledger.fault('tampered checkpoints', 6)


def test_a_checkpoint_of_a_run_with_another_config(made, tmp_path, monkeypatch):
    "It is whole, has the right name and the same reference; only the learning rate was another."
    run = made.copy('paused', tmp_path)
    last = checkpoints(run)[-1]
    shutil.rmtree(last)
    shutil.copytree(made.other/'checkpoints'/last.name, last)
    with pytest.raises((ValueError, RuntimeError), match=last.name): train(made.config(run), stop_after_updates=1)


def test_a_reference_of_another_run(made, tmp_path):
    "The weights that the penalty is measured from are those of the start, and no others."
    run, policy = made.copy('paused', tmp_path), checkpoints(made.paused)[-1]/'policy.safetensors'
    fill = lambda temp: write_file(temp/'reference.safetensors', policy.read_bytes())
    publish_folder(run/'reference', fill, COMPLETE, dict(read_folder(run/'reference', COMPLETE)[0]), replace=True)
    with pytest.raises((ValueError, RuntimeError), match='reference'): train(made.config(run), stop_after_updates=1)


# --- falling back, where the config says so

def test_a_damaged_checkpoint_is_passed_over_where_that_is_asked_for(ledger, made, places):
    "Whatever happened to the newest, the one before is loaded, and it is what was written; the damage is told."
    run, chance = places[0], random.Random(0)
    *_, older, last = checkpoints(run)
    wanted = content(load_checkpoint(older))
    for path in sorted(last.iterdir()):
        data = path.read_bytes()
        for at in chance.sample(range(len(data)), min(len(data), 400 if TORTURE else 12)):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1:])
            found = find_checkpoint(run, 'fall_back')
            assert content(load_checkpoint(found.path)) == wanted
            assert [skipped.name for skipped, _ in found.skipped] == [last.name] and str(path) in found.skipped[0][1]
            ledger.fault('tampered checkpoints')
        path.write_bytes(data)
    assert find_checkpoint(run, 'fall_back').path == last


@pytest.mark.parametrize('code', ['EIO', 'EBADMSG', 'EUCLEAN', 'EACCES'])
@pytest.mark.parametrize('name', ['state.json', 'policy.safetensors', 'MANIFEST'])
def test_a_bad_sector_in_a_checkpoint(ledger, made, tmp_path, monkeypatch, name, code):
    "What the disk has lost is damage, and the one before is taken where that is asked for; what may not be read is not lost. Pruning leaves it."
    run, whole = made.copy('paused', tmp_path), Path.read_bytes
    lost = checkpoints(run)[-1]/name

    def read(path):
        if path == lost: raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)), str(path))
        return whole(path)
    monkeypatch.setattr(Path, 'read_bytes', read)
    falls = made.config(run, dict(checkpoint=dict(damaged='fall_back', every_updates=9)))
    with pytest.raises(StorageError if code == 'EACCES' else InputError, match=f'cannot read {lost}'): train(made.config(run))
    if code == 'EACCES':
        with pytest.raises(StorageError, match=f'cannot read {lost}'): train(falls)
        monkeypatch.undo()
        return ledger.fault('a file that may not be read')
    lines = train(falls)
    assert lines[0].startswith(f'RL_CHECKPOINT_SKIPPED {lost.parent.name}: cannot read {lost}: ') and 'checkpoint=update-000002' in lines[1]
    assert (run/'adapter'/'adapter_model.safetensors').read_bytes() == (made.done/'adapter'/'adapter_model.safetensors').read_bytes()
    assert lost.exists(), 'evidence, not rubbish'
    ledger.fault('a bad sector')


def test_nothing_sound_is_left_to_fall_back_to(ledger, made, places, tmp_path):
    "It is never a fresh start over a run that was there."
    run = Path(shutil.copytree(places[0], tmp_path/'run'))
    for folder in checkpoints(run):
        (folder/'policy.safetensors').write_bytes(b'')
        ledger.fault('tampered checkpoints')
    before = files(run)
    for damaged in ('refuse', 'fall_back'):
        with pytest.raises(REFUSALS, match='policy.safetensors'): train(made.config(run, dict(checkpoint=dict(damaged=damaged))))
    after = files(run)
    assert {p.name for p in before.keys() | after.keys() if before.get(p) != after.get(p)} <= {'.run-lock'}


def test_a_run_that_falls_back_ends_like_one_that_did_not(trials, straight, paused, tmp_path):
    "With checkpoint.damaged: fall_back, from the checkpoint before the damaged one."
    run = copied(paused, tmp_path)
    *_, older, last = checkpoints(run)
    path = last/'optimizer.safetensors'
    path.write_bytes(path.read_bytes()[:-1])
    life = trials.ended(run, dict(checkpoint=dict(damaged='fall_back')))
    follows(life, straight)
    assert life.start == load_checkpoint(older).state['attempted'] < PAUSE
    assert any(last.name in line for line in [*life.lines, *life.err.splitlines()]), 'the damage is told'
    assert (run/'adapter'/'adapter_model.safetensors').read_bytes() == (straight.run/'adapter'/'adapter_model.safetensors').read_bytes()
    trials.ledger.fault('tampered start')


# --- the command

@pytest.mark.parametrize('name', ['policy.safetensors', 'optimizer.safetensors', 'state.json', 'MANIFEST', 'reference/reference.safetensors',
                                  'reference/COMPLETE', 'provenance.json', 'config.json', '.run-claim.json'])
def test_the_command_refuses_what_was_tampered_with(trials, straight, paused, tmp_path, name):
    "One line, which names the file, and nothing has changed; with the file back the run goes on."
    run = copied(paused, tmp_path)
    path = run/name if (run/name).exists() else checkpoints(run)[-1]/name
    data = path.read_bytes()
    path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    before = files(run)
    life = trials.live(run)
    assert life.code in (1, 2) and len(life.err.splitlines()) == 1 and str(path) in life.err and not life.draws, life.err
    after = files(run)
    assert {p for p in before.keys() | after.keys() if before.get(p) != after.get(p)} <= {run/'.run-lock'}
    trials.ledger.fault('tampered start')
    path.write_bytes(data)
    if TORTURE or name in ('policy.safetensors', '.run-claim.json'): goes_on(trials, straight, run, 'tampered start', 0)


def test_a_checkpoint_without_a_manifest_never_happened(trials, straight, paused, tmp_path):
    "As after a copy that was broken off: the run goes on from the one before, and makes it again."
    run = copied(paused, tmp_path)
    *_, newest = checkpoints(run)
    for name in ('MANIFEST', 'state.json'): (newest/name).unlink()
    life = trials.live(run)
    follows(life, straight)
    assert (life.code, life.start) == (0, PAUSE - 1), life.err
    goes_on(trials, straight, run, 'lost manifest')


# --- the log

@pytest.mark.goal('R11')
def test_a_log_torn_at_every_byte(trials, straight, paused, tmp_path):
    "What a killed process had logged after its last checkpoint is dropped and logged again; whole lines before it stay."
    path, lines = tmp_path/'train_log.jsonl', (straight[1]/'train_log.jsonl').read_bytes().splitlines(keepends=True)
    lines = [*lines[:PAUSE], *(json_bytes({'attempted': n, 'word': 'größer'}) for n in range(PAUSE + 1, PAUSE + 4))]
    kept = b''.join(lines[:PAUSE])
    records = [read for read in read_lines(straight[1]/'train_log.jsonl')][:PAUSE]
    for at in range(len(kept), len(b''.join(lines)) + 1):
        path.write_bytes(b''.join(lines)[:at])
        rewind_log(path, PAUSE)
        trials.judge('torn log', f'byte {at}', dict(lines=read_lines(path), data=path.read_bytes()), dict(lines=records, data=kept))
        path.write_bytes(b''.join(lines)[:at])
        whole = path.read_bytes().count(b'\n')
        append_line(path, {'attempted': 99})
        assert [r['attempted'] for r in read_lines(path)] == [*range(1, whole + 1), 99]


@pytest.mark.goal('R11')
@pytest.mark.parametrize('missing', range(0, 2000, 7) if TORTURE else (0, 1, 40))
def test_a_run_with_a_torn_log_goes_on(trials, straight, paused, tmp_path, missing):
    "Cut somewhere behind the last checkpoint: the end is that of the undisturbed run."
    run, lines = copied(paused, tmp_path), (straight[1]/'train_log.jsonl').read_bytes().splitlines(keepends=True)
    more = b''.join(lines[PAUSE:])
    with (run/'train_log.jsonl').open('ab') as log: log.write(more[:max(0, len(more) - missing)])
    goes_on(trials, straight, run, 'torn log')


@pytest.mark.goal('R11')
def test_a_line_that_a_checkpoint_has_is_missed(trials, straight, paused, tmp_path):
    "It was on the disk before the checkpoint was: somebody cut the log. An older checkpoint and the log still make a run."
    run = copied(paused, tmp_path)
    log, newest = run/'train_log.jsonl', checkpoints(run)[-1]
    data = log.read_bytes()
    log.write_bytes(data[:-5])
    life = trials.live(run)
    assert life.code in (1, 2) and str(log) in life.err and not life.draws, life.err
    assert log.read_bytes() == data[:-5]
    shutil.move(newest, tmp_path/newest.name)
    goes_on(trials, straight, run, 'cut log')
