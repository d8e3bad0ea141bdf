"""Analyzes the training steps that XLA compiles for H100s without a GPU: `python -m benchmarks.gpu_programs`.

Compiles each model in bfloat16 and fp8, for one GPU and for a node of eight. Reports kernels and their executions per
step, operations of matrix products by library and type, bytes sent by collectives, memory, and the minimum time of each
part of the step. Needs JAX's CUDA plugin but no GPU: pip install 'maxlm[cuda12]'. Products appear as cuBLAS calls; on a
GPU, XLA's autotuner may choose Triton kernels instead. Each program takes about 15 CPU-seconds. The JSON file is
rewritten after each program.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from maxlm.config.schema import Config
from maxlm.errors import EXIT_DONE, ArgumentParser, InputError, exit_code
from maxlm.hardware.chips import Chip
from maxlm.planning.compiled.compile import compile_train_step
from maxlm.planning.compiled.hlo import Instruction, Module, parse_hlo
from maxlm.planning.compiled.matmuls import is_library_product, product_flops
from maxlm.planning.compiled.program import Program, read_program
from maxlm.planning.compiled.trip_counts import Scope, trip_count
from maxlm.planning.estimate.parameters import block_kernels, model_parameters
from maxlm.planning.estimate.roofline import efficiency_of, mfu, step_time, tokens_per_second, transfer_times
from maxlm.planning.estimate.work import MOMENT_BYTES, RECOMPUTED, Work, estimate_work
from maxlm.planning.machine import usable_memory
from maxlm.planning.targets import CompilerMissingError, Target, compiling_for, parse_target, target_layout
from maxlm.training.state import abstract_state

ROOT = Path(__file__).parent.parent
OUTPUT = ROOT / 'benchmarks/results/gpu_programs.json'
# Vocabulary size for configs that take it from the data set.
VOCAB = 50_257
FORWARD, BACKWARD = '__cudnn$fmhaSoftmax', '__cudnn$fmhaSoftmaxBackward'
FP8 = 'model.matmul_precision=fp8'


class Rung(NamedTuple):
    """A step to compile; `overrides` are those of `benchmarks/gpu.sh` on one GPU and empty on a node."""

    name: str
    config: str
    target: str
    overrides: tuple[str, ...] = ()


ONE = ('train.global_batch_size=16',)
# The GPT of `benchmarks.peers_gpu`.
PEER = (
    *('model.dim=2048', 'model.num_heads=16', 'model.vocab_size=50304', 'model.remat_policy=dots'),
    *('data.document_mask=false', 'train.global_batch_size=8', 'train.per_device_batch_size=8'),
)
SHORT_7B = ('model.num_layers=8', 'train.global_batch_size=8', 'train.per_device_batch_size=4')
RUNGS = (
    Rung('1b', 'configs/1b.py', 'h100:1', ONE),
    Rung('1b, fp8', 'configs/1b.py', 'h100:1', (*ONE, FP8)),
    Rung('1.3B beside PyTorch', 'configs/1b.py', 'h100:1', PEER),
    Rung('neox', 'configs/neox.py:production', 'h100:1', ONE),
    Rung('xlarge', 'configs/mix.py:xlarge', 'h100:1', ONE),
    Rung('d24', 'configs/depth.py:24', 'h100:1', ONE),
    Rung('7b, 8 layers', 'configs/code.py:7b', 'h100:1', SHORT_7B),
    Rung('xlarge, fp8', 'configs/mix.py:xlarge', 'h100:1', (*ONE, FP8)),
    Rung('1b', 'configs/1b.py', 'h100:8'),
    Rung('neox', 'configs/neox.py:production_8gpu', 'h100:8'),
    Rung('xlarge', 'configs/mix.py:xlarge', 'h100:8'),
    Rung('d24', 'configs/depth.py:24', 'h100:8'),
    Rung('7b', 'configs/code.py:7b', 'h100:8'),
    Rung('7b, fp8', 'configs/code.py:7b', 'h100:8', (FP8,)),
)


class Part(NamedTuple):
    """Cost of a part of the step on each device.

    Attributes:
        flops: floating-point operations.
        bytes: bytes read and written in device memory, except by matrix products.
        least: seconds at the chip's peak.
        expected: seconds at the efficiency of the roofline model.
    """

    flops: float
    bytes: float
    least: float
    expected: float


def main(argv: list[str]) -> int:
    """Compiles all steps, prints tables and writes JSON."""
    parser = ArgumentParser(prog='benchmarks.gpu_programs', allow_abbrev=False, description=__doc__)
    parser.add_argument('--only', default='', help='names of models, with ; between')
    parser.add_argument('--output', type=Path, default=OUTPUT, help='JSON file to write')
    options = parser.parse_args(argv)
    # Otherwise JAX would initialize devices of other platforms.
    jax.config.update('jax_platforms', 'cpu')
    rungs = [rung for rung in RUNGS if not options.only or rung.name in options.only.split(';')]
    if not rungs:
        raise InputError(f'--only={options.only}: there are {"; ".join(sorted({rung.name for rung in RUNGS}))}')
    machine = {'jax': jax.__version__, 'date': datetime.date.today().isoformat()}
    results: list[dict[str, Any]] = []
    for rung in rungs:
        try:
            results.append(describe(rung))
        except CompilerMissingError as error:
            raise InputError(str(error)) from error
        print(f'{rung.name} on {rung.target}: compiled in {results[-1]["compile_seconds"]:.0f} s', flush=True)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({'machine': machine, 'programs': results}, indent=1) + '\n')
    _print(results)
    return EXIT_DONE


def describe(rung: Rung) -> dict[str, Any]:
    """Compiles a step and analyzes the program.

    Raises:
        CompilerMissingError: no compiler for GPUs is installed.
    """
    target = parse_target(rung.target)
    config = load(str(ROOT / rung.config), rung.overrides)
    config = resolve(
        config,
        platform='gpu',
        num_devices=target.num_devices,
        vocab_size=config.model.vocab_size or VOCAB,
        windows=10**6,
        capability=target.chip.capability,
    )
    layout = target_layout(target, config.mesh)
    with compiling_for(target):
        # Without a GPU there is no autotuning, and XLA would use Triton for all products.
        compiled = compile_train_step(
            config, layout, abstract_state(config, layout), options={'xla_gpu_enable_triton_gemm': False}
        )
    text = compiled.step.as_text() or ''
    program = read_program(text, config.mesh.sizes)
    work = estimate_work(config, target.chip.capability)._replace(transfers=program.transfers)
    sizes = config.mesh.sizes
    time = step_time(
        work, target.chip, num_devices=target.num_devices, num_islands=target.num_islands, mesh_sizes=sizes
    )
    speed = tokens_per_second(time.total, global_batch=config.train.global_batch_size, window=config.data.seq_len)
    share = mfu(
        config,
        config.data.seq_len,
        tokens_per_second=speed,
        num_devices=target.num_devices,
        tflops=target.chip.tflops,
    )
    return {
        'name': rung.name,
        'config': rung.config,
        'target': rung.target,
        'overrides': rung.overrides,
        'micro_batches': config.accumulation,
        'layers': config.model.num_layers,
        'kernels': program.kernels,
        'products': {name: tuple(counted) for name, counted in library_products(parse_hlo(text)).items()},
        'flops': program.flops,
        'attention_flops': work.attention_flops,
        'sent_bytes': sent_bytes(program),
        'memory_bytes': compiled.memory_bytes(),
        'total_bytes': compiled.total_bytes(),
        'available_bytes': usable_memory(target.chip),
        'parts': {name: part._asdict() for name, part in parts_of(config, work, target).items()},
        'expected_seconds': time.total,
        'expected_tokens_per_second': speed,
        'expected_mfu_causal': share.causal,
        'compile_seconds': compiled.seconds,
    }


class Counted(NamedTuple):
    """Executions per step and operations of one kind of matrix product."""

    runs: float
    flops: float


def library_products(module: Module) -> dict[str, Counted]:
    """Counts matrix products by cuBLAS call target; `dot` stands for XLA's own kernels."""
    counted: dict[str, Counted] = {}

    def visit(scope: Scope, times: float) -> None:
        for instruction in scope.computation.values():
            if instruction.opcode == 'while':
                rounds = trip_count(module, instruction, scope)
                body = module.computations[instruction.called['body']]
                visit(Scope(body, instruction, scope), times * (1 if rounds is None else rounds))
            elif instruction.called and instruction.opcode in ('fusion', 'call', 'async-start'):
                name = instruction.called.get('calls') or instruction.called['to_apply']
                visit(Scope(module.computations[name], instruction, scope), times)
            elif instruction.opcode == 'dot' or is_library_product(instruction):
                operands = [array for name in instruction.operands for array in scope.computation[name].arrays]
                runs, flops = counted.get(_kind(instruction), Counted(0, 0))
                more = times * product_flops(instruction, operands)
                counted[_kind(instruction)] = Counted(runs + times, flops + more)

    visit(Scope(module.entry), 1)
    return counted


