"""Runs that are killed, interrupted, denied the disk, torn or tampered with: they end like one that was left alone, or refuse to go on.

`MMGRPO_TORTURE=1` is the nightly size. The last line says how many faults were injected and how many resumes were wrong."""
import errno
import os
import random
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
from faults import TORTURE, UPDATES, Trials, checkpoints, config, curves, outcome, result

from mmgrpo.checkpoint import latest_checkpoint, load_checkpoint
from mmgrpo.config import make_config
from mmgrpo.record import COMPLETE, RunDirectory, check_finished, rewind_log
from mmgrpo.storage import append_line, json_bytes, read_folder, read_lines

PAUSE = 3       # updates of the run that most tests go on with


def size(small, large): return large if TORTURE else small


@pytest.fixture(scope='module')
def trials(request, tmp_path_factory):
    made = Trials(tmp_path_factory.mktemp('faults'))
    yield made
    made.close()
    with request.config.pluginmanager.get_plugin('capturemanager').global_and_fixture_disabled(): print(f'\n{made.line()}')
    assert not made.wrong, made.wrong


@pytest.fixture(scope='module')
def straight(trials, tmp_path_factory):
    "The run that nobody disturbs: its life, its place, its outcome."
    run = tmp_path_factory.mktemp('straight')/'run'
    life = trials.ended(run)
    found = outcome(run)
    assert all(record['grad_norm'] > 0 for record in found['train_log.jsonl']), 'otherwise these tests would prove little'
    assert [number for number, _ in life.draws] == list(range(UPDATES))
    return life, run, found


@pytest.fixture(scope='module')
def paused(trials, straight, tmp_path_factory):
    "A run that stopped between two evaluations."
    run = tmp_path_factory.mktemp('paused')/'run'
    assert trials.ended(run, stop=PAUSE).lines[-1] == f'RL_PAUSED step={PAUSE}'
    return run


def copied(run, place) -> Path: return Path(shutil.copytree(run, place/'run', symlinks=True))


def follows(life, straight) -> None:
    "The batches of a life are those of the undisturbed run, from where it started and in their order."
    wanted = straight[0].draws[life.start or 0:][:len(life.draws)]
    assert life.draws == wanted, (life.start, life.draws, wanted)


def goes_on(trials, straight, run, kind, faults=1) -> None:
    "Start the run again until it is finished: everything is as if nothing had happened."
    if not (run/'summary.json').exists(): follows(trials.ended(run), straight)
    trials.judge(kind, run, outcome(run), straight[2], faults)
    assert curves(run) == curves(straight[1]), 'each point once'


# --- kills and signals

@pytest.mark.parametrize('number', range(size(8, 300)))
def test_kill_9_at_random(trials, straight, tmp_path, number):
    "At an instant, or right before a file changes; up to five times a run."
    chance, run, kills = random.Random(number), tmp_path/'run', 0
    for _ in range(chance.randint(1, 5)):
        at = dict(after=chance.uniform(0, straight[0].seconds)) if chance.random() < .5 else dict(change=chance.randint(1, straight[0].changes))
        life = trials.live(run, **at)
        follows(life, straight)
        assert life.code in (0, -signal.SIGKILL), life.err
        if life.code == 0: break
        kills += 1
    goes_on(trials, straight, run, 'SIGKILL', kills)


@pytest.mark.skipif(not TORTURE, reason='nightly')
def test_kill_9_before_each_change_of_a_file(trials, straight, tmp_path):
    for change in range(1, straight[0].changes + 1):
        run = tmp_path/str(change)/'run'
        assert trials.live(run, change=change).code == -signal.SIGKILL
        goes_on(trials, straight, run, 'SIGKILL')
        shutil.rmtree(run)


@pytest.mark.parametrize('number', range(size(4, 100)))
def test_a_signal_at_random(trials, straight, tmp_path, number):
    chance, run = random.Random(number), tmp_path/'run'
    sent = (signal.SIGTERM, signal.SIGINT)[number % 2]
    life = trials.live(run, after=chance.uniform(0, straight[0].seconds), signal=sent)
    follows(life, straight)
    if life.code: assert life.code in (128 + sent, -sent), life.err    # the latter before a handler is there
    goes_on(trials, straight, run, sent.name)


# --- the disk says no

@pytest.mark.parametrize('number', range(size(5, 300)))
def test_a_change_that_fails(trials, straight, tmp_path, number):
    "Once or from then on: the run ends with a line that names the place, or could do without; nothing is lost."
    chance, run = random.Random(number), tmp_path/'run'
    code = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EDQUOT)[number % 4]
    life = trials.live(run, change=chance.randint(1, straight[0].changes), error=code, lasting=chance.random() < .5)
    follows(life, straight)
    if life.code: assert life.code > 0 and str(run.parent) in life.err and os.strerror(code) in life.err and '.tmp-' not in life.err, life.err
    goes_on(trials, straight, run, errno.errorcode[code])


