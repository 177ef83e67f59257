"""Chat data: templates for tokenizers, labels on the answers only, tables and ShareGPT rows as role and content."""

from fastlm.chat_templates.merging import to_sharegpt
from fastlm.chat_templates.responses import train_on_responses_only
from fastlm.chat_templates.sharegpt import standardize_data_formats, standardize_sharegpt
from fastlm.chat_templates.templates import get_chat_template

__all__ = [
    "get_chat_template",
    "standardize_data_formats",
    "standardize_sharegpt",
    "to_sharegpt",
    "train_on_responses_only",
]
