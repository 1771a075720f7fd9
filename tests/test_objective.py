"""Advantages and objectives against oracles that share no code with them, and what other trainers got wrong, as numbers."""
import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, strategies as st

from mmgrpo.advantage import AdvantageRule, RewardPart, group_advantages, group_places, refill, routed_advantages
from mmgrpo.core import stream
from mmgrpo.loss import merge_stats, token_weights, weight_total
from mmgrpo.objective import (KL_ESTIMATORS, OBJECTIVES, Correction, ModalityRule, ObjectiveTerms, bit_entropy,
    correction_weights, objective_loss, top_entropy)

FIELDS = ('policy_logps', 'behavior_logps', 'ref_logps', 'advantages', 'mask', 'entropy', 'sampled_logps')
LEVELS = ModalityRule.levels


def terms(N=4, T=5, K=1, by_part=False, seed=0, spread=.3):
    "Random terms in float64 with a random mask."
    def draw(*key, shape=(N, T)): return torch.from_numpy(stream('test-objective', seed, *key).normal(size=shape))
    shape = (N, T, K) if by_part else (N, T)
    behavior = -draw('b', shape=shape).abs() - .01
    policy, ref = (behavior + spread * draw(x, shape=shape) for x in ('p', 'r'))
    sampled = (behavior.sum(-1) if by_part else behavior) + .1 * K * draw('s')
    return ObjectiveTerms(policy.requires_grad_(), behavior, ref, draw('A'), draw('m') > -.7, K, draw('H').abs(), sampled)


def changed(t, f): return replace(t, **{name: f(getattr(t, name)) for name in FIELDS})


def gradient(t, rule, Z):
    loss, stats = objective_loss(t, rule, Z)
    return loss.detach(), torch.autograd.grad(loss, t.policy_logps)[0], stats


rules = st.builds(ModalityRule, weight=st.floats(0, 10), clip_low=st.floats(0, 1), clip_high=st.floats(0, 3), kl_coef=st.floats(0, 1),
                  ratio_level=st.sampled_from(LEVELS), objective=st.sampled_from(list(OBJECTIVES)), gate_good=st.floats(.1, 5), gate_bad=st.floats(.1, 5),
                  kl_estimator=st.sampled_from(list(KL_ESTIMATORS)), entropy_coef=st.floats(0, 1),
                  correction=st.builds(Correction, st.sampled_from(['none', 'truncate', 'mask']), st.sampled_from(['token', 'sequence']), st.floats(1, 5)))
shapes = dict(N=st.integers(1, 5), T=st.integers(1, 5), K=st.integers(1, 4), seed=st.integers(0, 10**6))


# --- advantages

rewards = st.integers(2, 9).flatmap(lambda G: st.lists(st.lists(st.sampled_from([0., .15, .35, 1/3, .85, 1.]) | st.floats(0, 1, width=32) | st.just(math.nan),
                                                                min_size=G, max_size=G), min_size=1, max_size=4))


@given(rewards=rewards, baseline=st.sampled_from(['mean', 'leave_one_out']), scope=st.sampled_from(['group', 'batch']), weights=st.lists(st.floats(-2, 2), min_size=1, max_size=3))
def test_no_advantage_is_beyond_its_bound(rewards, baseline, scope, weights):
    """|A| <= (n-1)/sqrt(n) by the group's deviation, times the root of the number of groups by the batch's; whatever the rewards, their parts, and who was scored.
    float32 must not hold a reward exactly for that: residues once became an advantage of 7,428."""
    r = torch.tensor(rewards)
    columns = {f'r{i}': r.roll(i, 1) if i else r for i in range(len(weights))}
    a = routed_advantages(columns, [RewardPart(name, w) for name, w in zip(columns, weights)], AdvantageRule(baseline=baseline, scope=scope))['text']
    n = a.scored.sum(1, keepdim=True).double()
    bound = (n - 1).clamp(min=0) / n.clamp(min=1).sqrt() * (math.sqrt(len(r)) if scope == 'batch' else 1)
    assert bool((a.values.abs() <= bound + 1e-4).all()) and bool(a.values.isfinite().all())
    assert bool((a.values[~a.scored] == 0).all()) and bool((a.values[a.tied] == 0).all())
    assert a.values.double().sum(1).abs().max() < 1e-4


