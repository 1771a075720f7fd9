"""One update, seen from outside: how the work is cut, over micro-batches or processes, changes nothing but the last bits."""
import threading
from dataclasses import dataclass, replace

import pytest
import torch
from mmgrpo.advantage import AdvantageRule, RewardPart
from mmgrpo.core import Verdict
from mmgrpo.engine import (Learner, execute_actor_update, learning_rate_factor, make_optimizer, micro_batches,
    rollout_shares, token_batches, weight_totals)
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


def in_two_ranks(learners, shares, scorers=(None, None)) -> list:
    "One update on each of two ranks; returns their results."
    table, barrier, results = [None, None], threading.Barrier(2), [None, None]

    def work(rank):
        mine = replace(learners[rank], scorer=scorers[rank] or learners[rank].scorer)
        results[rank] = execute_actor_update(mine, shares[rank], RULES, Rank(rank, table, barrier))

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
