"The scorer against a plain computation, its memory, its gradient, and the reference over a few real updates."
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmgrpo.core import uniforms, unpack_bits
from mmgrpo.policy import AdapterSettings, RolloutLimits, collate, example_policy, example_prompt, legal_table
from mmgrpo.rollout import GRPORolloutController, machine, teacher_rollout
from mmgrpo.score import FrozenReference, GapError, PolicyScorer, Words, check_gap, logp_gap, text_logps
from mmgrpo.uniar import read_batch


def stirred(policy, scale=.2):
    "Every trained tensor gets values of its own, so that an adapter that is forgotten is noticed."
    with torch.no_grad():
        for name, p in policy.trainable().items(): p.add_((uniforms(('stir', name), tuple(p.shape)) - .5) * scale)
    return policy


@pytest.fixture(scope='module')
def world():
    policy = stirred(example_policy(RolloutLimits(max_images=2), seed=5))
    prompts = [example_prompt(policy, i, question='w' * (2 + 9 * i)) for i in range(3)]
    groups = GRPORolloutController(policy, text_temperature=.7, visual_temperature=1.4).rollouts(prompts, 4, key=(5, 0))
    return policy, [(g.prompt, r) for g in groups for r in g.rollouts]


def plain_logps(policy, prompt, rollout):
    "One row through the whole model at once: no cache, no padding, positions from the model's own rule, log-softmax by hand."
    model, n = policy.model, len(prompt)
    ids = torch.cat([prompt.ids, rollout.ids])[None]
    grids = [*prompt.grids, *(s.grid for s in rollout.segments if s.kind == 'visual')]
    thw = torch.tensor([(1, rows, cols) for rows, cols in grids])
    packed = torch.cat([prompt.bits, rollout.bits]) if rollout.bits.numel() else prompt.bits
    bits = unpack_bits(packed, model.n_bits).view(-1, model.levels, model.merge_unit, model.config.vision_config.bsq_dim)
    hidden, positions = read_batch(model, ids, torch.ones_like(ids), bits, thw)
    words, pictures = model.text_logits(hidden)[0, n - 1:-1], model.vision_logits(model.visual_stack(hidden, positions, torch.ones_like(ids)))[0, n - 1:-1]
    codes, out, drawn = bits.flatten(1)[len(prompt.bits):], [], 0
    temperature = [s.temperature for s in rollout.segments for _ in range(len(s))]
    for t, (i, legal) in enumerate(zip(rollout.ids.tolist(), rollout.legal.tolist())):
        if legal >= 0:
            scores = words[t][list(rollout.legal_sets[legal])].double() / temperature[t]
            out.append(scores[rollout.legal_sets[legal].index(i)] - scores.logsumexp(0))
        else:
            chance = (pictures[t].double() / temperature[t]).sigmoid()
            out.append(torch.where(codes[drawn] == 1, chance, 1 - chance).log().sum())
            drawn += 1
    return torch.stack(out)


def test_against_a_plain_computation(world):
    policy, pairs = world
    batch = collate(pairs)
    with policy.sampling():
        scored = PolicyScorer(policy)(batch)
        for row, (prompt, rollout) in enumerate(pairs):
            want = plain_logps(policy, prompt, rollout).float()
            assert torch.allclose(scored.logps[row, :len(want)], want, atol=1e-4), (row, rollout.n_tokens)
            assert torch.allclose(rollout.logps, want, atol=1e-4)
    assert scored.visual_mask.sum(1).max() == 8 and (~batch.mask).any()


def test_gradient_against_a_plain_computation(world):
    "Prompts are shared in one and repeated in the other."
    policy, pairs = world
    weights = uniforms(('weights',), (len(pairs), max(r.n_tokens for _, r in pairs)))
    named = policy.trainable()
    got = torch.autograd.grad((PolicyScorer(policy)(collate(pairs)).logps * weights).sum(), list(named.values()))
    want = torch.autograd.grad(sum((plain_logps(policy, *pair) * w[:pair[1].n_tokens]).sum() for pair, w in zip(pairs, weights)), list(named.values()))
    for name, a, b in zip(named, got, want): assert torch.allclose(a, b, atol=1e-4 * max(1, float(b.abs().max()))), name


def test_gradient_against_finite_differences(world):
    policy, pairs = world
    batch, scorer = collate(pairs[:3]), PolicyScorer(policy, 5)
    name, p = next((n, p) for n, p in policy.trainable().items() if 'lora_B' in n)
    [grad] = torch.autograd.grad(scorer(batch).logps.sum(), [p])
    direction, step = torch.zeros_like(p), 2e-2
    direction.view(-1)[int(grad.abs().argmax())] = step
    value = []
    with torch.no_grad():
        for sign in (1, -1):
            p.add_(sign * direction)
            value.append(float(scorer(batch).logps.double().sum()))
            p.sub_(sign * direction)
    assert abs((value[0] - value[1]) / (2 * step) / float(grad.abs().max() * grad.flatten()[grad.abs().argmax()].sign()) - 1) < .05


