"""The edge cases of what a trainer of this kind promises that no other test has. Where each promise is kept:

config: unknown keys, bounds, copies, fingerprints          test_config
config: order of errors, device, an unusable pause          here
launch, ranks, stages, one rank fails, two processes        test_processes, test_train
signals, stacks                                             test_signals, test_kills
claim, lock, two starters, a killed holder                  test_storage, test_kills, test_tamper
place: a link to the run, a file in the way                 here
a finished run: untouched, damaged, without its adapter     test_train, test_tamper, here
the newest commit wins; rollback; forks; what they inherit  test_train, here
resume: whole state, missing parts, another run's           here, test_tamper, test_fingerprints
budget of updates that are not finite                       test_train, test_numbers
provenance, environment, schedule, parameters               test_fingerprints, here
reference: swapped in and out, whatever happens             test_score, here
order of prompts: epochs, failed batches, no global noise   here, test_train
metrics: one line and one point each, torn, cut, rewound    test_train, test_tamper, test_invariance
checkpoints: order of a commit, names, pruning              test_storage, test_disk, test_crash_states, here
validation: identity, stale and half reports                here, test_train
pause, finish, summary, console                             test_train, here
the process afterwards: threads, flags, generators          here
"""
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from faults import PAUSE, checkpoints, files
from tiny import made, train  # noqa: F401

from mmgrpo import setup, trainer
from mmgrpo.checkpoint import prune_checkpoints, save_checkpoint
from mmgrpo.config import SFTConfig, make_config
from mmgrpo.data import query_indices_for_update, query_schedule_fingerprint
from mmgrpo.record import RunDirectory
from mmgrpo.score import FrozenReference
from mmgrpo.settings import InputError
from mmgrpo.storage import json_bytes, parse_json, sealed, sha256

ERRORS = (ValueError, RuntimeError, FileNotFoundError)


# --- before anything happens

def test_a_bad_config_is_told_before_a_missing_device(made, tmp_path):
    cfg = made.config(tmp_path/'run', dict(trainer=dict(device='cuda')))
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match='trainer.device: cuda is not available here'): train(cfg)
    broken = cfg.model_copy(update=dict(rollout=cfg.rollout.model_copy(update=dict(group_size=1))))
    with pytest.raises(InputError, match='rollout.group_size'): train(broken)
    assert not (tmp_path/'run').exists()


@pytest.mark.parametrize('n', [0, -1])
def test_a_pause_after_no_update(made, tmp_path, n):
    with pytest.raises(InputError, match=f'stop_after_updates: {n} is not legal'): train(made.config(tmp_path/'run'), stop_after_updates=n)
    assert not (tmp_path/'run').exists()


def test_a_file_in_the_way(made, tmp_path):
    for way in (tmp_path/'run', tmp_path/'file'): way.write_text('mine')
    for run in (tmp_path/'run', tmp_path/'file'/'run'):
        with pytest.raises(ERRORS, match=str(tmp_path)): train(made.config(run))
    assert (tmp_path/'run').read_text() == (tmp_path/'file').read_text() == 'mine'


def test_a_run_that_is_a_link(made, tmp_path):
    "The same run by another name: it goes on where it is, also when its own checkpoint is named through the link."
    run = made.copy('paused', tmp_path/'there')
    (tmp_path/'run').symlink_to(run)
    named = tmp_path/'run'/'checkpoints'/checkpoints(run)[-1].name
    lines = train(made.config(tmp_path/'run', dict(checkpoint=dict(resume_from=str(named)))))
    assert f'query_update={PAUSE} ' in lines[0]
    assert (run/'adapter'/'adapter_model.safetensors').read_bytes() == (made.done/'adapter'/'adapter_model.safetensors').read_bytes()


# --- a finished run

@pytest.mark.parametrize('name, data, match', [
    ('summary.json', b'{', 'summary.json is not valid JSON'), ('summary.json', b'[]', 'summary.json'), ('config.json', None, 'config.json'),
    ('adapter/COMPLETE', None, 'completed GRPO run has no committed adapter'), ('adapter/adapter_model.safetensors', b'x', 'completed GRPO run has no committed adapter')])
def test_an_end_that_is_not_whole(made, tmp_path, name, data, match):
    run = made.copy('done', tmp_path)
    if data is None: (run/name).unlink()
    else: (run/name).write_bytes(data)
    before = files(run)
    with pytest.raises(ERRORS, match=match): train(made.config(run))
    assert files(run) == before


