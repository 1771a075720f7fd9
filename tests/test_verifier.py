"""The verifier against arbitrary completions: total, pure, blind to how text is cut, and in agreement with a second, independent judge."""
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st

from mmgrpo.core import Rollout, Segment, pack_bits
from mmgrpo.verifier import LETTERS, REASONS, Protocol, VisualJigsawABCDVerifier

THINK, UNTHINK, ANSWER, UNANSWER, SEE, UNSEE, IMAGE, EOS, EOT = range(9)
WORD = {c: 10 + i for i, c in enumerate('ABCDx ')}
PROTOCOL = Protocol(THINK, UNTHINK, ANSWER, UNANSWER, SEE, UNSEE, IMAGE, frozenset({EOS, EOT}), 1, 2, (1, 2), 4, 2, n_bits=12)
BODIES = {c: frozenset({(WORD[c],), (WORD[' '], WORD[c])}) for c in LETTERS}
VERIFIER = VisualJigsawABCDVerifier(PROTOCOL, BODIES)
PICTURE = Segment('visual', torch.tensor([IMAGE] * 2), torch.zeros(2), torch.tensor([-1, -1]), 1., 'exact',
                  pack_bits(torch.ones(2, 12, dtype=torch.uint8)), (1, 2))


def text(ids, finish='stop'):
    return Segment('text', torch.tensor(ids, dtype=torch.int64), torch.zeros(len(ids)), torch.zeros(len(ids), dtype=torch.int64), 1., finish)


def rollout(segments, truncated=False):
    return Rollout('p', 0, tuple(segments), torch.zeros(3, sum(map(len, segments)), dtype=torch.int64), ((0,),), truncated)


# --- a completion as a string, one letter a token: an easier thing to make up, and to judge by a regular expression

SYMBOLS = dict(t=THINK, T=UNTHINK, a=ANSWER, Z=UNANSWER, v=SEE, V=UNSEE, i=IMAGE, e=EOS, E=EOT) | WORD
GOOD = 'txTvpVtxTaBZe'
LEGAL = re.compile(r'(t[ABCDx ]{0,4}TvpV){1,2}t[ABCDx ]{0,4}Ta ?(?P<letter>[ABCD])Z[eE]')


def spelled(string, cuts=()):
    "The rollout of a string; `p` is a whole picture, and text is also cut before the places in `cuts`."
    segments, run = [], []
    for at, c in enumerate(string):
        if run and (c == 'p' or at in cuts): segments.append(text(run)); run = []
        if c == 'p': segments.append(PICTURE)
        else: run.append(SYMBOLS[c])
    return rollout(segments + ([text(run)] if run else []))


alphabet = st.sampled_from('tTaZvVpieEABCDx ')
strings = st.text(alphabet, max_size=30)


@st.composite
def nearly_good(draw):
    "A legal completion with up to three small accidents: almost legal is where a verifier errs."
    think = st.text(st.sampled_from('ABCDx '), max_size=5)
    string = ''.join('t' + draw(think) + 'TvpV' for _ in range(draw(st.integers(0, 3)))) + 't' + draw(think) + 'Ta'
    string += draw(st.sampled_from(['', ' '])) + draw(st.sampled_from('ABCD')) + 'Z' + draw(st.sampled_from('eE'))
    for _ in range(draw(st.integers(0, 3))):
        at, new = draw(st.integers(0, len(string))), draw(st.text(alphabet, max_size=2))
        string = string[:at] + new + string[at + draw(st.integers(0, 2)):]
    return string


@given(st.one_of(strings, nearly_good()), st.sampled_from(LETTERS))
def test_it_agrees_with_a_regular_expression(string, gold):
    verdict, match = VERIFIER(spelled(string), gold), LEGAL.fullmatch(string)
    assert verdict.valid == bool(match), string
    assert verdict.letter == (match['letter'] if match else None)
    assert verdict.reward == float(bool(match) and match['letter'] == gold)
    assert (verdict.reason == 'ok') == (verdict.reward == 1)
    assert (verdict.reason == 'wrong_letter') == (verdict.valid and verdict.reward == 0)


def test_the_strategy_makes_both_kinds():
    "Were nothing legal among the examples, agreement would say little."
    seen = set()

    @given(nearly_good())
    def look(string): seen.add(bool(LEGAL.fullmatch(string)))
    look()
    assert seen == {True, False}


@given(st.one_of(strings, nearly_good()), st.sets(st.integers(0, 40)), st.sampled_from(LETTERS))
def test_how_text_is_cut_into_segments_does_not_matter(string, cuts, gold):
    assert VERIFIER(spelled(string, cuts), gold) == VERIFIER(spelled(string), gold)


@given(nearly_good(), st.sampled_from(LETTERS))
def test_one_gold_at_most_is_paid(string, gold):
    verdicts = [VERIFIER(spelled(string), g) for g in LETTERS]
    assert sum(v.reward for v in verdicts) == float(verdicts[0].valid)
    assert len({v.valid for v in verdicts}) == 1


@pytest.mark.parametrize('at', range(len(GOOD)))
def test_every_token_is_needed(at):
    "Without any one token the completion is not legal; a word of a think is the one exception."
    verdict = VERIFIER(spelled(GOOD[:at] + GOOD[at + 1:]), 'B')
    assert verdict.valid == (GOOD[at] == 'x')


@pytest.mark.parametrize('at', range(len(GOOD) + 1))
@pytest.mark.parametrize('new', 'tTaZvVpieE')
def test_no_second_tag_fits_anywhere(at, new):
    verdict = VERIFIER(spelled(GOOD[:at] + new + GOOD[at:]), 'B')
    assert (verdict.reward, verdict.valid) == (0., False)


