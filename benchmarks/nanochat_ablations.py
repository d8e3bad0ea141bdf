"""Ablations of the present recipe of `configs/depth.py`: sides of `benchmarks.nanochat_peer` without one feature."""

from __future__ import annotations

from benchmarks.nanochat_sides import Size, present_recipe
from maxlm.config.loading import load

# Keys that turn a feature off, by name. A group of the optimizer without parameters is an error, so a feature with
# parameters of its own also names its group.
ABLATIONS: dict[str, tuple[str, ...]] = {
    'value embeddings': ('model.value_embedding_pattern=', 'model.value_gate_channels=0', 'value_embeddings'),
    'residual scale': ('model.residual_scale=False', 'residual_scales'),
    'embedding residual': ('model.embedding_residual=False', 'embedding_scales'),
    'smear': ('model.smear_channels=0', 'smear_*'),
    'backout': ('model.backout_layer=-1', 'backout_scale'),
    'attention multiplier': ('model.relative_attention_multiplier=1',),
    'initial values': ('model.init=uniform',),
    'Polar Express': ('optimizer.muon_coefficients=newton_schulz',),
    'row equilibration': ('optimizer.muon_row_equilibration=False',),
    'renormalization': ('optimizer.muon_renormalize=False',),
    'NorMuon': ('optimizer.muon_beta2=0',),
    'cautious decay': ('optimizer.cautious_decay=False',),
    'decay schedule': ('optimizer.weight_decay_schedule=constant',),
    'final momentum': ('optimizer.muon_final_momentum=0',),
    # The schedule of 2025.
    'schedule': ('optimizer.warmup_steps=0', 'optimizer.wsd_decay_fraction=0.2', 'optimizer.min_learning_rate=0'),
    # Rows that begin at documents.
    'rows, stream': ('data.rows=stream',),
    'rows, best_fit': ('data.rows=best_fit',),
    # Attention across documents.
    'crossing documents': ('data.document_mask=True',),
}


def ablation(size: Size, name: str) -> tuple[str, ...]:
    """Returns the changes of `maxlm` that give the present recipe without a feature of `ABLATIONS`."""
    recipe = present_recipe(size)
    keys = [each for each in ABLATIONS[name] if '=' in each]
    (groups,) = (each for each in recipe if each.startswith('optimizer.groups='))
    kept = tuple(
        group for group in load('configs/depth.py', [groups]).optimizer.groups if group[0] not in ABLATIONS[name]
    )
    return (*(each for each in recipe if each != groups), f'optimizer.groups={kept}', *keys)
