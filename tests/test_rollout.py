"The sampler: exact against an enumerated toy, and against a real model in all the ways that batching could go wrong."
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import mmgrpo.policy
from mmgrpo.core import Prompt, Rollout, pack_bits, uniforms
from mmgrpo.policy import (AdapterSettings, Fed, Hidden, RolloutLimits, collate, decode_step, example_policy, example_prompt,
                           load_uniar, pad_prompts, start_decoding)
from mmgrpo.rollout import GRPORolloutController, Tokens, advance, cut_segments, machine
from mmgrpo.score import PolicyScorer, logp_gap
from mmgrpo.uniar import rope_positions
from mmgrpo.verifier import Protocol, VisualJigsawABCDVerifier

# A policy whose completions can all be listed: two words, one visual token of two bits, a Markov chain over ids.
TOY = Protocol(think_open=2, think_close=3, answer_open=4, answer_close=5, vision_start=6, vision_end=7, image_token=8, eos=frozenset({9, 10}),
               min_images=0, max_images=1, grid=(1, 1), max_think_tokens=1, max_answer_tokens=1, n_bits=2)


@dataclass
class ToyState:
    hidden: torch.Tensor
    visual: torch.Tensor


class ToyPolicy:
    "What follows depends on the last id, and on its bits: small enough for arithmetic."
    text_ids, vocab_size, n_bits, device, protocol = (0, 1), 12, 2, torch.device('cpu'), TOY

    def __init__(self):
        table = uniforms(('toy', 'table'), (12, 14)).log() * .7
        self.words, self.bits = table[:, :12], table[:, 12:]
        self.echo = uniforms(('toy', 'echo'), (2, 12)) - .5
        self.prefills = self.steps = 0

    def sampling(self): return torch.no_grad()
    def encode(self, ids, bits): return torch.cat([torch.nn.functional.one_hot(ids, 12).float(), bits.float()], -1)
    def prefill(self, prompts, group_size):
        self.prefills += len(prompts)
        last = torch.stack([p.ids[-1] for p in prompts]).repeat_interleave(group_size)
        hidden = self.encode(last, torch.zeros(len(last), 2))
        return ToyState(hidden, hidden)
    def step(self, state, fed, draw):
        self.steps += len(fed.ids)
        hidden = self.encode(fed.ids, fed.bits * fed.visual_mask[:, None])
        return ToyState(hidden, hidden)
    def select(self, state, rows): return ToyState(state.hidden[rows], state.visual[rows])
    def text_head(self, hidden): return hidden[..., :12] @ self.words + hidden[..., 12:] @ self.echo
    def visual_head(self, hidden): return hidden[..., :12] @ self.bits
    def trainable(self): return {}
    def hidden(self, batch):
        bits = torch.zeros(*batch.ids.shape, 2)
        bits[batch.visual_mask] = torch.stack([batch.bits[:, 0] >> 7 & 1, batch.bits[:, 0] >> 6 & 1], -1).float()
        last = torch.stack([p.ids[-1] for p in batch.prompts])[batch.row_prompt]
        first = self.encode(last, torch.zeros(len(last), 2))
        hidden = torch.cat([first[:, None], self.encode(batch.ids, bits)[:, :-1]], 1)
        return Hidden(hidden, hidden)


def toy_prompt(name='toy', last=0): return Prompt(name, torch.tensor([1, last]), torch.arange(2).expand(3, 2), torch.zeros(0, 1, dtype=torch.uint8), ())


def every_completion(m):
    "All paths through the protocol: (ids, packed bits, legal sets, was it cut)."
    paths = [((), (), (), 0, 0)]
    while paths:
        ids, bits, legal, state, count = paths.pop()
        if m.final[state]:
            yield ids, bits, legal, m.names[state] == 'cut'
            continue
        choices = [(TOY.image_token, b) for b in (0, 64, 128, 192)] if m.drawing[state] else [(i, None) for i in m.legal_sets[m.legal[state]]]
        for i, b in choices:
            s, c = advance(m, torch.tensor([state]), torch.tensor([count]), torch.tensor([i]))
            paths.append((ids + (i,), bits + (() if b is None else (b,)), legal + (int(m.legal[state]),), int(s), int(c)))


