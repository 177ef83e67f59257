"""From a person's data to a training set: `load` reads it, `preview` shows what the model will see."""

from fastlm.data.loading import load

__all__ = ["load"]
