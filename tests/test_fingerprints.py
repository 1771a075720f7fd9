"""A run goes on with what it was started with: one change of config, data, model or weights is refused by its name, with both values, unless it is declared."""
import json
import shutil
from pathlib import Path

import pytest
from faults import checkpoints, files
from tiny import made, train  # noqa: F401

from mmgrpo.checkpoint import load_checkpoint
from mmgrpo.config import RLConfig, make_config
from mmgrpo.record import RunDirectory
from mmgrpo.settings import ConfigError, InputError, shown
from mmgrpo.storage import parse_json, read_lines, sealed, sha256

pytestmark = pytest.mark.goal('R13')
BASE = dict(run=dict(name='run', seed=7), trainer=dict(max_updates=9, prompts_per_update=4), optimizer=dict(lr=1e-3), text=dict(kl_coef=.1), visual=dict(kl_coef=.1),
            rollout=dict(max_images=2), loss=dict(advantage_scale='std'))
FIELDS = [(section, key) for section, field in RLConfig.model_fields.items() for key in field.annotation.model_fields]
FREE = [(s, k) for s, k in FIELDS if s in RLConfig.unhashed or f'{s}.{k}' in RLConfig.unhashed]
EXECUTION = [(s, k) for s, k in FIELDS if f'{s}.{k}' in RLConfig.execution]
BOUND = [field for field in FIELDS if field not in FREE + EXECUTION]


def named(fields) -> dict: return dict(argvalues=fields, ids=map('.'.join, fields))


def config(output, **changes) -> RLConfig:
    "The base config in another place; `section__key` is another value."
    raw = {section: dict(values) for section, values in BASE.items()}
    raw['run']['output'] = str(output)
    for path, value in changes.items():
        section, key = path.split('__')
        raw.setdefault(section, {})[key] = value
    return make_config(raw)


def candidates(value, schema) -> list:
    "Other values for a field, of which one will be legal."
    if isinstance(value, bool): return [not value]
    choices = [choice for choice in schema.get('enum', ()) if choice != value]
    if isinstance(value, str): return choices or [f'{value}-2']
    if isinstance(value, (int, float)): return [value * 2, value / 2, value + 1, value - 1, .5]
    if isinstance(value, (list, tuple)): return [[dict(name='module:function')], [*value, 'more'], [n + 1 for n in value if isinstance(n, int)]]
    return [2, .5, [0, 1], 'other']


def other(output, section, key):
    "(config with one other value, the value before, the value now)."
    before = config(output).as_dict()[section][key]
    schema = RLConfig.model_fields[section].annotation.model_json_schema()['properties'][key]
    for value in candidates(before, schema):
        try: changed = config(output, **{f'{section}__{key}': value})
        except ConfigError: continue
        if (now := changed.as_dict()[section][key]) != before: return changed, before, now
    raise AssertionError(f'no other legal value for {section}.{key}, {before!r}')


@pytest.fixture
def begun(tmp_path):
    RunDirectory.open(config(tmp_path)).close()
    return tmp_path


@pytest.mark.parametrize('section, key', **named(BOUND))
def test_a_field_that_changes_what_is_computed(ledger, begun, section, key):
    "One field of the config after the other: refused, with the field and both values."
    changed, before, now = other(begun, section, key)
    held = files(begun)
    for mode in ('exact', 'execution_change'):
        again = make_config(changed.as_dict() | {'checkpoint': changed.as_dict()['checkpoint'] | {'resume_mode': mode}})
        with pytest.raises(InputError) as refused: RunDirectory.open(again)
        line = str(refused.value)
        assert f'{section}.{key}: ' in line and '\n' not in line, line
        told = line.partition(f'{section}.{key}: ')[2]
        assert told.startswith(f'{shown(before)} -> {shown(now)}'), line
    assert files(begun) == held
    ledger.fault('changed field')


@pytest.mark.parametrize('section, key', **named(EXECUTION))
def test_a_field_that_changes_how_it_is_computed(ledger, begun, section, key):
    "It may change where the config says so; that is written down."
    changed, before, now = other(begun, section, key)
    held = files(begun)
    with pytest.raises(InputError, match=f'{section}.{key}: .* -> .*execution_change lets what only decides how it is computed differ'): RunDirectory.open(changed)
    assert files(begun) == held
    declared = make_config(changed.as_dict() | {'checkpoint': changed.as_dict()['checkpoint'] | {'resume_mode': 'execution_change'}})
    with RunDirectory.open(declared) as run:
        assert run.resumed and files(begun) == held             # the start may be refused yet
        run.record_change()
    (line,) = read_lines(begun/'run'/'execution_changes.jsonl')
    assert len(line['changes']) == 1 and line['changes'][0].startswith(f'{section}.{key}: ')
    with pytest.raises(InputError, match=f'{section}.{key}'): RunDirectory.open(config(begun))     # what was recorded last is what counts
    ledger.fault('changed field')


@pytest.mark.parametrize('section, key', **named([f for f in FREE if f not in [('run', 'name'), ('run', 'output'), ('checkpoint', 'resume_mode')]]))
def test_a_field_that_changes_nothing_of_it(begun, section, key):
    "Names, places and logs may differ from start to start."
    changed = other(begun, section, key)[0]
    with RunDirectory.open(changed) as run: assert run.resumed
    assert changed.fingerprint() == config(begun).fingerprint()


