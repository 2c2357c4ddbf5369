"""Read the rows of a Parquet file, a part of a row group at a time; beside hpcrl.traj.parquet the owner of pyarrow.

iterate_parquet  iterate over the rows as dicts
"""

from collections.abc import Iterator
from typing import Any

from hpcrl.errors import ConfigError

ROWS_PER_BATCH = 256


def iterate_parquet(path: str, *, what: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file; raises ConfigError if it is not Parquet, or pyarrow is missing."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError(
            f"{what} = {path!r} needs the package pyarrow: pip install 'hpcrl[export]', or give JSON lines"
        ) from error
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS_PER_BATCH):
                yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise ConfigError(f"{what} = {path!r} cannot be read as Parquet: {error}") from error