@pytest.fixture(scope='module')
def toy():
    "Every completion of the toy with its probability, by the scorer."
    policy = ToyPolicy()
    m, prompt, keys, pairs = machine(TOY, policy.text_ids, 12), toy_prompt(), [], []
    for ids, bits, legal, cut in every_completion(m):
        tokens = Tokens(torch.tensor(ids), torch.zeros(len(ids)), torch.tensor(legal), torch.tensor(bits, dtype=torch.uint8).view(-1, 1))
        segments = cut_segments(tokens, TOY, (1.3, .6), cut)
        pairs.append((prompt, Rollout('toy', 0, segments, torch.zeros(3, len(ids), dtype=torch.int64), m.legal_sets, cut)))
        keys.append((ids, bits))
    return policy, pairs, dict(zip(keys, PolicyScorer(policy)(collate(pairs)).logps.sum(1).exp().tolist()))


def key_of(rollout): return tuple(rollout.ids.tolist()), tuple(rollout.bits.flatten().tolist())


def test_all_completions_together_have_probability_one(toy):
    _, pairs, probability = toy
    assert len(probability) == len(pairs) > 300
    assert abs(sum(probability.values()) - 1) < 1e-5


def test_frequencies_are_the_probabilities(toy):
    "4,000 rollouts against the list: chi-square over the likelier completions, the rest as one."
    policy, _, probability = toy
    controller = GRPORolloutController(policy, text_temperature=1.3, visual_temperature=.6)
    [group] = controller.rollouts([toy_prompt()], 4000, key=(0, 0))
    seen = Counter(key_of(r) for r in group.rollouts)
    assert set(seen) <= set(probability)
    often = [k for k, p in probability.items() if p * 4000 >= 10]
    expected, got = [probability[k] * 4000 for k in often], [seen[k] for k in often]
    expected, got = expected + [4000 - sum(expected)], got + [4000 - sum(got)]
    chi2, dof = sum((g - e) ** 2 / e for g, e in zip(got, expected)), len(got) - 1
    assert dof > 30 and chi2 < dof + 4 * math.sqrt(2 * dof), (chi2, dof)
    for r in group.rollouts[:50]: assert abs(float(r.logps.sum()) - math.log(probability[key_of(r)])) < 1e-5


def test_frequencies_of_pictures_are_their_probabilities(toy):
    "Of the rollouts that drew, each of the four pictures as often as it should be: bits have a temperature of their own."
    policy, _, probability = toy
    [group] = GRPORolloutController(policy, text_temperature=1.3, visual_temperature=.6).rollouts([toy_prompt()], 4000, key=(0, 1))
    seen, exact = Counter(key_of(r)[1] for r in group.rollouts), Counter()
    for (_, bits), p in probability.items(): exact[bits] += p
    n = sum(seen[bits] for bits in exact if bits)
    drew = sum(p for bits, p in exact.items() if bits)
    chi2 = sum((seen[bits] - n * p / drew) ** 2 / (n * p / drew) for bits, p in exact.items() if bits)
    assert n > 400 and len(exact) == 5 and chi2 < 16.3, (n, chi2)                     # 3 degrees of freedom, one in a thousand


def test_a_wrong_temperature_would_be_noticed(toy):
    "The same test fails for a sampler at another temperature: it has the power it claims."
    policy, _, probability = toy
    [group] = GRPORolloutController(policy, text_temperature=1., visual_temperature=.6).rollouts([toy_prompt()], 4000, key=(0, 0))
    seen = Counter(key_of(r) for r in group.rollouts)
    often = [k for k, p in probability.items() if p * 4000 >= 10]
    chi2 = sum((seen[k] - probability[k] * 4000) ** 2 / (probability[k] * 4000) for k in often)
    assert chi2 > len(often) + 4 * math.sqrt(2 * len(often))