def test_there_are_enough_of_them():
    "At least 25 kinds of change are tried."
    assert len(BOUND) > 40 and len(EXECUTION) >= 7


# --- what a config only names

def resumed(made, tmp_path, sections=(), match='', error=(ValueError, RuntimeError), name='paused'):
    "A start of a copy of the paused run is refused by what is different, and draws nothing."
    run = tmp_path/'run' if (tmp_path/'run').exists() else made.copy(name, tmp_path)
    before = files(run)
    with pytest.raises(error, match=match) as refused: train(made.config(run, sections), stop_after_updates=1)
    after = files(run)
    assert '\n' not in str(refused.value)
    assert {p.name for p in before.keys() | after.keys() if before.get(p) != after.get(p)} <= {'.run-lock'}


def flipped(path, at, bit=1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    path.write_bytes(data)


def test_one_byte_of_the_cache(ledger, made, tmp_path):
    "A pixel of one puzzle, in a cache that is whole and says so."
    cache = Path(shutil.copytree(made.folder/'cache', tmp_path/'cache'))
    sections = dict(data=dict(cache_root=str(cache)))
    flipped(cache/'cache.safetensors', -40)
    resumed(made, tmp_path, sections, 'cache.safetensors')
    facts = {key: value for key, value in parse_json((cache/'cache.json').read_bytes(), 'cache').items() if key != 'digest'}
    (cache/'cache.json').write_bytes(sealed(facts | dict(sha256=sha256((cache/'cache.safetensors').read_bytes()))))
    resumed(made, tmp_path, sections, "provenance.json does not fit this start: cache was '[0-9a-f]{64}', is '[0-9a-f]{64}'")
    ledger.fault('changed data', 2)


def test_one_bit_of_the_model(ledger, made, tmp_path):
    "Refused, although the config names the same folder."
    model = Path(shutil.copytree(made.folder/'model', tmp_path/'model'))
    flipped(model/'model.safetensors', -4)
    resumed(made, tmp_path, dict(model=dict(path=str(model))), "model was '[0-9a-f]{64}', is '[0-9a-f]{64}'|was made for model")
    ledger.fault('changed model')


def test_another_place_for_the_same_things(made, tmp_path):
    "Cache, model and run lie elsewhere: nothing has changed."
    run = made.copy('paused', tmp_path)
    cache, model = (str(shutil.copytree(made.folder/name, tmp_path/name)) for name in ('cache', 'model'))
    assert train(made.config(run, dict(data=dict(cache_root=cache), model=dict(path=model))))[0].startswith('RL_RESUME')
    assert checkpoints(run)[-1].name == checkpoints(made.done)[-1].name
    assert (run/'adapter'/'adapter_model.safetensors').read_bytes() == (made.done/'adapter'/'adapter_model.safetensors').read_bytes()


def test_one_bit_of_the_initial_adapter(ledger, made, tmp_path):
    "What a run starts from is its reference."
    adapter, run = Path(shutil.copytree(made.done/'adapter', tmp_path/'adapter')), tmp_path/'run'
    sections = dict(model=dict(initial_adapter=str(adapter)))
    train(made.config(run, sections), stop_after_updates=1)
    flipped(adapter/'adapter_model.safetensors', -3)
    (adapter/'COMPLETE').unlink()
    resumed(made, tmp_path, sections, "provenance.json does not fit this start: initial_weights was '")
    resumed(made, tmp_path, {}, "initial_weights was '")
    ledger.fault('changed weights', 2)


def test_a_reference_and_a_verifier_of_another_start(ledger, made, tmp_path):
    "Each fact of the provenance counts, and is named."
    run = made.copy('paused', tmp_path)
    path = run/'provenance.json'
    held = {key: value for key, value in parse_json(path.read_bytes(), path).items() if key != 'digest'}
    for key in sorted(held):
        path.write_bytes(sealed(held | {key: 'another'}))
        resumed(made, tmp_path, {}, f"{path} does not fit this start: {key} was 'another', is ")
        ledger.fault('changed fact')
    path.write_bytes(sealed(held | {'more': 1}))
    resumed(made, tmp_path, {}, 'more was 1, is None')
    path.write_bytes(sealed({key: value for key, value in held.items() if key != 'verifier'}))
    resumed(made, tmp_path, {}, 'verifier was None, is ')
    ledger.fault('changed fact', 2)


@pytest.mark.parametrize('key', ['source', 'torch', 'transformers', 'python', 'threads'])
def test_other_code_or_another_version(ledger, made, tmp_path, key):
    "Refused by name; with execution_change it is let in, and written down."
    run = made.copy('paused', tmp_path)
    path = run/'environment.jsonl'
    *_, held = read_lines(path)
    assert key in held
    path.write_bytes((json.dumps(held | {key: 'another'}) + '\n').encode())
    resumed(made, tmp_path, {}, f"{key} was 'another', is ")
    train(made.config(run, dict(checkpoint=dict(resume_mode='execution_change'))), stop_after_updates=1)
    assert [line[key] for line in read_lines(path)] == ['another', held[key]]
    ledger.fault('changed environment')


def test_a_checkpoint_carries_its_counters(made):
    "The sanity of what the others rely on."
    found = load_checkpoint(checkpoints(made.paused)[-1])
    assert found.state['attempted'] == found.state['successful'] == 3
