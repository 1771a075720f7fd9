"""Files made to hurt: code in every slot, lengths and nesting without end, paths that lead outside, and random changes by the thousand.

Whatever a file holds, it is refused in one line that names it, or read as what was written; nothing in it is run, nothing outside the run is read.
`MMGRPO_TORTURE=1` is the nightly size."""
import io
import json
import os
import pickle
import random
import shutil
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from ledger import size
from tiny import made, train  # noqa: F401

import mmgrpo.setup as setup
from mmgrpo.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from mmgrpo.config import RLConfig, load_config, make_config
from mmgrpo.data import PackedTrajectoryCache
from mmgrpo.record import LogSeal, RunDirectory, check_finished, rewind_log
from mmgrpo.storage import DISK, json_bytes, parse_json, parse_tensors, read_folder, read_lines, sealed, sha256, tensor_bytes, unseal

REFUSALS = (ValueError, RuntimeError, FileNotFoundError)      # what the command turns into one line
pytestmark = pytest.mark.goal('R6')


def refused(read, *names) -> str:
    "The one line that `read` is refused with; it has one of the names in it."
    try: found = read()
    except REFUSALS as error:
        line = str(error)
        assert line and any(str(name) in line for name in names), line
        return line
    raise AssertionError(f'it is read as {str(found)[:200]}')


def config(output, lr=1e-3): return make_config(dict(
    run=dict(name='run', output=str(output)), trainer=dict(max_updates=9, prompts_per_update=1), optimizer=dict(lr=lr)), RLConfig)
def state(n): return {'successful': n, 'attempted': n, 'scheduler': {'last_epoch': n}, 'reference': 'a'*64}
def tensors(n): return {'policy': {'a/w': torch.full((3, 2), float(n)), 'b': torch.arange(4)}, 'optimizer': {'a/w/step': torch.tensor(float(n))}}


@pytest.fixture
def run(tmp_path):
    "A small run: claim, config, log of two lines, two checkpoints."
    with RunDirectory.open(config(tmp_path)) as run:
        run.rewind(0)
        for n in (1, 2):
            run.log({'attempted': n, 'reward': n/4, 'timing/s': n/8, 'word': 'größer'})
            save_checkpoint(run.path, tensors(n), state(n))
    return tmp_path/'run'


def resealed(folder, name='MANIFEST', **changes) -> None:
    "Give a changed folder a manifest that fits: no hash stands in the way of what is in it."
    manifest = parse_json((folder/name).read_bytes(), name)
    files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob('*') if p.is_file() and p.name != name}
    rest = {key: value for key, value in manifest.items() if key != 'digest'} | dict(
        files={key: dict(size=len(data), sha256=sha256(data)) for key, data in files.items()}) | changes
    (folder/name).write_bytes(sealed(rest))


# --- code

class Evil:
    "Makes a directory when it is unpickled."
    def __init__(self, path): self.path = str(path)
    def __reduce__(self): return os.mkdir, (self.path,)


def payloads(canary) -> dict:
    "Bytes that make the canary when somebody runs what is in them."
    evil, saved, array = Evil(canary), io.BytesIO(), io.BytesIO()
    torch.save({'w': evil}, saved)
    np.save(array, np.array([evil], dtype=object), allow_pickle=True)
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, 'w') as archive: archive.writestr('archive/data.pkl', pickle.dumps(evil))
    words = dict(yaml=f'run: !!python/object/apply:os.mkdir ["{canary}"]\n', json=json.dumps({'__reduce__': ['os.mkdir', [str(canary)]], 'py/reduce': [{'py/function': 'os.mkdir'}, [str(canary)]]}),
                 python=f'__import__("os").mkdir({str(canary)!r})\n')
    pickles = {f'pickle {n}': pickle.dumps(evil, n) for n in range(6)}
    return pickles | dict(torch=saved.getvalue(), numpy=array.getvalue(), zip=zipped.getvalue()) | {name: text.encode() for name, text in words.items()}


def test_the_payloads_are_loaded(tmp_path):
    "Otherwise a canary that is not there would prove nothing."
    for number, name in enumerate(('pickle 0', 'pickle 5')):
        pickle.loads(payloads(tmp_path/str(number))[name])
        assert (tmp_path/str(number)).is_dir()
    torch.load(io.BytesIO(payloads(tmp_path/'torch')['torch']), weights_only=False)
    np.load(io.BytesIO(payloads(tmp_path/'numpy')['numpy']), allow_pickle=True)
    assert (tmp_path/'torch').is_dir() and (tmp_path/'numpy').is_dir()


