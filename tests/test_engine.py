"""One update, seen from outside: how the work is cut, over micro-batches or processes, changes nothing but the last bits."""
import threading
from dataclasses import dataclass, replace

import pytest
import torch
from mmgrpo.advantage import AdvantageRule, RewardPart
from mmgrpo.core import Verdict
from mmgrpo.engine import (Learner, execute_actor_update, go_over, learning_rate_factor, make_optimizer,
    micro_batches, prepare, rollout_shares, token_batches, weight_totals)
from mmgrpo.loss import REDUCTIONS
from mmgrpo.objective import OBJECTIVES, Correction, ModalityRule, UpdateRules
from mmgrpo.policy import RolloutLimits, example_policy, example_prompt
from mmgrpo.process import DistributedContext
from mmgrpo.rollout import GRPORolloutController
from mmgrpo.score import FrozenReference, PolicyScorer

REWARDS = [[1., 0., 0., 1.], [0., 1., 0., 0.], [0., 0., 0., 0.], [1., 1., 0., 1.]]
RULES = UpdateRules(advantage=AdvantageRule('none'))


@dataclass(frozen=True)
class Settings:
    "Stands for the `optimizer` section."
    lr:float = 1e-2
    visual_head_lr:float | None = None
    beta1:float = .9
    beta2:float = .95
    eps:float = 1.    # so large that a step is in proportion to its gradient
    weight_decay:float = .1


class Rank(DistributedContext):
    "One of two ranks that are threads: collectives are exchanges through a shared table."
    def __init__(self, rank:int, table:list, barrier:threading.Barrier):
        super().__init__()
        self.rank, self.world_size, self.table, self.barrier = rank, 2, table, barrier

    def all_gather_object(self, value):
        self.table[self.rank] = value
        self.barrier.wait(60)
        both = list(self.table)
        self.barrier.wait(60)
        return both

    def broadcast_object(self, value): return self.all_gather_object(value)[0]

    def sum_(self, tensors):
        tensors = list(tensors)
        both = self.all_gather_object([t.clone() for t in tensors])
        for t, a, b in zip(tensors, *both): t.copy_(a + b)


def learner(**settings) -> Learner:
    policy = example_policy(RolloutLimits(max_think_tokens=4, max_answer_tokens=2))
    optimizer = make_optimizer(policy, Settings(**settings))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, 0, 10))
    return Learner(policy, PolicyScorer(policy), FrozenReference(policy), optimizer, scheduler)


@pytest.fixture(scope='module')
def groups():
    policy = learner().policy
    prompts = [example_prompt(policy, n, 'which' + '?' * n) for n in range(4)]
    made = GRPORolloutController(policy).rollouts(prompts, 4, key=(0, 0))
    return [g.scored([Verdict(r, True, 'ok', {}) for r in row]) for g, row in zip(made, REWARDS)]


def weights(learner:Learner) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in learner.policy.trainable().values()])


def moved(learner:Learner, groups, rules=RULES, **kwargs) -> torch.Tensor:
    "By how much one update changes the weights."
    before = weights(learner)
    result = execute_actor_update(learner, groups, rules, **kwargs)
    assert result.successful
    return weights(learner) - before


def close(found:torch.Tensor, wanted:torch.Tensor) -> None:
    "Equal but for rounding, measured by the length of what is wanted."
    assert float(wanted.norm()) > 0
    assert float((found - wanted).norm()) < 1e-4 * float(wanted.norm())


def in_two_ranks(learners, shares, scorers=(None, None), rules=RULES) -> list:
    "One update on each of two ranks; returns their results."
    table, barrier, results = [None, None], threading.Barrier(2), [None, None]

    def work(rank):
        mine = replace(learners[rank], scorer=scorers[rank] or learners[rank].scorer)
        results[rank] = execute_actor_update(mine, shares[rank], rules, Rank(rank, table, barrier))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads: thread.start()
    for thread in threads: thread.join(120)
    return results


def both(rules=RULES, **choices) -> UpdateRules:
    "The same choices for words and for pictures."
    return replace(rules, text=replace(rules.text, **choices), visual=replace(rules.visual, **choices))


@pytest.mark.parametrize('reduce', REDUCTIONS)
@pytest.mark.parametrize('size', [1, 3, 7])
def test_micro_batches_are_one_batch(groups, size, reduce):
    rules = both(reduce=reduce, length=9.)
    whole = moved(learner(), groups, rules)
    close(moved(learner(), groups, replace(rules, micro_batch_rollouts=size)), whole)