@pytest.mark.parametrize('baseline', ['mean', 'leave_one_out'])
def test_a_lone_winner_reaches_the_bound_and_no_more(baseline):
    r = torch.tensor([[.15] * 11 + [.85]])
    assert group_advantages(r, baseline=baseline).abs().max() == pytest.approx(11 / math.sqrt(12), rel=1e-6)


def test_what_was_not_scored_is_no_zero():
    A = routed_advantages(dict(a=torch.tensor([[.3, math.nan, .9, math.nan, .6], [.5] + [math.nan] * 4])), [RewardPart('a')])['visual']
    assert A.values[0].tolist() == pytest.approx([-1, 0, 1, 0, 0], abs=1e-6) and A.values[1].tolist() == [0.] * 5
    assert A.scored[0].tolist() == [True, False, True, False, True] and A.tied.tolist() == [False, True]


def test_one_prompt_drawn_twice_stays_two_groups():
    ids, r = [(4, 'dog'), (4, 'dog'), (5, 'dog'), (5, 'dog')], torch.tensor([.7, .1, .4, .4])
    for order in ([0, 1, 2, 3], [3, 0, 2, 1]):
        places, A = group_places([ids[i] for i in order], 2), torch.zeros(4)
        A[places] = group_advantages(r[order][places])
        assert A[torch.tensor(order).argsort()].tolist() == pytest.approx([.70711, -.70711, 0, 0], abs=1e-5)


@given(st.integers(1, 4), st.integers(2, 6), st.integers(1, 3), st.integers(0, 10**6))
def test_each_is_the_published_form(B, G, P, seed):
    "GDPO, written with the mean of the batch that is zero anyway: per reward and group, summed with weights, then over the batch."
    columns = {f'r{i}': torch.from_numpy(stream('each', seed, i).random((B, G))) for i in range(P)}
    weights = [1., .5, 2.][:P]
    z = sum(w * (r - r.mean(1, keepdim=True)) / r.std(1, keepdim=True) for w, r in zip(weights, columns.values()))
    wanted = (z - z.mean()) / z.std()
    found = routed_advantages(columns, [RewardPart(n, w) for n, w in zip(columns, weights)], AdvantageRule(combine='each'))['text'].values
    assert torch.allclose(found.double(), wanted, atol=1e-4)


@given(tied=st.lists(st.booleans(), min_size=1, max_size=12), wanted=st.integers(1, 4), batches=st.integers(1, 4), more=st.integers(0, 3), failed=st.sampled_from(['go_on', 'skip']))
def test_refilling_ends_and_keeps_what_can_teach(tied, wanted, batches, more, failed):
    found = refill(tied, wanted, batches, more, failed)
    if more == 0: assert found.action == 'train' and len(found.kept) == len(tied)
    else:
        assert not any(tied[i] for i in found.kept) and len(found.kept) <= wanted
        assert (found.action == 'train') == (len(found.kept) == wanted or (batches > more and bool(found.kept) and failed == 'go_on'))
        assert found.action != 'draw' or batches <= more


# --- oracles

def enumerated(objective, pi, beta, ref, A, rule):
    "The expected loss over the three words that `beta` may draw, written in probabilities; the gradient of what is detached does not flow."
    total, hold = 0., lambda x: x.detach()
    for p, b, q, a in zip(pi, beta, ref, A):
        r = p / b
        if objective == 'clip': gain = torch.min(r * a, torch.clip(r, 1 - rule.clip_low, 1 + rule.clip_high) * a)
        if objective == 'clipped_weight': gain = hold(torch.clip(r, 1 - rule.clip_low, 1 + rule.clip_high)) * a * torch.log(p)
        if objective == 'soft_gate':
            tau = rule.gate_good if a > 0 else rule.gate_bad
            gain = a * 4 / tau / (1 + torch.exp(-tau * (r - 1)))
        if objective == 'reinforce': gain = a * torch.log(p)
        x = torch.log(p / q)
        distance = dict(k1=x, k2=x**2 / 2, k3=q / p - 1 + x, unbiased=r * (q / p - 1 + x))[rule.kl_estimator]
        total = total + b * (-gain + rule.kl_coef * distance)
    return rule.weight * total


