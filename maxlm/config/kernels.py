"""Resolves and checks the kernels of a run: attention, norms, and the products of projections and of experts."""

from __future__ import annotations

from maxlm.config.mesh import padded_vocabulary
from maxlm.config.schema import Config, MeshConfig
from maxlm.config.sections.model import AttentionKernel, ExpertMatmul
from maxlm.errors import InputError

# Minimum compute capability of GPUs with 8-bit matrix products, by `model.matmul_precision`, and the names of the first
# ones. The dimensions of the products must be multiples of MATMUL_MULTIPLES.
MATMUL_CAPABILITIES = {'fp8': (8, 9), 'mxfp8': (10, 0)}
MATMUL_GPUS = {'fp8': 'Ada, Hopper', 'mxfp8': 'Blackwell'}
MATMUL_MULTIPLES = {'fp8': 16, 'mxfp8': 32}
# Splash attention needs sequence lengths that are multiples of the width of a TPU's vector unit.
SPLASH_MULTIPLE = 128
# Major compute capabilities of GPUs with a deterministic backward pass of cuDNN's attention: Hopper and Blackwell.
# TransformerEngine uses it on these too.
DETERMINISTIC_CUDNN = (9, 10)
# Major compute capabilities of GPUs for which Tokamax has an attention kernel with gradients, and widths of heads for
# which it was compiled.
TOKAMAX_ATTENTION, TOKAMAX_HEADS = (9, 10), (64, 128)
# Width of the residual stream above which a thread of the norm kernels needs more registers than it has.
NORM_KERNEL_MAX_DIM = 8192
# Platform of each kernel for the products of experts.
_KERNELS = {'tokamax': 'gpu', 'megablox': 'tpu'}
# Requirement of the fused attention kernels.
_NO_SINKS = 'model.attention_sinks=False; found True'


def multiplies(precision: str, platform: str, capability: tuple[int, int] | None) -> bool:
    """Returns True for GPUs with these products or unknown capability, and for CPUs, which emulate 8 bits slowly."""
    needed = MATMUL_CAPABILITIES.get(precision, (0, 0))
    is_default = precision == 'default'
    return is_default or platform == 'cpu' or (platform == 'gpu' and (capability is None or capability >= needed))


def check_matmul(config: Config, platform: str, capability: tuple[int, int] | None) -> None:
    """Checks that devices and sizes support the 8-bit products of `model.matmul_precision`, if a config sets them."""
    model, parts = config.model, config.mesh.tensor
    precision = model.matmul_precision
    if precision == 'default':
        return
    key, multiple = f'model.matmul_precision={precision}', MATMUL_MULTIPLES[precision]
    if not multiplies(precision, platform, capability):
        here = f'of kind {platform}' if capability is None else 'of compute capability {}.{}'.format(*capability)
        major, minor = MATMUL_CAPABILITIES[precision]
        raise InputError(
            f'{key}: the devices are {here}; {precision.upper()} requires GPUs with compute capability {major}.{minor} '
            f'or higher ({MATMUL_GPUS[precision]}); set model.matmul_precision=default'
        )
    if precision == 'mxfp8':
        _check_mxfp8_mesh(config)
    sizes = {
        'model.dim': model.dim,
        'model.num_heads · model.head_dim': model.num_heads * model.head_dim // parts,
        'model.num_kv_heads · model.head_dim': model.num_kv_heads * model.head_dim // parts,
        'model.ffn_dim': model.ffn_dim // parts,
    }
    if model.fp8_head:
        sizes['model.vocab_size'] = padded_vocabulary(model.vocab_size, parts) // parts
    if model.kv_lora_rank:
        sizes['model.q_lora_rank'] = model.q_lora_rank
        sizes['model.kv_lora_rank'] = model.kv_lora_rank
        sizes['model.qk_rope_head_dim'] = model.qk_rope_head_dim
        sizes['model.num_heads · model.qk_nope_head_dim'] = model.num_heads * model.qk_nope_head_dim // parts
        sizes['model.num_heads · model.v_head_dim'] = model.num_heads * model.v_head_dim // parts
    for name, size in sizes.items():
        if size % multiple:
            below = size // multiple * multiple
            closest = f'{below} or {below + multiple}' if below else str(multiple)
            each = f' on each of mesh.tensor={parts} devices' if parts > 1 and name != 'model.dim' else ''
            raise InputError(f'{key}: {name} is {size}{each} but must be a multiple of {multiple}; nearest: {closest}')