@pytest.mark.parametrize('level', ['token', 'bit'])
def test_the_ratio_level_does_not_change_the_first_step(groups, level):
    rules = replace(RULES, visual=ModalityRule(ratio_level=level))
    close(moved(learner(), groups, rules), moved(learner(), groups))


def test_the_order_of_groups_does_not_matter(groups):
    close(moved(learner(), groups[::-1]), moved(learner(), groups))


def test_a_tied_group_counts_in_the_normaliser_and_nowhere_else(groups):
    rules, parts = replace(RULES, visual=ModalityRule(weight=0.)), [groups[0], groups[1], groups[3]]
    def total(part):
        batches = micro_batches(token_batches(part, 64), rollout_shares(part, RULES))
        return weight_totals(batches, RULES, DistributedContext())['text']
    assert total(parts) < total(groups)
    smooth = dict(weight_decay=0., eps=1e3)
    close(moved(learner(**smooth), groups, rules), moved(learner(**smooth), parts, rules) * total(parts) / total(groups))


def test_two_ranks_are_one(groups):
    alone, both = learner(), [learner(), learner()]
    before = weights(alone)
    result = execute_actor_update(alone, groups, RULES)
    results = in_two_ranks(both, [groups[0::2], groups[1::2]])
    assert torch.equal(weights(both[0]), weights(both[1])), 'ranks hold the same weights'
    close(weights(both[0]) - before, weights(alone) - before)
    assert results[0] == results[1], 'and report the same figures'
    assert results[0].stats['visual/n_tokens'] == result.stats['visual/n_tokens']
    assert results[0].loss == pytest.approx(result.loss, abs=1e-6)
    assert results[0].grad_norm == pytest.approx(result.grad_norm, rel=1e-4)


def test_a_nan_on_one_rank_stops_both(groups):
    both = [learner(), learner()]
    before = [weights(one) for one in both]

    def broken(batch):
        scored = both[1].scorer(batch)
        return replace(scored, logps=scored.logps * float('nan'))

    results = in_two_ranks(both, [groups[0::2], groups[1::2]], (None, broken))
    assert [result.successful for result in results] == [False, False]
    assert all(torch.equal(weights(one), old) for one, old in zip(both, before))
    assert [one.scheduler.last_epoch for one in both] == [0, 0]
    assert not any(one.optimizer.state for one in both)


def test_tied_groups_move_nothing_without_a_kl_and_something_with_one(groups):
    one = learner()
    moved(one, groups)                                               # moments, and a distance to the reference
    tied = [g.scored([replace(v, reward=1.) for v in g.verdicts]) for g in groups]
    assert moved(one, tied).abs().max() == 0, 'neither momentum nor decay'
    pulled = moved(one, tied, replace(RULES, text=ModalityRule(kl_coef=.5), visual=ModalityRule(kl_coef=.5)))
    assert pulled.abs().max() > 0


def test_a_kl_pulls_back_to_the_reference(groups):
    one, rules = learner(weight_decay=0., beta1=0., eps=1e-3), replace(RULES, text=ModalityRule(kl_coef=1.), visual=ModalityRule(kl_coef=1.))
    for _ in range(3): moved(one, groups)
    tied = [g.scored([replace(v, reward=1.) for v in g.verdicts]) for g in groups]
    kl = []
    for _ in range(6):
        result = execute_actor_update(one, tied, rules)
        kl.append(result.stats['text/ref_kl'] + result.stats['visual/ref_kl'])
    assert kl[-1] < kl[0]


def test_the_head_that_draws_has_its_own_rate(groups):
    one = learner(visual_head_lr=1e-4, weight_decay=0., eps=1e-8)
    before = {name: p.detach().clone() for name, p in one.policy.trainable().items()}
    execute_actor_update(one, groups, RULES)
    step = {name: float((p.detach() - before[name]).abs().max()) for name, p in one.policy.trainable().items()}
    head = {name for name in step if 'output_layer_vistok' in name}
    assert max(step[name] for name in head) == pytest.approx(1e-4, rel=1e-3)       # Adam's first step is the rate
    assert max(step[name] for name in step.keys() - head) == pytest.approx(1e-2, rel=1e-3)


def test_clipping_shortens_and_is_reported(groups):
    result = execute_actor_update(learner(), groups, replace(RULES, max_grad_norm=1e-6))
    assert result.clipped and result.grad_norm > 1e-6
    assert not execute_actor_update(learner(), groups, replace(RULES, max_grad_norm=1e6)).clipped