@pytest.mark.parametrize('objective, estimator', list(product(OBJECTIVES, KL_ESTIMATORS)))
def test_every_form_is_its_formula_on_an_enumerated_distribution(objective, estimator):
    rule = ModalityRule(weight=.7, objective=objective, kl_estimator=estimator, kl_coef=.3, clip_low=.15, clip_high=.25, gate_good=1.3, gate_bad=2., ratio_level='token')
    logits = torch.tensor([.4, -.6, .9], dtype=torch.float64, requires_grad=True)
    beta, ref = (torch.tensor(x, dtype=torch.float64).softmax(0) for x in ([.1, .3, .2], [-.5, .2, .6]))
    A = torch.tensor([1.2, -.8, .5], dtype=torch.float64)
    t = ObjectiveTerms(logits.log_softmax(0)[:, None], beta.log()[:, None], ref.log()[:, None], A[:, None], beta[:, None])    # weights: the chance to be drawn
    loss, _ = objective_loss(t, rule, 1.)
    wanted = enumerated(objective, logits.softmax(0), beta, ref, A, rule)
    assert loss.item() == pytest.approx(wanted.item(), abs=1e-9)
    assert torch.allclose(torch.autograd.grad(loss, logits)[0], torch.autograd.grad(wanted, logits)[0], atol=1e-9)


def pencil(x, frozen, given, rule, K):
    """The loss of two rollouts of three tokens of K parts, in loops. `x` are the log-probs that move; where the form stops a gradient, `frozen` stands, which does not."""
    behavior, ref, A, m, H, sampled, Z = given
    total = 0.
    for i in range(len(x)):
        counted = [t for t in range(len(x[i])) if m[i][t]]
        def row(y): return sum(sum(y[i][t]) - sum(behavior[i][t]) for t in counted) / K / max(len(counted), 1)
        def skew(t): return (sum(behavior[i][t]) - sampled[i][t]) / K
        for t in counted:
            def moved(y): return [a - b for a, b in zip(y[i][t], behavior[i][t])]
            level = dict(token=[sum(moved(x[:]))], token_mean=[sum(moved(x)) / K], bit=moved(x), sequence=[row(frozen) + (sum(x[i][t]) - sum(frozen[i][t])) / K])[rule.ratio_level]
            still = dict(token=[sum(moved(frozen))], token_mean=[sum(moved(frozen)) / K], bit=moved(frozen), sequence=[row(frozen)])[rule.ratio_level]
            logps = dict(token=[sum(x[i][t])], bit=x[i][t]).get(rule.ratio_level, [sum(x[i][t]) / K])
            gain = 0.
            for r, s, lp in zip(map(math.exp, level), map(math.exp, still), logps):
                low, high, a = 1 - rule.clip_low, 1 + rule.clip_high, A[i][t]
                tau = rule.gate_good if a > 0 else rule.gate_bad
                gain += dict(clip=min(r * a, min(max(r, low), high) * a), clipped_weight=min(max(s, low), high) * a * lp,
                             soft_gate=4 / tau / (1 + math.exp(-tau * (r - 1))) * a, reinforce=a * lp)[rule.objective]
            gain /= K if rule.ratio_level == 'token' else len(level)
            w = math.exp(skew(t) if rule.correction.level == 'token' else sum(map(skew, counted)) / len(counted))
            gain *= dict(none=1., truncate=min(w, rule.correction.cap), mask=w if w <= rule.correction.cap else 0.)[rule.correction.kind]
            distance = 0.
            for p, q, b in zip(x[i][t], ref[i][t], behavior[i][t]):
                d = p - q
                distance += dict(k1=d, k2=d * d / 2, k3=math.exp(-d) - 1 + d, unbiased=math.exp(p - b) * (math.exp(-d) - 1 + d))[rule.kl_estimator] / K
            total += m[i][t] * (-gain + rule.kl_coef * distance - rule.entropy_coef * H[i][t])
    return rule.weight * total / Z


