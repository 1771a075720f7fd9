"""What is refused, and what holds, where a run could go wrong without a word: adapters, formats, damaged weights."""
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmgrpo.config import make_config
from mmgrpo.policy import AdapterSettings, RolloutLimits, UniARPolicy, example_policy, example_prompt
from mmgrpo.rollout import GRPORolloutController
from mmgrpo.settings import ConfigError

TINY = SimpleNamespace(path='builtin:tiny', **vars(AdapterSettings()))
LIMITS = RolloutLimits(image_grid=(4, 4))


@pytest.fixture
def adapter(tmp_path):
    "The folder of an adapter that fits `example_policy`."
    for name, content in example_policy().adapter_files().items(): (tmp_path / name).write_bytes(content)
    return tmp_path


def test_what_is_trained_is_float32_under_bf16():
    policy = UniARPolicy.load(TINY, LIMITS, dtype=torch.bfloat16)
    assert {p.dtype for p in policy.trainable().values()} == {torch.float32}
    assert policy.model.model.language_model.layers[0].mlp.up_proj.base_layer.weight.dtype == torch.bfloat16
    assert policy.model.vision_logits(torch.zeros(1, 128, dtype=torch.bfloat16)).isfinite().all()


@pytest.mark.parametrize('change, word', [(dict(lora_rank=4), 'r 2'), (dict(lora_alpha=8.), 'lora_alpha 4'),
                                          (dict(train_visual_head=False), 'modules_to_save')])
def test_an_adapter_that_the_config_does_not_describe_is_refused(adapter, change, word):
    with pytest.raises(ValueError, match='model.initial_adapter') as error:
        example_policy(settings=replace(AdapterSettings(), initial_adapter=str(adapter), **change))
    assert word in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize('field, value', [('lora_dropout', .1), ('use_dora', True)])
def test_an_adapter_of_another_kind_is_refused(adapter, field, value):
    config = json.loads((adapter / 'adapter_config.json').read_text())
    (adapter / 'adapter_config.json').write_text(json.dumps(config | {field: value}))
    with pytest.raises(ValueError, match=field):
        example_policy(settings=replace(AdapterSettings(), initial_adapter=str(adapter)))


def test_an_adapter_of_another_model_is_refused(adapter):
    file = adapter / 'adapter_model.safetensors'
    save_file({name.replace('layers.0', 'layers.7'): t for name, t in load_file(file).items()}, file)
    with pytest.raises(ValueError, match='is not for this model'):
        example_policy(settings=replace(AdapterSettings(), initial_adapter=str(adapter)))


def test_targets_that_match_nothing_are_named():
    with pytest.raises(ValueError, match='model.lora_targets'): example_policy(settings=replace(AdapterSettings(), lora_targets=('nope',)))


def test_a_model_of_another_type_is_named(tmp_path):
    (tmp_path / 'config.json').write_text('{"model_type": "qwen3_vl"}')
    with pytest.raises(FileNotFoundError, match='holds no model.safetensors'): UniARPolicy.load(SimpleNamespace(path=str(tmp_path)), LIMITS)
    (tmp_path / 'model.safetensors').touch()
    with pytest.raises(ValueError, match="type 'qwen3_vl'"): UniARPolicy.load(SimpleNamespace(path=str(tmp_path)), LIMITS)


@pytest.mark.parametrize('head, name, greedy', [('lm_head', 'text', True), ('lm_head', 'text', False),
                                                ('output_layer_vistok', 'visual', False)])
def test_damaged_weights_stop_the_sampler(head, name, greedy):
    policy = example_policy()
    for p in policy.model.get_submodule(head).parameters(): p.data.fill_(float('nan'))
    with pytest.raises(RuntimeError, match=f'{name} logits are not finite'):
        GRPORolloutController(policy).rollouts([example_prompt(policy)], 2, (0, 0), greedy=greedy)


@pytest.mark.parametrize('kind', ['text', 'visual'])
def test_a_kl_that_nothing_weighs_is_refused(kind):
    raw = dict(run=dict(name='x'), trainer=dict(max_updates=1, prompts_per_update=1), optimizer=dict(lr=.1),
               **{kind: dict(weight=0., kl_coef=.1)})
    with pytest.raises(ConfigError, match=f'{kind}.kl_coef'): make_config(raw)
