"""What users of other trainers ran into, and which test or cell proves that it does not happen here.

What nothing else proved is tested in this file ("here"); numbers are those of a list of such reports.

 no  what goes wrong elsewhere                                 proved by
  1  a picture of full length counts as cut                    here::test_a_whole_picture_is_not_cut_and_an_endless_thought_is
  2  rounding is amplified into an advantage of thousands      here::test_rounding_is_no_advantage
                                                               test_objective::test_no_advantage_is_beyond_its_bound
  3  None or nan poisons the group                             here::test_one_without_a_reward_is_left_out_wherever_it_stands
                                                               test_engine::test_unscored_rollouts_are_not_trained_on
  4  tied groups pull to the reference, by the batch's spread  test_engine::test_tied_groups_pull_to_the_reference_unless_they_are_dropped
  6  groups of one give nan, or a riddle                       here::test_a_group_of_one_is_refused_by_name
                                                               06_advantage#spread-test
  7  the batch varies, the loss is 0, nobody knows why         test_reward::test_metrics_tell_a_tied_batch_from_a_varied_one
                                                               06_advantage#tied-frac-test
  9  one prompt drawn twice is merged; groups by place         here::test_the_same_prompt_twice_is_two_groups_in_any_order_on_any_rank
                                                               25_trainer#draws-test
 10  is a group G, or G times the ranks?                       here::test_the_same_prompt_twice_is_two_groups_in_any_order_on_any_rank
 11  refilling of tied groups never ends, or ends the run      test_objective::test_refilling_ends_and_keeps_what_can_teach
                                                               25_trainer#refill-test
 12  dropped groups stay in the normaliser                     test_engine::test_dropping_groups_is_not_having_had_them
 14  a hedged or quoted answer is paid                         04_verifier#traps-test
                                                               04_verifier#typed-test
                                                               here::test_an_answer_in_the_question_is_none
 15  one sample hangs its verifier, and the run                test_reward::test_a_scorer_that_sleeps_for_a_minute_costs_its_limit_and_its_own_sample
 16  a reward cannot see the update, or the ids                test_reward::test_a_reward_sees_the_update_and_the_pictures_and_may_print
                                                               15_reward#view-test
 17  a temperature on one side only                            here::test_a_temperature_is_on_both_sides
                                                               test_rollout::test_a_wrong_temperature_would_be_noticed (guidance: not ours, there is none)
 18  top-p renormalises in the sampler only                    here::test_nothing_cuts_the_tail_of_a_distribution
 19  a ratio summed over a sequence explodes                   test_objective::test_a_long_rollout_is_not_punished_for_its_length
 20  another micro-batch, another log-prob, a clip at rate 0   test_engine::test_the_first_pass_is_on_policy_to_the_bit
 21  rollouts are scored without their pictures                14_score#blind-test
                                                               test_score::test_the_picture_that_was_drawn_matters
 22  padding shifts the pictures of short prompts              here::test_pictures_of_other_shapes_are_read_where_they_stand
 24  rotary positions differ in sampler and scorer             here::test_pictures_of_other_shapes_are_read_where_they_stand
                                                               test_rollout::test_positions_are_those_of_the_model
 25  sampler and scorer drift apart, unnoticed                 test_score::test_gate_trips_at_one_percent_of_temperature
                                                               17_engine#gate-test
 27  a loss in chunks is another loss                          test_objective::test_a_loss_in_chunks_is_the_loss_of_all_logits
 28  all logits are held at once                               test_score::test_memory_is_a_chunk_not_the_batch
 29  k3 overflows, or its slope is nan                         test_objective::test_a_distance_that_cannot_be_is_a_number_and_has_a_slope
                                                               07_loss#kl-test
 31  dropout while scoring; a ratio of 1 for ever              here::test_dropout_is_never_on_while_scoring
                                                               test_engine::test_a_second_pass_measures_from_before_the_first
 32  sampling leaves modes or tensors that training trips on   here::test_sampling_leaves_nothing_behind
                                                               11_policy#modes-test
 33  decoded and encoded again, ids change                     here::test_ids_that_no_text_can_spell_are_kept
                                                               test_rollout::test_same_words_other_ids_stay_as_drawn
 34  the model writes an id that it must not                   here::test_no_push_makes_an_illegal_id_likely
                                                               test_rollout::test_a_stubborn_model_cannot_break_out
 35  a picture token is not one id                             11_policy#protocol-test
                                                               04_verifier#limits-test
 37  pictures end up with another sample                       here::test_pictures_stay_with_their_rollout
 38  one bad picture: all of the batch go, in silence          here::test_a_prompt_without_its_picture_is_named
 39  pad equals EOS; a second EOS is not known                 here::test_an_end_is_an_end_whichever_it_is
                                                               here::test_padding_is_known_by_its_place
 41  nobody knows which formula scales                         not ours: a run prints no formula; its config.json names it, 06_advantage writes it down
 42  the gradient depends on how the work is cut               test_engine::test_no_choice_depends_on_how_the_work_is_cut
                                                               test_objective::test_the_loss_of_an_update_does_not_know_how_it_was_cut
 43  dropped above the fraction, counted below                 test_objective::test_what_the_numerator_drops_the_denominator_drops
                                                               test_engine::test_cut_rollouts_are_dropped_from_both_sides
 45  a rank without pictures hangs the others                  here::test_a_rank_that_drew_nothing_takes_part
 46  a stall says nothing                                      test_processes::test_a_rank_that_waits_says_where
                                                               test_processes::test_none_waits_for_a_rank_that_is_gone
 47  memory grows with every picture                           here::test_updates_keep_nothing
 48  after one nan nothing is right again                      test_train::test_a_bad_update_is_skipped_logged_and_saved
                                                               test_replay::test_an_update_that_was_thrown_away_is_found_again
 49  the reference is not what the run started from            here::test_the_reference_of_a_loaded_adapter_is_that_adapter
                                                               test_score::test_bare_model_is_another_reference
 51  the sampler never gets the new weights                    here::test_the_sampler_has_the_weights_of_the_last_step
 52  an adapter to go on with is ignored                       test_edges::test_an_adapter_that_the_config_does_not_describe_is_refused
                                                               11_policy#files-test
 53  what is trained cannot be said by modality                test_engine::test_the_head_that_draws_has_its_own_rate
                                                               test_edges::test_targets_that_match_nothing_are_named
 54  seeds collide within a group                              here::test_noise_is_of_a_rollout_and_of_nothing_else
 55  all ranks draw the same                                   here::test_noise_is_of_a_rollout_and_of_nothing_else
                                                               test_train::test_two_processes_are_one
 56  the seed never reaches the sampler                        here::test_a_seed_changes_what_is_drawn_and_not_what_is_asked
 58  reproducible on paper                                     test_train::test_twice_is_the_same
                                                               test_replay::test_the_rollouts_are_drawn_again_to_the_bit
                                                               16_process#still-test
"""
import gc
import json
import math
import re
import warnings
from dataclasses import replace
from itertools import combinations, product