@pytest.mark.parametrize('objective, level', list(product(OBJECTIVES, LEVELS)))
def test_gradients_are_the_slopes_of_the_loss_in_pencil(objective, level):
    t = terms(2, 3, 3, True, seed=5)
    for estimator, fix in product(KL_ESTIMATORS, (Correction(), Correction('truncate', cap=1.02), Correction('mask', 'sequence', cap=1.02))):
        rule = ModalityRule(weight=.6, objective=objective, ratio_level=level, clip_low=.1, clip_high=.2, kl_coef=.4, kl_estimator=estimator, entropy_coef=.3, correction=fix)
        given = [getattr(t, k).tolist() for k in ('behavior_logps', 'ref_logps', 'advantages')] + [t.mask.double().tolist(), t.entropy.tolist(), t.sampled_logps.tolist(), 4.5]
        loss, grad, _ = gradient(t, rule, 4.5)
        x = t.policy_logps.tolist()
        assert loss.item() == pytest.approx(pencil(x, x, given, rule, 3), abs=1e-12)
        for i, j, k in product(range(2), range(3), range(3)):
            def at(h): return [[[v + h * ((i, j, k) == (a, b, c)) for c, v in enumerate(w)] for b, w in enumerate(y)] for a, y in enumerate(x)]
            slope = (pencil(at(1e-6), x, given, rule, 3) - pencil(at(-1e-6), x, given, rule, 3)) / 2e-6
            assert grad[i, j, k].item() == pytest.approx(slope, abs=1e-8), (estimator, fix)


# --- any shapes, any numbers

@given(rule=rules, cuts=st.sets(st.integers(1, 4)), by_part=st.booleans(), **shapes)
def test_micro_batches_add_up(rule, cuts, by_part, N, T, K, seed):
    t = terms(N, T, K, by_part or rule.ratio_level == 'bit', seed)
    Z = float(t.mask.sum()) or 1.
    loss, grad, stats = gradient(t, rule, Z)
    edges = sorted({0, N} | {c for c in cuts if c < N})
    parts = [objective_loss(changed(t, lambda x: x[a:b]), rule, Z) for a, b in zip(edges, edges[1:])]
    total = sum(part for part, _ in parts)
    assert torch.allclose(total, loss, atol=1e-9)
    assert torch.allclose(torch.autograd.grad(total, t.policy_logps)[0], grad, atol=1e-9)
    assert merge_stats([s for _, s in parts]) == pytest.approx({k: float(v) for k, v in stats.items()}, abs=1e-9)


@given(rule=rules, junk=st.sampled_from([0., 1e30, math.nan, math.inf, -math.inf]), names=st.sets(st.sampled_from(FIELDS[:4] + FIELDS[5:]), min_size=1), by_part=st.booleans(), **shapes)
def test_what_is_masked_is_not_read(rule, junk, names, by_part, N, T, K, seed):
    t = terms(N, T, K, by_part or rule.ratio_level == 'bit', seed)
    Z = float(t.mask.sum()) or 1.
    def spoil(x): return torch.where(t.mask.view(N, T, *[1] * (x.ndim - 2)), x.detach(), junk)
    spoilt = replace(t, **{name: spoil(getattr(t, name)) for name in names})
    spoilt = replace(spoilt, policy_logps=spoilt.policy_logps.detach().requires_grad_())
    (loss, grad, stats), (loss_2, grad_2, stats_2) = gradient(t, rule, Z), gradient(spoilt, rule, Z)
    assert torch.equal(loss, loss_2) and torch.equal(grad, grad_2)
    assert {k: float(v) for k, v in stats.items()} == {k: float(v) for k, v in stats_2.items()}


@given(rule=rules, spread=st.sampled_from([1., 30., 1e3, 1e30]), dtype=st.sampled_from([torch.float32, torch.bfloat16]), **shapes)
def test_far_apart_is_finite(rule, spread, dtype, N, T, K, seed):
    t = terms(N, T, K, rule.ratio_level == 'bit', seed, spread)
    t = changed(t, lambda x: x if x.dtype == torch.bool else x.detach().clamp(-1e30, 1e30).to(dtype))
    t.policy_logps.requires_grad_()
    loss, grad, stats = gradient(t, rule, float(t.mask.sum()) or 1.)
    assert loss.isfinite() and grad.isfinite().all() and all(torch.isfinite(v) for v in stats.values())


@given(rule=rules, **shapes)
def test_on_policy_all_objectives_are_one(rule, N, T, K, seed):
    t = terms(N, T, K, True, seed)
    t = replace(t, policy_logps=t.behavior_logps.clone().requires_grad_())
    Z = float(t.mask.sum()) or 1.
    _, grad, stats = gradient(t, replace(rule, kl_coef=0., correction=Correction()), Z)
    assert torch.allclose(grad, (-rule.weight * t.advantages * t.mask / Z / K)[..., None].expand_as(grad), atol=1e-12)
    assert [float(stats[k]) for k in ('clip_frac', 'approx_kl', 'ratio_max')] == [0., 0., 1.]


