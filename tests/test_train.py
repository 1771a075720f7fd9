"""Whole runs of a tiny random model: the same bytes twice, after a pause, and after a crash at any of its steps."""
import contextlib
import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mmgrpo.journal as journal
import mmgrpo.setup as setup
import mmgrpo.trainer as trainer
import pytest
from mmgrpo.checkpoint import load_checkpoint
from mmgrpo.config import make_config, run_directory
from mmgrpo.score import PolicyScorer
from mmgrpo.settings import InputError
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


@pytest.fixture(scope='module')
def model(tmp_path_factory) -> Path:
    return setup.save_example_model(tmp_path_factory.mktemp('model'))


@pytest.fixture(scope='module')
def other_model(tmp_path_factory) -> Path:
    return setup.save_example_model(tmp_path_factory.mktemp('other'), seed=1)


def config(model, output, **changes):
    "Four updates of two puzzles with four rollouts; `section__key` changes a value."
    raw = dict(
        run=dict(name='run', output=str(output)), data=dict(n_train=8, n_valid=6),
        model=dict(path=str(model), lora_rank=2, lora_alpha=4),
        rollout=dict(group_size=4, max_think_tokens=6, max_answer_tokens=2),
        trainer=dict(max_updates=4, prompts_per_update=2, device='cpu', micro_batch_rollouts=4),
        visual=dict(kl_coef=.1), optimizer=dict(lr=.01),
        evaluation=dict(rollouts_per_prompt=2, max_prompts=4, every_updates=2, ablations=False),
        checkpoint=dict(every_updates=2), logging=dict(pictures_every_updates=2))
    for path, value in changes.items():
        section, key = path.split('__')
        raw.setdefault(section, {})[key] = value
    return make_config(raw)


def run(cfg, **kwargs) -> list[str]:
    "Train; the lines it wrote."
    with contextlib.redirect_stdout(io.StringIO()) as out: trainer.train(cfg, **kwargs)
    return out.getvalue().splitlines()


def without_clocks(name:str, data:bytes):
    "A file's content but for what is about wall-clock time."
    if name.endswith('train_log.jsonl'):
        return [{k: v for k, v in json.loads(line).items() if not k.startswith('timing/')} for line in data.splitlines()]
    if name.endswith('summary.json'): return {k: v for k, v in json.loads(data).items() if k != 'timing'}
    return data


def tree(cfg) -> dict:
    "All files of a run but for events, which hold clocks, and the config, which holds its place."
    root = run_directory(cfg)
    names = {p.relative_to(root).as_posix(): p for p in root.rglob('*') if p.is_file()}
    return {name: without_clocks(name, p.read_bytes()) for name, p in names.items()
            if not name.startswith('tensorboard/') and name != 'config.json'}


def same(a:dict, b:dict) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if a[name] != b[name]] == []


def curves(cfg) -> dict:
    "tag -> [(step, value), ...] of every scalar but the clocks."
    events = EventAccumulator(str(run_directory(cfg)/'tensorboard'), size_guidance=dict(scalars=0)).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()['scalars']
            if not tag.startswith('timing/')}


@pytest.fixture(scope='module')
def straight(model, tmp_path_factory):
    "A run from beginning to end: its config, files and lines."
    cfg = config(model, tmp_path_factory.mktemp('straight'))
    lines = run(cfg)
    return cfg, tree(cfg), lines


# --- the same bytes

def test_twice_is_the_same(straight, model, tmp_path):
    cfg = config(model, tmp_path)
    run(cfg)
    same(tree(cfg), straight[1])
    assert curves(cfg) == curves(straight[0])


def test_a_pause_changes_nothing(straight, model, tmp_path):
    cfg = config(model, tmp_path)
    for n in (1, 2): assert run(cfg, stop_after_updates=n)[-1] == f'RL_PAUSED step={1 if n == 1 else 3}'
    lines = run(cfg, stop_after_updates=5)
    assert lines[0].startswith('RL_RESUME successful_updates=3 query_update=3 checkpoint=update-000003-attempt-000003')
    assert any(line.startswith('RL_TRAINING_COMPLETE {') for line in lines)
    mine, wanted = tree(cfg), straight[1]
    checkpoints = {name for name in mine.keys() ^ wanted.keys() if name.startswith('checkpoints/')}
    assert mine.keys() ^ wanted.keys() == checkpoints, 'where a run paused there may be a checkpoint more'
    assert load_checkpoint(run_directory(cfg)/'checkpoints'/'update-000003-attempt-000003').permanent is False
    same(*({k: v for k, v in files.items() if k not in checkpoints and 'MANIFEST' not in k} for files in (mine, wanted)))
    assert curves(cfg) == curves(straight[0]), 'each point once'


