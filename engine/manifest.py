"""What a model on disk makes of a cluster: the manifest that all its members must share."""

from dataclasses import dataclass

from engine.checkpoint import Checkpoint, open_checkpoint
from engine.config import ModelSettings
from engine.fetch import model_name, resolve_model
from engine.tokenizer import Tokenizer, open_tokenizer
from protocol.blocks import BlockLayout
from protocol.cluster import Manifest


def manifest_of(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    *,
    model: str,
    dtype: str,
    block_tokens: int,
    kv_compression: str = "none",
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
            compression=kv_compression,
        ),
    )


@dataclass(frozen=True)
class Model:
    """A model on disk, opened but not loaded: no weights are in memory."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    manifest: Manifest


def open_model(settings: ModelSettings) -> Model:
    """Find the model, fetched at need if it is the default one, and open it.

    Raises ModelNotFound, UnsupportedModel or ValueError, each with a sentence for a person.
    """
    path = resolve_model(settings.model or None)
    checkpoint, tokenizer = open_checkpoint(path), open_tokenizer(path)
    manifest = manifest_of(
        checkpoint,
        tokenizer,
        model=settings.model_name or model_name(settings.model or path),
        dtype=settings.dtype,
        block_tokens=settings.block_tokens,
        kv_compression=settings.kv_compression,
        context_tokens=settings.context_tokens,
    )
    return Model(checkpoint, tokenizer, manifest)
