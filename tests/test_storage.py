"""What a notebook cannot show of storage: every system call of a commit fails or is the last one, and the old state or the new one is there."""
import errno, os, signal, time
from pathlib import Path

import pytest
import torch

from mmgrpo.checkpoint import damage, find_checkpoint, latest_checkpoint, load_checkpoint, prune_checkpoints, save_checkpoint
from mmgrpo.config import RLConfig, make_config
from mmgrpo.record import CLAIM, LogSeal, RunDirectory, claim_run_directory, is_claimed, read_sealed, rewind_log
from mmgrpo.settings import InputError
from mmgrpo.storage import (TEMP_PREFIX, Disk, StorageError, append_line, atomic_write, filling, read_lines, sweep_orphans, sweep_temps,
                            write_file)

CALLS = tuple(Disk.__dataclass_fields__)
DISK = Disk(fsync=os.fstat)      # processes die here, the power does not: a sync is counted, and need not be waited for


class Died(BaseException):
    "The process is gone: nothing after this call happens, clean-up included."


class Counting:
    "A disk that counts its calls, and at call `at` does something else; after a death every call dies."
    def __init__(self, at=None, fault=None): self.n, self.at, self.fault, self.names = 0, at, fault, []

    def disk(self): return Disk(**{name: self.wrap(name, getattr(DISK, name)) for name in CALLS})

    def wrap(self, name, real):
        def call(*args):
            self.n += 1
            self.names.append(name)
            if self.at is None or self.n < self.at or (self.n > self.at and self.fault not in (dead, dead_after)): return real(*args)
            return self.fault(real, *args)
        return call


def failing(code):
    def fault(real, *args): raise OSError(code, os.strerror(code))
    fault.__name__ = errno.errorcode[code]
    return fault
def dead(real, *args): raise Died
def dead_after(real, *args):
    real(*args)                            # the disk got it, the process did not hear of it
    raise Died