def _kind(instruction: Instruction) -> str:
    return instruction.attribute(r'custom_call_target="([^"]*)"') or instruction.opcode


def sent_bytes(program: Program) -> dict[str, float]:
    """Returns the bytes that a device sends in a step, by kind of collective."""
    sent: dict[str, float] = {}
    for transfer in program.transfers:
        sent[transfer.kind] = sent.get(transfer.kind, 0.0) + transfer.sent
    return sent


def parts_of(config: Config, work: Work, target: Target) -> dict[str, Part]:
    """Splits the step into parts, which sum to `work`."""
    model, mesh, chip = config.model, config.mesh, target.chip
    tokens = config.train.global_batch_size * config.data.seq_len / (config.batch_shards * mesh.context)
    split = mesh.stage * mesh.tensor
    kernels = block_kernels(model)
    # Recomputation covers a block except the products that are only added to the residual stream.
    last = ('down', 'out') if model.parallel_residual else ('down',)
    passes = {name: 4 if model.remat_policy in RECOMPUTED and name not in last else 3 for name in kernels}
    per_kernel = {
        name: 2 * tokens * passes[name] * kernel.size * model.num_layers / split for name, kernel in kernels.items()
    }
    feed_forward = sum(per_kernel[name] for name in ('gate', 'up', 'down') if name in per_kernel)
    projections = sum(per_kernel.values()) - feed_forward
    head = 6 * tokens * model.dim * model.vocab_size / split
    update = _update_bytes(config, work, chip)
    fp8 = model.matmul_precision == 'fp8'
    return {
        'attention': _part(chip, work.attention_flops, 0, share=efficiency_of(chip).attention),
        'projections': _part(chip, projections, 0, fp8=fp8),
        'feed_forward': _part(chip, feed_forward, 0, fp8=fp8),
        'head_and_loss': _part(chip, head, 0),
        'elementwise': _part(chip, 0, work.memory_bytes - update),
        'optimizer': _part(chip, work.flops - feed_forward - projections - head, update),
        'collectives': _collectives(work, target, mesh.sizes),
    }