def test_a_finished_run_needs_no_model_any_more(made, tmp_path):
    "It was moved, or its disk was taken off: the run is complete all the same."
    run = made.copy('done', tmp_path)
    before = files(run)
    assert train(made.config(run, dict(model=dict(path=str(tmp_path/'gone'))))) == [f'RL_ALREADY_COMPLETE {run}']
    assert files(run) == before
    with pytest.raises(FileNotFoundError, match='model.path: .*gone'): train(made.config(tmp_path/'new', dict(model=dict(path=str(tmp_path/'gone')))))


@pytest.mark.parametrize('shell, code, line', [
    ('exec "$@" > /dev/full', 1, 'mmgrpo_train: error: StorageError: cannot write to standard output: No space left on device'),
    ('exec "$@" >&-', 0, ''), ('exec "$@" > /dev/full 2>&-', 1, ''), ('"$@" | true; exit ${PIPESTATUS[0]}', 1, 'cannot write to standard output: Broken pipe')])
def test_a_terminal_that_takes_no_lines(made, tmp_path, shell, code, line):
    "A full disk behind stdout has a name; a stdout that was closed is not missed."
    (tmp_path/'config.json').write_text(json.dumps(made.config(made.done).as_dict()))
    done = subprocess.run(['bash', '-c', f'sleep 1; {shell}' if 'true' in shell else shell, 'bash', sys.executable, '-m', 'mmgrpo.cli', '--config', str(tmp_path/'config.json')],
                          stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, len(done.stderr.splitlines())) == (code, bool(line)) and line in done.stderr, done.stderr


def test_room_is_looked_for_where_checkpoints_lie(made, tmp_path, monkeypatch):
    "Also where checkpoints/ is a link to another disk."
    run, asked = made.copy('paused', tmp_path), []
    (run/'checkpoints').rename(tmp_path/'disk')
    (run/'checkpoints').symlink_to(tmp_path/'disk')
    monkeypatch.setattr(trainer, 'check_space', lambda path, needed: asked.append(path.resolve()))
    train(made.config(run), stop_after_updates=1)
    assert asked == [tmp_path/'disk']


# --- where a run goes on

@pytest.fixture(scope='module')
def fork(made, tmp_path_factory):
    "A run that goes on from another one's end, after one update of its own: (run, where it came from, its sections)."
    place = tmp_path_factory.mktemp('fork')
    parent = made.copy('done', place/'parent')
    sections = dict(trainer=dict(max_updates=6), checkpoint=dict(resume_from=str(checkpoints(parent)[-1])))
    train(made.config(place/'run', sections), stop_after_updates=1)
    return place/'run', parent, sections


def test_a_runs_own_newest_checkpoint_comes_before_its_parents(made, fork, tmp_path):
    run = Path(shutil.copytree(fork[0], tmp_path/'run'))
    lines = train(made.config(run, fork[2]), stop_after_updates=1)
    assert lines[0] == 'RL_RESUME successful_updates=5 query_update=5 checkpoint=update-000005-attempt-000005'


def test_the_same_command_goes_on_when_the_parent_is_gone(made, fork, tmp_path):
    run = Path(shutil.copytree(fork[0], tmp_path/'run'))
    gone = dict(fork[2], checkpoint=dict(resume_from=str(tmp_path/'gone'/'checkpoints'/checkpoints(fork[1])[-1].name)))
    assert 'checkpoint=update-000005-attempt-000005' in train(made.config(run, gone), stop_after_updates=1)[0]


def test_a_fork_ends_with_a_summary_of_its_own(made, fork, tmp_path):
    "It inherits no report of its parent, neither file nor figure."
    run = Path(shutil.copytree(fork[0], tmp_path/'run'))
    train(made.config(run, fork[2]))
    summary = parse_json((run/'summary.json').read_bytes(), 'summary')
    assert summary['successful'] == summary['attempted'] == 6
    assert sorted(p.name for p in run.glob('validation_*')) == ['validation_step_000004.json', 'validation_step_000006.json']


def test_a_parent_that_is_not_there(made, tmp_path):
    with pytest.raises(ERRORS, match='resume_from.*nowhere'): train(made.config(tmp_path/'run', dict(checkpoint=dict(resume_from=str(tmp_path/'nowhere')))))
    assert not (tmp_path/'run').exists()


