"""The page of results, `docs/results.md`, from the summaries of finished runs: no figure in it is typed by hand.

  python tools/results.py --collect RUN...   copy the summaries of finished runs to docs/results/, then write the page
  python tools/results.py                    write the page from docs/results/
  python tools/results.py --check            fail if the page is not what the summaries say"""
import argparse, json, sys
from pathlib import Path
from statistics import fmean

from mmgrpo.config import load_config

ROOT = Path(__file__).parents[1]
SUMMARIES, PAGE = ROOT / 'docs' / 'results', ROOT / 'docs' / 'results.md'

def collect(run:Path) -> None:
    "Keep what a run reports of itself, under what it was and its seed."
    summary, config = (json.loads((run / name).read_text()) for name in ('summary.json', 'config.json'))
    config = config.get('config', config)
    seed, config = config['run']['seed'], {k: v for k, v in config.items() if k != 'run'}     # not where it lay
    routes = {part['on'] for part in config['reward']['parts']}
    kind = 'seed' if not routes else 'joint' if routes == {'joint'} else 'factorised'
    kept = dict(seed=seed, config=config, summary={k: v for k, v in summary.items() if k != 'timing'})
    SUMMARIES.mkdir(exist_ok=True)
    (SUMMARIES / f'{kind}-{seed}.json').write_text(json.dumps(kept, indent=1, sort_keys=True) + '\n')

def trained(section:dict) -> dict:
    "A section but for what changes no figure on the page: whether a drawing was also swapped and blanked."
    return {key: value for key, value in section.items() if key != 'ablations'}

def percent(found:dict) -> str:
    "An accuracy with its 95 % interval."
    return f"{found['accuracy']:.1%} [{found['low']:.1%}, {found['high']:.1%}]"

def table(head:list[str], rows:list[list[str]]) -> str:
    "A Markdown table."
    return '\n'.join('| ' + ' | '.join(row) + ' |' for row in [head, ['---'] * len(head), *rows])

def learning(runs:list[dict]) -> str:
    "What reinforcement learning changed."
    rows = []
    for run in runs:
        s = run['summary']
        [split] = s['validation_final']
        before, after, change = s['validation_start'][split], s['validation_final'][split], s['validation_change'][split]
        gain = '{:+.1f} [{:.1f}, {:.1f}]'.format(*(100 * change[f'sampled/gain{end}'] for end in ('', '_low', '_high')))
        greedy = f"{before['greedy']['accuracy']:.1%} → {after['greedy']['accuracy']:.1%} (p = {change['greedy/p']:.2g})"
        rows.append([str(run['seed']), percent(before['sampled']), percent(after['sampled']), gain, greedy,
                     f"{s['reward_first10']:.3f} → {s['reward_last10']:.3f}", f"{after['sampled']['valid_frac']:.1%}"])
    return table(['seed', 'sampled, before', 'sampled, after', 'gain, points', 'greedy (exact McNemar)', 'mean reward, first → last ten updates',
                  'valid'], rows)

def looking(runs:list[dict]) -> str:
    "Greedy accuracy when another picture is put in place of the drawing."
    rows = []
    for run in runs:
        [after] = run['summary']['validation_final'].values()
        rows.append([str(run['seed'])] + [percent(after[name]) for name in ('greedy', 'blanked', 'swapped', 'solved')] +
                    [f"{after['greedy']['right_bits']:.1%}"])
    return table(['seed', 'its own drawing', 'blank', "another puzzle's", 'the right picture', 'right bits of its own'], rows)

def figures(run:dict) -> dict:
    "What is compared between two ways to reward."
    [split] = run['summary']['validation_final']
    after, change = run['summary']['validation_final'][split], run['summary']['validation_change'][split]
    return dict(sampled=after['sampled']['accuracy'], gain=change['sampled/gain'], greedy=after['greedy']['accuracy'], bits=after['sampled']['right_bits'])

def routing(joint:list[dict], factorised:list[dict]) -> str:
    "Two rewards for all tokens, or each for the tokens that it is about."
    both = [(run['seed'], kind, run) for pair in zip(joint, factorised) for kind, run in zip(('joint', 'factorised'), pair)]
    rows = []
    for seed, kind, run in both:
        [after], found = run['summary']['validation_final'].values(), figures(run)
        rows.append([str(seed), kind, percent(after['sampled']), f"{100 * found['gain']:+.1f}", percent(after['greedy']), f"{found['bits']:.1%}"])
    apart = {key: [figures(f)[key] - figures(j)[key] for j, f in zip(joint, factorised)] for key in ('sampled', 'greedy', 'bits')}
    said = ', '.join(f"{100 * fmean(apart[key]):+.1f} ({' '.join(f'{100 * x:+.1f}' for x in apart[key])}) points of {name}" for key, name in
                     dict(sampled='sampled accuracy', greedy='greedy accuracy', bits='right bits in sampled drawings').items())
    return table(['seed', 'rewards', 'sampled, after', 'gain, points', 'greedy, after', 'right bits, sampled'], rows) + f'''

Factorised less joint, mean of {len(joint)} seeds (each seed): {said}.'''

