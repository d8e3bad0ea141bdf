"""Config keys of the model: its architecture, precision, and memory."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, Literal

from maxlm.config.sections.declaration import Choices, FunctionName, Renamed
from maxlm.config.sections.families import FAMILIES, GATED_ACTIVATIONS, PLAIN_ACTIVATIONS
from maxlm.config.sections.quantization import QUANTIZATION_GROUPS
from maxlm.config.sections.ranges import INT32, Epsilon, FractionAbove0, FractionBelow1, Range

# Default of an architecture key: the model family sets it unless the config does.
FAMILY: Any = None
Dtype = Literal['bfloat16', 'float16', 'float32']
RematPolicy = Literal['none', 'dots', 'dots_no_batch', 'full', 'offload']
# Dimensions of a head or of a latent of attention.
Width = Annotated[int, Range(0, 2**16)]
ExpertMatmul = Literal['auto', 'ragged_dot', 'tokamax', 'megablox', 'loop']
PallasKernel = Literal['xla', 'pallas']
MatmulPrecision = Literal['default', 'fp8', 'mxfp8']
AttentionKernel = Literal['auto', 'fastest', 'xla', 'cudnn', 'cudnn_mask', 'tokamax', 'splash']
# Values of the keys of FP8 products for a model without them.
NO_FP8: dict[str, Any] = {
    'matmul_precision': 'default',
    'fp8_scaling': 'current',
    'fp8_kernel': 'xla',
    'fp8_head': False,
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    # Preset for the keys below with default FAMILY (maxlm/config/sections/families.py).
    family: Annotated[str, Choices(tuple(FAMILIES))] = 'gpt2'
    # Number of token ids; 0 = that of the dataset. May be larger than the dataset's, e.g. a round number.
    vocab_size: Annotated[int, Range(0, INT32)] = 0
    # Number of decoder blocks.
    num_layers: Annotated[int, Range(1, 1000)] = 0
    # Width of the residual stream.
    dim: Annotated[int, Range(1, 2**20)] = 0
    # Number of query heads.
    num_heads: Annotated[int, Range(1, 2**16)] = 0
    # Number of key/value heads (grouped-query attention); 0 = num_heads.
    num_kv_heads: Annotated[int, Range(0, 2**16)] = 0
    # Width of a head; 0 = dim / num_heads.
    head_dim: Width = 0
    # Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2"): width of the latent from which keys and values of
    # all heads are computed, and which the cache stores; 0 = attention with keys and values per head.
    kv_lora_rank: Width = 0
    # Latent attention: width of the latent from which queries are computed; 0 = queries from the residual stream.
    q_lora_rank: Width = 0
    # Latent attention: dimensions per head of queries and keys without and with rotary positions. The rotated part of a
    # key is the same for all heads.
    qk_nope_head_dim: Width = 0
    qk_rope_head_dim: Width = 0
    # Latent attention: width of a value head, at most qk_nope_head_dim + qk_rope_head_dim.
    v_head_dim: Width = 0
    # Inner width of the feed-forward; 0 = 4 · dim, or for gated activations 8/3 · dim rounded up to a multiple of
    # 128.
    ffn_dim: Annotated[int, Range(0, 2**24)] = 0
    # Number of experts of a mixture-of-experts layer, which replaces the feed-forward (Shazeer et al. 2017); 0 = none.
    # docs/experts.md explains all keys of experts.
    num_experts: Annotated[int, Range(0, 2**14)] = 0
    # Number of experts that process each token.
    num_experts_per_token: Annotated[int, Range(0, 2**14)] = 0
    # Inner width of an expert; 0 = ffn_dim.
    expert_ffn_dim: Annotated[int, Range(0, 2**24)] = 0
    # Number of experts that process every token (DeepSeekMoE), stored as one expert of num_shared_experts times the
    # width.
    num_shared_experts: Annotated[int, Range(0, 2**10)] = 0
    # Number of first layers with a dense feed-forward of width ffn_dim.
    num_dense_layers: Annotated[int, Range(0, 1000)] = 0
    # Score of an expert from its logit. softmax: over the experts; sigmoid: DeepSeek-V3.
    router_score: Literal['softmax', 'sigmoid'] = 'softmax'
    # Divide the scores of the selected experts by their sum.
    router_normalize: bool = True
    # Factor of the experts' output.
    routed_scaling_factor: Annotated[float, Range(0, 1000, above=True)] = 1.0
    # The router's logits have a learned bias (gpt-oss).
    router_use_bias: bool = False
    # The selection of experts adds a bias to their scores that balances their loads without an auxiliary loss
    # (DeepSeek-V3). train.router_bias_rate is its change per step.
    router_balance_bias: bool = False
    # Group-limited routing (DeepSeek-V2): number of equal groups of experts, and number of groups that a token can use.
    num_expert_groups: Annotated[int, Range(1, 10**5)] = 1
    num_groups_per_token: Annotated[int, Range(1, 10**5)] = 1
    # Score of a group. max: DeepSeek-V2; top2: the sum of its two highest scores (DeepSeek-V3).
    expert_group_score: Literal['max', 'top2'] = 'max'
    # 0 = process every token by all of its experts (dropless). Otherwise, in training and evaluation, an expert accepts
    # up to expert_capacity_factor times its balanced share of each sequence (GShard); other tokens skip it.
    expert_capacity_factor: Annotated[float, Range(0, 1000)] = 0.0
    # Matrix products of experts. ragged_dot: XLA; tokamax: GPU; megablox: TPU; loop: over blocks of rows; auto: tokamax
    # on GPUs, megablox on TPUs (ragged_dot with pipeline stages) and loop on CPUs.
    expert_matmul: ExpertMatmul = 'auto'
    # Rows of the learned position table, and the longest context for sampling; 0 = data.seq_len.
    max_positions: Annotated[int, Range(0, INT32)] = 0
    # Position embedding.
    position_embedding: Annotated[Literal['learned', 'rotary'], Renamed('position')] = FAMILY
    # Fraction of each head that is rotated, from its first dimension.
    partial_rotary_factor: Annotated[FractionAbove0, Renamed('rotary_fraction')] = FAMILY
    # Base of the rotary frequencies.
    rope_theta: Annotated[float, Range(1, 1e12), Renamed('rotary_theta')] = FAMILY
    # Base of the rotary frequencies of S layers of the attention pattern, which are then not scaled; 0 = as in L
    # layers.
    rope_local_theta: Annotated[float, Range(1, 1e12, or_zero=True)] = FAMILY
    # Scaling of rotary frequencies for contexts longer than those of the original training.
    rope_scaling: Annotated[
        Literal['none', 'linear', 'dynamic', 'yarn', 'llama3', 'longrope'], Renamed('rotary_scaling')
    ] = 'none'
    # Factor by which the context is extended.
    rope_scaling_factor: Annotated[float, Range(1, 1e5), Renamed('rotary_factor')] = 1.0
    # Context of the original training, used by dynamic, yarn, llama3 and longrope; 0 = max_positions /
    # rope_scaling_factor.
    original_max_positions: Annotated[int, Range(0, INT32), Renamed('rotary_original_positions')] = 0
    # llama3: a frequency with fewer turns within the original context than low_freq_factor is divided by the factor;
    # one with more turns than high_freq_factor is unchanged.
    rope_low_freq_factor: Annotated[float, Range(0, 1e5, above=True), Renamed('rotary_low_turns')] = 1.0
    rope_high_freq_factor: Annotated[float, Range(0, 1e5, above=True), Renamed('rotary_high_turns')] = 4.0
    # yarn: the same two bounds.
    rope_beta_slow: Annotated[float, Range(0, 1e5, above=True), Renamed('rotary_beta_slow')] = 1.0
    rope_beta_fast: Annotated[float, Range(0, 1e5, above=True), Renamed('rotary_beta_fast')] = 32.0
    # yarn: round the bounds outward to integer pair indices.
    rope_truncate: Annotated[bool, Renamed('rotary_truncate')] = True
    # yarn, longrope: factor that multiplies queries and keys; 0 = 0.1 · ln(rope_scaling_factor) + 1, or for longrope
    # sqrt(1 + ln(rope_scaling_factor) / ln(original_max_positions)).
    rope_attention_factor: Annotated[float, Range(0.01, 100, or_zero=True), Renamed('rotary_attention_factor')] = 0.0
    # yarn with latent attention: scores are multiplied by (0.1 · rope_mscale_all_dim · ln(rope_scaling_factor) + 1)²,
    # as DeepSeek's models require.
    rope_mscale_all_dim: Annotated[float, Range(0, 100)] = 0.0
    # longrope: divisors of the frequencies of the rotated pairs, within the original context and beyond it.
    rope_short_factors: tuple = ()
    rope_long_factors: tuple = ()
    # Normalization layer.
    norm: Literal['layernorm', 'rmsnorm'] = FAMILY
    # Added to the variance before the square root.
    norm_epsilon: Epsilon = FAMILY
    # Norms have a learned scale.
    norm_use_scale: Annotated[bool, Renamed('norm_scale')] = FAMILY
    # Norm's scale is stored minus 1: the input is multiplied by 1 + scale.
    norm_unit_offset: bool = FAMILY
    # Norms of a block. pre: of the input of attention and feed-forward; post: of their output.
    norm_placement: Literal['pre', 'post', 'both'] = FAMILY
    # Normalize queries and keys before the rotation.
    qk_norm: bool = FAMILY
    # Dimensions of one norm of queries and keys. projection: all heads together.
    qk_norm_scope: Literal['head', 'projection'] = FAMILY
    # Normalize embeddings before the first block.
    embedding_norm: bool = FAMILY
    # Factor of the embedding; 0 = sqrt(dim).
    embedding_multiplier: Annotated[float, Range(1e-4, 1e5, or_zero=True)] = FAMILY
    # Factor of the outputs of attention and feed-forward before they are added to the residual stream.
    residual_multiplier: Annotated[float, Range(1e-4, 1e5)] = FAMILY
    # Learned factor of the residual stream before each block, initially from 1.15 (first) to 1.05 (last) as in nanochat
    # (Karpathy 2026).
    residual_scale: bool = False
    # Before each block, add a learned multiple of the first block's input, initially from 0.20 to 0.05 (Karpathy 2026).
    embedding_residual: bool = False
    # Add a gated multiple of the previous token's embedding to each embedding; number of channels that the gate reads
    # (Karpathy 2026: 24); 0 = off.
    smear_channels: Annotated[int, Range(0, 2**20)] = 0
    # Before the final norm, subtract a learned multiple of the output of this layer, counted from 0 (Karpathy 2026:
    # num_layers // 2); -1 = off.
    backout_layer: Annotated[int, Range(-1, 999)] = -1
    # Factor of the attention scores q·k; 0 = 1 / sqrt(head_dim).
    attention_multiplier: Annotated[float, Range(1e-4, 1e5, or_zero=True)] = FAMILY
    # Factor of the attention scores beside 1 / sqrt(head_dim), if attention_multiplier is 0 (nanochat: 1.44).
    relative_attention_multiplier: Annotated[float, Range(1e-4, 1e5)] = 1.0
    # Divide the attention scores of layer i by i, counted from 1 (GPT-2 models of Karamcheti et al. 2021, "Mistral").
    attention_scale_by_layer: bool = False
    # Soft-cap attention scores to ±attention_softcap with tanh; 0 = off.
    attention_softcap: Annotated[float, Range(0.1, 1e5, or_zero=True)] = FAMILY
    # Divisor of the logits, before the soft cap.
    logits_scaling: Annotated[float, Range(1e-4, 1e5)] = FAMILY
    # Soft-cap logits to ±logit_softcap with tanh; 0 = off.
    logit_softcap: Annotated[float, Range(0.1, 1e5, or_zero=True)] = FAMILY
    # Activation of the feed-forward. Those with "glu" have a gate; swiglu_oai is clamped, as in gpt-oss.
    activation: Annotated[str, Choices((*PLAIN_ACTIVATIONS, *GATED_ACTIVATIONS))] = FAMILY
    # Biases in the projections of attention and feed-forward, and in LayerNorm.
    use_bias: bool = FAMILY
    # Biases in the projections of queries, keys and values, also if use_bias is false.
    qkv_bias: bool = FAMILY
    # Bias in the output projection of attention, also if use_bias is false.
    out_bias: bool = False
    # Biases in the projections of the feed-forward, also if use_bias is false.
    mlp_bias: bool = False
    # Biases in LayerNorm, also if use_bias is false.
    norm_bias: bool = False
    # Attention and feed-forward read the same input, and their outputs are added together.
    parallel_residual: bool = FAMILY
    # Use the transposed embedding as the output projection.
    tie_embeddings: bool = FAMILY
    # Add a learned logit per head to the denominator of the softmax. The weights of the keys may then sum to less than
    # 1 (OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card").
    attention_sinks: bool = FAMILY
    # Attention per layer, repeated over the layers: L = full context, S = the last sliding_window tokens, N = full
    # context without rotary positions (NoPE).
    attention_pattern: str = FAMILY
    # Number of tokens that an S layer attends to, including the query's own token.
    sliding_window: Annotated[int, Range(0, INT32)] = FAMILY
    # Embeddings of tokens that are added to the values of attention, per layer (Karpathy 2026, nanochat): V = with its
    # own table, N = none. The pattern is repeated over the layers, and its last letter is that of the last layer: NV =
    # every second layer. '' = none.
    value_embedding_pattern: str = ''
    # A gate multiplies value embeddings by a factor per token and key/value head: 3 times the sigmoid of a learned
    # projection of the first value_gate_channels channels of the input of attention. 0 = no gate.
    value_gate_channels: Annotated[int, Range(0, 2**20)] = 0
    # Initialization of the weights (maxlm/model/layers/initializers.py).
    init: Literal['normal', 'small', 'uniform', 'uniform_2026'] = FAMILY
    # normal: standard deviation; residual outputs use it divided by sqrt(2 · num_layers). uniform, uniform_2026:
    # standard deviation of a tied embedding.
    init_std: Epsilon = 0.02
    # Width and number of layers at which the learning rates were tuned. Initial values and learning rates are scaled
    # from there to this model (docs/optimizers.md); 0 = not scaled.
    base_dim: Annotated[int, Range(0, 2**20)] = 0
    base_num_layers: Annotated[int, Range(0, 999)] = 0
    # Dropout probability, after the embedding and at the end of each residual branch.
    dropout: FractionBelow1 = 0.0
    # Compute dtype; float16 has a loss scale. Parameters are always float32.
    dtype: Dtype = 'bfloat16'
    # Matrix products of the blocks' projections. default: in the compute dtype; fp8: 8-bit floats in forward and
    # backward pass (maxlm/model/fp8/products.py); mxfp8: the same with a scale for each 32 elements
    # (maxlm/model/fp8/mxfp8.py), which has not been measured. fp8 needs Ada, Hopper or newer GPUs, mxfp8 Blackwell;
    # CPUs emulate both slowly.
    matmul_precision: Annotated[MatmulPrecision, Renamed('matmul')] = 'default'
    # Scales of fp8 products. current: from the array itself; delayed: from the largest elements of the last
    # fp8_history steps, in training only (docs/performance.md).
    fp8_scaling: Literal['current', 'delayed'] = 'current'
    # Rounding of the arrays of products with fp8_scaling=delayed. pallas: a GPU kernel reads an array once and writes
    # both copies that cuBLAS needs, and the largest element (maxlm/model/fp8/rounding_kernel.py), which has not
    # been measured.
    fp8_kernel: PallasKernel = 'xla'
    # Number of steps whose largest elements determine the scales of fp8_scaling=delayed.
    fp8_history: Annotated[int, Range(1, 1024)] = 16
    # Also use fp8 for the products of the head and their gradients, in the training loss only.
    fp8_head: bool = False
    # Storage of the blocks' kernels. float: float32; others: as written by maxlm quantize
    # (maxlm/model/layers/weight_only_quantization.py). Training with them requires lora_rank and quantizes the kernels
    # of train.init_from (Dettmers et al. 2023, "QLoRA").
    weight_quantization: Annotated[str, Choices(('float', *QUANTIZATION_GROUPS)), Renamed('weights')] = 'float'
    # Number of inputs of a projection that share a scale; 0 = all, and in training 32 for int4.
    quantization_group_size: Annotated[int, Range(0, 2**24), Renamed('weights_group')] = 0
    # Inference on a CPU: int8 rounds the inputs of quantized kernels to 8 bits (maxlm/model/layers/rounded_inputs.py).
    # The options --quantize=w8a8 and w4a8 set it.
    activation_quantization: Literal['none', 'int8'] = 'none'
    # Activations of a block kept for the backward pass. none: no rematerialization, keep all; full: keep only the
    # block's inputs; offload: keep only the inputs, in host memory.
    remat_policy: Annotated[RematPolicy, Renamed('remat')] = 'none'
    # Scan over one compiled block (compile time independent of depth) instead of unrolling all blocks.
    scan_layers: bool = True
    # Rank of low-rank adapters (Hu et al. 2022, "LoRA"). With adapters, only they are trained by default; 0 = none.
    lora_rank: Annotated[int, Range(0, 2**16)] = 0
    # The adapters' output is multiplied by lora_alpha / lora_rank.
    lora_alpha: Annotated[float, Range(0, 1e5, above=True)] = 16.0
    # Patterns of the blocks' projections that have adapters: ('attention.*',), ('*.query', '*.value').
    lora_target_modules: Annotated[tuple, Renamed('lora_targets')] = ('*',)
    # Number of additional tokens that the model learns to predict, each with a module of one block (DeepSeek-AI 2024,
    # "DeepSeek-V3"); the weight of their loss is train.mtp_loss_weight. Inference does not load the modules. 0 = none.
    mtp_depth: Annotated[int, Range(0, 16)] = 0
    # Reward model: a projection with one output, the score of a conversation, replaces the head of the vocabulary, like
    # the classes ForSequenceClassification of Transformers. train.objective=reward sets it.
    reward_head: bool = False
    # Value head of PPO: a projection with one output beside the head of the vocabulary, which only training uses.
    # grpo.advantage_estimator=gae sets it, and other runs have none.
    value_head: bool = False
    # Class of your own for the blocks, a subclass of maxlm.model.blocks.Block; '' = that class itself. Every command
    # that reads the model imports it.
    block: Literal[''] | FunctionName = ''
    # Attention kernel. cudnn: GPU; cudnn_mask: GPU, documents as a mask instead of a list; tokamax: GPU from Hopper on,
    # skips keys of other documents and before the window; splash: TPU; auto: cudnn (cudnn_mask with
    # train.deterministic) or splash if supported, otherwise xla; fastest: the fastest of these with right results,
    # timed when the run starts (docs/performance.md).
    attention: AttentionKernel = 'auto'
    # Norms of the residual stream. pallas: a GPU kernel adds the branch to the stream and normalizes the sum, and
    # another one computes the gradients (maxlm/model/layers/norm_kernels.py). It has not been measured on a GPU yet.
    norm_kernel: PallasKernel = 'xla'

    @property
    def value_dim(self) -> int:
        """Returns the width of a value head of a resolved model."""
        return self.v_head_dim if self.kv_lora_rank else self.head_dim

    @property
    def num_outputs(self) -> int:
        """Returns the number of outputs of the head of a resolved model."""
        return 1 if self.reward_head else self.vocab_size

    @property
    def layer_period(self) -> int:
        """Returns the number of layers after which the patterns of layers repeat."""
        return math.lcm(len(self.attention_pattern), len(self.value_embedding_pattern) or 1)

    @property
    def projections(self) -> tuple[str, ...]:
        """Returns the dotted names, within a block, of the projections that can have LoRA adapters (Hu et al. 2022)."""
        modules = ['feedforward'] if self.num_dense_layers or not self.num_experts else []
        modules += ['feedforward.experts'] if self.num_experts else []
        modules += ['feedforward.shared'] if self.num_shared_experts else []
        names = ('gate', 'up', 'down') if self.activation in GATED_ACTIVATIONS else ('up', 'down')
        of_attention = ['query', 'key', 'value', 'out']
        if self.kv_lora_rank:
            of_attention = [*(['query_latent'] if self.q_lora_rank else []), 'key_value_latent', *of_attention]
        attention = tuple(f'attention.{name}' for name in of_attention)
        return (*attention, *(f'{module}.{name}' for module in modules for name in names))

    def has_bias(self, part: str) -> bool:
        """Returns True if a part of a resolved model has biases: `qkv`, `out` (of attention), `mlp` or `norm`."""
        parts = {'qkv': self.qkv_bias, 'out': self.out_bias, 'mlp': self.mlp_bias, 'norm': self.norm_bias}
        return bool(self.use_bias or parts[part])