@pytest.mark.parametrize('at', range(len(GOOD) + 1))
@pytest.mark.parametrize('new', 'ABx ')
def test_words_fit_only_into_a_think(at, new):
    "And a blank before the letter, as the table of bodies has it."
    string = GOOD[:at] + new + GOOD[at:]
    assert VERIFIER(spelled(string), 'B').valid == (at in (1, 2, 7, 8) or string.endswith('a BZe'))


@pytest.mark.parametrize('end', range(len(GOOD)))
def test_no_prefix_is_paid(end):
    verdict = VERIFIER(spelled(GOOD[:end]), 'B')
    assert (verdict.reward, verdict.valid, verdict.letter) == (0., False, None)


@given(nearly_good(), st.sampled_from(LETTERS), st.data())
def test_what_was_cut_is_never_paid(string, gold, data):
    whole = spelled(string)
    assert VERIFIER(replace(whole, truncated=True), gold).reason == 'truncated'
    if texts := [i for i, s in enumerate(whole.segments) if s.kind == 'text']:
        i = data.draw(st.sampled_from(texts))
        cut = tuple(replace(s, finish='length') if i == j else s for j, s in enumerate(whole.segments))
        assert VERIFIER(replace(whole, segments=cut), gold).reason == 'truncated'


# --- junk

integers = st.integers(-2**63, 2**63 - 1)
id_lists = st.lists(st.one_of(st.integers(0, 15), integers), max_size=6)
id_tensors = st.one_of(id_lists.map(lambda x: torch.tensor(x, dtype=torch.int64)),
                       st.lists(st.floats(), max_size=4).map(torch.tensor), st.lists(st.booleans(), max_size=4).map(torch.tensor))
bit_shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
bit_tensors = st.one_of(st.none(), st.just(PICTURE.bits), st.tuples(bit_shapes, st.sampled_from([torch.uint8, torch.int64, torch.float32, torch.bool]))
                        .map(lambda x: torch.ones(x[0]).to(x[1])))
grids = st.one_of(st.none(), st.just((1, 2)), st.just([1, 2]), st.tuples(integers, integers), st.tuples(), st.text(max_size=2))


@st.composite
def junk_segments(draw):
    ids = draw(st.one_of(id_tensors, st.just(PICTURE.ids)))
    return Segment(draw(st.sampled_from(['text', 'visual', 'audio', '', None, 7])), ids, torch.full(ids.shape, float('nan')), torch.zeros(ids.shape),
                   draw(st.floats()), draw(st.sampled_from(['stop', 'length', 'exact', '', None])), draw(bit_tensors), draw(grids))


pieces = st.one_of(junk_segments(), st.just(PICTURE), nearly_good().map(lambda s: text([SYMBOLS[c] for c in s if c != 'p'])))


@pytest.mark.parametrize('change', [lambda ids: ids.double(), lambda ids: ids.double() + .25, lambda ids: torch.where(ids == WORD['x'], -1, ids)])
def test_ids_are_whole_numbers(change):
    "`7.0 == 7` in Python, and in a dictionary; as an id it is junk."
    spoilt = tuple(replace(s, ids=change(s.ids)) for s in spelled(GOOD).segments)
    assert VERIFIER(rollout(spoilt), 'B').reason == 'malformed'


@given(st.lists(pieces, max_size=6), st.booleans(), st.sampled_from(LETTERS))
def test_junk_gets_a_reason_and_no_reward(segments, truncated, gold):
    verdict = VERIFIER(rollout(segments, truncated), gold)
    assert verdict.reason in REASONS
    assert verdict.reward == 0.    # examples are fixed, and none is legal by coincidence
    assert all(type(v) is float for v in verdict.parts.values())


@given(junk_segments(), st.integers(0, 2))
def test_junk_in_a_good_completion_spoils_it(junk, at):
    good = spelled(GOOD).segments
    harmless = junk.kind == 'text' and len(junk) == 0 and junk.finish != 'length'
    verdict = VERIFIER(rollout([*good[:at], junk, *good[at:]]), 'B')
    assert (verdict.reward == 1) == harmless, verdict


@pytest.mark.parametrize('change', [dict(ids=torch.tensor([IMAGE, WORD['x']])), dict(bits=PICTURE.bits.long()), dict(bits=PICTURE.bits.float()),
                                    dict(bits=PICTURE.bits | 1), dict(bits=PICTURE.bits[:1]), dict(bits=None), dict(grid=(2, 1)), dict(finish='length')])
def test_a_picture_is_whole_or_bad(change):
    segments = [replace(s, **change) if s.kind == 'visual' else s for s in spelled(GOOD).segments]
    verdict = VERIFIER(rollout(segments), 'B')
    assert (verdict.reward, verdict.valid, verdict.reason) == (0., False, 'bad_picture')


@pytest.mark.parametrize('gold', ['a', '(A)', 'E', '', ' A', 'AB', 'ABCD', 'А', 'Ａ', None, ['A'], 0, float('nan')])
def test_a_bad_gold_raises_whatever_the_completion(gold):
    for completion in (spelled(GOOD), rollout([])):
        with pytest.raises(ValueError, match='gold must be one of A, B, C, D'): VERIFIER(completion, gold)


@given(st.one_of(strings, nearly_good()), st.sampled_from(LETTERS))
def test_it_is_pure(string, gold):
    completion = spelled(string)
    before = [(s.ids.clone(), s.logps.clone()) for s in completion.segments]
    first = VERIFIER(completion, gold)
    VERIFIER(spelled(GOOD), 'A')                                       # what was judged in between leaves no trace
    assert VERIFIER(completion, gold) == first
    for s, (ids, logps) in zip(completion.segments, before): assert torch.equal(s.ids, ids) and torch.equal(s.logps, logps)
