"""Credentials of Google Cloud Storage that a command receives as a file."""

from __future__ import annotations

import os

from maxlm.errors import InputError, os_message
from maxlm.storage.json_text import parse_json
from maxlm.storage.regular_files import read_text

# All libraries that open gs:// URLs read it: gcsfs, TensorStore and google-auth.
VARIABLE = 'GOOGLE_APPLICATION_CREDENTIALS'


def use_credentials(path: str) -> None:
    """Uses a key file for all gs:// URLs of this process and of the processes that it starts.

    Raises:
        InputError: the file cannot be read, or is not a key file. Its content is never part of the message.
    """
    try:
        content = parse_json(read_text(path))
    except OSError as error:
        raise InputError(f'--gcs-credentials={path}: {os_message(error)}; give the key file of an account') from error
    except ValueError:
        content = None
    if not isinstance(content, dict) or not isinstance(content.get('type'), str):
        raise InputError(
            f'--gcs-credentials={path}: is not a key file of Google Cloud, which is JSON with the field "type"; create '
            'one with `gcloud iam service-accounts keys create FILE --iam-account=ACCOUNT`'
        )
    os.environ[VARIABLE] = os.path.abspath(path)
