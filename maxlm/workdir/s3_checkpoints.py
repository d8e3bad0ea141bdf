"""Makes Orbax write and read checkpoints at s3://bucket/… in the same way as at gs://bucket/….

Orbax 0.12 reads its commit markers and selects TensorStore's driver only for gs:// paths. TensorStore has a driver for
S3: https://google.github.io/tensorstore/kvstore/s3/index.html. `enable` extends these places to s3://.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from maxlm.errors import InputError

PREFIX = 's3://'


def enable() -> None:
    """Extends Orbax to s3:// paths in this process. Further calls have no effect.

    Raises:
        InputError: the installed Orbax selects its drivers elsewhere.
    """
    try:
        # Slow to import, and only needed for S3.
        paths: Any = importlib.import_module('orbax.checkpoint._src.path.gcs_utils')
        arrays: Any = importlib.import_module('orbax.checkpoint._src.serialization.tensorstore_utils')
        prefixes, spec_for_gcs = paths._GCS_PATH_PREFIX, paths.get_kvstore_for_gcs
        uses_driver, normalize = arrays._use_gcs_driver, arrays._normalize_path
    except (ImportError, AttributeError) as error:
        raise InputError(
            f's3://: this version of Orbax is not supported ({error}); install orbax-checkpoint 0.12.8'
        ) from error
    if PREFIX in prefixes:
        return

    def kvstore_spec(path: str) -> dict[str, Any]:
        return s3_kvstore_spec(path) if path.startswith(PREFIX) else spec_for_gcs(path)

    paths._GCS_PATH_PREFIX = (*prefixes, PREFIX)
    paths.get_kvstore_for_gcs = kvstore_spec
    arrays._use_gcs_driver = lambda path: path.startswith(PREFIX) or uses_driver(path)
    # Normalization of a path merges the slashes of its protocol.
    arrays._normalize_path = lambda path: normalize(path).replace('s3:/', PREFIX)


def s3_kvstore_spec(url: str) -> dict[str, Any]:
    """Returns TensorStore's spec of an s3:// URL. Reads the region and an own endpoint from the environment."""
    bucket, _, path = url.removeprefix(PREFIX).partition('/')
    spec: dict[str, Any] = {'driver': 's3', 'bucket': bucket, 'path': path}
    # The variables of botocore:
    # https://docs.aws.amazon.com/boto3/latest/guide/configuration.html#using-environment-variables
    if endpoint := os.environ.get('AWS_ENDPOINT_URL_S3') or os.environ.get('AWS_ENDPOINT_URL'):
        spec['endpoint'] = endpoint
        # Otherwise TensorStore asks the endpoint, and not every service answers.
        spec['aws_region'] = os.environ.get('AWS_REGION') or os.environ.get('AWS_DEFAULT_REGION') or 'us-east-1'
    if 'AWS_ACCESS_KEY_ID' in os.environ:
        # Without this, the client logs errors about missing files of profiles.
        spec['aws_credentials'] = {'type': 'environment'}
    return spec