def files(run) -> dict: return {p: p.read_bytes() for p in run.rglob('*') if p.is_file()}


def test_a_read_only_directory(trials, straight, paused, tmp_path):
    run = copied(paused, tmp_path)
    before = files(run)
    life = trials.live(run, change=1, error=errno.EROFS, lasting=True)
    assert life.code > 0 and str(run) in life.err and 'Read-only file system' in life.err, life.err
    assert files(run) == before
    goes_on(trials, straight, run, 'read-only')


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
        trials.injected['tampered checkpoint'] += 1
    (newest/'sub').rmdir()
    with in_its_place(newest, lambda path, kept: path.symlink_to(kept)):
        with pytest.raises(ValueError, match='is a link'): latest_checkpoint(run)
    with in_its_place(newest, lambda path, kept: shutil.copytree(older, path)):
        with pytest.raises(ValueError, match='it was renamed'): latest_checkpoint(run)
        shutil.rmtree(newest)
    trials.injected['tampered checkpoint'] += 2
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
    refuses(trials, run/'config.json', tmp_path/'other'/'config.json', opens, 'config', link)
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
    trials.injected['tampered start'] += 1
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


# --- what must not matter

NO_EVALUATION = dict(evaluation=dict(at_start=False, at_end=False, every_updates=0))
VARIANTS = dict(
    saved_every_3=dict(checkpoint=dict(every_updates=3)), saved_at_the_end=dict(checkpoint=dict(every_updates=99)) | NO_EVALUATION,
    not_evaluated=NO_EVALUATION, evaluated_always=dict(evaluation=dict(every_updates=1)), no_curves=dict(logging=dict(tensorboard=False)),
    no_pictures=dict(logging=dict(pictures_every_updates=0)), one_checkpoint_kept=dict(checkpoint=dict(keep_latest=1)))


@pytest.mark.parametrize('name', VARIANTS)
def test_it_does_not_matter_when_a_run_is_saved_or_measured(trials, straight, tmp_path, name):
    follows(trials.ended(tmp_path/'run', VARIANTS[name]), straight)
    assert result(tmp_path/'run') == result(straight[1])


def test_a_restart_after_every_update(trials, straight, tmp_path):
    lives = [trials.ended(tmp_path/'run', stop=1) for _ in range(UPDATES)]
    assert [life.start for life in lives] == list(range(UPDATES))
    assert [draw for life in lives for draw in life.draws] == straight[0].draws
    goes_on(trials, straight, tmp_path/'run', 'restarts')


def test_a_model_that_was_just_loaded(trials, straight, tmp_path):
    "The other trials take the model that their parent loaded."
    trials.ended(tmp_path/'run', stop=2, cold=True)
    trials.ended(tmp_path/'run', cold=True)
    assert outcome(tmp_path/'run') == straight[2]


# --- where a run lies

def test_modes_follow_the_umask(trials, straight, tmp_path):
    run, seen = tmp_path/'run', set()
    for mask in (0o077, 0o027, 0o002):
        trials.ended(run, stop=1, umask=mask)
        new = {p for p in run.rglob('*')} - seen
        wrong = {p: oct(p.stat().st_mode) for p in new if p.stat().st_mode & 0o777 != (0o777 if p.is_dir() else 0o666) & ~mask}
        assert new and not wrong
        seen |= new
    goes_on(trials, straight, run, 'umask')


@pytest.mark.parametrize('name', ['tensorboard', 'checkpoints', 'pictures'])
def test_a_part_on_another_disk(trials, straight, paused, tmp_path, name):
    "A folder of the run is a link. Curves are written anew in the run; what is at the other end stays."
    run, elsewhere = copied(paused, tmp_path), tmp_path/'elsewhere'
    (run/name).rename(elsewhere)
    (run/name).symlink_to(elsewhere)
    before = files(elsewhere)
    goes_on(trials, straight, run, 'link')
    if name == 'tensorboard': assert files(elsewhere) == before


def test_a_copy_goes_on(trials, straight, paused, tmp_path):
    "With all times of change equal and in the future, and nothing touched where it was copied from."
    run, before = copied(paused, tmp_path), files(paused)
    for path in (run, *run.rglob('*')): os.utime(path, (4e9, 4e9))
    goes_on(trials, straight, run, 'copy')
    assert files(paused) == before
