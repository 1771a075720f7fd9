"""The commands as a user starts them: real processes, their exit codes, and what they print."""
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from project import ROOT

from mmgrpo import __version__

QUICKSTART = 'configs/quickstart.yaml'
COMMANDS = {'mmgrpo_train': 'train_main', 'mmgrpo_sft': 'sft_main', 'mmgrpo_prepare': 'prepare_main', 'mmgrpo_replay': 'replay_main'}
HELP_CPU_S = 1.0    # of CPU time, which a busy machine stretches little; about 0.07 where this was written


def start(command, *args, patch='', **kwargs):
    "Start a command as its console script does; `patch` is code that runs before it."
    code = f'import sys; from mmgrpo.cli import {COMMANDS[command]} as main; {patch}\nsys.exit(main())'
    return subprocess.Popen([sys.executable, '-c', code, *map(str, args)], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kwargs)


def run(command, *args, **kwargs):
    "(exit code, stdout, stderr) of a command that ends within a minute."
    process = start(command, *args, **kwargs)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def only_line(command, *args, **kwargs):
    "The one line on stderr that a command refuses its input with, after its name."
    code, out, err = run(command, *args, **kwargs)
    assert (code, out, err.count('\n')) == (2, '', 1), err
    name, _, text = err.rstrip('\n').partition(': error: ')
    assert name == command
    return text


# --- help

@pytest.mark.parametrize('command', COMMANDS)
def test_help_shows_every_flag_an_example_and_the_exit_codes(command):
    code, out, err = run(command, '--help')
    assert (code, err) == (0, '') and out.startswith(f'usage: {command} ')
    flags = {'mmgrpo_train': ['--stop-after-updates'], 'mmgrpo_prepare': ['--output'], 'mmgrpo_replay': ['--update', '--tolerance', '--draw']}
    input_flags = [] if command == 'mmgrpo_replay' else ['--config', '--help-config']
    for flag in ['--set', '--debug', '--version', *input_flags, *flags.get(command, [])]: assert f'  {flag}' in out
    assert f'  {command} ' + ('--config configs/' if input_flags else 'runs/') in out
    assert [line.split()[0] for line in out.partition('exit codes:\n')[2].splitlines()] == ['0', '1', '2', '130']


