"""From `--model` to a folder: what both a router (tokenizer, chat template) and a node (weights) start from.

Must not know: what is in the files.
"""

from __future__ import annotations

import json
from pathlib import Path

from foundation.errors import ConfigurationError, SetupError

SETTING = "--model"


def resolve_model_folder(model: str, revision: str | None) -> Path:
    """The folder itself, or a snapshot of a Hugging Face hub repository, downloaded if its cache lacks it.

    Raises ConfigurationError when there is no such folder or no readable config.json in it, SetupError when the hub
    cannot be reached.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ConfigurationError("--revision", f"names a version on a model hub, but {model} is a folder")
    elif _looks_like_a_path(model):
        raise ConfigurationError(SETTING, f"there is no folder {model}")
    else:
        folder = _download(model, revision)
    _check_config_file(folder)
    return folder.resolve()


def served_model_name(model: str, served_as: str | None) -> str:
    """The id that clients use: what the operator says, else a folder's own name, else the hub id as it is."""
    if served_as is not None:
        return served_as
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() or _looks_like_a_path(model) else model


def _looks_like_a_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.count("/") != 1


def _check_config_file(folder: Path) -> None:
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(SETTING, f"{folder} is no Hugging Face model folder: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(SETTING, f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigurationError(SETTING, f"{path} must hold a JSON object")


def _download(model: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download  # heavy, and needed only for hub ids
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ModuleNotFoundError:  # a router's image
        raise SetupError(
            f"{SETTING}: {model!r} is no folder here, and without huggingface-hub only folders work"
        ) from None
    wanted = ["*.safetensors", "*.json", "*.jinja", "*.model"]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=wanted))
    except HFValidationError as error:
        raise ConfigurationError(SETTING, f"{model!r} is neither a folder nor a hub id: {error}") from None
    except HfHubHTTPError as error:
        raise ConfigurationError(SETTING, f"the hub does not give {model!r}: {str(error).splitlines()[0]}") from None
    except (LocalEntryNotFoundError, OSError) as error:
        why = str(error).splitlines()[0]
        raise SetupError(f"{SETTING}: {model!r} is no folder here, and the hub cannot be reached ({why})") from None