import psutil
import pytest
import torch
from mmgrpo.advantage import group_advantages
from mmgrpo.config import make_config
from mmgrpo.core import Prompt, Verdict, pack_bits, uniforms
from mmgrpo.data import query_indices_for_update
from mmgrpo.engine import Learner, execute_actor_update, learning_rate_factor, make_optimizer, rollout_shares
from mmgrpo.objective import ModalityRule
from mmgrpo.policy import (AdapterSettings, RolloutLimits, bit_logps, collate, example_policy, example_prompt, legal_table,
    pad_prompts, word_logps)
from mmgrpo.rollout import GRPORolloutController, draw_bits, draw_words, machine, rollout_noise, teacher_rollout
from mmgrpo.score import FrozenReference, PolicyScorer, Words, logp_gap, text_logps
from mmgrpo.settings import ConfigError
from mmgrpo.uniar import rope_positions
from mmgrpo.verifier import VisualJigsawABCDVerifier
from project import ROOT
from test_engine import RULES, Settings, close, in_two_ranks, weights


def stirred(policy, scale=.2):
    "Every trained tensor gets values of its own."
    with torch.no_grad():
        for name, p in policy.trainable().items(): p.add_((uniforms(('cases', name), tuple(p.shape)) - .5) * scale)
    return policy


def insisting(policy, ids, by=100.):
    "The policy with some words made likelier."
    plain, push = policy.text_head, torch.zeros(policy.vocab_size)
    push[list(ids)] = by
    policy.text_head = lambda hidden: plain(hidden) + push
    return policy


def learner(policy, **settings) -> Learner:
    optimizer = make_optimizer(policy, Settings(**settings))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, 0, 99))
    return Learner(policy, PolicyScorer(policy), FrozenReference(policy), optimizer, scheduler)


def judged(groups, *rewards): return [g.scored([Verdict(r, True, 'ok', {}) for r in row]) for g, row in zip(groups, rewards)]
def pairs(groups): return [(g.prompt, r) for g in groups for r in g.rollouts]


def shown(policy, name, *parts) -> Prompt:
    "A prompt of words and pictures; a picture is its (rows, cols)."
    p, ids, grids = policy.protocol, [], []
    for part in parts:
        if isinstance(part, str): ids += policy.tokenizer.encode(part)
        else: grids, ids = grids + [part], ids + [p.vision_start, *[p.image_token] * math.prod(part), p.vision_end]
    bits = uniforms((name, 'bits'), (sum(map(math.prod, grids)), policy.n_bits)) > .5
    return Prompt(name, torch.tensor(ids), rope_positions(torch.tensor(ids), grids, p.image_token), pack_bits(bits), tuple(grids))


# --- rewards, groups, advantages

