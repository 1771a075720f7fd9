"""Advantage and loss together: what their gradient means, and that it holds for any shapes and any numbers."""
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, strategies as st

from mmgrpo.advantage import group_advantages
from mmgrpo.core import stream
from mmgrpo.loss import LEVELS, LossRule, ModalityTerms, grpo_loss, merge_stats, token_weights

FIELDS = ('policy_logps', 'behavior_logps', 'ref_logps', 'advantages', 'mask')


def terms(N=4, T=5, K=1, by_part=False, seed=0, spread=.3):
    "Random terms in float64 with a random mask."
    def draw(*key, shape=(N, T)): return torch.from_numpy(stream('test-loss', seed, *key).normal(size=shape))
    shape = (N, T, K) if by_part else (N, T)
    behavior = -draw('b', shape=shape).abs()
    policy, ref = (behavior + spread * draw(x, shape=shape) for x in ('p', 'r'))
    return ModalityTerms(policy.requires_grad_(), behavior, ref, draw('A'), draw('m') > -.7, K)


def changed(t, f): return replace(t, **{name: f(getattr(t, name)) for name in FIELDS})


def gradient(t, rule, Z):
    loss, stats = grpo_loss(t, rule, Z)
    return loss.detach(), torch.autograd.grad(loss, t.policy_logps)[0], stats


rules = st.builds(LossRule, weight=st.floats(0, 10), clip_low=st.floats(0, 1), clip_high=st.floats(0, 3), kl_coef=st.floats(0, 1),
                  ratio_level=st.sampled_from(LEVELS))
shapes = dict(N=st.integers(1, 6), T=st.integers(1, 6), K=st.integers(1, 5), seed=st.integers(0, 10**6))


# --- meaning

@pytest.mark.parametrize('G', [2, 3])
@pytest.mark.parametrize('level', LEVELS)
def test_the_expected_gradient_is_that_of_the_expected_reward(G, level):
    """Over every group that could be drawn, the first pass climbs the expected reward. The group's own mean as baseline costs a factor (G-1)/G,
    since each reward is compared with a mean that it is part of; nothing else is lost."""
    logits = torch.tensor([.4, -.3, .1], dtype=torch.float64, requires_grad=True)
    reward = torch.tensor([1., 0., .25], dtype=torch.float64)
    logps = logits.log_softmax(0)
    expected = torch.zeros(3, dtype=torch.float64)
    for drawn in product(range(3), repeat=G):
        drawn = list(drawn)
        A = group_advantages(reward[drawn][None], 'none')[0, :, None].double()
        t = ModalityTerms(logps[drawn][:, None], logps[drawn][:, None].detach(), None, A, torch.ones(G, 1))
        loss, _ = grpo_loss(t, LossRule(ratio_level=level), G)
        expected += logps[drawn].sum().exp().detach() * torch.autograd.grad(loss, logits, retain_graph=True)[0]
    climb, = torch.autograd.grad((logps.exp() * reward).sum(), logits)
    assert torch.allclose(expected, -(G - 1) / G * climb, atol=1e-7)      # advantages are float32


@pytest.mark.parametrize('level', LEVELS)
def test_bits_learn_what_is_rewarded(level):
    "Two visual tokens of eight bits, paid for the share of bits that are 1: the loss must find that."
    logits = torch.zeros(2, 8, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=.2)
    for step in range(60):
        bits = torch.from_numpy(stream('bits', step).random((8, 2, 8))).float() < logits.detach().sigmoid()
        logps = torch.nn.functional.logsigmoid(torch.where(bits, logits, -logits))
        A = group_advantages(bits.float().mean((1, 2))[None])[0][:, None].expand(8, 2)
        loss, _ = grpo_loss(ModalityTerms(logps, logps.detach(), None, A, torch.ones(8, 2), 8), LossRule(ratio_level=level), 16.)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert logits.sigmoid().mean() > .85


def test_the_clip_stops_a_second_pass_and_the_first_alone_would_not():
    "Many passes over one batch: with the clip the ratio stays near its range, without it runs away."
    def passes(clip_high):
        logits = torch.zeros(4, requires_grad=True)
        behavior = logits.log_softmax(0)[:1, None].detach()
        for _ in range(200):
            t = ModalityTerms(logits.log_softmax(0)[:1, None], behavior, None, torch.ones(1, 1), torch.ones(1, 1))
            grad, = torch.autograd.grad(grpo_loss(t, LossRule(clip_high=clip_high), 1.)[0], logits)
            logits = (logits - .05 * grad).detach().requires_grad_()
        return (logits.log_softmax(0)[0] - behavior[0, 0]).exp().item()
    assert 1.2 < passes(.2) < 1.25
    assert passes(100.) > 2.5