def test_code_in_every_file_of_a_checkpoint(ledger, run, tmp_path):
    "Behind a manifest that fits it, and instead of the manifest."
    *_, last = sorted((run/'checkpoints').iterdir())
    for name in sorted(p.name for p in last.iterdir()):
        for what, data in payloads(tmp_path/'canary').items():
            kept = {p.name: p.read_bytes() for p in last.iterdir()}
            (last/name).write_bytes(data)
            if name != 'MANIFEST': resealed(last)
            refused(lambda: latest_checkpoint(run), last/name, last)
            for file, old in kept.items(): (last/file).write_bytes(old)
            assert not (tmp_path/'canary').exists(), f'{what} in {name} was run'
            ledger.fault('code in a file')
    assert load_checkpoint(latest_checkpoint(run)).state == state(2)


def test_code_in_the_other_files_of_a_run(ledger, run, tmp_path):
    "Claim, config, log and summary."
    cfg, summary = config(tmp_path), run/'summary.json'
    for what, data in payloads(tmp_path/'canary').items():
        for name, start in (('.run-claim.json', lambda: RunDirectory.open(cfg)), ('config.json', lambda: RunDirectory.open(cfg)),
                            ('train_log.jsonl', lambda: read_lines(run/'train_log.jsonl')), ('summary.json', lambda: check_finished(run, cfg))):
            kept = (run/name).read_bytes() if (run/name).exists() else None
            (run/name).write_bytes(data + b'\n')
            if what != 'json' or name != 'train_log.jsonl': refused(start, run/name)
            if kept is None: summary.unlink()
            else: (run/name).write_bytes(kept)
            assert not (tmp_path/'canary').exists(), f'{what} in {name} was run'
            ledger.fault('code in a file')


def test_code_in_a_config_and_in_a_cache(ledger, made, tmp_path):
    "In the place of a YAML config, and of the puzzles."
    cache, path = Path(shutil.copytree(made.folder/'cache', tmp_path/'cache')), tmp_path/'run.yaml'
    for what, data in payloads(tmp_path/'canary').items():
        path.write_bytes(data)
        refused(lambda: load_config(path), path)
        for name in ('cache.json', 'cache.safetensors'):
            kept = {p.name: p.read_bytes() for p in cache.iterdir()}
            (cache/name).write_bytes(data)
            if name != 'cache.json': (cache/'cache.json').write_bytes(sealed({key: value for key, value in parse_json(
                kept['cache.json'], 'cache').items() if key != 'digest'} | dict(size=len(data), sha256=sha256(data))))
            refused(lambda: PackedTrajectoryCache(cache), cache/name)
            for file, old in kept.items(): (cache/file).write_bytes(old)
            ledger.fault('code in a file', 1)
        ledger.fault('code in a file')
        assert not (tmp_path/'canary').exists(), f'{what} was run'


@pytest.mark.parametrize('name', ['model.safetensors', 'pixel_decoder.safetensors', 'pixel_decoder.json', 'config.json', 'tokenizer.json'])
def test_code_in_a_model(ledger, made, tmp_path, name):
    "Also where the weights are missing and older kinds of file lie in their place: none of them is opened."
    model = Path(shutil.copytree(made.folder/'model', tmp_path/'model'))
    cfg = made.config(tmp_path/'run', dict(model=dict(path=str(model))))
    load = lambda: (setup.load_policy(cfg, 'cpu'), setup.load_pixel_decoder(model))
    load()
    for what, data in payloads(tmp_path/'canary').items():
        if not what.startswith(('pickle 2', 'torch', 'numpy', 'python')): continue
        (model/name).write_bytes(data)
        refused(load, model, name)
        (model/name).unlink()
        if name == 'model.safetensors':
            for old in ('pytorch_model.bin', 'tf_model.h5', 'flax_model.msgpack', 'modeling_uniar.py'): (model/old).write_bytes(data)
            refused(load, model, name)
        assert not (tmp_path/'canary').exists(), f'{what} was run'
        ledger.fault('code in a file')


# --- numbers and nesting without end

def header(text, tail=b'') -> bytes: return len(text).to_bytes(8, 'little') + text + tail


def one(**change) -> bytes: return header(json.dumps({'w': dict(dtype='F32', shape=[2], data_offsets=[0, 8]) | change}).encode(), bytes(8))


