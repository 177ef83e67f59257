"""What a model can do on data that it was not trained on, measured without a trace in the training run."""

from fastlm.evaluation.generation import (
    GenerationEvaluation,
    exact_match,
    generate,
    json_valid,
    pattern_equal,
    pattern_found,
)
from fastlm.evaluation.harness import harness_model
from fastlm.evaluation.held_out import HeldOut, held_out
from fastlm.evaluation.state import LeaveNoTrace, undisturbed

__all__ = [
    "GenerationEvaluation",
    "HeldOut",
    "LeaveNoTrace",
    "exact_match",
    "generate",
    "harness_model",
    "held_out",
    "json_valid",
    "pattern_equal",
    "pattern_found",
    "undisturbed",
]