def _check_mxfp8_mesh(config: Config) -> None:
    """Checks that each device multiplies complete matrices, whose rows fill the blocks that share a scale."""
    mesh, key = config.mesh, 'model.matmul_precision=mxfp8'
    for name in ('tensor', 'context', 'stage'):
        if (found := getattr(mesh, name)) > 1:
            raise InputError(f'{key} requires mesh.{name}=1; found {found}; set model.matmul_precision=fp8')
    if config.train.per_device_batch_size * config.data.seq_len % MATMUL_MULTIPLES['mxfp8']:
        raise InputError(
            f'{key}: a micro-batch has train.per_device_batch_size · data.seq_len = '
            f'{config.train.per_device_batch_size} · {config.data.seq_len} rows but needs a multiple of '
            f'{MATMUL_MULTIPLES["mxfp8"]}; set data.seq_len to such a multiple'
        )


def check_norm_kernel(config: Config, platform: str) -> None:
    """Checks that devices, mesh and width support `model.norm_kernel=pallas` if a resolved config sets it."""
    if config.model.norm_kernel == 'xla':
        return
    if platform != 'gpu':
        raise InputError(f'model.norm_kernel=pallas: not available on {platform} devices; set it to xla')
    for key, found, most in (
        # JAX has no batching rule for the sharded kernels.
        ('mesh.stage', config.mesh.stage, 1),
        ('model.dim', config.model.dim, NORM_KERNEL_MAX_DIM),
    ):
        if found > most:
            raise InputError(
                f'model.norm_kernel=pallas requires a {key} of at most {most}; found {found}; set it to xla'
            )


def check_fp8_kernel(config: Config, platform: str) -> None:
    """Checks that devices, mesh and model support `model.fp8_kernel=pallas` if a resolved config sets it."""
    model, mesh, key = config.model, config.mesh, 'model.fp8_kernel=pallas'
    if model.fp8_kernel == 'xla':
        return
    if model.fp8_scaling != 'delayed':
        raise InputError(f'{key} requires model.fp8_scaling=delayed; found {model.fp8_scaling}; set it to xla')
    if platform != 'gpu':
        raise InputError(f'{key}: not available on {platform} devices; set it to xla')
    if model.dtype != 'bfloat16':
        raise InputError(f'{key} requires model.dtype=bfloat16; found {model.dtype}; set it to xla')
    for name, found, most in (
        # The kernel reads complete rows, and their transposed copy has one axis of rows.
        ('mesh.tensor', mesh.tensor, 1),
        ('mesh.context', mesh.context, 1),
        ('model.lora_rank', model.lora_rank, 0),
    ):
        if found > most:
            raise InputError(f'{key} requires a {name} of at most {most}; found {found}; set it to xla')


def expert_matmul(requested: ExpertMatmul, platform: str, mesh: MeshConfig) -> ExpertMatmul:
    """Returns `model.expert_matmul` with auto resolved."""
    if requested == 'auto':
        # JAX's batching rule of kernels does not support the stages of a pipeline.
        of_platform: dict[str, ExpertMatmul] = {
            'gpu': 'tokamax',
            'tpu': 'ragged_dot' if mesh.stage > 1 else 'megablox',
        }
        return of_platform.get(platform, 'loop')
    if requested in _KERNELS and platform != _KERNELS[requested]:
        raise InputError(f'model.expert_matmul={requested}: not available on {platform} devices; set it to auto')
    if requested == 'megablox' and mesh.stage > 1:
        raise InputError(
            f'model.expert_matmul=megablox does not support mesh.stage={mesh.stage}; set it to auto, or mesh.stage=1'
        )
    return requested


def attention_kernel(config: Config, platform: str, capability: tuple[int, int] | None) -> AttentionKernel:
    """Returns `model.attention` with auto and fastest resolved; fastest is auto until `attention_kernels` are timed.

    The config must have a resolved mesh and head_dim.
    """
    requested, needs = config.model.attention, _attention_needs(config, platform, capability)
    if requested in ('auto', 'fastest'):
        # With a list of documents, the deterministic backward pass needs a multiple of the memory on Hopper
        # (NVIDIA/cudnn-frontend #398).
        usual: dict[str, AttentionKernel] = {
            'gpu': 'cudnn_mask' if config.train.deterministic else 'cudnn',
            'tpu': 'splash',
        }
        kernel = usual.get(platform, 'xla')
        return 'xla' if needs[kernel] else kernel
    if requested not in needs:
        raise InputError(f'model.attention={requested}: not available on {platform} devices; set it to auto')
    if needs[requested]:
        raise InputError(f'model.attention={requested} requires {needs[requested]}; set it to auto')
    return requested


