"""The forms that TRL has too, by TRL's own code on the same tensors: loss and gradient. Skipped where TRL 1.16 is not installed (it is no dependency)."""
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mmgrpo.advantage import group_advantages
from mmgrpo.core import stream
from mmgrpo.loss import token_weights
from mmgrpo.objective import Correction, ModalityRule, ObjectiveTerms, correction_weights, objective_loss

trainer = pytest.importorskip('trl.trainer.grpo_trainer', reason='TRL is not installed', exc_type=ImportError)

N, T, LENGTH = 4, 6, 9


def terms() -> ObjectiveTerms:
    "Four rollouts of different lengths."
    def draw(name): return torch.from_numpy(stream('trl', name).normal(size=(N, T)))
    behavior = -draw('b').abs() - .05
    mask = torch.arange(T) < torch.tensor([6, 3, 5, 1])[:, None]
    A = group_advantages(torch.tensor([[1., 0., .3, 0.]]))[0].double()
    return ObjectiveTerms((behavior + .4 * draw('p')).requires_grad_(), behavior, behavior + .4 * draw('r'), A[:, None].expand(N, T), mask, 1,
                          draw('H').abs(), behavior + .5 * draw('s'))


def theirs(t, loss_type, level='token', beta=0., bias_corrected=False, entropy_coef=0., weights=None):
    "TRL's loss and its gradient in the policy's log-probs."
    accelerator = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x, num_processes=1)
    args = SimpleNamespace(use_bias_correction_kl=bias_corrected, delta=None, sapo_temperature_pos=1., sapo_temperature_neg=1.05, steps_per_generation=1)
    self = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (t.policy_logps, t.entropy, None), aux_loss_enabled=False, top_entropy_quantile=1.,
        off_policy_mask_threshold=None, importance_sampling_level=level, beta=beta, args=args, loss_type=loss_type, epsilon_low=.2,
        epsilon_high=1.3 if loss_type == 'cispo' else .3, use_vllm=weights is not None, vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=False), current_gradient_accumulation_steps=1, max_completion_length=LENGTH, accelerator=accelerator,
        _entropy_bonus_enabled=entropy_coef > 0, use_adaptive_entropy=False, entropy_coef=entropy_coef, _metrics=defaultdict(lambda: defaultdict(list)))
    ids = torch.zeros(N, T, dtype=torch.long)
    inputs = dict(prompt_ids=ids, prompt_mask=ids, completion_ids=ids, completion_mask=t.mask.long(), advantages=t.advantages[:, 0], importance_sampling_ratio=weights,
                  old_per_token_logps=t.behavior_logps, ref_per_token_logps=t.ref_logps, num_items_in_batch=t.mask.sum())
    loss = trainer.GRPOTrainer._compute_loss(self, None, inputs)
    return loss, torch.autograd.grad(loss, t.policy_logps)[0]


def ours(t, **choices):
    rule = ModalityRule(**dict(clip_low=.2, clip_high=.3, ratio_level='token') | choices)
    weighed = replace(t, mask=token_weights(t.mask, rule.reduce, LENGTH))
    Z = float(t.mask.sum()) if rule.reduce == 'token' else float(N)
    loss, _ = objective_loss(weighed, rule, Z)
    return loss, torch.autograd.grad(loss, t.policy_logps)[0]


@pytest.mark.parametrize('choices, their', [
    (dict(reduce='sequence'), dict(loss_type='grpo')),
    (dict(), dict(loss_type='bnpo')),
    (dict(), dict(loss_type='dapo')),
    (dict(reduce='constant', length=LENGTH), dict(loss_type='dr_grpo')),
    (dict(objective='soft_gate', reduce='sequence'), dict(loss_type='sapo')),
    (dict(objective='clipped_weight', clip_low=1.), dict(loss_type='cispo')),
    (dict(ratio_level='sequence', reduce='sequence'), dict(loss_type='grpo', level='sequence')),
    (dict(kl_coef=.2), dict(loss_type='bnpo', beta=.2)),
    (dict(kl_coef=.2, kl_estimator='unbiased'), dict(loss_type='bnpo', beta=.2, bias_corrected=True)),
    (dict(entropy_coef=.1), dict(loss_type='bnpo', entropy_coef=.1)),
])
def test_a_form_that_trl_has_is_the_same(choices, their):
    t = terms()
    for a, b in zip(ours(t, **choices), theirs(t, **their)): assert torch.allclose(a, b, atol=1e-6, rtol=0)


@pytest.mark.parametrize('kind', ['truncate', 'mask'])
def test_weights_for_the_sampler_act_where_trl_has_them_act(kind):
    "On the objective and not on the penalty; the weights themselves are those of `token_truncate` and `token_mask`."
    t, fix = terms(), Correction(kind, cap=1.2)
    ratio = (t.behavior_logps - t.sampled_logps).exp()
    weights = ratio.clamp(max=1.2) if kind == 'truncate' else ratio.masked_fill(ratio > 1.2, 0.)
    assert torch.allclose(correction_weights(t, fix)[t.mask], weights[t.mask])
    for a, b in zip(ours(t, kl_coef=.2, correction=fix), theirs(t, 'bnpo', beta=.2, weights=weights)): assert torch.allclose(a, b, atol=1e-6, rtol=0)