@given(frac=st.floats(.01, 1), **{k: shapes[k] for k in ('N', 'T', 'seed')})
def test_how_many_tokens_are_chosen_is_known_before_their_entropies(frac, N, T, seed):
    "So a total can be taken over ranks before the first forward pass; and those chosen are the least sure."
    t = terms(N, T, seed=seed)
    chosen = top_entropy(t.entropy, t.mask, frac)
    assert chosen.sum(1).tolist() == top_entropy(torch.zeros(N, T), t.mask, frac).sum(1).tolist()
    assert bool((chosen.sum(1) >= frac * t.mask.sum(1) - 1e-6).all()) and bool((chosen.sum(1) <= frac * t.mask.sum(1) + 1).all())
    for i in range(N):
        if chosen[i].any() and (rest := t.mask[i] & ~chosen[i]).any(): assert t.entropy[i][chosen[i]].min() >= t.entropy[i][rest].max()


# --- what others got wrong

def test_a_long_rollout_is_not_punished_for_its_length():
    "trl#5814: 700 tokens, 0.003 nats each: the sum is 8.2 and would be masked at 3; the mean is 1.003, as a ratio and as a correction."
    flat = torch.zeros(1, 700)
    t = ObjectiveTerms((flat + .003).requires_grad_(), flat, None, flat + 1, torch.ones(1, 700), sampled_logps=flat - .003)
    _, _, stats = gradient(t, ModalityRule(ratio_level='sequence', clip_high=.01), 700.)
    assert float(stats['ratio_max']) == pytest.approx(math.exp(.003), rel=1e-5) and float(stats['clip_frac']) == 0.
    for level in ('token', 'sequence'):
        assert float(correction_weights(t, Correction('mask', level, 3.)).min()) == pytest.approx(math.exp(.003), rel=1e-5)


def test_a_distance_that_cannot_be_is_a_number_and_has_a_slope():
    "trl#6549: the reference 250 nats above the policy, in both formats; at home exactly 0, near it the second order."
    for dtype, name in product((torch.float32, torch.bfloat16), KL_ESTIMATORS):
        far = torch.tensor([-250., 250.], dtype=dtype, requires_grad=True)
        value = KL_ESTIMATORS[name](far, torch.zeros_like(far), far.detach())
        assert value.isfinite().all() and torch.autograd.grad(value.sum(), far)[0].isfinite().all()
        assert KL_ESTIMATORS[name](far, far, far).abs().max() == 0
    near = torch.tensor([.2], dtype=torch.float64)
    assert KL_ESTIMATORS['k3'](near, 0 * near).item() == pytest.approx(math.exp(-.2) - .8, abs=1e-9)


@pytest.mark.parametrize('reduce, wanted', [('token', 3/11), ('sequence', (1 + 0) / 2), ('constant', 3/12/2)])
def test_the_loss_of_an_update_does_not_know_how_it_was_cut(reduce, wanted):
    "trl#5619: three tokens of loss 1 and eight of loss 0, as one batch, as two, or padded to another length."
    def batch(*rows, T=8):
        mask = torch.tensor([[i < n for i in range(T)] for n, _ in rows])
        A = torch.tensor([[-value] * T for _, value in rows])
        return ObjectiveTerms(torch.zeros(mask.shape, requires_grad=True), torch.zeros(mask.shape), None, A, token_weights(mask, reduce, 12.))
    def total(*batches):
        Z = sum(weight_total(b.mask, torch.ones(len(b.mask), dtype=torch.bool), reduce) for b in batches)
        return sum(objective_loss(b, ModalityRule(reduce=reduce, length=12.), Z)[0] for b in batches).item()
    a, b = (3, 1.), (8, 0.)
    assert [total(batch(a, b)), total(batch(a), batch(b)), total(batch(a, T=3), batch(b)), total(batch(b, a, T=20))] == pytest.approx([wanted] * 4, abs=1e-7)