# --- the choices of an update

LETTER, DRAWING = [[1., 0., 0., 1.], [0., 1., 0., 0.], [0., 0., 0., 0.], [1., 1., 0., 1.]], [[.3, .9, .1, .4], [.2] * 4, [.8, .1, .1, .3], [None, .4, .9, .2]]
PARTS = (RewardPart('letter', on='joint'), RewardPart('drawing', weight=2., on='visual'))
CHOICES = {
    'parts': replace(RULES, parts=PARTS),
    'each': UpdateRules(advantage=AdvantageRule(combine='each'), parts=PARTS),
    'batch, others': UpdateRules(advantage=AdvantageRule(scope='batch', baseline='leave_one_out'), tied='drop'),
    'sequence': both(ratio_level='sequence', reduce='sequence', kl_coef=.1, kl_estimator='k2'),
    'gate': both(objective='soft_gate', reduce='constant', length=9., correction=Correction('truncate', 'sequence')),
    'weights': both(objective='clipped_weight', entropy_coef=.1, kl_coef=.1, kl_estimator='unbiased'),
    'unsure': both(objective='reinforce', top_entropy_frac=.3, correction=Correction('mask')),
    'penalty': both(replace(RULES, kl_in='reward', truncated='drop'), kl_coef=.5, kl_estimator='k1'),
    'twice': replace(both(objective='clip', kl_coef=.1), inner_updates=2)}


@pytest.fixture(scope='module')
def judged(groups):
    "The groups with two named rewards; one drawing could not be judged."
    named = lambda v, letter, drawing: replace(v, rewards=dict(letter=letter, drawing=drawing))
    return [g.scored([named(*row) for row in zip(g.verdicts, *rows)]) for g, *rows in zip(groups, LETTER, DRAWING)]


def gone(**settings) -> Learner:
    "A learner that has left its reference."
    one = learner(**settings)
    with torch.no_grad():
        for name, p in one.policy.trainable().items(): p.add_(torch.linspace(-.02, .02, p.numel()).view(p.shape))
    return one


@pytest.mark.parametrize('name', CHOICES)
def test_no_choice_depends_on_how_the_work_is_cut(judged, name):
    "Micro-batches, the order of groups, ranks: the same step for every objective, reduction and way to combine rewards."
    rules = CHOICES[name]
    whole = moved(gone(), judged, rules)
    close(moved(gone(), judged[::-1], replace(rules, micro_batch_rollouts=3)), whole)
    ranks = [gone(), gone()]
    before = weights(ranks[0])
    results = in_two_ranks(ranks, [judged[:1], judged[1:]], rules=rules)      # as many groups as it comes
    assert results[0] == results[1] and torch.equal(weights(ranks[0]), weights(ranks[1]))
    close(weights(ranks[0]) - before, whole)


def test_the_gradient_is_the_same_to_rounding(groups):
    "Before any step, where AdamW cannot hide it: 3e-7 to 1.1e-6 of its length was measured in float32, depending on the CPU, for micro-batches of one and the groups in another order."
    def vector(part, size):
        one, alone = gone(), DistributedContext()
        one.policy.train(False)
        work = prepare(one, part, both(replace(RULES, micro_batch_rollouts=size), kl_coef=.1, kl_estimator='unbiased'), alone)
        go_over(one, work, [None] * len(work.batches), alone)
        return torch.cat([p.grad.flatten() for p in one.policy.trainable().values()]).double()
    whole = vector(groups, 64)
    for other in (vector(groups, 1), vector(groups[::-1], 64)): assert float((other - whole).norm()) < 4e-6 * float(whole.norm())


def test_a_rank_without_groups_takes_part(groups):
    "After tied groups were replaced a rank may have none left; the update is that of the other."
    ranks, alone = [learner(), learner()], learner()
    results = in_two_ranks(ranks, [groups, []], rules=both(kl_coef=.1))
    result = execute_actor_update(alone, groups, both(kl_coef=.1))
    assert results[0] == results[1] and results[1].records == () and results[0].stats == result.stats
    assert torch.equal(weights(ranks[0]), weights(ranks[1])) and torch.equal(weights(ranks[0]), weights(alone))