def half(real, *args):
    "A short write, then the disk is full; other calls fail at once."
    if real is os.write: os.write(args[0], args[1][:len(args[1])//2])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

FAULTS = [failing(errno.EIO), failing(errno.ENOSPC), failing(errno.EDQUOT), half, dead, dead_after]


def tensors(n): return {'adapter': {'w': torch.full((3,), float(n))}, 'optimizer': {'w/step': torch.tensor(float(n))}}
def state(n): return {'successful': n, 'attempted': n}
def config(folder, **sections):
    base = dict(run=dict(name='demo', output=str(folder)), trainer=dict(max_updates=9, prompts_per_update=1), optimizer=dict(lr=1e-3))
    return make_config({**base, **sections}, RLConfig)


def commit(run_dir, n, disk):
    "What a trainer does after an update: log it, save it, remove the old ones."
    run_dir.mkdir(parents=True, exist_ok=True)
    append_line(run_dir/'train_log.jsonl', {'attempted': n}, disk)
    path = save_checkpoint(run_dir, tensors(n), state(n), disk=disk)
    prune_checkpoints(run_dir/'checkpoints', 1, path, disk)


def held(run_dir):
    "The update that a new start would go on from; all of its parts must be of that update."
    found = load_checkpoint(latest_checkpoint(run_dir))
    values = {found.state['attempted'], *(int(t.flatten()[0]) for group in found.tensors.values() for t in group.values())}
    assert len(values) == 1, f'parts of updates {values}'
    return values.pop()


def calls_of_a_commit(folder):
    counting = Counting()
    commit(folder, 1, DISK); commit(folder, 2, counting.disk())
    return counting.names


def test_each_call_of_a_commit_fails_or_is_the_last(tmp_path):
    names = calls_of_a_commit(tmp_path/'count')
    assert {'open', 'write', 'fsync', 'close', 'replace', 'mkdir', 'unlink', 'rmdir'} <= set(names) and len(names) > 40
    cases = 0
    for fault in FAULTS:
        for at in range(1, len(names) + 1):
            run_dir = tmp_path/f'{fault.__name__}-{at}'
            commit(run_dir, 1, DISK)
            with pytest.raises((StorageError, Died)) as raised: commit(run_dir, 2, Counting(at, fault).disk())
            if raised.type is StorageError: assert str(run_dir) in str(raised.value) and TEMP_PREFIX not in str(raised.value)
            assert held(run_dir) in (1, 2)
            # the next start: sweep, rewind, go on
            for folder in (run_dir, run_dir/'checkpoints'): sweep_temps(folder, DISK)
            assert [r['attempted'] for r in read_lines(run_dir/'train_log.jsonl')] in ([1], [1, 2])
            if held(run_dir) == 1: save_checkpoint(run_dir, tensors(2), state(2), disk=DISK)
            commit(run_dir, 3, DISK)
            assert held(run_dir) == 3 and read_lines(run_dir/'train_log.jsonl')[-1] == {'attempted': 3}
            assert [p.name for p in run_dir.iterdir() if p.name.startswith(TEMP_PREFIX)] == []
            cases += 1
    assert cases == len(FAULTS)*len(names)


@pytest.mark.parametrize('fault', FAULTS, ids=lambda f: f.__name__)
def test_a_file_is_old_or_new(tmp_path, fault):
    path, counting = tmp_path/'summary.json', Counting()
    atomic_write(path, b'old'); atomic_write(path, b'old', counting.disk())
    for at in range(1, counting.n + 1):
        atomic_write(path, b'old')
        try: atomic_write(path, b'new', Counting(at, fault).disk())
        except (StorageError, Died): pass
        assert path.read_bytes() in (b'old', b'new')


@pytest.mark.parametrize('code', [errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.EFBIG])
def test_an_error_that_lasts_is_named_and_nothing_is_lost(tmp_path, code):
    "Every call of one kind fails from now on, as on a full or read-only disk."
    commit(tmp_path, 1, DISK)
    for name in CALLS:
        if name in ('truncate', 'link', 'unlink', 'rmdir', 'statvfs'): continue                     # not part of saving
        def fault(*args): raise OSError(code, os.strerror(code))
        with pytest.raises(StorageError, match=str(tmp_path)) as raised:
            save_checkpoint(tmp_path, tensors(2), state(2), disk=Disk(**{name: fault}))
        assert held(tmp_path) == 1 and TEMP_PREFIX not in str(raised.value)
        assert names_in(tmp_path) == NAMES[1:2] or name in ('open', 'close'), 'what failed takes no room'
        sweep_temps(tmp_path/'checkpoints')


NAMES = [f'update-{n:06d}-attempt-{n:06d}' for n in range(12)]
def commit_all(run_dir, n): return save_checkpoint(run_dir, tensors(n), state(n), disk=DISK)
def names_in(run_dir): return sorted(p.name for p in (run_dir/'checkpoints').iterdir())


@pytest.mark.parametrize('fault', FAULTS, ids=lambda f: f.__name__)
def test_a_damaged_checkpoint_is_replaced_whole_or_not_at_all(tmp_path, fault):
    "The run fell back before a damaged one and saves that update again: at each instant an older one is there, or the new one is."
    def damaged(run_dir):
        for n in (1, 2): commit_all(run_dir, n)
        (run_dir/'checkpoints'/NAMES[2]/'adapter.safetensors').write_bytes(b'bad')
        return find_checkpoint(run_dir, 'fall_back')

    counting = Counting()
    assert [path.name for path, _ in damaged(tmp_path/'count').skipped] == [NAMES[2]]
    save_checkpoint(tmp_path/'count', tensors(2), state(2), disk=counting.disk())
    assert held(tmp_path/'count') == 2
    for at in range(1, counting.n + 1):
        run_dir = tmp_path/str(at)
        damaged(run_dir)
        try: save_checkpoint(run_dir, tensors(2), state(2), disk=Counting(at, fault).disk())
        except (StorageError, Died): pass
        sweep_temps(run_dir/'checkpoints', DISK)
        found = load_checkpoint(find_checkpoint(run_dir, 'fall_back').path)
        assert found.path.name in NAMES[1:3] and found.tensors['adapter']['w'][0] == found.state['attempted']
        if found.path.name == NAMES[1]: save_checkpoint(run_dir, tensors(2), state(2), disk=DISK)
        assert held(run_dir) == 2


@pytest.mark.parametrize('clock', ['equal', 'reversed', 'future'])
@pytest.mark.parametrize('keep', [0, 1, 2, 3, 99])
def test_retention_goes_by_numbers(tmp_path, clock, keep):
    for n in range(1, 7): commit_all(tmp_path, n)
    for n in range(1, 7):
        stamp, folder = dict(equal=1e9, reversed=2e9 - n, future=4e9 + n)[clock], tmp_path/'checkpoints'/NAMES[n]
        for path in (*folder.iterdir(), folder): os.utime(path, (stamp, stamp))
    last = tmp_path/'checkpoints'/NAMES[6]
    assert latest_checkpoint(tmp_path) == last
    assert prune_checkpoints(last.parent, keep, last, DISK) == NAMES[1:7 - min(max(keep, 1), 6)]
    assert names_in(tmp_path) == NAMES[1:7][-max(keep, 1):]


def test_retention_keeps_as_many_sound_ones_as_it_says(tmp_path):
    "Whatever of six is damaged, in manifest or content: the newest two that are sound stay."
    for damaged in range(2**5):
        run_dir = tmp_path/str(damaged)
        saved = [commit_all(run_dir, n) for n in range(1, 7)]
        for n in range(5):
            if damaged >> n & 1: (saved[n]/('MANIFEST' if n % 2 else 'state.json')).write_bytes(b'{}')
        sound = [path for path in saved if damage(path) is None]
        prune_checkpoints(saved[0].parent, 2, saved[-1], DISK)
        assert [path for path in saved if damage(path) is None] == sound[-2:]


def test_nothing_goes_before_the_new_one_was_read_back(tmp_path):
    for n in range(1, 4): last = commit_all(tmp_path, n)
    (last/'adapter.safetensors').write_bytes(b'lost by the disk')
    counting = Counting()
    with pytest.raises(ValueError, match='adapter.safetensors'): prune_checkpoints(last.parent, 0, last, counting.disk())
    assert counting.names == [] and names_in(tmp_path) == NAMES[1:4]


@pytest.mark.parametrize('fault', [dead, dead_after], ids=lambda f: f.__name__)
def test_a_claim_is_whole_or_not_there(tmp_path, fault):
    cfg, counting = config(tmp_path), Counting()
    (tmp_path/'count').mkdir()
    assert claim_run_directory(tmp_path/'count', cfg, counting.disk())
    for at in range(1, counting.n + 1):
        folder = tmp_path/str(at)
        folder.mkdir()
        with pytest.raises(Died): claim_run_directory(folder, cfg, Counting(at, fault).disk())
        if (folder/CLAIM).exists(): assert read_sealed(folder/CLAIM)['fingerprint'] == cfg.fingerprint(execution=False)
        assert is_claimed(folder, cfg) is (folder/CLAIM).exists()
        claim_run_directory(folder, cfg, DISK)
        assert is_claimed(folder, cfg)


def test_a_log_cut_at_the_end_of_any_line_is_refused(tmp_path):
    path, records = tmp_path/'train_log.jsonl', [{'attempted': n, 'reward': n/7, 'timing/s': n*.1} for n in range(1, 30)]
    for record in records: append_line(path, record, DISK)
    seal, whole = LogSeal(records).value(), path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    places = [whole.index(b'"reward":', start) + 11 for start in [0, *ends[:-1]]]              # the first digit after the point
    changed = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:] for at in places if whole[at - 1:at] == b'.']
    assert len(changed) > 20
    for data in (b'', *(whole[:end] for end in ends[:-1]), *changed):
        path.write_bytes(data)
        with pytest.raises(ValueError, match='train_log.jsonl'): rewind_log(path, 29, DISK, seal)
        assert path.read_bytes() == data
    path.write_bytes(whole)
    assert (rewind_log(path, 29, DISK, seal).value(), path.read_bytes()) == (seal, whole)