def test_what_the_numerator_drops_the_denominator_drops():
    "trl#6369: seven tokens kept with loss 1, thirty of a truncated rollout dropped: 1, not 7/37; and nothing at all has a graph."
    mask = torch.zeros(2, 30); mask[0, :7] = 1
    t = ObjectiveTerms(torch.zeros(2, 30, requires_grad=True), torch.zeros(2, 30), None, -torch.ones(2, 30), token_weights(mask))
    assert objective_loss(t, ModalityRule(), weight_total(t.mask, torch.tensor([True, False])))[0].item() == pytest.approx(1.)
    for objective, level in product(OBJECTIVES, LEVELS):
        loss, grad, _ = gradient(replace(t, mask=torch.zeros(2, 30)), ModalityRule(objective=objective, ratio_level=level), 0.)
        assert (loss.item(), grad.abs().max().item()) == (0., 0.)


def test_a_second_pass_lets_go_in_its_own_way():
    "Many steps on one token that was good: the clip stops it, the gate slows it, the weight only bounds it, and REINFORCE runs."
    def passes(objective):
        logits = torch.zeros(4, requires_grad=True)
        behavior = logits.log_softmax(0)[:1, None].detach()
        for _ in range(60):
            t = ObjectiveTerms(logits.log_softmax(0)[:1, None], behavior, None, torch.ones(1, 1), torch.ones(1, 1))
            grad, = torch.autograd.grad(objective_loss(t, ModalityRule(objective=objective, gate_good=6.), 1.)[0], logits)
            logits = (logits - .05 * grad).detach().requires_grad_()
        return (logits.log_softmax(0)[0] - behavior[0, 0]).exp().item()
    clip, gate, weight, free = (passes(o) for o in ('clip', 'soft_gate', 'clipped_weight', 'reinforce'))
    assert 1.2 < clip < 1.25 < gate < free < weight


def test_a_bonus_for_entropy_opens_a_sure_head():
    logits = torch.tensor([[4., -3., 2.]], requires_grad=True)
    for _ in range(200):
        logps = torch.nn.functional.logsigmoid(logits)
        t = ObjectiveTerms(logps[:, None], logps[:, None].detach(), None, torch.zeros(1, 1), torch.ones(1, 1), 3, bit_entropy(logps[:, None]).mean(-1))
        grad, = torch.autograd.grad(objective_loss(t, ModalityRule(entropy_coef=1.), 1.)[0], logits)
        logits = (logits - 3 * grad).detach().requires_grad_()
    assert logits.sigmoid().sub(.5).abs().max() < .05


def test_a_loss_in_chunks_is_the_loss_of_all_logits():
    "Liger-Kernel#1082: two rollouts of 29 words from 53, temperature 1.3, with a penalty, a bonus and weights for the sampler; loss and gradients of head and states."
    from mmgrpo.policy import legal_table
    from mmgrpo.score import Words, text_logps
    def draw(name, *shape): return torch.from_numpy(stream('chunks', name).normal(size=shape)).float()
    head, ids = draw('head', 53, 7), torch.from_numpy(stream('chunks', 'ids').integers(0, 40, 58))
    hidden, table = draw('hidden', 58, 7), legal_table([range(53), range(40)], 53)
    words = Words(ids, torch.arange(58) % 2, torch.full((58, 1), 1.3))
    rule = ModalityRule(objective='soft_gate', kl_coef=.2, kl_estimator='unbiased', entropy_coef=.1, correction=Correction('truncate', cap=1.1))

    def loss(logps, entropy):
        logps, entropy = logps.view(2, 29), entropy.view(2, 29)
        behavior = logps.detach() + .2 * draw('b', 2, 29)
        t = ObjectiveTerms(logps, behavior, behavior + .1 * draw('r', 2, 29), draw('A', 2, 29), draw('m', 2, 29) > -1, 1, entropy, behavior + .3 * draw('s', 2, 29))
        return objective_loss(t, rule, 50.)[0]

    def naive(h, w):
        logps = ((h @ w.T) / 1.3).masked_fill(~table[words.legal], -math.inf).log_softmax(-1)
        return logps.gather(1, ids[:, None])[:, 0], torch.distributions.Categorical(logits=logps).entropy()

    results = []
    for size in (None, 1, 5, 64):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        value = loss(*(naive(h, w) if size is None else text_logps(lambda x: x @ w.T, h, words, table, size, with_entropy=True)))
        results.append((value.detach(), *torch.autograd.grad(value, [h, w])))
    for other in results[1:]:
        for a, b in zip(results[0], other): assert torch.allclose(a, b, atol=1e-6, rtol=0)
