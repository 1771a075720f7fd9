"UniAR against what the original code wrote (tests/golden), and against itself where that is silent."
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText
from transformers.cache_utils import DynamicCache

from mmgrpo.uniar import (UniARConfig, UniARForConditionalGeneration, UniARVisionConfig, batch_positions, seeded,
                          token_grids, toy_config)

GOLDEN = Path(__file__).parent / 'golden'
NAMES = 'uniar_decoder', 'uniar_linear'
WAYS = [(name, attention) for name in NAMES for attention in ('sdpa', 'eager')]
GOLDEN_TOL, CACHE_TOL = 1e-5, 1e-4


def within(ours, theirs, tol): assert_close(ours.float(), theirs.float(), rtol=0, atol=tol)

def load(name, **how): return UniARForConditionalGeneration.from_pretrained(GOLDEN / name, **how).eval()

@pytest.fixture(params=WAYS, ids='-'.join, scope='module')
def case(request):
    "A golden model under one attention implementation, and what the original code made of it."
    name, attention = request.param
    return load(name, attn_implementation=attention), load_file(GOLDEN / name / 'expected.safetensors')

@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad(): yield


# What the original code wrote

def test_pictures_are_read_as_the_same_bits(case):
    model, want = case
    bits = model.image_bits(want['tok.pixel_values'], want['tok.grid_thw'])
    assert bits.dtype == torch.uint8 and bits.shape == (10, model.levels, model.merge_unit, 8)
    for level, name in enumerate(['main', 'deepstack_0', 'deepstack_1']):
        assert torch.equal(bits[:, level].flatten(1), want[f'tok.bits_{name}'].to(torch.uint8)), name

def test_bits_have_the_same_features(case):
    model, want = case
    main, taps = model.bit_features(model.image_bits(want['tok.pixel_values'], want['tok.grid_thw']))
    within(main, want['tok.features'], GOLDEN_TOL)
    for i, tap in enumerate(taps): within(tap, want[f'tok.deepstack_features_{i}'], GOLDEN_TOL)

def text_logits(model, want):
    return model(input_ids=want['text.input_ids'], attention_mask=want['text.attention_mask'],
                 pixel_values=want['tok.pixel_values'], image_grid_thw=want['tok.grid_thw']).logits

def bit_logits(model, want):
    return model.bit_logits(input_ids=want['gen.input_ids'], attention_mask=want['gen.attention_mask'],
                            codes=want['gen.codes'], image_grid_thw=want['gen.image_grid_thw'])

def test_text_logits(case):
    model, want = case
    real = want['text.attention_mask'].bool()
    within(text_logits(model, want)[real], want['text.logits'][real], GOLDEN_TOL)

def test_bit_logits(case):
    model, want = case
    zero, one = want['gen.bit_logits'].unbind(-1)
    within(bit_logits(model, want), one - zero, GOLDEN_TOL)

def draw_greedy(model, prompt, mask, rows, cols):
    "The likelier value of every bit, one visual token at a time, each stack with its own cache."
    B, n, token = len(prompt), rows * cols, model.config.image_token_id
    ids = torch.cat([prompt, prompt.new_full((B, n), token)], dim=1)
    mask = torch.cat([mask, mask.new_ones(B, n)], dim=1)
    positions = batch_positions(ids, mask, [(rows, cols)] * B, token)
    caches, codes, lo = (DynamicCache(), DynamicCache()), [], 0
    nothing = torch.zeros(0, model.levels, model.merge_unit, model.config.vision_config.bsq_dim)
    for hi in range(prompt.shape[1], ids.shape[1]):
        embeds, taps = model.embed(ids[:, lo:hi], codes[-1] if codes else nothing)
        hidden = model.backbone(embeds, taps, positions[..., lo:hi], mask[:, :hi], caches[0])
        hidden = model.visual_stack(hidden, positions[..., lo:hi], mask[:, :hi], caches[1])
        codes.append((model.vision_logits(hidden[:, -1]) > 0).view(B, *nothing.shape[1:]))
        lo = hi
    return torch.stack(codes, dim=1)