def test_what_a_living_process_fills_is_not_swept(tmp_path):
    def fills(say):
        with filling(tmp_path/'cache-1') as temp:
            say(temp.name)
            time.sleep(60)
    pid, lines = forked(fills)
    name = lines.readline().strip()
    try: assert sweep_orphans(tmp_path, 'cache-') == [] and (tmp_path/name).is_dir()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        lines.close()
    assert sweep_orphans(tmp_path, 'cache-') == ['cache-1'] and os.listdir(tmp_path) == []


def test_one_more_line_costs_the_same_however_long_the_log_is(tmp_path, monkeypatch):
    def read(lines):
        "Bytes read to add a line."
        path, sizes, real = tmp_path/f'{lines}.jsonl', [], os.pread
        path.write_bytes(b''.join(b'{"attempted":%d,"text":"%s"}\n' % (n, b'x'*200) for n in range(1, lines + 1)))
        with monkeypatch.context() as patched:
            patched.setattr(os, 'pread', lambda fd, size, at: (sizes.append(size), real(fd, size, at))[1])
            append_line(path, {'attempted': lines + 1}, DISK)
        return sum(sizes)
    assert read(400) == read(5000) == 65536


def test_order_of_calls(tmp_path):
    "A regression lock: every file is synced after its last write and before any rename; the new checkpoint is there before an old one goes."
    names = calls_of_a_commit(tmp_path)
    log, save = names[:names.index('mkdir')], names[names.index('mkdir'):]
    assert log == ['open', 'write', 'fsync', 'close']
    publish = save.index('replace')
    last_write = max(i for i, name in enumerate(save) if name == 'write')
    assert 'fsync' in save[last_write:publish] and save[publish:publish + 4] == ['replace', 'open', 'fsync', 'close']
    assert 'write' not in save[publish:] and 'unlink' not in save[:publish] and 'rmdir' not in save[:publish]


