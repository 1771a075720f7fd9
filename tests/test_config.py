"""Every field of a config against wrong values of every kind, any bytes as a file, and the configs that are shipped."""
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, strategies as st
from project import ROOT

from mmgrpo.config import RLConfig, SFTConfig, config_rows, config_table, load_config, make_config, run_directory
from mmgrpo.settings import ConfigError, apply_overrides, parse_yaml

SHIPPED = sorted((ROOT / 'configs').glob('*.yaml'))
SMALLEST = {'run': {'name': 'demo'}, 'trainer': {'max_updates': 200, 'prompts_per_update': 16}, 'optimizer': {'lr': 1e-4}}
FIELDS = [tuple(row[0].split('.')) for row in config_rows()]
SCHEMAS = {(section, key): schema for section, field in RLConfig.model_fields.items()
           for key, schema in field.annotation.model_json_schema()['properties'].items()}
# One value of each kind that YAML can give, with the JSON schema types that may take it.
KINDS = [(True, {'boolean'}), (3, {'integer', 'number'}), (0.25, {'number'}), ('yes', {'string'}), ('1e-4', {'string'}),
         ({'a': 1}, set()), ([[]], set()), (math.nan, set()), (math.inf, set()), (-math.inf, set()), (None, {'null'})]


def kinds(schema):
    "The JSON types a field takes; an enum takes none of the values of KINDS."
    if 'anyOf' in schema: return set().union(*map(kinds, schema['anyOf']))
    return set() if 'enum' in schema else {schema['type']}


def with_value(section, key, value):
    return {**SMALLEST, section: {**SMALLEST.get(section, {}), key: value}}


def message(call):
    "The one line that `call` is refused with."
    with pytest.raises(ConfigError) as caught: call()
    text = str(caught.value)
    assert text and text.isprintable(), f'not one printable line: {text!r}'
    return text


# --- every field

@pytest.mark.parametrize('section, key', FIELDS)
def test_a_value_of_a_wrong_kind_is_refused_by_name(section, key):
    takes = kinds(SCHEMAS[section, key])
    for value, fits in KINDS:
        if fits & takes: continue
        text = message(lambda: make_config(with_value(section, key, value), source='x.yaml'))
        place = text.removeprefix(f'x.yaml: {section}.{key}').removeprefix('[0]')      # an item of a list of sections
        assert place.startswith(': ') and ' is not legal; ' in place, (value, text)


@pytest.mark.parametrize('section, key', [f for f in FIELDS if {'integer', 'number'} & kinds(SCHEMAS[f])])
def test_numbers_beyond_the_stated_bounds_are_refused_and_the_bounds_themselves_are_not(section, key):
    schema = next(s for s in SCHEMAS[section, key].get('anyOf', [SCHEMAS[section, key]]) if s['type'] in ('integer', 'number'))
    step = 1 if schema['type'] == 'integer' else 1e-9
    outside = {'minimum': -step, 'maximum': step, 'exclusiveMinimum': 0, 'exclusiveMaximum': 0}
    bounds = {name: schema[name] for name in outside if name in schema}
    assert {'minimum', 'exclusiveMinimum'} & set(bounds), 'every number has a lower bound'
    for name, bound in bounds.items():
        assert f'{section}.{key}: ' in message(lambda: make_config(with_value(section, key, bound + outside[name])))
        if 'exclusive' in name: continue
        try: make_config(with_value(section, key, bound))
        except ConfigError as error: assert ' is not legal' not in str(error)    # only another field may object


@pytest.mark.parametrize('section, key', FIELDS)
def test_a_field_misspelt_by_one_letter_is_refused_with_the_right_name(section, key):
    text = message(lambda: make_config(with_value(section, key + 'x', 1)))
    assert text.startswith(f'config: {section}.{key}x: unknown; did you mean {key}?')


@pytest.mark.parametrize('section, key', FIELDS)
def test_a_default_written_out_changes_nothing(section, key):
    cfg = make_config(SMALLEST)
    value = cfg.as_dict()[section][key]
    again = make_config(with_value(section, key, value))
    assert again == cfg and again.fingerprint() == cfg.fingerprint()


def test_every_field_counts_in_the_fingerprint_or_is_named_as_one_that_does_not():
    "Each field is changed to another legal value; only the fields of `unhashed` may leave the fingerprint as it was."
    cfg, silent = make_config(SMALLEST), set()
    for section, key in FIELDS:
        old, schema = cfg.as_dict()[section][key], SCHEMAS[section, key]
        for value in (*schema.get('enum', ()), 2, 3, 0, 0.5, 'other', False, True, ['other'], [5], [5, 5],
                      [{'name': 'length'}]):
            try: other = make_config(with_value(section, key, value))
            except ConfigError: continue
            if other.as_dict()[section][key] != old: break
        else: pytest.fail(f'{section}.{key} was not changed')
        if other.fingerprint() == cfg.fingerprint(): silent.add(f'{section}.{key}')
    assert silent == {f'{s}.{k}' for s, k in FIELDS if {s, f'{s}.{k}'} & RLConfig.unhashed}