@pytest.mark.parametrize('kind, match', [
    ('run', "resume_from: '.*' is not a checkpoint; one of them is .*/checkpoints/update-000004-attempt-000004"),
    ('checkpoints', "resume_from: '.*' is not a checkpoint; one of them is .*/checkpoints/update-000004-attempt-000004"),
    ('empty', 'resume_from: .*empty is not complete: it has no MANIFEST'), ('damaged', r'resume_from: .*state\.json holds 0 bytes'),
    ('sft', r'resume_from: .*state\.json has no .*reference.*policy: it was saved by another command'),
    ('rank', 'resume_from: checkpoint: tensors are not those trained here')])
def test_a_parent_that_does_not_fit(made, tmp_path, kind, match):
    "The field is named, and nothing is claimed: also where an earlier start left an empty run."
    parent, place = made.copy('done', tmp_path/'parent'), tmp_path/'place'/'run'
    asked = dict(run=parent, checkpoints=parent/'checkpoints', empty=tmp_path/'empty').get(kind, checkpoints(parent)[-1])
    (tmp_path/'empty').mkdir()
    if kind == 'damaged': (asked/'state.json').write_bytes(b'')
    if kind == 'sft': asked = save_checkpoint(tmp_path/'sft', dict(weights=dict(w=torch.zeros(2))), dict(attempted=4, successful=4))
    sections = dict(checkpoint=dict(resume_from=str(asked)), model=dict(lora_rank=4) if kind == 'rank' else {}, trainer=dict(max_updates=6))
    with pytest.raises(InputError, match=f'^checkpoint.{match}'): train(made.config(place, sections))
    assert not place.parent.exists()
    place.mkdir(parents=True)
    with pytest.raises(InputError, match=f'^checkpoint.{match}'): train(made.config(place, sections))
    assert not list(place.iterdir())


def restated(run, change) -> Path:
    "Change the state of the newest checkpoint, behind a manifest that fits it."
    last = checkpoints(run)[-1]
    state = parse_json((last/'state.json').read_bytes(), 'state')
    (last/'state.json').write_bytes(data := json_bytes(change(state), indent=1))
    manifest = {key: value for key, value in parse_json((last/'MANIFEST').read_bytes(), 'MANIFEST').items() if key != 'digest'}
    manifest['files']['state.json'] = dict(size=len(data), sha256=sha256(data))
    (last/'MANIFEST').write_bytes(sealed(manifest))
    return last


@pytest.mark.parametrize('key', ['reference', 'scheduler', 'rng', 'nonfinite', 'skipped', 'last_rewards'])
def test_a_state_that_lacks_something(made, tmp_path, key):
    run = made.copy('paused', tmp_path)
    last = restated(run, lambda state: {name: value for name, value in state.items() if name != key})
    with pytest.raises((ValueError, RuntimeError), match=f'{last}.*{key}'): train(made.config(run), stop_after_updates=1)


@pytest.mark.parametrize('change, match', [
    (lambda rng: [], 'random states of 0 ranks'),
    (lambda rng: [{key: value for key, value in rng[0].items() if key != 'numpy'}], 'random states of'),
    (lambda rng: [rng[0] | dict(torch='00')], 'a random state cannot be restored'),
    (lambda rng: [rng[0] | dict(python=[3, [1], None])], 'a random state cannot be restored')])
def test_random_states_that_are_not_whole(made, tmp_path, change, match):
    run = made.copy('paused', tmp_path)
    restated(run, lambda state: state | dict(rng=change(state['rng'])))
    with pytest.raises((ValueError, RuntimeError), match=match): train(made.config(run), stop_after_updates=1)


# --- what a run is made of

def test_the_order_of_prompts_has_one_spelling():
    "A golden value: the hash is of a text that anybody can write down."
    text = 'seed=3\nshuffle=True\nprompts=2\ngroup=8\nb\na'
    assert query_schedule_fingerprint(['b', 'a'], 3, True, 2, 8) == hashlib.sha256(text.encode()).hexdigest()
    assert query_schedule_fingerprint(['a', 'b'], 3, True, 2, 8) != query_schedule_fingerprint(['b', 'a'], 3, True, 2, 8)
    assert query_schedule_fingerprint(['b', 'a'], 3, False, 2, 8) != query_schedule_fingerprint(['b', 'a'], 3, True, 2, 8)


