"""From a person's data to a training set: `load` reads it, `preview` shows what the model will see,
`batch_by_tokens` packs it."""

from fastlm.data.batches import batch_by_tokens
from fastlm.data.loading import load
from fastlm.data.previews import Preview, preview

__all__ = ["Preview", "batch_by_tokens", "load", "preview"]