@pytest.mark.parametrize('attention', ['sdpa', 'eager'])
def test_greedy_drawing_with_caches_gives_the_same_codes(attention):
    model, want = load(NAMES[0], attn_implementation=attention), load_file(GOLDEN / NAMES[0] / 'expected.safetensors')
    seen = []
    hook = model.visual_decoder[0].register_forward_hook(lambda layer, args, out: seen.append(out.shape[1]))
    drawn = draw_greedy(model, want['gen.input_ids'][:, :7], want['gen.attention_mask'][:, :7], 2, 2)
    hook.remove()
    assert torch.equal(drawn.to(torch.int8), want['greedy.codes'])
    assert seen == [7, 1, 1, 1], 'the visual decoder sees each position once'


# What it did not write

def test_checkpoint_names_are_all_ours_and_no_more(case):
    model, _ = case
    with safe_open(model.config._name_or_path + '/model.safetensors', 'pt') as file:
        assert sorted(file.keys()) == sorted(model.state_dict())

def test_a_checkpoint_without_the_integer_buffers_loads_sound_ones(tmp_path):
    model = load(NAMES[0])
    want = {name: buffer.clone() for name, buffer in model.named_buffers() if '.bsq.' in name}
    weights = {name: t for name, t in load_file(GOLDEN / NAMES[0] / 'model.safetensors').items() if name not in want}
    save_file(weights, tmp_path / 'model.safetensors', metadata={'format': 'pt'})
    model.config.save_pretrained(tmp_path)
    again = dict(UniARForConditionalGeneration.from_pretrained(tmp_path).named_buffers())
    assert len(want) == 2
    for name, buffer in want.items(): assert torch.equal(again[name], buffer), name

@pytest.mark.parametrize('name', NAMES)
def test_save_and_load_give_the_same_model(name, tmp_path):
    model, want = load(name), load_file(GOLDEN / name / 'expected.safetensors')
    model.save_pretrained(tmp_path)
    again = UniARForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert again.config.to_dict() | {'_name_or_path': ''} == model.config.to_dict() | {'_name_or_path': ''}
    for key, value in model.state_dict().items(): assert torch.equal(value, again.state_dict()[key]), key
    assert torch.equal(bit_logits(again, want), bit_logits(model, want))

def test_auto_classes_know_it():
    config = AutoConfig.from_pretrained(GOLDEN / NAMES[0])
    assert type(config) is UniARConfig and type(config.vision_config) is UniARVisionConfig
    for auto in (AutoModel, AutoModelForImageTextToText):
        assert type(auto.from_pretrained(GOLDEN / NAMES[0])) is UniARForConditionalGeneration

def test_bf16_runs_and_stays_near(case):
    model, want = case
    half = UniARForConditionalGeneration.from_pretrained(
        model.config._name_or_path, dtype=torch.bfloat16, attn_implementation=model.config._attn_implementation).eval()
    bits = half.image_bits(want['tok.pixel_values'], want['tok.grid_thw'])
    full = model.image_bits(want['tok.pixel_values'], want['tok.grid_thw'])
    assert (bits != full).sum() <= 10                          # of 960; a flip moves the text logits by 1 or 2
    assert text_logits(half, want).isfinite().all()
    real = want['text.attention_mask'].bool()
    logits = half(want['text.input_ids'], want['text.attention_mask'], bits=full,
                  image_grid_thw=want['tok.grid_thw']).logits
    assert logits.dtype == torch.bfloat16
    within(logits[real], want['text.logits'][real], 0.3)       # from the same bits
    zero, one = want['gen.bit_logits'].unbind(-1)
    within(bit_logits(half, want), one - zero, 0.1)

@pytest.mark.parametrize('side', ['left', 'right'])
def test_padding_changes_nothing(case, side):
    model, want = case
    ids, mask, codes = want['gen.input_ids'], want['gen.attention_mask'], want['gen.codes']
    alone = [model.bit_logits(ids[b:b+1, mask[b].bool()], None, codes[b:b+1], want['gen.image_grid_thw'][:1])
             for b in range(2)]
    rows = [F.pad(ids[b, mask[b].bool()], (3, 0) if side == 'left' else (0, 3)) for b in range(2)]
    width = max(map(len, rows))
    ids = torch.stack([F.pad(row, (width - len(row), 0) if side == 'left' else (0, width - len(row))) for row in rows])
    together = model.bit_logits(ids, (ids != 0).long(), codes, want['gen.image_grid_thw'])
    within(together, torch.cat(alone), GOLDEN_TOL)

MIXED = [[3, 5, 182] + [180] * 4 + [183, 9, 8, 182] + [180] * 2 + [183, 182] + [180] * 6 + [183, 7, 4],   # 3 pictures
         [11, 182] + [180] * 6 + [183, 12, 13, 14]]                                                     # 1 picture