@pytest.mark.parametrize('shuffle', [True, False])
@pytest.mark.parametrize('n, size', [(5, 2), (5, 5), (3, 7), (1, 4), (4, 1)])
def test_each_epoch_draws_each_prompt_once(n, size, shuffle):
    "Also where a batch is larger than the data, or goes over an epoch's end; nothing but the arguments decides."
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    rows = [10 * i for i in range(n)]
    drawn = [row for update in range(n * 3) for row in query_indices_for_update(rows, size, 7, update, shuffle)]
    epochs = [drawn[at:at + n] for at in range(0, len(drawn), n)]
    assert all(sorted(epoch) == rows for epoch in epochs)
    assert shuffle or all(epoch == rows for epoch in epochs)
    if shuffle and n > 3: assert len({tuple(epoch) for epoch in epochs}) > 1, 'each epoch has its own order'
    assert query_indices_for_update(rows, size, 7, 2, shuffle) == tuple(drawn[2*size:3*size])
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_the_provenance_counts_each_parameter_once(made):
    held = parse_json((made.done/'provenance.json').read_bytes(), 'provenance')
    cfg = made.config(made.done)
    policy = setup.load_policy(cfg, 'cpu')
    trainable = {id(p): p.numel() for p in policy.trainable().values()}
    parts = dict(held['parameters'])
    assert parts.pop('trainable') == sum(parts.values()) == sum(trainable.values())
    assert held['train_samples'] == cfg.data.n_train and held['image_reward'] == dict(backend='disabled', loaded=False)


def test_a_reference_is_taken_back_whatever_happens(made):
    "Nested, after an error, with gradients, modes and the optimizer's own parameters as they were."
    policy = setup.load_policy(made.config(made.done), 'cpu')
    reference, named = FrozenReference(policy), policy.trainable()
    optimizer = torch.optim.AdamW(named.values())
    with torch.no_grad():
        for p in named.values(): p.add_(1.)
    for p in named.values(): p.grad = torch.ones_like(p)
    policy.model.train()
    policy.model.model.visual.eval()
    seen = lambda: ([(id(p), p.data_ptr(), p.detach().clone().tolist(), p.grad.tolist(), p.requires_grad) for p in policy.trainable().values()],
                    [module.training for module in policy.model.modules()], [id(p) for group in optimizer.param_groups for p in group['params']])
    mine, digest = seen(), reference.sha256
    with pytest.raises(KeyError), reference.apply(policy):
        inside = [p.detach().clone() for p in policy.trainable().values()]
        assert all(torch.equal(p, held) for p, held in zip(inside, reference.state.values()))
        with reference.apply(policy): pass
        assert all(torch.equal(p, q.detach()) for p, q in zip(inside, policy.trainable().values())), 'the inner block gives back to the outer'
        raise KeyError('anything')
    assert seen() == mine and reference.sha256 == digest == FrozenReference(policy, reference.state).sha256


# --- checkpoints and reports

def test_what_is_never_pruned(tmp_path):
    "The current one, permanent ones, what is not ours, and what a living writer is at; the number is of rolling ones."
    def save(n, permanent=False): return save_checkpoint(tmp_path, {'policy': {'w': torch.ones(1)}}, {'successful': n, 'attempted': n}, permanent)
    paths = [save(n, permanent=n in (0, 3)) for n in range(7)]
    folder = tmp_path/'checkpoints'
    for name in ('mine', 'update-x', '.tmp-update-000009-attempt-000009-abcdef01', 'update-000002-attempt-000002.bak'): (folder/name).mkdir()
    others = {p.name for p in folder.iterdir()} - {p.name for p in paths}
    left = lambda: [int(p.name[-6:]) for p in sorted(folder.iterdir()) if p.name not in others]
    for keep, wanted in ((4, [0, 2, 3, 4, 5, 6]), (2, [0, 3, 5, 6]), (1, [0, 3, 6]), (0, [0, 3, 6])):
        prune_checkpoints(folder, keep, paths[-1])
        assert left() == wanted, keep
        assert others <= {p.name for p in folder.iterdir()}