class Crash(BaseException):
    "As good as a kill: nobody catches it, and whatever comes after it is not done."


def crash_at(monkeypatch, name:str, n:int, after:bool) -> None:
    "Let the `n`-th call of a function that the trainer uses crash, before or after it does its work."
    room = next(room for room in (trainer, journal, setup) if hasattr(room, name))
    whole, calls = getattr(room, name), []

    def crashing(*args, **kwargs):
        calls.append(name)
        if len(calls) == n and not after: raise Crash
        value = whole(*args, **kwargs)
        if len(calls) == n: raise Crash
        return value

    monkeypatch.setattr(room, name, crashing)


@pytest.mark.parametrize('name, n, after', [
    ('write_cache', 1, True), ('write_origin', 1, True), ('save', 1, False), ('save', 1, True), ('measured', 1, True),
    ('collect', 1, False), ('execute_actor_update', 3, True), ('log_attempt', 3, False), ('log_attempt', 3, True),
    ('keep_pictures', 2, True), ('save_checkpoint', 2, True), ('ensure_validation', 2, False), ('ensure_validation', 2, True),
    ('finish', 1, False), ('run_summary', 1, True)])
def test_a_crash_changes_nothing(straight, model, tmp_path, monkeypatch, name, n, after):
    cfg = config(model, tmp_path)
    with monkeypatch.context() as patch:
        crash_at(patch, name, n, after)
        with pytest.raises(Crash): run(cfg)
    run(cfg)
    same(tree(cfg), straight[1])
    assert curves(cfg) == curves(straight[0])


def test_a_finished_run_is_left_alone(straight):
    cfg, root = straight[0], run_directory(straight[0])
    def times(): return {p: p.stat().st_mtime_ns for p in (root, *root.rglob('*'))}
    before = times()
    assert run(cfg) == run(cfg, stop_after_updates=1) == [f'RL_ALREADY_COMPLETE {root}']
    assert times() == before


# --- what a run says and writes

def test_the_lines_that_scripts_read(straight):
    lines = straight[2]
    assert lines[0] == 'RL_RESUME successful_updates=0 query_update=0 checkpoint=None'
    progress = [line for line in lines if line.startswith('RL_PROGRESS')]
    assert len(progress) == 4
    assert all(re.fullmatch(r'RL_PROGRESS [1-4]/4 reward=\d\.\d{4} valid=\d/8 grad=\d+\.\d{4}', line) for line in progress)
    saved = [line for line in lines if line.startswith('RL_CHECKPOINT')]
    assert saved == [f'RL_CHECKPOINT_COMPLETE step={n} rank=0' for n in (0, 2, 4)]
    done = next(line for line in lines if line.startswith('RL_TRAINING_COMPLETE '))
    summary = json.loads(done.partition(' ')[2])
    assert (summary['successful'], summary['adapter'], summary['reference']) == (4, 'adapter', 'reference')


def test_the_log_has_one_set_of_keys_and_no_clock_outside_timing(straight):
    log = straight[1]['train_log.jsonl']
    assert [line['attempted'] for line in log] == [1, 2, 3, 4]
    assert len({tuple(line) for line in log}) == 1
    assert [line['policy/text/ref_kl'] for line in log][0] == 0, 'the policy is its reference before the first step'
    assert all(line['policy/text/ratio_mean'] == line['policy/visual/ratio_mean'] == 1 for line in log)
    assert all(line['policy/text/gap'] < 1e-4 and line['policy/visual/gap'] < 1e-4 for line in log)
    assert all(line['grad_norm'] > 0 for line in log), 'otherwise these runs would prove little'


def test_a_pause_at_the_end_finishes(model, tmp_path):
    lines = run(config(model, tmp_path), stop_after_updates=4)
    assert not any(line.startswith('RL_PAUSED') for line in lines)
    assert (run_directory(config(model, tmp_path))/'summary.json').exists()


