"""What a model on disk makes of a cluster: the manifest that all its members must share."""

from engine.checkpoint import Checkpoint
from engine.tokenizer import Tokenizer
from protocol.blocks import BlockLayout
from protocol.cluster import Manifest


def manifest_of(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    *,
    model: str,
    dtype: str,
    block_tokens: int,
    context_tokens: int = 0,
) -> Manifest:
    """The manifest of `checkpoint` served as `model`. `context_tokens` 0 takes the model's own.

    Raises ValueError when the context asked for is longer than the model's, or an extent makes no sense.
    """
    architecture = checkpoint.architecture
    if context_tokens > architecture.context_tokens:
        raise ValueError(
            f"context_tokens is {context_tokens}, but the model was made for {architecture.context_tokens}"
        )
    return Manifest(
        model=model,
        model_digest=checkpoint.digest(),
        tokenizer_digest=tokenizer.digest(),
        context_tokens=context_tokens or architecture.context_tokens,
        layout=BlockLayout(
            layers=architecture.layers,
            kv_heads=architecture.kv_heads,
            head_dim=architecture.head_dim,
            block_tokens=block_tokens,
            kv_type=dtype,
        ),
    )