@pytest.mark.parametrize('size', [1, 7, 64])
def test_chunks_are_equal(world, size):
    policy, pairs = world
    batch, named = collate(pairs), list(policy.trainable().values())
    whole, part = PolicyScorer(policy)(batch).logps, PolicyScorer(policy, size)(batch).logps
    assert torch.allclose(whole, part, atol=1e-6)
    for a, b in zip(torch.autograd.grad(whole.sum(), named), torch.autograd.grad(part.sum(), named)):
        assert torch.allclose(a, b, atol=1e-4 * max(1, float(a.abs().max())))


class Largest(TorchDispatchMode):
    "The largest tensor that any operation returns, in elements."
    size = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.size = max([self.size, *(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t._base is None)])
        return out


def test_memory_is_a_chunk_not_the_batch():
    "2,048 words of a vocabulary of 4,096, 64 at a time: no tensor beyond a chunk's logits, forward or backward."
    V, M, size = 4096, 2048, 64
    head, hidden = torch.nn.Linear(8, V, bias=False), torch.zeros(M, 8, requires_grad=True)
    words = Words(torch.arange(M), torch.zeros(M, dtype=torch.int64), torch.ones(M, 1))
    table, largest = legal_table([range(V)], V), {}
    for chunk in (size, M):
        with Largest() as mode: text_logps(head, hidden, words, table, chunk).sum().backward()
        largest[chunk] = mode.size
    assert largest[M] >= M * V
    assert largest[size] <= max(size, 8) * V <= largest[M] / 16


def test_log_probs_are_float32_in_a_bfloat16_model():
    policy = example_policy()
    policy.model.to(torch.bfloat16)
    prompts = [example_prompt(policy)]
    [group] = GRPORolloutController(policy).rollouts(prompts, 4, key=(0, 0))
    scored = PolicyScorer(policy)(collate([(group.prompt, r) for r in group.rollouts]))
    assert scored.logps.dtype == scored.bits.dtype == torch.float32 and torch.isfinite(scored.logps).all()
    scored.logps.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in policy.trainable().values() if p.grad is not None)


def test_order_of_rows_changes_nothing(world):
    policy, pairs = world
    order = [5, 0, 11, 3, 8, 1]
    with policy.sampling():
        scored, mixed = PolicyScorer(policy)(collate(pairs)), PolicyScorer(policy)(collate([pairs[i] for i in order]))
    for row, i in enumerate(order):
        n = pairs[i][1].n_tokens
        assert torch.allclose(mixed.logps[row, :n], scored.logps[i, :n], atol=1e-5)


def test_the_picture_that_was_drawn_matters(world):
    "What follows a picture depends on its bits; what precedes it does not."
    policy, pairs = world
    prompt, rollout = next(pair for pair in pairs if pair[1].visual_mask.any() and not pair[1].visual_mask[-1])
    segments = [replace(s, bits=~s.bits) if s.kind == 'visual' else s for s in rollout.segments]
    batch = collate([(prompt, rollout), (prompt, replace(rollout, segments=tuple(segments)))])
    with policy.sampling(): a, b = PolicyScorer(policy)(batch).logps
    first = int(rollout.visual_mask.nonzero()[0])
    assert torch.equal(a[:first], b[:first]) and not torch.allclose(a[first:], b[first:], atol=1e-3)


def test_train_and_eval_score_the_same(world):
    policy, pairs = world
    batch = collate(pairs)
    with torch.no_grad():
        a = PolicyScorer(policy)(batch).logps
        policy.train(True)
        b = PolicyScorer(policy)(batch).logps
    policy.train(False)
    assert torch.equal(a, b)


@pytest.mark.parametrize('scale', [0., .2], ids=['new adapter', 'adapter to go on with'])
def test_reference_over_updates(scale):
    "KL is exactly 0 before the first update and not after it; the snapshot, the parameters' identity and the moments stay."
    policy = stirred(example_policy(seed=8), scale)
    groups = GRPORolloutController(policy).rollouts([example_prompt(policy)], 6, key=(0, 0))
    batch, scorer, reference = collate([(g.prompt, r) for g in groups for r in g.rollouts]), PolicyScorer(policy), FrozenReference(policy)
    def ref():
        with torch.no_grad(), reference.apply(policy): return scorer(batch).logps
    start = ref()
    assert torch.equal(start, scorer(batch).logps.detach())
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        scorer(batch).logps.sum().backward()
        inside = ref()                                                  # between backward and step, as an engine may
        optimizer.step()
        assert torch.equal(inside, start)
    assert not torch.allclose(scorer(batch).logps, start, atol=1e-3)
    assert torch.equal(ref(), start)
    assert FrozenReference(policy, reference.state).sha256 == reference.sha256 != FrozenReference(policy).sha256