TENSOR_FILES = dict(
    empty=b'', short=b'\x08', no_header=bytes(8), far_too_long=(2**60).to_bytes(8, 'little') + b'{}', longest=(2**64 - 1).to_bytes(8, 'little') + b'{}',
    beyond=(99).to_bytes(8, 'little') + b'{}', no_json=header(b'wwww'), a_list=header(b'[]'), a_number=header(b'1'), nested=header(b'{"a":' * 200_000),
    nan=one(shape=[float('nan')]), negative=one(shape=[-2]), huge=one(shape=[2**62, 2]), product=one(shape=[2**32, 2**32]), big=one(shape=[2**40]),
    bool=one(shape=[True]), floats=one(shape=[2.]), word=one(dtype='OBJ'), no_dtype=one(dtype=None), outside=one(data_offsets=[0, 2**60]),
    backwards=one(data_offsets=[8, 0]), odd=one(data_offsets=[0, 7]), one_offset=one(data_offsets=[0]), behind=one(data_offsets=[4, 12]),
    overlap=header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}', bytes(12)),
    hole=header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}', bytes(12)),
    rest=one() + b'x', notes=header(b'{"__metadata__":{"a":1},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
    surrogate=header(b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)), latin=header('{"ä":1}'.encode('latin1')))


@pytest.mark.parametrize('what', TENSOR_FILES)
def test_a_tensor_file_that_lies(ledger, run, what):
    "Headers of impossible lengths, shapes, types and offsets."
    last = sorted((run/'checkpoints').iterdir())[-1]
    (last/'policy.safetensors').write_bytes(TENSOR_FILES[what])
    resealed(last)
    refused(lambda: latest_checkpoint(run), last/'policy.safetensors')
    ledger.fault('lying header')


JSON_FILES = dict(
    empty=b'', space=b' \n', nul=b'\0', bom=b'\xef\xbb\xbf{}', latin='{"ä":1}'.encode('latin1'), twice=b'{"attempted":1,"attempted":2}', nan=b'{"attempted":NaN}',
    infinity=b'[Infinity]', too_large=b'{"attempted":1e999}', nested=b'['*100_000, closed=b'['*100_000 + b']'*100_000, objects=b'{"a":'*50_000 + b'1' + b'}'*50_000,
    digits=b'{"attempted":' + b'9'*5000 + b'}', more_digits=b'{"attempted":' + b'9'*100_000 + b'}', surrogate=b'{"attempted":"\\ud800"}', two=b'{}{}', comment=b'{}//', list=b'[]', word=b'"a"', null=b'null', number=b'7',
    single=b"{'a': 1}", comma=b'{"a":1,}', octal=b'{"attempted":01}', plus=b'{"attempted":+1}', control=b'{"a":"\x01"}')


@pytest.mark.parametrize('what', JSON_FILES)
def test_json_that_is_none(ledger, run, tmp_path, what):
    "In the state of a checkpoint whose manifest fits it, and wherever else a start reads JSON."
    cfg, last, data = config(tmp_path), sorted((run/'checkpoints').iterdir())[-1], JSON_FILES[what]
    for path, start in ((last/'state.json', lambda: latest_checkpoint(run)), (last/'MANIFEST', lambda: load_checkpoint(last)),
                        (run/'.run-claim.json', lambda: RunDirectory.open(cfg)), (run/'config.json', lambda: RunDirectory.open(cfg)),
                        (run/'summary.json', lambda: check_finished(run, cfg)), (run/'train_log.jsonl', lambda: rewind_log(run/'train_log.jsonl', 2))):
        kept = path.read_bytes() if path.exists() else None
        path.write_bytes(data + b'\n')
        if path.name == 'state.json': resealed(last)
        line = refused(start, path, last)
        assert len(line) < 600, 'the file is not quoted whole'
        if kept is None: path.unlink()
        else: path.write_bytes(kept)
        if path.name == 'state.json': resealed(last)
        ledger.fault('bad JSON')


@pytest.mark.parametrize('counters', [
    {}, {'successful': 2}, {'successful': True, 'attempted': True}, {'successful': 2., 'attempted': 2.}, {'successful': '2', 'attempted': '2'}, {'successful': None, 'attempted': 2},
    {'successful': -2, 'attempted': 2}, {'successful': 3, 'attempted': 2}, {'successful': 2, 'attempted': 3}, {'successful': 10**30, 'attempted': 10**30}, {'successful': [2], 'attempted': [2]}])
def test_counters_that_are_none(ledger, run, counters):
    "Refused by the name of the file."
    last = sorted((run/'checkpoints').iterdir())[-1]
    (last/'state.json').write_bytes(json_bytes(counters))
    resealed(last)
    refused(lambda: latest_checkpoint(run), last)
    ledger.fault('bad JSON')


# --- paths

OUTSIDE = ['../secret', '/etc/hostname', '../../../../../../etc/hostname', 'sub/../../secret', '', '.', '..', 'a\0b', 'policy.safetensors/', './policy.safetensors', '~', 'CON', 'x'*300, '\ud800']


