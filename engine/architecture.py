"""The one model family: which numbers tell its members apart, and which tensors each must have. Pure."""

from dataclasses import dataclass
from pathlib import Path

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""All are the same decoder; qwen2 adds biases to q, k and v, qwen3 norms on the heads of q and k."""


class UnsupportedModel(ValueError):
    """The checkpoint is not of the family, or is damaged; the message names what and where."""


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's rope scaling: long wavelengths divided by `factor`, short ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class Architecture:
    """Everything about a model but its weights. Lengths in elements unless they say tokens."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context_tokens: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    """From a configuration file. A GGUF file has the same thing as a tensor instead, see `rope_factors`."""
    rope_factors: bool
    """True if the checkpoint has ROPE_FACTORS, by which each rotary frequency is divided."""
    tied: bool
    """True if the output matrix is the embedding matrix."""
    qkv_bias: bool
    qk_norm: bool

    def __post_init__(self) -> None:
        counts = (self.layers, self.hidden, self.heads, self.kv_heads, self.head_dim, self.intermediate)
        if min(*counts, self.vocab) < 1:
            raise UnsupportedModel(f"every extent of a model must be positive: {self}")
        if self.context_tokens < 2:
            raise UnsupportedModel(
                f"the model's context (max_position_embeddings; context_length in GGUF) is {self.context_tokens} "
                "token, but a prompt and an answer need one each"
            )
        if self.heads % self.kv_heads:
            raise UnsupportedModel(f"{self.heads} query heads do not divide among {self.kv_heads} KV heads")
        if self.head_dim % 2:
            raise UnsupportedModel(f"rotary positions need an even head size, not {self.head_dim}")

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors that a checkpoint must have, by Hugging Face's names; matrices are [out, in]."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {EMBED: (self.vocab, self.hidden), FINAL_NORM: (self.hidden,)}
        if not self.tied:
            shapes[HEAD] = (self.vocab, self.hidden)
        if self.rope_factors:
            shapes[ROPE_FACTORS] = (self.head_dim // 2,)
        of_layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (self.hidden,),
            "self_attn.q_proj.weight": (queries, self.hidden),
            "self_attn.k_proj.weight": (keys, self.hidden),
            "self_attn.v_proj.weight": (keys, self.hidden),
            "self_attn.o_proj.weight": (self.hidden, queries),
            "post_attention_layernorm.weight": (self.hidden,),
            "mlp.gate_proj.weight": (self.intermediate, self.hidden),
            "mlp.up_proj.weight": (self.intermediate, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.intermediate),
        }
        if self.qkv_bias:
            of_layer |= {
                "self_attn.q_proj.bias": (queries,),
                "self_attn.k_proj.bias": (keys,),
                "self_attn.v_proj.bias": (keys,),
            }
        if self.qk_norm:
            of_layer |= {
                "self_attn.q_norm.weight": (self.head_dim,),
                "self_attn.k_norm.weight": (self.head_dim,),
            }
        for layer in range(self.layers):
            shapes |= {layer_tensor(layer, name): shape for name, shape in of_layer.items()}
        return shapes


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies on disk: `bytes` bytes at `offset` of `path`, which calls it `name`."""

    path: Path
    name: str
    shape: tuple[int, ...]
    """Outermost first, as in torch, in elements even where they are quantised."""
    type: str
    """As the format names it: `Q4_1`, `BF16`."""
    offset: int
    bytes: int


EMBED = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
ROPE_FACTORS = "rope_factors"


def layer_tensor(layer: int, name: str) -> str:
    """The full name of a layer's tensor."""
    return f"model.layers.{layer}.{name}"
