"""From a person's data to a training set: `load` reads it, `preview` shows what the model will see."""

from fastlm.data.loading import load
from fastlm.data.previews import Preview, preview

__all__ = ["Preview", "load", "preview"]