def test_a_reward_for_words_moves_words_and_one_for_pictures_pictures(judged):
    "With the rewards of a modality routed away, the step is that of the other modality alone."
    still = dict(weight_decay=0., eps=1e3)
    for kind, other in (('text', 'visual'), ('visual', 'text')):
        routed = replace(RULES, parts=(RewardPart('letter', on=kind),))
        silent = replace(RULES, **{other: ModalityRule(weight=0.)})
        close(moved(learner(**still), judged, routed), moved(learner(**still), judged, silent))


def test_tied_groups_pull_to_the_reference_unless_they_are_dropped(groups):
    "trl#5640: with equal rewards the whole gradient is that of the penalty, or exactly nothing; also where the batch has the deviation."
    tied = [g.scored([replace(v, reward=.25 * i) for v in g.verdicts]) for i, g in enumerate(groups)]
    for scope in ('group', 'batch'):
        rules = both(UpdateRules(advantage=AdvantageRule(scope=scope)), kl_coef=.3)
        kept, gone_ = execute_actor_update(gone(), tied, rules), execute_actor_update(gone(), tied, replace(rules, tied='drop'))
        assert kept.stats['text/tied_frac'] == gone_.stats['visual/tied_frac'] == 1
        assert kept.grad_norm > 0 and gone_.grad_norm == gone_.loss == gone_.stats['text/n_tokens'] == 0 and gone_.zero_gradient


def test_dropping_groups_is_not_having_had_them(groups):
    "AReaL#450: four groups of which one is tied and dropped are a run of three."
    rules, few = replace(RULES, tied='drop'), [groups[0], groups[1], groups[3]]
    close(moved(learner(), groups, rules), moved(learner(), few, rules))


def test_cut_rollouts_are_dropped_from_both_sides(groups):
    "All of a batch cut: loss 0, gradient 0, and the update still counts. One of it cut: as if its tokens were not there, though its group saw its reward."
    def cut(g, which): return replace(g, rollouts=tuple(replace(r, truncated=r.index in which) for r in g.rollouts))
    rules = replace(RULES, truncated='drop')
    nothing = execute_actor_update(learner(), [cut(g, range(4)) for g in groups], rules)
    assert nothing.successful and nothing.zero_gradient and nothing.loss == 0 and nothing.stats['visual/n_tokens'] == 0
    one = execute_actor_update(learner(), [cut(g, [2] if g is groups[1] else []) for g in groups], rules)
    whole = execute_actor_update(learner(), [cut(g, []) for g in groups], rules)
    assert whole.stats['text/n_tokens'] - one.stats['text/n_tokens'] == int(groups[1].rollouts[2].n_tokens - groups[1].rollouts[2].visual_mask.sum()
        - (groups[1].rollouts[2].logps[~groups[1].rollouts[2].visual_mask] == 0).sum())
    assert one.stats['text/counted_frac'] < whole.stats['text/counted_frac'] == 1
    assert one.stats['text/advantage_max'] == whole.stats['text/advantage_max']


def test_unscored_rollouts_are_not_trained_on(groups):
    "ms-swift#8123: None is no zero. The others are compared as if they were the group; nothing is nan."
    gap = [groups[0].scored([replace(v, reward=None if i == 1 else v.reward) for i, v in enumerate(groups[0].verdicts)]), *groups[1:]]
    result = execute_actor_update(learner(), gap, RULES)
    assert result.successful and result.stats['text/scored_frac'] == 15/16
    assert result.records[1].advantages.abs().max() == 0
    assert result.records[0].advantages[0].item() == pytest.approx(1/3, abs=1e-6)
    nobody = execute_actor_update(learner(), [g.scored([replace(v, reward=None) for v in g.verdicts]) for g in groups], RULES)
    assert nobody.successful and nobody.zero_gradient and nobody.loss == 0


@pytest.mark.parametrize('size', [1, 4, 64])
def test_the_first_pass_is_on_policy_to_the_bit(groups, size):
    "verl#6280: with a rate of 0, in micro-batches of any size, every ratio is exactly 1, and in the second pass as well."
    rules = replace(RULES, inner_updates=2, micro_batch_rollouts=size)
    for n in (1, 2):
        one = learner()
        for group in one.optimizer.param_groups: group['lr'] = 0.
        stats = execute_actor_update(one, groups, replace(rules, inner_updates=n)).stats
        for kind in ('text', 'visual'):
            assert [stats[f'{kind}/{key}'] for key in ('ratio_mean', 'ratio_max', 'clip_frac', 'approx_kl')] == [1., 1., 0., 0.]