@pytest.mark.parametrize('change', [lambda data: data[:-40], lambda data: data[:40] + b' ' + data[40:], lambda data: b'', lambda data: b'{}\n'])
def test_a_report_that_is_not_whole(made, tmp_path, change):
    "It is neither taken nor written over."
    run = made.copy('paused', tmp_path)
    report = run/'validation_start.json'
    shutil.rmtree(run/'checkpoints')
    (run/'checkpoints').mkdir()
    for name in ('train_log.jsonl', 'validation_step_000002.json'): (run/name).unlink()
    report.write_bytes(change(report.read_bytes()))
    held = report.read_bytes()
    with pytest.raises(ERRORS, match=str(report)): train(made.config(run), stop_after_updates=1)
    assert report.read_bytes() == held


def test_a_report_of_other_weights(made, tmp_path):
    "It has a name that fits, and is of something else: an error, not another report in its place."
    run = made.copy('paused', tmp_path)
    report, other = run/'validation_step_000004.json', (made.done/'validation_step_000002.json').read_bytes()
    value = {key: found for key, found in parse_json(other, 'other').items() if key != 'digest'}
    report.write_bytes(sealed(value | dict(identity=value['identity'] | dict(successful_update=4))))
    with pytest.raises(RuntimeError, match=f'{report} is the report of another policy'): train(made.config(run))
    report.unlink()
    train(made.config(run))
    assert (run/'summary.json').exists()


def test_a_report_from_before_a_declared_change(made, tmp_path):
    "The run went back to an older checkpoint and computes with other means since: its weights at that update are others, for a reason that it wrote down."
    run, name = tmp_path/'run', 'validation_step_000002.json'
    train(made.config(run), stop_after_updates=3)
    for last in checkpoints(run)[1:]: (last/'state.json').write_bytes(b'')
    before = parse_json((run/name).read_bytes(), name)
    changed = dict(checkpoint=dict(resume_mode='execution_change', damaged='fall_back', every_updates=1), trainer=dict(micro_batch_rollouts=1))
    lines = train(made.config(run, changed), stop_after_updates=3)
    assert f'RL_REPORT_STALE {name}: made before a declared change' in lines
    after = parse_json((run/name).read_bytes(), name)
    assert after['identity']['policy'] != before['identity']['policy'] and after['computed_with'] != before['computed_with']
    lines = train(made.config(run, dict(trainer=changed['trainer'])))      # nothing is declared any more, nothing is stale
    assert not any('RL_REPORT_STALE' in line for line in lines) and parse_json((run/name).read_bytes(), name) == after
    assert (run/'summary.json').exists()


def test_a_report_from_before_a_fall_back_without_a_change(made, tmp_path):
    "The same means come to the same weights: the report is theirs, and is not made again."
    run, name = made.copy('paused', tmp_path), 'validation_step_000002.json'
    for last in checkpoints(run)[-2:]: (last/'state.json').write_bytes(b'')
    stamp = (run/name).stat().st_mtime_ns
    train(made.config(run, dict(checkpoint=dict(damaged='fall_back', every_updates=1))))
    assert (run/name).stat().st_mtime_ns == stamp and (run/'summary.json').exists()


# --- afterwards

def test_the_process_is_as_before(made, tmp_path):
    "A run fixes threads, kernels and generators for itself; whoever called it finds them as they were, also after an error."
    def seen(): return (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), torch.get_num_threads(), torch.get_default_dtype(),
                        torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.is_grad_enabled(),
                        os.getcwd(), os.umask(os.umask(0o022)))
    os.umask(0o022)
    before, run = seen(), made.copy('paused', tmp_path)
    train(made.config(run), stop_after_updates=1)
    assert seen() == before
    (checkpoints(run)[-1]/'state.json').write_bytes(b'')
    (run/'summary.json').unlink(missing_ok=True)
    with pytest.raises(ERRORS): train(made.config(run))
    assert seen() == before


def test_what_a_paused_run_has_not(made):
    assert not (made.paused/'adapter').exists() and not (made.paused/'summary.json').exists()
    assert json.loads((made.done/'summary.json').read_bytes())['adapter'] == 'adapter'


def test_a_run_directory_knows_a_run_of_another_kind(made, tmp_path):
    raw = dict(run=dict(name='run', output=str(tmp_path)), pictures=dict(updates=1, batch_puzzles=1), trajectories=dict(updates=1, batch_puzzles=1))
    made.copy('paused', tmp_path)
    with pytest.raises(InputError, match='belongs to a run of RLConfig, this is SFTConfig'): RunDirectory.open(make_config(raw, SFTConfig))