def test_bare_model_is_another_reference():
    "An adapter with B != 0: switching it off is not the policy that the run started from."
    policy = stirred(example_policy(seed=8))
    groups = GRPORolloutController(policy).rollouts([example_prompt(policy)], 6, key=(0, 0))
    batch, scorer = collate([(g.prompt, r) for g in groups for r in g.rollouts]), PolicyScorer(policy)
    with torch.no_grad():
        with policy.peft.disable_adapter(): bare = scorer(batch).logps
        assert (bare - scorer(batch).logps).abs().max() > 1e-2


def test_shared_weights_are_kept_once():
    "Word embeddings tied to the text head: one parameter, one snapshot, one restore."
    policy = example_policy(settings=None)
    policy.model.lm_head.weight = policy.model.model.language_model.embed_tokens.weight
    reference = FrozenReference(policy)
    assert 'lm_head.weight' not in reference.state
    before = policy.model.lm_head.weight.detach().clone()
    with torch.no_grad(): policy.model.lm_head.weight.add_(1)
    with reference.apply(policy): assert torch.equal(policy.model.lm_head.weight, before)
    assert torch.equal(policy.model.lm_head.weight, before + 1)
    assert policy.model.lm_head.weight is policy.model.model.language_model.embed_tokens.weight


@pytest.mark.parametrize('kind', ['text', 'visual'])
def test_gate_trips_at_one_percent_of_temperature(world, kind):
    policy, pairs = world
    batch, scorer = collate(pairs), PolicyScorer(policy)
    off = replace(batch, temperature=torch.where(getattr(batch, f'{kind}_mask'), batch.temperature * 1.01, batch.temperature))
    with policy.sampling(): fine, bad = logp_gap([batch], [scorer(batch)]), logp_gap([batch], [scorer(off)])
    check_gap(fine, 1e-4, 1e-4)
    with pytest.raises(GapError, match=f'^{kind}: .*trainer.gap_tolerance_{kind}.*rollout {bad[kind].worst[1]} of {bad[kind].worst[0]}$'):
        check_gap(bad, 1e-3, 1e-3)
    other = 'visual' if kind == 'text' else 'text'
    assert bad[other].max < 1e-4
    check_gap(bad, **{kind: math.inf, other: 1e-4})


def test_gap_is_a_word_and_a_bit(world):
    "A known shift of every log-prob: half a nat a word, and half a nat shared by the bits of a visual token."
    policy, pairs = world
    batch = collate(pairs)
    with policy.sampling(): scored = PolicyScorer(policy)(batch)
    gaps = logp_gap([batch], [replace(scored, logps=batch.logps + .5)])
    assert gaps['text'].mean == pytest.approx(.5, abs=1e-5) and gaps['visual'].mean == pytest.approx(.5 / policy.n_bits, abs=1e-5)


def test_gap_over_micro_batches_is_that_of_the_whole(world):
    policy, pairs = world
    batches = [collate(pairs[:5]), collate(pairs[5:])]
    with policy.sampling(): parts, whole = [PolicyScorer(policy)(b) for b in batches], PolicyScorer(policy)(collate(pairs))
    a, b = logp_gap(batches, parts), logp_gap([collate(pairs)], [whole])
    assert a['text'].n == b['text'].n and a['visual'].n == b['visual'].n and abs(a['text'].mean - b['text'].mean) < 1e-5


def test_teaching_a_trajectory_raises_its_log_prob():
    "The same scorer serves supervised training."
    policy = example_policy(settings=AdapterSettings(lora_rank=4), seed=2)
    m, p, (a, b) = machine(policy.protocol, policy.text_ids, policy.vocab_size), policy.protocol, policy.text_ids[:2]
    text = lambda *ids: SimpleNamespace(kind='text', ids=torch.tensor(ids))
    picture = SimpleNamespace(kind='visual', ids=torch.full((4,), p.image_token), bits=torch.tensor([[1], [2], [3], [255]], dtype=torch.uint8))
    parts = (text(p.think_open, a, b, p.think_close, p.vision_start), picture,
             text(p.vision_end, p.think_open, b, p.think_close, p.answer_open, a, p.answer_close, min(p.eos)))
    prompt = example_prompt(policy)
    batch = collate([(prompt, teacher_rollout(prompt, parts, m, p))])
    assert batch.text_mask.sum() == 3 + 2 + 2 + 1 and batch.visual_mask.sum() == 4
    optimizer, scorer, losses = torch.optim.Adam(policy.trainable().values(), lr=2e-2), PolicyScorer(policy), []
    for _ in range(10):
        loss = -scorer(batch).logps.sum()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < .5 * losses[0], losses