def _update_bytes(config: Config, work: Work, chip: Chip) -> float:
    """Returns the bytes that the optimizer reads and writes.

    AdamW accesses the gradient twice (norm and update), the parameter, its norm, and both moments.
    """
    mesh = config.mesh
    parts = mesh.stage * mesh.tensor * mesh.fsdp * mesh.context
    per_parameter = 8 + 12 + 4 * MOMENT_BYTES[config.optimizer.moment_dtype] + (8 if config.optimizer.ema_decay else 0)
    adamw = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, name='adamw'))
    more = work.memory_bytes - estimate_work(adamw, chip.capability).memory_bytes
    return model_parameters(config.model) * per_parameter / parts + more


def _part(chip: Chip, flops: float, size: float, *, fp8: bool = False, share: float | None = None) -> Part:
    efficiency = efficiency_of(chip)
    peak = (chip.fp8_tflops if fp8 else chip.tflops) * 1e12
    expected = flops / (peak * (share or efficiency.products)) + size / (chip.memory_bandwidth * efficiency.memory)
    return Part(flops, size, flops / peak + size / chip.memory_bandwidth, expected)


def _collectives(work: Work, target: Target, mesh_sizes: Mapping[str, int]) -> Part:
    chip = target.chip
    efficiency = efficiency_of(chip)
    times = transfer_times(work, chip, efficiency, target.num_devices, target.num_islands, mesh_sizes)
    sent = sum(transfer.sent for transfer in work.transfers)
    return Part(0, sent, sent / chip.link_bandwidth, sum(time.seconds for time in times))


def _print(results: list[dict[str, Any]]) -> None:
    print(
        '| model | on | cuDNN forward, backward | products in 8 bits, others | sent, GB | memory, GiB | expected MFU |'
    )
    print('|---|---|---:|---:|---:|---:|---:|')
    for result in results:
        kernels, products = result['kernels'], result['products']
        narrow = sum(runs for name, (runs, _) in products.items() if name.endswith('$f8'))
        rest = sum(runs for runs, _ in products.values()) - narrow
        print(
            f'| {result["name"]} | {result["target"]} | {kernels.get(FORWARD, 0):.0f}, {kernels.get(BACKWARD, 0):.0f} '
            f'| {narrow:.0f}, {rest:.0f} | {sum(result["sent_bytes"].values()) / 1e9:.2f} '
            f'| {result["total_bytes"] / 2**30:.1f} of {result["available_bytes"] / 2**30:.0f} '
            f'| {result["expected_mfu_causal"]:.1%} |'
        )
    names = list(results[0]['parts'])
    print('\nLeast and expected milliseconds of each part:')
    print(f'| model | on | {" | ".join(names)} | step expected |')
    print(f'|---|---|{"---:|" * (len(names) + 1)}')
    for result in results:
        parts = [f'{part["least"] * 1e3:.1f}, {part["expected"] * 1e3:.1f}' for part in result['parts'].values()]
        total = f'{result["expected_seconds"] * 1e3:.1f}'
        print(f'| {result["name"]} | {result["target"]} | {" | ".join(parts)} | {total} |')


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