def test_a_whole_picture_is_not_cut_and_an_endless_thought_is():
    "Six visual tokens where six words are the limit: it ends with no EOS at its limit, as the cut thought does, and is whole."
    def drawn(*push):
        policy = insisting(example_policy(RolloutLimits(image_grid=(2, 3), max_think_tokens=6)), push)
        [group] = GRPORolloutController(policy).rollouts([example_prompt(policy)], 3, key=(1, 0))
        return policy, group.rollouts
    policy, whole = drawn(*(getattr(example_policy().protocol, name) for name in ('think_close', 'answer_close')))
    for r in whole:
        [picture] = [s for s in r.segments if s.kind == 'visual']
        assert (len(picture), picture.finish, r.truncated) == (6, 'exact', False)
        assert not set(picture.ids.tolist()) & policy.protocol.eos, 'a rule that asks for an EOS would call it cut'
    policy, endless = drawn(*policy.text_ids)
    for r in endless:
        assert r.truncated and [s.finish for s in r.segments] == ['length'] and r.n_tokens == 1 + 7
        assert VisualJigsawABCDVerifier(policy.protocol, policy.letters)(r, 'A').reason == 'truncated'


@pytest.mark.parametrize('G', [3, 5, 7])
def test_rounding_is_no_advantage(G):
    "Rewards that differ by 0 to 64 units in the last place; a mean of the others and a deviation in float32 go beyond the bound."
    bound, careless = (G - 1) / math.sqrt(G), 0.
    for base, ulps in product((.1, .35, .7, 1/3, 12.3), (0, 1, 2, 64)):
        r = torch.full((1, G), base)
        for _ in range(ulps): r[0, -1] = torch.nextafter(r[0, -1], torch.tensor(math.inf))
        for baseline, eps, scope in product(('mean', 'leave_one_out'), (0., 1e-4), ('group', 'batch')):
            A = group_advantages(r, baseline=baseline, eps=eps, scope=scope)
            assert A.isfinite().all() and A.abs().max() <= bound + 1e-5 and (eps == 0 or not A.any())
            assert eps > 0 or A.any() == (ulps > 0), 'a real difference counts where it is made to'
        one_pass = (r.square().mean() - r.mean().square()).clamp(min=0).sqrt()
        careless = max(careless, float(((r - (r.sum() - r) / (G - 1)) / (one_pass + 1e-9)).abs().max()))
    assert careless > 2 * bound


@pytest.fixture(scope='module')
def three():
    "A policy, and three rollouts for each of two prompts."
    policy = stirred(example_policy(RolloutLimits(max_think_tokens=4, max_answer_tokens=2)))
    prompts = [example_prompt(policy, 0), example_prompt(policy, 1, 'which of them?')]
    return policy, GRPORolloutController(policy).rollouts(prompts, 3, key=(2, 0))


def test_one_without_a_reward_is_left_out_wherever_it_stands(three):
    "Any of the three, any two, and all: the others are compared as if they were alone; the next group notices nothing."
    _, groups = three
    rewards, beside = [.3, .9, .5], [0., .25, 1.]
    for n in (1, 2, 3):
        for lost in combinations(range(3), n):
            row = [None if i in lost else r for i, r in enumerate(rewards)]
            shares, kept = rollout_shares(judged(groups, row, beside), RULES), [i for i in range(3) if i not in lost]
            wanted, alone = torch.zeros(3), torch.tensor([[rewards[i] for i in kept]])
            if len(kept) > 1: wanted[kept] = group_advantages(alone, 'none')[0]
            for kind in ('text', 'visual'):
                assert torch.allclose(shares.advantages[kind][:3], wanted, atol=1e-6)
                assert torch.allclose(shares.advantages[kind][3:], group_advantages(torch.tensor([beside]), 'none')[0])
                assert shares.counts[kind].tolist() == [i in kept for i in range(3)] + [True] * 3
    with pytest.raises(ValueError, match='reward is nan'): judged(groups, [math.nan, 1., 1.], beside)


@pytest.mark.parametrize('n', [1, 0])
def test_a_group_of_one_is_refused_by_name(n):
    raw = dict(run=dict(name='x'), trainer=dict(max_updates=1, prompts_per_update=1), optimizer=dict(lr=.1))
    assert make_config(raw | dict(rollout=dict(group_size=2))).rollout.group_size == 2
    with pytest.raises(ConfigError, match=f'rollout.group_size.*{n}'): make_config(raw | dict(rollout=dict(group_size=n)))