def page(runs:list[dict], joint:list[dict], factorised:list[dict]) -> str:
    "The whole page."
    [after] = runs[0]['summary']['validation_final'].values()
    n, k = after['sampled']['n_puzzles'], runs[0]['config']['evaluation']['rollouts_per_prompt']
    gains = [list(run['summary']['validation_change'].values())[0]['sampled/gain'] for run in runs]
    recipe = json.loads((ROOT / 'mmgrpo' / 'assets' / 'tiny' / 'recipe.json').read_text())
    held, misread, updates = recipe['held_out'], recipe['config']['data']['misread_frac'], runs[0]['config']['trainer']['max_updates']
    return f'''# Results

What `configs/quickstart.yaml` does to the shipped model. This page is written by `tools/results.py` from the summaries that the
runs left in `docs/results`; `make test` fails if it says anything else.

## Reinforcement learning

{updates} updates, {len(runs)} seeds. Measured on {n} puzzles cut from photographs that neither the warm start nor the training has seen,
{k} samples a puzzle at the training temperature, 95 % intervals over puzzles; chance is 25 %. Mean gain: {100 * fmean(gains):.1f} points.

{learning(runs)}

What is learnt: in {misread:.0%} of the cases the references of the warm start read a random letter instead of the drawn one ({.75 * misread:.0%} read a wrong
one), and so taught the policy to doubt what it sees. Rewards take that doubt away; what it draws, and so its greedy answers, stay as good as they were.

Run it yourself: `make train` is seed 0; another seed is `mmgrpo_train --config configs/quickstart.yaml --set run.seed=1 --set run.name=seed-1`.

## Does the policy look at what it draws?

The same puzzles, answered greedily after training, with the drawn picture left as it is, replaced by a blank one, by that of a puzzle with
another answer, or by the right one.

{looking(runs)}

## Factorised or joint rewards?

`configs/recipes/joint.yaml` and `factorised.yaml` reward the letter and the likeness of the drawing to the right picture; in the first both move all tokens, in the
second the letter moves the words and the likeness the drawing (arXiv 2606.14792 reports +11 % for that, on another model and task). Otherwise they are the quickstart.

{routing(joint, factorised)}

## The warm start

`configs/quickstart_sft.yaml`, seed {recipe['config']['run']['seed']}, made the shipped model of {recipe['parameters']:,} weights. On
{recipe['config']['data']['n_valid']} puzzles of unseen photographs: pictures survive tokenising and drawing with {held['psnr_db']:.1f} dB, greedy answers are right
in {held['greedy_accuracy']:.1%}, sampled ones (temperature 1) in {held['sampled_accuracy']:.1%} of the cases, and {held['sampled_valid']:.1%} keep the protocol.
SHA-256 of its weights: `{recipe['weights_sha256']}`.
'''

if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--collect', nargs='+', type=Path, default=[], metavar='RUN')
    parser.add_argument('--check', action='store_true')
    args = parser.parse_args()
    for run in args.collect: collect(run)
    kinds = dict(seed='quickstart.yaml', joint='recipes/joint.yaml', factorised='recipes/factorised.yaml')
    runs = {kind: [json.loads(p.read_text()) for p in sorted(SUMMARIES.glob(f'{kind}-*.json'))] for kind in kinds}
    for kind, file in kinds.items():
        wanted = load_config(ROOT / 'configs' / file).as_dict()
        for run in runs[kind]:
            unlike = {key for key in wanted if key != 'run' and trained(run['config'][key]) != trained(wanted[key])}
            if unlike: sys.exit(f"docs/results: {kind} {run['seed']} is a run of another config than configs/{file}: {', '.join(sorted(unlike))}")
    text = page(runs['seed'], runs['joint'], runs['factorised'])
    if args.check: sys.exit(0 if text == PAGE.read_text() else f'{PAGE.name} is not what the summaries say; run tools/results.py')
    PAGE.write_text(text)