def test_a_finished_row_is_dropped_and_the_last_token_is_not_fed():
    policy = ToyPolicy()
    [group] = GRPORolloutController(policy).rollouts([toy_prompt()], 64, key=(3, 0))
    lengths = [r.n_tokens for r in group.rollouts]
    assert policy.prefills == 1
    assert sum(lengths) - 64 <= policy.steps <= 64 * (max(lengths) - 1)
    assert policy.steps < .9 * 64 * (max(lengths) - 1)


def test_same_words_other_ids_stay_as_drawn():
    "'ab' is one id and also the ids of 'a' and 'b'; nothing is decoded and encoded again."
    policy = example_policy(RolloutLimits(max_think_tokens=8), words='a')
    a, b, ab = (policy.tokenizer.convert_tokens_to_ids(x) for x in ('a', 'b', 'ab'))
    policy.text_ids = tuple(sorted((a, b, ab)))
    assert policy.tokenizer.encode('ab') == [ab]
    groups = GRPORolloutController(policy).rollouts([example_prompt(policy, i) for i in range(4)], 16, key=(0, 0))
    pairs = Counter(pair for g in groups for r in g.rollouts for pair in zip(r.ids.tolist(), r.ids.tolist()[1:]))
    assert pairs[a, b] > 0, 'no rollout spelled ab in two ids'
    assert sum(n for pair, n in pairs.items() if ab in pair) > 0
    batch = collate([(g.prompt, r) for g in groups for r in g.rollouts])
    drawn = [r.ids.tolist() for g in groups for r in g.rollouts]
    assert [row[mask].tolist() for row, mask in zip(batch.ids, batch.mask)] == drawn


LIMITS = dict(one=RolloutLimits(), two=RolloutLimits(max_images=2), none=RolloutLimits(min_images=0, image_grid=(1, 3)))


@pytest.fixture(scope='module', params=LIMITS)
def sampled(request):
    "A random UniAR under each kind of protocol, with rollouts."
    policy = example_policy(LIMITS[request.param], seed=3)
    with torch.no_grad():
        for name, p in policy.trainable().items(): p.add_(uniforms(('stir', name), tuple(p.shape)) * .2 - .1)
    prompts = [example_prompt(policy, i, question='w' * (3 + 5 * i)) for i in range(3)]
    controller = GRPORolloutController(policy, text_temperature=.9, visual_temperature=1.2)
    return policy, prompts, controller, controller.rollouts(prompts, 6, key=(11, 2))


def test_sampled_is_scored(sampled):
    policy, _, _, groups = sampled
    batch = collate([(g.prompt, r) for g in groups for r in g.rollouts])
    with policy.sampling(): scored = PolicyScorer(policy)(batch)
    assert torch.allclose(scored.logps, batch.logps, atol=1e-4)
    gaps = logp_gap([batch], [scored])
    assert gaps['text'].max < 1e-4 and gaps['visual'].max < 1e-4 and gaps['text'].n > 20 and gaps['visual'].n > 5


def test_every_rollout_keeps_the_protocol(sampled):
    policy, _, _, groups = sampled
    verify, p = VisualJigsawABCDVerifier(policy.protocol, policy.letters), policy.protocol
    for g in groups:
        for r in g.rollouts:
            pictures = [s for s in r.segments if s.kind == 'visual']
            assert all(len(s) == p.n_visual and s.finish == 'exact' for s in pictures)
            assert r.truncated == (r.segments[-1].finish == 'length')
            assert all(s.finish != 'length' for s in r.segments[:-1])
            assert verify(r, 'A').reason in ({'truncated'} if r.truncated else {'ok', 'wrong_letter', 'bad_answer'})
            assert r.truncated or len(pictures) in range(p.min_images, p.max_images + 1)
            for i, legal in zip(r.ids.tolist(), r.legal.tolist()): assert i == p.image_token if legal < 0 else i in r.legal_sets[legal]