def test_help_costs_less_than_a_second_and_loads_nothing_heavy():
    "The best of three, since the first may write bytecode and a neighbour may hold the caches."
    def cpu_s():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run('mmgrpo_train', '--help')[0] == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert min(cpu_s() for _ in range(3)) < HELP_CPU_S
    code = 'import sys; from mmgrpo.cli import train_main as main\ntry: main()\nexcept SystemExit: print(*sys.modules)'
    done = subprocess.run([sys.executable, '-c', code, '--help'], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert not {'torch', 'transformers', 'pydantic', 'numpy'} & set(done.stdout.splitlines()[-1].split())


def test_a_config_error_does_not_load_torch():
    code = ('import sys; from mmgrpo.cli import train_main as main\n'
            'print(main(["--config", "no.yaml"]), "torch" in sys.modules)')
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == '2 False\n'


@pytest.mark.parametrize('command', COMMANDS)
def test_version_is_that_of_the_package(command): assert run(command, '--version') == (0, f'{command} {__version__}\n', '')


@pytest.mark.parametrize('command, field', [('mmgrpo_train', 'rollout.group_size = 8'), ('mmgrpo_sft', 'run.seed = 0')])
def test_help_config_prints_the_fields(command, field):
    code, out, err = run(command, '--help-config')
    assert (code, err) == (0, '') and field in out.splitlines()


# --- bad input

@pytest.mark.parametrize('command', [command for command in COMMANDS if command != 'mmgrpo_replay'])
def test_a_missing_config_is_named(command):
    assert only_line(command, '--config', 'no/such.yaml') == 'no/such.yaml: no such file'
    assert only_line(command).startswith('--config FILE is needed')


def test_a_missing_run_is_named():
    assert only_line('mmgrpo_replay', 'no/such', '--update', 1) == 'no/such is not a run: it has no config.json'


@pytest.mark.parametrize('given, expected', [
    ('rollout.group_size=1', '--set: rollout.group_size: 1 is not legal; an integer of at least 2'),
    ('rollout.group_sise=4', '--set: rollout.group_sise: unknown; did you mean group_size?'),
    ('rolout.group_size=4', 'configs/quickstart.yaml: rolout: unknown; did you mean rollout?'),
    ('optimizer.lr=.nan', '--set: optimizer.lr: nan is not legal; a finite number above 0'),
    ('optimizer.lr=1e999', '--set: optimizer.lr: inf is not legal; a finite number above 0'),
    ('data.shuffle=yes', '--set: data.shuffle: "yes" is not legal; true or false'),
    ('rollout.text_temperature=0', '--set: rollout.text_temperature: 0 is not legal'),
    ('rollout.min_images=2', '--set: rollout.min_images: 2 is above rollout.max_images, 1'),
    ('data.validation_splits=[train]', '--set: data.validation_splits: "train" is data.train_split too'),
    ('checkpoint.keep_latest=0', '--set: checkpoint.keep_latest: 0 is not legal; an integer of at least 1'),
    ('run.name=../elsewhere', '--set: run.name: "../elsewhere" is not legal; a name of'),
    ('run.name=a\nb', '--set: run.name: "a b" is not legal; a name of'),
    ('data.fixed_train_indices=[1', '--set data.fixed_train_indices: line 1, column 3: not legal YAML'),
    ('group_size=4', '--set group_size=4: not legal; section.key=value'),
    ('rollout.group_size', '--set rollout.group_size: not legal; section.key=value'),
])
def test_a_bad_value_is_refused_in_one_line_that_names_the_field(given, expected):
    assert only_line('mmgrpo_train', '--config', QUICKSTART, '--set', given).startswith(expected)


@pytest.mark.parametrize('data, expected', [
    (b'', 'the file is empty; it needs sections'), (b'\xff\xfe', 'not UTF-8 text'), (b'- 1\n- 2\n', 'the file is [1, 2], not a mapping'),
    (b'run:\n\tname: x\n', 'line 2, column 1: not legal YAML'), (b'run: {name: a}\nrun: {name: b}\n', 'run is given twice'),
    (b'run: {name: a}\n', 'missing'), (b'run: {name: &n a}\ndata: *n\n', 'aliases are not supported'),
    (b'run: {name: a, "\\e[31m": 1}\n', r'run.\x1b[31m: unknown'),
])
def test_a_bad_file_is_refused_in_one_line_that_names_the_file(tmp_path, data, expected):
    path = tmp_path / 'bad.yaml'
    path.write_bytes(data)
    text = only_line('mmgrpo_train', '--config', path)
    assert text.startswith(f'{path}: ') and expected in text


def test_a_directory_is_not_a_config(tmp_path):
    assert only_line('mmgrpo_train', '--config', tmp_path) == f'{tmp_path}: cannot be read: Is a directory'


@pytest.mark.parametrize('args, expected', [
    (['--stop-after-updates', '0'], 'argument --stop-after-updates: 0 is not legal; an integer of at least 1'),
    (['--stop-after-updates=-1'], 'argument --stop-after-updates: -1 is not legal'),
    (['--stop-after-updates', '1.5'], 'argument --stop-after-updates: 1.5 is not legal'),
    (['--sets', 'a.b=1'], 'unrecognized arguments: --sets a.b=1'),
    (['--stop', '3'], 'unrecognized arguments: --stop 3'),
    (['--set'], 'argument --set: expected one argument'),
    (['extra'], 'unrecognized arguments: extra'),
])
def test_a_bad_command_line_is_refused_in_one_line(args, expected):
    assert only_line('mmgrpo_train', '--config', QUICKSTART, *args).startswith(expected)


def test_nothing_is_written_before_the_config_is_right(tmp_path):
    "The run directory appears only once there is a run."
    assert only_line('mmgrpo_train', '--config', QUICKSTART, '--set', f'run.output={tmp_path}/runs', '--set', 'rollout.group_size=1')
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback_and_ends_with_the_same_line():
    args = ['--config', QUICKSTART, '--set', 'rollout.group_size=1']
    code, out, err = run('mmgrpo_train', *args, '--debug')
    lines = err.splitlines()
    assert (code, out, lines[0]) == (2, '', 'Traceback (most recent call last):')
    assert lines[-1] == 'mmgrpo_train: error: ' + only_line('mmgrpo_train', *args)
    assert any('config.py' in line for line in lines)


# --- what a room raises; a stand-in for the trainer keeps these quick

def trainer(body):
    "Code that puts a stand-in for `mmgrpo.trainer` in place, whose `train` has this body."
    return ('import types; from mmgrpo.settings import InputError; trainer = types.ModuleType("mmgrpo.trainer"); '
            f'sys.modules["mmgrpo.trainer"] = trainer\ndef train(cfg, stop_after_updates=None):\n  {body}\n'
            'trainer.train = train\nsetup = types.ModuleType("mmgrpo.setup"); sys.modules["mmgrpo.setup"] = setup\n'
            'setup.prepare_cache = lambda cfg, output: output')


@pytest.mark.parametrize('body, code, line', [
    ('raise InputError("adapter a is of another model")', 2, 'adapter a is of another model'),
    ('raise ValueError("manual same-run rollback is unsupported")', 2, 'manual same-run rollback is unsupported'),
    ('open("no/such/adapter")', 2, 'no/such/adapter: no such file'),
    ('raise RuntimeError("another process\\n writes this run")', 1, 'RuntimeError: another process writes this run (--debug shows where)'),
    ('raise OSError(28, "No space left on device", "runs/x")', 1,
     "OSError: [Errno 28] No space left on device: 'runs/x' (--debug shows where)"),
    ('1/0', 1, 'ZeroDivisionError: division by zero (--debug shows where)'),
    ('import json; json.loads("{")', 1, None),
])
def test_a_failure_has_its_code_and_one_line(body, code, line):
    got, out, err = run('mmgrpo_train', '--config', QUICKSTART, patch=trainer(body))
    assert (got, out, err.count('\n')) == (code, '', 1), err
    assert err.startswith('mmgrpo_train: error: ')
    if line is not None: assert err == f'mmgrpo_train: error: {line}\n'


def test_the_trainer_gets_the_checked_config_and_the_pause():
    body = 'print(cfg.run.name, cfg.rollout.group_size, stop_after_updates)'
    args = ['--config', QUICKSTART, '--set', 'run.name=a', '--set', 'rollout.group_size=2', '--set', 'rollout.group_size=3']
    assert run('mmgrpo_train', *args, patch=trainer(body)) == (0, 'a 3 None\n', '')
    assert run('mmgrpo_train', *args, '--stop-after-updates', '7', patch=trainer(body)) == (0, 'a 3 7\n', '')


def test_prepare_takes_its_place_from_the_flag_else_from_the_config():
    args = ['--config', QUICKSTART, '--set', 'data.cache_root=from/config']
    assert run('mmgrpo_prepare', *args, patch=trainer('pass')) == (0, 'prepared from/config\n', '')
    assert run('mmgrpo_prepare', *args, '--output', 'from/flag', patch=trainer('pass')) == (0, 'prepared from/flag\n', '')
    assert 'data.cache_root: null is no place' in only_line('mmgrpo_prepare', '--config', QUICKSTART, '--set', 'data.cache_root=null')


@pytest.mark.skipif(os.name != 'posix', reason='sends a signal')
@pytest.mark.parametrize('sent, code, line', [(signal.SIGINT, 130, 'interrupted'), (signal.SIGTERM, 143, 'stopped by SIGTERM')])
def test_a_signal_ends_with_its_code_and_one_line(sent, code, line):
    process = start('mmgrpo_train', '--config', QUICKSTART, patch=trainer('import time; print("on", flush=True); time.sleep(60)'),
                    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))    # a job in the background ignores it
    assert process.stdout.readline() == 'on\n'
    process.send_signal(sent)
    began = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (code, f'mmgrpo_train: {line}\n') and time.monotonic() - began < 10