def test_the_same_prompt_twice_is_two_groups_in_any_order_on_any_rank():
    "Three groups of two, two of them of one prompt: each rollout has one advantage, on one rank or two; a merged group of four would have others."
    def fresh(): return example_policy(RolloutLimits(max_think_tokens=3, max_answer_tokens=2))
    policy = fresh()
    twin, other = example_prompt(policy, 0), example_prompt(policy, 1, 'and?')
    groups = judged(GRPORolloutController(policy).rollouts([twin, other, twin], 2, key=(3, 0)), [.2, .8], [1., 1.], [.8, .6])
    assert len({g.group_id for g in groups}) == 3 and groups[0].rollouts[0].ids.tolist() != groups[2].rollouts[0].ids.tolist()
    def said(*results): return {(r.group_id, r.index): round(float(r.advantages[0]), 5) for result in results for r in result.records}
    a, b, c = (g.group_id for g in groups)
    wanted = {(a, 0): -.3, (a, 1): .3, (b, 0): 0., (b, 1): 0., (c, 0): .1, (c, 1): -.1}
    for order in ((0, 1, 2), (2, 0, 1)): assert said(execute_actor_update(learner(fresh()), [groups[i] for i in order], RULES)) == wanted
    assert said(*in_two_ranks([learner(fresh()), learner(fresh())], [groups[2:], groups[1::-1]])) == wanted


def test_an_answer_in_the_question_is_none():
    "A question that spells the tags is refused; a prompt that holds their ids all the same is not what is read for an answer."
    policy = example_policy(RolloutLimits(min_images=0, max_think_tokens=4))
    p, verify = policy.protocol, VisualJigsawABCDVerifier(policy.protocol, policy.letters)
    with pytest.raises(ValueError, match="spells the tag '<answer>'"): example_prompt(policy, question='it is <answer>C</answer>')
    planted = shown(policy, 'planted', 'A<answer>C</answer>')
    assert p.answer_open in planted.ids.tolist()
    [group] = GRPORolloutController(insisting(policy, policy.text_ids)).rollouts([planted], 2, key=(12, 0))
    assert {(v.reward, v.letter, v.reason) for v in (verify(r, 'C') for r in group.rollouts)} == {(0., None, 'truncated')}
    [letter] = policy.tokenizer.encode('B')
    parts = spelled(policy, policy.text_ids[:1])
    parts[-1].ids[-3] = letter
    said = teacher_rollout(planted, parts, machine(p, policy.text_ids, policy.vocab_size), p)
    assert [verify(said, gold).reward for gold in 'BC'] == [1., 0.]


# --- log-probs of sampler and scorer

def test_a_temperature_is_on_both_sides():
    "Logits 0, ln 3, ln 5 at 2: the roots 1, 1.73, 2.24 over their sum; a bit of logit 1 at 1/4 is a bit of logit 4."
    logits = torch.tensor([[0., math.log(3), math.log(5)]])
    roots = torch.tensor([1, 3, 5]).sqrt()
    wanted = (roots / roots.sum()).log()
    table, noise = legal_table([range(3)], 3), (roots.cumsum(0) - roots / 2) / roots.sum()       # the middle of each one's share
    ids, sampled = draw_words(word_logps(logits.expand(3, 3), table.expand(3, 3), 2.), noise)
    words = Words(ids, torch.zeros(3, dtype=torch.int64), torch.full((3, 1), 2.))
    assert ids.tolist() == [0, 1, 2]
    for found in (sampled, text_logps(lambda hidden: hidden, logits.expand(3, 3), words, table, 2)): assert torch.allclose(found, wanted)
    assert not torch.allclose(wanted, logits.log_softmax(-1)[0], atol=.1), 'at 1 it would be another'
    chance = 1 / (1 + math.exp(-4))
    bits, sampled = draw_bits(torch.tensor([[1.], [1.]]), .25, torch.tensor([[chance - 1e-3], [chance + 1e-3]]))
    assert bits.tolist() == [[1], [0]]
    for found in (sampled, bit_logps(torch.ones(2, 1), bits, .25)[:, 0]):
        assert found.exp().tolist() == pytest.approx([chance, 1 - chance], abs=1e-6)


def test_nothing_cuts_the_tail_of_a_distribution():
    "There is no such field; and of .6, .3, .08, .02 each is drawn as often as it should be, down to the last, with the log of that."
    p = torch.tensor([.6, .3, .08, .02])
    ids, logps = draw_words(p.log().expand(1000, 4), (torch.arange(1000) + .5) / 1000)
    assert torch.bincount(ids).tolist() == [600, 300, 80, 20] and torch.allclose(logps, p.log()[ids])
    raw = dict(run=dict(name='x'), trainer=dict(max_updates=1, prompts_per_update=1), optimizer=dict(lr=.1))
    for name in ('top_p', 'top_k', 'min_p', 'repetition_penalty'):
        with pytest.raises(ConfigError, match=f'rollout.{name}'): make_config(raw | dict(rollout={name: .8}))