def test_positions_are_those_of_the_model(sampled):
    "The counter in the sampling loop against the rule for whole sequences."
    policy, _, _, groups = sampled
    for g in groups:
        for r in g.rollouts:
            grids = [*g.prompt.grids, *(s.grid for s in r.segments if s.kind == 'visual')]
            whole = rope_positions(torch.cat([g.prompt.ids, r.ids]), grids, policy.protocol.image_token)
            assert torch.equal(whole[:, len(g.prompt):], r.positions)


def test_company_changes_nothing(sampled):
    "A batch of one is the same as its share of a batch of many."
    _, prompts, controller, groups = sampled
    for prompt, group in zip(prompts, groups):
        [alone] = controller.rollouts([prompt], 6, key=(11, 2))
        for a, b in zip(alone.rollouts, group.rollouts):
            assert torch.equal(a.ids, b.ids) and torch.equal(a.bits, b.bits)
            assert torch.allclose(a.logps, b.logps, atol=1e-5)
    [single] = controller.rollouts(prompts[:1], 1, key=(11, 2))
    assert torch.equal(single.rollouts[0].ids, groups[0].rollouts[0].ids)


def test_seeds_and_draws_differ_and_repeat(sampled):
    _, prompts, controller, groups = sampled
    ids = lambda groups: [key_of(r) for g in groups for r in g.rollouts]
    assert ids(controller.rollouts(prompts, 6, key=(11, 2))) == ids(groups)
    assert ids(controller.rollouts(prompts, 6, key=(11, 3))) != ids(groups) != ids(controller.rollouts(prompts, 6, key=(12, 2)))
    assert len(set(ids(groups)[:6])) >= 4, 'a group repeats itself'            # two empty thoughts may well be equal


def test_greedy_takes_the_likeliest(sampled):
    policy, prompts, controller, _ = sampled
    groups = controller.rollouts(prompts, 2, key=(0, 0), greedy=True)
    assert all(torch.equal(g.rollouts[0].ids, g.rollouts[1].ids) for g in groups)
    batch = collate([(g.prompt, g.rollouts[0]) for g in groups])
    with policy.sampling():
        scores, hidden = PolicyScorer(policy)(batch), policy.hidden(batch)
        logits = policy.visual_head(hidden.visual[batch.visual_mask])
        words = policy.text_head(hidden.text[batch.text_mask])
    assert (scores.bits >= math.log(.5) - 1e-6).all() and len(logits) == len(scores.bits)
    allowed = [list(batch.legal_sets[i]) for i in batch.legal[batch.text_mask].tolist()]
    assert [s[int(w[s].argmax())] for s, w in zip(allowed, words)] == batch.ids[batch.text_mask].tolist()


def test_global_noise_is_neither_read_nor_moved(sampled):
    import random
    import numpy as np
    _, prompts, controller, groups = sampled
    states = lambda: (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())
    torch.manual_seed(5); before = states()
    again = controller.rollouts(prompts, 6, key=(11, 2))
    assert states() == before
    assert key_of(again[0].rollouts[0]) == key_of(groups[0].rollouts[0])


@pytest.mark.parametrize('limits', [RolloutLimits(), RolloutLimits(max_images=2)], ids=['one', 'two'])
def test_each_stack_sees_each_position_once(monkeypatch, limits):
    "Prompts are read once each; a layer sees a row's position once; the visual stack rests when no picture can come."
    policy, fed, read = example_policy(limits), Counter(), []
    plain_step, plain_encode = mmgrpo.policy.layer_step, mmgrpo.policy.encode
    def layer_step(layer, x, rope, i, state):
        fed[i] += 1
        return plain_step(layer, x, rope, i, state)
    def encode(model, ids, *rest):
        read.append(len(ids))
        return plain_encode(model, ids, *rest)
    monkeypatch.setattr(mmgrpo.policy, 'layer_step', layer_step)
    monkeypatch.setattr(mmgrpo.policy, 'encode', encode)
    prompts = [example_prompt(policy, i) for i in range(3)]
    groups = GRPORolloutController(policy).rollouts(prompts, 4, key=(0, 0))
    rollouts = [r for g in groups for r in g.rollouts]
    longest = max(r.n_tokens for r in rollouts)
    assert read == [3]
    assert fed[0] == fed[1] == longest - 1
    drawing = [int(r.visual_mask.nonzero().max()) for r in rollouts if r.visual_mask.any()]
    assert max(drawing) <= fed[2] <= longest - 1