@pytest.mark.skipif(os.name != 'posix', reason='sends a signal')
@pytest.mark.parametrize('sent, code, line', [('SIGINT', 130, 'interrupted'), ('SIGTERM', 143, 'stopped by SIGTERM')])
@pytest.mark.parametrize('where', ['class Gone:\n    def __del__(self): os.kill(os.getpid(), signal.{}); list(range(999))\n  Gone()',
                                   'os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.{}))\n  os.waitpid(os.fork() or os._exit(0), 0)'],
                         ids=['__del__', 'at fork'])
def test_a_signal_that_python_drops_is_heard_a_second_later(where, sent, code, line):
    "What is raised in a callback of the interpreter is printed and forgotten; the command must not train to its end."
    body = f'import os, signal, time\n  {where.format(sent)}\n  time.sleep(60)'
    began = time.monotonic()
    process = start('mmgrpo_train', '--config', QUICKSTART, patch=trainer(body),
                    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    _, err = process.communicate(timeout=100)
    assert 'Exception ignored in' in err, 'the first is dropped'
    assert (process.returncode, err.splitlines()[-1]) == (code, f'mmgrpo_train: {line}') and time.monotonic() - began < 30


# --- the ways to start it

def test_the_module_is_a_command_as_well():
    "torchrun and accelerate start modules."
    done = subprocess.run([sys.executable, '-m', 'mmgrpo.cli', '--config', 'no.yaml'], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, 'mmgrpo_train: error: no.yaml: no such file\n')


def test_the_console_scripts_name_functions_that_exist():
    scripts = re.search(r'^console_scripts = (.*)$', (ROOT / 'settings.ini').read_text(), re.M)[1].split()
    assert dict(script.split('=') for script in scripts) == {name: f'mmgrpo.cli:{main}' for name, main in COMMANDS.items()}


@pytest.mark.parametrize('command', COMMANDS)
def test_an_installed_script_answers(command):
    script = shutil.which(command, path=str(Path(sys.executable).parent))
    if script is None: pytest.skip('the package is not installed here')
    done = subprocess.run([script, '--version'], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f'{command} {__version__}\n')
