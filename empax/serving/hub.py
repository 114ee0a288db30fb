"""Upload of exported folders to the Hugging Face Hub, or to the endpoint that HF_ENDPOINT names."""

from __future__ import annotations

import os
from pathlib import Path

from empax.core.config import ConfigError


def check_name(name: str) -> None:
    """Raises ConfigError unless `name` is a valid name of a Hub repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(
            f"--push={name} is not the name of a repository ({error}); write --push=USER/NAME."
        ) from error


def push(folder: Path, name: str) -> str:
    """Uploads an exported folder and returns its URL. Creates a private repository if none exists.

    Its name is "USER/NAME", or "NAME" for the logged-in user.

    Raises:
      ConfigError: the Hub refuses it, or cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    unreachable: type[Exception] = HfHubHTTPError.__bases__[0]  # from the underlying HTTP library, httpx or httpx2
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
    try:
        made = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message="Export from empax")
    except (OSError, unreachable) as error:  # errors of the Hub's client are OSErrors
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"--push={name}: {said[0]} The exported files stay in {folder}. Log in with `hf auth login` or set "
            "HF_TOKEN."
        ) from error
    return str(made)