def test_rows_are_dropped_evenly_or_not(monkeypatch):
    "Never dropping a row gives the same completions."
    policy = example_policy(RolloutLimits(max_think_tokens=10, max_images=2))
    prompts, controller = [example_prompt(policy, i, question='q' * i) for i in range(1, 4)], GRPORolloutController(policy)
    dropped, sizes = controller.rollouts(prompts, 5, key=(1, 1)), []
    plain = policy.step
    def step(state, fed, draw):
        sizes.append(len(fed.ids))
        return plain(state, fed, draw)
    policy.step = step
    controller.rollouts(prompts, 5, key=(1, 1))
    assert sizes[0] == 15 and sizes[-1] < 8
    policy.step, policy.select = plain, None
    monkeypatch.setattr('mmgrpo.rollout.DROP_SHARE', -1.)
    kept = controller.rollouts(prompts, 5, key=(1, 1))
    for a, b in zip((r for g in dropped for r in g.rollouts), (r for g in kept for r in g.rollouts)):
        assert key_of(a) == key_of(b) and torch.allclose(a.logps, b.logps, atol=1e-5) and torch.equal(a.positions, b.positions)


@pytest.mark.parametrize('legal_only', ['word', 'picture'])
def test_a_stubborn_model_cannot_break_out(legal_only):
    "+100 on every id that is illegal in a thought; in a picture there are no ids to prefer at all."
    policy = example_policy(RolloutLimits(), words=None)
    plain, tags = policy.text_head, sorted(set(range(policy.vocab_size)) - set(policy.text_ids) - {policy.protocol.think_close})
    boost = torch.zeros(policy.vocab_size)
    boost[tags if legal_only == 'word' else list(policy.text_ids)] = 100.
    policy.text_head = lambda hidden: plain(hidden) + boost
    groups = GRPORolloutController(policy).rollouts([example_prompt(policy)], 16, key=(0, 0))
    for r in groups[0].rollouts:
        for s in r.segments:
            if s.kind == 'visual': assert s.ids.tolist() == [policy.protocol.image_token] * 4
            else: assert policy.protocol.image_token not in s.ids.tolist()
        for i, legal in zip(r.ids.tolist(), r.legal.tolist()): assert legal < 0 or i in r.legal_sets[legal]


def test_an_adapter_acts_in_bfloat16_as_well():
    "There it stands beside the weights; forgotten while decoding, the gap would be ten times as large."
    policy = example_policy(RolloutLimits(), AdapterSettings(lora_rank=4))
    policy.model.to(torch.bfloat16)
    with torch.no_grad():
        for name, p in policy.trainable().items():
            if 'lora_B' in name: p.copy_(uniforms(('b', name), tuple(p.shape)) - .5)
    prompts = [example_prompt(policy, i) for i in range(4)]
    groups = GRPORolloutController(policy).rollouts(prompts, 4, key=(0, 0))
    batch = collate([(g.prompt, r) for g in groups for r in g.rollouts])
    assert batch.logps.dtype == torch.float32
    with policy.sampling():
        fine = logp_gap([batch], [PolicyScorer(policy)(batch)])
        with policy.peft.disable_adapter(): bare = logp_gap([batch], [PolicyScorer(policy)(batch)])
    for kind in ('text', 'visual'): assert fine[kind].mean < .1 * bare[kind].mean, (fine, bare)