def forked(body):
    "A process that runs `body(say)` from here; returns it and where its lines arrive. No second import of torch, so many can be killed."
    read, write = os.pipe()
    pid = os.fork()
    if pid: os.close(write); return pid, os.fdopen(read)
    try: body(lambda text: os.write(write, f'{text}\n'.encode()))
    except Exception as error: os.write(write, f'{error}\n'.encode())
    finally: os._exit(1)


def test_kill_9_at_any_time(tmp_path):
    "A real process, really killed while it commits as fast as it can; what it said was saved is saved."
    def commits(start, say):
        for n in range(start, start + 10_000): commit(tmp_path, n, DISK); say(n)

    done = 0
    for round in range(30):
        pid, lines = forked(lambda say: commits(done + 1, say))
        assert lines.readline() == f'{done + 1}\n'                        # it is at work
        time.sleep(.001*round)
        os.kill(pid, signal.SIGKILL)
        said = [done + 1, *map(int, lines.read().split())][-1]
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        for folder in (tmp_path, tmp_path/'checkpoints'): sweep_temps(folder, DISK)
        done = held(tmp_path)
        assert done in (said, said + 1)
        rewind_log(tmp_path/'train_log.jsonl', done)
    assert [r['attempted'] for r in read_lines(tmp_path/'train_log.jsonl')] == list(range(1, done + 1))    # each once, none missing


def test_many_starts_and_a_killed_holder(tmp_path):
    "Of processes that start at the same instant one gets the run; the others are told so. A dead holder blocks nobody."
    for round in range(5):
        start = time.time() + .1
        def opens(say):
            while time.time() < start: pass
            run = RunDirectory.open(config(tmp_path/str(round)))
            say('mine')
            time.sleep(60)
        children = [forked(opens) for _ in range(4)]
        said = [lines.readline() for _, lines in children]
        assert said.count('mine\n') == 1 and sum('is being written by another process' in line for line in said) == 3
        with pytest.raises(InputError, match='another process'): RunDirectory.open(config(tmp_path/str(round)))
        os.kill(children[said.index('mine\n')][0], signal.SIGKILL)
        for pid, lines in children: os.waitpid(pid, 0); lines.close()
        with RunDirectory.open(config(tmp_path/str(round))) as run: assert run.resumed


def test_a_run_that_dies_at_every_call_ends_like_one_that_does_not(tmp_path):
    "Open, log, save, publish, finish; die at call k of each process in turn; start again until finished. The files are those of the run that never died."
    def life(folder, disk):
        with RunDirectory.open(config(folder), disk) as run:
            if run.complete: return
            newest = latest_checkpoint(run.path) or save_checkpoint(run.path, tensors(0), state(0), True, 'initial', disk)
            done = load_checkpoint(newest).state
            run.rewind(done['attempted'], done.get('log'))
            for n in range(done['attempted'] + 1, 4):
                run.log({'attempted': n, 'reward': n/4, 'timing/s': time.time()})
                path = save_checkpoint(run.path, tensors(n), state(n) | dict(log=run.log_seal()), permanent=n == 3, disk=disk)
                prune_checkpoints(run.path/'checkpoints', 2, path, disk)
            run.publish('adapter', lambda temp: write_file(temp/'weights', b'w', disk), {'update': 3})
            run.finish(dict(adapter='adapter', attempted=3, successful=3))

    def files(folder):
        found = {p.relative_to(folder).as_posix(): p.read_bytes() for p in Path(folder).rglob('*') if p.is_file() and p.name != 'config.json'}
        log = [{k: v for k, v in r.items() if not k.startswith('timing/')} for r in read_lines(folder/'demo'/'train_log.jsonl')]
        return found | {'demo/train_log.jsonl': log}                       # state.json, with its seal of the log, to the byte
    life(tmp_path/'straight', DISK)
    for fault in (dead, dead_after):
        for k in range(1, 60, 7):
            folder, deaths = tmp_path/f'{fault.__name__}-{k}', 0
            while deaths < 60:
                try: life(folder, Counting(k + 8*deaths, fault).disk()); break
                except Died: deaths += 1
            assert deaths > 0 and files(folder) == files(tmp_path/'straight'), (fault.__name__, k)


def test_only_storage_writes_files():
    "No exported room of the record opens a file for writing or renames one by itself."
    import mmgrpo
    for room in ('data', 'record', 'checkpoint'):
        text = (Path(mmgrpo.__file__).parent/f'{room}.py').read_text()
        for forbidden in ('write_text(', 'write_bytes(', 'os.replace', 'os.rename', 'shutil', 'unlink(', "open('", 'torch.load', 'torch.save', 'pickle'):
            assert forbidden not in text, f'{room} calls {forbidden}'