@pytest.fixture
def opened_files():
    "What is opened while it is looked at; there is no way to take an audit hook away, so it is made deaf."
    seen, listening = [], [True]
    sys.addaudithook(lambda event, args: seen.append(str(args[0])) if listening[0] and event == 'open' and isinstance(args[0], (str, bytes, os.PathLike)) else None)
    yield seen
    listening[0] = False


@pytest.mark.parametrize('name', OUTSIDE, ids=ascii)
def test_a_manifest_that_leads_outside(ledger, run, tmp_path, opened_files, name):
    "Nothing but the checkpoint's own folder is opened."
    (tmp_path/'run'/'checkpoints'/'secret').write_bytes(b'secret')
    last = sorted(p for p in (run/'checkpoints').iterdir() if p.is_dir())[-1]
    files = parse_json((last/'MANIFEST').read_bytes(), 'MANIFEST')['files']
    text = json.dumps({'a': name})[6:-1]
    value = sealed({'format': 1, 'name': last.name, 'permanent': False, 'reason': 'rolling', 'files': files | {'NAME': dict(size=6, sha256=sha256(b'secret'))}})
    forged = value.replace(b'"NAME"', text.encode())
    for data in (forged, sealed(json.loads(forged) | {'digest': 0}) if name.isprintable() else forged):
        (last/'MANIFEST').write_bytes(data)
        opened_files.clear()
        refused(lambda: load_checkpoint(last), last)
        assert [path for path in opened_files if not path.startswith(str(last))] == []
        ledger.fault('path that leads outside')


def test_a_name_of_a_group_that_leads_outside(run):
    "A checkpoint cannot be made to write elsewhere."
    for name in ('../x', '/x', 'a/b', '', '.', 'x.safetensors'):
        with pytest.raises(ValueError, match='is no name for a group'): save_checkpoint(run, {name: {}}, state(3))


# --- memory

def peak(work) -> int:
    "Bytes that `work` needs at most, in a process of its own."
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            def now(key): return next(int(line.split()[1]) for line in Path('/proc/self/status').read_text().splitlines() if line.startswith(key)) * 1024
            Path('/proc/self/clear_refs').write_text('5')
            before = now('VmHWM')
            try: work()
            except REFUSALS: pass
            os.write(write, str(now('VmHWM') - before).encode())
        finally: os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as told: return int(told.read())