def test_pictures_of_other_shapes_are_read_where_they_stand():
    "Prompts with pictures of 1x3, of 2x2 and 4x1 tokens, and without one, of 5 to 20 tokens: in one batch or alone the same ids, positions and log-probs."
    policy = stirred(example_policy(RolloutLimits(max_images=2, image_grid=(3, 1)), seed=4))
    insisting(policy, [policy.protocol.think_close, policy.protocol.vision_start], by=3.)
    prompts = [shown(policy, 'a', 'AB', (1, 3), 'C'), shown(policy, 'b', (2, 2), 'ABCDA', (4, 1), 'D'), shown(policy, 'c', 'ABCDD')]
    batch, image = pad_prompts(prompts, min(policy.protocol.eos)), policy.protocol.image_token
    assert (batch.ids == image).sum(1).tolist() == [3, 8, 0] and not (batch.mask & (batch.ids == min(policy.protocol.eos))).any()
    assert torch.equal(batch.bits, torch.cat([p.bits for p in prompts]))
    controller = GRPORolloutController(policy)
    groups = controller.rollouts(prompts, 4, key=(4, 0))
    with policy.sampling(): scored = PolicyScorer(policy)(collate(pairs(groups)))
    assert scored.visual_mask.sum(1).max() == 6
    for row, (p, r) in enumerate(pairs(groups)):
        whole = rope_positions(torch.cat([p.ids, r.ids]), [*p.grids, *(s.grid for s in r.segments if s.kind == 'visual')], image)
        assert torch.equal(whole, torch.cat([p.positions, r.positions], 1))
        with policy.sampling(): alone = PolicyScorer(policy)(collate([(p, r)])).logps[0]
        assert torch.allclose(alone, r.logps, atol=1e-4) and torch.allclose(alone, scored.logps[row, :r.n_tokens], atol=1e-5)
    for p, g in zip(prompts, groups):
        [own] = controller.rollouts([p], 4, key=(4, 0))
        assert [r.ids.tolist() for r in own.rollouts] == [r.ids.tolist() for r in g.rollouts]


def test_dropout_is_never_on_while_scoring():
    "A policy in training mode whose adapter drops four of five numbers: two passes over a batch are those of one without."
    def update(p):
        policy = stirred(example_policy(RolloutLimits(max_think_tokens=3, max_answer_tokens=2)))
        drops = [m for name, m in policy.model.named_modules() if name.endswith('lora_dropout')]
        for m in drops: m['default'] = torch.nn.Dropout(p)
        groups = judged(GRPORolloutController(policy).rollouts([example_prompt(policy)], 3, key=(13, 0)), [1., 0., .5])
        policy.train(True)
        assert drops and drops[0]['default'].training
        result = execute_actor_update(learner(policy), groups, replace(RULES, inner_updates=2))
        return result.stats, [r.policy_logps.tolist() for r in result.records]
    assert update(.8) == update(0.)


def test_sampling_leaves_nothing_behind(three):
    "With gradient checkpointing on and in training mode: the same rollouts, every module in its mode, and a gradient that is the same as before."
    policy, groups = three
    def modes(): return {name: (m.training, getattr(m, 'gradient_checkpointing', None)) for name, m in policy.model.named_modules()}
    def slope():
        loss = PolicyScorer(policy)(collate(pairs(groups))).logps.sum()
        return [g.clone() for g in torch.autograd.grad(loss, list(policy.trainable().values()))]
    before = slope()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', FutureWarning)
        policy.model.gradient_checkpointing_enable()
    policy.train(True)
    held = modes()
    again = GRPORolloutController(policy).rollouts([g.prompt for g in groups], 3, key=(2, 0))
    assert modes() == held and any(on for on, _ in held.values()) and any(checkpointing for _, checkpointing in held.values())
    policy.train(False)
    for m in policy.model.modules():
        if hasattr(m, 'gradient_checkpointing'): m.gradient_checkpointing = False
    assert [r.ids.tolist() for _, r in pairs(again)] == [r.ids.tolist() for _, r in pairs(groups)]
    assert not any(t.is_inference() for t in (*policy.model.parameters(), *policy.model.buffers()))
    assert all(torch.equal(a, b) for a, b in zip(slope(), before))


# --- tokens and pictures

def spelled(policy, *thoughts, index=0):
    "A completion with these ids as thoughts, and a picture after each but the last."
    from types import SimpleNamespace as Part
    p, parts, words = policy.protocol, [], []
    for k, ids in enumerate(thoughts):
        words += [p.think_open, *ids, p.think_close]
        if k == len(thoughts) - 1: break
        bits = pack_bits(uniforms(('drawn', index, k), (p.n_visual, policy.n_bits)) > .5)
        parts += [Part(kind='text', ids=torch.tensor([*words, p.vision_start])), Part(kind='visual', ids=torch.full((p.n_visual,), p.image_token), bits=bits)]
        words = [p.vision_end]
    return [*parts, Part(kind='text', ids=torch.tensor([*words, p.answer_open, policy.text_ids[0], p.answer_close, min(p.eos)]))]


def taught(policy, prompt, *thoughts, index=0):
    parts = spelled(policy, *thoughts, index=index)
    return teacher_rollout(prompt, parts, machine(policy.protocol, policy.text_ids, policy.vocab_size), policy.protocol, index)


