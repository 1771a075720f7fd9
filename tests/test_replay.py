"""Artifacts come back to the bit whatever is in them, and a replay finds any figure of a run that is not what was recorded."""
import contextlib
import io
import json
import math
import shutil
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mmgrpo import setup, trainer
from mmgrpo.artifact import (FOLDER, MANIFEST, artifact_path, column_bytes, kept_attempts, load_update_artifact,
    save_update_artifact)
from mmgrpo.checkpoint import load_checkpoint, save_checkpoint
from mmgrpo.cli import replay_main
from mmgrpo.config import run_directory
from mmgrpo.core import Group, Prompt, Rollout, Segment, Verdict
from mmgrpo.engine import TokenRecord, UpdateResult
from mmgrpo.record import LOG, RunLock
from mmgrpo.replay import replay, saved_attempts
from mmgrpo.score import PolicyScorer
from mmgrpo.settings import InputError
from mmgrpo.setup import example_config, save_example_model
from mmgrpo.storage import parse_tensors, unseal, write_manifest


def plain(value):
    "A value as something that `==` compares to the last bit, types and all."
    if isinstance(value, torch.Tensor): return str(value.dtype), tuple(value.shape), value.contiguous().numpy().tobytes()
    if isinstance(value, dict): return {key: plain(held) for key, held in value.items()}
    if isinstance(value, (tuple, list)): return type(value), [plain(held) for held in value]
    if is_dataclass(value): return type(value), {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    return type(value), repr(value)


# --- what is saved is what is loaded

FLOATS = st.sampled_from([0., -0., 1., .1, -1e-30, 1e300, math.nan, math.inf, -math.inf]) | st.floats(width=32)
REWARDS = FLOATS.filter(math.isfinite) | st.none()    # None: unscored
BYTES = 3    # of a visual token


class Random:
    "Values of a batch that obey its invariants and nothing else."
    def __init__(self, draw): self.draw = draw

    def integer(self, low, high): return self.draw(st.integers(low, high))
    def floats(self, n): return torch.tensor(self.draw(st.lists(FLOATS, min_size=n, max_size=n)), dtype=torch.float64).float()

    def integers(self, *shape):
        high = self.draw(st.sampled_from([1, 200, 70_000, 2**40]))    # each needs a wider type
        return torch.randint(-high, high, shape, generator=torch.Generator().manual_seed(self.integer(0, 99)))

    def segment(self):
        n, drawn = self.integer(0, 4), self.draw(st.booleans())
        kind = dict(kind='visual', finish='exact', grid=(1, n)) if drawn else dict(kind='text', finish=self.draw(st.sampled_from(['stop', 'length'])))
        bits = self.integers(n, BYTES).abs().to(torch.uint8) if drawn else None
        return Segment(ids=self.integers(n), logps=self.floats(n), legal=self.integers(n), temperature=self.draw(st.sampled_from([1., .7])),
                       bits=bits, **kind)

    def rollout(self, name, index, sets):
        segments = tuple(self.segment() for _ in range(self.integer(0, 4)))    # without, with one, with two pictures
        positions = self.integers(3, sum(map(len, segments)))
        return Rollout(name, index, segments, positions, tuple(sets[:self.integer(0, len(sets))]), self.draw(st.booleans()))

    def verdict(self):
        parts = self.draw(st.dictionaries(st.text(max_size=3), FLOATS, max_size=2))
        rewards = self.draw(st.dictionaries(st.text(max_size=3), REWARDS, max_size=2))
        problems = {name: 'timed out' for name, reward in rewards.items() if reward is None}
        letter = self.draw(st.sampled_from([None, 'A']))
        return Verdict(self.draw(REWARDS), self.draw(st.booleans()), 'ok', parts, letter, rewards, problems)

    def group(self, n):
        name, draw = f'puzzle-{n}', self.draw(st.sampled_from([n, f'{n}+1']))
        sets = [tuple(range(k)) for k in range(1, 4)]
        rollouts = tuple(self.rollout(name, index, sets) for index in range(self.integer(0, 3)))
        verdicts = tuple(self.verdict() for _ in rollouts) if self.draw(st.booleans()) else ()
        prompt = Prompt(name, self.integers(4), self.integers(3, 4), torch.zeros(0, BYTES, dtype=torch.uint8), ())
        return Group(prompt, rollouts, verdicts, group_id=(draw, f'{name}#2' if n else name))

    def record(self, group, r):
        figures = [self.floats(r.n_tokens) for _ in range(3)]
        return TokenRecord(r.sample_id, r.index, group.group_id, *figures[:2], figures[2] if self.draw(st.booleans()) else None)

    def result(self, groups):
        records = tuple(self.record(g, r) for g in groups for r in g.rollouts if self.draw(st.booleans()))
        flags, numbers = [self.draw(st.booleans()) for _ in range(3)], [self.draw(FLOATS) for _ in range(4)]
        stats = {'text/loss': self.draw(FLOATS), 'text/ref_kl': None}
        return UpdateResult(flags[0], flags[1], numbers[0], flags[2], numbers[1], tuple(numbers[2:]), stats, records=records)


@st.composite
def updates(draw):
    random = Random(draw)
    groups = tuple(random.group(n) for n in range(random.integer(0, 3)))
    return groups, random.result(groups)


@given(updates())
def test_what_is_loaded_is_what_was_saved(tmp_path_factory, update):
    groups, result = update
    folder, prompts = tmp_path_factory.mktemp('run'), {g.prompt.sample_id: g.prompt for g in groups}
    path = save_update_artifact(folder, 7, groups, result, dict(config='x'))
    found, first = load_update_artifact(path, prompts.get), {p.name: p.read_bytes() for p in path.iterdir()}
    assert plain(found.groups) == plain(groups)
    assert plain(found.result) == plain(result)
    save_update_artifact(folder, 7, found.groups, found.result, found.facts)
    assert {p.name: p.read_bytes() for p in path.iterdir()} == first, 'the same values are the same bytes'
    shutil.rmtree(folder)


# --- a run

UPDATES = 5


def configured(root, **changes):
    "Checkpoints after 0, 2, 4 and 5 updates, and no evaluation."
    few = dict(evaluation__at_start=False, evaluation__at_end=False, checkpoint__keep_latest=9, trainer__max_updates=UPDATES,
               logging__tensorboard=False, logging__pictures_every_updates=0)
    return example_config(root, **(few | changes))


def trained(cfg, **kwargs) -> Path:
    "The run's directory."
    with contextlib.redirect_stdout(io.StringIO()): return trainer.train(cfg, **kwargs)


@pytest.fixture(scope='module')
def root(tmp_path_factory) -> Path:
    save_example_model((folder := tmp_path_factory.mktemp('runs'))/'model')
    return folder


@pytest.fixture(scope='module')
def run(root) -> Path: return trained(configured(root))


@pytest.fixture
def copy(run, request) -> Path:
    "A copy of the run beside it, to be spoiled."
    shutil.copytree(run, folder := run.parent/f'copy-{abs(hash(request.node.name))}')
    yield folder
    shutil.rmtree(folder)


def differing(found, update=None) -> list[str]:
    return [figure.name for figure in found.updates[update or max(found.updates)] if not figure.equal]


@pytest.mark.parametrize('update, chain, start', [(1, [1], 0), (2, [1, 2], 0), (4, [3, 4], 2), (5, [5], 4)])
def test_every_update_is_found_again_to_the_bit(run, update, chain, start):
    found = replay(run, update)
    assert found.agrees and str(found).count('equal to the bit') == len(found.updates[update]) + len(chain) - 1
    assert (list(found.updates), int(found.start[-6:]), found.notes) == (chain, start, ())
    names = [figure.name for figure in found.updates[update]]
    assert ('weights after' in names) == (update in saved_attempts(run))
    assert all(figure.n > 0 for figure in found.updates[update])


def test_the_rollouts_are_drawn_again_to_the_bit(run, copy):
    assert replay(run, 4, draw=True).updates[4][0].name == 'rollouts drawn again'
    assert replay(run, 4, draw=True).agrees
    change_column(artifact_path(copy, 4), 'rollouts.safetensors', 'bits', lowest_bit)
    figure = replay(copy, 4, draw=True).updates[4][0]
    assert not figure.within(1e9) and figure.note.endswith('is another')


def test_a_replay_writes_nothing_and_needs_no_lock(run):
    stamps = {p: p.stat().st_mtime_ns for p in run.rglob('*')}
    lock = RunLock(run)    # as if the run were going on
    try: assert replay(run, 3).agrees
    finally: lock.close()
    assert {p: p.stat().st_mtime_ns for p in run.rglob('*')} == stamps


def test_a_run_that_was_copied_elsewhere_is_replayed(run, tmp_path):
    shutil.copytree(run, tmp_path/'elsewhere')
    assert replay(tmp_path/'elsewhere', 5).agrees


def test_other_micro_batches_are_within_a_tolerance(run):
    found = replay(run, 4, tolerance=1e-3, overrides=['trainer.micro_batch_rollouts=3'])
    assert found.agrees
    assert not {'verdicts', 'advantages', 'learning rates'} & set(differing(found))


def test_the_run_goes_on_while_it_is_replayed(root):
    cfg = configured(root, run__name='paused')
    run = trained(cfg, stop_after_updates=3)
    assert replay(run, 3).agrees
    trained(cfg)
    assert replay(run, 4).agrees and replay(run, UPDATES).agrees


@pytest.mark.parametrize('changes', [
    dict(loss__inner_updates=3, loss__correction='truncate', visual__ratio_level='bit'),
    dict(loss__kl_in='reward', loss__advantage_scope='batch', loss__baseline='leave_one_out', text__kl_coef=.1),
    dict(loss__tied='drop', loss__truncated='drop', text__objective='reinforce', text__entropy_coef=.01, text__top_entropy_frac=.5),
    dict(reward__parts=[dict(name='jigsaw_letter'), dict(name='picture_fidelity', weight=.5)])],
    ids=['several steps', 'KL in the reward', 'some left out', 'two rewards'])
def test_an_update_by_other_rules_is_found_again_to_the_bit(root, changes):
    run = trained(configured(root, run__name='-'.join(changes), trainer__max_updates=2, **changes))
    found = replay(run, 2)
    assert found.agrees, str(found)


@pytest.mark.slow
def test_one_process_replays_what_two_did(root):
    "The artifact holds the rollouts and the records of both; sums are in another order."
    cfg = configured(root, run__name='two', trainer__world_size=2, trainer__max_updates=3)
    (root/'two.yaml').write_text(json.dumps(cfg.as_dict()))
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', '2', '-m', 'mmgrpo.cli']
    done = subprocess.run([*command, '--config', root/'two.yaml'], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = replay(run_directory(cfg), 3, tolerance=1e-3)
    assert found.agrees and 'computed with other means: world_size was 2, is 1' in found.notes
    assert [figure.equal for figure in found.updates[3]][0], 'verdicts'
    artifact = json.loads((artifact_path(run_directory(cfg), 3)/'rollouts.json').read_bytes())
    assert [len(group['rollouts']) for group in artifact] == [4, 4]


# --- what differs is named

def resealed(folder) -> None:
    "Let the manifest fit what the files are now."
    manifest = unseal((folder/MANIFEST).read_bytes(), MANIFEST)
    (folder/MANIFEST).unlink()
    write_manifest(folder, MANIFEST, {key: held for key, held in manifest.items() if key not in ('files', 'format', 'digest')})


def change_column(folder, file, name, change) -> None:
    columns = parse_tensors((folder/file).read_bytes(), file)
    columns[name] = change(columns[name].clone())
    (folder/file).write_bytes(column_bytes(columns))
    resealed(folder)


def change_json(folder, file, change) -> None:
    value = json.loads((folder/file).read_bytes())
    change(value)
    (folder/file).write_text(json.dumps(value))
    resealed(folder)


def lowest_bit(column):
    "The last bit of the number that is furthest from zero."
    whole = column.view(torch.int32) if column.is_floating_point() else column
    whole.view(-1)[int(column.abs().float().argmax())] ^= 1
    return column


@pytest.mark.parametrize('file, name, first', [
    ('rollouts.safetensors', 'bits', 'policy log-probs'),
    ('rollouts.safetensors', 'logps', 'sampled log-probs'),
    ('update.safetensors', 'policy_logps', 'policy log-probs'),
    ('update.safetensors', 'ref_logps', 'reference log-probs'),
    ('update.safetensors', 'advantages', 'advantages')])
def test_one_bit_of_a_column_is_found(copy, file, name, first):
    change_column(artifact_path(copy, 5), file, name, lowest_bit)
    found = replay(copy, 5)
    assert not found.agrees and first in differing(found)
    if file == 'update.safetensors': assert differing(found) == [first]
    else: assert 'verdicts' not in differing(found)


@pytest.mark.parametrize('change, names', [
    (lambda rows: rows[0]['verdicts'][1].update(reward=1. - rows[0]['verdicts'][1]['reward']), ['verdicts', 'advantages']),
    (lambda rows: rows[0]['verdicts'][1].update(letter='E'), ['verdicts']),
    (lambda rows: rows[1]['verdicts'][0]['parts'].update(n_pictures=9.), ['verdicts']),
    (lambda rows: rows[1]['verdicts'][0].update(rewards={'verdict': None}), ['verdicts'])])
def test_a_changed_verdict_is_found(copy, change, names):
    change_json(artifact_path(copy, 5), 'rollouts.json', change)
    found = replay(copy, 5, tolerance=1e6)
    assert differing(found)[:len(names)] == names and not found.agrees, 'a verdict is never within a tolerance'


@pytest.mark.parametrize('change, name', [
    (lambda held: held.update(loss=math.nextafter(held['loss'], 9)), 'loss'),
    (lambda held: held.update(loss=dict(float='nan')), 'loss'),
    (lambda held: held.update(grad_norm=2 * held['grad_norm']), 'gradient norm'),
    (lambda held: held['lrs'].reverse() or held['lrs'].append(0.), 'learning rates'),
    (lambda held: held.update(successful=False), 'other figures'),
    (lambda held: held['stats'].update({'visual/gap': 0.}), 'sampled log-probs'),
    (lambda held: held['stats'].update({'visual/surprise': None}), 'other figures')])
def test_a_changed_figure_is_found(copy, change, name):
    change_json(artifact_path(copy, 5), 'metrics.json', change)
    assert differing(replay(copy, 5)) == [name]


def test_a_changed_log_line_is_found(copy):
    *before, last = (copy/LOG).read_text().splitlines()
    line = json.loads(last) | {'group/reward_mean': 2., 'timing/seconds': 9.}
    (copy/LOG).write_text('\n'.join([*before, json.dumps(line), '']))
    found = replay(copy, 5)
    assert differing(found) == ['line of the log']
    assert found.updates[5][-3].note == 'group/reward_mean'
    (copy/LOG).unlink()
    assert replay(copy, 5).agrees, 'a run may keep no log'


def test_changed_weights_are_found_before_and_after(copy):
    path = saved_attempts(copy)[4]
    held = load_checkpoint(path)
    name = max(held.tensors['policy'], key=lambda name: float(held.tensors['policy'][name].abs().max()))
    held.tensors['policy'][name].view(-1)[0] += 1e-3
    shutil.rmtree(path)
    save_checkpoint(copy, held.tensors, held.state)
    assert differing(replay(copy, 4)) == ['weights after']
    assert {'policy log-probs', 'weights after'} <= set(differing(replay(copy, 5)))
    assert 'advantages' not in differing(replay(copy, 5))


def test_what_goes_wrong_early_is_told_of_the_chain(copy):
    change_column(artifact_path(copy, 3), 'update.safetensors', 'policy_logps', lowest_bit)
    found = replay(copy, 4)
    assert (differing(found, 3), differing(found, 4), found.agrees) == (['policy log-probs'], [], False)
    assert 'update 3 before it: policy log-probs differ' in str(found)


def test_a_tolerance_is_a_difference(copy):
    change_column(artifact_path(copy, 5), 'update.safetensors', 'policy_logps', lambda column: column + 1e-3)
    assert [replay(copy, 5, tolerance=tolerance).agrees for tolerance in (None, 1e-4, 1e-2)] == [False, False, True]


# --- updates that were thrown away, and runs that were killed

class Poisoned(PolicyScorer):
    "Finds no number for the rollouts of one puzzle."
    def __call__(self, batch):
        scored = super().__call__(batch)
        rows = torch.tensor([name.endswith('3') for name, _ in batch.names])[:, None] & scored.text_mask
        return replace(scored, logps=scored.logps.masked_fill(rows, math.nan))


def test_an_update_that_was_thrown_away_is_found_again(root, monkeypatch):
    monkeypatch.setattr(setup, 'PolicyScorer', Poisoned)
    run = trained(configured(root, run__name='poisoned', optimizer__max_nonfinite_updates=99, checkpoint__every_updates=4))
    lines = [json.loads(line) for line in (run/LOG).read_text().splitlines()]
    lost = [line['attempted'] for line in lines if line['skipped_nonfinite']]
    assert lost and kept_attempts(run) == [line['attempted'] for line in lines]
    for attempted in (lost[0], lines[-1]['attempted']): assert replay(run, attempted).agrees
    assert json.loads((artifact_path(run, lost[0])/'metrics.json').read_bytes())['loss'] == {'float': 'nan'}
    monkeypatch.undo()
    assert {'policy log-probs', 'loss', 'other figures'} <= set(differing(replay(run, lost[0], tolerance=1e6)))


def test_a_killed_run_leaves_the_artifacts_of_an_uninterrupted_one(run, root, monkeypatch):
    cfg, whole = configured(root, run__name='killed'), trainer.log_attempt

    def killed(journal, state, *rest):
        if state.attempted == 4: raise KeyboardInterrupt
        return whole(journal, state, *rest)

    monkeypatch.setattr(trainer, 'log_attempt', killed)
    with pytest.raises(KeyboardInterrupt): trained(cfg)
    other = run_directory(cfg)
    assert kept_attempts(other) == [1, 2, 3, 4], 'the artifact comes before the line'
    (other/FOLDER/'.tmp-attempt-000004-0123abcd').mkdir()
    change_column(artifact_path(other, 3), 'rollouts.safetensors', 'logps', lowest_bit)    # would be seen if it stayed
    monkeypatch.setattr(trainer, 'log_attempt', whole)
    trained(cfg)
    files = lambda run: {p.relative_to(run).as_posix(): p.read_bytes() for p in (run/FOLDER).rglob('*') if p.is_file()}
    assert files(other) == files(run)
    assert replay(other, 4).agrees


# --- what cannot be replayed

def test_only_the_latest_are_kept(root):
    run = trained(configured(root, run__name='few', logging__keep_artifacts=2))
    assert kept_attempts(run) == [4, 5]
    with pytest.raises(InputError, match=r'no artifact of update 2 \(older ones were removed, see logging.keep_artifacts\); updates that can be replayed: 5'): replay(run, 2)
    with pytest.raises(InputError, match='artifacts of updates 3 are missing between the checkpoint of update 2 and update 4'): replay(run, 4)
    assert replay(run, 5).agrees


def test_a_run_without_artifacts_says_why(root):
    run = trained(configured(root, run__name='none', logging__keep_artifacts=0, trainer__max_updates=1))
    assert not (run/FOLDER).exists()
    with pytest.raises(InputError, match='keeps no artifacts: logging.keep_artifacts was 0'): replay(run, 1)
    later = trained(configured(root, run__name='later'), stop_after_updates=2)     # kept at first, and then not any more: config.json tells of 50
    trained(configured(root, run__name='later', logging__keep_artifacts=0))
    with pytest.raises(InputError, match='keeps no artifacts: logging.keep_artifacts was 0'): replay(later, 1)
    for part in (later/FOLDER, later/'train_log.jsonl'): shutil.rmtree(part) if part.is_dir() else part.unlink(missing_ok=True)
    with pytest.raises(InputError, match='keeps no artifacts: no update was done yet'): replay(later, 1)


@pytest.mark.parametrize('update', [0, 6])
def test_an_update_that_is_not_there_says_which_are(run, update):
    with pytest.raises(InputError, match=f'no artifact of update {update}.*; updates that can be replayed: 1 to 5'): replay(run, update)


def test_a_checkpoint_that_was_pruned_makes_the_chain_longer(copy):
    shutil.rmtree(saved_attempts(copy)[2])
    assert list(replay(copy, 4).updates) == [1, 2, 3, 4]
    shutil.rmtree(saved_attempts(copy)[0])
    with pytest.raises(InputError, match='has no sound checkpoint before update 4; updates that can be replayed: 5'): replay(copy, 4)


def test_a_damaged_checkpoint_is_passed_over(copy):
    "As a run does that falls back: the one before is taken, and what could not be compared is told."
    (saved_attempts(copy)[4]/'state.json').write_bytes(b'')
    found = replay(copy, 5)
    assert found.agrees and list(found.updates) == [3, 4, 5] and found.start.startswith('update-000002')
    (note,) = found.notes
    assert note.startswith('update-000004-attempt-000004 was not compared: ') and note in str(found)
    for n in (0, 2): (saved_attempts(copy)[n]/'state.json').write_bytes(b'')
    with pytest.raises(InputError, match='has no sound checkpoint before update 5; updates that can be replayed: none'): replay(copy, 5)


def test_a_declared_change_in_between_is_told(root):
    "Updates before it were computed otherwise, so a last bit may differ for a reason that the record knows."
    cfg = configured(root, run__name='changed')
    trained(cfg, stop_after_updates=2)
    trained(configured(root, run__name='changed', trainer__micro_batch_rollouts=1, checkpoint__resume_mode='execution_change'))
    found = replay(run_directory(cfg), 4)
    assert found.agrees and found.notes == ('the run declared a change, see execution_changes.jsonl: updates before it were computed with other means',)


def test_a_run_behind_a_link_is_replayed_with_the_cache_beside_the_link(root, run, tmp_path):
    "The target's neighbourhood is somebody else's, and its disk may be full or read-only."
    (tmp_path/'far').mkdir()
    far = Path(shutil.copytree(run, tmp_path/'far'/'moved'))
    (root/'linked').symlink_to(far)
    assert replay(root/'linked', 1).agrees
    assert [p.name for p in far.parent.iterdir()] == ['moved'] and list(root.glob('cache-*'))
    (root/'linked').unlink()


def test_damage_is_named_and_not_replayed(copy):
    file = artifact_path(copy, 5)/'update.safetensors'
    file.write_bytes(file.read_bytes()[:-1] + b'!')
    with pytest.raises(ValueError, match='update.safetensors is damaged'): replay(copy, 5)


def test_another_model_is_refused(run, root):
    other = save_example_model(root/'other-model', seed=1)
    with pytest.raises(InputError, match='provenance.json does not fit what is here: cache was'): replay(run, 5, overrides=[f'model.path={other}'])


# --- the command

def told(*words):
    "(exit code, stdout, stderr) of the command."
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = replay_main(list(map(str, words)))
    return code, out.getvalue(), err.getvalue()


def test_the_command_says_by_its_code_whether_all_is_equal(copy):
    code, out, err = told(copy, '--update', 5)
    assert (code, err) == (0, '') and out.startswith(f'update 5 of {copy}, from update-000004-attempt-000004\n')
    assert [line.split('  ')[1] for line in out.splitlines()[2:4]] == ['verdicts', 'sampled log-probs']
    change_column(artifact_path(copy, 5), 'update.safetensors', 'advantages', lambda column: column + 1e-3)
    assert told(copy, '--update', 5)[0] == 1
    assert told(copy, '--update', 5, '--tolerance', '1e-2')[0] == 0
    code, out, err = told(copy, '--update', 9)
    assert (code, out, err.count('\n')) == (2, '', 1) and 'updates that can be replayed: 1 to 5' in err
    assert told(copy, '--update', 5, '--set', 'visual.kl_koef=0')[0] == 2