def test_a_run_without_logs_and_evaluations(model, tmp_path):
    cfg = config(model, tmp_path, logging__jsonl=False, logging__pictures_every_updates=0, evaluation__at_start=False,
                 evaluation__at_end=False, evaluation__every_updates=0)
    run(cfg, stop_after_updates=3)
    run(cfg)
    root = run_directory(cfg)
    assert not (root/'train_log.jsonl').exists() and not (root/'pictures').exists()
    summary = json.loads((root/'summary.json').read_bytes())
    assert summary['validation_start'] == summary['validation_final'] == summary['validation_change'] == {}
    assert [step for step, _ in curves(cfg)['group/reward_mean']] == [1, 2, 3, 4], 'also without a log each point once'
    quiet = config(model, tmp_path, run__name='quiet', logging__jsonl=False, logging__tensorboard=False)
    run(quiet)
    assert not (run_directory(quiet)/'tensorboard').exists()
    assert (run_directory(quiet)/'adapter'/'COMPLETE').exists()


# --- numbers that are not finite

def poison(monkeypatch, attempts:set[int]) -> None:
    "Let every score of these attempts, counted from 1, be NaN."
    whole, count = trainer.execute_actor_update, []

    def poisoned(learner, *args, **kwargs):
        count.append(1)
        if len(count) not in attempts: return whole(learner, *args, **kwargs)
        def score(batch):
            scored = learner.scorer(batch)
            return replace(scored, logps=scored.logps * float('nan'))
        return whole(replace(learner, scorer=score), *args, **kwargs)

    monkeypatch.setattr(trainer, 'execute_actor_update', poisoned)


def test_a_bad_update_is_skipped_logged_and_saved(model, tmp_path, monkeypatch):
    cfg = config(model, tmp_path, optimizer__max_nonfinite_updates=1)
    poison(monkeypatch, {2})
    lines = run(cfg)
    log = tree(cfg)['train_log.jsonl']
    assert [(line['attempted'], line['successful'], line['nonfinite']) for line in log] == [(1, 1, 0), (2, 1, 1), (3, 2, 1), (4, 3, 1), (5, 4, 1)]
    assert [line['skipped_nonfinite'] for line in log] == [False, True, False, False, False]
    assert log[1]['grad_norm'] is None
    assert [line['query_update'] for line in log] == [1, 2, 3, 4, 5], 'the bad batch is not tried again'
    assert any(line.endswith('grad=nan') for line in lines)
    assert [step for step, _ in curves(cfg)['grad_norm']] == [1, 3, 4, 5]


def test_one_bad_update_too_many_ends_the_run_for_good(model, tmp_path, monkeypatch):
    cfg = config(model, tmp_path, optimizer__max_nonfinite_updates=0)
    with monkeypatch.context() as patch:
        poison(patch, {2})
        with pytest.raises(RuntimeError, match='GRPO exceeded its non-finite update budget'): run(cfg)
    newest = sorted((run_directory(cfg)/'checkpoints').iterdir())[-1]
    assert newest.name == 'update-000001-attempt-000002', 'the failure is durable'
    assert load_checkpoint(newest).state['nonfinite'] == 1
    with pytest.raises(RuntimeError, match='restored GRPO state exceeded its non-finite budget'): run(cfg)


def test_a_sampler_that_disagrees_stops_before_the_first_step(model, tmp_path, monkeypatch):
    whole = PolicyScorer.__call__
    monkeypatch.setattr(PolicyScorer, '__call__', lambda self, batch: whole(self, replace(batch, temperature=batch.temperature * 1.05)))
    cfg = config(model, tmp_path)
    with pytest.raises(RuntimeError, match='trainer.gap_tolerance_text'): run(cfg)
    assert [p.name for p in (run_directory(cfg)/'checkpoints').iterdir()] == ['update-000000-attempt-000000']
    assert not (run_directory(cfg)/'train_log.jsonl').exists()


# --- refusals

def refused(cfg, match:str, error=InputError) -> None:
    "The run is refused, and nothing below its output is touched."
    output = Path(cfg.run.output)
    def seen(): return {p: p.stat().st_mtime_ns for p in output.rglob('*')}
    before = seen()
    with pytest.raises(error, match=match): run(cfg)
    assert seen() == before


