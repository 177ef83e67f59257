"""Uploads to a hub: what would be saved in a folder is saved in a temporary one and uploaded, again where the connection fails.

The token goes to the hub's client alone: no file, no log line and no error of this module holds it.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import HfApi

# the base of all that its HTTP client raises, which is not the same client in all releases
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from huggingface_hub.utils import validate_repo_id

from fastlm.export.folders import staging
from fastlm.export.merge import _base_model, save_pretrained_merged
from fastlm.export.sources import save_tokenizer

logger = logging.getLogger(__name__)

# seconds before the second attempt, the third, …
_WAITS = (1.0, 4.0, 15.0, 60.0)
# besides 5xx: request timeout, too many requests
_PASSING = (408, 429)
_T = TypeVar("_T")


def push_to_hub_merged(
    model: Any,
    repo_id: str,
    tokenizer: Any = None,
    save_method: str = "merged_16bit",
    *,
    token: str | bool | None = None,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    create_pr: bool = False,
    **saving: Any,
) -> str:
    """Save as `save_pretrained_merged` does, into a temporary folder, and upload that.

    Args:
        model, tokenizer, save_method: as in `save_pretrained_merged`.
        repo_id: "name/repository", or the repository's name alone; made if it is not there.
        token: of the hub; None is the one that was logged in with.
        private, revision, commit_message, create_pr: as in huggingface_hub.
        **saving: further arguments of `save_pretrained_merged`.

    Returns:
        The address of the commit.

    Raises:
        ValueError, TypeError, RuntimeError: as `save_pretrained_merged`; a bad `repo_id`.
        HfHubHTTPError, or an error of its HTTP client: if the hub refuses, or cannot be reached five times.
    """
    return upload(
        lambda folder: save_pretrained_merged(model, folder, tokenizer, save_method, **saving),
        repo_id,
        token,
        private,
        revision,
        commit_message or f"{save_method} by fastlm",
        create_pr,
    )


def push_to_hub(
    model: Any,
    repo_id: str,
    tokenizer: Any = None,
    *,
    token: str | bool | None = None,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    create_pr: bool = False,
    **saving: Any,
) -> str:
    """Upload what the model's own `save_pretrained` writes: its adapters, or the whole model where it has none.

    Args and Raises: as `push_to_hub_merged`; `**saving` goes to `save_pretrained`.

    Returns:
        The address of the commit.
    """

    def save(folder: Path) -> None:
        with staging(folder) as inside:
            model.save_pretrained(inside, **saving)
            embeddings: Any = _base_model(model).get_input_embeddings()
            save_tokenizer(tokenizer, inside, embeddings.weight.shape[0])

    return upload(save, repo_id, token, private, revision, commit_message or "Upload by fastlm", create_pr)


def upload(
    save: Callable[[Path], None],
    repo_id: str,
    token: str | bool | None,
    private: bool | None,
    revision: str | None,
    commit_message: str,
    create_pr: bool,
) -> str:
    """Upload what `save` writes into a folder. Returns the address of the commit; the rest as in `push_to_hub_merged`."""
    validate_repo_id(repo_id)
    api = HfApi(token=token)
    # before the work of saving: a token that may not write is an error at once
    made = persistently(f"making {repo_id}", lambda: api.create_repo(repo_id, private=private, exist_ok=True))
    with tempfile.TemporaryDirectory(prefix="fastlm-") as scratch:
        folder = Path(scratch, "upload")
        save(folder)
        commit = persistently(
            f"uploading to {made.repo_id}",
            lambda: api.upload_folder(
                repo_id=made.repo_id,
                folder_path=folder,
                revision=revision,
                commit_message=commit_message,
                create_pr=create_pr,
            ),
        )
    return str(commit.commit_url)


def persistently(what: str, call: Callable[[], _T]) -> _T:
    """The result of a call of the hub, tried again while the connection or the hub's side of it fails.

    Raises:
        HfHubHTTPError, or an error of its HTTP client: after the last attempt, and at once where another attempt would be refused too.
    """
    for wait in _WAITS:
        try:
            return call()
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status < 500 and status not in _PASSING:
                raise
            reason = f"status {status}"
        except HTTPError as error:
            reason = type(error).__name__
        logger.warning("%s failed (%s): once more in %g seconds", what, reason, wait)
        time.sleep(wait)
    return call()