MIXED_THW = torch.tensor([[1, 4, 4], [1, 2, 4], [1, 4, 6], [1, 6, 4]])

def mixed_batch(model, side):
    "Words, a picture, words, two pictures; beside it a shorter row; padded on one side."
    width = max(map(len, MIXED))
    pads = [(width - len(row), 0) if side == 'left' else (0, width - len(row)) for row in MIXED]
    ids = torch.stack([F.pad(torch.tensor(row), pad) for row, pad in zip(MIXED, pads)])
    mask = torch.stack([F.pad(torch.ones(len(row), dtype=torch.long), pad) for row, pad in zip(MIXED, pads)])
    bits = torch.arange(18 * model.n_bits).mul(2654435761).bitwise_right_shift(13).remainder(2)
    bits = bits.view(18, model.levels, model.merge_unit, -1).to(torch.uint8)
    grids = token_grids(MIXED_THW, model.config.vision_config.spatial_merge_size)
    return ids, mask, bits, batch_positions(ids, mask, grids, model.config.image_token_id)

@pytest.mark.parametrize('side', ['left', 'right'])
@pytest.mark.parametrize('name', NAMES)
def test_cached_steps_equal_one_forward(name, side):
    model = load(name)
    ids, mask, bits, positions = mixed_batch(model, side)
    here = ids == 180
    row_of = torch.full_like(ids, -1).masked_scatter(here, torch.arange(len(bits)))   # which bits each position holds
    embeds, taps = model.embed(ids, bits)
    whole = model.backbone(embeds, taps, positions, mask)
    visual = model.visual_stack(whole, positions, mask)
    caches, seen, hidden, late = (DynamicCache(), DynamicCache()), {'back': 0, 'visual': 0}, [], []
    stacks = ('back', model.model.language_model.layers), ('visual', model.visual_decoder)
    hooks = [layers[0].register_forward_hook(lambda m, a, out, k=k: seen.update({k: seen[k] + out.shape[1]}))
             for k, layers in stacks if len(layers)]
    caught_up = 0
    for t in range(ids.shape[1]):
        now = row_of[:, t:t+1]
        embeds, taps = model.embed(ids[:, t:t+1], bits[now[now >= 0]])
        hidden.append(model.backbone(embeds, taps, positions[..., t:t+1], mask[:, :t+1], caches[0]))
        if (t + 1) % 5 == 0 or t + 1 == ids.shape[1]:                 # the visual decoder lags and catches up in chunks
            chunk = torch.cat(hidden, dim=1)[:, caught_up:]
            late.append(model.visual_stack(chunk, positions[..., caught_up:t+1], mask[:, :t+1], caches[1]))
            caught_up = t + 1
    for hook in hooks: hook.remove()
    real = mask.bool()
    within(torch.cat(hidden, dim=1)[real], whole[real], CACHE_TOL)
    within(torch.cat(late, dim=1)[real], visual[real], CACHE_TOL)
    width = ids.shape[1]
    assert seen == {'back': width, 'visual': width if len(model.visual_decoder) else 0}

VARIANTS = {
    'merge 2': dict(vision=dict(spatial_merge_size=2)),
    'no attention': dict(vision=dict(use_attention=False)),
    'no taps': dict(vision=dict(deepstack_visual_indexes=[])),
    'one block': dict(vision=dict(depth=1, deepstack_visual_indexes=[0])),
    'odd patch': dict(vision=dict(patch_size=5)),
    'taps not normalised': dict(vision=dict(bsq_skip_final_layernorm=False)),
    'mlp head': dict(vistok_pred_use_mlp=True, vistok_pred_mlp_dim=24),
    'plain head': dict(vistok_pred_layernorm=False),
    'no decoder': dict(visual_transformer_decoder=False),
    'tied words': dict(tie_word_embeddings=True),
}

def toy_inputs(model):
    "Two rows with a 2 x 2 picture each, as patches."
    vision = model.config.vision_config
    side = 2 * vision.spatial_merge_size
    n, width = 2 * side * side, 3 * vision.temporal_patch_size * vision.patch_size ** 2
    pixels = torch.linspace(-9, 9, n * width).view(n, width).sin()
    ids = torch.tensor([[4, 5, 30, 28, 28, 28, 28, 31, 6], [0, 0, 30, 28, 28, 28, 28, 31, 7]])
    return ids, (ids != 0).long(), pixels, torch.tensor([[1, side, side]] * 2)