def test_bad_input_is_refused_untouched(model, other_model, tmp_path):
    cache = setup.prepare_cache(config(model, tmp_path), tmp_path/'cache')
    (tmp_path/'foreign').mkdir()
    (tmp_path/'foreign'/'thesis.txt').write_text('mine')
    refused(config(model, tmp_path, run__name='foreign'), 'not a run of ours')
    refused(config(tmp_path/'nowhere', tmp_path), 'model.path', FileNotFoundError)
    refused(config(other_model, tmp_path, data__cache_root=str(cache)), 'was made for model')
    refused(config(model, tmp_path, data__cache_root=str(tmp_path/'nothing')), 'run mmgrpo_prepare first', FileNotFoundError)
    refused(config(model, tmp_path, data__cache_root=str(cache), data__validation_splits=['dev']), "no split 'dev'")
    refused(config(model, tmp_path, trainer__world_size=2), 'trainer.world_size: 2')
    damaged = cache/'cache.safetensors'
    damaged.write_bytes(damaged.read_bytes()[:-1] + b'x')
    refused(config(model, tmp_path, data__cache_root=str(cache)), 'cache.safetensors')


def test_a_run_keeps_its_config(straight, model, tmp_path):
    refused(config(model, straight[0].run.output, optimizer__lr=.02), 'completed GRPO run config differs')
    cfg = config(model, tmp_path)
    run(cfg, stop_after_updates=1)
    refused(config(model, tmp_path, optimizer__lr=.02), 'optimizer.lr: 0.01 -> 0.02')
    with pytest.raises(InputError, match='trainer.micro_batch_rollouts: 4 -> 8'): run(config(model, tmp_path, trainer__micro_batch_rollouts=8))
    changed = dict(trainer__micro_batch_rollouts=8, checkpoint__resume_mode='execution_change')
    assert run(config(model, tmp_path, **changed), stop_after_updates=1)[-1] == 'RL_PAUSED step=2'


def test_a_run_keeps_its_model(model, other_model, tmp_path):
    run(config(model, tmp_path), stop_after_updates=1)
    with pytest.raises(InputError, match='provenance.json does not fit this start'): run(config(other_model, tmp_path))


# --- forks

def test_a_fork_goes_on_from_another_run_and_leaves_it_alone(straight, model, tmp_path):
    parent = run_directory(straight[0])
    newest = sorted((parent/'checkpoints').iterdir())[-1]
    before = tree(straight[0])
    cfg = config(model, tmp_path, trainer__max_updates=6, checkpoint__resume_from=str(newest))
    lines = run(cfg)
    assert lines[0] == f'RL_RESUME successful_updates=4 query_update=4 checkpoint={newest.name}'
    same(tree(straight[0]), before)
    mine = tree(cfg)
    assert [line['attempted'] for line in mine['train_log.jsonl']] == [5, 6]
    assert mine['reference/reference.safetensors'] == before['reference/reference.safetensors']
    assert mine['train_log.jsonl'][0]['policy/text/ref_kl'] > 0, 'measured from where the parent began'
    assert mine['train_log.jsonl'][0]['policy/lr'] > 0, 'by its own schedule'
    assert run(cfg) == [f'RL_ALREADY_COMPLETE {run_directory(cfg)}']


def test_an_older_checkpoint_of_the_same_run_is_refused(model, tmp_path):
    cfg = config(model, tmp_path)
    run(cfg, stop_after_updates=3)
    oldest, *_, newest = sorted((run_directory(cfg)/'checkpoints').iterdir())
    with pytest.raises(InputError, match='rollback is unsupported'): run(config(model, tmp_path, checkpoint__resume_from=str(oldest)))
    assert run(config(model, tmp_path, checkpoint__resume_from=str(newest)), stop_after_updates=1)[0].endswith(newest.name)


# --- two processes

def test_two_processes_are_one(straight, model, tmp_path):
    "The real command under the real launcher: gradients are added up, the main process writes, all of them speak."
    raw = config(model, tmp_path, trainer__world_size=2).as_dict()
    (tmp_path/'run.yaml').write_text(json.dumps(raw))
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', '2', '-m', 'mmgrpo.cli']
    done = subprocess.run([*command, '--config', tmp_path/'run.yaml'], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert sorted(line for line in lines if line.startswith('RL_CHECKPOINT')) == [
        f'RL_CHECKPOINT_COMPLETE step={n} rank={rank}' for n in (0, 2, 4) for rank in (0, 1)]
    assert [line for line in lines if 'PROGRESS' in line] == [line for line in straight[2] if 'PROGRESS' in line]
    one, two = (load_file(Path(output)/'run'/'adapter'/'adapter_model.safetensors') for output in (straight[0].run.output, tmp_path))
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-4