def test_given_pictures_reach_their_own_rows():
    "Each row gets another picture, and keeps it when rows before it have finished and were dropped."
    policy = example_policy(RolloutLimits(max_images=2), seed=3)
    prompts, G = [example_prompt(policy, i) for i in range(3)], 6
    pictures = (uniforms(('pictures',), (3 * G, 4, policy.n_bits)) > .5).to(torch.uint8)
    groups = GRPORolloutController(policy).rollouts(prompts, G, key=(0, 0), pictures=pictures)
    given = [(r, row) for r, row in zip((r for g in groups for r in g.rollouts), pictures) if r.bits.numel()]
    assert len(given) > 4 and max(len(r.bits) for r, _ in given) == 8
    for r, row in given:
        for s in r.segments:
            if s.kind == 'visual': assert torch.equal(s.bits, pack_bits(row)) and not s.logps.any()


@pytest.mark.parametrize('depth', [0, 2])
def test_any_depth_of_the_visual_stack(depth):
    from mmgrpo.policy import TAGS, UniARPolicy, example_tokenizer, tag_id
    from mmgrpo.uniar import UniARForConditionalGeneration, seeded, toy_config
    tokenizer = example_tokenizer()
    config = toy_config(text=dict(vocab_size=272), vision=dict(deepstack_visual_indexes=[0, 1], spatial_merge_size=2), image_token_id=tag_id(tokenizer, TAGS['image_token']),
                        visual_transformer_decoder_depth=depth)
    policy = UniARPolicy(seeded(UniARForConditionalGeneration, config), tokenizer, RolloutLimits())
    policy.text_ids = policy.text_ids[33:37]
    groups = GRPORolloutController(policy).rollouts([example_prompt(policy, i) for i in range(2)], 8, key=(0, 0))
    batch = collate([(g.prompt, r) for g in groups for r in g.rollouts])
    with policy.sampling(): scored = PolicyScorer(policy)(batch)
    assert scored.visual_mask.any() and torch.allclose(scored.logps, batch.logps, atol=1e-4)


@pytest.mark.parametrize('name', ['uniar_decoder', 'uniar_linear'])
def test_decoding_layers_give_what_the_original_code_wrote(name):
    "Bit logits step by step for given codes, and greedy codes, from checkpoints of the original code (three levels, merged patches)."
    folder = Path(__file__).parent / 'golden' / name
    model, want = load_uniar(folder), load_file(folder / 'expected.safetensors')
    real, image = want['gen.attention_mask'].bool(), model.config.image_token_id
    ids = [row[:7][keep[:7]] for row, keep in zip(want['gen.input_ids'], real)]
    prompts = pad_prompts([Prompt(str(i), x, torch.arange(len(x)).expand(3, -1), torch.zeros(0, 1, dtype=torch.uint8), ()) for i, x in enumerate(ids)], 0)
    start = torch.tensor([len(x) for x in ids])
    def draw(codes):
        state, logits = start_decoding(model, prompts, 1), []
        for t in range(4):
            logits.append(model.vision_logits(state.visual))
            bits = (logits[-1] > 0) if codes is None else codes[:, t].flatten(1)
            place = start + torch.stack([torch.zeros(2, dtype=torch.int64), torch.full((2,), t // 2), torch.full((2,), t % 2)])
            state = decode_step(model, state, Fed(torch.full((2,), image), bits.to(torch.uint8), torch.ones(2, dtype=torch.bool), place), True)
        return torch.stack(logits, 1).view(want['gen.codes'].shape)
    with torch.no_grad():
        zero, one = want['gen.bit_logits'].unbind(-1)
        assert (draw(want['gen.codes']) - (one - zero)).abs().max() < 2e-5
        if 'greedy.codes' in want: assert torch.equal((draw(None) > 0).to(torch.int8), want['greedy.codes'])