def attention_kernels(config: Config, platform: str, capability: tuple[int, int] | None) -> list[AttentionKernel]:
    """Returns the attention kernels that support a resolved config on these devices, the one of auto first."""
    needs = _attention_needs(config, platform, capability)
    usual = config.model.attention
    return [usual, *(kernel for kernel, unmet in needs.items() if not unmet and kernel != usual)]


def _attention_needs(config: Config, platform: str, capability: tuple[int, int] | None) -> dict[AttentionKernel, str]:
    """Returns the attention kernels of a platform with their unmet requirements for an error message, or ''."""
    if platform == 'gpu':
        cudnn = _cudnn_needs(config, capability)
        return {'cudnn': cudnn, 'cudnn_mask': cudnn, 'tokamax': _tokamax_needs(config, capability), 'xla': ''}
    return {'splash': _splash_needs(config), 'xla': ''} if platform == 'tpu' else {'xla': ''}


def _cudnn_needs(config: Config, capability: tuple[int, int] | None) -> str:
    """Returns the unmet requirements of cuDNN attention for an error message, or '' if all are met."""
    model = config.model
    if config.train.deterministic and (capability is None or capability[0] not in DETERMINISTIC_CUDNN):
        found = 'an unknown one' if capability is None else '{}.{}'.format(*capability)
        return f'compute capability 9.x or 10.x with train.deterministic=true; found {found}'
    if model.attention_sinks:
        return _NO_SINKS
    # Limits of cuDNN on all supported GPUs.
    if model.attention_softcap:
        return f'model.attention_softcap=0; found {model.attention_softcap}'
    if model.dtype in ('bfloat16', 'float16') and model.head_dim % 8 == 0 and model.head_dim <= 128:
        return ''
    return (
        f'model.dtype=bfloat16 or float16, and a head_dim that is a multiple of 8, at most 128; found {model.dtype} '
        f'and {model.head_dim}'
    )


def _tokamax_needs(config: Config, capability: tuple[int, int] | None) -> str:
    """Returns the unmet requirements of Tokamax's attention for an error message, or '' if all are met."""
    model, mesh = config.model, config.mesh
    if capability is not None and capability[0] not in TOKAMAX_ATTENTION:
        return 'compute capability 9.x or 10.x (Hopper, Blackwell); found {}.{}'.format(*capability)
    if model.attention_sinks:
        return _NO_SINKS
    if config.train.deterministic:
        return 'train.deterministic=false, since the order of its sums is not documented; found true'
    if mesh.context > 1 or mesh.stage > 1:
        return f'mesh.context=1 and mesh.stage=1; found {mesh.context} and {mesh.stage}'
    if model.kv_lora_rank:
        return f'model.kv_lora_rank=0; found {model.kv_lora_rank}'
    if model.dtype in ('bfloat16', 'float16') and model.head_dim in TOKAMAX_HEADS:
        return ''
    heads = ' or '.join(map(str, TOKAMAX_HEADS))
    return f'model.dtype=bfloat16 or float16, and a head_dim of {heads}; found {model.dtype} and {model.head_dim}'


def _splash_needs(config: Config) -> str:
    """Returns the unmet requirements of splash attention for an error message, or '' if all are met."""
    mesh, seq_len = config.mesh, config.data.seq_len
    if config.model.attention_sinks:
        return _NO_SINKS
    if config.model.dtype == 'float16':
        return 'model.dtype=bfloat16 or float32; found float16'
    if mesh.context > 1 or mesh.stage > 1:
        return f'mesh.context=1 and mesh.stage=1; found {mesh.context} and {mesh.stage}'
    if seq_len % SPLASH_MULTIPLE:
        below = seq_len // SPLASH_MULTIPLE * SPLASH_MULTIPLE
        closest = f'{below} or {below + SPLASH_MULTIPLE}' if below else str(SPLASH_MULTIPLE)
        return f'a data.seq_len that is a multiple of {SPLASH_MULTIPLE}; found {seq_len}; nearest: {closest}'
    return ''