def test_a_second_pass_measures_from_before_the_first(groups):
    "trl promised a clip and had a ratio of 1 for ever: with a rate above 0 the second pass is off policy, and a tight clip holds it."
    loose, tight = (execute_actor_update(learner(eps=1e-8), groups, replace(both(clip_low=c, clip_high=c), inner_updates=3)) for c in (.9, 1e-6))
    for kind in ('text', 'visual'):
        assert loose.stats[f'{kind}/ratio_mean'] != 1 and loose.stats[f'{kind}/approx_kl'] > 0
        assert loose.stats[f'{kind}/clip_frac'] < .2 < tight.stats[f'{kind}/clip_frac']
    once = execute_actor_update(learner(eps=1e-8), groups, RULES)
    assert [r.policy_logps.tolist() for r in loose.records] == [r.policy_logps.tolist() for r in once.records]


def test_dropout_is_off_where_scores_are_compared(groups):
    "R1-V and others scored with dropout on: a module with p = .5, left in training mode, changes nothing."
    one = learner()
    drops = [name for name, m in one.policy.model.named_modules() if name.endswith('lora_dropout')]
    for name in drops: one.policy.model.get_submodule(name)['default'] = torch.nn.Dropout(.5)
    one.policy.train(True)
    stats = execute_actor_update(one, groups, RULES).stats
    assert drops and stats['text/gap'] < 1e-5 and stats['text/ratio_max'] == 1


def test_a_penalty_in_the_reward_is_subtracted_before_the_group_compares(groups):
    "Policy and reference apart: advantages follow reward minus kappa times the mean distance; at the reference nothing changes."
    rules = both(replace(RULES, kl_in='reward'), kl_coef=3., kl_estimator='k1')
    plain, at_home, apart = (execute_actor_update(one, groups, r) for one, r in ((learner(), RULES), (learner(), rules), (gone(), rules)))
    assert [r.advantages[0].item() for r in at_home.records] == [r.advantages[0].item() for r in plain.records]
    G, costs, n_bits = 4, [], learner().policy.n_bits
    for r, v in zip(apart.records, [v for g in groups for v in g.verdicts]):
        d, words = r.policy_logps - r.ref_logps, r.policy_logps != 0
        seen = next(x for g in groups for x in g.rollouts if (g.group_id, x.index) == (r.group_id, r.index)).visual_mask
        parts = [d[words & ~seen].mean(), d[seen].mean() / n_bits if seen.any() else torch.tensor(0.)]
        costs.append(v.reward - 3 * sum(parts))
    wanted = torch.stack(costs).view(-1, G)
    found = torch.tensor([r.advantages[0] for r in apart.records]).view(-1, G)
    assert torch.allclose(found, wanted - wanted.mean(1, keepdim=True), atol=1e-4)


def test_a_broken_later_pass_undoes_the_whole_update_on_every_rank(groups):
    both_ranks = [learner(), learner()]
    for one in both_ranks: execute_actor_update(one, groups, RULES)           # there are moments to put back
    before, calls = [(weights(one), one.optimizer.state_dict()['state'][0]['exp_avg'].clone()) for one in both_ranks], []

    def broken(batch):
        calls.append(1)
        scored = both_ranks[1].scorer(batch)
        return scored if len(calls) < 3 else replace(scored, logps=scored.logps * float('inf'))

    results = in_two_ranks(both_ranks, [groups[0::2], groups[1::2]], (None, broken), replace(RULES, inner_updates=3))
    assert [r.successful for r in results] == [False, False] and len(calls) == 3
    for (w, moment), one in zip(before, both_ranks):
        assert torch.equal(weights(one), w) and torch.equal(one.optimizer.state_dict()['state'][0]['exp_avg'], moment)
        assert one.scheduler.last_epoch == 1


def test_no_ratio_and_no_rate_of_exchange_is_changed_by_bits(groups):
    "The size of a step, for each reduction, level and objective: within a factor of three, where a visual token has eight bits."
    def size(**choices): return execute_actor_update(learner(), groups[:2], both(**choices)).grad_norm
    plain = size()
    for reduce in REDUCTIONS: assert plain / 3 < size(reduce=reduce, length=8.) < plain * 3
    for objective, level in zip(OBJECTIVES, ('token', 'sequence', 'token', 'sequence')):
        assert size(objective=objective, ratio_level=level) == pytest.approx(plain, rel=1e-4)