def test_the_penalty_holds_a_policy_at_its_reference():
    "Without any advantage the penalty alone brings the policy back, whatever the start."
    ref = torch.tensor([.5, -1., .2, 0.], dtype=torch.float64).log_softmax(0)
    logits = torch.tensor([-1., 2., 0., 1.], dtype=torch.float64, requires_grad=True)
    for _ in range(400):
        logps = logits.log_softmax(0)[:, None]
        t = ModalityTerms(logps, logps.detach(), ref[:, None], torch.zeros(4, 1), logps.detach().exp())    # weights: an exact expectation
        grad, = torch.autograd.grad(grpo_loss(t, LossRule(kl_coef=1.), 1.)[0], logits)
        logits = (logits - .5 * grad).detach().requires_grad_()
    assert torch.allclose(logits.log_softmax(0), ref, atol=1e-3)


# --- any shapes, any numbers

@given(rule=rules, cuts=st.sets(st.integers(1, 5)), by_part=st.booleans(), **shapes)
def test_micro_batches_add_up(rule, cuts, by_part, N, T, K, seed):
    t = terms(N, T, K, by_part or rule.ratio_level == 'bit', seed)
    Z = float(t.mask.sum()) or 1.
    loss, grad, stats = gradient(t, rule, Z)
    edges = sorted({0, N} | {c for c in cuts if c < N})
    parts = [grpo_loss(changed(t, lambda x: x[a:b]), rule, Z) for a, b in zip(edges, edges[1:])]
    total = sum(part for part, _ in parts)
    assert torch.allclose(total, loss, atol=1e-9)
    assert torch.allclose(torch.autograd.grad(total, t.policy_logps)[0], grad, atol=1e-9)
    merged = merge_stats([s for _, s in parts])
    assert merged == pytest.approx({k: float(v) for k, v in stats.items()}, abs=1e-9)


@given(rule=rules, junk=st.sampled_from([0., 1e30, float('nan'), float('inf'), float('-inf')]), names=st.sets(st.sampled_from(FIELDS[:4]), min_size=1),
       by_part=st.booleans(), **shapes)
def test_what_is_masked_is_not_read(rule, junk, names, by_part, N, T, K, seed):
    "Whatever stands in masked places, in any of the fields, loss, gradient and figures are the same to the bit."
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
    "Log-probs may be absurdly far apart (a broken resume, a diverged policy); loss, gradient and figures stay numbers."
    t = terms(N, T, K, rule.ratio_level == 'bit', seed, spread)
    t = changed(t, lambda x: x if x.dtype == torch.bool else x.detach().clamp(-1e30, 1e30).to(dtype))
    t.policy_logps.requires_grad_()
    loss, grad, stats = gradient(t, rule, float(t.mask.sum()) or 1.)
    assert loss.isfinite() and grad.isfinite().all() and all(torch.isfinite(v) for v in stats.values())


@given(rule=rules, **shapes)
def test_on_policy_is_plain(rule, N, T, K, seed):
    "The first pass: ratio 1, nothing clipped, and the same gradient whatever the level and the clip range."
    t = terms(N, T, K, True, seed)
    t = replace(t, policy_logps=t.behavior_logps.clone().requires_grad_())
    Z = float(t.mask.sum()) or 1.
    _, grad, stats = gradient(t, replace(rule, kl_coef=0.), Z)
    assert torch.allclose(grad, (-rule.weight * t.advantages * t.mask / Z / K)[..., None].expand_as(grad), atol=1e-12)
    assert [float(stats[k]) for k in ('clip_frac', 'approx_kl', 'ratio_max')] == [0., 0., 1.]


@given(N=shapes['N'], T=shapes['T'], seed=shapes['seed'])
def test_sequence_weights_give_each_rollout_one_vote(N, T, seed):
    "The loss is the mean over rollouts of each rollout's own token mean; rollouts without tokens have no vote."
    t, rule = terms(N, T, seed=seed), LossRule(kl_coef=.1)
    weights = token_weights(t.mask, 'sequence')
    loss, _ = grpo_loss(replace(t, mask=weights), rule, float(weights.sum()) or 1.)
    rows = [changed(t, lambda x: x[i:i + 1]) for i in range(N) if t.mask[i].any()]
    votes = [grpo_loss(row, rule, float(row.mask.sum()))[0] for row in rows]
    assert torch.allclose(loss, sum(votes) / max(len(votes), 1) + 0 * loss, atol=1e-6)