def test_ids_that_no_text_can_spell_are_kept():
    "Half of a letter of two bytes is shown as a mark for what cannot be read, and never comes back from it; what is scored are the ids."
    policy = example_policy(RolloutLimits(min_images=0), words=None)
    halves = policy.tokenizer.encode('é')
    thought, words = [halves[0], halves[0], *policy.tokenizer.encode('ab')], policy.tokenizer
    assert len(halves) == 2 and words.encode(words.decode(thought)) != thought
    prompt = example_prompt(policy)
    rollout = taught(policy, prompt, thought)
    batch = collate([(prompt, rollout)])
    assert batch.ids[0, 1:1 + len(thought)].tolist() == thought == rollout.ids[1:1 + len(thought)].tolist()
    with policy.sampling(): here, there = (PolicyScorer(policy)(collate([(prompt, taught(policy, prompt, t))])).logps[0] for t in (thought, [*halves, *thought[2:]]))
    assert not torch.allclose(here, there, atol=1e-3), 'other ids have other log-probs'


def test_no_push_makes_an_illegal_id_likely():
    "In every state, with 100 on all that is not legal there: what is legal has probability 1, no noise draws anything else, and the push has no slope."
    policy = example_policy(RolloutLimits(max_images=2, min_images=0))
    m = machine(policy.protocol, policy.text_ids, policy.vocab_size)
    for legal in m.legal_mask:
        logits = (uniforms(('illegal',), policy.vocab_size) * 3 + 100. * ~legal).requires_grad_()
        rows, noise = logits.expand(64, -1), torch.linspace(1e-7, 1 - 1e-7, 64)
        logps = word_logps(rows, legal.expand(64, -1), .7)
        ids, sampled = draw_words(logps, noise)
        words = Words(ids, torch.zeros(64, dtype=torch.int64), torch.full((64, 1), .7))
        scored = text_logps(lambda hidden: hidden, rows, words, legal[None], 9)
        assert logps[0][legal].exp().sum().item() == pytest.approx(1, abs=1e-5) and not logps[0][~legal].exp().any()
        assert legal[ids].all() and torch.equal(sampled, scored)
        assert not torch.autograd.grad(scored.sum(), logits)[0][~legal].any()
        assert legal.sum() == 1 or len(ids.unique()) > 1


def test_pictures_stay_with_their_rollout():
    "Rollouts with 2, 0, 1 and 1 pictures, in any order and cut anywhere: each has its own bits, and its own log-probs."
    policy = stirred(example_policy(RolloutLimits(max_images=2, min_images=0)))
    prompts = [shown(policy, 'x', (2, 1), 'A'), shown(policy, 'y', 'AB', (1, 2), (3, 1))]
    made = [(prompts[i % 2], taught(policy, prompts[i % 2], *[policy.text_ids[:i + 1]] * (n + 1), index=i)) for i, n in enumerate((2, 0, 1, 1))]
    assert [len(r.bits) for _, r in made] == [8, 0, 4, 4]
    with policy.sampling(): wanted = [PolicyScorer(policy)(collate([pair])).logps[0] for pair in made]
    for order, cut in (((2, 0, 1, 3), 2), ((3, 1, 0, 2), 1), ((1, 2, 3, 0), 3)):
        for part in (order[:cut], order[cut:]):
            batch = collate([made[i] for i in part])
            bits = batch.bits.split(batch.visual_mask.sum(1).tolist())
            with policy.sampling(): scored = PolicyScorer(policy)(batch).logps
            for i, own, logps in zip(part, bits, scored):
                assert own.flatten().tolist() == made[i][1].bits.flatten().tolist()
                assert torch.allclose(logps[:len(wanted[i])], wanted[i], atol=1e-5)


def test_a_prompt_without_its_picture_is_named():
    "One of three has lost its bits: it is refused by name, in sampler and scorer, before anything is drawn."
    policy = example_policy()
    prompts = [shown(policy, name, 'A', (1, 3)) for name in ('good', 'bad', 'fine')]
    groups = GRPORolloutController(policy).rollouts(prompts, 2, key=(5, 0))
    prompts[1] = replace(prompts[1], bits=prompts[1].bits[:0], grids=())
    with pytest.raises(ValueError, match='Prompt bad: 3 image tokens but 0'): GRPORolloutController(policy).rollouts(prompts, 2, key=(5, 0))
    with pytest.raises(ValueError, match='Prompt bad: 3 image tokens but 0'): PolicyScorer(policy)(collate([(p, g.rollouts[0]) for p, g in zip(prompts, groups)]))