def test_the_fingerprint_is_the_same_in_another_process_with_another_hash_seed():
    code = f'from mmgrpo.config import make_config; print(make_config({SMALLEST!r}).fingerprint())'
    seen = {subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, check=True,
                           env={'PYTHONHASHSEED': seed, 'PATH': ''}).stdout.strip() for seed in ('1', '2')}
    assert seen == {make_config(SMALLEST).fingerprint()}


# --- files

@pytest.mark.parametrize('path', SHIPPED, ids=[p.name for p in SHIPPED])
def test_a_shipped_config_is_legal_and_keeps_its_lines_short(path):
    kind = SFTConfig if 'sft' in path.stem else RLConfig
    cfg = load_config(path, kind=kind)
    assert cfg.validate() is cfg and run_directory(cfg).parts[0] == 'runs'
    assert max(map(len, path.read_text().splitlines())) <= 120


def test_the_quickstart_is_shipped(): assert 'quickstart.yaml' in [p.name for p in SHIPPED]


def test_a_dumped_config_reads_back_the_same(tmp_path):
    cfg = make_config(SMALLEST)
    (tmp_path / 'a.yaml').write_text(yaml.safe_dump(cfg.as_dict()))
    (tmp_path / 'b.yaml').write_text(json.dumps(cfg.as_dict()))    # JSON is YAML
    assert load_config(tmp_path / 'a.yaml') == load_config(tmp_path / 'b.yaml') == cfg


def test_lines_of_windows_and_a_path_with_spaces_are_read(tmp_path):
    folder = tmp_path / 'mein Ordner ä'
    folder.mkdir()
    (folder / 'x.yaml').write_bytes(yaml.safe_dump(SMALLEST).replace('\n', '\r\n').encode())
    assert load_config(folder / 'x.yaml') == make_config(SMALLEST)


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    "The error is made, not provoked: to the superuser no file is unreadable."
    def refuse(self): raise PermissionError(13, 'Permission denied', str(self))
    monkeypatch.setattr(Path, 'read_bytes', refuse)
    assert message(lambda: load_config('a/b.yaml')) == 'a/b.yaml: cannot be read: Permission denied'


@given(st.binary(max_size=60))
def test_any_bytes_are_a_config_error_of_one_line(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / 'bytes.yaml'
    path.write_bytes(data)
    assert message(lambda: load_config(path)).startswith(f'{path}: ')


values = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
                      lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=3),
                      max_leaves=8)


@given(st.sampled_from(FIELDS), values)
def test_any_value_in_any_field_is_taken_or_refused_by_name(field, value):
    section, key = field
    try: cfg = make_config(with_value(section, key, value))
    except ConfigError as error: assert str(error).isprintable() and f'{section}.' in str(error)
    else: assert make_config(cfg.as_dict()) == cfg


@given(st.dictionaries(st.sampled_from([*RLConfig.model_fields, 'x', '']) | st.integers(), values, max_size=3))
def test_any_mapping_is_taken_or_refused_in_one_line(raw):
    try: make_config({**SMALLEST, **raw})
    except ConfigError as error: assert str(error).isprintable()


@given(st.text(max_size=20))
def test_any_override_is_applied_or_refused_in_one_line(text):
    try: apply_overrides(SMALLEST, [text])
    except ConfigError as error: assert str(error).startswith('--set') and str(error).isprintable()


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_as_python_prints_it_is_read_as_the_same_float(number):
    assert parse_yaml(repr(number), 'x') == number and isinstance(parse_yaml(repr(number), 'x'), float)


# --- several faults, and the table

def test_the_fault_of_a_typo_comes_before_those_it_causes():
    raw = {'run': {'name': 'a'}, 'trainer': {'max_update': 3, 'prompts_per_update': 0}, 'optimizer': {'lr': 0}}
    assert message(lambda: make_config(raw)) == 'config: trainer.max_update: unknown; did you mean max_updates? (and 3 more)'


def test_an_override_is_blamed_for_its_own_fault_only(tmp_path):
    (tmp_path / 'x.yaml').write_text(yaml.safe_dump(with_value('rollout', 'group_size', 1)))
    assert message(lambda: load_config(tmp_path / 'x.yaml', ['rollout.max_images=0'])).startswith(f'{tmp_path}/x.yaml: rollout.group_size')
    assert load_config(tmp_path / 'x.yaml', ['rollout.group_size=1', 'rollout.group_size=2']).rollout.group_size == 2
    assert message(lambda: load_config(tmp_path / 'x.yaml', ['rollout.group_size=0'])).startswith('--set: rollout.group_size: 0')


@pytest.mark.parametrize('kind', [RLConfig, SFTConfig])
@pytest.mark.parametrize('markdown', [False, True])
def test_the_table_has_every_field_once(kind, markdown):
    text = config_table(kind, markdown)
    for path, *_ in config_rows(kind):
        assert sum(line.startswith((f'{path} = ', f'| `{path}` | ')) for line in text.splitlines()) == 1
    if markdown: assert {line.count('|') for line in text.splitlines()} == {5}