@pytest.mark.skipif(not os.access('/proc/self/clear_refs', os.W_OK), reason='measures with the /proc of Linux')
def test_a_file_takes_twice_its_size(tmp_path):
    "Memory at its peak, while a large checkpoint is read."
    n = 48 * 2**20
    last = save_checkpoint(tmp_path, {'policy': {'w': torch.zeros(n//4)}}, state(1))
    assert n < peak(lambda: latest_checkpoint(tmp_path)) < 2*n + 16*2**20
    with (last/'policy.safetensors').open('ab') as file: file.truncate(20*n)
    assert peak(lambda: latest_checkpoint(tmp_path)) < 16*2**20, 'what is too large is not read'


# --- random changes

WORDS = [b'"', b'{', b'}', b'[', b']', b',', b':', b'null', b'true', b'NaN', b'1e999', b'-1', b'0', b'9'*30, b'\\u0000', b'\\ud800', b'\n', b'\0', b'\xff', b'../', b'"digest"', b'\xe2\x82\xac']
VALUES = [None, True, False, 0, -1, 1, 2, 10**30, 1.5, '', 'x', 'digest', '../x', [], {}, [[]], {'a': None}, 'a'*64, ['files'], '\x00']


def bent(data:bytes, chance) -> bytes:
    "A few random changes of bytes: bits, cuts, pieces twice or in other places, words of JSON."
    data = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4, 16))):
        at, to = sorted((chance.randint(0, len(data)), chance.randint(0, len(data))))
        match chance.randrange(6):
            case 0 if data: data[min(at, len(data) - 1)] ^= 1 << chance.randrange(8)
            case 1: data[at:at] = chance.choice(WORDS)
            case 2: del data[at:min(to, at + chance.choice((1, 4, 64)))]
            case 3: data[at:at] = data[at:min(to, at + 64)]
            case 4: del data[at:]
            case _: data[at:at + 1] = bytes([chance.randrange(256)])
    return bytes(data)


def twisted(value, chance, depth=0):
    "A JSON value with one node of it put, taken away, renamed or replaced."
    if isinstance(value, dict) and value and (depth == 0 or chance.random() < .7):
        key, kind = chance.choice(sorted(value)), chance.randrange(5)
        if kind == 0: return {k: v for k, v in value.items() if k != key}
        if kind == 1: return value | {chance.choice(('x', '', 'name', 'files', '../x')): chance.choice(VALUES)}
        return value | {key: twisted(value[key], chance, depth + 1)}
    if isinstance(value, list) and value and chance.random() < .5:
        at = chance.randrange(len(value))
        return [*value[:at], twisted(value[at], chance, depth + 1), *value[at + 1:]]
    return chance.choice(VALUES)


def survives(read, wanted, name, what) -> None:
    "A clean refusal that names the file, or the same as before; `wanted` None lets any value pass."
    try: found = read()
    except REFUSALS as error:
        line = str(error)
        assert str(name) in line and '\n' not in line and len(line) < 2000, f'{what}: {line[:500]}'
    except Exception as error: raise AssertionError(f'{what}: {type(error).__name__}: {error}') from error
    else: assert wanted is None or found == wanted, f'{what} is read as something else'


def plain(groups) -> dict: return {group: {name: t.tolist() for name, t in held.items()} for group, held in groups.items()}


@pytest.mark.parametrize('seed', range(4))
def test_random_bytes_in_sealed_files(ledger, run, seed):
    "Manifest, claim and config, in memory."
    chance = random.Random(seed)
    last = sorted((run/'checkpoints').iterdir())[-1]
    for path in (last/'MANIFEST', run/'.run-claim.json', run/'config.json'):
        data = path.read_bytes()
        wanted = unseal(data, path)
        for n in range(size(600, 60_000)):
            forged = bent(data, chance)
            survives(lambda: unseal(forged, path), wanted, path, forged[:300])
        ledger.fault('random bytes', n + 1)


@pytest.mark.parametrize('seed', range(4))
def test_random_bytes_in_tensor_files(ledger, seed):
    "Mostly in the header. A value may change when nothing but its bytes did: the manifest is what tells that."
    chance, data = random.Random(seed), tensor_bytes(tensors(1)['policy'])
    start = 8 + int.from_bytes(data[:8], 'little')
    for n in range(size(1200, 100_000)):
        forged = bent(data[:start], chance) + data[start:] if n % 8 else bent(data, chance)
        survives(lambda: parse_tensors(forged, 'a/file'), None, 'a/file', forged[:300])
    ledger.fault('random bytes', n + 1)


def timeless(line) -> dict: return {key: value for key, value in line.items() if not key.startswith('timing/')}


@pytest.mark.parametrize('seed', range(4))
def test_random_bytes_in_a_log(ledger, run, seed):
    "Behind the seal that a checkpoint keeps of it: the lines of the checkpoint, each once, or a refusal; only a clock may read as another number."
    chance, path = random.Random(seed), run/'train_log.jsonl'
    data, wanted = path.read_bytes(), read_lines(path)
    seal = LogSeal(wanted).value()
    for n in range(size(700, 50_000)):
        forged = bent(data, chance)
        path.write_bytes(forged)
        survives(lambda: rewind_log(path, 2, DISK, seal) and [timeless(line) for line in read_lines(path)], [timeless(line) for line in wanted], path, forged)
    ledger.fault('random bytes', n + 1)


@pytest.mark.parametrize('seed', range(4))
def test_other_values_behind_a_fitting_seal(ledger, run, tmp_path, seed):
    "As another version of the package, or somebody who knows the hash, would write them."
    chance, cfg = random.Random(seed), config(tmp_path)
    last = sorted((run/'checkpoints').iterdir())[-1]
    starts = {last/'MANIFEST': lambda: plain(load_checkpoint(last).tensors), last/'state.json': lambda: plain(load_checkpoint(last).tensors),
              run/'.run-claim.json': lambda: RunDirectory.open(cfg).close(), run/'config.json': lambda: RunDirectory.open(cfg).close()}
    held = {path: path.read_bytes() for path in starts} | {last/'MANIFEST': (last/'MANIFEST').read_bytes()}
    for path, start in starts.items():
        value = {key: found for key, found in parse_json(held[path], path).items() if key != 'digest'}
        wanted = start()
        for n in range(size(350, 20_000) if 'checkpoints' in str(path) else size(120, 10_000)):
            forged = twisted(value, chance)
            path.write_bytes(sealed(forged) if isinstance(forged, dict) and path.name != 'state.json' else json_bytes(forged))
            if path.name == 'state.json': resealed(last)
            survives(start, wanted, last if 'checkpoints' in str(path) else run, f'{path.name}: {str(forged)[:700]}')
            for file, data in held.items(): file.write_bytes(data)
        ledger.fault('other values', n + 1)
