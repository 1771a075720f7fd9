"""Runs that are torn or tampered with: they end like one that was left alone, or refuse to go on."""
import random
import shutil
from contextlib import contextmanager

import pytest
from faults import PAUSE, checkpoints, config, copied, files, follows, goes_on
from ledger import TORTURE, size

from mmgrpo.checkpoint import latest_checkpoint, load_checkpoint
from mmgrpo.config import make_config
from mmgrpo.record import COMPLETE, RunDirectory, check_finished, rewind_log
from mmgrpo.storage import append_line, json_bytes, read_folder, read_lines


# --- tampering

@contextmanager
def in_its_place(path, make):
    "Something else where a file was, for as long as the block lasts."
    away = path.rename(path.parent.parent/f'{path.name}.kept')
    try:
        make(path, away)
        yield
    finally:
        if path.is_dir() and not path.is_symlink(): path.rmdir()
        else: path.unlink(missing_ok=True)
        away.rename(path)


def forgeries(path, other, chance):
    "(what, how to make it) of wrong files for `path`; `other` is the same file of another step or run."
    data = path.read_bytes()
    edges = {*range(min(16, len(data))), *range(max(0, len(data) - 8), len(data))}
    places = edges | {chance.randrange(len(data)) for _ in range(size(24, 2000))}
    wrong = {f'bit {at}': data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1:] for at in sorted(places)}
    cuts = {0, 1, len(data)//2, len(data) - 1, *(range(0, len(data), 97) if TORTURE else ())}
    wrong |= {f'cut {at}': data[:at] for at in sorted(cuts)}
    wrong |= {'longer': data + b'\n', 'zero at the end': data + b'\0', 'twice': data + data, 'zeros': bytes(len(data))}
    if other is not None and other.read_bytes() != data: wrong['of another'] = other.read_bytes()
    for what, content in wrong.items(): yield what, lambda path, kept, content=content: path.write_bytes(content)
    yield 'removed', lambda path, kept: None
    yield 'link', lambda path, kept: path.symlink_to(kept)
    yield 'folder', lambda path, kept: path.mkdir()


def refuses(trials, path, other, check, kind, harmless=()) -> int:
    "Each forgery of a file makes `check` fail with a name from its folder, and nothing else does."
    check()
    cases = 0
    for what, make in forgeries(path, other, random.Random(str(path.name))):
        with in_its_place(path, make):
            try: found = check()
            except (ValueError, RuntimeError, OSError) as error: refused = str(path.parent) in str(error)
            else: refused = what in harmless and harmless[what](found)
        trials.judge(f'tampered {kind}', f'{path} ({what})', dict(refused=refused), dict(refused=True))
        cases += 1
    check()
    return cases


def test_tampering_with_a_checkpoint(trials, paused, tmp_path):
    run = copied(paused, tmp_path)
    *_, older, newest = checkpoints(run)
    assert {p.name for p in newest.iterdir()} == {'MANIFEST', 'policy.safetensors', 'optimizer.safetensors', 'state.json'}
    uncommitted = dict.fromkeys(('removed', 'folder'), lambda found: found == older)     # without a manifest it never happened
    for path in sorted(newest.iterdir()):
        refuses(trials, path, older/path.name, lambda: latest_checkpoint(run), 'checkpoint', uncommitted if path.name == 'MANIFEST' else {})
    for name in ('extra', '.hidden', 'sub/extra'):
        (newest/name).parent.mkdir(exist_ok=True)
        (newest/name).write_bytes(b'')
        with pytest.raises(ValueError, match='does not belong there'): latest_checkpoint(run)
        (newest/name).unlink()
        trials.ledger.fault('tampered checkpoint')
    (newest/'sub').rmdir()
    with in_its_place(newest, lambda path, kept: path.symlink_to(kept)):
        with pytest.raises(ValueError, match='is a link'): latest_checkpoint(run)
    with in_its_place(newest, lambda path, kept: shutil.copytree(older, path)):
        with pytest.raises(ValueError, match='it was renamed'): latest_checkpoint(run)
        shutil.rmtree(newest)
    trials.ledger.fault('tampered checkpoint', 2)
    assert load_checkpoint(latest_checkpoint(run)).state['attempted'] == PAUSE


def test_tampering_with_an_adapter(trials, straight, tmp_path):
    run = copied(straight[1], tmp_path)
    cfg = make_config(config(trials.folder, run))
    for path in sorted((run/'adapter').iterdir()):
        refuses(trials, path, run/'reference'/path.name if path.name == COMPLETE else None, lambda: check_finished(run, cfg), 'adapter')
    for path in sorted((run/'reference').iterdir()):
        refuses(trials, path, None, lambda: read_folder(run/'reference', COMPLETE), 'reference')


def test_tampering_with_claim_and_config(trials, paused, tmp_path):
    run = copied(paused, tmp_path)
    cfg, other = (make_config(config(trials.folder, place, dict(optimizer=dict(lr=lr)))) for place, lr in ((run, .01), (tmp_path/'other', .02)))
    RunDirectory.open(other).close()

    def opens():
        with RunDirectory.open(cfg) as opened: assert opened.resumed

    link = {'link': lambda found: True}                                                  # the same content, only reached by a link
    refuses(trials, run/'.run-claim.json', tmp_path/'other'/'.run-claim.json', opens, 'claim', link)
    again = {'removed': lambda found: True}                                              # written again: the claim still binds it
    refuses(trials, run/'config.json', tmp_path/'other'/'config.json', opens, 'config', link | again)
    changed = make_config(config(trials.folder, run, dict(optimizer=dict(lr=.02))))
    with in_its_place(run/'config.json', lambda path, kept: None):
        with pytest.raises(ValueError, match='belongs to config'): RunDirectory.open(changed)


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
    if size(name in ('policy.safetensors', '.run-claim.json'), True): goes_on(trials, straight, run, 'tampered start', 0)


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

def test_a_log_torn_at_every_byte(trials, straight, paused, tmp_path):
    "What a killed process had logged after its last checkpoint is dropped and logged again; whole lines before it stay."
    path, lines = tmp_path/'train_log.jsonl', (straight[1]/'train_log.jsonl').read_bytes().splitlines(keepends=True)
    lines = [*lines[:PAUSE], *(json_bytes({'attempted': n, 'word': 'größer'}) for n in range(PAUSE + 1, PAUSE + 4))]
    kept = b''.join(lines[:PAUSE])
    records = [read for read in read_lines(straight[1]/'train_log.jsonl')][:PAUSE]
    for at in range(len(kept), len(b''.join(lines)) + 1):
        path.write_bytes(b''.join(lines)[:at])
        found = rewind_log(path, PAUSE)
        trials.judge('torn log', f'byte {at}', dict(lines=found, data=path.read_bytes()), dict(lines=records, data=kept))
        path.write_bytes(b''.join(lines)[:at])
        whole = path.read_bytes().count(b'\n')
        append_line(path, {'attempted': 99})
        assert [r['attempted'] for r in read_lines(path)] == [*range(1, whole + 1), 99]


@pytest.mark.parametrize('missing', size([1, 40, 0], range(0, 2000, 7)))
def test_a_run_with_a_torn_log_goes_on(trials, straight, paused, tmp_path, missing):
    run, lines = copied(paused, tmp_path), (straight[1]/'train_log.jsonl').read_bytes().splitlines(keepends=True)
    more = b''.join(lines[PAUSE:])
    with (run/'train_log.jsonl').open('ab') as log: log.write(more[:max(0, len(more) - missing)])
    goes_on(trials, straight, run, 'torn log')


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