@pytest.mark.parametrize('which', [0, 1])
def test_an_end_is_an_end_whichever_it_is(which):
    "Both of the ends are known: the rollout is whole, its end is a token that counts, and what pads it is not."
    policy = example_policy(RolloutLimits(min_images=0, max_think_tokens=4))
    p, end = policy.protocol, sorted(policy.protocol.eos)[which]
    assert len(p.eos) == 2
    [group] = GRPORolloutController(insisting(policy, [p.think_close, p.answer_open, p.answer_close, end])).rollouts([example_prompt(policy)], 3, key=(6, 0))
    for r in group.rollouts: assert r.ids.tolist() == [p.think_open, p.think_close, p.answer_open, p.answer_close, end] and not r.truncated
    longer = taught(policy, group.prompt, policy.text_ids[:3])
    batch = collate([(group.prompt, group.rollouts[0]), (group.prompt, longer)])
    assert batch.mask.int().tolist() == [[1] * 5 + [0] * 4, [1] * 9]
    assert batch.text_mask[0].tolist() == [False, True, True, True, True] + [False] * 4, 'the end is a choice between two'


def test_padding_is_known_by_its_place():
    "The prompt's padding is an end, and prompts hold ends: those count, and it does not."
    policy = stirred(example_policy(RolloutLimits(min_images=0)))
    end = min(policy.protocol.eos)
    prompts = [Prompt(name, torch.tensor(ids), torch.arange(len(ids)).expand(3, -1), torch.zeros(0, 1, dtype=torch.uint8), ())
               for name, ids in (('short', [policy.text_ids[0], end, end]), ('long', [policy.text_ids[1], end, *policy.text_ids[:4]]))]
    batch = pad_prompts(prompts, end)
    assert batch.ids[0].tolist() == [policy.text_ids[0]] + [end] * 5 and batch.mask.int().tolist() == [[1, 1, 1, 0, 0, 0], [1] * 6]
    rollouts = [taught(policy, p, policy.text_ids[:2]) for p in prompts]
    without = replace(prompts[0], ids=prompts[0].ids[:1], positions=prompts[0].positions[:, :1])
    with policy.sampling():
        scored = PolicyScorer(policy)(collate(list(zip(prompts, rollouts)))).logps[0]
        alone, bare = (PolicyScorer(policy)(collate([(p, rollouts[0])])).logps[0] for p in (prompts[0], without))
    assert torch.allclose(scored, alone, atol=1e-5) and not torch.allclose(scored, bare, atol=1e-3)


# --- many updates, many ranks

def test_a_rank_that_drew_nothing_takes_part():
    "One rank has pictures, the other words alone, of a prompt without one: the step is that of both on one process."
    def fresh(): return stirred(example_policy(RolloutLimits(max_think_tokens=3, max_answer_tokens=2, min_images=0)))
    policy, p = fresh(), fresh().protocol
    prompts = [example_prompt(policy, 0), shown(policy, 'words', 'ABCA')]
    drawing = GRPORolloutController(insisting(fresh(), [p.vision_start])).rollouts(prompts[:1], 3, key=(7, 0))
    words = GRPORolloutController(insisting(fresh(), [p.answer_open])).rollouts(prompts[1:], 3, key=(7, 0))
    groups = judged([*drawing, *words], [1., 0., .5], [0., 1., .25])
    assert any(r.visual_mask.any() for r in groups[0].rollouts) and not any(r.visual_mask.any() for r in groups[1].rollouts)
    ranks, alone = [learner(fresh()), learner(fresh())], learner(fresh())
    before = weights(alone)
    results, result = in_two_ranks(ranks, [groups[:1], groups[1:]]), execute_actor_update(alone, groups, RULES)
    assert results[0] == results[1] and torch.equal(weights(ranks[0]), weights(ranks[1]))
    close(weights(ranks[0]) - before, weights(alone) - before)
    assert results[1].stats['visual/n_tokens'] == result.stats['visual/n_tokens'] > 0


def test_updates_keep_nothing():
    "Updates with pictures, five and then eight more: no more tensors are alive, and the process has grown by less than 4 MB."
    one = learner(example_policy(RolloutLimits(max_think_tokens=2, max_answer_tokens=1)))
    prompt, controller, seen = example_prompt(one.policy), GRPORolloutController(one.policy), []
    def alive():
        gc.collect()
        return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()), psutil.Process().memory_info().rss / 2**20
    for update in range(13):
        [group] = judged(controller.rollouts([prompt], 2, key=(8, update)), [1., 0.])
        execute_actor_update(one, [group], RULES)
        del group
        if update in (4, 12): seen.append(alive())
    (tensors, mb), (tensors_after, mb_after) = seen
    assert tensors_after == tensors and mb_after - mb < 4