@pytest.mark.parametrize('name', VARIANTS)
def test_every_form_of_the_model_runs_trains_and_survives_saving(name, tmp_path):
    model = seeded(UniARForConditionalGeneration, toy_config(**VARIANTS[name]))
    ids, mask, pixels, grid = toy_inputs(model)
    bits = model.image_bits(pixels, grid)
    codes = bits.view(2, 4, *bits.shape[1:])
    logits = model.bit_logits(ids, mask, codes, grid)
    assert logits.shape == codes.shape and logits.isfinite().all()
    with torch.enable_grad():
        (model.bit_logits(ids, mask, codes, grid).sum() + model(ids, mask, pixels, grid).logits.sum()).backward()
    trained = [model.output_layer_vistok, model.model.language_model, model.lm_head, *model.visual_decoder]
    assert all(p.grad is not None and p.grad.isfinite().all() for module in trained for p in module.parameters())
    model.save_pretrained(tmp_path)
    again = UniARForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert sorted(again.state_dict()) == sorted(model.state_dict())
    assert torch.equal(again.bit_logits(ids, mask, codes, grid), logits)
    drawn = draw_greedy(model, ids[:, :3], mask[:, :3], 2, 2)
    forced = model.bit_logits(ids[:, :7], mask[:, :7], drawn, grid)
    assert torch.equal(forced > 0, drawn)

def test_heads_against_their_formulas():
    hidden = torch.linspace(-2, 2, 3 * 16).view(3, 16).sin()
    norm = lambda head: hidden * (hidden.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * head[0].weight
    gelu = lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x ** 3)))
    formulas = {'merge 2': lambda head: norm(head) @ head[1].weight.T,
                'mlp head': lambda head: gelu(norm(head) @ head[1].weight.T) @ head[3].weight.T,
                'plain head': lambda head: hidden @ head.weight.T}
    for name, formula in formulas.items():
        model = seeded(UniARForConditionalGeneration, toy_config(**VARIANTS[name]))
        want = formula(model.output_layer_vistok).view(3, model.n_bits, 2)
        within(model.vision_logits(hidden), want[..., 1] - want[..., 0], GOLDEN_TOL)

def test_tied_words_share_one_matrix():
    model = seeded(UniARForConditionalGeneration, toy_config(tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight

def test_without_attention_a_patch_has_the_same_bits_wherever_it_lies():
    model = seeded(UniARForConditionalGeneration, toy_config(vision=dict(use_attention=False)))
    _, _, pixels, _ = toy_inputs(model)
    order = torch.tensor([3, 6, 0, 7, 1, 5, 2, 4])
    bits = model.image_bits(pixels, torch.tensor([[1, 2, 4]]))
    assert torch.equal(model.image_bits(pixels[order], torch.tensor([[1, 4, 2]])), bits[order])

def test_gradient_checkpointing_gives_the_same_gradients():
    grads = []
    for checkpointing in (False, True):
        model = seeded(UniARForConditionalGeneration, toy_config()).train()
        if checkpointing: model.gradient_checkpointing_enable()
        ids, mask, pixels, grid = toy_inputs(model)
        bits = model.image_bits(pixels, grid)
        with torch.enable_grad(): model.bit_logits(ids, mask, bits.view(2, 4, 2, 1, 4), grid).square().sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and len(grads[0]) > 20
    for name in grads[0]: within(grads[1][name], grads[0][name], 1e-4)

def test_adapters_reach_the_visual_head():
    from peft import LoraConfig, get_peft_model
    model = seeded(UniARForConditionalGeneration, toy_config())
    ids, mask, pixels, grid = toy_inputs(model)
    codes = model.image_bits(pixels, grid).view(2, 4, 2, 1, 4)
    before = model.bit_logits(ids, mask, codes, grid)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=['q_proj', 'output_layer_vistok.1']))
    inner = wrapped.base_model.model
    within(inner.bit_logits(ids, mask, codes, grid), before, 1e-6)       # a fresh adapter adds nothing
    inner.output_layer_vistok[1].lora_B['default'].weight[1::2] = 0.5    # the logits of 1, not those of 0
    assert (inner.bit_logits(ids, mask, codes, grid) - before).abs().max() > 1e-3