def test_the_reference_of_a_loaded_adapter_is_that_adapter(tmp_path):
    "Rank 3, B not 0, from its folder: the first distance is exactly 0, the second is not, and the bare model is somewhere else."
    settings = AdapterSettings(lora_rank=3, lora_alpha=6)
    trained = stirred(example_policy(RolloutLimits(max_think_tokens=4), settings, seed=6), .6)
    for name, content in trained.adapter_files().items(): (tmp_path/name).write_bytes(content)
    policy = example_policy(RolloutLimits(max_think_tokens=4), replace(settings, initial_adapter=str(tmp_path)), seed=6)
    assert max(float(p.detach().abs().max()) for name, p in policy.trainable().items() if 'lora_B' in name) > .1
    one, kl = learner(insisting(policy, [policy.protocol.think_close]), eps=1e-8), []
    for update in range(2):
        groups = judged(GRPORolloutController(policy).rollouts([example_prompt(policy)], 4, key=(9, update)), [1., 0., 0., .5])
        stats = execute_actor_update(one, groups, RULES, measure_kl=True).stats
        assert stats['visual/n_tokens'] > 0
        kl.append((stats['text/ref_kl'], stats['visual/ref_kl']))
    assert kl[0] == (0., 0.) and min(kl[1]) > 0
    with one.reference.apply(policy), policy.sampling():
        batch = collate(pairs(groups))
        start = PolicyScorer(policy)(batch)
        with policy.peft.disable_adapter(): bare = PolicyScorer(policy)(batch)
    assert (start.logps - bare.logps).abs().max() > 1e-2


def test_the_sampler_has_the_weights_of_the_last_step():
    "A step of rate 1: what is drawn next is scored as it was drawn, and the weights before it would have said something else."
    policy = stirred(example_policy(RolloutLimits(max_think_tokens=4)))
    one, controller, prompt = learner(policy, lr=1., eps=1e-8), GRPORolloutController(policy), example_prompt(policy)
    def drawn(update): return judged(controller.rollouts([prompt], 4, key=(10, update)), [1., 0., 0., .5])
    assert execute_actor_update(one, drawn(0), replace(RULES, text=ModalityRule(weight=.01), visual=ModalityRule(weight=.01))).successful
    batch = collate(pairs(drawn(1)))
    with policy.sampling():
        now = logp_gap([batch], [PolicyScorer(policy)(batch)])
        with one.reference.apply(policy): before = logp_gap([batch], [PolicyScorer(policy)(batch)])
    assert max(gap.max for gap in now.values()) < 1e-3 and max(gap.max for gap in before.values()) > .1


# --- seeds

def test_noise_is_of_a_rollout_and_of_nothing_else():
    "Twelve rollouts of two puzzles over three draws: none has the noise of another; and each has it whoever else is on its rank."
    rows = [(name, g) for name in ('a', 'b') for g in range(12)]
    noise = {draw: rollout_noise((11, draw), rows, 3, (2, 8)) for draw in range(3)}
    assert len({tuple(x.tolist()) for n in noise.values() for x in n.words}) == len({x.numpy().tobytes() for n in noise.values() for x in n.bits}) == 72
    for share in (rows[::2], rows[1::2][::-1], rows[7:8]):
        part, places = rollout_noise((11, 2), share, 3, (2, 8)), [rows.index(row) for row in share]
        assert torch.equal(part.words, noise[2].words[places]) and torch.equal(part.bits, noise[2].bits[places])


def test_a_seed_changes_what_is_drawn_and_not_what_is_asked(three):
    "In the order of the data two seeds ask the same and draw otherwise; a shuffled order is the seed's as well, and each puzzle is asked once an epoch."
    policy, _ = three
    prompts = [example_prompt(policy, 0)]
    drawn = {seed: [r.ids.tolist() for _, r in pairs(GRPORolloutController(policy).rollouts(prompts, 4, key=(seed, 0)))] for seed in (1, 2)}
    assert drawn[1] != drawn[2]
    def asked(seed, shuffle): return [list(query_indices_for_update(range(20, 27), 7, seed, draw, shuffle)) for draw in range(2)]
    assert asked(1, False) == asked(2, False) == [list(range(20, 27))] * 2
    assert asked(1, True) == asked(1, True) != asked(2, True) and all(sorted(epoch) == list(range(20, 27)) for epoch in asked(1, True))


# --- the table

def test_what_the_table_names_is_there():
    "Every test and cell; and each case has a line."
    cells = {(path.stem, cell['id']) for path in (ROOT/'nbs').glob('*.ipynb') for cell in json.loads(path.read_text())['cells']}
    tests = {(path.stem, name) for path in (ROOT/'tests').glob('test_*.py') for name in re.findall(r'^def (test_\w+)', path.read_text(), re.M)}
    tests |= {('here', name) for file, name in tests if file == 'test_cases'}
    named = {(m[1], m[2]) for m in re.finditer(r'(\w+)::(test_\w+)', __doc__)}
    rooms = {(m[1], m[2]) for m in re.finditer(r'(\d\d_\w+)#([\w-]+)', __doc__)}
    assert (named - tests, rooms - cells) == (set(), set())
    lines = [line for line in __doc__.splitlines() if re.match(r' *\d+  ', line)]
    assert len(lines) == 47 and all(re.search('::test_|#|not ours: ', line) for line in lines)
    assert {name for file, name in tests if file == 'here'} - {'test_what_the_table_names_is_there'} == {name for file, name in named if file == 'here'}
